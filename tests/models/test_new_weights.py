"""New 16-bit weights for a 4-bit model are quantised in place, to the weights that `prepare` of the new model
gives."""

from __future__ import annotations

import copy
import gc
import random

import pytest
import torch
from moe_models import build
from reference import relative_error
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fp4_ops
from fp4_ops.experts.find import is_experts
from fp4_ops.tensor import FP4Tensor


def renewed(model: nn.Module) -> nn.Module:
    """A model of the same shapes with other weights; one expert's up is much larger than its gate."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn_like(p) * 0.1)
        for name, p in other.named_parameters():
            if name.endswith("gate_up_proj"):
                p[1].chunk(2)[1].mul_(9)
                p[2].chunk(2)[0].mul_(9)
    return other


def per_expert(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict with one tensor an expert's matrix."""
    state, experts = dict(model.state_dict()), {n: m for n, m in model.named_modules() if is_experts(m)}
    for owner, module in experts.items():
        for attribute in ("gate_up_proj", "down_proj"):
            stack = state.pop(f"{owner}.{attribute}")
            for e, w in enumerate(stack):
                w = w.T if module.is_transposed else w
                if attribute == "down_proj":
                    state[f"{owner}.{e}.down_proj.weight"] = w
                    continue
                alternating = not module.is_concatenated
                gate, up = (w[0::2], w[1::2]) if alternating else w.chunk(2)
                state |= {f"{owner}.{e}.gate_proj.weight": gate, f"{owner}.{e}.up_proj.weight": up}
    return state


def differing(model: nn.Module, want: nn.Module) -> list[str]:
    state = want.state_dict()
    return [name for name, t in model.state_dict().items() if not torch.equal(t, state[name])]


