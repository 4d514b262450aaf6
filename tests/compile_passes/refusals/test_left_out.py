"""Experts that are in no graph: one warning, or an error with strict, and no false warnings."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging

import pytest
import torch
from moe_models import Recorder, build, tokens
from moe_styles import STYLES, Expert, FusedStyle, ListStyle, Style
from torch import Tensor, nn

import fp4_ops
from fp4_ops.compile_passes.dynamo import left_out
from fp4_ops.compile_passes.dynamo.left_out import expert_parameters, forget_limits
from fp4_ops.compile_passes.weights.packed import store
from fp4_ops.compile_passes.weights.specs import PackSpec

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LEFT = "nothing was rewritten, yet these parameters look like experts"


@pytest.fixture
def warnings(caplog):
    forget_limits()  # a Recorder has no `reset`, which forgets those of tests before
    left_out._alone.clear()  # modules of tests before may still be there
    caplog.set_level(logging.WARNING, "fp4_ops")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "fp4_ops"]


class Broken(ListStyle):
    """A loop that Dynamo leaves to Python."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, j = torch.where(ids == e)
            torch._dynamo.graph_break()
            out.index_add_(0, token, weights[token, j, None] * expert(x[token]))
        return out


class Disabled(ListStyle):
    """Experts behind what Dynamo never enters, as accelerate's hooks are."""

    @torch.compiler.disable
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.list], 1)
        return (outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, self.H)) * weights.unsqueeze(-1)).sum(1)


class DisabledStack(FusedStyle):
    @torch.compiler.disable
    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        outs = torch.stack([self.expert(e, x) for e in range(self.E)], 1)
        return (outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, self.H)) * weights.unsqueeze(-1)).sum(1)


