"""fp4_ops.prepare: same answers as the dequantised weights, less memory, and clear refusals."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from moe_models import FAMILIES, build, fake_quantised, that_answers, tokens
from torch import nn

import fp4_ops
from fp4_ops.backends.hopper import HOPPER
from fp4_ops.compile_passes.options import Options
from fp4_ops.experts.find import is_experts, recognise_gate
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.meta import layouts
from fp4_ops.runtime.relayout import relayout

FORMATS = ("nvfp4", "mxfp4", "int4")


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if is_experts(m)]


def dequantised(model: nn.Module, format: str) -> nn.Module:
    """The same model with each expert weight replaced by what its four bits stand for."""
    model = copy.deepcopy(model)
    for module in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            weight.data = fake_quantised(weight, format, module.is_transposed)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error < bound, f"relative error {error:.2e}, bound {bound:.0e}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_that_of_the_dequantised_weights(family, format):
    model = build(family, torch.float32, "grouped_mm")
    want = dequantised(model, format)
    report = fp4_ops.prepare(model, format, activation="bf16")
    assert len(report.prepared) == len(report.modules) == len(experts_of(model)) > 0
    assert {m.gate for m in report.prepared} == {"swigluoai" if family == "gpt_oss" else "silu"}
    for length in (1, 13):
        ids = tokens(2, length)
        close(logits(model, ids), logits(want, ids), 1e-4)


def test_int8_activations_are_automatic_on_a_cpu():
    model = build("mixtral", torch.float32, "grouped_mm")
    explicit = copy.deepcopy(model)
    assert "int8 (auto)" in str(fp4_ops.prepare(model))
    fp4_ops.prepare(explicit, activation="int8")
    ids = tokens(2, 9)
    assert torch.equal(logits(model, ids), logits(explicit, ids))


class QuickGelu(nn.Module):
    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        return gate * torch.sigmoid(1.702 * gate)


def soft_limited(gate_up: torch.Tensor, caps: tuple[float, float]) -> torch.Tensor:
    """Kimi-K3's activation, with these limits."""
    gate, up = (cap * torch.tanh(half / cap) for half, cap in zip(gate_up.chunk(2, -1), caps))
    return gate * torch.sigmoid(gate_up.chunk(2, -1)[0]) * up


@pytest.mark.parametrize(("family", "biased"), [("qwen3_moe", False), ("gpt_oss", True)])
def test_biases_are_asked_for_only_where_there_are_any(family, biased):
    """What a module lacks costs a step more than what it has: torch.compile guards that it still lacks it."""
    model = build(family, torch.float32, "grouped_mm")
    fp4_ops.prepare(model)
    forms = [m._fp4_recipe.form for m in model.modules() if hasattr(m, "_fp4_recipe")]
    names = {name for form in forms for name in (form.gate_up_bias, form.down_bias)}
    assert names == ({"gate_up_proj_bias", "down_proj_bias"} if biased else {""})


def test_each_gate_is_known_by_what_it_computes():
    model = build("mixtral", torch.float32, "grouped_mm")
    module = experts_of(model)[0]
    for act_fn, name in (
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.ReLU(), None),
        (QuickGelu(), None),
    ):
        module.act_fn = act_fn
        assert recognise_gate(module) == name
    for caps, name in (((4.0, 25.0), "situ"), ((4.0, 24.0), None)):
        module._apply_gate = partial(soft_limited, caps=caps)
        assert recognise_gate(module) == name
    oss = experts_of(build("gpt_oss", torch.float32, "grouped_mm"))[0]
    assert recognise_gate(oss) == "swigluoai"
    for limit in (6.0, 0.03, 1000.0):
        oss.limit = limit
        assert recognise_gate(oss) == f"swigluoai(limit={limit:g})"


@pytest.mark.parametrize("previous", ["eager", "grouped_mm", "batched_mm"])
def test_what_cannot_be_prepared_runs_as_before_and_says_why(previous):
    model = build("mixtral", torch.float32, previous)
    experts_of(model)[1].act_fn = nn.ReLU()
    want = copy.deepcopy(model)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts_of(want)[0], name)
        weight.data = fake_quantised(weight, "nvfp4")
    report = fp4_ops.prepare(model, activation="bf16")
    assert [bool(m.reason) for m in report.modules] == [False, True]
    assert "gate is none of fp4::moe's activations" in str(report)
    assert "torch.compile(model, backend='fp4') reads graphs" in str(report)
    ids = tokens(2, 7)
    close(logits(model, ids), logits(want, ids), 1e-4)
    if previous == "grouped_mm":  # as the report says
        assert {s.op for s in fp4_ops.explain(model, ids).sites} == {"fp4::moe", "fp4::grouped_mm"}


