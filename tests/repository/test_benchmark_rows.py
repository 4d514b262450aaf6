"""The scripts under benchmarks/ yield rows that fit their tables; test_hopper_rows.py has those for Hopper.

The measurements need a GPU, a peer or minutes. So the scripts run here on the CPU, with tiny shapes.
"""

import argparse
import importlib
import sys
import types
import unittest.mock
from pathlib import Path

import pytest
import torch
from benchmark_scripts import FOLDER, first_rows, imported

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks/")


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_rows_of_quantize_speed(monkeypatch):
    monkeypatch.setattr(imported("quantize_speed"), "SHAPES", ((2, 64, 128), (2, 128, 64)))
    rows = first_rows("quantize_speed", ["--layers", "1", "--device", "cpu"])
    assert {r["format"] for r in rows} >= {"nvfp4", "mxfp4", "int4"} and rows[0]["extra_gib"] is None


def test_rows_of_new_weights(monkeypatch):
    sizes = {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 32}
    monkeypatch.setattr(imported("new_weights"), "SIZES", sizes)
    rows = first_rows("new_weights", ["--format", "nvfp4", "--rounds", "1", "--device", "cpu"])
    assert {r["sent"]: r["tensors"] for r in rows} == {"stacked": 2, "one by one": 12, "mixed": 12}
    assert rows[0]["waiting_mib"] == 0 < rows[-1]["waiting_mib"]


def test_rows_of_cpu_layer(monkeypatch):
    module = imported("cpu_layer")
    for name, value in (("HIDDEN", 64), ("EXPERTS", 4), ("INTER", 64)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "bandwidth", lambda threads: {"table": "memory", "threads": threads})
    monkeypatch.setattr(torch, "compile", lambda block: block)
    threads = torch.get_num_threads()
    rows = first_rows("cpu_layer", ["--threads", str(threads), "--tokens", "1", "3", "--blocks", "2"])
    layer = [r for r in rows if r["table"] == "layer"]
    assert len(layer) == 2 * 6 and sum(r["speedup"] is not None for r in layer) == 2 * 3


@pytest.mark.more
def test_rows_of_cpu_step(monkeypatch):
    module = imported("cpu_step")
    small = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setattr(module, "SIZES", {**module.SIZES, **small})
    monkeypatch.setattr(module, "VOCABULARY", 128)
    monkeypatch.setattr(module.cpu_machine, "bandwidth", lambda threads: {"table": "memory"})
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    rows = first_rows("cpu_step", ["--layers", "2", "--formats", "mxfp4", "--prefill", "3"])
    variants = ["experts", "fp8", "whole"]
    assert [r.get("variant") for r in rows[1:]] == variants + [v for v in variants for _ in range(2)]
    experts, fp8, whole = rows[-5::2]
    assert experts["gb"] > fp8["gb"] > whole["gb"] > 0


@pytest.mark.more
def test_rows_of_adapters():
    rows = first_rows("adapters", ["--tiny", "--layers", "1", "--tokens", "32", "--rounds", "1"])
    assert rows[0]["relative_error"] < 1e-4 and rows[1]["variant"] == "bf16"