class InAGraph(ListStyle):
    """Experts of a kind that nothing recognises, in one graph: each has three layers, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(torch.stack([e.w2(torch.fft.fft(e.w1(x)).real) for e in self.list]), 0)[-1]


class Model(nn.Module):
    def __init__(self, moe: Style) -> None:
        super().__init__()
        self.attn, self.moe, self.H = nn.Linear(moe.H, moe.H), moe, moe.H

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(self.attn(x), -1) + x
        torch._dynamo.graph_break()
        return self.moe(x)


LEFT_OUT = [Broken, Disabled, DisabledStack, InAGraph]


def call(module: nn.Module, compiled=None, **options: object) -> Recorder:
    recorder = Recorder(activation="bf16", **options)
    compiled = torch.compile(module, backend=recorder) if compiled is None else compiled(module, recorder)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, module.H)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-3, atol=1e-4)
    return recorder


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", LEFT_OUT, ids=lambda c: c.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
def test_one_warning_once(make, inside, warnings):
    module = Model(make()) if inside else make()
    call(module)
    (told,) = warnings()
    assert LEFT in told and "fp4_ops.explain(model" in told
    assert ("moe" if inside else "list" if issubclass(make, ListStyle) else make.__name__) in told


def test_parameters_with_the_ids_of_dead_ones_that_were_packed(warnings):
    """A view keeps the memory of a packed parameter, with what was packed of it, when it is gone."""
    module, kept = Disabled(), store(PackSpec("nvfp4", "plain", transposed=False))
    views = []
    for w in module.parameters():
        old = torch.nn.Parameter(torch.randn(1, 32, 32))
        views.append(old.detach())
        kept._entries[id(w),] = kept.entry((old,))
    call(module)
    assert len(warnings()) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", LEFT_OUT, ids=lambda c: c.__name__)
def test_an_error_with_strict(make):
    with pytest.raises(
        RuntimeError, match=r"strict=True, but not all(.|\n)*look like experts: .*parameters of"
    ):
        call(Model(make()), strict=True)
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).sum() == 2  # Dynamo is as before


def test_the_line_is_told(warnings):
    call(Disabled())
    assert "graph break: " in warnings()[0] and "return self.experts_of(x, ids, weights)" in warnings()[0]


def test_model_compile(warnings):
    module, recorder = Disabled(), Recorder()
    module.compile(backend=recorder)
    with torch.no_grad():
        module(torch.randn(9, module.H))
        module(torch.randn(9, module.H))
    assert len(warnings()) == 1 and LEFT in warnings()[0]


def test_the_backend_itself(warnings):
    module = Model(Disabled())
    with torch.no_grad():
        torch.compile(module, backend="fp4")(torch.randn(9, module.H))
        assert len(warnings()) == 1 and LEFT in warnings()[0]
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="strict=True"):
            torch.compile(module, backend="fp4", options={"strict": True})(torch.randn(9, module.H))


def test_under_accelerates_hooks(warnings):
    accelerate = pytest.importorskip("accelerate")
    module = Disabled()
    accelerate.hooks.attach_execution_device_hook(module, torch.device("cpu"))
    call(module)
    assert len(warnings()) == 1 and LEFT in warnings()[0]


def test_without_no_grad(warnings):
    module = Disabled().requires_grad_(False)
    torch.compile(module, backend=Recorder())(torch.randn(9, module.H))
    assert len(warnings()) == 1
    module = Disabled()  # training: all is as it was, and nothing is said
    torch.compile(module, backend=Recorder())(torch.randn(9, module.H))
    assert len([told for told in warnings() if LEFT in told]) == 1


class Some(nn.Module):
    """Layers of which one runs in Python, and experts of another kind that do not run."""

    H = 32

    def __init__(self, other: type[Style], loops: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([STYLES["where loop"](), other()])
        self.images, self.loops = STYLES["gather + bmm"](), loops

    def forward(self, x: Tensor) -> Tensor:
        if not self.loops:
            return self.layers[1](self.layers[0](x))
        for layer in self.layers:
            x = layer(x)
        return x if x.shape[0] < 100 else self.images(x)


class Whole(Broken):
    """A layer that Dynamo never traces."""

    forward = torch.compiler.disable(ListStyle.forward)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("other", [Broken, Disabled, Whole])
def test_one_of_two_layers(other, loops, warnings):
    recorder = Recorder(activation="bf16")
    with torch.no_grad():
        torch.compile(Some(other, loops), backend=recorder)(torch.randn(9, 32))
    (told,) = warnings()
    assert "in no graph that was rewritten" in told and "layers.1.list" in told
    assert "layers.0" not in told and "images" not in told and "graph break" in told
    assert "fp4::moe" in recorder.ops


class Idle(nn.Module):
    """Layers with a harmless graph break after them, and experts of the same shapes that do not run."""

    H = 32

    def __init__(self, upto: int) -> None:
        super().__init__()
        self.layers, self.upto = nn.ModuleList(STYLES["where loop"]() for _ in range(2)), upto
        self.mtp = STYLES["where loop"]()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.upto]:
            x = layer(x)
        torch._dynamo.graph_break()
        return x + 1


@pytest.mark.parametrize("upto", [1, 2], ids=["early exit", "idle head"])
def test_idle_experts_and_a_harmless_break(upto, warnings):
    module, recorder = Idle(upto), Recorder(activation="bf16")
    with torch.no_grad():
        torch.compile(module, backend=recorder)(torch.randn(9, 32))
    assert warnings() == [] and "fp4::moe" in recorder.ops


# --- each expert compiled by itself ---


class OneByOne(ListStyle):
    """Experts that the user compiles, in a loop that runs in Python."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, j = torch.where(ids == e)
            out.index_add_(0, token, weights[token, j, None] * expert(x[token]))
        return out


def each_expert(module: nn.Module, recorder: Recorder) -> nn.Module:
    for expert in module.list:
        expert.compile(backend=recorder)
    return module


def each_in_a_wrapper(module: nn.Module, recorder: Recorder) -> nn.Module:
    for e, expert in enumerate(module.list):
        module.list[e] = torch.compile(expert, backend=recorder)
    return module


@pytest.mark.parametrize("compiled", [each_expert, each_in_a_wrapper])
def test_experts_one_by_one(compiled, warnings):
    call(OneByOne(), compiled)
    (told,) = warnings()
    assert "look like experts: list (" in told and "each of them is compiled by itself" in told
    assert "compile the module that chooses among these experts" in told


def test_experts_one_by_one_with_strict():
    with pytest.raises(RuntimeError, match=r"strict=True, but not all(.|\n)*is compiled by itself"):
        call(OneByOne(), each_expert, strict=True)


def test_dense_layers_one_by_one(warnings):
    def each_layer(module: nn.Module, recorder: Recorder) -> nn.Module:
        for layer in module.layers:
            layer.compile(backend=recorder)
        return module

    call(Dense(), each_layer, strict=True)
    assert warnings() == []


# --- Dynamo's limit of recompilations ---


