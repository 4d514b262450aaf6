"""Hopper and batch invariance (docs/operators.md): decode has one order of sums, whatever the batch."""

import pytest
import reference
import torch

from fp4_ops import native
from fp4_ops.backends.launchers import library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not library.available(0),
        reason="needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)",
    ),
]
TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 200, 64, 4, 1024, 768
CASES = [
    *((f, "sm90", a) for f in ("nvfp4", "mxfp4") for a in ("none", "fp8")),
    *((f, "mma_bf16", "none") for f in ("nvfp4", "mxfp4")),
]


@pytest.mark.parametrize(("format", "layout", "a_format"), CASES)
def test_a_tokens_bits_do_not_depend_on_its_batch(format, layout, a_format):
    def weight(n, k):
        w = reference.random_weight(format, EXPERTS, n, k, device="cuda", narrow=True)
        return torch.ops.fp4.prepack(w.packed, w.scale, w.global_scale, format, layout)

    w13, w2 = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").argsort(1)[:, :TOP_K]
    ids[:150] = torch.where(ids[:150] == 2, 7, ids[:150])
    ids[:150, 0] = 2
    scores = torch.rand(TOKENS, TOP_K, device="cuda")

    def run(at):
        return torch.ops.fp4.moe(
            x[at], ids[at], scores[at], *w13, *w2, format=format, layout=layout, a_format=a_format,
            out_dtype=torch.float32,
        )  # fmt: skip

    with native.only("decode"):
        want = run(torch.arange(TOKENS, device="cuda"))
        for size in (1, 2, 8, 9, 33, 64, 150, *torch.randint(3, TOKENS, (5,)).tolist()):
            at = torch.randperm(TOKENS, device="cuda")[:size]
            assert torch.equal(run(at), want[at]), size
