"""Compares SGLang's and FlashInfer's CUTLASS kernels with ours in one process, in microseconds.

    python benchmarks/h200_cutlass.py [--models qwen3-30b,...] [--tokens 1,8,32,128,512,2048]
                                      [--peers sglang,flashinfer]

SGLang (PyPI `sglang-kernel`; version 0.4.4 loads in torch 2.11) has products of int4 weights, in groups of
128, and fp8 rows. FlashInfer (PyPI `flashinfer-python`) has the whole block, with mxfp4 weights and fp8 or
bfloat16 rows; it compiles its kernels first, which takes minutes. Both need K as a multiple of 128, so 2880
is padded to 2944 for them. SGLang's rows share one scale, and each of our rows has its own; both are computed
beforehand. FlashInfer quantises rows inside the block, as we do. Its time is measured with the fastest of its
tactics for each product; it has two lists of them.

Method and models are those of h200_hopper.py: CUDA-graph replays, and every launch has another routing. Each
kernel is first compared with float32 over the dequantised weights. For SGLang's products, the reference uses
SGLang's rounded rows.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import record
import torch
import torch.nn.functional as F
from h200_hopper import MODELS, ROUTINGS, Model, captured, median_us, replay_us, routing
from torch import Tensor

from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime.oracle import relative_error

K_MULTIPLE = 128
PEERS = ("sglang", "flashinfer")
TUNING_LAUNCHES = 3
FP8_LAYOUTS = {"int4": "sm90_int4", "mxfp4": "sm90"}

Packed = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Plain:
    """Random weights [E, N, K] in layout `plain`."""

    format: str
    codes: Tensor
    scales: Tensor

    @classmethod
    def random(cls, format: str, experts: int, n: int, k: int) -> Plain:
        """Makes values of about K^-1/2, with scales that every layout here can hold exactly."""
        blocks = FORMATS[format].num_blocks(k)
        codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
        if format == "mxfp4":
            exponents = torch.randint(118, 121, (experts, n, blocks), dtype=torch.uint8, device="cuda")
            return cls(format, codes, exponents.view(torch.float8_e8m0fnu))
        scales = (0.5 + torch.rand(experts, n, blocks, device="cuda")) / (5 * k**0.5)
        return cls(format, codes, scales.bfloat16())

    def prepacked(self, layout: str) -> Packed:
        return torch.ops.fp4.prepack(self.codes, self.scales, None, self.format, layout)

    def dense(self, expert: int) -> Tensor:
        """Returns the weight [N, K] of one expert in float32."""
        one = self.codes[expert], self.scales[expert]
        return torch.ops.fp4.dequantize(*one, None, self.format, torch.float32)


def our_product(a: Tensor, a_scale: Tensor, packed: Packed, offs: Tensor, format: str) -> Tensor:
    return torch.ops.fp4.grouped_mm(
        a, *packed, offs, a_scale, format=format, layout=FP8_LAYOUTS[format], out_dtype=torch.bfloat16
    )


def our_block(
    x: Tensor, ids: Tensor, scores: Tensor, weights: list[Packed], layout: str, a_format: str
) -> Tensor:
    up, down = weights
    return torch.ops.fp4.moe(
        x, ids, scores, *up, *down, format="mxfp4", layout=layout, activation="silu_interleaved",
        a_format=a_format, out_dtype=torch.bfloat16,
    )  # fmt: skip


def padded(k: int) -> int:
    return -(-k // K_MULTIPLE) * K_MULTIPLE


def check(got: Tensor, want: Tensor, bound: float, what: str) -> None:
    error = relative_error(got, want)
    assert error < bound, f"{what} is off by {error:.1e}, more than {bound:.0e}"


# --- SGLang: products ---


class SglangWeight:
    """int4 codes without change, and bfloat16 scales: [E, K/512, N x 4] if 512 divides K, else [E, K/128,
    N]."""

    def __init__(self, weight: Plain) -> None:
        experts, n, half = weight.codes.shape
        self.experts, self.n, self.k = experts, n, padded(2 * half)
        self.codes = F.pad(weight.codes, (0, self.k // 2 - half)).view(torch.int8)
        together = 4 if self.k % 512 == 0 else 1
        scales = weight.scales.view(experts, n, -1, together)
        self.scales = scales.transpose(1, 2).reshape(experts, -1, n * together).contiguous()
        self.k_strides = torch.full((experts, 3), self.k, dtype=torch.int64, device="cuda")
        self.n_strides = torch.full((experts, 3), self.n, dtype=torch.int64, device="cuda")


class SglangRouting:
    """The start of each expert's rows, and the sizes N, M, K of each expert's product."""

    def __init__(self, w: SglangWeight, offs: Tensor) -> None:
        ends = F.pad(offs, (1, 0))
        self.starts = ends[:-1].contiguous()
        self.sizes = torch.tensor([w.n, 0, w.k], dtype=torch.int32, device="cuda").repeat(w.experts, 1)
        self.sizes[:, 1] = ends.diff()


def sglang_product(w: SglangWeight, rows: Tensor, scale: Tensor, given: SglangRouting, top_k: int) -> Tensor:
    """Multiplies e4m3 rows [M, K], which are sorted by expert and share one scale."""
    import sgl_kernel

    out = torch.empty(len(rows), w.n, dtype=torch.bfloat16, device="cuda")
    sgl_kernel.cutlass_w4a8_moe_mm(
        out, rows, w.codes, scale, w.scales, given.starts, given.sizes,
        w.k_strides, w.k_strides, w.n_strides, w.n_strides, K_MULTIPLE, top_k,
    )  # fmt: skip
    return out


def products(model: Model, n: int, k: int, tokens: list[int]) -> Iterator[record.Row]:
    int4, mxfp4 = (Plain.random(format, model.experts, n, k) for format in ("int4", "mxfp4"))
    theirs = SglangWeight(int4)
    ours = {plain.format: plain.prepacked(FP8_LAYOUTS[plain.format]) for plain in (int4, mxfp4)}
    top_k = max(model.top_k, 1)
    for t in tokens:
        experts = [routing(model, t).flatten().sort().values for _ in range(ROUTINGS)]
        offs = [torch.bincount(e, minlength=model.experts).cumsum(0).int() for e in experts]
        x = torch.randn(t * top_k, k, device="cuda").bfloat16()
        scale = x.abs().amax().float().reshape(1) / torch.finfo(torch.float8_e4m3fn).max
        rounded = (x / scale).to(torch.float8_e4m3fn)
        wide, known = F.pad(rounded, (0, theirs.k - k)), [SglangRouting(theirs, o) for o in offs]

        def sglang(i: int) -> Tensor:
            return sglang_product(theirs, wide, scale, known[i], top_k)  # noqa: B023

        row = {
            "table": "product", "model": model.name, "experts": model.experts, "n": n, "k": k, "tokens": t,
        }  # fmt: skip
        some = torch.randint(0, t * top_k, (4,)).tolist()
        for format, packed in ours.items():
            plain = int4 if format == "int4" else mxfp4
            a, a_scale = torch.ops.fp4.quantize_fp8(x, layout="sm90")

            def grouped(i: int) -> Tensor:
                return our_product(a, a_scale, packed, offs[i], format)  # noqa: B023

            got = grouped(0)
            want = torch.stack([plain.dense(experts[0][r]) @ x[r].float() for r in some])
            check(got[some], want, 8e-2, f"our product of {format}, {t} tokens of {model.name},")
            row[f"{format}_us"] = median_us(grouped)
        want = torch.stack([int4.dense(experts[0][r]) @ rounded[r].float() * scale for r in some])
        check(sglang(0)[some], want, 3e-2, f"SGLang's product, {t} tokens of {model.name},")
        yield {**row, "sglang_us": median_us(sglang)}


# --- FlashInfer: blocks ---


ROWS_OF_UP = slice(1, None, 2), slice(0, None, 2)
"""In our weight, gate and up rows alternate. FlashInfer's first weight has all rows of up, then all rows of
gate."""


def whole(t: Tensor, value: int, per_element: int) -> Tensor:
    """Pads N and K of a tensor [E, N, K / per_element]. N is padded, too, because it is K of the other
    product."""
    missing_n, missing_k = (padded(size) - size for size in (t.shape[1], t.shape[2] * per_element))
    return F.pad(t, (0, missing_k // per_element, 0, missing_n), value=value)


class FlashinferBlock:
    """FlashInfer's block, with both weights of silu-gated experts."""

    def __init__(self, up: Plain, down: Plain, kind: str) -> None:
        from flashinfer import fused_moe

        self.kind, self.hidden = kind, down.codes.shape[1]
        self.tactics = [-1, -1]
        self.weights, self.scales = [], []
        for weight, parts in ((up, ROWS_OF_UP), (down, (slice(None),))):
            codes = torch.cat([whole(weight.codes[:, part], 0, 2) for part in parts], 1)
            exponents = weight.scales.view(torch.uint8)
            exponents = torch.cat([whole(exponents[:, part], 118, 32) for part in parts], 1)
            if kind == "fp8":
                made = [
                    fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(c, e)
                    for c, e in zip(codes.split(16), exponents.split(16))  # it takes 16 bytes a weight
                ]
                packed, scales, factor = (torch.cat(of) for of in zip(*made))
                self.scales += [scales.view(torch.int32), factor * 64]
            else:
                packed = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4")
                scales = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(exponents)
                self.scales.append(scales.view(torch.int32))
            self.weights.append(packed)
        if kind == "fp8":  # the middle argument is a reserved scale
            self.scales.insert(2, torch.ones((), device="cuda"))

    def run(self, x: Tensor, ids: Tensor, scores: Tensor, out: Tensor) -> Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe

        cutlass_fused_moe(
            x, ids, scores, *self.weights, torch.bfloat16, self.scales, output=out, use_w4_group_scaling=True,
            use_wfp4afp8_humming=self.kind == "fp8", profile_ids=self.tactics,
        )  # fmt: skip
        return out[:, : self.hidden]

    def tune(self, run: Callable[[int], Tensor]) -> None:
        """Finds the fastest working tactic of each product. run(i) runs the block with routing i."""
        from flashinfer.fused_moe import core

        with contextlib.suppress(RuntimeError):  # creates the runner, or its first tactic fails
            run(0)
        runners = core.get_cutlass_fused_moe_module("90").MoERunner.runner_dict
        runner = next(made for key, made in runners.items() if key[-1] == (self.kind == "fp8"))
        first, second = runner.get_gemm1_tactic_count(), runner.get_gemm2_tactic_count()
        lists = [range(first), range(first, first + second)]
        able = [[t for t in tactics if self._runs(runner, t)] for tactics in lists]
        self.tactics = [tactics[0] for tactics in able]
        for product, tactics in enumerate(able):
            times = {}
            for tactic in tactics:
                self.tactics[product] = tactic
                try:
                    times[tactic] = replay_us(captured(run, TUNING_LAUNCHES))
                except RuntimeError:  # this tactic does not support these sizes
                    torch.cuda.synchronize()
            if not times:
                raise RuntimeError(f"no tactic of FlashInfer's runs product {product + 1} of this block")
            self.tactics[product] = min(times, key=times.__getitem__)

    @staticmethod
    def _runs(runner: Any, tactic: int) -> bool:
        try:
            return runner.get_tactic_occupancy(tactic) > 0
        except RuntimeError:  # a build without such an option
            return False


