"""The scripts under benchmarks/ yield rows that fit their tables.

The measurements need a GPU, a peer or minutes. So GPU scripts run here on the CPU, with tiny shapes,
kernels that return zeros and a clock that says 1: names that moved and rows that do not fit show.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import sys
import types
import unittest.mock
from pathlib import Path

import pytest
import torch
from benchmark_scripts import FOLDER, imported
from development import development
from moe_models import build, tokens

import fp4_ops
from fp4_ops.integrations.transformers import generation
from fp4_ops.runtime import native

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks/")


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


class OnCpu(torch.overrides.TorchFunctionMode):
    """Give the CPU to code that asks for device "cuda"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def first_rows(name: str, arguments: list[str], count: int = 40) -> list[dict]:
    record, module = imported("record"), imported(name)
    args = record.parser_of(module.__doc__, module.add_arguments).parse_args(arguments)
    with OnCpu():
        found = list(itertools.islice(module.rows(args), count))
    json.dumps(found)
    assert found and all("table" in row for row in found)
    return found


@pytest.fixture
def no_gpu(monkeypatch):
    """Hopper kernels that return zeros in no time."""
    hopper, ops = imported("h200_hopper"), imported("hopper_operators")
    row_kernels = importlib.import_module("fp4_ops.backends.launchers.rows")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(hopper, "ceilings", lambda: (4e6, 8e8, 16e8))
    monkeypatch.setattr(hopper, "check", lambda *_: None)
    monkeypatch.setattr(hopper.library, "multiprocessors", lambda *_: 132)
    monkeypatch.setattr(
        row_kernels, "quantize_fp8", lambda x: (x.to(torch.float8_e4m3fn), torch.ones(len(x)))
    )
    config = "decode: 8 x 2 warps (K x rows), 1 pass"
    monkeypatch.setattr(development("planner"), "decode_config", lambda *_: config)
    monkeypatch.setattr(native, "only", lambda kernel: contextlib.nullcontext())
    monkeypatch.setattr(ops, "decodes", lambda *_: True)
    monkeypatch.setattr(ops, "block_decodes", lambda *_: False)
    for name in ("grouped_mm", "mm", "moe"):
        monkeypatch.setattr(ops, name, lambda *_: torch.zeros(4))

    def clock(launch, pause=0.0):
        launch(0)
        return 1.0

    small = (hopper.Model("qwen3-30b", 4, 256, 128, 2), hopper.Model("dsv3", 4, 256, 128, 0))
    for name in ("h200_hopper", "h200_attention", "h200_rows", "h200_builds", "h200_power"):
        module = imported(name)
        for attribute, value in (("median_us", clock), ("MODELS", small)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, value)
    return clock


def test_rows_of_hopper(no_gpu):
    rows = first_rows("h200_hopper", ["--tokens", "1,8"])
    assert [r["table"] for r in rows] == ["ceilings", *(["product"] * 4 + ["block"] * 2) * 2]
    assert rows[1]["n"] == 256 and rows[1]["w4a16_us"] == 1.0 and rows[1]["w4a16_peer_us"] is None
    assert set(rows[-1]) == {"table", "model", "format", "tokens", "none_us", "fp8_us", "auto_us"}


def test_rows_of_host_time(no_gpu, monkeypatch):
    module = imported("host_time")
    for name, value in (("EXPERTS", 4), ("HIDDEN", 128), ("INTER", 64), ("TOP_K", 2), ("RUNS", 1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "gpu_us", lambda call: call() is None or 1.0)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *_, **__: torch.zeros(1))
    empty = types.SimpleNamespace(
        **dict.fromkeys(("mm", "grouped_mm", "indexed_mm", "moe"), lambda *_, **__: 0)
    )
    monkeypatch.setattr(module, "weight", lambda *_: (torch.zeros(4, 1),) * 3)
    monkeypatch.setattr(torch.ops, "fp4", empty)
    rows = first_rows("host_time", ["--tokens", "1,8", "--calls", "2"])
    assert len(rows) == 2 * 2 * 7 and {r["mode"] for r in rows} == {"inference_mode", "no_grad"}
    assert rows[0]["operator"] == "F.linear" and rows[0]["ratio"] == 1.0 and rows[-1]["gpu_us"] == 1.0