def shuffled(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    items = list(state.items())
    random.shuffle(items)
    return items


@pytest.mark.parametrize(
    ("family", "format", "method"),
    [
        ("qwen3_moe", "nvfp4", "rtn"),
        ("gpt_oss", "nvfp4", "rtn"),
        ("mixtral", "mxfp4", "rtn"),
        pytest.param("qwen3_moe", "nvfp4", "search", marks=pytest.mark.more),
        pytest.param("qwen3_moe", "int4", "rtn", marks=pytest.mark.more),
        pytest.param("gpt_oss", "mxfp4", "search", marks=pytest.mark.more),
    ],
)
def test_buckets_in_any_order_give_what_prepare_gives(family, format, method):
    old = build(family, torch.float32, "grouped_mm")
    new = renewed(old)
    want = copy.deepcopy(new)
    fp4_ops.prepare(old, format, method=method)
    fp4_ops.prepare(want, format, method=method)
    for state in (dict(new.state_dict()), per_expert(new)):
        for load in ("buckets", "update", "checkpoint", "strict"):
            model, items = copy.deepcopy(old), shuffled(state)
            if load == "buckets":
                for start in range(0, len(items), 5):
                    model.load_state_dict(dict(items[start : start + 5]), strict=False)
            elif load == "update":
                for name, values in items:
                    fp4_ops.update(model, name, values)
            elif load == "checkpoint":
                options = StateDictOptions(strict=False, full_state_dict=True)
                set_model_state_dict(model, dict(state), options=options)
            else:
                model.load_state_dict(state)
            assert differing(model, want) == [], load
            assert not any("_halves" in m.__dict__ for m in model.modules())


def test_one_half_alone_is_right_at_once_and_exact_once_the_other_comes():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    new = renewed(old)
    want = copy.deepcopy(new)
    model = copy.deepcopy(old)
    fp4_ops.prepare(model)
    fp4_ops.prepare(want)
    name, owner = next((n, m) for n, m in model.named_modules() if is_experts(m))
    state = per_expert(new)
    weight, before = owner.gate_up_proj, per_expert(old)
    for e in range(4):
        given, other = random.sample(["gate", "up"], 2)
        fp4_ops.update(model, f"{name}.{e}.{given}_proj.weight", state[f"{name}.{e}.{given}_proj.weight"])
        gate, up = weight.dequantize()[e].chunk(2)
        have = {"gate": gate, "up": up}
        for half, source in ((given, state), (other, before)):
            bound = 0.13 if half == given else 0.15  # e4m3 scales of a half that is 9 times smaller
            assert relative_error(have[half], source[f"{name}.{e}.{half}_proj.weight"]) < bound
        # The weights were read, so this update may have been broken off: the next one is exact all the same.
    for _ in range(2):
        for key, values in shuffled(state):
            fp4_ops.update(model, key, values)
        assert differing(model, want) == []
        weight.dequantize()


def test_a_prepared_model_loads_its_own_state_dict():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    want = renewed(old)
    fp4_ops.prepare(old)
    fp4_ops.prepare(want)
    owner = next(n for n, m in want.named_modules() if is_experts(m))
    name = f"{owner}.gate_up_proj"
    half = want.get_submodule(name).dequantize()[0].chunk(2)[0]
    for model in (old, copy.deepcopy(old)):
        fp4_ops.update(model, f"{owner}.0.gate_proj.weight", half)  # waits, and must not outlive the load
        model.load_state_dict(want.state_dict())
        assert differing(model, want) == []
        assert "_halves" not in model.get_submodule(name).__dict__


def test_what_does_not_fit_is_refused_by_name():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    fp4_ops.prepare(old)
    before = copy.deepcopy(old.state_dict())
    name, module = next((n, m) for n, m in old.named_modules() if is_experts(m))
    e, n, k = module.gate_up_proj.packed.shape[0], module.gate_up_proj.packed.shape[1], module.gate_up_proj.k
    nan = torch.randn(e, n, k)
    nan[1, 2, 3] = torch.nan
    bad = {
        f"{name}.gate_up_proj": (nan, "NaN or infinity"),
        f"{name}.down_proj": (torch.randn(e, 4, 4), "have shape"),
        f"{name}.0.gate_proj.weight": (torch.randn(n, k), "have shape"),
        f"{name}.99.up_proj.weight": (torch.randn(n // 2, k), "expert 99"),
        f"{name}.0.up_proj.weight": (torch.randint(9, (n // 2, k)), "int64"),
        f"{name}.1.up_proj.weight": (torch.empty(n // 2, k, device="meta"), "meta device"),
    }
    for key, (values, words) in bad.items():
        with pytest.raises(RuntimeError, match=words) as error:
            old.load_state_dict({key: values}, strict=False)
        assert key in str(error.value)
        with pytest.raises(ValueError, match=words) as error:
            fp4_ops.update(old, key, values)
        assert key in str(error.value)
    for shape in ((n, k), (n // 2, k), (k, n)):
        with pytest.raises(RuntimeError, match="the shape of an expert's matrix, and no name that is known"):
            old.load_state_dict({f"{name}.0.middle.weight": torch.ones(shape)}, strict=False)
        with pytest.raises(RuntimeError, match=f"shape of a weight of these experts.*{name}.down_proj"):
            old.load_state_dict({f"{name}.w13_weight": torch.ones(e, *shape)}, strict=False)
    for odd in (nan.numpy(), list(nan)):
        with pytest.raises(RuntimeError, match=r"a (ndarray|list), not a tensor"):
            old.load_state_dict({f"{name}.gate_up_proj": odd}, strict=False)
    with pytest.raises(AttributeError, match=r"fp4_ops.update\(model, name, tensor\)"):
        module.gate_up_proj.data = nan
    with pytest.raises(AttributeError, match=r"fp4_ops.update\(model, name, tensor\)"):
        module.gate_up_proj.copy_(nan)
    for values in (nan, torch.nn.Parameter(nan), None):
        with pytest.raises(AttributeError, match=r"fp4_ops.update\(model, name, tensor\)"):
            module.gate_up_proj.data = values
    with pytest.raises(RuntimeError, match="the weight is in 4 bits; load it through"):
        module.gate_up_proj.load_state_dict({"weight": nan}, strict=False)
    with pytest.raises(ValueError, match=f"no weight .*names like it are .*{name}.gate_up_proj"):
        fp4_ops.update(old, f"{name}.gate_up_projs", nan)
    state = {n: t for n, t in before.items() if not n.startswith(f"{name}.gate_up_proj")}
    rows = {(i, half): torch.randn(n // 2, k) for i in range(e) for half in ("gate", "up")}
    given = {f"{name}.{i}.{half}_proj.weight": w for (i, half), w in rows.items() if (i, half) != (1, "up")}
    with pytest.raises(RuntimeError, match=r"Missing key\S* in state_dict: \S*experts.1.up_proj.weight"):
        old.load_state_dict(state | given)
    with pytest.raises(RuntimeError, match="twice"):
        old.load_state_dict(before | given)


def test_tensors_that_could_be_no_weight_are_unexpected_keys_as_in_torch():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    fp4_ops.prepare(old)
    before = copy.deepcopy(old.state_dict())
    name, owner = next((n, m) for n, m in old.named_modules() if is_experts(m))
    n, k = owner.gate_up_proj.packed.shape[1], owner.gate_up_proj.k
    extra = {
        f"{name}.lora_A.default.weight": torch.ones(4, k), f"{name}.0.lora_B": torch.ones(n, 4),
        f"{name}.0.gate_proj.input_scale": torch.ones(()), f"{name}.steps": torch.ones(3),
        f"{name}.3.middle.weight": torch.ones(3, 5), f"{name}.routed": torch.ones(99, n, k),
    }  # fmt: skip
    assert sorted(old.load_state_dict(extra, strict=False).unexpected_keys) == sorted(extra)
    assert (
        differing(old, copy.deepcopy(old))
        == []
        == [n for n, t in before.items() if not t.equal(old.state_dict()[n])]
    )
    with pytest.raises(RuntimeError, match="Unexpected key"):
        old.load_state_dict(before | extra)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_parameter_that_is_assigned_is_quantised_into_place(family):
    old = build(family, torch.float32, "grouped_mm")
    new = renewed(old)
    want = copy.deepcopy(new)
    fp4_ops.prepare(old)
    fp4_ops.prepare(want)
    where = {name: t.data_ptr() for name, t in old.state_dict().items() if "_extra" not in name}
    for owner, source in new.named_modules():
        for name, p in source.named_parameters(recurse=False):
            if is_experts(source) and p.dim() == 3:
                setattr(old.get_submodule(owner), name, nn.Parameter(p.detach().clone()))
            else:
                old.get_parameter(f"{owner}.{name}").data.copy_(p)
    assert differing(old, want) == []
    assert {name: t.data_ptr() for name, t in old.state_dict().items() if name in where} == where
    module = next(m for m in old.modules() if is_experts(m))
    nan = next(m for m in new.modules() if is_experts(m)).gate_up_proj * torch.nan
    for values, words in ((torch.ones(2, 3), "it must be"), (nan.detach(), "NaN")):
        with pytest.raises(ValueError, match=f"Experts.gate_up_proj .*{words}"):
            module.gate_up_proj = nn.Parameter(values)
    assert differing(old, want) == []
    del module.gate_up_proj
    with pytest.raises(RuntimeError, match=r"gate_up_proj of \w*Experts was deleted .* fp4_ops.update"):
        old(input_ids=torch.randint(0, 60, (1, 4)))


def test_compiled_models_see_new_values_and_nothing_grows():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    new = renewed(old)
    want = copy.deepcopy(new)
    fp4_ops.prepare(old, activation="bf16")
    fp4_ops.prepare(want, activation="bf16")
    compiled, ids = torch.compile(old, backend="aot_eager"), torch.randint(0, 64, (2, 7))
    owner = next(n for n, m in old.named_modules() if is_experts(m))
    old.load_state_dict(new.state_dict())
    states = [
        {n: t for n, t in state.items() if n.startswith(owner)}
        for state in (dict(new.state_dict()), per_expert(new))
    ]
    with torch.no_grad():
        compiled(input_ids=ids, use_cache=False)
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        where = {n: t.data_ptr() for n, t in old.state_dict().items()}
        for i in range(100):
            for name, values in shuffled(states[i % 2]):
                fp4_ops.update(compiled, name, values)
            if i == 1:
                gc.collect()
                tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        got = compiled(input_ids=ids, use_cache=False).logits
        expected = want(input_ids=ids, use_cache=False).logits
    assert relative_error(got, expected) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames
    del values
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= tensors + 8
    assert {n: t.data_ptr() for n, t in old.state_dict().items() if "_extra" not in n} == {
        n: p for n, p in where.items() if "_extra" not in n
    }


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_that_was_prepared_under_inference_mode_takes_new_values(family, stacked):
    """Its codes, and what was copied there, may change only under inference_mode, says torch."""
    old = build(family, torch.bfloat16, "grouped_mm")
    new = renewed(old)
    with torch.inference_mode():
        model = copy.deepcopy(old)
        fp4_ops.prepare(model)
        assert any(t.is_inference() for t in model.state_dict().values())
    for name, tensor in shuffled(new.state_dict() if stacked else per_expert(new)):
        fp4_ops.update(model, name, tensor)
    fp4_ops.prepare(new)
    assert differing(model, new) == []


def test_wrappers_of_either_model_do_not_matter():
    old = build("qwen3_moe", torch.float32, "grouped_mm")
    new = renewed(old)
    want = copy.deepcopy(new)
    fp4_ops.prepare(old)
    fp4_ops.prepare(want)
    expected = want.state_dict()
    for i, layer in enumerate(old.model.layers):  # as in regional compilation
        old.model.layers[i] = torch.compile(layer, backend="eager")
    model = Wrapper(torch.compile(old, backend="eager"))
    for name, values in shuffled(per_expert(new)):
        fp4_ops.update(model, random.choice([name, f"_orig_mod.{name}", f"module.{name}"]), values)
    got = {n.replace("_orig_mod.", "").removeprefix("module."): t for n, t in model.state_dict().items()}
    assert got.keys() == expected.keys()
    assert [n for n, t in got.items() if not torch.equal(t, expected[n])] == []
    with pytest.raises(ValueError, match="the model has no weight module"):
        fp4_ops.update(model, "module.nothing", torch.ones(1))


def test_a_wrapper_has_weights_too():
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    scaled = Wrapper(nn.Linear(2, 2))
    scaled.scale = nn.Parameter(torch.ones(3))
    scaled.module.scale = nn.Parameter(torch.ones(3))
    fp4_ops.update(averaged, "n_averaged", torch.tensor(7))
    fp4_ops.update(averaged, "weight", torch.full((2, 2), 3.0))
    assert averaged.n_averaged == 7 and (averaged.module.weight == 3).all()
    for model in (scaled, torch.compile(scaled, backend="eager")):
        for start in ("", "_orig_mod."):
            values, inner = torch.randn(2, 3)
            fp4_ops.update(model, start + "scale", values)
            fp4_ops.update(model, start + "module.scale", inner)
            assert torch.equal(scaled.scale, values) and torch.equal(scaled.module.scale, inner)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(ids == e)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


@pytest.mark.parametrize("method", ["rtn", pytest.param("search", marks=pytest.mark.more)])
def test_experts_that_are_modules(method):
    old, new = Block().eval(), Block().eval()
    want = copy.deepcopy(new)
    fp4_ops.prepare(old, method=method)
    fp4_ops.prepare(want, method=method)
    x, state = torch.randn(9, 64), new.state_dict()
    for load in ("load_state_dict", "update", "copy_"):
        model = copy.deepcopy(old)
        compiled = torch.compile(model, backend="fp4", options={"activation": "bf16"})
        with torch.no_grad():
            compiled(x)
        if load == "load_state_dict":
            for name, values in shuffled(state):
                model.load_state_dict({name: values}, strict=False)
        else:
            parameters = dict(model.named_parameters())
            for name, values in shuffled(state):
                if load == "update":
                    fp4_ops.update(compiled, name, values)
                else:
                    parameters[name].data.copy_(values)
        weights = {n: p for n, p in want.named_parameters() if isinstance(p, FP4Tensor)}
        assert len(weights) == 12
        for name, p in model.named_parameters():
            if name in weights:
                held = zip(p._held(), weights[name]._held(), strict=True)
                assert all(torch.equal(a, b) for a, b in held)
        with torch.no_grad():
            assert relative_error(model(x), want(x)) < 1e-6
            assert relative_error(compiled(x), want(x)) < 1e-5
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        old.load_state_dict({"experts.0.w1.weight": torch.full((64, 64), torch.nan)}, strict=False)
