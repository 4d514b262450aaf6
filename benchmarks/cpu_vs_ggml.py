"""Compares fp4::grouped_mm with ggml's ggml_mul_mat_id on this CPU, in one process, with alternating calls.

    pip install ggml-python==0.0.45        (a source build of a few minutes, for the machine at hand)
    python benchmarks/cpu_vs_ggml.py [--threads 1 2] [--tokens 1 64 512] [--blocks 11]

Both multiply float32 activations [tokens, 2048] with the same 8 experts of [2048, 2048]. The times include
the quantisation of activations to int8 (ours by fp4::quantize_int8). Both use the same routing: with 64
tokens, token i has expert i // 8; a single token has one expert, a different one at each call. Weights are
either `cached` (one set of 8 experts, which may fit into a large L3) or `streamed` (each call uses the next
of several sets, like the layers of a model). With one token, memory bandwidth matters most. There are then so
many sets that all their experts, used in turn, are 1.5 times as large as the largest cache. With more tokens
there are `--sets` sets.

ggml runs each of its comparable 4-bit types: MXFP4 (with our own codes, so that the values are equal) and
Q4_0, both plain and in its repacked buffer type, and NVFP4 (up to 64 tokens, because it is by far the
slowest). The ratio is relative to the fastest of them.

Then `fp4::moe` runs whole blocks without a peer: one token with 2 of 8 experts (hidden and intermediate size
2048), different ones at each call. The weights are 1.5 times as large as the largest cache. Its bytes per
second are printed beside those of plain reads from memory.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import ggml
import record
import torch
from cpu_machine import bandwidth, last_cache_bytes

import fp4_ops  # noqa: F401  loads the operators

fp4 = torch.ops.fp4
EXPERTS, N, K = 8, 2048, 2048
INTER, TOP_K = 2048, 2
PEERS = (("mxfp4", False), ("mxfp4", True), ("q4_0", False), ("q4_0", True), ("nvfp4", False))
"""(ggml type, repacked)."""
TYPES = {"mxfp4": ggml.GGML_TYPE_MXFP4, "q4_0": ggml.GGML_TYPE_Q4_0, "nvfp4": ggml.GGML_TYPE_NVFP4}


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def quiet(level, text, data) -> None:
    """Drops ggml's log, which would name every tensor that it repacks."""


def library(part: str) -> ctypes.CDLL:
    """Loads one of ggml's shared libraries, for functions that its bindings leave out."""
    return ctypes.CDLL(str(Path(ggml.__file__).parent / "lib" / f"libggml-{part}.so"))


def routing(tokens: int, turn: int, sets: int) -> list[int]:
    """Returns the expert of each token, in rising order. With one token, the calls use every expert of every
    set in turn."""
    if tokens == 1:
        return [(turn * 3 + turn // sets) % EXPERTS]
    return [i * EXPERTS // tokens for i in range(tokens)]


def enough_sets(set_bytes: int) -> int:
    """Returns the number of sets of weights that are together 1.5 times as large as the largest cache."""
    return math.ceil(1.5 * last_cache_bytes() / set_bytes)


class Ggml:
    """Runs one mul_mat_id graph for each set of weights."""

    def __init__(self, kind: str, repacked: bool, tokens: int, sets: int, weights, threads: int) -> None:
        self.name = f"ggml {kind}{' repacked' if repacked else ''}"
        cpu = library("cpu")
        for function in (cpu.ggml_backend_cpu_reg, cpu.ggml_backend_cpu_init):
            function.restype = ctypes.c_void_p
        registry = cpu.ggml_backend_cpu_reg()
        self.backend = cpu.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, threads)
        plain = ggml.ggml_backend_get_default_buffer_type(self.backend)
        self.buffer_type = self._repack_type(registry) if repacked else plain
        self.tokens, self.count, self.keep = tokens, sets, []
        self.rows = self._context()
        ggml_type = TYPES[kind]
        self.x = ggml.ggml_new_tensor_3d(self.rows, ggml.GGML_TYPE_F32, K, 1, tokens)
        self.ids = ggml.ggml_new_tensor_2d(self.rows, ggml.GGML_TYPE_I32, 1, tokens)
        self.outputs, self.graphs, stacks = [], [], []
        for _ in range(sets):
            context = self._context()
            stack = ggml.ggml_new_tensor_3d(context, ggml_type, K, N, EXPERTS)
            self._allocate(context, self.buffer_type)
            self.outputs.append(ggml.ggml_mul_mat_id(self.rows, stack, self.x, self.ids))
            stacks.append(stack)
        self._allocate(self.rows, plain)
        for stack, output in zip(stacks, self.outputs):
            data = weights(kind)
            ggml.ggml_backend_tensor_set(stack, data.data_ptr(), 0, data.numel())
            graph = ggml.ggml_new_graph(self.rows)
            ggml.ggml_build_forward_expand(graph, output)
            self.graphs.append(graph)

    def _context(self):
        self.keep.append(
            ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 22, mem_buffer=None, no_alloc=True))
        )
        return self.keep[-1]

    @staticmethod
    def _allocate(context, buffer_type) -> None:
        if not ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type):
            raise MemoryError("ggml could not allocate")

    @staticmethod
    def _repack_type(registry: int):
        """Finds the repacked buffer type in the same way as llama.cpp."""
        address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        device = ggml.ggml_backend_reg_dev_get(registry, 0)
        found = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        for buffer_type in itertools.takewhile(bool, found):
            if b"REPACK" in ggml.ggml_backend_buft_name(buffer_type):
                return buffer_type
        raise LookupError("this build of ggml has no repacked buffer type")

    def set_input(self, x: torch.Tensor) -> None:
        ggml.ggml_backend_tensor_set(self.x, x.data_ptr(), 0, x.numel() * 4)

    def __call__(self, turn: int) -> None:
        ids = (ctypes.c_int32 * self.tokens)(*routing(self.tokens, turn, self.count))
        ctypes.memmove(ggml.ggml_get_data(self.ids), ids, ctypes.sizeof(ids))
        ggml.ggml_backend_graph_compute(self.backend, self.graphs[turn % len(self.graphs)])

    def output(self, turn: int) -> torch.Tensor:
        out = torch.empty(self.tokens, N)
        ggml.ggml_backend_tensor_get(
            self.outputs[turn % len(self.outputs)], out.data_ptr(), 0, out.numel() * 4
        )
        return out