def test_peers_of_hopper():
    hopper = imported("h200_hopper")
    assert hopper.fastest_peer((128, 1536, 2048), 1, ("W4A16",)) == 12.4
    assert hopper.fastest_peer((128, 1536, 2048), 3, ("W4A16",)) is None


def test_rows_of_attention(no_gpu, monkeypatch):
    module = imported("h200_attention")
    monkeypatch.setattr(module, "DECODE", ((2, 16),))
    monkeypatch.setattr(module, "PREFILL", (16,))
    rows = first_rows("h200_attention", [])
    assert [(r["step"], r["sequences"], r["keys"]) for r in rows] == [("decode", 2, 16), ("prefill", 1, 16)]


def test_rows_of_decode_and_prefill(no_gpu, monkeypatch):
    monkeypatch.setattr(imported("h200_rows"), "DENSE", ((128, 256),))
    rows = first_rows("h200_rows", ["--rows", "0.5,1"], 1000)
    assert len(rows) == 2 * 2 * 2 * 3 + 3 + 2 * 2 * 4
    assert {r["kind"] for r in rows} == {"16", "bf16", "8", "none", "none bf16", "fp8", "auto"}
    assert {r["decodes"] for r in rows if r["table"] == "product"} == {True}


def test_rows_of_builds(no_gpu, monkeypatch):
    module = imported("h200_builds")

    class Build:
        def __init__(self, path):
            self.name = path

        def use(self):
            """Nothing."""

    monkeypatch.setattr(module, "Build", Build)
    monkeypatch.setattr(module.ops, "decodes", lambda *_: False)
    rows = first_rows("h200_builds", ["a.so", "b.so", "--models", "dsv3", "--tokens", "8"])
    assert [(r["table"], r["build"], r["error"]) for r in rows[:2]] == [
        ("product", "a.so", 0.0), ("product", "b.so", 0.0),
    ]  # fmt: skip
    assert len(rows) == 2 * 3 * 2


def test_rows_of_power(no_gpu, monkeypatch):
    module = imported("h200_power")
    of = {"table": "power", "kernel": "", "mhz": 1.0}
    monkeypatch.setattr(module, "measure", lambda name, launch: launch(0) is None or {**of, "kernel": name})
    monkeypatch.setattr(module, "SHAPES", (("qwen3-30b", "gate/up"),))
    monkeypatch.setattr(module, "TOKENS", 16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(module.prefill, "run", lambda *_: torch.zeros(1))
    monkeypatch.setattr(module.row_kernels, "to_half", lambda x: (x, torch.ones(len(x))))
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *s, **k: real(*(min(x, 512) for x in s), **k))
    rows = first_rows("h200_power", [])
    assert [r["kernel"] for r in rows] == [
        "torch bf16 8192^3", "torch fp8 8192^3", "qwen3-30b gate/up fp8", "qwen3-30b gate/up 16 bits",
        "qwen3-30b gate/up to_half",
    ]  # fmt: skip


def test_rows_of_fp8_prefill(no_gpu, monkeypatch):
    module = imported("h200_prefill_w4a8")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(module.prefill, "candidates", lambda: ["first", "second"])
    monkeypatch.setattr(module.prefill, "choose", lambda *_: types.SimpleNamespace(candidate=1))
    monkeypatch.setattr(module.prefill, "run", lambda *_, **__: None)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: None)
    monkeypatch.setattr(module, "SHAPES", {"small": (4, 128, 256, 2, (1.0, 2.0, 3.0))})
    monkeypatch.setattr(module, "microseconds", lambda launch: launch(0) or 1.0)
    rows = first_rows("h200_prefill_w4a8", ["--tokens", "512,64", "--all-candidates"])
    assert [(r["tokens"], r["peer_us"], r["chosen"]) for r in rows[:4]] == [
        (512, 1.0, False), (512, 1.0, True), (64, None, False), (64, None, True),
    ]  # fmt: skip
    assert rows[4]["table"] == "dense"


