"""Runs a transformers Mixture-of-Experts model that is larger than the GPU: experts stay in host memory, and
tokens are streamed.

    python examples/larger_than_the_gpu.py MODEL "The capital of France is" [--gpu-memory 20GiB]

MODEL is a folder, or a name on the hub. A folder in 4 bits is loaded directly, with a progress bar. A folder
in 16 bits is read into host memory and packed there. Without a GPU everything stays in host memory. For a
model without a tokenizer, the prompt may be token numbers: "17 4 25".
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fp4_ops
from fp4_ops.models.expert_slots import ExpertSlots


class Stream:
    """Prints the output of `generate`, token by token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown, self.begun = "", 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.begun:  # the prompt
            self.begun = time.perf_counter()
            return
        self.tokens += value.flatten().tolist()
        text = self.tokenizer.decode(self.tokens) if self.tokenizer else " ".join(map(str, self.tokens))
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = text

    def end(self) -> None:
        took = time.perf_counter() - self.begun
        print(f"\n{len(self.tokens)} tokens in {took:.2f} s, prompt included")


def load(path: str, gpu_memory: str) -> tuple[Any, Any]:
    """Returns the model, placed within the budget, and a report that says where its parts are."""
    if Path(path).is_dir() and getattr(AutoConfig.from_pretrained(path), "quantization_config", None):
        model = fp4_ops.load_checkpoint(None, path, gpu_memory=gpu_memory)
        return model, model.hf_quantizer.report
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model, fp4_ops.prepare(model, gpu_memory=gpu_memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--gpu-memory", default="20GiB")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()

    model, report = load(args.model, args.gpu_memory)
    print(report)
    numbers = all(word.isdigit() for word in args.prompt.split())
    tokenizer = None if numbers else AutoTokenizer.from_pretrained(args.model)
    if tokenizer is not None and not tokenizer(args.prompt).input_ids:
        raise SystemExit(
            f"{args.model} has no tokenizer; the prompt must be token numbers, such as '17 4 25'"
        )
    ids = torch.tensor([[*map(int, args.prompt.split())] if numbers else tokenizer(args.prompt).input_ids])
    ids = ids.to(model.device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, do_sample=False,
        streamer=Stream(tokenizer),
    )  # fmt: skip
    counters = [m.read_counters() for m in model.modules() if isinstance(m, ExpertSlots)]
    wanted, fetched = (sum(each) for each in zip(*counters)) if counters else (0, 0)
    if wanted:
        print(f"{1 - fetched / wanted:.1%} of the experts that tokens wanted were in slots")


if __name__ == "__main__":
    main()
