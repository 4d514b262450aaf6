"""Loops with assertions. They are not in a test file, because pytest rewrites assertions there."""

from __future__ import annotations

import torch
from package_styles import IncrementLoop
from torch import Tensor


class ConstantMessage(IncrementLoop):
    """A loop that Dynamo handles by itself."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert torch.isfinite(x).all(), "x must be finite"
        return super().route(x)


class InALoop(IncrementLoop):
    """From Python 3.12 on, the jump of such an assertion goes to the code that raises the error."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x)
        for t in (x, weights):
            assert torch.isfinite(t).all(), "not finite"
        return ids, weights


class Denied(IncrementLoop):
    """`assert not` with a constant message, with a computed message and without a message."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x)
        assert not x.isinf().any()
        assert not x.isnan().any(), "x must be finite"
        for name, t in (("x", x), ("weights", weights)):
            assert not t.isnan().any(), f"{name} must be finite"
        return ids, weights


class OfExperts(IncrementLoop):
    """Asserts about a value that the rewritten graph no longer computes."""

    def experts_of(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            y = expert(x[token])
            assert torch.isfinite(y).all(), f"expert {e}"
            out[token] += weights[token, slot, None] * y
        return out