def test_rows_of_triton(monkeypatch):
    pytest.importorskip("triton")
    module = imported("gpu_ops")
    small = module.Model("small", 4, 2, 64, 32)
    for name, value in (
        ("DEVICE", "cpu"), ("MODELS", {"small": small}), ("ceilings", lambda: (4e12, 8e14)),
        ("median_us", lambda calls: [call() for call in calls][:0] or 1.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    for name in ("device_of", "force", "preferred"):
        monkeypatch.setattr(module.tiles, name, lambda *_, name=name: name)
    rows = first_rows("gpu_ops", ["--models", "small", "--tokens", "3", "--formats", "nvfp4,mxfp4"])
    assert [r["table"] for r in rows] == ["ceilings", *["product", "product", "block"] * 2]
    assert all(0 < r["error"] < 6e-3 for r in rows[1:]) and rows[1]["tile"] == "preferred"


@pytest.mark.more
def test_rows_of_several_gpus(monkeypatch):
    """Over gloo: as many processes as there would be GPUs, which agree with one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--models", "tiny", "--batches", "1,4", "--layers", "2", "--keys", "32"]
    rows = first_rows("several_gpus", arguments)
    assert [(r["way"], r["batch"]) for r in rows] == [
        ("one", 1), ("one", 4), ("split", 1), ("split", 4), ("own", 4),
    ]  # fmt: skip
    assert all(r["ms"] > 0 for r in rows)
    assert all(r["error"] < 0.05 and r["equal_tokens_ratio"] > 0.5 for r in rows[2:])


def test_rows_of_compile_time(monkeypatch):
    module = imported("compile_time")
    monkeypatch.setattr(module, "first_call", lambda *_: (2.0, lambda: None))
    monkeypatch.setattr(module, "transformer", lambda *_: None)
    threads = torch.get_num_threads()
    try:
        (loop,) = first_rows("compile_time", ["loop", "4"])
        (layers,) = first_rows("compile_time", ["layers", "8x4"])
        passes = first_rows("compile_time", ["passes", "8x4", "8x6", "16x6"])
        (traced,) = first_rows("compile_time", ["traced", "4"])
    finally:
        torch.set_num_threads(threads)
    assert (loop["experts"], loop["speedup"]) == (4, 1.0)
    assert (layers["family"], layers["experts"], layers["layers"]) == ("mixtral", 8, 4)
    assert [row["growth_s_per_layer"] for row in passes] == [None, 0.0, None]
    assert (traced["experts"], traced["dynamo_s"]) == (4, 2.0)


def test_rows_of_changed_weights(monkeypatch):
    module = imported("changed_weights")

    class Step:
        def __init__(self, model, *args):
            self.on = False

        def samples(self):
            return []

        def compare(self, on):
            self.on = on

        def __call__(self):
            return 3.0 if self.on else 2.0

    monkeypatch.setattr(module, "Step", Step)
    threads = torch.get_num_threads()
    try:
        (row,) = first_rows("changed_weights", ["2x4", "--steps", "4"])
    finally:
        torch.set_num_threads(threads)
    assert (row["model"], row["with_ms"], row["without_ms"], row["ratio"]) == ("2x4", 3.0, 2.0, 1.5)


def test_rows_of_checkpoints(monkeypatch, tmp_path):
    """With a command that writes its result at once, whole or not."""
    stream, calibrated = imported("checkpoint_stream"), imported("checkpoint_calibrated")
    monkeypatch.setattr(stream, "HIDDEN", 64)
    for name, value in (("INTERMEDIATE", 32), ("EXPERTS", 2), ("VOCAB", 64), ("CHUNK", 4096)):
        monkeypatch.setattr(stream, name, value)

    def run(command, killed=None):
        out = Path(command[command.index("-o") + 1])
        out.mkdir(parents=True, exist_ok=True)
        (out / "model.safetensors").write_bytes(b"x" * 8192)
        return 2.0, 3.0, 0.5, "OUT: said"

    monkeypatch.setattr(stream, "run", run)
    rows = first_rows("checkpoint_stream", ["--gb", "0", "--repeat", "1", "--dir", str(tmp_path)])
    assert [r["table"] for r in rows] == [
        "source", "plain copy", "plain copy", "quantize", "best of each", "killed and resumed",
    ]  # fmt: skip
    assert rows[-1]["result_is"] == "identical" and rows[-2]["quantize_s"] == 2.0

    def start(target, args):
        target(*args)
        return types.SimpleNamespace(start=lambda: None, join=lambda: None)

    monkeypatch.setattr(calibrated, "run", run)
    monkeypatch.setattr(calibrated, "make_source", lambda folder, layers: folder.mkdir())
    context = types.SimpleNamespace(Process=start)
    monkeypatch.setattr(calibrated.multiprocessing, "get_context", lambda _: context)
    rows = first_rows("checkpoint_calibrated", ["--layers", "2", "--dir", str(tmp_path)])
    assert [r.get("step") for r in rows] == [None, "whole", "killed after 1 layers", "resumed", None]
    assert rows[1]["said"] == "said" and not list(tmp_path.iterdir())


def test_rows_of_ggml(monkeypatch):
    """With a package of its name, since nothing here installs it."""
    monkeypatch.setitem(sys.modules, "ggml", unittest.mock.MagicMock(__version__="0"))
    monkeypatch.delitem(sys.modules, "cpu_vs_ggml", raising=False)
    module = imported("cpu_vs_ggml")

    class Peer:
        def __init__(self, kind, repacked, tokens, sets, weights, threads):
            self.name = f"ggml {kind}{' repacked' if repacked else ''}"

    def paired(runners, blocks):
        return {r.name: [2.0 if r.name.startswith("ggml") else 1.0] * blocks for r in runners}

    version = types.SimpleNamespace(decode=lambda: "0")
    monkeypatch.setattr(module.ggml, "ggml_version", lambda: version)
    for name, value in (
        ("N", 32), ("K", 64), ("EXPERTS", 2), ("INTER", 32), ("Ggml", Peer), ("paired", paired),
        ("last_cache_bytes", lambda: 1 << 14),  # few sets of these tiny weights, not thousands
        ("library", lambda part: unittest.mock.MagicMock()), ("check", lambda runner, *_: 1e-3),
        ("bandwidth", lambda threads: {"table": "memory", "threads": threads, "read_gb_per_s": 1.0}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    threads = torch.get_num_threads()
    rows = first_rows("cpu_vs_ggml", ["--threads", str(threads), "--tokens", "1", "--blocks", "3"])
    monkeypatch.delitem(sys.modules, "cpu_vs_ggml")
    blocks = [r for r in rows if r["table"] == "block"]
    assert len(blocks) == 4 and all(r["of_reads_ratio"] == r["gb_per_s"] > 0 for r in blocks)
    products = [r for r in rows if r["table"] == "product"]
    assert len(products) == 2 * 9 and {r["weights"] for r in products} == {"cached", "streamed"}
    assert {r["speedup"] for r in products} == {None, 2.0}
    assert products[0]["kernel"] == "fp4_ops mxfp4" and products[0]["error"] == 1e-3


def graph_of(call):
    """Returns what replays a call, and its outputs, which a replay overwrites."""
    outs = call()

    def replay():
        for out, new in zip(outs, call(), strict=True):
            out.copy_(new)

    return replay, outs


@pytest.fixture
def host_slots(monkeypatch):
    """Experts in host memory without a GPU: nothing is mapped, captured or timed."""
    module = imported("slots")
    monkeypatch.setattr(module, "map_block", lambda block, device: block)
    monkeypatch.setattr(module, "graph_of", graph_of)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    monkeypatch.setattr(module, "link_rate", lambda: 5e10)
    monkeypatch.setattr(module, "LAYOUT", "plain")
    monkeypatch.setattr(module, "WARM", 1)
    monkeypatch.setattr(module, "STEPS", 2)
    event = types.SimpleNamespace(record=lambda: 0, synchronize=lambda: 0, elapsed_time=lambda _: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return module


def test_rows_of_slots(host_slots, monkeypatch):
    small = host_slots.Model("qwen3-30b", 64, 32, 8, 2, "nvfp4", "silu_interleaved", False)
    monkeypatch.setattr(host_slots, "MODELS", {small.name: small})
    parts = types.SimpleNamespace(slots_plan=lambda *_: (0, 0), slots_fetch=lambda *_: 0)
    monkeypatch.setattr(torch.ops, "fp4_parts", parts)
    rows = first_rows("slots", ["--layers", "2", "--models", "qwen3-30b", "--tokens", "20"])
    assert [r["table"] for r in rows] == ["link"] * 3 + ["decode"] * 8 + ["prefill"] * 4 + ["peer"] * 3
    assert all(r["difference"] == 0 for r in rows[3:15])
    assert [r["routing"] for r in rows[3:7]] == ["same", "recent", "uniform", "new"]


def test_rows_of_slots_model(host_slots, monkeypatch):
    module = imported("slots_model")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 100}
    monkeypatch.setattr(module, "CONFIG", {**module.CONFIG, **small})
    monkeypatch.setattr(importlib.import_module("fp4_ops.models.memory_plan"), "RESERVE_LEAST", 1)
    rows = first_rows("slots_model", ["--layers", "1", "--steps", "10", "--batches", "2", "--tokens", "8"])
    assert rows[0]["table"] == "budget"
    assert [(r["table"], r["experts"]) for r in rows[1:]] == [
        (table, where) for where in ("GPU", "slots") for table in ("prefill", "generate")
    ]
    assert all(r["equal_ratio"] == r["repeat_ratio"] == 1.0 for r in rows if r["table"] == "generate")


class Blocks:
    """Stands in for the GPU's part of vllm_experts: blocks of given errors, and a clock."""

    def __init__(self, monkeypatch, **errors):
        self.module, self.timed = imported("vllm_experts"), []
        given = [argparse.Namespace(x=torch.zeros(1, 4))]
        want = torch.ones(1, 4, dtype=torch.float64)
        replacements = {
            "inputs": lambda *_: given,
            "reference": lambda *_: want,
            "captured": lambda block, _: block,
            "microseconds": self.microseconds,
        }
        for name, f in replacements.items():
            monkeypatch.setattr(self.module, name, f)
        self.blocks = {name: lambda _, e=error: want * (1 + e) for name, error in errors.items()}

    def microseconds(self, graph, times):
        self.timed.append(next(name for name, block in self.blocks.items() if block is graph))
        return float(len(self.timed))

    def row(self, rounds):
        return self.module.of_tokens("qwen3-30b", None, self.blocks, 1, "sm90 auto", rounds)


@pytest.mark.parametrize("wrong", ["marlin", "triton", "fp4_ops", "bf16"])
@pytest.mark.parametrize("error", [float("nan"), 0.09])
def test_vllm_experts_ends_at_a_wrong_block(wrong, error, monkeypatch):
    errors = dict.fromkeys(("marlin", "triton", "fp4_ops", "bf16"), 0.001) | {wrong: error}
    with pytest.raises(AssertionError, match="relative errors"):
        Blocks(monkeypatch, **errors).row(rounds=1)


def test_vllm_experts_rotates_the_order(monkeypatch):
    blocks = Blocks(monkeypatch, marlin=0.001, fp4_ops=0.05, bf16=0.002)
    row = blocks.row(rounds=4)
    assert blocks.timed[1:] == [*("marlin", "fp4_ops", "bf16"), *("fp4_ops", "bf16", "marlin"),
                                *("bf16", "marlin", "fp4_ops"), *("marlin", "fp4_ops", "bf16")]  # fmt: skip
    assert row["fp4_ops_error"] == pytest.approx(0.05) and "triton_speedup" not in row


def test_versions_of_other_processes(monkeypatch):
    record = imported("record")
    monkeypatch.setattr(record, "ELSEWHERE", {"vllm": "0.26.0"})
    assert record.versions()["vllm"] == "0.26.0" and record.versions()["torch"] == torch.__version__
