"""Gradients through frozen 4-bit experts are those of the dequantised weights, so that adapters can be
trained."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import more
from moe_models import FAMILIES, build, fake_quantised, tokens
from reference import random_weight, rows_per_column
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4_ops
from fp4_ops.experts.find import is_experts
from fp4_ops.meta.formats import ACTIVATIONS, known_activation
from fp4_ops.meta.gates import apply_gate, gate_gradient


def error(got: torch.Tensor, want: torch.Tensor, typical: float = 0.0) -> float:
    """Norm over norm. typical: the norm to be expected, where a few sums may cancel out by chance."""
    assert torch.isfinite(got).all()
    assert want.abs().max() > 0
    norm = max(want.double().norm().item(), typical)
    return (got.double() - want.double()).norm().item() / norm


@pytest.mark.parametrize("name", [*ACTIVATIONS, "silu(limit=2)", "gelu_interleaved(limit=0.5)"])
def test_the_gradient_of_a_gate_is_autograds(name):
    act = known_activation(name)
    # Large values reach every clamp.
    u = (torch.randn(9, 26, dtype=torch.float64) * torch.logspace(-1, 1.3, 9)[:, None]).requires_grad_()
    h = apply_gate(u, act)
    grad = torch.randn_like(h)
    (want,) = torch.autograd.grad(h, u, grad)
    torch.testing.assert_close(gate_gradient(u.detach(), grad, act), want, rtol=1e-12, atol=1e-12)


def reference(x, ids, weights, w13, w2, b13, b2, act):
    """The block over dequantised weights in float64, written as autograd understands it."""
    return experts_outputs(x, ids, weights, w13, w2, b13, b2, act)[0]


def experts_outputs(x, ids, weights, w13, w2, b13, b2, act):
    """The block, and the norms of the outputs that it weights, 0 where the expert is elsewhere."""
    rows, norms = [], torch.zeros(ids.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        total = x.new_zeros(w2.shape[1])
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if not 0 <= e < w13.shape[0]:
                continue
            u = w13[e] @ x[t] + (b13[e] if b13 is not None else 0)
            y = w2[e] @ apply_gate(u, act) + (b2[e] if b2 is not None else 0)
            total = total + weights[t, j] * y
            norms[t, j] = y.detach().norm()
        rows.append(total)
    return torch.stack(rows), norms


CASES = [
    ("nvfp4", "silu", True, 7, 3, 5),
    ("mxfp4", "swigluoai", True, 1, 2, 1),
    more("int4", "gelu_tanh", False, 5, 1, 4),
    more("nvfp4", "gelu_interleaved", True, 3, 3, 3),
    ("mxfp4", "silu", False, 4, 1, 1),
    ("nvfp4", "relu2", True, 6, 2, 3),
]


@pytest.mark.parametrize("layout", ["plain", "tile16"])
@pytest.mark.parametrize(("format", "activation", "biases", "tokens_", "top_k", "experts"), CASES)
def test_the_operator_against_autograd_in_float64(
    format, activation, biases, tokens_, top_k, experts, layout, device
):
    if layout == "tile16" and device != "cpu":
        pytest.skip("tile16 is a layout of CPUs")
    h, i = 50, 36
    n = rows_per_column(activation) * i
    w13 = random_weight(format, experts, n, h, device=device, layout=layout)
    w2 = random_weight(format, experts, h, i, device=device, layout=layout)
    b13, b2 = (torch.randn(experts, n, device=device) if biases else None for n in (n, h))
    x = torch.randn(tokens_, h, device=device)
    ids = torch.randint(0, experts, (tokens_, top_k), device=device)
    ids[0, 0] = experts  # no expert of this machine's
    weights, grad = torch.rand(tokens_, top_k, device=device), torch.randn(tokens_, h, device=device)
    got = torch.ops.fp4.moe_input_grads(
        grad, x, ids, weights, *w13.operands(), *w2.operands(), b13, b2,
        format=format, layout=layout, activation=activation,
    )  # fmt: skip
    leaves = [t.double().cpu().requires_grad_() for t in (x, weights)]
    doubles = [None if b is None else b.double().cpu() for b in (b13, b2)]
    out, norms = experts_outputs(
        leaves[0],
        ids.cpu(),
        leaves[1],
        w13.dense.double().cpu(),
        w2.dense.double().cpu(),
        *doubles,
        known_activation(activation),
    )
    want = torch.autograd.grad(out, leaves, grad.double().cpu())
    # A weight's gradient is one product of h numbers, and may be the only one.
    typical = (norms * grad.double().cpu().norm(dim=1, keepdim=True)).norm().item() / h**0.5
    for g, w, size in zip(got, want, (0.0, typical), strict=True):
        if w.abs().max() == 0:  # one token, whose only expert is elsewhere
            assert not g.any()
        else:
            assert error(g.cpu(), w, size) < 1e-5
    assert got[1][0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, device):
    """On a GPU these are grouped products; an expert without rows among them."""
    h, i, experts = 64, 48, 5
    w13, w2 = (random_weight("nvfp4", experts, n, k, device=device) for n, k in ((2 * i, h), (h, i)))
    x, grad = (torch.randn(33, h, device=device).to(dtype) for _ in range(2))
    ids = torch.randint(1, experts, (33, 2), device=device)
    weights = torch.rand(33, 2, device=device)
    got = torch.ops.fp4.moe_input_grads(
        grad, x, ids, weights, *w13.operands(), *w2.operands(), format="nvfp4"
    )
    assert [t.dtype for t in got] == [dtype, torch.float32]
    leaves = [t.double().cpu().requires_grad_() for t in (x, weights)]
    dense = [w.dense.double().cpu() for w in (w13, w2)]
    out = reference(leaves[0], ids.cpu(), leaves[1], *dense, None, None, ACTIVATIONS["silu"])
    for g, w in zip(got, torch.autograd.grad(out, leaves, grad.double().cpu()), strict=True):
        assert error(g.cpu(), w) < 2e-2


def test_no_more_than_some_experts_are_dequantised_at_a_time(monkeypatch):
    from fp4_ops.runtime import input_gradients

    w13, w2 = random_weight("nvfp4", 6, 32, 48), random_weight("nvfp4", 6, 48, 16)
    x, ids, weights = torch.randn(9, 48), torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    args = (torch.randn(9, 48), x, ids, weights, *w13.operands(), *w2.operands())
    want = torch.ops.fp4.moe_input_grads(*args, format="nvfp4")
    seen = []
    dequantize = input_gradients._dequantize

    def spy(weight, first, last, *rest):
        seen.append(last - first)
        return dequantize(weight, first, last, *rest)

    monkeypatch.setattr(input_gradients, "_dequantize", spy)
    monkeypatch.setattr(input_gradients, "DEQUANTIZED_BYTES", 1)
    got = torch.ops.fp4.moe_input_grads(*args, format="nvfp4")
    assert set(seen) == {1}
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def twins(family: str, **options) -> tuple[nn.Module, nn.Module]:
    """A prepared model, and one of the same dequantised weights."""
    model = build(family, torch.float32, "grouped_mm")
    twin = copy.deepcopy(model)
    for module in filter(is_experts, twin.modules()):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            weight.data = fake_quantised(weight, options.get("format", "nvfp4"), module.is_transposed)
        module.requires_grad_(False)
    fp4_ops.prepare(model, activation="bf16", trainable_inputs=True, **options)
    return model, twin


@pytest.mark.parametrize("family", [FAMILIES[0], *(more(f) for f in FAMILIES[1:])])
def test_a_models_gradients_are_those_of_the_dequantised_model(family):
    model, twin = twins(family)
    ids = tokens(2, 9)
    for m in (model, twin):
        m.train()
        m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    want = dict(twin.named_parameters())
    compared = 0
    for name, p in model.named_parameters():
        if want[name].grad is None or not want[name].grad.any():
            continue
        assert p.grad is not None, name
        # Biases of experts are parameters, and frozen as their weights are.
        assert error(p.grad, want[name].grad) < 1e-4, name
        compared += 1
    assert compared > 5


def test_without_the_option_a_backward_is_still_an_error():
    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model)
    loss = model(input_ids=tokens(1, 4), use_cache=False).logits.sum()
    with pytest.raises(RuntimeError, match=r"prepare\(model, trainable_inputs=True\)"):
        loss.backward()


class Lora(nn.Module):
    """The low-rank adapter of Hu et al. 2021 round a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def with_adapters(model: nn.Module, seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))
    return [p for p in model.parameters() if p.requires_grad]


