"""The training example runs end to end on a short text, so that errors are found without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture
def example(monkeypatch):
    path = ROOT / "examples" / "train_moe_lm.py"
    spec = importlib.util.spec_from_file_location("train_moe_lm", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.more
def test_files_are_split_the_same_way_each_time(example):
    def first(count: int) -> list:
        return [entry for entry, _ in zip(example.files(), range(count), strict=False)]

    once = first(150)
    assert once == first(150)
    assert len({text for _, text in once}) == 150
    heldout = sum(split == "heldout" for split, _ in once)
    assert 0 < heldout < 20


@pytest.mark.slow
@pytest.mark.more  # calls nothing that other tests do not
def test_train_and_evaluate(example, monkeypatch, tmp_path, capsys):
    source = Path(example.__file__).read_text()
    texts = [("heldout" if i % 5 == 0 else "train", f"# {i}\n{source}") for i in range(20)]
    monkeypatch.setattr(example, "files", lambda: iter(texts))
    monkeypatch.setattr(
        sys, "argv", ["train_moe_lm.py", "--size", "tiny", "--minutes", "0.05", "--out", str(tmp_path)]
    )
    example.main()
    out = capsys.readouterr().out
    assert "best nvfp4 without calibration:" in out and "(goal: at most 1.005)" in out
    run = json.loads((tmp_path / "accuracy_moe_lm.json").read_text())
    size = example.SIZES["tiny"]
    assert run["tokens"] == size.windows * (size.length - 1)
    rows = {(r["format"], r["method"], r["activations"]): r for r in run["rows"]}
    # The model itself twice; methods x activations of nvfp4, mxfp4 and the three int4.
    assert len(rows) == 2 + 7 * 4 + 4 * 4 + 3 * 4 * 3
    assert 1 < rows["bfloat16", "-", "-"]["perplexity"] < 2 * size.vocabulary
    assert rows["nvfp4", "gptq", "W4A16"]["kl"] < rows["mxfp4", "rtn", "W4A4 mxfp4"]["kl"]
    assert str(run["rows"][-1]["method"]) in (tmp_path / "accuracy_moe_lm.txt").read_text()
    errors = json.loads((tmp_path / "weight_errors.json").read_text())["errors"]
    assert len(errors) == 2 * size.layers * size.experts
    assert torch.tensor([e["sqnr"] for e in errors]).gt(15).all()
