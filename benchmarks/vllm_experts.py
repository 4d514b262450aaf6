"""Compares expert blocks on a GPU: the plugin's method, and vLLM's own classes, which use Marlin on Hopper.

    python benchmarks/vllm_experts.py [--models "qwen3-30b;..."] [--tokens 1,8,64,...] [--rounds 9]

Both get the same codes, bfloat16 inputs, ids and routing weights. vLLM's blocks are `MarlinExperts` and, for
GPT-OSS, also `OAITritonMxfp4ExpertsMonolithic`, which vLLM chooses by itself. The latter takes the router's
logits, so in GPT-OSS's rows all blocks begin at the logits. Our block is `Experts.apply` of the plugin, with
its own choice of activations (on Hopper bfloat16 for few tokens and fp8 for many) and, as `bf16`, without
fp8. A time is that of a CUDA graph with several routings, divided by the number of calls. The blocks take
turns, and each round begins with another block. A speedup is relative to Marlin, the median of the rounds'
ratios (triton_speedup, triton_bf16_speedup: relative to Triton). error: the relative error of 8 tokens
against float64 over the dequantised weights, measured before the times. A block whose error exceeds WORST, or
is NaN, ends the run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import record
import torch
from torch import Tensor

import fp4_ops  # noqa: F401


@dataclass(frozen=True)
class Model:
    """The shape of one layer's experts."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    format: str = "nvfp4"
    activation: str = "silu"

    @property
    def gpt_oss(self) -> bool:
        return self.activation == "swigluoai"


MODELS = {
    "qwen3-30b": Model(128, 8, 2048, 768),
    "mixtral-8x7b": Model(8, 2, 4096, 14336),
    "gpt-oss-120b": Model(128, 4, 2880, 2880, "mxfp4", "swigluoai"),
    "deepseek-v3": Model(256, 8, 7168, 2048),
}
TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"
WORST = {"marlin": 0.02, "triton": 0.02, "fp4_ops": 0.08, "bf16": 0.02}
"""Largest relative error of each block; fp4_ops may have activations in fp8."""
Operands = tuple[Tensor, Tensor, Tensor]


@dataclass
class Weights:
    gate_up: Operands
    down: Operands
    biases: tuple[Tensor, Tensor] | None


@dataclass
class Input:
    x: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor


Block = Callable[[Input], Tensor]


def made(model: Model) -> Weights:
    """Returns random codes [E, N, K]; in nvfp4 each expert has a global scale of its own."""

    def stack(n: int, k: int) -> Operands:
        draw = lambda: torch.randn(1, n, k, device="cuda") * k**-0.5  # noqa: E731
        parts = [torch.ops.fp4.quantize(draw(), model.format) for _ in range(model.experts)]
        packed, scale, factor = zip(*parts)
        scales = torch.cat([s.view(torch.uint8) for s in scale]).view(scale[0].dtype)
        return torch.cat(packed), scales, torch.cat([f.reshape(-1) for f in factor])

    biases = None
    if model.gpt_oss:
        sizes = 2 * model.inner, model.hidden
        first, second = (torch.randn(model.experts, n, device="cuda").bfloat16() * 0.1 for n in sizes)
        biases = first, second
    return Weights(stack(2 * model.inner, model.hidden), stack(model.hidden, model.inner), biases)


# --- vLLM ---


def config_of(model: Model, hidden: int, inner: int) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    return FusedMoEConfig(
        num_experts=model.experts, experts_per_token=model.chosen, hidden_dim=hidden,
        intermediate_size=inner, num_local_experts=model.experts, num_logical_experts=model.experts,
        activation=MoEActivation(model.activation), device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), in_dtype=torch.bfloat16,
    )  # fmt: skip


def chosen_by_vllm(model: Model, given: Input) -> tuple[Tensor, Tensor]:
    """Returns ids and routing weights. For GPT-OSS they are those of vLLM's router, otherwise the given
    ones."""
    if not model.gpt_oss:
        return given.ids, given.weights
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    weights, ids, _ = fused_topk(given.x, given.logits, model.chosen, renormalize=True)
    return ids, weights


