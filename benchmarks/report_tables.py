"""Makes the tables of README and docs. Each function makes one table from the records in
benchmarks/results/."""

from __future__ import annotations

import statistics

from report_cells import TABLES, Cell, grid, one, read, rows, source, spread, table
from report_peers import humming_ratios

# --- models ---


def decode_steps(loop: str = "generate", name: str = "generate_h200") -> dict[int, list[float | None]]:
    """Returns by batch: milliseconds per step of stock, of stock kept on grouped_mm, and of ours."""
    found = {(r["batch"], r["variant"]): r["ms"] for r in rows(name, "decode", loop=loop)}
    batches = sorted({batch for batch, _ in found})
    variants = ("stock", "stock-grouped", "prepared-backend")
    return {b: [found.get((b, v)) for v in variants] for b in batches}


@table
def decode() -> str:
    lines = []
    for batch, (stock, grouped, ours) in decode_steps().items():
        assert stock and ours
        best = min(stock, grouped or stock)
        lines.append([batch, stock, grouped, ours, best / ours, 1e3 * batch / ours])
    heads = ["batch", "transformers, ms", "kept on grouped_mm, ms", "fp4_ops, ms", "speedup", "tokens/s"]
    return f"{grid(heads, lines)}\n\n{source('generate_h200')}"


@table
def whole_steps() -> str:
    names = {
        "step_h200": "Qwen3-30B-A3B",
        "step_gpt_oss_120b_h200": "gpt-oss-120b",
        "step_gpt_oss_120b_eight_h200": "gpt-oss-120b",
    }
    lines = [
        [model, r["context"], r["batch"], r["ms"], r["tokens_per_s"], r["gb"]]
        for name, model in names.items()
        for r in rows(name, "step")
    ]
    heads = ["model", "room in the cache", "sequences", "ms a step", "tokens/s", "tensors held, GB"]
    return f"{grid(heads, lines)}\n\n{source(*names)}"


@table
def outside_steps() -> str:
    """Steps by the format of the weights outside the experts."""
    names = ("step_h200", "step_outside_h200")
    found = {(r["batch"], r["variant"]): r for n in names for r in rows(n, "step") if r["context"] == 100}
    labels = {"fp4": "bf16", "fp8": "fp8", "all4": "nvfp4"}
    batches = sorted({batch for batch, _ in found})
    lines = [
        [label, *(found[batch, variant]["ms"] for batch in batches), found[1, variant]["gb"]]
        for variant, label in labels.items()
    ]
    timed = [f"{n} {'sequence' if n == 1 else 'sequences'}, ms" for n in batches]
    return f"{grid(['attention and head', *timed, 'tensors held, GB'], lines)}\n\n{source(*names)}"


@table
def linears() -> str:
    """Products of few rows, of one model."""
    name = "linears_h200"
    lines = [
        [r["layer"], r["rows"], r["us"], r["separate_us"], r.get("fp8_us")]
        for r in rows(name, "linears")
        if r["model"] == "qwen3-30b" and r["rows"] in (1, 8, 16, 32, 64)
    ]
    heads = ["layer", "rows", "in 16 bits, us", "F.linear, us", "in fp8, us"]
    return f"{grid(heads, lines)}\n\n{source(name)}"


@table
def stock_steps() -> str:
    names = ("step_layers_h200", "step_room_h200")
    found = {
        (r.get("room") or r["context"], r["context"], r["batch"], r["variant"]): r["ms"]
        for name in names
        for r in rows(name, "step")
    }
    lines: list[list[Cell]] = []
    for case in sorted({key[:3] for key in found}):
        stock, ours = found[*case, "stock"], found[*case, "fp4"]
        lines.append([*case, stock, ours, stock / ours])
    timed = ["torch.compile in bf16, ms", "fp4_ops, ms", "speedup"]
    heads = ["room in the cache", "tokens", "sequences", *timed]
    return f"{grid(heads, lines)}\n\n{source(*names)}"


