"""The host's side of comparing samples on a GPU: it waits for the answer, and says so where none comes."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

samples = pytest.importorskip("fp4_ops.backends.triton.samples", reason="needs Triton")
PROGRAMS = 3


class Stream:
    over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def watch(monkeypatch):
    """As if three programs compare at each launch; the test writes their answers."""
    made = samples.Watch.__new__(samples.Watch)
    made._programs, made._device = PROGRAMS, torch.device("cuda", 0)
    made._answer = torch.zeros(1, dtype=torch.int64)
    made._seen = ctypes.c_int64.from_address(made._answer.data_ptr())
    made.stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
    return made


@pytest.mark.parametrize("found", [0, 1, 2])
def test_an_answer_that_comes_late(watch, found):
    """It is waited for, however many launches there were before."""
    watch._answer.fill_(4 * PROGRAMS)
    answer = 5 * PROGRAMS + (found << 40)
    threading.Timer(0.05, watch._answer.fill_, [answer]).start()
    assert watch.differs(5) == (found > 0)
    assert watch._answer.item() == answer


def test_an_answer_that_never_comes(watch):
    watch._answer.fill_(PROGRAMS)
    assert not watch.differs(1)
    watch.stream.over = True
    with pytest.raises(RuntimeError, match="did not compare the weights"):
        watch.differs(2)