def test_originals_are_freed_and_the_report_counts_bytes():
    model = build("qwen3_moe", torch.bfloat16, "grouped_mm")
    originals = [weakref.ref(p) for m in experts_of(model) for p in m.parameters()]
    before = sum(p().nbytes for p in originals)
    report = fp4_ops.prepare(model)
    gc.collect()
    assert all(p() is None for p in originals)
    after = sum(b.nbytes for m in experts_of(model) for b in m.buffers())
    assert (report.bytes_before, report.bytes_after) == (before, after)
    assert after < 0.3 * before


MEMORY = """
import resource, torch, transformers, fp4_ops
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def resident():
    with open("/proc/self/statm") as f: return int(f.read().split()[1]) * resource.getpagesize()
config = transformers.MixtralConfig(vocab_size=64, hidden_size=1024, intermediate_size=1024,
    num_local_experts=8, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=1)
with torch.device("meta"):
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
small = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=64, hidden_size=64,
    intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))
fp4_ops.prepare(small)  # whatever the first use loads
model.to_empty(device="cpu")
with torch.no_grad():
    for p in model.parameters(): p.uniform_(-1, 1)
weights = [p.nbytes for p in model.parameters() if p.dim() == 3]
before, high = resident(), peak()
fp4_ops.prepare(model)
print(sum(weights), max(weights), before - resident(), peak() - high)
"""


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_falls_and_its_peak_is_not_another_model():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY], capture_output=True, text=True, check=True
    )
    total, largest, freed, extra = map(int, run.stdout.split())
    assert total == 5 * 1.5 * largest
    assert freed > 0.6 * total, f"{freed} bytes of {total} came back"
    assert extra < 1.5 * largest, f"{extra} bytes more at the peak; the largest weight has {largest}"


def test_a_shared_parameter_is_packed_once():
    model = build("mixtral", torch.float32, "grouped_mm")
    first, second = experts_of(model)
    second.gate_up_proj = first.gate_up_proj
    want = dequantised(model, "nvfp4")
    report = fp4_ops.prepare(model, activation="bf16")
    assert first.gate_up_proj is second.gate_up_proj
    assert first.down_proj is not second.down_proj
    shared = first.gate_up_proj.num_bytes
    assert report.bytes_after == shared + first.down_proj.num_bytes + second.down_proj.num_bytes
    ids = tokens(1, 5)
    close(logits(model, ids), logits(want, ids), 1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_and_deepcopy(format):
    model = build("gpt_oss", torch.float32, "grouped_mm")
    other = build("gpt_oss", torch.float32, "grouped_mm")
    ids = tokens(2, 6)
    fp4_ops.prepare(model, format)
    fp4_ops.prepare(other, format)
    want = logits(model, ids)
    assert torch.equal(logits(copy.deepcopy(model), ids), want)
    assert not torch.equal(logits(other, ids), want)
    plain = copy.deepcopy(model)
    for weight in plain.modules():
        if isinstance(weight, PackedWeight):
            weight.set_layout("plain")
    assert torch.equal(logits(plain, ids), want)
    for source in (model, plain):  # a checkpoint written in another layout is put in order on loading
        other.load_state_dict(source.state_dict())
        assert experts_of(other)[0].down_proj.layout == "tile16"
        assert torch.equal(logits(other, ids), want)


def test_a_state_dict_of_another_format_is_refused():
    model = build("mixtral", torch.float32, "grouped_mm")
    other = copy.deepcopy(model)
    fp4_ops.prepare(model, "nvfp4")
    fp4_ops.prepare(other, "mxfp4")
    with pytest.raises(ValueError, match="the weights to load are nvfp4; this model was prepared as mxfp4"):
        other.load_state_dict(model.state_dict())


def packed_weight(format: str, layout: str, k: int) -> PackedWeight:
    operands = torch.ops.fp4.quantize(torch.randn(2, 64, k), format)
    operands = relayout(
        operands if operands[2].numel() else (*operands[:2], None), format, k, "plain", layout
    )
    return PackedWeight(*operands, format, layout, k)


@pytest.mark.parametrize("k", [80, 128])
@pytest.mark.parametrize(
    "format, hopper",
    [
        *(("nvfp4", "sm90"), ("mxfp4", "sm90"), ("int4", "sm90_int4"), ("int4_g32", "sm90_int4")),
        *(("nvfp4", "mma_bf16"), ("mxfp4", "mma_bf16")),
    ],
)
def test_a_state_dict_of_another_layout(format, hopper, k):
    """Buffers of other shapes and dtypes, as one device's kernels have them and another's do not."""
    for source in (hopper, "plain", "tile16"):
        for target in (hopper, "plain", "tile16"):
            saved, loaded = packed_weight(format, source, k), packed_weight(format, target, k)
            loaded.load_state_dict(saved.state_dict())
            assert loaded.layout == target
            assert torch.equal(loaded.dequantize(torch.float64), saved.dequantize(torch.float64))


def test_a_state_dict_of_another_shape_is_refused():
    saved, loaded = packed_weight("nvfp4", "plain", 128), packed_weight("nvfp4", "sm90", 256)
    with pytest.raises(RuntimeError, match="size mismatch for packed"):
        loaded.load_state_dict(saved.state_dict())


def test_dtype_changes_leave_the_four_bits_alone():
    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model)
    before = {n: b.clone() for n, b in model.named_buffers() if ".experts." in n}
    model.to(torch.bfloat16).half().float()
    after = dict(model.named_buffers())
    for name, buffer in before.items():
        assert after[name].dtype == buffer.dtype
        assert torch.equal(after[name].view(torch.uint8), buffer.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.more), "fp4"])
