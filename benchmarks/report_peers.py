"""Makes tables that compare other libraries' kernels with ours, from the records in benchmarks/results/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report_cells import Cell, grid, one, read, rows, source, spread, table


def humming_ratios(name: str, kind: str, **where: Any) -> list[float]:
    """Returns Humming's time divided by ours with nvfp4. With fp8 rows, Humming's weights are mxfp4."""
    return [r["humming_us"] / r["nvfp4_us"] for r in rows(name, "product", rows=kind, **where)]


@table
def humming() -> str:
    heads = ["card", "product", "rows", "points", "least", "median", "most"]
    lines: list[list[Cell]] = []
    for name in ("humming_h100", "humming_h200"):
        for kind in ("bf16", "fp8"):
            shapes = dict.fromkeys(r["shape"] for r in rows(name, "product", rows=kind))
            for shape in shapes:
                lines.append(
                    [read(name)["gpu"], shape, kind, *spread(humming_ratios(name, kind, shape=shape))]
                )
            lines.append([read(name)["gpu"], "**all**", kind, *spread(humming_ratios(name, kind))])
    return f"{grid(heads, lines)}\n\n{source('humming_h100', 'humming_h200')}"


def sglang_ratios(**where: Any) -> list[float]:
    """Returns SGLang's time divided by ours. Both have int4 weights."""
    return [r["sglang_us"] / r["int4_us"] for r in rows("cutlass_h100", "product", **where)]


def _by_tokens(name: str, what: str, ratios: Callable[..., list[float]]) -> str:
    gpu = read(name)["gpu"]
    lines: list[list[Cell]] = [
        [gpu, tokens, *spread(ratios(tokens=tokens))]
        for tokens in sorted({r["tokens"] for r in rows(name, what)})
    ]
    lines.append([gpu, "**all**", *spread(ratios())])
    return f"{grid(['card', 'tokens', 'points', 'least', 'median', 'most'], lines)}\n\n{source(name)}"


@table
def sglang() -> str:
    return _by_tokens("cutlass_h100", "product", sglang_ratios)


@table
def sglang_products() -> str:
    heads = ["experts, N, K", "tokens", "int4 x fp8", "mxfp4 x fp8", "SGLang, int4 x fp8", "SGLang / int4"]
    lines: list[list[Cell]] = [
        [f"{r['model']} [{r['experts']}, {r['n']}, {r['k']}]", r["tokens"], r["int4_us"], r["mxfp4_us"],
         r["sglang_us"], r["sglang_us"] / r["int4_us"]]
        for r in rows("cutlass_h100", "product")
    ]  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source('cutlass_h100')}"


def flashinfer_ratios(**where: Any) -> list[float]:
    """Returns FlashInfer's time divided by ours, both with fp8 rows."""
    return [r["flashinfer_fp8_us"] / r["fp8_us"] for r in rows("flashinfer_h100", "block", **where)]


@table
def flashinfer() -> str:
    return _by_tokens("flashinfer_h100", "block", flashinfer_ratios)


@table
def flashinfer_blocks() -> str:
    heads = [
        "experts of",
        "tokens",
        "ours, fp8",
        'ours, "auto"',
        "ours, bf16",
        "FlashInfer, fp8",
        "FlashInfer / ours, fp8",
    ]
    lines: list[list[Cell]] = [
        [r["model"], r["tokens"], r["fp8_us"], r["auto_us"], r["none_us"], r["flashinfer_fp8_us"],
         r["flashinfer_fp8_us"] / r["fp8_us"]]
        for r in rows("flashinfer_h100", "block")
    ]  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source('flashinfer_h100')}"


MARLIN = {"nvfp4": "mma_marlin_h100", "mxfp4": "mma_marlin_mxfp4_h100"}
LIMITS = {"99 KB": "mma_99_us", "163 KB": "mma_163_us"}


def _marlin(name: str) -> list[dict[str, Any]]:
    return [r for what in ("gate/up", "down", "block") for r in rows(name, what)]


@table
def marlin() -> str:
    heads = ["weights", "shared memory", "", "tokens", "points", "least", "median", "most"]
    parts = ("product", ("gate/up", "down")), ("block", ("block",))
    lines: list[list[Cell]] = []
    for format, name in MARLIN.items():
        for limit, key in LIMITS.items():
            for what, tables in parts:
                for range_, least, most in (("1 to 32", 1, 32), ("128 to 8192", 128, 8192)):
                    found = [
                        r["marlin_us"] / r[key]
                        for r in _marlin(name)
                        if r["table"] in tables and least <= r["tokens"] <= most and r["marlin_us"] and r[key]
                    ]
                    lines.append([format, limit, what, range_, *spread(found)])
    return f"{grid(heads, lines)}\n\n{source(*MARLIN.values())}"


@table
def marlin_points() -> str:
    heads = ["weights", "model", "", "tokens", "99 KB", "163 KB", "Marlin", "Marlin over 99 KB", "floor"]
    lines = []
    for format, name in MARLIN.items():
        for r in sorted(_marlin(name), key=lambda r: list(dict.fromkeys(
            x["model"] for x in rows(name, "block"))).index(r["model"])):  # fmt: skip
            theirs, ours = r["marlin_us"], r["mma_99_us"]
            line = [format, r["model"], r["table"], r["tokens"], ours, r["mma_163_us"], theirs]
            lines.append([*line, theirs / ours if theirs and ours else None, r["floor_us"]])
    return f"{grid(heads, lines)}\n\n{source(*MARLIN.values())}"