class Ours:
    def __init__(
        self, format: str, layout: str, tokens: int, sets: int, quantized, int8: bool = True
    ) -> None:
        self.name, self.tokens, self.int8 = f"fp4_ops {format}", tokens, int8
        self.sets = [fp4.prepack(*quantized, format, layout) for _ in range(sets)]
        self.options = {"format": format, "layout": layout}
        # As in ggml, the routing is ready before the call.
        self.count = sets
        self.offs = []
        for turn in range(EXPERTS * sets):
            experts = torch.tensor(routing(tokens, turn, sets))
            self.offs.append(torch.bincount(experts, minlength=EXPERTS).cumsum(0).int())

    def set_input(self, x: torch.Tensor) -> None:
        self.x = x if self.int8 else x.bfloat16()

    def __call__(self, turn: int) -> None:
        a, a_scale = fp4.quantize_int8(self.x) if self.int8 else (self.x, None)
        self.out = fp4.grouped_mm(
            a, *self.sets[turn % self.count], self.offs[turn % len(self.offs)], a_scale, **self.options,
            out_dtype=torch.float32,
        )  # fmt: skip

    def output(self, turn: int) -> torch.Tensor:
        return self.out


class Block:
    """Runs `fp4::moe` with one token."""

    def __init__(self, format: str, a_format: str) -> None:
        self.name, self.options = (
            f"fp4_ops {format}, activations {a_format}",
            {"format": format, "a_format": a_format},
        )
        shapes = (EXPERTS, 2 * INTER, K), (EXPERTS, K, INTER)
        quantized = [fp4.quantize(torch.randn(shape), format) for shape in shapes]
        bytes_ = sum(t.nbytes for q in quantized for t in q)
        sets = range(enough_sets(bytes_))
        self.sets = [[t for q in quantized for t in fp4.prepack(*q, format, "tile16")] for _ in sets]
        self.mb = bytes_ * TOP_K / EXPERTS / 1e6
        self.x, self.weights = torch.randn(1, K).bfloat16(), torch.full((1, TOP_K), 1 / TOP_K)
        self.ids = [torch.tensor([[i, (i + 4) % EXPERTS]]) for i in range(EXPERTS)]

    def __call__(self, turn: int) -> None:
        weights, ids = self.sets[turn % len(self.sets)], self.ids[turn // len(self.sets) % EXPERTS]
        fp4.moe(self.x, ids, self.weights, *weights, layout="tile16", **self.options)


def to_ggml(weight: torch.Tensor, mxfp4: tuple[torch.Tensor, ...]):
    """Returns the bytes of the weight in a ggml type. MXFP4 is made from our own codes, the others by ggml's
    quantiser."""

    @functools.cache
    def make(kind: str) -> torch.Tensor:
        if kind == "mxfp4":  # a block: the scale byte, then 16 bytes, element j below element j + 16
            packed, scale, _ = mxfp4
            codes = torch.stack((packed & 15, packed >> 4), -1).reshape(EXPERTS, N, K // 32, 2, 16)
            return torch.cat(
                (scale.view(torch.uint8)[..., None], codes[..., 0, :] | codes[..., 1, :] << 4), -1
            )
        row = ggml.ggml_row_size(TYPES[kind], K)
        data = torch.empty(EXPERTS, N, row, dtype=torch.uint8)
        source = ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_float))
        ggml.ggml_quantize_chunk(TYPES[kind], source, data.data_ptr(), 0, EXPERTS * N, K, None)
        return data

    return make