@table
def decode_loops() -> str:
    name = "generate_loops_h100"
    found = {(r["loop"], r["batch"]): r["ms"] for r in rows(name, "decode")}
    loops = ("generate", "decoding_loop", "plain")
    lines: list[list[Cell]] = []
    for batch in sorted({batch for _, batch in found}):
        ms = [found.get((loop, batch)) for loop in loops]
        lines.append([batch, *ms, ms[1] / ms[2] if ms[1] and ms[2] else None])
    heads = ["batch", *(f"{loop}, ms" for loop in loops), "decoding_loop / plain"]
    return f"{grid(heads, lines)}\n\n{source(name)}"


@table
def eager() -> str:
    name = "eager_h100"
    steps = {(r["batch"], r["variant"]): r["ms"] for r in rows(name, "eager generate")}
    lines: list[list[Cell]] = [
        ["a step of `generate`, ms", batch, steps[batch, "stock"], steps[batch, "prepared"], None,
         steps[batch, "stock"] / steps[batch, "prepared"]]
        for batch in sorted({batch for batch, _ in steps})
    ]  # fmt: skip
    whole = {r["variant"]: r for r in rows(name, "generate_batch")}
    stock, *ours = (whole[v]["s"] for v in ("stock", "prepared", "prepared-backend"))
    lines.append(["`generate_batch`, s", whole["stock"]["requests"], stock, *ours, stock / min(ours)])
    heads = ["", "sequences", "transformers", "prepared", "and backend, CUDA graphs", "speedup"]
    return f"{grid(heads, lines)}\n\n{source(name)}"


def _host(name: str) -> str:
    modes = ("inference_mode", "no_grad")
    found = {(r["operator"], r["tokens"], r["mode"]): r for r in rows(name, "host")}
    lines: list[list[Cell]] = []
    for operator, tokens in dict.fromkeys((operator, tokens) for operator, tokens, _ in found):
        of = [found[operator, tokens, mode] for mode in modes]
        lines.append(
            [operator, tokens, *(c for r in of for c in (r["host_us"], r["ratio"])), of[0]["gpu_us"]]
        )
    heads = [
        "operator",
        "tokens",
        "inference_mode, us",
        "of F.linear",
        "no_grad, us",
        "of F.linear",
        "GPU, us",
    ]
    return f"{grid(heads, lines)}\n\n{source(name)}"


@table
def host_h100() -> str:
    return _host("host_time_h100")


@table
def prefill() -> str:
    name = "generate_h200"
    lines = [[r["variant"], r["tokens"], r["ms"]] for r in rows(name, "prefill")]
    return f"{grid(['variant', 'tokens', 'ms'], lines)}\n\n{source(name)}"


@table
def expert_bytes() -> str:
    name = "generate_h200"
    lines = [[r["variant"], r["gb"], r["ratio_to_bf16"]] for r in rows(name, "expert bytes")]
    return f"{grid(['variant', 'experts, GB', 'of bf16'], lines)}\n\n{source(name)}"


# --- Hopper ---


def products(name: str) -> str:
    recorded = any(r["w4a16_peer_us"] for r in rows(name, "product"))
    heads = ["experts, N, K", "tokens", "floor, bf16 rows", "bf16 rows", "of floor"]
    heads += ["other 4-bit"] * recorded
    heads += ["floor, fp8 rows", "fp8 rows", "of floor"] + ["other 4-bit"] * recorded
    heads += ["int4 x fp8", "torch bf16"]
    lines = []
    for r in rows(name, "product"):
        line = [f"{r['model']} [{r['experts']}, {r['n']}, {r['k']}]", r["tokens"]]
        for kind in ("w4a16", "w4a8"):
            floor, us = r[f"{kind}_floor_us"], r[f"{kind}_us"]
            line += [floor, us, us / floor] + [r[f"{kind}_peer_us"]] * recorded
        lines.append([*line, r["int4_us"], r["bf16_us"]])
    return f"{grid(heads, lines)}\n\n{source(name)}"


def blocks(name: str) -> str:
    heads = ["model", "tokens", "bf16 activations", "fp8 activations", "auto"]
    keys = ("model", "tokens", "none_us", "fp8_us", "auto_us")
    return f"{grid(heads, ([r[k] for k in keys] for r in rows(name, 'block')))}\n\n{source(name)}"


