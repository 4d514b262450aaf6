"""Compares one Mixtral-like MoE layer on the CPU: transformers' block, and the same router with fp4::moe.

    python benchmarks/cpu_layer.py [--threads 1 2] [--tokens 1 32] [--blocks 9]

Both run under stock torch.compile in bf16, in one process, with alternating blocks of calls. The layer has
hidden size 2048, intermediate size 4096 and 8 experts, 2 for each token. Every call has other tokens, and so
other experts. The stock block runs with each of transformers' experts implementations that compiles; the
ratio is relative to the fastest. Our layer is first compared with float64 over the dequantised weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import record
import torch
from cpu_machine import bandwidth
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import fp4_ops  # noqa: F401  loads the operators

fp4 = torch.ops.fp4
HIDDEN, EXPERTS, TOP_K, INTER = 2048, 8, 2, 4096
STOCK = ("eager", "grouped_mm", "batched_mm")
OURS = (("mxfp4", "int8"), ("nvfp4", "int8"), ("mxfp4", "none"))
"""(format, a_format of fp4::moe)."""


def stock_block(implementation: str) -> MixtralSparseMoeBlock:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config).to(torch.bfloat16).eval()


class Fp4Block(torch.nn.Module):
    def __init__(self, block: MixtralSparseMoeBlock, format: str, a_format: str) -> None:
        super().__init__()
        self.gate, self.options = block.gate, {"format": format, "a_format": a_format, "layout": "tile16"}
        self.plain = [
            fp4.quantize(w.detach(), format) for w in (block.experts.gate_up_proj, block.experts.down_proj)
        ]
        self.weights = [fp4.prepack(*w, format, "tile16") for w in self.plain]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.view(-1, HIDDEN)
        _, weights, ids = self.gate(x)
        return fp4.moe(x, ids, weights, *self.weights[0], *self.weights[1], **self.options).view_as(hidden)

    def exact(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the layer in float64, with the dequantised weights and unquantised activations."""
        x = hidden.view(-1, HIDDEN)
        _, weights, ids = self.gate(x)
        w13, w2 = (fp4.dequantize(*w, self.options["format"], torch.float32) for w in self.plain)
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(TOP_K)).tolist():
            gate, up = (w13[ids[t, j]].double() @ x[t].double()).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            out[t] += weights[t, j].double() * (w2[ids[t, j]].double() @ h)
        return out.view_as(hidden)


def paired(runners: dict, inputs: list[torch.Tensor], blocks: int) -> dict[str, list[float]]:
    """Measures milliseconds per call in each block of calls. The runners take turns."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for block in range(blocks):
        for name in runners if block % 2 == 0 else reversed(runners):
            runners[name](inputs[-1])
            start = time.perf_counter()
            for x in inputs:
                runners[name](x)
            times[name].append((time.perf_counter() - start) / len(inputs) * 1e3)
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--blocks", type=int, default=9)


@torch.no_grad()
def rows(options: argparse.Namespace) -> Iterator[record.Row]:
    stock = {name: stock_block(name) for name in STOCK}
    first = stock[STOCK[0]]
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for block in stock.values():
        block.load_state_dict(first.state_dict())
    ours = {f"fp4 {f}, activations {a}": Fp4Block(first, f, a) for f, a in OURS}
    kernels = fp4.cpu_capability()
    x = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16)
    for name, block in ours.items():
        error = ((block(x).double() - block.exact(x)).norm() / block.exact(x).norm()).item()
        assert error < 0.02, f"{name}: relative error {error}"
        nbytes = sum(t.nbytes for w in block.weights for t in w)
        yield {"table": "weights", "block": name, "kernels": kernels, "error": error, "mb": nbytes / 1e6}
    nbytes = sum(p.nbytes for p in first.experts.parameters())
    yield {"table": "weights", "block": "bf16", "kernels": None, "error": None, "mb": nbytes / 1e6}

    for threads in options.threads:
        torch.set_num_threads(threads)
        yield bandwidth(threads)
        for tokens in options.tokens:
            torch.compiler.reset()
            inputs = [torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16) for _ in range(8)]
            runners = {f"stock {n}": torch.compile(b) for n, b in stock.items()}
            runners |= {n: torch.compile(b) for n, b in ours.items()}
            for runner in runners.values():
                for x in inputs:
                    runner(x)
            yield from compared(threads, tokens, paired(runners, inputs, options.blocks))


def compared(threads: int, tokens: int, times: dict[str, list[float]]) -> Iterator[record.Row]:
    """Yields rows. `speedup` is the time of the fastest stock block divided by the time of this one, the
    median over rounds."""
    stock = [n for n in times if n.startswith("stock")]
    fastest = min(stock, key=lambda n: statistics.median(times[n]))
    for name, values in times.items():
        ratios = [theirs / mine for theirs, mine in zip(times[fastest], values)]
        yield {
            "table": "layer", "threads": threads, "tokens": tokens, "block": name,
            "ms": statistics.median(values), "peer": None if name in stock else fastest,
            "speedup": None if name in stock else statistics.median(ratios),
        }  # fmt: skip


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