class Hooked(nn.Module):
    """A function that runs for all modules of a model, with a graph break, as accelerate's hooks have it."""

    H = 32

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @staticmethod
    def hooked(module: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return module(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.hooked(layer, x)
        return x


def dense(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))


class IdleImages(Hooked):
    """Experts of another kind that do not run."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.images = STYLES["gather + bmm"]()


@pytest.mark.parametrize("idle", [True, False], ids=["idle part", "a layer beyond"])
def test_a_limit_after_experts_in_4_bits(idle, warnings):
    layers = [STYLES["where loop"](), dense(1), dense(2), *([] if idle else [Broken()])]
    recorder = Recorder(activation="bf16")
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        torch.compile(IdleImages(*layers), backend=recorder)(torch.randn(9, 32))
    assert "fp4::moe" in recorder.ops
    if idle:
        assert warnings() == []
    else:
        (told,) = warnings()
        assert "layers.3" in told and "images" not in told and "recompile_limit (2)" in told
        assert "run in Python, or were not called" in told


def test_a_users_line_with_the_name_of_the_limit(warnings):
    class Fails(Broken):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                torch._dynamo.graph_break(msg="recompile_limit")
            return super().forward(x)

    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        torch.compile(Fails(), backend=Recorder())(torch.randn(9, 32))
    causes = [line for line in warnings()[0].splitlines() if "Dynamo has compiled forward" in line]
    assert causes and all("moe_style_base.py" in line for line in causes)  # of the experts' own forward


@pytest.mark.parametrize("some", [False, True], ids=["no experts in 4 bits", "some experts in 4 bits"])
def test_a_limit_is_the_cause(some, warnings):
    first = STYLES["where loop"] if some else functools.partial(dense, 1)
    module = Hooked(first(), dense(2), STYLES["gather + bmm"]())
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        recorder = Recorder(activation="bf16")
        torch.compile(Later(), backend=recorder)(torch.randn(9, 32))
        compiled = torch.compile(module, backend=recorder)
        compiled(torch.randn(9, 32))
        compiled(torch.randn(9, 32))
        (told,) = warnings()
        assert "layers.2" in told and "layers.0" not in told and bool(recorder.ops) is some
        assert "stops at torch._dynamo.config.recompile_limit (2)" in told and "not called" not in told
        assert told.count("  change: ") == 2 and "set torch._dynamo.config.recompile_limit" in told
        assert "graph break: " in told and "in hooked: torch._dynamo.graph_break()" in told
        torch.compile(copy.deepcopy(module), backend=recorder)(torch.randn(9, 32))
        later = warnings()[1:]  # Dynamo compiles nothing more
        assert len(later) == (not some) and all("recompile_limit (2)" in told for told in later)
        torch.compile(Later(), backend=recorder)(torch.randn(9, 32))
        assert warnings()[1:] == later  # nothing is compiled for another model, whose experts do not run
        torch._dynamo.reset()
        report = str(fp4_ops.explain(module, torch.randn(9, 32)))
    assert "Set torch._dynamo.config.recompile_limit = 3 before" in report


# --- no alarm ---


class Dense(nn.Module):
    H = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert(32, 48, torch.relu, True, False) for _ in range(4))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            torch._dynamo.graph_break()
        return self.head(x)


class SharedOnly(nn.Module):
    H = 32

    def __init__(self) -> None:
        super().__init__()
        self.shared_experts = nn.ModuleList(Expert(32, 48, torch.relu, True, False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return sum(e(x) for e in self.shared_experts)


class Later(nn.Module):
    """The experts of this model have not run yet."""

    H = 32

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.proj = STYLES["where loop"](), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) if x.shape[0] < 100 else self.experts(x)


class Layers(nn.Module):
    """Layers that share one compilation, with breaks between them."""

    H = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(STYLES["where loop"]() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Dense, SharedOnly, Later], ids=lambda c: c.__name__)
def test_nothing_to_say(make, strict, warnings):
    call(make(), strict=strict)
    assert warnings() == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Layers, lambda: Model(STYLES["where loop"]())], ids=["layers", "model"])
def test_experts_that_another_graph_has(make, strict, warnings):
    """A graph of attention comes before theirs; layers share code."""
    module, recorder = make(), Recorder(activation="bf16", strict=strict)
    with torch.no_grad():
        torch.compile(module, backend=recorder)(torch.randn(9, 32))
        torch.compile(module, backend=recorder)(torch.randn(9, 32))
    assert "fp4::moe" in recorder.ops and warnings() == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_a_prepared_model(format, warnings):
    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model, format=format)
    assert expert_parameters(model) == {}
    with torch.no_grad():
        torch.compile(model, backend=Recorder(strict=True))(tokens(1, 6), use_cache=False)
    assert warnings() == []


def test_a_part_of_a_model_and_an_error_of_its_own(warnings):
    module, recorder = Later(), Recorder()
    method = torch.compile(module.extra_repr, backend=recorder)  # a method that runs a part of the model
    method()

    class Fails(Disabled):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            raise KeyError("its own")

    with contextlib.suppress(KeyError), torch.no_grad():
        torch.compile(Fails(), backend=recorder)(torch.randn(9, 32))
    with torch.no_grad():
        fp4_ops.explain(Disabled(), torch.randn(9, 32))
        with torch.compiler.set_stance("force_eager"):
            torch.compile(Disabled(), backend=recorder)(torch.randn(9, 32))
    assert warnings() == []


def test_what_was_reported_is_not_said_again(warnings):
    from test_lookalikes import OneExpertTwice

    call(OneExpertTwice())
    assert len(warnings()) == 2 and not any(
        LEFT in told for told in warnings()
    )  # one for each of two lengths


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_transformers_experts_look_like_experts(implementation):
    model = build("qwen3_moe", torch.float32, implementation)
    assert [len(w) for w in expert_parameters(model).values()] == [2, 2]


# --- later calls ---


class Decoding(ListStyle):
    """A branch of its own for one token, as chat code has it."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self.one(x, ids[0], weights[0])
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, j = torch.where(ids == e)
            out.index_add_(0, token, weights[token, j, None] * expert(x[token]))
        return out

    def one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sum(scale * self.list[e](x) for e, scale in zip(ids.tolist(), weights))


class DecodingDisabled(Decoding):
    @torch.compiler.disable
    def one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return sum(scale * self.list[e](x) for e, scale in zip(ids.tolist(), weights))


class OtherPartsLater(nn.Module):
    """The second call compiles something, with a graph break, but not the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.proj = STYLES["where loop"](), nn.Linear(32, 32)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        x = self.moe(x)
        torch._dynamo.graph_break()
        return self.proj(x) if more else x


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [Decoding, DecodingDisabled], ids=lambda c: c.__name__)
def test_a_later_call_is_told_too(make, warnings):
    module = make()
    compiled = torch.compile(module, backend=Recorder(activation="bf16"))
    with torch.no_grad():
        for n in (9, 9, 1, 1):
            compiled(torch.randn(n, module.H))
    (told,) = warnings()
    assert "nothing was rewritten in this call" in told and "graph break: " in told


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [Decoding, DecodingDisabled], ids=lambda c: c.__name__)
def test_a_later_call_with_strict(make):
    module = make()
    compiled = torch.compile(module, backend=Recorder(activation="bf16", strict=True))
    with torch.no_grad():
        compiled(torch.randn(9, module.H))
        with pytest.raises(RuntimeError, match="strict=True"):
            compiled(torch.randn(1, module.H))


@pytest.mark.parametrize("strict", [False, True])
def test_other_parts_of_a_later_call(strict, warnings):
    module = OtherPartsLater()
    compiled = torch.compile(module, backend=Recorder(activation="bf16", strict=strict))
    with torch.no_grad():
        for more_of_it in (False, True, True):
            compiled(torch.randn(9, 32), more_of_it)
    assert warnings() == []


class SwitchHead(nn.Module):
    """Attention's projections are experts, which only their parameters' names say."""

    H = 32

    def __init__(self) -> None:
        super().__init__()
        self.v_experts, self.sel = nn.Parameter(torch.randn(4, 32, 32) / 6), nn.Linear(32, 4)
        self.shared_expert = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        out = torch.zeros_like(x)
        for t, e in enumerate(self.sel(x).argmax(-1).tolist()):
            out[t] = x[t] @ self.v_experts[e]
        return out


def test_parameters_that_are_called_experts(warnings):
    module = SwitchHead()
    assert {n: len(w) for n, w in expert_parameters(module).items()} == {"SwitchHead": 1}
    call(module)
    assert len(warnings()) == 1 and LEFT in warnings()[0]
