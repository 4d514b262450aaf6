"""torch.func and forward-mode differentiation through the operators: correct, or a clear error."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from prepared_block import Prepared
from reference import random_weight
from samples import SAMPLES, sample, why_no_gradient
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fp4_ops
from fp4_ops.meta import gradients

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NO_TANGENT = "fp4::{} has no forward-mode derivative .*jvp.*: {}.*detach.*, or {}"
NO_GRADIENT = "fp4::{} has no gradient .*torch.func.grad.*: {}.*detach.*, or {}"


def call_of(op: str, device: str):
    """(function of one of the operator's floating arguments, that argument), for each of them."""
    args, kwargs = sample(op, device)

    def of(i):
        return lambda x: getattr(torch.ops.fp4, op)(*args[:i], x, *args[i + 1 :], **kwargs)

    return [(of(i), a) for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype in FLOATS]


def floating(out) -> list[torch.Tensor]:
    return [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if o.dtype in FLOATS]


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).norm() <= 1e-5 * b.norm() and b.any()


def dual_call(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "linearize": lambda f, x: linearize(f, x),
    "dual": dual_call,
    "dual, no_grad": torch.no_grad()(dual_call),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (x[None],), (torch.ones_like(x[None]),)),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (torch.ones_like(x),)))(x[None]),
}
REVERSE = {
    "grad": lambda f, x: grad(lambda x: sum(o.sum() for o in floating(f(x))))(x),
    "vjp": lambda f, x: vjp(lambda x: floating(f(x))[0], x),
    "jacrev": lambda f, x: jacrev(lambda x: floating(f(x))[0])(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: sum(o.sum() for o in floating(f(x)))))(x[None]),
}


NO_VMAP = ("linears", "packed_linears", "router", "update_cache", "cached_attention")
"""torch has no fallback of vmap for an operator that returns a list, or that writes to an argument."""


@pytest.mark.parametrize("op", SAMPLES)
def test_a_derivative_is_an_error(op, device):
    """Each operator, each of its floating arguments, each way to ask."""
    # A draw may have no rows.
    calls = [c for _ in range(20) for c in call_of(op, device) if c[1].numel()][:6]
    forward, reverse = (
        [ask for name, ask in asks.items() if op not in NO_VMAP or "vmap" not in name]
        for asks in (FORWARD, REVERSE)
    )
    for function, x in calls:
        for ask in forward:
            with pytest.raises(RuntimeError, match=NO_TANGENT.format(op, *why_no_gradient(op))):
                ask(function, x)
        if floating(function(x)):
            for ask in reverse:
                with pytest.raises(RuntimeError, match=NO_GRADIENT.format(op, *why_no_gradient(op))):
                    ask(function, x)
    assert calls or op in ("offs_to_m_indices", "m_indices_to_offs", "dequantize", "prepack", "unpack")


def product(n: int = 16, k: int = 32):
    w = random_weight("nvfp4", 3, n, k)
    offs = torch.tensor([2, 4, 7], dtype=torch.int32)
    return lambda x: torch.ops.fp4.grouped_mm(x, *w.operands(), offs, format="nvfp4")


def test_what_does_not_count_for_the_derivative_may_be_detached():
    function, x, v = product(), torch.randn(7, 32), torch.randn(7, 32)
    out, tangent = jvp(lambda x: function(x.detach()).sum() + x.sin(), (x,), (v,))
    assert_close(tangent, x.cos() * v)
    assert torch.equal(out, function(x).sum() + x.sin())
    assert torch.equal(grad(lambda x: (function(x.detach()).sum() + x).sum())(x), torch.ones_like(x))
    # Another tensor's derivative, and none at all.
    y = torch.randn(7, 16)
    assert torch.equal(jvp(lambda y: function(x) * y, (y,), (torch.ones_like(y),))[1], function(x))
    assert torch.equal(grad(lambda y: (function(x) * y).sum())(y), function(x))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(function(x)).tangent is None


@pytest.mark.parametrize("op", [op for op in SAMPLES if op not in NO_VMAP])
def test_vmap(op, device):
    """A slow loop of torch's, and right."""
    for function, x in call_of(op, device):
        xs = torch.stack((x, x.flip(-1) if x.dim() else 2 * x))
        want = [function(x) for x in xs]
        want = zip(*want) if isinstance(want[0], tuple) else [want]
        got = vmap(function)(xs)
        for each, ones in zip(got if isinstance(got, tuple) else [got], want):
            assert len(each) == len(ones)
            for a, b in zip(each, ones):
                assert a.dtype == b.dtype and a.shape == b.shape
                a, b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
                assert torch.equal(a, b)


def weight(*shape: int) -> fp4_ops.FP4Tensor:
    return fp4_ops.quantize(torch.randn(shape), "nvfp4")


