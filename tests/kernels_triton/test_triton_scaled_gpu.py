"""FP4 x FP4 by `tl.dot_scaled` on a GPU against float64, on odd shapes.

On Blackwell this runs its FP4 tensor cores, which nobody has done yet. On another GPU Triton multiplies mxfp4
by bfloat16: the same kernels otherwise, so their launches, maps, masks and first uses are tested there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
import torch

from fp4_ops.meta.formats import FORMATS
from fp4_ops.runtime import first_use

pytest.importorskip("triton")

from fp4_ops.backends.triton import ops, tiles
from fp4_ops.backends.triton.scaled import ops as scaled_ops
from fp4_ops.backends.triton.scaled import support
from fp4_ops.backends.triton.scaled import tiles as scaled_tiles
from fp4_ops.backends.triton.scaled.kernel import scaled_kernel
from fp4_ops.backends.triton.scaled.spec import Scaled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [(5, 727, 576), (3, 96, 2880), (2, 33, 50), (1, 577, 128), (4, 64, 40)]
FORMAT_NAMES = ("nvfp4", "mxfp4")


@pytest.fixture(params=FORMAT_NAMES)
def format(request, monkeypatch, tmp_path):
    """A format that this GPU multiplies so, or is made to; afterwards, that its kernels did run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(support, "_wrong", set())
    monkeypatch.setattr(support, "_told", set())
    first_use.forget()
    this = tiles.device_of(torch.device("cuda"))
    if not support.has_instructions(this):
        if request.param == "nvfp4":
            pytest.skip("Triton has nothing else for it on this GPU")
        monkeypatch.setattr(Scaled, "as_meant", lambda self, kernel: True)
        tiles.pretend(replace(this, name="like sm_120", capability=(12, 0)))
    launches = []
    run = type(scaled_kernel).run

    def counted(self, *args, **kwargs):
        launches.extend([1] * (self is scaled_kernel))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(type(scaled_kernel), "run", counted)
    yield request.param
    tiles.pretend(None)
    tiles.force(None)
    first_use.forget()
    assert launches and not support._wrong and not support._told


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.cpu().double() - want.cpu().double()).norm() / want.cpu().double().norm()).item()


BOUND = 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape, format):
    g, n, k = shape
    w = reference.random_weight(format, g, n, k)
    there = [None if t is None else t.cuda() for t in w.operands()]
    one = [None if t is None else t[0] for t in there]
    bias = torch.randn(g, n)
    for m in (1, 45, 300):
        a = reference.random_activations(m, k, kind=format)
        b = reference.random_activations(g, m, k, kind=format)

        def given(x):
            scale, factor = (None if t is None else t.cuda() for t in (x.scale, x.global_scale))
            return {
                "a_scale": scale, "a_global_scale": factor, "a_format": format, "format": format,
                "out_dtype": torch.float32,
            }  # fmt: skip

        ids = torch.randint(-1, g + 1, (m,))
        ids[0] = 0
        options = given(a)
        got = torch.ops.fp4.indexed_mm(a.data.cuda(), *there, ids.cuda(), bias=bias.cuda(), **options)
        assert error(got, reference.indexed_mm(a.exact, w.dense, ids, bias)) < BOUND
        offs = torch.randint(1, m + 1, (g,)).sort().values.int()
        got = torch.ops.fp4.grouped_mm(a.data.cuda(), *there, offs.cuda(), **options)
        assert error(got, reference.indexed_mm(a.exact, w.dense, reference.m_indices(offs, m))) < BOUND
        got = torch.ops.fp4.mm(a.data.cuda(), *one, **options)
        assert error(got, a.exact @ w.dense[0].T) < BOUND
        counts = torch.randint(0, m + 1, (g,)).int()
        counts[0] = m
        got = torch.ops.fp4.grouped_mm_masked(b.data.cuda(), *there, counts.cuda(), **given(b))
        inside = torch.arange(m) < counts[:, None]
        assert error(got, (b.exact @ w.dense.mT) * inside[..., None]) < BOUND
        ends = torch.tensor([32, k], dtype=torch.int32)
        got = torch.ops.fp4.grouped_mm_k(a.data.cuda(), *one, ends.cuda(), **options)
        want = torch.stack([a.exact[:, p] @ w.dense[0][:, p].T for p in (slice(0, 32), slice(32, k))])
        assert error(got, want) < BOUND


@pytest.mark.parametrize("tile", scaled_tiles.SHAPES, ids=str)
def test_every_tile(tile, format):
    if not scaled_tiles.usable(tile, 1 << 20, tiles.device_of(torch.device("cuda"))):
        pytest.skip("not for this architecture")
    assert (
        scaled_ops.first_error(format, tile, tiles.device_of(torch.device("cuda")), torch.device("cuda"))
        < BOUND
    )


def block(format: str, tokens: int):
    g, hidden, inner, top_k = 6, 320, 192, 3
    w13 = reference.random_weight(format, g, 2 * inner, hidden)
    w2 = reference.random_weight(format, g, hidden, inner)
    ids = torch.randint(-1, g + 1, (tokens, top_k))
    ids[0, 0] = 0
    return torch.randn(tokens, hidden), ids, torch.rand(tokens, top_k), *w13.operands(), *w2.operands()


@pytest.mark.parametrize("tokens", [1, 70, 900])
def test_moe_and_its_graph(tokens, format):
    here = block(format, tokens)
    there = [None if t is None else t.cuda() for t in here]
    options = {"format": format, "a_format": format, "out_dtype": torch.float32}
    got = torch.ops.fp4.moe(*there, **options)
    assert error(got, torch.ops.fp4.moe(*here, **options)) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = torch.ops.fp4.moe(*there, **options)
    graph.replay()
    assert torch.equal(again, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FORMAT_NAMES)
@pytest.mark.parametrize("k", [50, 768, 2880])
def test_rows_are_quantised_as_on_the_cpu(k, kind, dtype):
    x = (torch.randn(33, k) * torch.exp(2 * torch.randn(33, 1))).to(dtype)
    x[0] = 0
    packed, scale, factor = ops.quantize_rows(x.cuda(), FORMATS[kind])
    want, want_scale, want_factor = torch.ops.fp4.quantize(x[:, None], kind)
    blocks = want_scale.shape[-1]
    assert torch.equal(packed.cpu(), want[:, 0]) and not scale[:, blocks:].any()
    assert torch.equal(scale[:, :blocks].cpu(), want_scale[:, 0].view(torch.uint8))
    assert torch.equal(factor.cpu(), want_factor if kind == "nvfp4" else torch.ones(33))
