"""Comparing samples of weights on a GPU: the host waits for the result, and reports if none arrives."""

from __future__ import annotations

import ctypes
import functools
import threading

import pytest
import torch

from fp4_ops.backends.samples import Samples
from fp4_ops.runtime.runs import library

samples = pytest.importorskip("fp4_ops.backends.triton.samples", reason="needs Triton")
PROGRAMS = 3


class Stream:
    over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def watch():
    """As if three programs compare at each launch; the test writes their answers."""
    made = samples.Watch.__new__(samples.Watch)
    made._programs, made._stream = PROGRAMS, Stream()
    made._answer = torch.zeros(1, dtype=torch.int64)
    made._await = functools.partial(library().fp4_await, ctypes.c_void_p(made._answer.data_ptr()))
    return made


@pytest.mark.parametrize("seconds", [0, 1e-4, 0.05])
@pytest.mark.parametrize("found", [0, 1, 2])
def test_an_answer_that_comes_late(watch, found, seconds):
    """It is waited for, however many launches there were before."""
    watch._answer.fill_(4 * PROGRAMS)
    answer = 5 * PROGRAMS + (found << 40)
    threading.Timer(seconds, watch._answer.fill_, [answer]).start()
    assert watch.answered(5) == (found > 0)
    assert watch._answer.item() == answer


def test_an_answer_that_never_comes(watch):
    watch._answer.fill_(PROGRAMS)
    assert not watch.answered(1)
    watch._stream.over = True
    with pytest.raises(RuntimeError, match="did not compare the weights"):
        watch.answered(2)


# --- on a GPU ---


@pytest.fixture
def weight():
    return torch.randn(4, 96, 128, device="cuda")


def busy(seconds: float) -> None:
    """Keeps the current stream busy: an H100 makes some 1.7e9 cycles a second."""
    torch.cuda._sleep(int(seconds * 1.7e9))


@pytest.mark.hardware
@pytest.mark.gpu
@pytest.mark.parametrize("beside", [False, True])
def test_what_the_stream_does_before_is_seen(weight, beside):
    """Also where the host is far ahead of it; on a stream of the user's as well."""
    (of,) = Samples.of([weight])
    with torch.cuda.stream(torch.cuda.Stream() if beside else torch.cuda.current_stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for change in (False, True):
            busy(0.05)
            weight.add_(float(change))
            comparison = of.begin()
            assert comparison.differs() == change


@pytest.mark.hardware
@pytest.mark.gpu
def test_what_the_stream_does_after_is_not_waited_for(weight):
    (of,) = Samples.of([weight])
    assert not of.differs()
    comparison = of.begin()
    busy(0.5)
    assert not comparison.differs()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.hardware
@pytest.mark.gpu
def test_threads_that_share_a_stream(weight):
    (of,) = Samples.of([weight])
    found = []

    def ask() -> None:
        for _ in range(200):
            comparison = of.begin()
            found.append(comparison.differs())

    for change in (False, True):
        found.clear()
        weight.add_(float(change))
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert found == [change] * 800


@pytest.mark.hardware
@pytest.mark.gpu
def test_nobody_is_asked_during_a_capture(weight):
    (of,) = Samples.of([weight])
    weight.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not of.differs()
        torch.zeros(1, device="cuda")
    assert of.differs()


@pytest.mark.hardware
@pytest.mark.gpu
def test_of_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight = torch.randn(4, 96, 128, device="cuda:1")
    (of,) = Samples.of([weight])
    for change in (False, True):
        weight.add_(float(change))
        assert of.differs() == change
    assert torch.cuda.current_device() == 0
