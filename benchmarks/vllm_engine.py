"""Measures tokens per second of vLLM's engine with fp4_ops and with vLLM's own methods, in processes that
take turns.

    python benchmarks/vllm_engine.py [--models qwen3-30b,eight] [--layers 2] [--batches 1,8,32]

The folders have random weights in the shapes of MODELS. Their vocabulary has only 4096 tokens, so that the
layers take most of the time. `demo` is the trained model of examples/demo_model; its prompts are text that
was not used for training. On a CPU, the first process serves the folder in bf16, and the others serve the
same folder in 4 bits (only experts; experts and attention). On a GPU, all of them serve the folder in 4 bits:
the first with vLLM's own method (Marlin on Hopper), the second with `--quantization fp4_ops`. A folder for
the GPU is written in 4 bits at once, which takes half a second a layer.

decode_tokens_s: tokens per second of all sequences together, from two calls of `generate` that differ in the
number of new tokens. prefill_ms: the time of the call with one new token. Both are medians of --rounds
rounds, and each round begins with another process. Two rounds before them are not counted. speedup: relative
to the first process, the median of the rounds' ratios. --batches may name a batch twice (1,8,1), which shows
whether the first was measured too early. gpu_ms, in rows of their own: the sum of all kernels' times in a
decoding step, by torch.profiler, after everything else. If it is much less than a step takes, the GPU waits
for the host. graphs, launches: how many CUDA graphs and how many single kernels the host launches in a step.
The longest kernels are printed to stderr.

--again: the first process's engine is started once more as `again`, and takes turns with the others. Its
speedup shows how much of a ratio is noise.

same_tokens: the share of the first process's greedy tokens that are the same. A model with random weights
chooses almost by chance, so after one different token the texts have nothing in common; `demo` is more
informative. differing: the number of texts with a different token. gap: at the first difference of a text,
how much larger the first process's log probability of its own token was than of the other process's token;
the maximum over texts, null if a token of the other process is not among the first process's BEST. drift: how
much the difference between the log probabilities of the two best tokens changes from the first process to the
other; the maximum over tokens before the first difference. A gap that is not larger than the drift is
explained by rounding. median_gap: the median, over all tokens of the first process, of the difference between
its two best tokens.

--python: an interpreter of an environment with vLLM and fp4_ops (docs/serving.md); this one, if not given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch

MODELS = {
    "qwen3-30b": {"hidden": 2048, "experts": 128, "chosen": 8, "inner": 768, "heads": 32, "kv_heads": 4},
    "eight": {"hidden": 2048, "experts": 8, "chosen": 2, "inner": 4096, "heads": 32, "kv_heads": 4},
    "mixtral": {"hidden": 4096, "experts": 8, "chosen": 2, "inner": 14336, "heads": 32, "kv_heads": 8},
}
VOCABULARY = 4096
WARM = 2
"""Rounds before those that count."""
BEST = 8
"""Tokens of a step whose log probabilities are compared."""
LONGEST = 8
"""Kernels of a step that are printed."""
LAUNCH = re.compile(r"cu(da)?(Graph)?Launch(Kernel(Ex)?(C)?(ExC)?)?(_v\d+|_ptsz)*")
"""The driver's and the runtime's functions that launch a kernel or a graph."""
GRAPHS, LAUNCHES = "graphs", "launches"
DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
CPU = {
    "bf16": {"folder": "16"},
    "nvfp4": {"folder": "experts"},
    "nvfp4, attention too": {"folder": "attention"},
}
GPU = {
    "vllm": {"folder": "experts"},
    "fp4_ops": {"folder": "experts", "quantization": "fp4_ops"},
}
"""Engines that take turns, each with its folder and its options of vllm.LLM. The first is vLLM without
fp4_ops."""


def make_folders(where: Path, model: str, layers: int, device: str) -> None:
    """Writes one model three times: in 16 bits, with its experts in nvfp4, and with its experts and attention
    in nvfp4. Of random weights for a GPU only the second is written."""
    from fp4_ops.checkpoints.convert import quantize_checkpoint

    if model != "demo" and device == "cuda":
        save_random_codes(where / "experts", MODELS[model], layers)
        return
    if model == "demo":
        shutil.copytree(DEMO, where / "16")
    else:
        save_random_weights(where / "16", MODELS[model], layers, device)
    quantize_checkpoint(where / "16", where / "experts", device=device, progress=False)
    if device == "cpu":
        quantize_checkpoint(where / "16", where / "attention", attention="nvfp4", progress=False)


def config_of(shape: dict[str, int], layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=shape["hidden"], num_hidden_layers=layers,
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], head_dim=128,
        num_experts=shape["experts"], num_experts_per_tok=shape["chosen"],
        moe_intermediate_size=shape["inner"], intermediate_size=shape["inner"],
        norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def empty_model(shape: dict[str, int], layers: int) -> torch.nn.Module:
    """Returns the model without data."""
    from transformers import Qwen3MoeForCausalLM

    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config_of(shape, layers)).to(torch.bfloat16)


def fill(name: str, p: torch.Tensor) -> torch.Tensor:
    """Writes random values into a parameter. The values of a product then have a deviation of about 1."""
    if "norm" in name:
        return p.fill_(1)
    return p.normal_(0, 1 if "embed" in name else p.shape[-1] ** -0.5)


def save_random_weights(folder: Path, shape: dict[str, int], layers: int, device: str) -> None:
    torch.manual_seed(0)
    model: Any = empty_model(shape, layers).to_empty(device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            fill(name, p)
    model.save_pretrained(folder)


def save_random_codes(folder: Path, shape: dict[str, int], layers: int) -> None:
    """Writes a model whose experts are in nvfp4, one file a layer. It is made on the GPU, with no folder in
    16 bits before it."""
    from safetensors.torch import save_file

    from fp4_ops.checkpoints.dialects.compressed_tensors import NVFP4_PACK
    from fp4_ops.checkpoints.dialects.writing import EXPERTS_TARGET, describe

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    others = {
        name: fill(name, torch.empty_like(p, device="cuda")).detach().cpu()
        for name, p in empty_model(shape, layers).named_parameters()
        if ".experts." not in name
    }
    names = {}

    def save(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file)
        names.update(dict.fromkeys(tensors, file))

    save("others.safetensors", others)  # a file "model.safetensors" would be read as the whole model
    for i in range(layers):
        save(f"experts-{i}.safetensors", random_experts(f"model.layers.{i}.mlp", shape))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    linears = [name.removesuffix(".weight") for name in others if re.search(r"_proj\.|gate\.|lm_head", name)]
    stored = {"quantization_config": describe([(NVFP4_PACK, [EXPERTS_TARGET])], linears)}
    (folder / "config.json").write_text(json.dumps(config_of(shape, layers).to_dict() | stored))


def random_experts(prefix: str, shape: dict[str, int]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer's experts as compressed-tensors stores them."""
    from fp4_ops.checkpoints.dialects import Codes
    from fp4_ops.checkpoints.dialects.compressed_tensors import NVFP4_PACK
    from fp4_ops.checkpoints.dialects.writing import encode

    found = {}
    hidden, inner = shape["hidden"], shape["inner"]
    for names, n, k in ((("gate_proj", "up_proj"), 2 * inner, hidden), (("down_proj",), hidden, inner)):
        weight = torch.empty(shape["experts"], n, k, device="cuda", dtype=torch.bfloat16)
        parts = torch.ops.fp4.quantize(fill(prefix, weight), "nvfp4")
        packed, scale, factor = (t.cpu() for t in parts)
        for e in range(shape["experts"]):
            for i, name in enumerate(names):
                rows = slice(i * n // len(names), (i + 1) * n // len(names))
                codes = Codes(packed[e, rows], scale[e, rows], factor[e])
                found |= encode(f"{prefix}.experts.{e}.{name}", codes, NVFP4_PACK)
    return found


def prompts_of(model: str, batch: int, length: int) -> list[list[int]]:
    """Returns the same prompts each time: random tokens, or for the trained model pieces of its held-out
    text."""
    generator = torch.Generator().manual_seed(length)
    if model != "demo":
        return torch.randint(1, VOCABULARY, (batch, length), generator=generator).tolist()
    text = (DEMO / "heldout.txt").read_bytes()
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator).tolist()
    return [list(text[at : at + length]) for at in starts]


