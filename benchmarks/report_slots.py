"""Makes the tables of experts in host memory with slots on the GPU."""

from __future__ import annotations

from typing import NamedTuple

from report_cells import grid, rows, source, table

from fp4_ops.models.memory_plan import RECENCY, LayerExperts, MemoryPlan

SLOTS = ("slots_qwen3_30b_h200", "slots_gpt_oss_120b_h200")
BUDGETS = {"slots_budget_h200": 4, "slots_budget_48_h200": 48}
"""Records, each with the number of layers of its model."""


@table
def slots_decode() -> str:
    heads = ["model", "sequences", "slots of 128", "routing", "in slots", "resident, us", "slots, us",
             "of resident speed", "of the link", "of the bound", "difference"]  # fmt: skip
    lines = [
        [r["model"], r["tokens"], r["slots"], r["routing"], r["hit_ratio"], r["resident_us"], r["us"],
         r["speed_ratio"], r["ratio_to_link"] if r["hit_ratio"] < 1 else None, r["bound_ratio"],
         r["difference"]]
        for name in SLOTS
        for r in rows(name, "decode")
    ]  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source(*SLOTS)}"


@table
def slots_summary() -> str:
    heads = [
        "model, 40 % of the experts in slots", "step of one sequence, recent: of the resident speed",
        "of the bound", "uniform: of the link", "prompt of 2048 tokens: of the link", "of 8192",
    ]  # fmt: skip
    lines = []
    for name in SLOTS:
        steps = {r["routing"]: r for r in rows(name, "decode", tokens=1)}
        prompts = [r["ratio_to_link"] for r in rows(name, "prefill", begin="empty", slots=51)]
        recent = steps["recent"]
        lines.append([recent["model"], recent["speed_ratio"], recent["bound_ratio"],
                      steps["uniform"]["ratio_to_link"], *prompts])  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source(*SLOTS)}"


@table
def slots_prefill() -> str:
    heads = ["model", "tokens", "slots of 128", "slots begin", "resident, ms", "link alone, ms", "slots, ms",
             "of the link", "most memory, GB", "difference"]  # fmt: skip
    lines = [
        [r["model"], r["tokens"], r["slots"], r["begin"], r["resident_ms"], r["at_link_ms"], r["ms"],
         r["ratio_to_link"], r["scratch_gb"], r["difference"]]
        for name in SLOTS
        for r in rows(name, "prefill")
    ]  # fmt: skip
    return f"{grid(heads, lines)}\n\n{source(*SLOTS)}"


@table
def slots_link() -> str:
    heads = ["model", "experts", "MB each", "copy engine, GB/s", "fetch, GB/s", "fetch, us", "of the link"]
    keys = ("model", "experts", "expert_mb", "link_gb_per_s", "fetch_gb_per_s", "fetch_us", "ratio_to_link")
    lines = [[r[k] for k in keys] for name in SLOTS for r in rows(name, "link")]
    return f"{grid(heads, lines)}\n\n{source(*SLOTS)}"


@table
def slots_peer() -> str:
    """Compares the times of `.to` and of slots, for routing that repeats and for empty slots."""
    heads = ["model", "tokens", "routing", "in slots", "`.to`, us a layer", "slots, us a layer",
             "times faster"]  # fmt: skip
    lines = []
    for name in SLOTS:
        for r in rows(name, "peer"):
            tokens = r["tokens"]
            prefill = rows(name, "prefill", tokens=tokens, slots=51, begin="empty")
            found = [("uniform", 0, 1e3 * p["ms"]) for p in prefill]
            # With several sequences, "new" steps need fewer experts than `.to` copied.
            kinds = ("recent", "new") if tokens == 1 else ("recent",)
            steps = [d for kind in kinds for d in rows(name, "decode", tokens=tokens, routing=kind)]
            found += [(d["routing"], d["hit_ratio"], d["us"]) for d in steps]
            for kind, hit_ratio, us in found:
                lines.append([r["model"], tokens, kind, hit_ratio, r["us"], us, r["us"] / us])
    return f"{grid(heads, lines)}\n\n{source(*SLOTS)}"


@table
def slots_budget() -> str:
    heads = ["layers", "tokens of the prompt", "at once", "ms", "memory before, GB", "most memory, GB",
             "budget, GB"]  # fmt: skip
    keys = ("tokens", "at_once", "ms", "held_gb", "peak_gb", "budget_gb")
    lines = [[layers, *(r[k] for k in keys)] for n, layers in BUDGETS.items() for r in rows(n, "budget")]
    return f"{grid(heads, lines)}\n\n{source(*BUDGETS)}"


@table
def slots_generate() -> str:
    name = "slots_generate_h200"
    heads = ["experts", "cuDNN's attention", "sequences", "steps", "ms a step", "in slots", "tokens equal",
             "tokens repeated", "graphs compiled", "compiled later", "memory grown, MB", "most memory, GB",
             "budget, GB"]  # fmt: skip
    keys = ("experts", "cudnn_attention", "batch", "steps", "ms", "hit_ratio", "equal_ratio", "repeat_ratio",
            "compiled", "compiled_later", "grown_mb", "peak_gb", "budget_gb")  # fmt: skip
    lines = [[r.get(k) for k in keys] for r in rows(name, "generate")]
    return f"{grid(heads, lines)}\n\n{source(name)}"


class Shape(NamedTuple):
    """A model's layers of experts, and the bytes of its other weights in bfloat16."""

    name: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    dense_bytes: int
    budgets: tuple[int, ...]


GIB = 2**30
SHAPES = (
    Shape("gpt-oss-20b", 24, 32, 4, 13_530_240, 3_600_000_000, (8, 12)),
    Shape("Qwen3-30B-A3B", 48, 128, 8, 2_654_216, 3_060_000_000, (8, 12, 16)),
    Shape("gpt-oss-120b", 36, 128, 4, 13_530_240, 4_005_000_000, (12, 16, 24, 32)),
    Shape("Qwen3-235B-A22B", 94, 128, 8, 10_616_840, 15_900_000_000, (32, 48, 80)),
)


@table
def slots_expected() -> str:
    heads = ["model", "host memory, GiB", "gpu_memory, GiB", "slots", "in slots, text", "tokens/s, text",
             "tokens/s, uniform"]  # fmt: skip
    lines = []
    for m in SHAPES:
        layers = tuple(LayerExperts(str(i), m.experts, m.top_k, m.expert_bytes) for i in range(m.layers))
        for budget in m.budgets:
            plan = MemoryPlan(budget * GIB, m.dense_bytes, layers)
            text, worst = (1 / plan.seconds(recency) for recency in (True, False))
            slots = plan.slots(layers[0])
            found = 1 - (1 - slots / m.experts) ** RECENCY
            lines.append(
                [m.name, plan.expert_bytes / GIB, budget, f"{slots} of {m.experts}", found, text, worst]
            )
    return grid(heads, lines)
