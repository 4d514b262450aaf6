"""If a launch fails, the error says what to do, in the same words from Python and from C++."""

import re
import types

import pytest
from places import ROOT

from fp4_ops.backends.launchers import library
from fp4_ops.distributed import nvlink
from fp4_ops.runtime import cuda_errors, native


def test_cpp_has_the_same_words():
    source = (ROOT / "csrc/cuda/library.cpp").read_text()
    body = source.split("const char* advice(int error) {")[1].split("\n}\n")[0]
    found, numbers = {}, []
    for case, default, text in re.findall(r'case (\d+):|(default):|return ((?:"[^"]*"\s*)+);', body):
        if text:
            words = "".join(re.findall(r'"([^"]*)"', text))
            found.update(dict.fromkeys(numbers, words))
            numbers = []
        else:
            numbers.append(int(case) if case else default)
    assert found == {**cuda_errors.ADVICE, "default": cuda_errors.OTHERWISE}


@pytest.mark.parametrize("error", [2, 700, 1])
def test_a_launch_that_fails_says_what_to_do(error, monkeypatch):
    words = {2: "run fewer tokens at once", 700: "Start it again with CUDA_LAUNCH_BLOCKING=1", 1: "run again"}
    failing = types.SimpleNamespace(fp4_kernel_rows=lambda: error, fp4_nvlink_gather=lambda *_: error)
    monkeypatch.setattr(native, "family", lambda _: 90)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(library, "library", lambda _: failing)
    monkeypatch.setattr(nvlink, "library", lambda: failing)
    for what, call in (
        ("fp4_kernel_rows", lambda: library.call("fp4_kernel_rows")),
        ("fp4_nvlink_gather", lambda: nvlink.launch("gather", nvlink.Failure(), None)),
    ):
        with pytest.raises(
            RuntimeError, match=rf"^fp4: {what} failed with CUDA error {error}: .*{words[error]}"
        ):
            call()
