"""Compares decoding with a transformers Qwen3-MoE on several GPUs and on one of them, in milliseconds per
step.

    python benchmarks/several_gpus.py [--ranks 2] [--models qwen3-30b,qwen3-235b] [--batches 1,32,128]
                                      [--ways one,split,own] [--keys 128] [--layers 16]

The model has its own decoder layers and random weights, which each process makes for itself. The experts are
in nvfp4, the rest in bfloat16. A layer is compiled once (backend "fp4") for all layers. A whole step, from
embedding to greedy token, is one CUDA graph. Its time is the median of its replays on the slower rank.
`batch` counts the sequences of all GPUs together. `keys` is the length of the static cache, which attention
reads completely.

    one     rank 0 serves all sequences alone
    split   all ranks have the same tokens. Attention's heads and the head's rows are divided, as
            transformers' plans do it, with sums by fp4::all_reduce; experts are spread, tokens="same"
    own     each rank has its share of the batch, and whole attention; experts are spread, tokens="own"

Before the ways are timed, they are compared with `one`. `error` compares all logits of the first steps, for
the same tokens: the norm of the difference, divided by the norm. `equal_tokens_ratio` is the share of equal
greedy choices. If one GPU cannot hold the model, there is nothing to compare with, and the row of `one` says
so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import ranks
import record
import torch
from torch import Tensor, nn

from fp4_ops.distributed.parts import Part
from fp4_ops.experts.find import plan
from fp4_ops.experts.packed import PackedWeight, Recipe
from fp4_ops.meta.layouts import LAYOUTS, preferred_layout
from fp4_ops.models import expert_parallel
from fp4_ops.models.pack_experts import choose_implementation

MODELS: dict[str, dict[str, int]] = {
    "qwen3-30b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    },
    "qwen3-235b": {
        "hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    },
    "tiny": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 64, "num_experts": 8,
    },
}  # fmt: skip
PROMPT, CHECKED, REPLAYS = 16, 8, 40
TOLERANCE = 0.1
"""A way with a larger `error` is wrong and is not timed. Rounding changes the choice of some experts, so
smaller errors are normal."""
MATRICES = 8
"""The number of different matrices of codes among the experts of a layer. Each expert has a factor of its
own."""
SHARDS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "lm_head": 0, "o_proj": 1}
"""The dimension along which a weight is divided."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default="qwen3-30b,qwen3-235b")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--ways", default="one,split,own")
    parser.add_argument("--keys", type=int, default=128)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    """Yields the rows that the first of `ranks` processes measures."""
    return ranks.rows_of_the_first(__file__, args, ("ranks", "models", "batches", "ways", "keys", "layers"))


# --- one rank ---


class Place:
    """This process's rank and the number of ranks. A process that runs alone is rank 0 of 1."""

    def __init__(self, rank: int, ranks: int, device: torch.device, group_name: str = "") -> None:
        self.rank, self.ranks, self.device, self.group_name = rank, ranks, device, group_name

    def sum(self, x: Tensor) -> Tensor:
        if self.ranks == 1:
            return x
        total: Tensor = torch.ops.fp4.all_reduce(x, group_name=self.group_name)
        return total


class Summed(nn.Module):
    """A linear layer whose columns are divided over ranks. The ranks' products are added."""

    def __init__(self, linear: nn.Linear, at: Place) -> None:
        super().__init__()
        self.weight, self.at = linear.weight, at

    def forward(self, x: Tensor) -> Tensor:
        return self.at.sum(nn.functional.linear(x, self.weight))


