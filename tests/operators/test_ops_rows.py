"""The converters between the layouts of the rows: offs, m_indices (-1 is padding), masked."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import poisoned

fp4 = torch.ops.fp4

COUNTS = ((3, 0, 7, 1), (5,), (0, 0, 4), (0,), (0, 0, 0), tuple(range(40)))


def offsets(counts, device):
    return torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_offs_and_m_indices(counts, past, device):
    offs = offsets(counts, device)
    m = sum(counts) + past
    with poisoned():
        ids = fp4.offs_to_m_indices(offs, m)
        back = fp4.m_indices_to_offs(ids, len(counts))
    assert ids.dtype == torch.int32 and back.dtype == torch.int32
    assert torch.equal(ids, reference.m_indices(offs, m))
    assert torch.equal(back, offs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_masked(counts, past, dtype, device):
    offs = offsets(counts, device)
    m, k, max_m = sum(counts) + past, 33, max(counts) + past
    a = torch.randint(-100, 100, (m, k)).float().to(dtype).to(device)
    with poisoned():
        masked, masked_m = fp4.to_masked(a, offs, max_m)
        back, back_offs = fp4.from_masked(masked, masked_m, m)
    assert masked.shape == (len(counts), max_m, k) and masked.dtype == dtype
    assert masked_m.tolist() == list(counts) and masked_m.dtype == torch.int32
    ids = reference.masked_indices(masked_m, max_m)
    assert torch.equal(masked.float()[ids >= 0], a.float()[: sum(counts)])
    assert (masked.float()[ids < 0] == 0).all()
    assert torch.equal(back.float()[: sum(counts)], a.float()[: sum(counts)])
    assert (back.float()[sum(counts) :] == 0).all()
    assert torch.equal(back_offs, offs)


def test_rows_that_are_not_contiguous(device):
    a = torch.randn(10, 12, device=device)
    offs = offsets((4, 1), device)
    got, _ = fp4.to_masked(a[::2, ::3], offs, 4)
    assert torch.equal(got, fp4.to_masked(a[::2, ::3].contiguous(), offs, 4)[0])
    masked = torch.randn(4, 2, 6, device=device).transpose(0, 1)
    counts = torch.tensor([3, 4], dtype=torch.int32, device=device)
    assert torch.equal(
        fp4.from_masked(masked, counts, 8)[0], fp4.from_masked(masked.contiguous(), counts, 8)[0]
    )
