"""Hopper and batch invariance (docs/operators.md): decode has one order of sums, whatever the batch."""

import pytest
import reference
import torch
from conftest import large

from fp4_ops.backends.launchers import library
from fp4_ops.runtime import native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not library.available(0),
        reason="needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)",
    ),
]
TOP_K = 4
SIZES = [(40, 16, 256, 128), large((200, 64, 1024, 768))]
"""Tokens, experts, hidden and intermediate size."""
CASES = [
    *((f, "sm90", a) for f in ("nvfp4", "mxfp4") for a in ("none", "fp8")),
    *((f, "mma_bf16", "none") for f in ("nvfp4", "mxfp4")),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("format", "layout", "a_format"), CASES)
def test_a_tokens_bits_do_not_depend_on_its_batch(format, layout, a_format, sizes):
    tokens, experts, hidden, inner = sizes
    most = tokens * 3 // 4

    def weight(n, k):
        w = reference.random_weight(format, experts, n, k, device="cuda", narrow=True)
        return torch.ops.fp4.prepack(w.packed, w.scale, w.global_scale, format, layout)

    w13, w2 = weight(2 * inner, hidden), weight(hidden, inner)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :TOP_K]
    ids[:most] = torch.where(ids[:most] == 2, 7, ids[:most])
    ids[:most, 0] = 2
    scores = torch.rand(tokens, TOP_K, device="cuda")

    def run(at):
        return torch.ops.fp4.moe(
            x[at], ids[at], scores[at], *w13, *w2, format=format, layout=layout, a_format=a_format,
            out_dtype=torch.float32,
        )  # fmt: skip

    with native.only("decode"):
        want = run(torch.arange(tokens, device="cuda"))
        for size in (1, 2, 8, 9, 33, most, *torch.randint(3, tokens, (5,)).tolist()):
            at = torch.randperm(tokens, device="cuda")[:size]
            assert torch.equal(run(at), want[at]), size