def train(run: nn.Module, adapters: list[nn.Parameter], ids: torch.Tensor) -> list[float]:
    """The losses of some steps, in each of which every adapter has a gradient.

    PEFT's B are zeros at first, so its A have gradients of zeros in the first step.
    """
    optimizer = torch.optim.AdamW(adapters, 1e-2)
    first = 0 if all(p.any() for p in adapters) else 1
    losses = []
    for step in range(5):
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None and (p.grad.any() or step < first) for p in adapters)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "how", ["eager", more("checkpointing"), "compile", more("compile_fp4"), more("both")]
)
def test_adapters_train_as_on_the_dequantised_model(how):
    torch._dynamo.reset()
    model, twin = twins("mixtral")
    ids, seed = tokens(2, 9), torch.initial_seed() % 2**31
    losses = []
    for m in (twin, model):
        adapters = with_adapters(m, seed)
        m.train()
        run = m
        if m is model:
            if how in ("checkpointing", "both"):
                m.gradient_checkpointing_enable()
            if how in ("compile", "both"):
                run = torch.compile(m, backend="aot_eager")
            if how == "compile_fp4":
                run = torch.compile(m, backend="fp4")
        losses.append(train(run, adapters, ids))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_checkpointing_by_torch_itself():
    model, _ = twins("qwen3_moe")
    experts = next(filter(is_experts, model.modules()))
    x = torch.randn(5, 64, requires_grad=True)
    ids, weights = torch.randint(0, 8, (5, 3)), torch.rand(5, 3, requires_grad=True)
    want = torch.autograd.grad(experts(x, ids, weights).square().sum(), (x, weights))
    out = checkpoint(experts, x, ids, weights, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), (x, weights))
    torch.testing.assert_close(got, want)


