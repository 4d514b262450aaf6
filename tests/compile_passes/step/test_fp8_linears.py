"""Products with weights in fp8 become an fp4::linears with their norm, residual and neighbours."""

from __future__ import annotations

import operator

import pytest
import torch
from test_step import BF16, Attention, Four, Gemma, K, Norm, allow, draw, run
from torch import nn

from fp4_ops.backends.hopper import trust
from fp4_ops.compile_passes.step import linears
from fp4_ops.compile_passes.step.linears import FP8_ROWS, HOPPER

fp4 = torch.ops.fp4


class Eighths(nn.Module):
    """A linear layer with a weight in fp8, as fp4_ops.prepare leaves it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = torch.rand(len(weight), device=weight.device) / 64
        self.weight = nn.Parameter((weight.float() * 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x):
        return fp4.fp8_linear(x, self.weight, self.scale, self.bias)


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    allow(monkeypatch)


def in_fp8(module: nn.Module, *names: str) -> nn.Module:
    """Puts layers in fp8, in place; all if no names are given."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and (not names or name in names):
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, Eighths(layer))
    return module


def forms(done) -> list[tuple[int, bool, bool, bool]]:
    """Returns for each fp4::linears: number of weights; if it has a norm, a residual, weights in fp8."""
    return [
        (len(c.args[1]), c.args[3] is not None, c.args[5] is not None, bool(_scales(c)))
        for c in done.calls("linears")
    ]


def _scales(call: torch.fx.Node) -> list[torch.fx.Node]:
    return call.kwargs.get("weight_scales") or (call.args[7] if len(call.args) > 7 else [])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_norms_products_and_residuals(device, bias, dtype):
    module = in_fp8(Attention(bias=bias).to(device, dtype), "q", "k", "v", "o")
    done = run(module, draw(device, 3, 1, K, dtype=dtype))
    assert forms(done) == [(3, True, False, True), (1, False, True, True), (1, True, False, False)]
    first, second, _ = done.calls("linears")
    assert [w.meta["val"].shape[0] for w in first.args[1]] == [s.meta["val"].shape[0] for s in _scales(first)]
    assert all(user.target is operator.getitem for call in (first, second) for user in call.users)


def test_a_router_in_16_bits_shares_no_call_with_weights_in_fp8(device):
    """The last product reads the norm's result, which the call of the others returns."""
    done = run(in_fp8(Four().to(device, BF16), "layers.1", "layers.2"), draw(device, 3, 1, K))
    router, *rest = done.calls("linears")
    assert [w.meta["val"].shape[0] for w in router.args[1]] == [5, 1] and router.kwargs["keep_norm"]
    assert not rest and len(done.calls("fp8_linear")) == 2
    done = run(in_fp8(Four().to(device, BF16)), draw(device, 3, 1, K))
    (call,) = done.calls("linears")
    assert len(_scales(call)) == 3 and call.kwargs["keep_norm"] and len(done.calls("fp8_linear")) == 1


def test_a_large_weight_takes_its_norm_in(device, monkeypatch):
    """torch has no such product, whose kernel could be faster. An output head is one."""
    allow(monkeypatch, nbytes=1)
    module = nn.Sequential(Norm(), in_fp8(nn.Sequential(nn.Linear(K, 999, bias=False)))).to(device)
    module[0].to(BF16)
    assert forms(run(module, draw(device, 3, 1, K))) == [(1, True, False, True)]


@pytest.mark.parametrize("rows", [16, 17, FP8_ROWS, FP8_ROWS + 1])
def test_rows(device, rows):
    """Many rows have their norm before the products, which are one call. The kernels for up to FP8_ROWS are
    checked at their first use."""
    assert max(trust.ROWS) == FP8_ROWS
    module = in_fp8(Attention().to(device, BF16), "q", "k", "v", "o")
    done = run(module, draw(device, rows, 1, K))
    taken = rows <= FP8_ROWS
    assert forms(done) == [(3, rows <= HOPPER.norm_rows, False, True), (1, False, True, True)] * taken
    assert len(done.calls("fp8_linear")) == 4 * (not taken)


def test_what_stays(device, monkeypatch):
    """Norms of other forms, K that the kernel does not take, float32, and a device without the kernel."""

    def stays(norm, product, x) -> bool:
        done = run(nn.Sequential(norm.to(device, x.dtype), product), x)
        return not done.calls("linears") and len(done.calls("fp8_linear")) == 1

    product = in_fp8(nn.Sequential(nn.Linear(K, 48))).to(device)
    product[0].bias.data = product[0].bias.data.to(BF16)
    assert stays(Gemma(), product, draw(device, 3, 1, K))
    narrow = in_fp8(nn.Sequential(nn.Linear(48, 48, bias=False))).to(device)
    assert stays(Norm(48), narrow, draw(device, 3, 1, 48))
    plain = in_fp8(nn.Sequential(nn.Linear(K, 48, bias=False))).to(device)
    assert stays(Norm(), plain, draw(device, 3, 1, K, dtype=torch.float32))
    monkeypatch.setattr(linears, "limits", lambda device: None)
    assert stays(Norm(), plain, draw(device, 3, 1, K))


def test_weights_that_are_no_parameters_stay(device):
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

        def forward(self, x, weight, scale):
            h = self.norm(x).view(-1, K)
            return fp4.fp8_linear(h, weight, scale)

    weight = torch.randn(16, K, device=device).to(torch.float8_e4m3fn)
    done = run(Given().to(device, BF16), draw(device, 3, 1, K), weight, torch.rand(16, device=device))
    assert not done.calls("linears") and len(done.calls("fp8_linear")) == 1
