"""The scripts under benchmarks/ that measure Hopper's kernels yield rows that fit their tables.

The measurements need a GPU or a peer. So the scripts run here on the CPU, with tiny shapes, kernels that
return zeros and a clock that says 1. The tests find names that moved and rows that do not fit.
"""

import contextlib
import importlib
import itertools
import sys
import types

import pytest
import torch
from benchmark_scripts import FOLDER, first_rows, imported
from development import development
from moe_models import build, tokens

import fp4_ops
from fp4_ops.integrations.transformers import generation
from fp4_ops.runtime import native

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="a source distribution has no benchmarks/")


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


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
    monkeypatch.setattr(module, "DECODE", ((2, 16, 9),))
    monkeypatch.setattr(module, "PREFILL", (16,))
    rows = first_rows("h200_attention", [])
    names = "step", "sequences", "keys", "seen"
    assert [tuple(r[n] for n in names) for r in rows] == [("decode", 2, 16, 9), ("prefill", 1, 16, 16)]
    assert [r["torch_us"] is None for r in rows] == [False, True]


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
