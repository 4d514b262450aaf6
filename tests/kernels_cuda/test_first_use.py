"""Kernels that nobody has run on a device are checked once, and the result is stored."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from fp4_ops.runtime import first_use, native


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first_use.forget()
    yield tmp_path
    first_use.forget()


class Kernel:
    def __init__(self, error: float):
        self.error, self.runs = error, 0

    def __call__(self) -> float:
        self.runs += 1
        return self.error


def ask(kernel: Kernel, name: str = "a kernel", device: str = "a GPU", build: str = "1") -> bool:
    return first_use.agrees(name, device, build, kernel, 1e-3, "Another")


@pytest.mark.parametrize("error, right", [(1e-4, True), (2e-3, False), (float("nan"), False)])
def test_once_for_each_device_and_build(error, right, caplog):
    kernel = Kernel(error)
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        for _ in range(2):
            assert ask(kernel) is right
        assert kernel.runs == 1
        first_use.forget()  # another process
        assert ask(kernel) is right and kernel.runs == 1
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (0 if right else 2)  # one a process
    assert right or all("a kernel" in s and "a GPU" in s and "Another is used" in s for s in said)
    for other in ({"device": "another"}, {"build": "2"}, {"name": "another"}):
        before = kernel.runs
        ask(kernel, **other)
        assert kernel.runs == before + 1


def test_a_check_without_memory_is_not_stored(caplog):
    kernel = Kernel(0.0)

    def full() -> float:
        raise torch.OutOfMemoryError("no memory")

    with caplog.at_level(logging.WARNING, "fp4_ops"):
        assert not ask(full)
    assert "too little memory" in caplog.text and "wrong" not in caplog.text
    assert ask(kernel) and kernel.runs == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"a": ', '{"a GPU; 1; a kernel": "yes"}', b"\xff\xfe"])
def test_a_broken_file_counts_as_none(content, folder):
    first_use.cache_file().parent.mkdir()
    first_use.cache_file().write_bytes(content if isinstance(content, bytes) else content.encode())
    kernel = Kernel(0.0)
    assert ask(kernel) and kernel.runs == 1
    assert json.loads(first_use.cache_file().read_text())["a GPU; 1; a kernel"] is True
    assert len(list(first_use.cache_file().parent.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch, folder):
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    kernel = Kernel(0.0)
    assert ask(kernel) and ask(kernel) and kernel.runs == 1


def test_nothing_is_computed_while_a_graph_is_captured(monkeypatch):
    kernel = Kernel(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not ask(kernel) and kernel.runs == 0
    assert ask(kernel) and kernel.runs == 1


@pytest.mark.parametrize("file", ["_C.so", "_C_cuda.so", "_sm90.so"])
def test_a_rebuilt_library_is_another_build(file, monkeypatch, tmp_path):
    """A verdict holds for the operators that chose the kernel and arranged its operands, too."""
    for name in ("_C.so", "_C_cuda.so", "_sm90.so", "_sm80.so"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.setattr(native, "libraries", lambda: sorted(tmp_path.glob("_C*.so")))
    monkeypatch.setattr(native, "kernels_file", lambda family: tmp_path / f"_sm{family}.so")
    build = native.build.__wrapped__
    before = build(native.HOPPER), build(native.MMA)
    assert before == (build(native.HOPPER), build(native.MMA)) and before[0] != before[1]
    (tmp_path / file).write_bytes(b"rebuilt")
    assert build(native.HOPPER) != before[0]
    assert (build(native.MMA) == before[1]) == (file == "_sm90.so")
