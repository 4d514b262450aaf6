"""Parallel regions of the CPU's operators (csrc/cpu/parallel.h)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import reference
import torch
from torch.utils.data import DataLoader, Dataset

import fp4_ops  # noqa: F401  loads the operators


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Block:
    """A block of experts whose every phase has work for several threads."""

    def __init__(self, tokens: int, a_format: str, format: str = "nvfp4") -> None:
        hidden, inter = 512, 768
        self.w13 = reference.random_weight(format, 4, 2 * inter, hidden, layout="tile16")
        self.w2 = reference.random_weight(format, 4, hidden, inter, layout="tile16")
        self.x = torch.randn(tokens, hidden)
        self.ids = torch.randint(-1, 4, (tokens, 2))
        self.ids[0, 0] = 2  # no token of any expert would be zeros, and show nothing
        self.weights = torch.rand(tokens, 2)
        self.a_format = a_format

    def __call__(self) -> torch.Tensor:
        options = {**self.w13.options(), "a_format": self.a_format, "out_dtype": torch.float32}
        return torch.ops.fp4.moe(
            self.x, self.ids, self.weights, *self.w13.operands(), *self.w2.operands(), **options
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("a_format", ("int8", "none"))
@pytest.mark.parametrize("tokens", (1, 9, 120))
def test_threads_do_not_change_a_bit_of_a_block(tokens, a_format):
    """Also more threads than there are processors, and than there are shares of some phases."""
    block = Block(tokens, a_format)
    with threads(1):
        alone = block()
    assert alone.isfinite().all() and alone.any()
    for count in (2, 3, 13):
        with threads(count):
            for _ in range(5):
                assert torch.equal(block(), alone), count


def test_calls_from_several_threads_at_once():
    blocks = [Block(tokens, a_format) for tokens in (1, 2, 40) for a_format in ("int8", "none")]
    with threads(1):
        alone = [block() for block in blocks]
    with threads(2), ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            together = list(pool.map(lambda block: block(), blocks))
            for got, want in zip(together, alone):
                assert torch.equal(got, want)


def test_other_operators_between_calls():
    """torch's own parallel regions have the same threads."""
    block, other = Block(3, "int8"), torch.randn(400, 400)
    with threads(1):
        alone, want = block(), other @ other
    with threads(3):
        for _ in range(10):
            assert torch.equal(block(), alone)
            # As many threads as here may add in another order.
            assert (other @ other - want).norm() < 1e-5 * want.norm()
            torch.testing.assert_close(other.exp().sum(), other.exp().sum())


class Blocks(Dataset):
    def __init__(self, block: Block) -> None:
        self.block = block

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.block()


def test_in_workers_of_a_data_loader_that_were_forked():
    """After calls in the parent, whose threads a fork does not have."""
    block = Block(3, "int8")
    with threads(2):
        want = block()
        loader = DataLoader(
            Blocks(block), batch_size=None, num_workers=2, timeout=600,
            multiprocessing_context=multiprocessing.get_context("fork"),
        )  # fmt: skip
        got = list(loader)
        assert len(got) == 4 and all(torch.equal(g, want) for g in got)
        assert torch.equal(block(), want)