def ceilings(*names: str) -> str:
    heads = ["card", "copy, TB/s", "bf16, TFLOP/s", "fp8, TFLOP/s"]
    lines = []
    for name in names:
        r = one(name, "ceilings")
        lines.append([read(name)["gpu"], r["copy_tb_per_s"], r["bf16_tflop_per_s"], r["fp8_tflop_per_s"]])
    return f"{grid(heads, lines)}\n\n{source(*names)}"


TABLES["hopper_ceilings"] = lambda: ceilings("hopper_h200", "hopper_h100")
TABLES["products_h200"] = lambda: products("hopper_h200")
TABLES["products_h100"] = lambda: products("hopper_h100")
TABLES["blocks_h200"] = lambda: blocks("hopper_h200")
TABLES["blocks_h100"] = lambda: blocks("hopper_h100")


@table
def floor_summary() -> str:
    heads = ["card", "rows", "tokens", "points", "least", "median", "most"]
    lines: list[list[Cell]] = []
    for name in ("hopper_h200", "hopper_h100"):
        for kind, label in (("w4a16", "bf16"), ("w4a8", "fp8")):
            for tokens in (1, 8, 32, 128, 512, 2048, 8192):
                found = [
                    r[f"{kind}_us"] / r[f"{kind}_floor_us"] for r in rows(name, "product", tokens=tokens)
                ]
                lines.append([read(name)["gpu"], label, tokens, *spread(found)])
    return f"{grid(heads, lines)}\n\n{source('hopper_h200', 'hopper_h100')}"


@table
def batch_invariance_gpu() -> str:
    name = "batch_invariance_gpu_h200"
    keys = ["model", "tokens", "auto_us", "exact_us", "invariant_us", "cost", "cost_auto"]
    heads = ["model", "tokens", "auto, us", "bf16 rows, us", "invariant, us", "over bf16 rows", "over auto"]
    lines = ([r[k] for k in keys] for r in rows(name, "batch_invariance"))
    return f"{grid(heads, lines)}\n\n{source(name)}"


@table
def attention() -> str:
    keys = ("step", "sequences", "keys", "seen", "written_us", "torch_us", "rewritten_us", "speedup")
    names = ["as written, us", "torch's kernel, us", "rewritten, us", "speedup"]
    heads = ["step", "sequences", "keys", "seen", *names]
    lines = ([r[k] for k in keys] for r in rows("attention_h200", "attention"))
    return f"{grid(heads, lines)}\n\n{source('attention_h200')}"


@table
def power() -> str:
    heads = ["8192 tokens", "burst, us", "sustained, us", "MHz", "W", "power cap"]
    keys = ("kernel", "burst_us", "sustained_us", "mhz", "watt", "power_cap")
    lines = ([r[k] for k in keys] for r in rows("power_h200", "power"))
    return f"{grid(heads, lines)}\n\n{source('power_h200')}"


@table
def kernel_choice() -> str:
    heads = ["card", "what", "activations", "points", "mean loss, %", "largest loss, %"]
    lines: list[list[Cell]] = []
    for name in ("rows_h200", "rows_h100"):
        kinds = dict.fromkeys((r["table"], r["kind"]) for r in rows(name, "product"))
        for what in ("product", "dense", "block"):
            kinds = dict.fromkeys(r["kind"] for r in rows(name, what))
            for kind in kinds:
                losses = []
                for r in rows(name, what, kind=kind):
                    taken = r["decode_us"] if r["decodes"] else r["prefill_us"]
                    losses.append(100 * (taken / min(r["decode_us"], r["prefill_us"]) - 1))
                line: list[Cell] = [read(name)["gpu"], what, kind, len(losses)]
                lines.append([*line, statistics.mean(losses), max(losses)])
    return f"{grid(heads, lines)}\n\n{source('rows_h200', 'rows_h100')}"


# --- CPU ---


CPU_PRODUCTS = "cpu_vs_ggml_zen5", "cpu_vs_ggml_rocketlake", "cpu_vs_ggml_emeraldrapids"


