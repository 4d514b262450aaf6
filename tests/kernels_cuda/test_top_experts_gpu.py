"""The experts of each token (csrc/sm90/top_experts.cu) against float64: sizes, dtypes, inf and NaN."""

import random

import pytest
import torch

from fp4_ops.backends.launchers import library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not library.available(0),
        reason="needs a Hopper GPU and its kernels (build with FP4_CUDA_ARCHS=90a)",
    ),
]
FLOATS = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("experts", [1, 8, 32, 60, 128, 200, 256, 512])
@pytest.mark.parametrize("dtype", FLOATS)
def test_chooses_as_a_stable_sort_does(dtype, experts):
    for rows in (1, random.randint(2, 9), 64, random.randint(65, 3000)):
        k = random.randint(1, min(16, experts))
        logits = (torch.randn(rows, experts, device="cuda") * 4).to(dtype)  # 16 bits: some are equal
        softmax, normalize = random.random() < 0.5, random.random() < 0.5
        out = random.choice(FLOATS)
        weights, ids = torch.ops.fp4.top_experts(
            logits, k, softmax=softmax, normalize=normalize, out_dtype=out
        )
        right = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(ids, right), (rows, experts, k)
        scores = logits.double().softmax(-1) if softmax else logits.double()
        want = scores.gather(1, right)
        if normalize and not softmax:
            continue  # a sum may be near zero
        if normalize:
            want = want / want.sum(-1, keepdim=True)
        assert weights.dtype == out
        torch.testing.assert_close(weights.double(), want, rtol=3 * ROUNDING[out], atol=1e-7)


def test_values_that_are_not_finite():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, nan, -inf, inf, -0.0, -1.0, -nan, -inf], [-inf] * 8], device="cuda")
    weights, ids = torch.ops.fp4.top_experts(logits, 8)
    assert ids.tolist() == [[1, 6, 3, 0, 4, 5, 2, 7], [*range(8)]]
    want = torch.tensor([[nan, nan, inf, 0.0, 0.0, -1.0, -inf, -inf], [-inf] * 8])
    torch.testing.assert_close(weights.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.ops.fp4.top_experts(logits, 3, softmax=True, normalize=True)[0].isnan().all()


def test_rows_that_lie_apart_and_more_dimensions():
    logits = torch.randn(3, 64, 5, device="cuda").transpose(1, 2)
    weights, ids = torch.ops.fp4.top_experts(logits, 4, softmax=True)
    assert weights.shape == ids.shape == (3, 5, 4) and ids.is_contiguous()
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[..., :4])


def test_more_experts_run_torch():
    logits = torch.randn(3, 600, device="cuda")
    weights, ids = torch.ops.fp4.top_experts(logits, 20)
    assert torch.equal(weights, logits.topk(20).values) and torch.equal(ids, logits.topk(20).indices)
