"""What reaches the Hopper kernels, without running them."""

from __future__ import annotations

import pytest
import reference
import torch

register = pytest.importorskip("fp4_ops.triton.register")
from fp4_ops.sm90 import decode, ops, rows  # noqa: E402


def packed(format: str, layout: str, *shape: int):
    return torch.ops.fp4.prepack(*reference.random_weight(format, *shape).operands(), format, layout)


@pytest.mark.parametrize(
    "format, layout", [("nvfp4", "sm90"), *((f, "sm90_int4") for f in reference.INT4_FORMATS)]
)
@pytest.mark.parametrize("name", ["mm", "grouped_mm", "grouped_mm_masked", "indexed_mm"])
def test_products_of_the_layout_go_to_the_hopper_kernels(monkeypatch, name, format, layout):
    groups, n, k, m = 3, 64, 128, 5
    b = packed(format, layout, *([] if name == "mm" else [groups]), n, k)
    a = torch.randn(*([groups] if name == "grouped_mm_masked" else []), m, k).bfloat16()
    a_scale = None
    if layout == "sm90_int4":
        a, a_scale = torch.ops.fp4.quantize_fp8(a, layout="sm90")
    bias = torch.randn(*b[0].shape[:-1])
    route = {
        "mm": [],
        "grouped_mm": [torch.tensor([1, 2, 5], dtype=torch.int32)],
        "grouped_mm_masked": [torch.tensor([1, 0, 5], dtype=torch.int32)],
        "indexed_mm": [torch.tensor([0, 2, 1, 1, 0])],
    }[name]
    seen = []

    def kernel(*args):
        seen.append(args)
        return "done"

    kernel.__name__ = name
    monkeypatch.setattr(register.sm90, "require", lambda op, layout, device: seen.append((op, layout)))
    monkeypatch.setattr(register.sm90, name, kernel)
    options = {"format": format, "layout": layout, "out_dtype": torch.float32}
    got = getattr(register, name)(a, *b, *route, a_scale, bias, **options)
    assert got == "done"
    op, (given_a, given_scale, weight, *rest) = seen
    assert op == (name, layout) and given_a is a and given_scale is a_scale
    assert (weight.groups, weight.n, weight.kp) == (1 if name == "mm" else groups, n, k)
    assert torch.equal(weight.codes, b[0]) and torch.equal(weight.scales, b[1])
    assert torch.equal(weight.bias, bias)
    if layout == "sm90":
        assert torch.equal(weight.global_scale, b[2])
    else:
        assert torch.equal(weight.factor, b[2]) and weight.group == reference.BLOCK[format]
    assert rest[-1] == torch.float32
    assert len(rest) == len(route) + 1 and all(x is y for x, y in zip(rest, route))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gate", ["silu", "silu_interleaved"])
@pytest.mark.parametrize("tokens", [4, 600])
def test_a_block_sorts_its_ids_at_most_once(monkeypatch, tokens, gate, dtype):
    experts, hidden, inter, top_k = 512, 128, 64, 4
    launches, sorts = [], []
    monkeypatch.setattr(ops, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(decode, "run", lambda *args, **options: launches.append((args, options)))
    monkeypatch.setattr(rows, "same", lambda h, gate: h[:, : h.shape[1] // 2])
    monkeypatch.setattr(rows, "combine", lambda *args: None)

    def route(ids, groups):
        sorts.append(groups)
        return "offs", "sorted", "position"

    monkeypatch.setattr(rows, "route", route)
    shape = lambda n, k: decode.Weight(*[None] * 4, experts, n, k)  # noqa: E731
    ids = torch.randint(0, experts, (tokens, top_k), dtype=dtype)
    ops.moe(
        torch.randn(tokens, hidden).bfloat16(), ids, torch.rand(tokens, top_k), shape(2 * inter, hidden),
        shape(hidden, 128), gate, "none", torch.bfloat16,
    )  # fmt: skip
    many = tokens * top_k > decode.MAX_IDS
    assert sorts == ([experts] if many else [])
    by_id = decode.Routing.IDS64 if dtype == torch.int64 else decode.Routing.IDS32
    for (_, _, given, routing, count, _), options in launches:
        assert count == tokens * top_k
        assert routing == (decode.Routing.OFFS if many else by_id)
        assert given == "offs" if many else torch.equal(given, ids)
        assert options["sorted_rows"] == ("sorted" if many else None)
    (_, up), (_, down) = launches
    assert up["a_div"] == top_k and down["a_div"] == 1
    assert not up["early"] and down["early"] != many
