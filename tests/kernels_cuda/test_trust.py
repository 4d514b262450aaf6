"""GPUs other than Hopper: which layout they get, and that its kernels run only after a correct first use."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from fp4_ops import backends
from fp4_ops.backends.mma import trust
from fp4_ops.experts import packed as experts
from fp4_ops.meta.layouts import preferred_layout
from fp4_ops.runtime import first_use, native

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def ada(monkeypatch, tmp_path):
    """A GPU of compute capability 8.9 whose kernels are there; the error of each is in the dict."""
    errors = dict.fromkeys(("gemv", "decode", "prefill"), 1e-3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "error_of", errors.__getitem__)
    monkeypatch.setattr(trust, "_build", lambda: "a build")
    monkeypatch.setattr(native, "family", lambda index: native.MMA)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    properties = SimpleNamespace(name="an L40S", major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    first_use.forget()
    yield errors
    first_use.forget()


def preferred(**of):
    return preferred_layout("cuda", (128, 128), (128, 64), **of)


@pytest.mark.parametrize("dtype", [BF16, FP16, None])
def test_rows_of_16_bits_get_the_layout_of_all_gpus(ada, dtype):
    for a_format in ("none", "auto"):
        for format in ("nvfp4", "mxfp4"):
            assert preferred(dtype=dtype, format=format, a_format=a_format) == "mma_bf16"
    assert experts.auto_a_format("cuda", "mma_bf16") == "none"  # what "auto" becomes when it runs


@pytest.mark.parametrize(
    "of",
    [
        {"dtype": torch.float32, "format": "nvfp4"},
        {"dtype": BF16, "format": "int4"},
        {"dtype": BF16, "format": "nvfp4", "a_format": "fp8"},
    ],
)
def test_what_only_triton_runs_there_stays_plain(ada, of):
    assert preferred(**of) == "plain"


@pytest.mark.parametrize("kernel", ["gemv", "decode", "prefill"])
@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_a_kernel_whose_first_use_is_wrong_is_not_used(ada, kernel, error, caplog):
    ada[kernel] = error
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        for _ in range(2):
            assert preferred(dtype=BF16, format="nvfp4") == "plain"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f"the {kernel} kernel of layout 'mma_bf16' is wrong on an L40S" in said[0]


def test_hopper_is_not_asked(ada, monkeypatch):
    monkeypatch.setattr(native, "family", lambda index: native.HOPPER)
    ada.clear()  # asking would raise
    assert backends._preferred()[:3] == ("mma_bf16", "sm90", "sm90_int4")
    assert preferred(dtype=BF16, format="nvfp4") == "mma_bf16"
    for dtype in (FP16, None):  # its kernels read fp16 rows with layout sm90 alone
        assert preferred(dtype=dtype, format="nvfp4") == "sm90"
    monkeypatch.setattr(native, "family", lambda index: 0)
    assert backends._preferred() == ()