@table
def cpu_products_summary() -> str:
    heads = ["CPU", "threads", "tokens", "points", "least speedup", "median", "most"]
    lines: list[list[Cell]] = []
    for name in CPU_PRODUCTS:
        found: dict[tuple[int, int], list[float]] = {}
        for r in rows(name, "product"):
            if r["speedup"] is not None:
                found.setdefault((r["threads"], r["tokens"]), []).append(r["speedup"])
        cpu = (read(name)["cpu"] or "").rpartition(",")[0]
        lines += [[cpu, *at, *spread(speedups)] for at, speedups in sorted(found.items())]
    return f"{grid(heads, lines)}\n\n{source(*CPU_PRODUCTS)}"


@table
def cpu_products() -> str:
    heads = ["CPU", "threads", "tokens", "weights", "kernel", "us", "fastest ggml type", "speedup"]
    names, lines = CPU_PRODUCTS, []
    for name in names:
        for r in rows(name, "product"):
            if r["speedup"] is not None:
                line = [r[k] for k in ("threads", "tokens", "weights", "kernel", "us", "peer", "speedup")]
                lines.append([(read(name)["cpu"] or "").rpartition(",")[0], *line])
    return f"{grid(heads, lines)}\n\n{source(*names)}"


@table
def cpu_layers() -> str:
    heads = ["CPU", "threads", "tokens", "block", "ms", "fastest stock block", "speedup"]
    names, lines = ("cpu_layer_zen5", "cpu_layer_zen4", "cpu_layer_rocketlake"), []
    for name in names:
        for r in rows(name, "layer"):
            if r["speedup"] is not None:
                line = [r[k] for k in ("threads", "tokens", "block", "ms", "peer", "speedup")]
                lines.append([(read(name)["cpu"] or "").rpartition(",")[0], *line])
    return f"{grid(heads, lines)}\n\n{source(*names)}"


@table
def aarch64_instructions() -> str:
    name = "aarch64_instructions_cpu"
    heads = ["kernels", "activations", "format", "1 row", "64 rows", "of which, 64 rows"]
    lines: list[list[Cell]] = []
    for r in rows(name, "instructions", rows=1):
        same = {k: r[k] for k in ("kernels", "activations", "format")}
        many = one(name, "instructions", rows=64, **same)
        lines.append([*same.values(), r["per_product"], many["per_product"], many["mix"]])
    return f"{grid(heads, lines)}\n\n{source(name)}"


# --- compilation, quantising, checkpoints, adapters ---


@table
def compile_loop() -> str:
    name = "compile_time_loop_cpu"
    heads = [
        "experts",
        "Inductor, s",
        "fp4, s",
        "speedup",
        "passes, s",
        "step, Inductor, ms",
        "step, fp4, ms",
    ]
    keys = ("experts", "inductor_s", "fp4_s", "speedup", "passes_s", "inductor_step_ms", "fp4_step_ms")
    return f"{grid(heads, ([r[k] for k in keys] for r in rows(name, 'loop')))}\n\n{source(name)}"


@table
def compile_traced() -> str:
    name = "compile_time_traced_cpu"
    keys = ("experts", "dynamo_s", "passes_s")
    lines = ([*(r[k] for k in keys), 1e3 * r["passes_s"] / r["experts"]] for r in rows(name, "traced"))
    return f"{grid(['experts', 'Dynamo, s', 'passes, s', 'passes, ms an expert'], lines)}\n\n{source(name)}"


@table
def compile_layers() -> str:
    name, heads = "compile_time_layers_cpu", ["experts", "layers", "Inductor, s", "fp4, s", "passes, s"]
    keys = ("experts", "layers", "inductor_s", "fp4_s", "passes_s")
    return f"{grid(heads, ([r[k] for k in keys] for r in rows(name, 'layers')))}\n\n{source(name)}"