def test_rows_of_humming(no_gpu, monkeypatch):
    """With a package of its names, since nothing here installs it."""
    package, forward, layer = (types.ModuleType(n) for n in ("humming", "humming.forward", "humming.layer"))

    class HummingLayer:
        humming_config = None

        def __init__(self, **options):
            self.options = options

        def cuda(self):
            return self

        def load_from_unquantized(self, weight):
            assert weight.shape == (4, 128, 256)

        def transform(self):
            """Nothing."""

        def __call__(self, b, *, expert_layout, **given):
            assert len(expert_layout) == 5

    forward.may_process_input = lambda config, x: (x, None, None)
    layer.HummingLayer = HummingLayer
    for name, module in (("humming", package), ("humming.forward", forward), ("humming.layer", layer)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "h200_humming", raising=False)
    module = imported("h200_humming")
    monkeypatch.setattr(module, "SHAPES", {"small": (4, 128, 256, 2)})
    rows = first_rows("h200_humming", ["--tokens", "8"])
    assert [r["rows"] for r in rows] == ["bf16", "fp8"] and rows[0]["humming_us"] == 1.0
    monkeypatch.delitem(sys.modules, "h200_humming")


@pytest.mark.more
def test_rows_of_marlin(no_gpu, monkeypatch):
    """Ours on the CPU beside exact products in place of Marlin's: what both compute is compared."""
    module, marlin = imported("mma_marlin"), imported("marlin")

    class Weight:
        def __init__(self, packed, scale, factor, format):
            dense = torch.ops.fp4.dequantize(packed, scale, factor, format, torch.float32)
            self.k = -(-dense.shape[2] // 128) * 128
            self.dense = torch.nn.functional.pad(dense, (0, self.k - dense.shape[2]))
            self.padded_n = dense.shape[1]

    class Rows:
        def __init__(self, ids, experts):
            self.ids = ids.flatten().long()

        def align(self):
            """Nothing."""

    def product(x, w, rows, top_k, workspace, out, scores=None):
        of_pairs = x.float().repeat_interleave(top_k, 0)
        y = torch.einsum("pk,pnk->pn", of_pairs, w.dense[rows.ids])
        return out.copy_(y if scores is None else y * scores.flatten()[:, None])

    def silu_and_mul(out, x):
        gate, up = x.float().chunk(2, 1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    moe_sum = types.SimpleNamespace(moe_sum=lambda y, out: torch.sum(y, 1, out=out))
    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace(silu_and_mul=silu_and_mul), raising=False)
    monkeypatch.setattr(torch.ops, "_moe_C", moe_sum, raising=False)
    for name, made in (("Weight", Weight), ("Rows", Rows), ("product", product), ("load", lambda _: None)):
        monkeypatch.setattr(marlin, name, made)
    used = []
    monkeypatch.setattr(native, "use_kernels", lambda *given: used.append(given))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(module, "ceilings", lambda: (4e6, 8e8, 16e8))
    monkeypatch.setattr(module, "median_us", no_gpu)
    monkeypatch.setattr(module, "LAYOUT", "tile16")
    monkeypatch.setattr(module, "MODELS", (module.Model("gpt-oss-120b", 4, 256, 192, 2),))
    told = ["--vllm", "lib", "--kernels", "k.so", "--tokens", "2,300"]
    ceilings, *rows = first_rows("mma_marlin", told)
    assert ceilings["table"] == "ceilings"
    assert [(r["table"], r["tokens"]) for r in rows] == [
        (what, tokens) for tokens in (2, 300) for what in ("gate/up", "down", "block")
    ]
    assert {kb for _, kb in used} == {99 * 1024, 163 * 1024}
    for row in rows:
        for error in (row["mma_error"], row["marlin_error"]):
            checked = row["table"] != "block" or row["tokens"] == 2
            assert 0 <= error < module.BOUND if checked else error is None
        assert row["mma_99_us"] == row["mma_163_us"] == row["marlin_us"] == 1.0
        assert row["decode_us"] == (1.0 if row["tokens"] == 2 else None)


def test_rows_of_cutlass(no_gpu, monkeypatch):
    """With packages of both peers' names, since nothing here installs them."""
    sglang, flashinfer = (types.ModuleType(n) for n in ("sgl_kernel", "flashinfer"))
    fused_moe, core = (types.ModuleType(f"flashinfer.fused_moe{n}") for n in ("", ".core"))

    def cutlass_w4a8_moe_mm(out, a, b, a_scales, b_scales, starts, sizes, *strides_and_options):
        assert a.shape[1] == 2 * b.shape[2] and b_scales.numel() * 128 == 2 * b.numel()
        assert sizes.tolist() == [
            [b.shape[1], m, a.shape[1]] for m in starts.diff(append=sizes[:, 1].sum()[None])
        ]

    def cutlass_fused_moe(x, ids, scores, up, down, dtype, scales, *, output, profile_ids, **options):
        assert x.shape[1] == 2 * up.shape[2] and up.shape[1] == 4 * down.shape[2]
        assert output.shape == (len(x), down.shape[1]) and ids.dtype == torch.int32
        assert len(scales) == (5 if options["use_wfp4afp8_humming"] else 2)
        runner_dict[(options["use_wfp4afp8_humming"],)] = runner
        if profile_ids[1] == 3:
            raise RuntimeError("this tactic does not take these sizes")

    occupancy = {0: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    runner = types.SimpleNamespace(
        get_gemm1_tactic_count=lambda: 2, get_gemm2_tactic_count=lambda: 3, get_tactic_occupancy=occupancy.get
    )
    runner_dict = {}
    sglang.cutlass_w4a8_moe_mm = cutlass_w4a8_moe_mm
    fused_moe.core, fused_moe.cutlass_fused_moe = core, cutlass_fused_moe
    fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming = lambda w, s: (w, s, torch.ones(len(w)))
    fused_moe.interleave_moe_weights_for_sm90_mixed_gemm = lambda w, kind: w
    fused_moe.interleave_moe_scales_for_sm90_mixed_gemm = lambda s: s
    made = types.SimpleNamespace(MoERunner=types.SimpleNamespace(runner_dict=runner_dict))
    core.get_cutlass_fused_moe_module = lambda architecture: made
    flashinfer.fused_moe = fused_moe
    for module in (sglang, flashinfer, fused_moe, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    module, hopper = imported("h200_cutlass"), imported("h200_hopper")
    small = (hopper.Model("small", 4, 256, 128, 2), hopper.Model("odd", 4, 320, 192, 0))
    for name, value in (
        ("MODELS", small), ("median_us", no_gpu), ("captured", lambda launch, n: launch(0)),
        ("replay_us", lambda graph: 1.0), ("our_product", lambda a, *_: torch.zeros(len(a), 640)),
        ("our_block", lambda x, *_: x), ("check", lambda *_: None),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    rows = first_rows("h200_cutlass", ["--tokens", "1,8"])
    assert [r["table"] for r in rows] == ["product"] * 8 + ["block"] * 4
    assert set(rows[0]) == {
        "table", "model", "experts", "n", "k", "tokens", "int4_us", "mxfp4_us", "sglang_us"
    }  # fmt: skip
    assert rows[-1]["flashinfer_fp8_us"] == 1.0 and rows[-1]["flashinfer_bf16_tactics"] == "1, 2"


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
    rows = first_rows("cpu_step", ["--layers", "1,2", "--formats", "mxfp4"])
    assert [r.get("variant") for r in rows[1:]] == ["experts", "whole"] * 2
    experts, whole = rows[-2:]
    assert experts["gb"] > whole["gb"] > 0


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


@pytest.fixture
def events():
    """Return a profiler's events: two kernels, one of them twice."""
    device = torch.autograd.DeviceType.CUDA
    times = [
        ("void fp4::device::decode_kernel", 0, 6),
        ("sort", 6, 8),
        ("void fp4::device::decode_kernel", 8, 12),
    ]
    return [
        types.SimpleNamespace(
            name=name, device_type=device, time_range=types.SimpleNamespace(start=start, end=end)
        )
        for name, start, end in times
    ]


def test_rows_of_block(no_gpu, monkeypatch, events):
    module = imported("h200_block")
    monkeypatch.setattr(module, "weight", lambda n, k: ())
    monkeypatch.setattr(torch.ops.fp4, "moe", lambda *_, **__: None)
    profiler = types.SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(module, "profile", lambda **_: contextlib.nullcontext(profiler))
    rows = first_rows("h200_block", ["--tokens", "2"])
    assert [(r["a_format"], r["kernel"]) for r in rows[:3]] == [
        ("none", "all"), ("none", "decode_kernel"), ("none", "sort"),
    ]  # fmt: skip
    assert [r["us"] for r in rows[:3]] == pytest.approx([1.0, 10 / 12, 2 / 12])
    assert len(rows) == 6


def test_rows_of_profile(monkeypatch, events):
    module = imported("h200_profile")
    monkeypatch.setattr(module, "ROWS", 1)
    rows = list(module.table(events, 2, "decode", 8))
    assert [(r["kernel"], r["us"], r["calls"]) for r in rows] == [
        ("all", 6.0, 1.5), ("void fp4::device::decode_kernel", 5.0, 1.0), ("other", 1.0, None),
    ]  # fmt: skip
    host = module.Host.__new__(module.Host)
    host.moments = [
        (f"{what} {i}", 1e-6 * t) for t, (i, what) in enumerate(itertools.product((0,), "ab"))
    ] * 30
    found = list(host.table("decode", 8))
    assert {(r["table"], r["step"], r["batch"]) for r in found} == {("host", "decode", 8)}
    assert found[0]["between"] == "a 0 .. b 0" and found[0]["us"] == pytest.approx(1.0)


@pytest.mark.more
def test_rows_of_generate(no_gpu, monkeypatch):
    module = imported("h200_generate")

    def new_model():
        config = {**module.CONFIG.to_dict(), "num_hidden_layers": 1, "num_experts": 4, "hidden_size": 64}
        sizes = {
            "vocab_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 2,
        }
        return module.Qwen3MoeForCausalLM(module.Qwen3MoeConfig(**{**config, **sizes})).bfloat16().eval()

    of = {"table": "logits against float32 over the 4-bit values"}
    for name, value in (
        ("new_model", new_model), ("check", lambda format, variant: {**of, "variant": variant}),
        ("generate_ms", lambda *_, custom_generate=None: (1.2 if custom_generate else 2.0, 30.0)),
        ("loop_ms", lambda *_: 1.0), ("prefill_ms", lambda *_: 4.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    rows = first_rows(
        "h200_generate", ["--variants", "stock,stock-grouped,whole-backend", "--batches", "1,8"]
    )
    assert [r["table"] for r in rows if r.get("variant") == "whole-backend"] == [
        "logits against float32 over the 4-bit values", "expert bytes", *["decode"] * 6, *["prefill"] * 2,
    ]  # fmt: skip
    assert {r["loop"]: r["ms"] for r in rows if r["table"] == "decode"} == {
        "generate": 2.0, "decoding_loop": 1.2, "plain": 1.0,
    }  # fmt: skip
    (grouped,) = (r for r in rows if r.get("variant") == "stock-grouped" and r.get("loop") == "plain")
    assert grouped["batch"] == 8 and grouped["ms"] == 1.0
    shrunk = [r["ratio_to_bf16"] for r in rows if r["table"] == "expert bytes"]
    assert shrunk[:2] == [1, 1] and 0.25 < shrunk[2] < 0.4


def test_the_clock_ticks_once_a_step(monkeypatch, fresh_dynamo):
    """In transformers' loop and in ours; afterwards the model is as before."""
    module, ticks = imported("h200_generate"), []
    monkeypatch.setattr(module, "Clock", lambda: lambda *_: ticks.append(1))
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    config = module.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True  # transformers compiles on GPUs only unless told so
    choose = generation._Decoding._choose
    for custom, calls in ((None, 8), (fp4_ops.decoding_loop, 9)):  # the prompt's choice is one of ours
        ticks.clear()
        with module.clocked(model, ours=custom is not None):
            model.generate(
                tokens(2, 5), max_new_tokens=9, do_sample=False, cache_implementation="static",
                compile_config=config, custom_generate=custom,
            )  # fmt: skip
        assert len(ticks) == calls and "get_compiled_call" not in vars(model)
        assert generation._Decoding._choose is choose


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
    assert rows[-1]["equal_ratio"] == 1.0


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