def blocks(model: Model, tokens: list[int]) -> Iterator[record.Row]:
    shapes = (2 * model.inter, model.hidden), (model.hidden, model.inter)
    up, down = (Plain.random("mxfp4", model.experts, *shape) for shape in shapes)
    layouts = {"fp8": "sm90", "auto": "sm90", "none": "mma_bf16"}
    ours = {layout: [w.prepacked(layout) for w in (up, down)] for layout in ("sm90", "mma_bf16")}
    theirs = {kind: FlashinferBlock(up, down, kind) for kind in ("fp8", "bf16")}
    for t in tokens:
        x = torch.randn(t, model.hidden, device="cuda").bfloat16()
        wide = F.pad(x, (0, padded(model.hidden) - model.hidden))
        ids = [routing(model, t) for _ in range(ROUTINGS)]
        chosen = [i.int() for i in ids]
        scores = torch.rand(t, ids[0].shape[1], device="cuda")
        out = torch.empty(t, padded(model.hidden), dtype=torch.bfloat16, device="cuda")
        some = torch.randint(0, t, (4,)).tolist()
        want = torch.stack([reference(up, down, x[r], ids[0][r], scores[r]) for r in some])
        row: record.Row = {"table": "block", "model": model.name, "format": "mxfp4", "tokens": t}
        for a_format, layout in layouts.items():

            def moe(i: int) -> Tensor:
                return our_block(x, ids[i], scores, ours[layout], layout, a_format)  # noqa: B023

            bound = 2e-2 if a_format == "none" else 0.1
            check(moe(0)[some], want, bound, f"our block with {a_format}, {t} tokens of {model.name},")
            row[f"{a_format}_us"] = median_us(moe)
        for kind, block in theirs.items():

            def flashinfer(i: int) -> Tensor:
                return block.run(wide, chosen[i], scores, out)  # noqa: B023

            try:
                block.tune(flashinfer)
            except RuntimeError as error:
                print(f"FlashInfer's {kind} block, {t} tokens of {model.name}: {error}")
                continue
            bound = 2e-2 if kind == "bf16" else 0.1
            check(flashinfer(0)[some], want, bound, f"FlashInfer's {kind} block, {t} tokens of {model.name},")
            row[f"flashinfer_{kind}_us"] = median_us(flashinfer)
            row[f"flashinfer_{kind}_tactics"] = ", ".join(map(str, block.tactics))
        yield row


def reference(up: Plain, down: Plain, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Returns one token's output in float32."""
    out = torch.zeros(down.codes.shape[1], device="cuda")
    for expert, score in zip(ids.tolist(), scores.tolist()):
        h = up.dense(expert) @ x.float()
        out += score * (down.dense(expert) @ (F.silu(h[::2]) * h[1::2]))
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--tokens", default="1,8,32,128,512,2048")
    parser.add_argument("--peers", default=",".join(PEERS))


def rows(given: argparse.Namespace) -> Iterator[record.Row]:
    tokens = [int(t) for t in given.tokens.split(",")]
    models = [m for m in MODELS if m.name in given.models.split(",")]
    if "sglang" in given.peers.split(","):
        for model in models:
            yield from products(model, 2 * model.inter, model.hidden, tokens)
            yield from products(model, model.hidden, model.inter, tokens)
            torch.cuda.empty_cache()
    if "flashinfer" in given.peers.split(","):
        for model in models:
            yield from blocks(model, tokens)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