@table
def quantize_speed() -> str:
    name, heads = "quantize_speed_h200", ["format", "method", "seconds", "G weights/s", "extra memory, GiB"]
    keys = ("format", "method", "seconds", "g_weights_per_s", "extra_gib")
    return f"{grid(heads, ([r[k] for k in keys] for r in rows(name, 'method')))}\n\n{source(name)}"


@table
def checkpoint_stream() -> str:
    name = "checkpoint_stream_cpu"
    best, size = one(name, "best of each"), one(name, "source")
    resumed = one(name, "killed and resumed")
    lines: list[list[Cell]] = [
        ["source, GB", size["gb"]],
        ["read alone, s", best["read_s"]],
        ["write alone, s", best["write_s"]],
        ["read and write at the same time, s", best["both_s"]],
        ["quantise, s", best["quantize_s"]],
        ["peak resident memory, GB", best["peak_gb"]],
        ["killed after half of the files, the rest, s", resumed["resumed_s"]],
        ["the resumed result is", resumed["result_is"]],
    ]
    return f"{grid(['', 'best of the runs'], lines)}\n\n{source(name)}"


@table
def checkpoint_calibrated() -> str:
    name, heads = "checkpoint_calibrated_cpu", ["run", "seconds", "processor seconds", "peak resident, GB"]
    keys = ("step", "seconds", "processor_seconds", "peak_gb")
    return f"{grid(heads, ([r[k] for k in keys] for r in rows(name, 'quantize')))}\n\n{source(name)}"


@table
def adapters() -> str:
    name, heads = "adapters_h100", ["experts", "ms a step", "model, MiB", "peak, MiB"]
    labels = {
        "bf16": "bf16, transformers' `grouped_mm`", "nvfp4": 'nvfp4, `activation="bf16"`',
        "nvfp4-auto": 'nvfp4, `activation="auto"`',
        "nf4": "nf4, experts4bit-qlora without its fused kernels",
    }  # fmt: skip
    lines = (
        [labels[r["variant"]], r["step_ms"], r["held_mib"], r["peak_mib"]]
        for r in rows(name, "training step")
    )
    return f"{grid(heads, lines)}\n\n{source(name)}"


# --- accuracy ---


def perplexities(name: str) -> str:
    """Makes a table of ratio and KL by format and method, for each kind of activations."""
    found = [r for r in rows(name, "perplexity") if r["method"] != "-"]
    labels = [
        a for a in ("W4A16", "W4A8 int8", "W4A8 fp8", "W4A4") if any(a in r["activations"] for r in found)
    ]
    heads = ["weights", "method"]
    for label in labels:
        heads += [label, "+-", "KL"]
    lines = []
    for format, method in dict.fromkeys((r["format"], r["method"]) for r in found):
        line: list[Cell] = [format, f"`{method}`"]
        for label in labels:
            (r,) = (
                r
                for r in found
                if (r["format"], r["method"]) == (format, method) and label in r["activations"]
            )
            line += [f"{r['ratio']:.5f}", f"{r['ratio_error']:.5f}", f"{1e3 * r['kl']:.2f}"]
        lines.append(line)
    return f"{grid(heads, lines)}\n\n{source(name)}"


TABLES["perplexity_moe_lm"] = lambda: perplexities("accuracy_moe_lm_h200")
TABLES["perplexity_demo"] = lambda: perplexities("accuracy_demo_cpu")


# --- several GPUs ---

SEVERAL = (
    "several_gpus_one_h100",
    "several_gpus_30b_h100",
    "several_gpus_long_h100",
    "several_gpus_235b_h100",
    "several_gpus_whole_h100",
)
DIVIDED = {"split": "heads", "own": "batch"}
"""The dimension along which attention is divided."""


@table
def several_gpus() -> str:
    heads = [
        "layers",
        "keys",
        "batch",
        "divided",
        "one H100, ms a step",
        "two, ms a step",
        "ratio",
        "logits differ by",
    ]
    lines: list[list[Cell]] = []
    for name in SEVERAL:
        steps = {(r["model"], r["layers"], r["keys"], r["batch"], r["way"]): r for r in rows(name, "decode")}
        for model, layers, keys, batch, way in sorted(k for k in steps if k[-1] != "one"):
            alone, both = (steps.get((model, layers, keys, batch, w)) for w in ("one", way))
            assert both is not None
            line: list[Cell] = [f"{layers} of {model}", keys, batch, DIVIDED[way]]
            ratio = alone["ms"] / both["ms"] if alone else None
            lines.append([*line, alone["ms"] if alone else "does not fit", both["ms"], ratio, both["error"]])
    return f"{grid(heads, lines)}\n\n{source(*SEVERAL)}"


