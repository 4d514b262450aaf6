"""Reads of a slice move past writes to other slices, and the results of the graph stay the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_ops.compile_passes.graph.dead_code import read_past_writes

SCATTERS = ("select_scatter", "slice_scatter")


def other_slices(buffer, y):
    buffer = buffer.clone()
    for e in range(4):
        buffer[e] = buffer[e] * y[e]
    return buffer[3] + buffer[-4]


def slices_of_rows(buffer, y):
    buffer = buffer.clone()
    buffer[:, 2:4] = y[:, :2]
    return buffer[:, 4:6] + buffer[:, 2:4], buffer[:, :2]


def one_that_overlaps(buffer, y):
    buffer = buffer.clone()
    buffer[1:3] = y[:2]
    return buffer[2:4], buffer[1], buffer[::2]


def another_dimension(buffer, y):
    buffer = buffer.clone()
    buffer[:, 1] = y[0, 0]
    return buffer[0]


def another_dtype(buffer, y):
    return torch.select_scatter(buffer, y[1].double(), 0, 1)[1] + torch.slice_scatter(buffer, y.half())[0:4]


@pytest.mark.parametrize(
    ("f", "scatters_read"),
    [
        (other_slices, 0),
        (slices_of_rows, 0),
        (one_that_overlaps, 1),
        (another_dimension, 1),
        (another_dtype, 2),
    ],
)
def test_results_stay(f, scatters_read):
    args = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    gm = make_fx(torch.func.functionalize(f), tracing_mode="fake")(*args)
    want = gm(*args)
    read_past_writes(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    for got, was, eager in zip(*map(_tuple, (gm(*args), want, f(*args))), strict=True):
        assert got.dtype == was.dtype and torch.equal(got, was) and torch.equal(got, eager)
    scatters = {n for n in gm.graph.nodes if n.op == "call_function" and n.name.startswith(SCATTERS)}
    assert len(scatters) == scatters_read


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)
