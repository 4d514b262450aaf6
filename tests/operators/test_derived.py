"""What is made from a weight's memory is made once, again after writes, and freed with the weight."""

import gc

import pytest
import torch

import fp4_ops
from fp4_ops.quantization.overwrite import copy_into
from fp4_ops.runtime import derived, first_use


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(derived, "_kept", found := {})
    return found


@pytest.fixture
def make():
    """Another order of each matrix. It counts its calls."""

    def make(x):
        make.calls += 1
        return x.view(torch.uint8).flip(-1) + 1

    make.calls = 0
    return make


def weight(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_it_is_made_once(kept, make):
    w = weight(3, 5, 4)
    first = derived.derived(w, w._version, make)
    for view in (w, w.detach(), w.view(3, 5, 4)):
        assert derived.derived(view, w._version, make) is first
    with torch.inference_mode():
        assert derived.derived(w, w._version, make) is first
    assert make.calls == 1
    part = derived.derived(w[1:], w._version, make)
    assert torch.equal(part, first[1:]) and make.calls == 2
    del w, view
    gc.collect()
    assert not kept


def test_after_a_write_it_is_made_again_in_the_same_memory(kept, make):
    w = weight(3, 5, 4)
    first = derived.derived(w, w._version, make)
    w.view(torch.uint8)[2, 3] += 1
    with torch.inference_mode():
        assert derived.derived(w, w._version, make) is first
    assert torch.equal(first, make(w))


def test_a_recorded_graph_sees_new_weights(kept, make):
    """`fp4_ops.update` writes by copy_into, and a graph that is replayed asks for no version."""
    whole = weight(4, 5, 4)
    w = whole[1:]
    first = derived.derived(w, w._version, make)
    before, calls = first.clone(), make.calls
    copy_into(whole[0], weight(5, 4))  # beside it
    copy_into(weight(3, 5, 4), weight(3, 5, 4))
    assert make.calls == calls and torch.equal(first, before)
    copy_into(w[1, 2:4], weight(2, 4))
    assert torch.equal(first[[0, 2]], before[[0, 2]]) and not torch.equal(first[1], before[1])
    assert torch.equal(first, make(w))
    copy_into(whole, weight(4, 5, 4))
    assert torch.equal(first, make(w))
    assert derived.derived(w, w._version, make) is first


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_recorded_graph_sees_copies_into_a_tensor(ordinary, kept, make):
    w, new = fp4_ops.quantize(torch.randn(3, 32, 64), "nvfp4"), torch.randn(3, 32, 64)
    scale = w.inner_tensors()[1]
    first = derived.derived(scale, scale._version, make)
    before = first.clone()
    w.copy_(new if ordinary else fp4_ops.quantize(new, "nvfp4"))
    assert torch.equal(first, make(scale)) and not torch.equal(first, before)


def test_what_is_not_kept(kept, make, monkeypatch):
    """What is made of tensors whose writes cannot be seen, and by a graph that is captured: its kernels have
    not run."""
    w = weight(2, 5, 4)
    first = derived.derived(w, None, make)
    w.view(torch.uint8).add_(1)
    assert not torch.equal(first, derived.derived(w, None, make))
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "capturing", lambda: True)
        assert torch.equal(derived.derived(w, 1, make), make(w))
    assert not kept


def test_a_write_during_a_capture_shows(kept, make, monkeypatch):
    w = weight(2, 5, 4)
    first = derived.derived(w, 0, make)
    w.view(torch.uint8).add_(1)
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "capturing", lambda: True)
        assert derived.derived(w, 1, make) is not first
    assert derived.derived(w, 1, make) is first and torch.equal(first, make(w))


def test_memory_that_another_weight_gets_is_another_weight(kept, make):
    store = torch.randint(0, 100, (2 * 8 * 4,), dtype=torch.uint8)
    for _ in range(2):  # two storages over the same memory
        w = torch.frombuffer(store.numpy(), dtype=torch.uint8).view(2, 8, 4)
        assert torch.equal(derived.derived(w, 0, make), make(w))
        store += 1
        del w