def vllm_ratio(r: dict[str, Any], kernel: str) -> float:
    """Returns the recorded speedup over vLLM's default: for GPT-OSS Triton's kernels, otherwise Marlin's.

    A record without Triton's ratio to our bfloat16 block gives that of the medians.
    """
    bf16 = "bf16_" if kernel == "bf16" else ""
    if "triton_us" not in r:
        return float(r[f"{bf16}speedup"])
    return float(r.get(f"triton_{bf16}speedup", r["triton_us"] / r[f"{kernel}_us"]))


@table
def vllm_experts() -> str:
    heads = ["model", "tokens", "Marlin", "Triton", "fp4_ops", "fp4_ops, bf16", "vLLM / fp4_ops", "/ bf16"]
    found = rows("vllm_experts_h200", "experts")
    ratios = {kernel: [vllm_ratio(r, kernel) for r in found] for kernel in ("fp4_ops", "bf16")}
    lines: list[list[Cell]] = [
        [r["model"], r["tokens"], r["marlin_us"], r.get("triton_us"), r["fp4_ops_us"], r["bf16_us"], *both]
        for r, *both in zip(found, *ratios.values())
    ]
    names = "**least**", "**median**", "**most**"
    for name, *both in zip(names, *(spread(its)[1:] for its in ratios.values())):
        lines.append([name, None, None, None, None, None, *both])
    return f"{grid(heads, lines)}\n\n{source('vllm_experts_h200')}"


@table
def vllm_engine() -> str:
    names = [f"vllm_engine_{name}_h200" for name in ("48", "mixtral", "eight", "turns", "demo")]
    heads = ["model", "layers", "sequences", "vLLM, tokens/s", "fp4_ops, tokens/s", "ratio",
             "vLLM again, ratio", "prompts: vLLM, ms", "fp4_ops, ms", "ratio",
             "kernels of a step: vLLM, ms", "fp4_ops, ms"]  # fmt: skip
    lines: list[list[Cell]] = []
    for name in names:
        kernels = {(r["batch"], r["engine"]): r["gpu_ms"] for r in rows(name, "gpu")}
        found = rows(name, "engine")
        engines = len({r["engine"] for r in found})
        for at in range(0, len(found), engines):
            a, b, *again = found[at : at + engines]
            lines.append(
                [a["model"], a["layers"], a["batch"], a["decode_tokens_s"], b["decode_tokens_s"],
                 b["speedup"], again[0]["speedup"] if again else None,
                 a["prefill_ms"], b["prefill_ms"], b["prefill_speedup"],
                 kernels.get((a["batch"], "vllm")), kernels.get((a["batch"], "fp4_ops"))]
            )  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source(*names)}"


@table
def llama_cpp() -> str:
    """Decoding steps of fp4_ops and llama.cpp. For gpt-oss-120b they ran on two cards of the same name."""
    names = {
        ("Qwen3-30B-A3B", 100): ("llama_cpp_qwen3_30b_h200", "step_beside_llama_cpp_h200"),
        ("Qwen3-30B-A3B", 1000): ("llama_cpp_qwen3_30b_h200", "step_beside_llama_cpp_h200"),
        ("gpt-oss-120b", 100): ("llama_cpp_gpt_oss_120b_h200", "step_gpt_oss_120b_h200"),
    }
    heads = ["model", "tokens before", "llama.cpp, ms", "tokens/s", "fp4_ops, ms", "tokens/s", "speedup",
             "llama.cpp, GB", "fp4_ops, GB"]  # fmt: skip
    lines: list[list[Cell]] = []
    for (model, tokens), (theirs, ours) in names.items():
        a = one(theirs, "decode", where="gpu", depth=tokens)
        b = one(ours, "step", batch=1, context=tokens)
        lines.append([model, tokens, a["ms"], a["tokens_per_s"], b["ms"], b["tokens_per_s"],
                      a["ms"] / b["ms"], a["gb"], b["gb"]])  # fmt: skip
    files = dict.fromkeys(name for pair in names.values() for name in pair)
    return f"{grid(heads, lines)}\n\n{source(*files)}"


@table
def cpu_steps() -> str:
    """Decoding steps and prompts on a CPU, beside llama.cpp: in turn where the record has its times.
    Otherwise they are from another day, and its step is the best of two numbers of threads."""
    names = {
        "experts": "experts nvfp4, others bf16",
        "fp8": "experts nvfp4, others fp8",
        "whole": "all nvfp4",
    }
    heads = ["processor", "layers", "threads", "weights", "a step, ms", "without guards", "not compiled",
             "llama.cpp, ms", "llama.cpp / fp4_ops", "GB", "llama.cpp, GB", "512 tokens, ms",
             "llama.cpp, ms"]  # fmt: skip
    ours = (
        "cpu_step_zen4", "cpu_step_zen5", "cpu_step_emeraldrapids", "cpu_step_turns_emeraldrapids",
    )  # fmt: skip
    theirs = "llama_cpp_qwen3_30b_h200"
    other = min(rows(theirs, "decode", where="cpu"), key=lambda r: r["ms"])
    lines: list[list[Cell]] = []
    for name in ours:
        for r in rows(name, "step"):
            prompt = one(name, "prefill", variant=r["variant"])
            ms = r.get("llama_cpp_ms", other["ms"])
            lines.append([read(name)["cpu"], r["layers"], r["threads"], names[r["variant"]], r["ms"],
                          r["unguarded_ms"], r["eager_ms"], ms, r.get("speedup", ms / r["ms"]), r["gb"],
                          r.get("llama_cpp_gb", other["gb"]), prompt["ms"],
                          prompt.get("llama_cpp_ms")])  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source(*ours, theirs)}"