def check(runner, x: torch.Tensor, dense: torch.Tensor, bound: float) -> float:
    """Compares a runner with float64 over `dense`. These are the weights that both share, or unquantised
    weights with a larger bound."""
    runner.set_input(x)
    worst = 0.0
    for turn in range(3):
        runner(turn)
        experts = routing(len(x), turn, runner.count)
        want = torch.stack([dense[e] @ row for e, row in zip(experts, x.double())])
        worst = max(worst, ((runner.output(turn).double() - want).norm() / want.norm()).item())
    if not worst <= bound:
        raise SystemExit(f"{runner.name}: relative error {worst:.3g} is over {bound}")
    return worst


def paired(runners: list, blocks: int, seconds: float = 0.02) -> dict[str, list[float]]:
    """Measures the time of a call in alternating blocks of calls. A pause lets the idle threads of the other
    library stop spinning."""
    times: dict[str, list[float]] = {r.name: [] for r in runners}
    counts, turn = {}, 0
    for r in runners:
        start = time.perf_counter()
        for turn in range(3):
            r(turn)
        counts[r.name] = max(3, math.ceil(seconds * 3 / (time.perf_counter() - start)))
    for block in range(blocks):
        for r in runners if block % 2 == 0 else runners[::-1]:
            time.sleep(0.005)
            r(turn := turn + 1)
            start = time.perf_counter()
            for _ in range(counts[r.name]):
                r(turn := turn + 1)
            times[r.name].append((time.perf_counter() - start) / counts[r.name])
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--sets", type=int, default=6, help="sets of weights of several tokens, streamed")


@torch.inference_mode()
def rows(options: argparse.Namespace) -> Iterator[record.Row]:
    library("base").ggml_log_set(quiet, None)
    isa = ("avx2", "avx512", "avx512_vnni", "avx512_vbmi", "avx512_bf16", "amx_int8")
    yield {
        "table": "builds", "fp4_ops_kernels": fp4.cpu_capability(), "ggml": ggml.ggml_version().decode(),
        "ggml_built_with": " ".join(n for n in isa if getattr(ggml, f"ggml_cpu_has_{n}")()),
    }  # fmt: skip
    weight = torch.randn(EXPERTS, N, K)
    quantized = {f: fp4.quantize(weight, f) for f in ("mxfp4", "nvfp4")}
    dense = {f: fp4.dequantize(*q, f, torch.float64) for f, q in quantized.items()}
    make = to_ggml(weight, quantized["mxfp4"])

    blocks = [Block(f, a) for f in quantized for a in ("int8", "none")]
    for threads in options.threads:
        torch.set_num_threads(threads)
        memory = bandwidth(threads)
        yield memory
        for name, values in paired(blocks, options.blocks).items():
            (mb,) = (b.mb for b in blocks if b.name == name)
            rate = mb / statistics.median(values) / 1e3
            yield {
                "table": "block", "threads": threads, "block": name, "us": statistics.median(values) * 1e6,
                "gb_per_s": rate, "of_reads_ratio": rate / memory["read_gb_per_s"],
            }  # fmt: skip
        for tokens, streamed in itertools.product(options.tokens, (False, True)):
            several = options.sets if tokens > 1 else max(options.sets, enough_sets(EXPERTS * N * K // 2))
            sets = several if streamed else 1
            x = torch.randn(tokens, K)
            ours = [Ours(f, "tile16", tokens, sets, quantized[f]) for f in quantized]
            bf16 = [Ours(f, "tile16", tokens, sets, quantized[f], int8=False) for f in quantized]
            for r in bf16:
                r.name += " bf16"
            kinds = PEERS if tokens <= 64 else [p for p in PEERS if p[0] != "nvfp4"]
            peers = [Ggml(kind, repacked, tokens, sets, make, threads) for kind, repacked in kinds]
            errors = {
                r.name: check(r, x, dense[f], 0.02) for r, f in zip((*ours, *bf16), (*quantized, *quantized))
            }
            for peer, (kind, _) in zip(peers, kinds):
                exact = kind == "mxfp4"
                errors[peer.name] = check(
                    peer, x, dense["mxfp4"] if exact else weight.double(), 0.02 if exact else 0.2
                )
            times = paired([*ours, *bf16, *peers], options.blocks)
            yield from compared(threads, tokens, sets, times, [p.name for p in peers], errors)


def compared(
    threads: int, tokens: int, sets: int, times: dict[str, list[float]], peers: list[str], errors: dict
) -> Iterator[record.Row]:
    """Yields rows. `speedup` is the time of the fastest ggml type divided by ours, the median over blocks of
    calls."""
    fastest = min(peers, key=lambda name: statistics.median(times[name]))
    weights = min(tokens, EXPERTS) * N * K
    for name, values in times.items():
        median = statistics.median(values)
        bits = 4.5 if "nvfp4" in name or "q4_0" in name else 4.25
        ratios = [theirs / mine for theirs, mine in zip(times[fastest], values)]
        yield {
            "table": "product", "threads": threads, "tokens": tokens,
            "weights": "cached" if sets == 1 else "streamed", "kernel": name, "us": median * 1e6,
            "gb_per_s": weights * bits / 8 / median / 1e9, "gflop_per_s": 2 * tokens * N * K / median / 1e9,
            "peer": None if name in peers else fastest,
            "speedup": None if name in peers else statistics.median(ratios), "error": errors[name],
        }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
