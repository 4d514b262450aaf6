"""Graph breaks at random places of transformers' models: they run, and the experts stay in 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from conftest import more
from families import expert_block, tiny
from moe_models import Recorder, exact, relative_error, tokens
from torch import nn

FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe", "phimoe"),
    *("granitemoe", "llama4_text"),
)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")
T = TypeVar("T")


def drawn(choices: Sequence[T]) -> T:
    return choices[int(torch.randint(len(choices), ()))]


def largest(x: Any) -> float:
    tensors = [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
    return max((t.detach().float().abs().max().item() for t in tensors), default=0.0)


# --- what people add to a module ---


def printing(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda m, args: print("", end=""))


def checking(module: nn.Module) -> None:
    def check(m: nn.Module, args: Any, out: Any) -> None:
        if not largest(out) < 1e9:
            raise FloatingPointError("too large")

    module.register_forward_hook(check)


def recording(module: nn.Module) -> None:
    seen: dict[str, float] = {}
    module.register_forward_hook(lambda m, args, out: seen.update({type(m).__name__: largest(out)}))


def asking(module: nn.Module) -> None:
    forward = module.forward

    def ask(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return out if largest(out) < 1e9 else None

    module.forward = ask


def breaking(module: nn.Module) -> None:
    forward = module.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(*args, **kwargs)

    module.forward = broken


def disabled(module: nn.Module) -> None:
    module.forward = torch.compiler.disable(module.forward)


def disabled_hook(module: nn.Module) -> None:
    module.register_forward_hook(torch.compiler.disable(lambda m, args, out: None))


CHANGES: tuple[Callable[[nn.Module], None], ...] = (
    printing,
    checking,
    recording,
    asking,
    breaking,
    disabled,
    disabled_hook,
)


def dispatched(model: nn.Module) -> None:
    """Adds accelerate's hooks, as device_map="auto" does on two GPUs."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")


# --- the models ---


def outside_of_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold no block of experts, and are in none."""
    blocks = [m for m in model.modules() if type(m) is type(expert_block(model))]
    inner = {id(m) for block in blocks for m in block.modules()}
    around = {id(m) for m in model.modules() if any(b in m.modules() for b in blocks)}
    return {n: m for n, m in model.named_modules() if id(m) not in inner | around and n.count(".") < 4}


def calls(model: nn.Module, *others: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the logits of all models for prompts of two sizes, each with the step after it from the cache."""
    for shape in ((2, 7), (3, 5)):
        caches: list[dict[str, Any]] = [{} for _ in (model, *others)]
        for ids in (tokens(*shape), tokens(shape[0], 1)):
            with torch.no_grad():
                outs = [m(ids, **cache) for m, cache in zip((model, *others), caches, strict=True)]
            caches = [{"past_key_values": out.past_key_values} for out in outs]
            yield [out.logits for out in outs]


def broken_beside_experts(family: str, *changes: Callable[[nn.Module], None]) -> tuple[nn.Module, nn.Module]:
    """Return a model with breaks at drawn places, and its twin without."""
    model = tiny(family)
    twin, modules = exact(family, model), outside_of_experts(model)
    for how in changes:
        name = drawn(list(modules))
        print(f"{family}: {how.__name__} {name}")
        how(modules[name])
    return model, twin


PAIRS = [
    pytest.param(family, how, id=f"{family}-{how.__name__}", marks=pytest.mark.more)
    for family, how in product(FAMILIES, CHANGES)
]


@pytest.mark.parametrize(("family", "how"), [pytest.param("", None, id="drawn"), *PAIRS])
def test_breaks_beside_experts(family, how):
    family, how, recorder = family or drawn(FAMILIES), how or drawn(CHANGES), Recorder(activation="bf16")
    model, twin = broken_beside_experts(family, how, drawn(CHANGES))
    for got, want in calls(torch.compile(model, backend=recorder), twin):
        assert relative_error(got, want) < 1e-3, recorder.reasons
    assert recorder.ops, recorder.reasons


def within_the_formats_error(family: str, change: Callable[[nn.Module], None]) -> None:
    """Any number of experts may be in 4 bits."""
    model, recorder = tiny(family), Recorder(activation="bf16")
    original, twin = copy.deepcopy(model), exact(family, model)
    change(model)
    for got, want, most in calls(torch.compile(model, backend=recorder), original, twin):
        assert relative_error(got, want) < 2 * relative_error(most, want) + 1e-5, recorder.reasons


@pytest.mark.parametrize(
    ("family", "how"), [pytest.param("", None, id="drawn", marks=pytest.mark.more), *PAIRS]
)
def test_breaks_within_blocks_of_experts(family, how):
    family, how = family or drawn(FAMILIES), how or drawn(CHANGES)

    def change(model: nn.Module) -> None:
        module = drawn(list(expert_block(model).modules()))
        print(f"{family}: {how.__name__} {type(module).__name__}")
        how(module)

    within_the_formats_error(family, change)


@pytest.mark.parametrize("family", ["granitemoe", *map(more, FAMILIES)])
def test_accelerates_hooks(family):
    """Dynamo compiles the hooks' code for eight kinds of modules, and leaves the others to Python."""
    within_the_formats_error(family, dispatched)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("family", [pytest.param("", id="drawn"), *FAMILIES])
def test_through_inductor(family):
    """A prompt only: Inductor compiles each part between breaks."""
    model, twin = broken_beside_experts(family or drawn(FAMILIES), drawn(CHANGES))
    got, want = next(calls(torch.compile(model, backend="fp4", options={"activation": "bf16"}), twin))
    assert relative_error(got, want) < 1e-3
