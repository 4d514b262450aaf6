"""Gates of large, infinite and NaN values on a CPU, compared with torch's functions."""

from __future__ import annotations

import pytest
import torch
from reference import GATES, activate

fp4 = torch.ops.fp4
VALUES = torch.tensor(
    [
        -torch.inf,
        torch.inf,
        torch.nan,
        -3e38,
        -1e20,
        -1e4,
        -120,
        -88.6,
        -88,
        -87.2,
        -30,
        0,
        30,
        88.6,
        1e20,
        1e38,
    ]
)
K = 32


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("layout", ["plain", "tile16"])
@pytest.mark.parametrize("tokens", [1, len(VALUES)])
def test_gates_are_torchs(activation, layout, tokens):
    """Expert e has VALUES[e] as bias of its gates, and one as bias of what they multiply. Its second matrix
    is all ones."""
    n = len(VALUES)
    gates = VALUES[:, None].expand(n, K)
    interleaved = activation.partition("(")[0] == "swigluoai" or "_interleaved" in activation
    if activation == "relu2":
        bias = gates
    elif interleaved:
        bias = torch.stack([gates, torch.ones(n, K)], -1).flatten(1)
    else:
        bias = torch.cat([gates, torch.ones(n, K)], -1)
    values = torch.zeros(n, bias.shape[1], K), torch.ones(n, K, K)
    w13, w2 = (fp4.prepack(*fp4.quantize(w, "nvfp4"), "nvfp4", layout) for w in values)
    ids, weights = torch.arange(n)[:, None], torch.ones(n, 1)
    got = torch.cat(
        [
            fp4.moe(
                torch.zeros(len(some), K), some, weights[: len(some)], *w13, *w2, bias.contiguous(),
                activation=activation, format="nvfp4", layout=layout, a_format="none",
            )[:, 0]
            for some in ids.split(tokens)
        ]
    )  # fmt: skip
    want = K * activate(bias.double(), activation)[:, 0]
    want = torch.where(want.abs() > torch.finfo(torch.float32).max, want * torch.inf, want)
    finite = want.isfinite()
    assert torch.equal(got.double()[~finite].nan_to_num(nan=7), want[~finite].nan_to_num(nan=7)), (got, want)
    assert ((got - want).abs()[finite] <= 1e-5 * want[finite].abs() + 1e-30).all(), (got, want)
