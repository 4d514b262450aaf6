"""autocast, inference mode and no_grad around prepared and compiled models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import more
from moe_models import Recorder, build, fake_quantised, relative_error, token_errors, tokens
from moe_styles import STYLES
from torch import nn

import fp4_ops
from fp4_ops.experts.find import is_experts

ROUNDED = 2e-2
"""Results in 16 bits whose products were rounded in other places."""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def pair(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A prepared model, and the same one with the weights that its four bits stand for."""
    model = build(family, dtype, "grouped_mm", num_hidden_layers=1)
    twin = copy.deepcopy(model)
    for module in filter(is_experts, twin.modules()):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            weight.data = fake_quantised(weight, "nvfp4", module.is_transposed)
    fp4_ops.prepare(model, activation="bf16")
    return model, twin


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("backend", [None, more("aot_eager"), more("fp4")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, more(torch.float16)])
def test_a_prepared_model_under_autocast(family, backend, dtype):
    model, twin = pair(family)
    ids = tokens(2, 7)
    run = torch.compile(model, backend=backend) if backend else model
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            got, want = logits(run, ids), logits(twin, ids)
        assert got.dtype == want.dtype == dtype
        typical, whole = token_errors(got, want)
        # Attention that is compiled rounds otherwise, and a near tie of the router turns.
        assert typical < ROUNDED and whole < (0.6 if backend else ROUNDED), (typical, whole)
        assert relative_error(logits(run, ids), logits(twin, ids)) < 1e-4  # and afterwards without


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_prepared_in_a_mode_and_used_in_others(mode):
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1), tokens(2, 5)
    other = copy.deepcopy(model)
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        fp4_ops.prepare(model, activation="bf16")
    fp4_ops.prepare(other, activation="bf16")
    for given in (torch.no_grad, torch.inference_mode):
        with given():
            assert torch.equal(logits(model, ids), logits(other, ids))
    assert not any(b.is_inference() for n, b in model.named_buffers() if ".experts." in n)
    model.load_state_dict(other.state_dict())  # writes to what was packed in inference mode


@pytest.mark.parametrize(
    "name",
    [
        "dense einsum",
        more("where loop"),
        more("slot mask loop (boolean masks)"),
        more("gather + bmm"),
        more("sorted grouped_mm (torchtitan)"),
        more("dense loop, masked sum"),
        more("scatter_add loop, 3D parameters"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, more(torch.float16)])
def test_the_backend_under_autocast(name, dtype):
    """Weights are packed from what the parameters hold, not from the 16-bit copies that autocast makes."""
    module, recorder = STYLES[name](), Recorder(activation="bf16")
    twin, x = module.twin(), torch.randn(9, module.H)
    compiled = torch.compile(module, backend=recorder, fullgraph=True)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            got, want = compiled(x), twin(x)
        assert set(recorder.ops) == {"fp4::moe"}
        assert got.dtype == want.dtype and relative_error(got, want) < ROUNDED
        assert relative_error(compiled(x), twin(x)) < 1e-5
    with torch.inference_mode():
        assert relative_error(compiled(x), twin(x)) < 1e-5
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(compiled(x), got)


@pytest.mark.parametrize("bias", [False, True])
def test_an_fp4_linear_under_autocast(bias):
    """The dtypes of torch's own linear layer."""
    linear, x = nn.Linear(64, 32, bias), torch.randn(5, 64)
    w = fp4_ops.quantize(linear.weight, "nvfp4")
    linear.weight.data = w.dequantize()
    packed = copy.deepcopy(linear)
    packed.weight = nn.Parameter(w, requires_grad=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = packed(x), linear(x)
    assert got.dtype == want.dtype == torch.bfloat16
    assert relative_error(got, want) < 1e-2
    with torch.inference_mode():
        assert relative_error(packed(x), F.linear(x, linear.weight, linear.bias)) < 1e-5


# --- graphs that hold what others get as inputs ---


@pytest.mark.parametrize("name", ["where loop", more("dense einsum")])
def test_inductors_freezing(name):
    """Dynamo makes attributes of the parameters then. They are packed, and packed anew when they change."""
    module, recorder = STYLES[name](experts=3), Recorder(activation="bf16", format="mxfp4")
    compiled, x = torch.compile(module, backend=recorder), torch.randn(9, module.H)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        assert relative_error(compiled(x), module.twin("mxfp4")(x)) < 1e-5
        for p in module.parameters():
            p.data.mul_(-1.5)
        assert relative_error(compiled(x), module.twin("mxfp4")(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"], recorder.reasons


@pytest.mark.slow
@pytest.mark.more
def test_inductors_freezing_as_an_option():
    module = STYLES["where loop"](experts=3)
    options = {"freezing": True, "activation": "bf16", "format": "mxfp4"}
    compiled, dense = (torch.compile(m, backend="fp4", options=options) for m in (module, nn.Linear(32, 8)))
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        for n in (9, 5):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module.twin("mxfp4")(x)) < 1e-5
        assert relative_error(dense(x), dense._orig_mod(x)) < 1e-5


@pytest.mark.parametrize("reentrant", [False, more(True)])
def test_layers_that_are_checkpointed(reentrant):
    """Without gradients `torch.utils.checkpoint` is a call; Dynamo's graph has it as a graph of its own."""

    class Checkpointed(STYLES["where loop"]):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    module, recorder = Checkpointed(experts=3), Recorder(activation="bf16", format="mxfp4")
    compiled, x = torch.compile(module, backend=recorder), torch.randn(9, module.H)
    with torch.no_grad():
        assert relative_error(compiled(x), module.twin("mxfp4")(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"], recorder.reasons


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["guards", "reset"])
def test_a_hook_that_is_registered_later(how):
    """docs/troubleshooting.md names these two ways; torch leaves guards on hooks out."""
    module, x = STYLES["where loop"](experts=3), torch.randn(9, 32)
    compiled = torch.compile(module, backend=Recorder(activation="bf16"), fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(skip_nnmodule_hook_guards=how != "guards"):
        assert relative_error(compiled(x), module.twin()(x)) < 1e-5
        for expert in module.list:
            expert.register_forward_hook(lambda module, inputs, output: output * 2)
        if how == "reset":
            torch.compiler.reset()
        assert relative_error(compiled(x), module.twin()(x)) < 1e-5