def test_a_second_derivative_is_an_error():
    model, _ = twins("mixtral")
    experts = next(filter(is_experts, model.modules()))
    x = torch.randn(5, 64, requires_grad=True)
    ids, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    (grad,) = torch.autograd.grad(experts(x, ids, weights).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fp4::moe_input_grads has no gradient"):
        grad.sum().backward()


def test_peft_trains_and_the_trainer_accepts_it():
    peft = pytest.importorskip("peft")
    from transformers.trainer_utils import validate_quantization_for_training

    model, twin = twins("mixtral")
    ids, losses = tokens(2, 9), []
    for m in (twin, model):
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(m, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        validate_quantization_for_training(wrapped)
        wrapped.train()
        m.gradient_checkpointing_enable({"use_reentrant": False})
        losses.append(train(wrapped, [p for p in wrapped.parameters() if p.requires_grad], ids))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_a_model_prepared_without_it_is_refused_by_the_trainer():
    peft = pytest.importorskip("peft")
    from transformers.trainer_utils import validate_quantization_for_training

    model = build("mixtral", torch.float32, "grouped_mm")
    fp4_ops.prepare(model)
    model.is_quantized = True  # as a loaded folder is
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    wrapped.is_quantized, wrapped.hf_quantizer = True, model.hf_quantizer
    with pytest.raises(ValueError, match="do not support training"):
        validate_quantization_for_training(wrapped)


def test_a_loaded_folder_trains(tmp_path):
    model, twin = twins("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", trainable_inputs=True)
    ids = tokens(2, 7)
    for m in (loaded, twin):
        m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        got, want = loaded.get_parameter(name).grad, twin.get_parameter(name).grad
        assert error(got, want) < 1e-4


def test_a_bias_that_requires_a_gradient_is_an_error():
    model, _ = twins("gpt_oss")
    experts = next(filter(is_experts, model.modules()))
    experts.down_proj_bias.requires_grad_(True)
    with pytest.raises(ValueError, match="experts are frozen"):
        model(input_ids=tokens(1, 4), use_cache=False)