def test_torch_compile_gives_the_eager_answer(backend):
    torch.compiler.reset()
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    fp4_ops.prepare(model, activation="bf16")
    if backend == "inductor":
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for length in (5, 11):
            ids = tokens(2, length)
            close(logits(compiled, ids), logits(model, ids), 1e-5)
    else:  # a whole model: test_topk.py
        layer = model.model.layers[0].mlp
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        for length in (5, 11):
            x = torch.randn(2, length, model.config.hidden_size)
            with torch.no_grad():
                close(compiled(x), layer(x), 1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache):
    torch.compiler.reset()
    model = that_answers("mixtral")
    want = dequantised(model, "nvfp4")
    fp4_ops.prepare(model, activation="bf16")
    ids = tokens(2, 4)
    args = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=cache)
    assert torch.equal(model.generate(ids, **args), want.generate(ids, **args))
    assert model.config._experts_implementation == "fp4"


def test_models_of_the_same_config_stay_as_they_are():
    model = build("mixtral", torch.float32, "grouped_mm")
    config = model.config
    other = type(model)(config)
    fp4_ops.prepare(model)
    later = type(model)(config)
    configs = {id(m.config) for m in model.modules() if hasattr(m, "config")}
    assert configs == {id(model.config)} and model.config is not config
    for untouched in (other, later):
        assert untouched.config._experts_implementation == "grouped_mm"


def test_a_gradient_is_an_error():
    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model)
    with pytest.raises(RuntimeError, match="fp4::moe has no gradient"):
        model(input_ids=tokens(1, 3)).logits.sum().backward()


