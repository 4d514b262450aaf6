"""Runs every family and style and writes what became of each:
python tests/scripts/support_table.py > docs/support.md
(one section alone: python tests/scripts/support_table.py real, families, styles or products)
It needs what the tests need: run it with the python of `.venv`, after `make test`.

Each row is a run: 9 tokens, then 5 under the same compilation (symbolic length), then one token. `error` is
the largest relative error of the three against the same module over the dequantised weights (mxfp4, float32,
activations not quantised); where nothing was rewritten it shows how far 4 bits are from the original. Graphs
are run as rewritten, without Inductor. `eager` in transformers is a loop over the experts that were hit
(`for e in hit.nonzero()`): it is traced over all experts, where each round is proved to do nothing without
rows. nllb-moe: transformers 5 makes `one_hot` of its mask of 0 and 1, so only experts 0 and 1 ever run; the
rewritten graph computes what the model does. muse_spark_text normalises each expert's output before it is
weighted: `fp4::moe` for each choice of a token alone, then the norm.
Not run: gemma4 and diffusion_gemma (experts and router are apart), dots3_note, ernie4_5_vl_moe, glm5_next,
qwen3_omni_moe, step3p7, deepseek_ocr2, unlimited_ocr, beam, flint, zaya (no tiny model of the experts by
sizes alone) and doge (experts are single rows of an embedding).
Dense models stay as they are, whatever their products look like: tests/helpers/dense_models.py has 48.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("helpers", "real")]

import package_styles  # noqa: F401  adds its styles to STYLES
import repository_styles  # noqa: F401  its, too
import score_styles  # noqa: F401  its, too
import torch
from families import FAMILIES, LOOPS, TRANSPOSED, expert_block, tiny
from moe_models import Recorder, fake_quantised, relative_error
from moe_styles import STYLES
from product_styles import EXPERTS, Gates, Stack, Where
from torch import nn

HEAD = "| what | experts as | becomes | graphs | graph breaks | error |\n|---|---|---|---|---|---|"


REAL = """Installed from PyPI and run unmodified, by `make test-real` and, for this section alone, by
`python tests/scripts/support_table.py real`: experts with random weights large enough to matter, batch and
length both changing, compared with a twin over the dequantised weights, from which `error` is the distance.
"left alone" computes what it did, in the original weights, for the reason given; tests/real/ asserts each
operator and each reason. With `capture_dynamic_output_shape_ops`, without Inductor, on CPU. The tests trace
one case in four, others each time, again with Inductor's decompositions.

What the reasons mean. latent-moe's grouped form asks for the ends of its groups, a cumsum as a list
beside the counts: Dynamo cuts between routing and experts. mh-moe prints within its router, and SwitchMoE
where scores are NaN, which cuts, too: what is printed is the program's output, and no backend may leave
it out. In ExpertChoiceMoE a loop adds rows of tokens that experts chose. NLLB-MoE and Switch Transformers
have ReLU without a gate, so their experts are two `fp4::indexed_mm`.

Not run: doge (experts are single rows of an embedding) and qwen3_omni_moe (no tiny model by sizes alone)
of transformers 4.57, vitpose of both versions (the caller names the expert); tutel and scattermoe, which
PyPI does not have; torchtune 0.6.1, which has no such layer; and megablocks, deepspeed and vLLM, which
are not in tests/real/. vLLM's engine runs 4-bit folders itself: docs/serving.md."""


def first(out: object) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out  # type: ignore[return-value]


def row(what: str, form: str, module: nn.Module, twin: nn.Module, make: Callable[[int], torch.Tensor]) -> str:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recorder = Recorder(activation="bf16", format="mxfp4")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    errors = []
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for n in (9, 5, 1):
            x = make(n)
            errors.append(relative_error(first(compiled(x)), first(twin(x))))
    sites = [s for f in recorder.frames for s in f.sites]
    ops = Counter(s.op for s in sites if s.op)
    became = ", ".join(f"`{op}`" + (f" x{n}" if n > 2 else "") for op, n in ops.items())
    counters = torch._dynamo.utils.counters
    told = sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())
    breaks = max(told, sum(counters["resumes"].values()))
    if not became:
        nothing = "nothing: " + ("Dynamo captures no experts" if breaks else "captured, but not recognised")
        became = next((f"left alone: {s.reason}" for s in sites), nothing)
    return f"| {what} | {form} | {became} | {recorder.compilations} | {breaks} | {max(errors):.0e} |"


def families() -> Iterator[str]:
    for family in sorted(FAMILIES):
        forms = ("eager",) if family in ("llama4_text", *LOOPS) else ("grouped_mm", "batched_mm", "eager")
        for form in forms:
            try:
                model = tiny(family, form if len(forms) > 1 else "")
                twin = copy.deepcopy(model)
                with torch.no_grad():
                    for name, p in twin.named_parameters():
                        flat = "experts.mlp." in name  # dbrx: [E * I, H], w2 as it multiplies from the right
                        w = p.view(8, -1, p.shape[-1]) if flat else p
                        transposed = family in TRANSPOSED or (flat and name.endswith("w2"))
                        if w.dim() == 3 and "shared_experts" not in name:
                            w.copy_(fake_quantised(w, "mxfp4", transposed))
                        elif ".expert_" in name and name.endswith("weight"):  # one module for each expert
                            w.copy_(fake_quantised(w[None], "mxfp4")[0])
                block = expert_block(model)
                yield row(family, form, block, expert_block(twin), lambda n: torch.randn(1, n, 64))
            except Exception as error:
                print(f"{family} {form}: {type(error).__name__}: {error}", file=sys.stderr)


def styles() -> Iterator[str]:
    for name, style in STYLES.items():
        module = style()
        yield row(name, "", module, module.twin("mxfp4"), lambda n: torch.randn(n, 32))


def products() -> Iterator[str]:
    three = ("one Linear", "three Linears", "LayerNorm at the end")
    for cls, experts in (
        (Stack, three),
        (Where, three),
        (Gates, ("one Linear", "Linear, ReLU", "three Linears")),
    ):
        for name in experts:
            module = cls(EXPERTS[name]).eval()
            yield row(name, cls.__doc__ or "", module, module.twin().float(), lambda n: torch.randn(n, 32))


def main(*only: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import transformers

    if not only:
        print("# What is recognised\n")
        print((__doc__ or "").strip() + "\n")
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, on CPU.\n")
    if not only or "real" in only:
        import groups

        print("## Other people's code (tests/real/)\n\n" + REAL + "\n")
        for line in groups.table():
            print(line, flush=True)
        print()
    for title, name, rows in (
        ("Families of transformers", "families", families),
        ("Styles (tests/helpers/moe_styles.py)", "styles", styles),
        ("Each product by itself (tests/helpers/product_styles.py)", "products", products),
    ):
        if only and name not in only:
            continue
        print(f"## {title}\n\n{HEAD}")
        for line in rows():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