# --- the process that has an engine ---


def serve(folder: str, options: dict[str, Any]) -> None:
    """Answers lines of JSON: {"prompts", "new", "best", "kernels"} -> {"s", "tokens", "best", "gpu_us"}.

    best: how many of the likeliest tokens of each step to return, with their log probabilities. kernels:
    whether to measure the GPU's time. The first line that it prints, once it is ready, has the versions of
    its packages.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, dtype="bfloat16", skip_tokenizer_init=True, seed=0, enable_prefix_caching=False, **options
    )
    print(json.dumps({"versions": record.versions()}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            max_tokens=asked["new"], temperature=0, ignore_eos=True, detokenize=False,
            logprobs=asked["best"] or None,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": p} for p in asked["prompts"]]
        with kernels() if asked["kernels"] else contextlib.nullcontext({}) as times:
            start = time.perf_counter()
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
        tokens = [list(a.outputs[0].token_ids) for a in answers]
        best = [[best_of(step) for step in a.outputs[0].logprobs or ()] for a in answers]
        answer = {"s": seconds, "tokens": tokens, "best": best, "gpu_us": times}
        print(json.dumps(answer), file=out, flush=True)


def best_of(step: dict[int, Any]) -> list[tuple[int, float]]:
    """Returns the likeliest tokens with their log probabilities, the first one first."""
    return sorted(((t, float(p.logprob)) for t, p in step.items()), key=lambda pair: -pair[1])


@contextlib.contextmanager
def kernels() -> Iterator[dict[str, float]]:
    """Yields a dict that afterwards has the times of all kernels in microseconds, by their names, and the
    numbers of launches."""
    times: dict[str, float] = {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield times
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total
        elif LAUNCH.fullmatch(event.key):
            what = GRAPHS if "Graph" in event.key else LAUNCHES
            times[what] = times.get(what, 0.0) + event.count


class Engine:
    """A process with an engine."""

    def __init__(self, python: str, folder: Path, options: dict[str, Any], off: bool) -> None:
        command = [python, __file__, "--serve", str(folder), "--options", json.dumps(options)]
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        env |= {"FP4_VLLM": "0"} if off else {}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, **pipes)

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"the engine ended with status {self.process.wait()}; its messages are above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, prompts: list[list[int]], new: int, best: int = 0, kernels: bool = False) -> dict[str, Any]:
        asked = {"prompts": prompts, "new": new, "best": best, "kernels": kernels}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


# --- the benchmark ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="qwen3-30b,eight")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--options", default="{}", help="more options of vllm.LLM, in JSON")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engines: dict[str, dict[str, str]] = GPU if device == "cuda" else CPU
    base = next(iter(engines))
    if args.again:
        engines = engines | {"again": engines[base]}
    given = {"max_model_len": 2048, **json.loads(args.options)}
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory() as there, contextlib.ExitStack() as stack:
            make_folders(Path(there), model, args.layers, device)
            started = {}
            for name, what in engines.items():
                options = given | {k: v for k, v in what.items() if k != "folder"}
                off = what is engines[base]
                started[name] = Engine(args.python, Path(there) / what["folder"], options, off)
                stack.callback(started[name].close)
            for engine in started.values():
                record.ELSEWHERE.update(engine.answer()["versions"])
            batches = [int(batch) for batch in args.batches.split(",")]
            for batch in batches:
                yield from of_batch(started, model, batch, args)
            if device == "cuda":  # last, because a profiler may slow what is measured after it
                for batch in dict.fromkeys(batches):
                    yield from of_kernels(started, model, batch, args)


def of_batch(
    engines: dict[str, Engine], model: str, batch: int, args: argparse.Namespace
) -> Iterator[record.Row]:
    decode: dict[str, list[float]] = {name: [] for name in engines}
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    prompts = prompts_of(model, batch, args.length)
    names = list(engines)
    for i in range(-WARM, args.rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            first = engines[name].ask(prompts, 1)["s"]
            whole = engines[name].ask(prompts, 1 + args.new)["s"]
            if i >= 0:
                prefill[name].append(first)
                decode[name].append((whole - first) / args.new)
    base = names[0]
    answers = {name: engine.ask(prompts, 1 + args.new, best=BEST) for name, engine in engines.items()}
    for name in names:
        ratios = [a / b for a, b in zip(decode[base], decode[name])]
        firsts = [a / b for a, b in zip(prefill[base], prefill[name])]
        yield {
            "table": "engine",
            "model": model,
            "layers": args.layers if model != "demo" else 3,
            "batch": batch,
            "engine": name,
            "decode_tokens_s": batch / statistics.median(decode[name]),
            "speedup": statistics.median(ratios),
            "prefill_ms": statistics.median(prefill[name]) * 1e3,
            "prefill_speedup": statistics.median(firsts),
            **compared(answers[base], answers[name]),
        }


def of_kernels(
    engines: dict[str, Engine], model: str, batch: int, args: argparse.Namespace
) -> Iterator[record.Row]:
    """Yields the GPU's times of a decoding step. Prints the longest kernels to stderr."""
    prompts = prompts_of(model, batch, args.length)
    for name, engine in engines.items():
        first, whole = (engine.ask(prompts, n, kernels=True)["gpu_us"] for n in (1, 1 + args.new))
        step = {kernel: (us - first.get(kernel, 0.0)) / args.new for kernel, us in whole.items()}
        launched = {what: step.pop(what, 0.0) for what in (GRAPHS, LAUNCHES)}
        for kernel, us in sorted(step.items(), key=lambda pair: -pair[1])[:LONGEST]:
            print(f"    {us:8.1f} us  {kernel[:90]}", file=sys.stderr)
        yield {
            "table": "gpu", "model": model, "batch": batch, "engine": name,
            "gpu_ms": sum(step.values()) / 1e3, **launched,
        }  # fmt: skip


def compared(base: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """Returns how many greedy tokens are equal, and how sure the first process was of those that are not."""
    same = [x == y for a, b in zip(base["tokens"], other["tokens"]) for x, y in zip(a, b)]
    gaps, drift = [], [0.0]
    for a, b, first, second in zip(base["tokens"], other["tokens"], base["best"], other["best"]):
        for x, y, here, there in zip(a, b, first, second):
            if x != y:
                gaps.append(here[0][1] - dict(here).get(y, -math.inf))
                break
            runner_up = here[1][0]
            if runner_up in dict(there):
                drift.append(abs((here[0][1] - here[1][1]) - (dict(there)[x] - dict(there)[runner_up])))
    return {
        "same_tokens": sum(same) / len(same),
        "differing": len(gaps),
        "gap": None if math.inf in gaps else max(gaps, default=0.0),
        "drift": max(drift),
        "median_gap": statistics.median(s[0][1] - s[1][1] for text in base["best"] for s in text),
    }


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asked = record.parser_of(__doc__, add_arguments).parse_args()
        serve(asked.serve, json.loads(asked.options))
    else:
        record.main(__doc__, add_arguments, rows)