def test_fp4_tensors_have_right_derivatives_or_none():
    """The products that torch differentiates itself are linear in x, so their tangents are products, too."""
    w, x, v, bias = weight(16, 32), torch.randn(7, 32), torch.randn(7, 32), torch.randn(16)
    exact = w.dequantize()
    for function in (lambda x: F.linear(x, w), lambda x: x @ w.t(), lambda x: F.linear(x, w, bias)):
        assert_close(jvp(function, (x,), (v,))[1], v @ exact.T)
        assert_close(jacfwd(function)(x[:1])[0, :, 0], exact)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(function(forward_ad.make_dual(x, v)))
        assert_close(out.tangent, v @ exact.T)
        assert_close(vmap(function)(torch.stack((x, v))), function(torch.stack((x, v))))
        with pytest.raises(NotImplementedError, match="gradients would sum over the other one"):
            vjp(function, x)[1](torch.ones(7, 16))
    experts = weight(3, 16, 32)
    a, tangent = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    assert_close(
        jvp(lambda a: torch.bmm(a, experts.mT), (a,), (tangent,))[1], tangent @ experts.dequantize().mT
    )
    offs = torch.tensor([2, 4, 7], dtype=torch.int32)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"_grouped_mm|forward"):
        jvp(lambda x: F.grouped_mm(x, experts.mT, offs=offs), (x.bfloat16(),), (v.bfloat16(),))


def test_a_prepared_model_has_no_derivative():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        attn_implementation="eager",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    fp4_ops.prepare(model)
    norm, x = model.model.norm.weight, torch.randint(0, 64, (1, 5))
    embeddings = model.get_input_embeddings()(x)
    with pytest.raises(RuntimeError, match=NO_TANGENT.format("moe", *why_no_gradient("moe"))):
        jvp(lambda e: model(inputs_embeds=e).logits, (embeddings,), (torch.ones_like(embeddings),))
    with pytest.raises(RuntimeError, match=NO_GRADIENT.format("moe", *why_no_gradient("moe"))):
        grad(lambda e: model(inputs_embeds=e).logits.sum())(embeddings)
    # What comes after the experts has both.
    after = {"model.norm.weight": norm}
    assert grad(lambda p: functional_call(model, p, (x,)).logits.sum())(after)["model.norm.weight"].any()


@pytest.mark.parametrize("backend", ["fp4", more("eager"), more("aot_eager")])
def test_compiled_calls_are_errors_too(backend):
    function, x, v = product(), torch.randn(7, 32), torch.randn(7, 32)
    for compiled in (
        lambda: jvp(torch.compile(function, backend=backend), (x,), (v,)),
        lambda: torch.compile(lambda x: jvp(function, (x,), (v,)), backend=backend)(x),
        lambda: dual_call(torch.compile(function, backend=backend), x),
        lambda: torch.compile(lambda x: grad(lambda x: function(x).sum())(x), backend=backend)(x),
    ):
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"fp4::grouped_mm has no (forward-mode derivative|gradient)"):
            compiled()


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, 32, 32), requires_grad=False) for _ in "ud")

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(ids == e)
            h = F.silu(x[token] @ self.up[e].T) @ self.down[e].T
            out.index_add_(0, token, h * weights[token, slot, None])
        return out


@pytest.mark.more
@pytest.mark.parametrize("mode", [torch.no_grad, contextlib.nullcontext])
def test_tangents_are_not_lost_in_a_compiled_model(mode):
    """Also where the graph was compiled before: torch does not guard what a tensor's tangent is."""
    model = Experts()
    x, ids = torch.randn(6, 32), torch.randint(0, 3, (6, 2))
    weights = torch.rand(6, 2)
    compiled = torch.compile(model, backend="fp4")
    with mode(), forward_ad.dual_level():
        rewritten = compiled(x, ids, weights)
        assert not torch.equal(rewritten, model(x, ids, weights))
        for args in (
            (forward_ad.make_dual(x, x), ids, weights),
            (x, ids, forward_ad.make_dual(weights, weights)),
        ):
            with pytest.raises(
                RuntimeError, match='compiled with backend="fp4" has no forward-mode derivative'
            ):
                compiled(*args)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_prepared_block_runs_no_python_of_autograds(monkeypatch, mode):
    """And with a transformation it does, whatever the mode of gradients."""
    block, x = Prepared(), torch.randn(5, Prepared.H)
    seen = []
    tangent = gradients.has_tangent
    monkeypatch.setattr(gradients, "has_tangent", lambda args: seen.append("asked") or tangent(args))
    with mode():
        want = block(x)
    assert not seen
    assert torch.equal(block(x).detach(), want) and seen
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"fp4::moe has no forward-mode derivative"):
        jvp(block, (x,), (torch.ones_like(x),))
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"fp4::moe has no forward-mode derivative"):
            block(dual)
