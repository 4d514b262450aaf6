"""benchmarks/llama_cpp.py writes files that llama.cpp reads, and yields rows of what llama-bench prints."""

import dataclasses
import json

import numpy as np
import pytest
from benchmark_scripts import FOLDER, first_rows, imported

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks/")


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name, gib", [("qwen3-30b", 17.28), ("gpt-oss-120b", 59.02)])
def test_files_for_llama_cpp_are_as_large_as_those_that_people_load(name, gib):
    """llama.cpp prints these sizes of the published files."""
    module = imported("gguf_models")
    model = module.MODELS[name]
    size = sum(module.TYPES[t.type].bytes_of(t.shape) for t in model.tensors(model.layers))
    assert round(size / 2**30, 2) == gib


def test_rows_of_llama_cpp(tmp_path, monkeypatch):
    module = imported("gguf_models")
    rest = {"vocab_size": 512, "expert_feed_forward_length": 256, "expert_count": 4}
    small = {**module.MODELS["qwen3-30b"].numbers, "embedding_length": 256, **rest}
    model = dataclasses.replace(module.MODELS["qwen3-30b"], layers=2, numbers=small)
    monkeypatch.setattr(module, "MODELS", {"small": model})
    monkeypatch.setattr(module, "POOL_BYTES", 1 << 16)
    found = {"build_commit": "abc", "n_depth": 100, "avg_ns": 64e6, "avg_ts": 1000.0, "n_threads": 16}
    found |= {"load_mode": "auto", "n_prompt": 512, "n_gen": 0}
    bench = tmp_path / "llama-bench"
    bench.write_text(f"#!/bin/sh\ncat $2 >{tmp_path}/seen\necho loading\necho '{json.dumps(found)}'\n")
    bench.chmod(0o755)
    rows = first_rows("llama_cpp", ["--bench", str(bench), "--models", "small", "--folder", str(tmp_path)])
    places = ("gpu", "experts_on_cpu", "cpu")
    assert [(r["where"], r["table"]) for r in rows] == [(p, t) for p in places for t in ("decode", "prompt")]
    assert rows[0]["ms"] == 1 and rows[1]["ms"] == 64 and rows[0]["layers"] == 2
    assert not list(tmp_path.glob("*.gguf"))
    data = (tmp_path / "seen").read_bytes()
    assert data[:8] == b"GGUF\x03\0\0\0" and len(data) == rows[0]["gb"] * 1e9
    blocks = np.frombuffer(data[-210 * 100 :], np.uint8).reshape(100, 210)  # Q6_K
    assert (blocks[:, -2:].copy().view("<f2") > 0).all() and len({bytes(b) for b in blocks}) == 100