def of_marlin(model: Model, weights: Weights) -> Block:
    """Returns vLLM's block with Marlin's kernels, with sizes rounded up as in vLLM."""
    from vllm.model_executor.layers.fused_moe.config import (
        mxfp4_w4a16_moe_quant_config,
        nvfp4_w4a16_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    hidden, inner = model.hidden, model.inner
    if model.format == "mxfp4":
        hidden, inner = -(-hidden // 256) * 256, -(-inner // 128) * 128
    layer: Any = SimpleNamespace(
        num_experts=model.experts, hidden_size=hidden, intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    if model.format == "mxfp4":
        more_n, more_k = 2 * (inner - model.inner), hidden - model.hidden
        pad = torch.nn.functional.pad
        (p1, s1, _), (p2, s2, _) = weights.gate_up, weights.down
        (s1, s2) = (s.view(torch.uint8) for s in (s1, s2))
        p1, s1 = pad(p1, (0, more_k // 2, 0, more_n)), pad(s1, (0, more_k // 32, 0, more_n))
        p2, s2 = pad(p2, (0, more_n // 4, 0, more_k)), pad(s2, (0, more_n // 64, 0, more_k))
        b1, b2 = (
            (pad(weights.biases[0], (0, more_n)), pad(weights.biases[1], (0, more_k)))
            if weights.biases
            else (None, None)
        )
        w1, w2, s1, s2, b1, b2 = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(
            layer, p1, p2, s1, s2, b1, b2
        )
        quant = mxfp4_w4a16_moe_quant_config(s1, s2, b1, b2)
    else:
        packed = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer, *weights.gate_up, *weights.down, True
        )
        w1, s1, f1, w2, s2, f2 = packed
        quant = nvfp4_w4a16_moe_quant_config(f1, f2, s1, s2)
    config = config_of(model, hidden, inner)
    experts = MarlinExperts(config, quant)

    def block(given: Input) -> Tensor:
        ids, routing = chosen_by_vllm(model, given)
        x = given.x
        if hidden > model.hidden:
            x = torch.nn.functional.pad(x, (0, hidden - model.hidden))
        shapes = experts.workspace_shapes(
            x.shape[0], inner, hidden, model.chosen, model.experts, model.experts, None, config.activation
        )
        first, second, out = (x.new_empty(shape) for shape in shapes)
        experts.apply(
            out, x, w1, w2, routing, ids, config.activation, model.experts, None, None, None, first, second,
            None, False,
        )  # fmt: skip
        return out[:, : model.hidden]

    return block


def of_triton(model: Model, weights: Weights) -> Block:
    """Returns vLLM's block of GPT-OSS with OpenAI's Triton kernels."""
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as kernels
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig  # isort: skip  vLLM puts it on the path

    (p1, s1, _), (p2, s2, _) = weights.gate_up, weights.down
    w1, flex1, scale1 = _swizzle_mxfp4(p1, s1.view(torch.uint8))
    w2, flex2, scale2 = _swizzle_mxfp4(p2, s2.view(torch.uint8))
    precisions = [
        PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
        for scale, flex in ((scale1, flex1), (scale2, flex2))
    ]
    assert weights.biases is not None
    quant = mxfp4_w4a16_moe_quant_config(*precisions, *(b.float() for b in weights.biases))
    config = config_of(model, model.hidden, model.inner)
    experts = kernels.OAITritonMxfp4ExpertsMonolithic(config, quant)

    def block(given: Input) -> Tensor:
        return experts.apply(
            given.x, w1, w2, given.logits, config.activation, model.experts, None, None, False
        )

    return block


# --- the plugin ---


def of_ours(model: Model, weights: Weights) -> tuple[dict[str, Block], str]:
    """Returns the plugin's block with its activations and with those in bfloat16, and the layout."""
    from fp4_ops.integrations.vllm.experts import Experts

    class Given(Experts):
        def parameters(self, layer: Any) -> list[str]:
            return []

        def arrived(self, *args: Any) -> None:
            raise AssertionError

        def stacks(self, layer: Any) -> dict[str, Any]:
            no = model.format == "mxfp4"
            parts = {"gate_up": weights.gate_up, "down": weights.down}
            return {matrix: (p, s, None if no else f) for matrix, (p, s, f) in parts.items()}

    layer: Any = torch.nn.Module()
    layer.moe_config = config_of(model, model.hidden, model.inner)
    layer.activation, layer.layer_name = layer.moe_config.activation, "experts"
    layer.top_k, layer.expert_map, layer.apply_router_weight_on_input = model.chosen, None, False
    for name, bias in zip(("w13_bias", "w2_bias"), weights.biases or ()):
        layer.register_parameter(name, torch.nn.Parameter(bias.clone(), requires_grad=False))
    method = Given(layer, model.format, lambda: None)
    method.process_weights_after_loading(layer)

    def with_activations(a_format: str) -> Block:
        one = copy.copy(method)
        one.a_format = a_format

        def block(given: Input) -> Tensor:
            ids, routing = chosen_by_vllm(model, given)
            return one.apply(layer, given.x, routing, ids, None, None)

        return block

    blocks = {"fp4_ops": with_activations(method.a_format), "bf16": with_activations("none")}
    return blocks, f"{method.layout} {method.a_format}"


# --- correctness ---


def reference(model: Model, weights: Weights, given: Input, count: int) -> Tensor:
    """Returns the first `count` tokens' sums in float64, over the exactly dequantised weights."""
    x, ids, routing = given.x[:count].double(), given.ids[:count], given.weights[:count].double()
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        w13, w2 = (
            torch.ops.fp4.dequantize(
                p[expert], s[expert], f[expert] if f.numel() else f, model.format, torch.float64
            )
            for p, s, f in (weights.gate_up, weights.down)
        )
        b13, b2 = (0, 0) if weights.biases is None else (b[expert].double() for b in weights.biases)
        product = x @ w13.T + b13
        if model.gpt_oss:
            gate, up = product[:, ::2].clamp(max=7), product[:, 1::2].clamp(-7, 7)
            middle = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            gate, up = product.chunk(2, -1)
            middle = torch.nn.functional.silu(gate) * up
        share = torch.where(ids == expert, routing, 0).sum(-1, keepdim=True)
        out += (middle @ w2.T + b2) * share
    return out


# --- times ---


def inputs(model: Model, tokens: int, count: int) -> list[Input]:
    found = []
    for _ in range(count):
        x = torch.randn(tokens, model.hidden, device="cuda", dtype=torch.bfloat16)
        # Each token's logits differ in bfloat16 too, because routers break ties in different ways.
        order = torch.rand(tokens, model.experts, device="cuda").argsort(-1)
        logits = ((order - model.experts // 2) / 32).bfloat16()
        values, ids = logits.float().topk(model.chosen)
        found.append(Input(x, logits, ids.int(), values.softmax(-1)))
    return found


def captured(block: Block, given: list[Input]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in given:
            block(args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in given:
            block(args)
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
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=9)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    for name in args.models.split(";"):
        model = MODELS[name]
        torch.manual_seed(0)
        weights = made(model)
        blocks = {"marlin": of_marlin(model, weights)}
        if model.gpt_oss:
            blocks["triton"] = of_triton(model, weights)
        ours, layout = of_ours(model, weights)
        blocks |= ours
        for tokens in map(int, args.tokens.split(",")):
            yield of_tokens(name, weights, blocks, tokens, layout, args.rounds)
        del blocks, ours, weights
        torch.cuda.empty_cache()


def of_tokens(
    name: str, weights: Weights, blocks: dict[str, Block], tokens: int, layout: str, rounds: int
) -> record.Row:
    model = MODELS[name]
    given = inputs(model, tokens, 16 if tokens <= 8 else 4 if tokens <= 1024 else 2)
    count = min(8, tokens)
    want = reference(model, weights, given[0], count)
    errors = {
        block: float((run(given[0])[:count].double() - want).norm() / want.norm())
        for block, run in blocks.items()
    }
    if not all(error <= WORST[block] for block, error in errors.items()):  # not if it is NaN
        raise AssertionError(f"{name}, {tokens} tokens: relative errors {errors}; at most {WORST}")
    graphs = {block: captured(run, given) for block, run in blocks.items()}
    times = max(1, int(15000 / microseconds(graphs["marlin"], 2)))
    found: list[dict[str, float]] = []
    for i in range(rounds):
        first = i % len(graphs)
        turns = [*graphs.items()][first:] + [*graphs.items()][:first]
        found.append({block: microseconds(graph, times) / len(given) for block, graph in turns})
    median = statistics.median
    row: record.Row = {"table": "experts", "model": name, "tokens": tokens, "layout": layout}
    for block in blocks:
        row[f"{block}_us"] = median(r[block] for r in found)
        row[f"{block}_error"] = errors[block]
    row["speedup"] = median(r["marlin"] / r["fp4_ops"] for r in found)
    row["bf16_speedup"] = median(r["marlin"] / r["bf16"] for r in found)
    if model.gpt_oss:
        row["triton_speedup"] = median(r["triton"] / r["fp4_ops"] for r in found)
        row["triton_bf16_speedup"] = median(r["triton"] / r["bf16"] for r in found)
    return row


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
