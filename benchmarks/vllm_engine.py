"""Measures tokens per second of vLLM's engine with fp4_ops and with vLLM's own methods, in processes that
take turns.

    python benchmarks/vllm_engine.py [--models qwen3-30b,eight] [--layers 2] [--batches 1,8,32]

The folders have random weights in the shapes of MODELS. Their vocabulary has only 4096 tokens, so that the
layers take most of the time. `demo` is the trained model of examples/demo_model; its prompts are text that
was not used for training. On a CPU, the first process serves the folder in bf16, and the others serve the
same folder in 4 bits (only experts; experts and attention). On a GPU, all of them serve the folder in 4 bits:
the first with vLLM's own method (Marlin on Hopper), the second with `--quantization fp4_ops`.

decode_tokens_s: tokens per second of all sequences together, from two calls of `generate` that differ in the
number of new tokens. prefill_ms: the time of the call with one new token. Both are medians of --rounds
rounds. speedup: relative to the first process, the median of the rounds' ratios. same_tokens: the share of
the first process's greedy tokens that are the same. A model with random weights chooses almost by chance, so
after one different token the texts have nothing in common; `demo` is more informative. gap: at the first
difference of a text, how much larger the log probability of the first process's token was than that of its
second best token; the maximum over texts. median_gap: the median of this difference over all tokens.

--python: an interpreter of an environment with vLLM and fp4_ops (docs/serving.md); this one, if not given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
    in nvfp4."""
    from fp4_ops.checkpoints.convert import quantize_checkpoint

    if model == "demo":
        shutil.copytree(DEMO, where / "16")
    else:
        save_random_weights(where / "16", MODELS[model], layers, device)
    quantize_checkpoint(where / "16", where / "experts", device=device, progress=False)
    if device == "cpu":
        quantize_checkpoint(where / "16", where / "attention", attention="nvfp4", progress=False)


def save_random_weights(folder: Path, shape: dict[str, int], layers: int, device: str) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=shape["hidden"], num_hidden_layers=layers,
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], head_dim=128,
        num_experts=shape["experts"], num_experts_per_tok=shape["chosen"],
        moe_intermediate_size=shape["inner"], intermediate_size=shape["inner"],
        norm_topk_prob=True, max_position_embeddings=4096, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.fill_(1)
            else:
                p.normal_(0, 1 if "embed" in name else p.shape[-1] ** -0.5)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)


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
    """Answers lines of JSON: {"prompts", "new", "gaps"} -> {"s", "tokens", "gaps"}.

    The first line that it prints, once it is ready, has the versions of its packages.
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
            logprobs=2 if asked["gaps"] else None,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": p} for p in asked["prompts"]]
        start = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(a.outputs[0].token_ids) for a in answers]
        gaps = [[gap_of(step) for step in a.outputs[0].logprobs or ()] for a in answers]
        print(json.dumps({"s": seconds, "tokens": tokens, "gaps": gaps}), file=out, flush=True)


def gap_of(step: dict[int, Any]) -> float:
    """Returns the log probability of the most likely token minus that of the second."""
    first, second = sorted((p.logprob for p in step.values()), reverse=True)[:2]
    return float(first - second)


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

    def ask(self, prompts: list[list[int]], new: int, gaps: bool = False) -> dict[str, Any]:
        asked = {"prompts": prompts, "new": new, "gaps": gaps}
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
    parser.add_argument("--serve", help=argparse.SUPPRESS)


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engines = GPU if device == "cuda" else CPU
    given = {"max_model_len": 2048, **json.loads(args.options)}
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory() as there, contextlib.ExitStack() as stack:
            make_folders(Path(there), model, args.layers, device)
            started = {}
            for i, (name, what) in enumerate(engines.items()):
                options = given | {k: v for k, v in what.items() if k != "folder"}
                started[name] = Engine(args.python, Path(there) / what["folder"], options, off=i == 0)
                stack.callback(started[name].close)
            for engine in started.values():
                record.ELSEWHERE.update(engine.answer()["versions"])
            for batch in map(int, args.batches.split(",")):
                yield from of_batch(started, model, batch, args)


def of_batch(
    engines: dict[str, Engine], model: str, batch: int, args: argparse.Namespace
) -> Iterator[record.Row]:
    decode: dict[str, list[float]] = {name: [] for name in engines}
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    tokens = {}
    prompts = prompts_of(model, batch, args.length)
    for engine in engines.values():  # warm
        engine.ask(prompts, 4)
    for _ in range(args.rounds):
        for name, engine in engines.items():
            first = engine.ask(prompts, 1)["s"]
            whole = engine.ask(prompts, 1 + args.new)
            prefill[name].append(first)
            decode[name].append((whole["s"] - first) / args.new)
            tokens[name] = whole["tokens"]
    base = next(iter(engines))
    gaps = engines[base].ask(prompts, 1 + args.new, gaps=True)["gaps"]
    for name in engines:
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
            **compared(tokens[base], tokens[name], gaps),
        }


def compared(base: list[list[int]], other: list[list[int]], gaps: list[list[float]]) -> dict[str, float]:
    """Returns the share of equal greedy tokens, and the gaps of the first process at differences."""
    pairs = [list(zip(a, b)) for a, b in zip(base, other)]
    same = [x == y for pair in pairs for x, y in pair]
    first = [next((i for i, (x, y) in enumerate(pair) if x != y), None) for pair in pairs]
    at = [gap[i] for gap, i in zip(gaps, first) if i is not None]
    return {
        "same_tokens": sum(same) / len(same),
        "gap": max(at, default=0.0),
        "median_gap": statistics.median(g for gap in gaps for g in gap),
    }


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asked = record.parser_of(__doc__, add_arguments).parse_args()
        serve(asked.serve, json.loads(asked.options))
    else:
        record.main(__doc__, add_arguments, rows)