class Keys:
    """A layer's part of a static cache, with the interface that attention uses."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))

    def at(self, positions: Tensor) -> Keys:
        self.positions = positions
        return self

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


def build(name: str, layers: int, at: Place, way: str) -> Any:
    """Builds the model of one rank. In addition, a rank never holds more than one whole matrix at a time."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(MODELS[name])
    divided = at.ranks if way == "split" else 1
    for heads in ("num_attention_heads", "num_key_value_heads"):
        sizes[heads] //= divided
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=layers, num_experts_per_tok=min(8, sizes["num_experts"] // 2),
        norm_topk_prob=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16().eval()
        head = nn.Linear(config.hidden_size, config.vocab_size // divided, bias=False, dtype=torch.bfloat16)
        model.lm_head = head
    experts = {n: m for n, m in model.named_modules() if n.endswith(".experts")}
    recipe = None
    for module_name, module in experts.items():
        if recipe is None:  # one for all layers, so that one compilation serves them
            made = plan(module)
            part = None
            if at.ranks > 1:
                tokens = "same" if way == "split" else "own"
                part = Part("spread", config.num_experts, at.ranks, at.rank, at.group_name, tokens)
            recipe = Recipe(made.form.of(module), made.gate, None, False, part)
        pack(module, module_name, config, at, recipe)
    for parameter_name, p in list(model.named_parameters()):
        owner, _, attribute = parameter_name.rpartition(".")
        leaf = owner.rpartition(".")[2]
        if "norm" in leaf:
            value = torch.ones(p.shape, dtype=torch.bfloat16, device=at.device)
        else:
            dim = SHARDS.get(leaf) if divided > 1 else None
            value = random(parameter_name, tuple(p.shape), at, dim)
        model.get_submodule(owner)._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(at.device)
    if divided > 1:
        for layer in model.model.layers:
            layer.self_attn.o_proj = Summed(layer.self_attn.o_proj, at)
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0  # makes all layers equal for Dynamo
    choose_implementation(model)
    return model


def random(name: str, shape: tuple[int, ...], at: Place, dim: int | None) -> Tensor:
    """Returns random numbers that do not depend on the number of processes."""
    whole = [n * (at.ranks if i == dim else 1) for i, n in enumerate(shape)]
    generator = torch.Generator(at.device).manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(whole, dtype=torch.bfloat16, device=at.device, generator=generator) * 0.02
    return value if dim is None else value.chunk(at.ranks, dim)[at.rank].contiguous()


def pack(module: Any, name: str, config: Any, at: Place, recipe: Recipe) -> None:
    own = recipe.part.own if recipe.part is not None else range(config.num_experts)
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shapes = {recipe.form.gate_up: (2 * inner, hidden), recipe.form.down: (hidden, inner)}
    layout = preferred_layout(
        at.device.type, *shapes.values(), dtype=torch.bfloat16, format="nvfp4", a_format="auto"
    )
    for attribute, (n, k) in shapes.items():
        seed = f"{name}.{attribute}"
        operands = torch.ops.fp4.quantize(random(seed, (MATRICES, n, k), at, None), "nvfp4")
        operands = torch.ops.fp4.prepack(*operands, "nvfp4", layout) if layout != "plain" else operands
        generator = torch.Generator(at.device).manual_seed(zlib.crc32(seed.encode()) + 1)
        factors = 0.5 + torch.rand(config.num_experts, device=at.device, generator=generator)
        chosen = torch.tensor([e % MATRICES for e in own], device=at.device)
        codes, scales = (t.view(torch.uint8)[chosen].view(t.dtype) for t in operands[:2])
        factor = operands[2][chosen] * factors[own.start : own.stop]
        turned = attribute == recipe.form.gate_up and LAYOUTS[layout].interleaved
        del module._parameters[attribute]
        module.add_module(
            attribute, PackedWeight(codes, scales, factor, "nvfp4", layout, k, turned, recipe.part)
        )
    module._fp4_recipe = recipe


class Decoder:
    """Runs steps of a model for one batch."""

    def __init__(self, model: Any, batch: int, keys: int, at: Place, way: str) -> None:
        self.model, self.batch, self.at, self.way = model, batch, at, way
        config, device = model.config, at.device
        heads, dim = config.num_key_value_heads, config.head_dim
        self.cache = [Keys((batch, heads, keys, dim), device) for _ in model.model.layers]
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.places = torch.arange(keys, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        compiles: Callable[[Any], Any] = (
            (lambda f: torch.compile(f, backend="fp4")) if device.type == "cuda" else lambda f: f
        )
        self.parts = [compiles(f) for f in (begin, layer_step, self.end)]

    def prefill(self, ids: Tensor) -> None:
        model = self.model.model
        positions = torch.arange(ids.shape[1], device=ids.device)
        h = model.embed_tokens(ids)
        mask = (self.places[None] <= positions[:, None]).expand(len(ids), 1, -1, -1)
        angles = model.rotary_emb(h, positions[None])
        for layer, kv in zip(model.layers, self.cache):
            h = layer_step(layer, h, mask, angles, kv.at(positions))
        self.token.copy_(self.end(model.norm, self.model.lm_head, h[:, -1:])[1])
        self.position.fill_(ids.shape[1])

    def run(self) -> None:
        first, layer_of, last = self.parts
        model = self.model.model
        h, mask, angles = first(model.embed_tokens, model.rotary_emb, self.token, self.position, self.places)
        for layer, kv in zip(model.layers, self.cache):
            h = layer_of(layer, h, mask, angles, kv.at(self.position))
        self.logits, token = last(model.norm, self.model.lm_head, h)
        self.token.copy_(token)
        self.position.copy_((self.position + 1) % len(self.places))

    def end(self, norm: nn.Module, head: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of this rank's rows of the head, and the most likely token among all rows."""
        logits = head(norm(h))[:, -1]
        best, token = logits.float().max(-1)
        if self.way != "split" or self.at.ranks == 1:
            return logits, token
        token = token + self.at.rank * logits.shape[1]
        each = torch.zeros(self.at.ranks, len(best), 2, device=best.device)
        each[self.at.rank] = torch.stack([best, token.float()], -1)  # exact below 2^24
        each = self.at.sum(each)
        winner = each[..., 0].argmax(0)
        return logits, each[..., 1].gather(0, winner[None])[0].long()

    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()

    def capture(self) -> None:
        """Compiles and captures the step. Afterwards, token and position have their old values."""
        before = self.token.clone(), self.position.clone()
        if self.at.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run()
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.run()
        torch.cuda.synchronize()
        self.token.copy_(before[0])
        self.position.copy_(before[1])


def begin(embed: nn.Module, rotary: nn.Module, token: Tensor, position: Tensor, places: Tensor) -> Any:
    h = embed(token[:, None])
    mask = (places <= position).expand(len(token), 1, 1, -1)
    return h, mask, rotary(h, position[None])


def layer_step(layer: nn.Module, h: Tensor, mask: Tensor, angles: Any, kv: Keys) -> Tensor:
    out: Tensor = layer(h, attention_mask=mask, past_key_values=kv, position_embeddings=angles)
    return out


class Rank:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch.distributed as dist

        self.args, self.dist = args, dist
        on_gpu = torch.cuda.device_count() >= args.ranks
        device = torch.device("cuda", args.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", rank=args.rank, world_size=args.ranks,
            device_id=device if on_gpu else None,
        )  # fmt: skip
        world = dist.group.WORLD
        assert world is not None
        self.alone = Place(0, 1, device)
        self.all = Place(args.rank, args.ranks, device, world.group_name)

    def tell(self, row: record.Row) -> None:
        if self.args.rank == 0:
            print(json.dumps(row), flush=True)

    def barrier(self) -> None:
        if self.all.device.type == "cuda":
            torch.cuda.synchronize()
        self.dist.barrier()

    def largest(self, value: float) -> float:
        t = torch.tensor([value], device=self.all.device, dtype=torch.float64)
        self.dist.all_reduce(t, op=self.dist.ReduceOp.MAX)
        return t.item()

    # --- steps ---

    def ids(self, batch: int, vocab: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randint(vocab, (batch, PROMPT), generator=generator).to(self.all.device)

    def logits(self, decoder: Decoder, given: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
        """Returns logits and chosen tokens of the first steps.

        `given`: the tokens to feed. None feeds the chosen tokens.
        """
        logits, tokens = [], [decoder.token.clone()]
        for i in range(CHECKED):
            if given is not None:
                decoder.token.copy_(given[i])
            decoder.step()
            assert decoder.logits is not None
            logits.append(decoder.logits.float())
            tokens.append(decoder.token.clone())
        return logits, tokens

    def ms(self, decoder: Decoder) -> float:
        events, times = [], []
        for _ in range(REPLAYS + 5):
            start = time.perf_counter()
            if decoder.graph is not None:
                begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin_event.record()
                decoder.step()
                end_event.record()
                events.append((begin_event, end_event))
            else:
                decoder.step()
                times.append(1e3 * (time.perf_counter() - start))
        if events:
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in events]
        return statistics.median(times[5:])

    def measure(self, name: str, way: str, batches: list[int], known: dict[int, Any]) -> None:
        """Measures one way. `known`: the results of one GPU, by batch. The way `one` fills it."""
        at = self.alone if way == "one" else self.all
        args, vocab = self.args, MODELS[name]["vocab_size"]
        of = {"model": name, "layers": args.layers, "keys": args.keys, "way": way}
        if way == "one":
            need, there = needed(name, args.layers), memory(at.device)
            if need > there:
                self.tell({
                    "table": "memory", **of, "gb": None, "needed_gb": need / 1e9, "device_gb": there / 1e9,
                })  # fmt: skip
                return
        model: Any = None
        if way != "one" or args.rank == 0:
            model = build(name, args.layers, at, way)
        said = ""
        if way != "one":
            said = expert_parallel.connect_model(model, torch.bfloat16)
        if at.device.type == "cuda" and model is not None:
            self.tell({
                "table": "memory", **of, "gb": torch.cuda.memory_allocated() / 1e9,
                "needed_gb": needed(name, args.layers) / 1e9, "device_gb": memory(at.device) / 1e9,
            })  # fmt: skip
        for batch in batches:
            if way == "own" and batch % at.ranks:
                continue
            self.barrier()
            ms = error = equal = compile_s = decoder = None
            here = batch // at.ranks if way == "own" else batch
            part = slice(at.rank * here, (at.rank + 1) * here) if way == "own" else slice(None)
            if model is not None:
                torch._dynamo.reset()
                decoder = Decoder(model, here, args.keys, at, way)
                start = time.perf_counter()
                decoder.prefill(self.ids(batch, vocab)[part])
                decoder.capture()
                compile_s = time.perf_counter() - start
            if way == "one":
                if decoder is not None:
                    known[batch] = self.logits(decoder, None)
                    ms = self.ms(decoder)
            else:
                assert decoder is not None
                error, equal = self.compared(decoder, batch, part, known)
                self.barrier()
                if error is None or error < TOLERANCE:
                    ms = self.largest(self.ms(decoder))
            self.tell({
                "table": "decode", **of, "batch": batch, "ms": ms, "error": error,
                "equal_tokens_ratio": equal, "compile_s": compile_s, "between": said,
            })  # fmt: skip
            del decoder
        del model
        gc.collect()
        if at.device.type == "cuda":
            torch.cuda.empty_cache()

    def compared(
        self, decoder: Decoder, batch: int, part: slice, known: dict[int, Any]
    ) -> tuple[float | None, float | None]:
        """Returns the error and the share of equal tokens, on all ranks. Rank 0 has the results of one GPU,
        if there are any."""
        device = self.all.device
        tokens = torch.full((CHECKED + 1, batch), -1, dtype=torch.int64, device=device)
        if batch in known:
            tokens.copy_(torch.stack(known[batch][1]))
        self.dist.broadcast(tokens, 0)
        if tokens[0, 0] < 0:
            return None, None
        logits, chosen = self.logits(decoder, [t[part] for t in tokens])
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for i, one in enumerate(logits):
            every = [torch.empty_like(one) for _ in range(self.all.ranks)]
            self.dist.all_gather(every, one.contiguous())
            if batch in known:
                got = torch.cat(every, 0 if decoder.way == "own" else 1).double()
                want = known[batch][0][i].double()
                squares += torch.stack([(got - want).square().sum(), want.square().sum()])
        self.dist.broadcast(squares, 0)
        equal = (torch.stack(chosen) == tokens[:, part]).double().mean()
        self.dist.all_reduce(equal)
        return (squares[0] / squares[1]).sqrt().item(), equal.item() / self.all.ranks


def needed(name: str, layers: int) -> int:
    """Returns the bytes of all weights."""
    s = MODELS[name]
    hidden, dim = s["hidden_size"], s["head_dim"]
    experts = s["num_experts"] * 3 * hidden * s["moe_intermediate_size"] * 9 // 16
    attention = 2 * hidden * dim * 2 * (s["num_attention_heads"] + s["num_key_value_heads"])
    return layers * (experts + attention) + 2 * 2 * hidden * s["vocab_size"]


def memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**40
    return torch.cuda.get_device_properties(device).total_memory


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    at = Rank(args)
    for name in args.models.split(","):
        known: dict[int, Any] = {}
        for way in args.ways.split(","):
            at.measure(name, way, [int(b) for b in args.batches.split(",")], known)
    at.barrier()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        measure(record.parser_of(__doc__, add_arguments).parse_args())
        sys.stdout.flush()
        os._exit(0)
    record.main(__doc__, add_arguments, rows)
