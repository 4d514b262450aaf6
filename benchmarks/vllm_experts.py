"""Expert blocks in NVFP4 on a GPU: what the plugin calls beside vLLM's own default (Marlin on Hopper).

    python benchmarks/vllm_experts.py [--models qwen3-30b,...] [--tokens 1,8,64,512,2048] [--rounds 9]

Both get the same codes, bfloat16 inputs, ids and routing weights. vLLM's block is `fused_marlin_moe` after
`prepare_nvfp4_moe_layer_for_marlin`; ours is `fp4::moe` in the layout that the plugin chooses. error: the
relative error of 8 tokens against float64 over the dequantised weights. Each time is that of a CUDA graph
with several routings, by the call; they take turns, and speedup is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import record
import torch
from torch import Tensor

import fp4_ops  # noqa: F401
from fp4_ops.experts.packed import auto_a_format, interleave
from fp4_ops.meta.layouts import LAYOUTS, byte_view, preferred_layout
from fp4_ops.runtime.relayout import relayout

MODELS = {
    "qwen3-30b": (128, 8, 2048, 768),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "deepseek-v3, ep 8": (32, 1, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
"""Experts, experts of a token, hidden size, intermediate size."""
Block = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = tuple[Tensor, Tensor, Tensor]


def weights(experts: int, n: int, k: int) -> Operands:
    """Random codes [E, N, K] in nvfp4 with a global scale for each expert."""
    parts = [
        torch.ops.fp4.quantize(torch.randn(1, n, k, device="cuda") * k**-0.5, "nvfp4") for _ in range(experts)
    ]
    packed, scale, factor = zip(*parts)
    scales = torch.cat([s.view(torch.uint8) for s in scale]).view(scale[0].dtype)
    return torch.cat(packed), scales, torch.cat([f.reshape(1) for f in factor])


def of_vllm(gate_up: Operands, down: Operands, hidden: int, inner: int) -> Block:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    experts = gate_up[0].shape[0]
    layer = SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    made = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(layer, *gate_up, *down, True)  # type: ignore[arg-type]
    w13, w13_scale, w13_factor, w2, w2_scale, w2_factor = made

    def block(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out: Tensor = fused_marlin_moe(
            x, w13, w2, None, None, w13_scale, w2_scale, routing, ids, scalar_types.float4_e2m1f.id,
            global_num_experts=experts, global_scale1=w13_factor, global_scale2=w2_factor,
            workspace=layer.workspace,
        )  # fmt: skip
        return out

    return block


def of_ours(gate_up: Operands, down: Operands, hidden: int, inner: int) -> tuple[Block, str]:
    sizes = [(2 * inner, hidden), (hidden, inner)]
    layout = preferred_layout("cuda", *sizes, dtype=torch.bfloat16, format="nvfp4", a_format="auto")
    activation = "silu"
    packed, scale, factor = gate_up
    if LAYOUTS[layout].interleaved:
        activation = "silu_interleaved"
        packed, scale = interleave(packed), interleave(byte_view(scale)).view(scale.dtype)
    first = relayout((packed, scale, factor), "nvfp4", hidden, "plain", layout)
    second = relayout(down, "nvfp4", inner, "plain", layout)
    options = {"format": "nvfp4", "layout": layout, "activation": activation}
    options["a_format"] = auto_a_format("cuda", layout)

    def block(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out: Tensor = torch.ops.fp4.moe(x, ids, routing, *first, *second, **options)
        return out

    return block, layout


def reference(x: Tensor, ids: Tensor, routing: Tensor, gate_up: Operands, down: Operands) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        w13, w2 = (
            torch.ops.fp4.dequantize(p[expert], s[expert], f[expert], "nvfp4", torch.float64)
            for p, s, f in (gate_up, down)
        )
        gate, up = (x.double() @ w13.T).chunk(2, -1)
        share = torch.where(ids == expert, routing, 0).sum(-1, keepdim=True)
        out += (torch.nn.functional.silu(gate) * up) @ w2.T * share
    return out


Inputs = list[tuple[Tensor, Tensor, Tensor]]


def inputs(tokens: int, experts: int, chosen: int, hidden: int, count: int) -> Inputs:
    found = []
    for _ in range(count):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        values, ids = torch.randn(tokens, experts, device="cuda").topk(chosen)
        found.append((x, ids.int(), values.softmax(-1)))
    return found


def captured(block: Block, given: Inputs) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in given:
            block(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in given:
            block(*args)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=";".join(MODELS), help="separated by semicolons")
    parser.add_argument("--tokens", default="1,8,64,512,2048")
    parser.add_argument("--rounds", type=int, default=9)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    for model in args.models.split(";"):
        experts, chosen, hidden, inner = MODELS[model]
        torch.manual_seed(0)
        gate_up, down = weights(experts, 2 * inner, hidden), weights(experts, hidden, inner)
        marlin = of_vllm(gate_up, down, hidden, inner)
        ours, layout = of_ours(gate_up, down, hidden, inner)
        (sample,) = inputs(8, experts, chosen, hidden, 1)
        want = reference(*sample, gate_up, down)
        errors = [float((b(*sample).double() - want).norm() / want.norm()) for b in (marlin, ours)]
        for tokens in map(int, args.tokens.split(",")):
            given = inputs(tokens, experts, chosen, hidden, 16 if tokens <= 8 else 4)
            graphs = [captured(block, given) for block in (marlin, ours)]
            once = microseconds(graphs[0], 2)
            times = max(2, int(20000 / once))
            rounds = [[microseconds(g, times) / len(given) for g in graphs] for _ in range(args.rounds)]
            yield {
                "model": model,
                "tokens": tokens,
                "layout": layout,
                "vllm_us": statistics.median(r[0] for r in rounds),
                "fp4_ops_us": statistics.median(r[1] for r in rounds),
                "speedup": statistics.median(r[0] / r[1] for r in rounds),
                "vllm_error": errors[0],
                "fp4_ops_error": errors[1],
            }
            del graphs
        del marlin, ours, gate_up, down
        torch.cuda.empty_cache()


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
