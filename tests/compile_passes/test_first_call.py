"""A slow compilation logs one message."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
import torch
from torch._inductor import compile_fx as inductor

from fp4_ops import backend
from fp4_ops.compile_passes.dynamo.extend import hide_version_checks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("patience, lines", [(600.0, 0), (0.0, 1)])
def test_a_long_compilation_says_so_once(patience, lines, monkeypatch, caplog):
    said = threading.Event()

    def compiles(gm, inputs, **options):
        assert said.wait(60) if lines else not said.is_set()
        return gm.forward

    monkeypatch.setattr(backend, "PATIENCE", patience)
    monkeypatch.setattr(backend, "_said", said)
    monkeypatch.setattr(inductor, "compile_fx", compiles)
    with caplog.at_level(logging.INFO, "fp4_ops"), torch.no_grad():
        for width in (3, 4):
            model = torch.nn.Linear(width, 5)
            x = torch.randn(2, width)
            assert torch.equal(torch.compile(model, backend="fp4")(x), model(x))
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(60)  # it writes to the log after it has set the event
    told = [record for record in caplog.records if "Inductor compiles" in record.getMessage()]
    assert len(told) == lines


TEXT = (
    "Dynamo detected a call to a `functools.lru_cache`-wrapped function at '{}:325'. Dynamo "
    'ignores the cache wrapper ...\n\nThis call originates from:\n  File "/x/{}", line 325, in f\n    {}()\n'
)


@pytest.mark.parametrize(
    "file, call, shown",
    [("moe.py", "is_torch_less_or_equal", 0), ("moe.py", "mine", 1), ("mine.py", "is_torch_greater", 1)],
)
def test_version_checks_of_transformers_are_not_warned_about(file, call, shown):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hide_version_checks()
        warnings.warn(TEXT.format(file, file, call), stacklevel=1)
    assert len(seen) == shown
