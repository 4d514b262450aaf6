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
    string = r'"((?:[^"\\]|\\.)*)"'
    one = r"case (-?\d+):|(default):|return ((?:\"(?:[^\"\\]|\\.)*\"\s*)+);"
    for case, default, text in re.findall(one, body):
        if text:
            words = "".join(re.findall(string, text)).replace('\\"', '"')
            found.update(dict.fromkeys(numbers, words))
            numbers = []
        else:
            numbers.append(int(case) if case else default)
    assert found == {**cuda_errors.ADVICE, "default": cuda_errors.OTHERWISE}


WORDS = {
    2: "run fewer tokens at once", 700: "Start it again with CUDA_LAUNCH_BLOCKING=1", 1: "run again",
    -1: "takes no such sizes", -2: "Update the driver", -3: "shared memory",
}  # fmt: skip


def test_every_reason_of_the_kernels_has_words():
    """`LaunchError` lists the negative numbers that launchers return."""
    source = (ROOT / "csrc/device/interface.h").read_text()
    body = source.split("enum LaunchError : int {")[1].split("};")[0]
    reasons = {int(number) for number in re.findall(r"= (-\d+),", body)}
    assert reasons == {error for error in cuda_errors.ADVICE if error < 0} == {e for e in WORDS if e < 0}


@pytest.mark.parametrize("error", WORDS)
def test_a_launch_that_fails_says_what_to_do(error, monkeypatch):
    happened = "failed with CUDA error" if error > 0 else "launched nothing, reason"
    failing = types.SimpleNamespace(fp4_kernel_rows=lambda: error, fp4_nvlink_gather=lambda *_: error)
    monkeypatch.setattr(native, "family", lambda _: 90)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(library, "library", lambda _: failing)
    monkeypatch.setattr(nvlink, "library", lambda: failing)
    for what, call in (
        ("fp4_kernel_rows", lambda: library.call("fp4_kernel_rows")),
        ("fp4_nvlink_gather", lambda: nvlink.launch("gather", nvlink.Failure(), None)),
    ):
        with pytest.raises(RuntimeError, match=rf"^fp4: {what} {happened} {error}: .*{WORDS[error]}"):
            call()