def test_errors():
    def model() -> nn.Module:
        return build("mixtral", torch.float32, "grouped_mm")

    with pytest.raises(ValueError, match="no experts modules"):
        fp4_ops.prepare(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="format is 'int3'; it must be one of: nvfp4, mxfp4"):
        fp4_ops.prepare(model(), "int3")
    with pytest.raises(ValueError, match="activation is 'fp6'; it must be one of: auto, bf16, fp8, int8"):
        fp4_ops.prepare(model(), activation="fp6")
    with pytest.raises(ValueError, match=r"gate_up_proj is on the meta device"):
        fp4_ops.prepare(model().to("meta"))
    broken = model()
    with torch.no_grad():
        experts_of(broken)[1].down_proj[2, 1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\..*down_proj holds NaN or infinity in expert 2"):
        fp4_ops.prepare(broken)
    assert isinstance(experts_of(broken)[0].down_proj, nn.Parameter)  # nothing was changed
    twice = model()
    fp4_ops.prepare(twice)
    with pytest.raises(ValueError, match=r"prepared already(.|\n)*load the original again"):
        fp4_ops.prepare(twice)


@torch.no_grad()
def test_another_implementation_is_an_error():
    model, ids = build("mixtral", torch.float32, "grouped_mm"), tokens(1, 3)
    other = copy.deepcopy(model)
    fp4_ops.prepare(model)
    want, words = logits(model, ids), r"layers\.0\.\S* holds 4-bit weights, which only 'fp4' runs"
    for copied in (model, copy.deepcopy(model).model):
        for name in ("grouped_mm", "batched_mm", "eager", {"": "eager"}):
            with pytest.raises(ValueError, match=words):
                copied.set_experts_implementation(name)
    model.set_experts_implementation("fp4")
    assert torch.equal(logits(model, ids), want)
    other.set_experts_implementation("eager")  # a model that is not prepared
    assert other.config._experts_implementation == "eager"


@pytest.mark.parametrize(
    "activation, dtype, layout",
    [
        ("bf16", torch.bfloat16, "mma_bf16"),
        ("bf16", torch.float16, "sm90"),
        ("auto", torch.bfloat16, "sm90"),
    ],
)
def test_weights_of_activations_that_stay_bfloat16_have_a_layout_of_their_own(
    monkeypatch, activation, dtype, layout
):
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("mma_bf16", "sm90"))
    monkeypatch.setitem(layouts._reads, "cpu", HOPPER.reads)
    model = build("mixtral", dtype, "grouped_mm", hidden_size=128)
    report = fp4_ops.prepare(model, activation=activation)
    assert report.layout == experts_of(model)[0].down_proj.layout == layout
    assert layouts.preferred_layout("cpu", (128, 128)) == "sm90"  # the dtype is not known


@pytest.mark.parametrize("format, layout", [("nvfp4", "sm90"), ("mxfp4", "sm90"), ("int4_g32", "plain")])
def test_linear_layers_have_the_layout_that_a_compiled_graph_reads(monkeypatch, format, layout):
    """The graph would hold a copy of weights in another one."""
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("mma_bf16", "sm90", "sm90_int4"))
    monkeypatch.setitem(layouts._reads, "cpu", HOPPER.reads)
    model = build("mixtral", torch.bfloat16, "grouped_mm", hidden_size=128)
    fp4_ops.prepare(model, attention=format)
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert weight.weight_layout == layout
    wanted = Options().wanted
    read = layouts.preferred_layout("cpu", (128, 128), dtype=torch.bfloat16, format=format, a_format=wanted)
    assert format == "int4_g32" or read == layout


@torch.no_grad()
def test_the_layout_follows_the_dtype_of_the_model(monkeypatch):
    """Kernels that read no float32 must not get the weights of a float32 model; both weights agree."""
    monkeypatch.setitem(layouts._preferred, "cpu", lambda: ("sm90", "tile16"))
    # 96 is no multiple of 64: alone, gate and up could be sm90, but down could not.
    wide, narrow = (build("mixtral", torch.float32, "grouped_mm", hidden_size=h) for h in (128, 96))
    for model, held in ((wide, "sm90"), (narrow, "tile16")):
        fp4_ops.prepare(model, activation="bf16")
        weights = [w for e in experts_of(model) for w in (e.gate_up_proj, e.down_proj)]
        values = [w.dequantize() for w in weights]
        copied = copy.deepcopy(model)
        for dtype, layout in ((torch.float32, "tile16"), (torch.bfloat16, held), (torch.float32, "tile16")):
            model.to(dtype)
            assert {w.layout for w in weights} == {layout}
            assert all(torch.equal(w.dequantize(), v) for w, v in zip(weights, values, strict=True))
        assert experts_of(copied.bfloat16())[0].down_proj.layout == held
        assert experts_of(model)[0].down_proj.layout == "tile16"


@pytest.mark.gpu
@torch.no_grad()
def test_a_prepared_model_moves_to_a_gpu_and_back():
    model = build("mixtral", torch.float32, "grouped_mm")
    unquantised = copy.deepcopy(model)
    fp4_ops.prepare(model, activation="auto")
    fp4_ops.prepare(unquantised, activation="bf16")
    there = copy.deepcopy(model).to("cuda")
    assert experts_of(there)[0].down_proj.layout == "plain"
    ids = tokens(2, 9)
    # "auto" is int8 here and float32 there; int8 could send a token to another expert.
    close(logits(there, ids.cuda()).cpu(), logits(unquantised, ids), 1e-3)
    back = there.to("cpu")
    assert torch.equal(logits(back, ids), logits(model, ids))