SPREAD = ("nvlink_h100", "nvlink_gpt_oss_h100", "nvlink_deepseek_h100")


@table
def spread_blocks() -> str:
    heads = [
        "experts",
        "tokens",
        "own: one",
        "NCCL",
        "NVLink",
        "bound",
        "same: one",
        "NCCL",
        "NVLink",
        "bound",
    ]
    lines: list[list[Cell]] = []
    for name in SPREAD:
        found = rows(name, "own")
        for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in found):
            line: list[Cell] = [model, tokens]
            for mode, alone in (("own", "one"), ("same", "alone")):
                of = {"model": model, "tokens": tokens}
                line += [one(name, mode, **of, way=w)["us"] for w in (alone, "nccl", "ours", "local")]
            lines.append(line)
    return f"{grid(heads, lines)}\n\n{source(*SPREAD)}"


# --- README ---


@table
def summary() -> str:
    heads = ["what", "where", "other", "other's", "fp4_ops", "ratio"]
    lines: list[list[Cell]] = []
    for batch, (stock, grouped, ours) in decode_steps().items():
        assert stock and ours
        best, label = min(
            (s, n) for s, n in ((stock, "transformers"), (grouped, "transformers, grouped_mm")) if s
        )
        what = f"a step of `generate`, batch {batch}, ms"
        lines.append([what, "H200", label, best, ours, best / ours])
    name = "generate_h200"
    stock, ours = (one(name, "prefill", variant=v)["ms"] for v in ("stock", "prepared-backend"))
    lines.append(["prefill of 4096 tokens, ms", "H200", "transformers", stock, ours, stock / ours])
    stock, ours = (one(name, "expert bytes", variant=v)["gb"] for v in ("stock", "prepared-backend"))
    lines.append(["expert weights, GB", "H200", "bf16", stock, ours, stock / ours])
    for batch in (1, 32):
        case = {"model": "qwen3-30b", "batch": batch}
        found = [r for r in rows("vllm_engine_48_h200", "engine") if case.items() <= r.items()][:2]
        stock, ours = (r["decode_tokens_s"] for r in found)
        what = f"tokens/s in vLLM, batch {batch}"
        lines.append([what, "H200", "vLLM (Marlin)", stock, ours, found[1]["speedup"]])
    card = {"humming_h100": "H100", "humming_h200": "H200"}
    for name, where in card.items():
        median = statistics.median(humming_ratios(name, "bf16"))
        what = "grouped products, bf16 rows, relative time (median)"
        lines.append([what, where, "Humming", median, 1, median])
    for tokens in (1, 64):
        r = one(
            "cpu_vs_ggml_zen5",
            "product",
            threads=1,
            tokens=tokens,
            weights="streamed",
            kernel="fp4_ops nvfp4",
        )
        peer = one(
            "cpu_vs_ggml_zen5", "product", threads=1, tokens=tokens, weights="streamed", kernel=r["peer"]
        )
        what = f"product, {tokens} token{'s' * (tokens > 1)}, us"
        lines.append([what, "Zen 5, one core", r["peer"], peer["us"], r["us"], r["speedup"]])
    for method in ("rtn", "search", "gptq"):
        r = one("accuracy_moe_lm_h200", "perplexity", format="nvfp4", method=method, activations="W4A16")
        base = one("accuracy_moe_lm_h200", "perplexity", format="bfloat16")
        line = [f"perplexity of a 110 M MoE, `{method}`", "H200", "bf16", f"{base['perplexity']:.4f}"]
        lines.append([*line, f"{r['perplexity']:.4f}", f"{r['ratio']:.5f}"])
    return grid(heads, lines)
