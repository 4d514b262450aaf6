"""A compilation that takes long says so, once."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch._inductor import compile_fx as inductor

from fp4_ops import backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("seconds, lines", [(0.0, 0), (0.5, 1)])
def test_a_long_compilation_says_so_once(seconds, lines, monkeypatch, caplog):
    def slow(gm, inputs, **options):
        time.sleep(seconds)
        return gm.forward

    monkeypatch.setattr(backend, "PATIENCE", 0.2)
    monkeypatch.setattr(backend, "_said", threading.Event())
    monkeypatch.setattr(inductor, "compile_fx", slow)
    with caplog.at_level(logging.INFO, "fp4_ops"), torch.no_grad():
        for width in (3, 4):
            model = torch.nn.Linear(width, 5)
            x = torch.randn(2, width)
            assert torch.equal(torch.compile(model, backend="fp4")(x), model(x))
    told = [record for record in caplog.records if "Inductor compiles" in record.getMessage()]
    assert len(told) == lines
