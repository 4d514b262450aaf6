"""Graph breaks at random places of transformers' models: they run, and the experts stay in 4 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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


CHANGES: tuple[Callable[[nn.Module], None], ...] = (
    printing,
    checking,
    recording,
    asking,
    breaking,
    disabled,
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


def calls(model: nn.Module, *others: nn.Module) -> Iterator[tuple[torch.Tensor, ...]]:
    for shape in ((2, 7), (1, 5)):
        ids = tokens(*shape)
        with torch.no_grad():
            yield tuple(m(ids, use_cache=False).logits for m in (model, *others))


@pytest.mark.parametrize("family", [more(drawn), *map(more, FAMILIES)])
def test_breaks_beside_experts(family):
    family = family(FAMILIES) if callable(family) else family
    model, recorder = tiny(family), Recorder(activation="bf16")
    twin, modules = exact(family, model), outside_of_experts(model)
    for _ in range(2):
        name, how = drawn(list(modules)), drawn(CHANGES)
        print(f"{family}: {how.__name__} {name}")
        how(modules[name])
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


@pytest.mark.more
@pytest.mark.parametrize("family", [drawn, *map(more, FAMILIES)])
def test_breaks_within_blocks_of_experts(family):
    family = family(FAMILIES) if callable(family) else family

    def change(model: nn.Module) -> None:
        module, how = drawn(list(expert_block(model).modules())), drawn(CHANGES)
        print(f"{family}: {how.__name__} {type(module).__name__}")
        how(module)

    within_the_formats_error(family, change)


@pytest.mark.parametrize("family", ["granitemoe", *map(more, FAMILIES)])
def test_accelerates_hooks(family):
    """Dynamo compiles the hooks' code for eight kinds of modules, and leaves the others to Python."""
    within_the_formats_error(family, dispatched)


@pytest.mark.slow
@pytest.mark.more  # the same breaks as above, around more of a model
def test_through_inductor():
    model = tiny("qwen3_moe")
    twin = exact("qwen3_moe", model)
    printing(model.model.layers[1])
    compiled = torch.compile(model, backend="fp4", options={"activation": "bf16"})
    with torch.no_grad():
        ids = tokens(2, 7)
        assert relative_error(compiled(ids, use_cache=False).logits, twin(ids, use_cache=False).logits) < 1e-3
