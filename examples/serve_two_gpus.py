"""Runs a transformers Mixture-of-Experts model on several GPUs: attention is split, experts are spread, and
tokens are streamed.

    torchrun --nproc-per-node 2 examples/serve_two_gpus.py MODEL "The capital of France is" [--new-tokens 64]

MODEL is a name on the hub or a folder, in 16 bits or in 4 bits. transformers' own plan for tensor parallelism
divides attention. The experts are in 4 bits. Each process has some whole experts, and `fp4::moe_ep` sends
tokens to them: over NVLink between the GPUs of a node, otherwise by NCCL. Without GPUs the processes run on
the CPU, with gloo. The script needs transformers 5.23. For a model without a tokenizer, the prompt may be
token numbers: "17 4 25".
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import fp4_ops

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS = ("num_attention_heads", "num_key_value_heads")


def why_not(config, ranks: int) -> str:
    """Returns why this number of processes cannot share the model, or "" if it can."""
    config = getattr(config, "text_config", config)
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 0)
    if not experts:
        return "has no experts"
    if experts % ranks:
        return f"has {experts} experts a block, which {ranks} processes cannot share equally"
    for name in HEADS:
        heads = getattr(config, name, None) or ranks
        if heads % ranks:
            return f"has {heads} heads of attention ({name}), which {ranks} processes cannot share equally"
    return ""


class Stream:
    """Receives the output of `generate`, token by token. The first process prints it."""

    def __init__(self, tokenizer, rank: int) -> None:
        self.tokenizer, self.rank = tokenizer, rank
        self.tokens: list[int] = []
        self.shown, self.start, self.first = "", 0.0, 0.0

    def put(self, value: torch.Tensor) -> None:
        if self.start == 0.0:  # the prompt
            self.start = time.perf_counter()
            return
        self.first = self.first or time.perf_counter() - self.start
        self.tokens += value.flatten().tolist()
        if self.rank != 0:
            return
        text = self.tokenizer.decode(self.tokens) if self.tokenizer else " ".join(map(str, self.tokens))
        print(text[len(self.shown) :], end="", flush=True)
        self.shown = text

    def end(self) -> None:
        seconds = time.perf_counter() - self.start
        if self.rank == 0:
            rate = (len(self.tokens) - 1) / max(seconds - self.first, 1e-9)
            print(
                f"\n[{len(self.tokens)} tokens, the first after {self.first:.2f} s, then {rate:.1f} a second]"
            )


def refuse(parser: argparse.ArgumentParser, reason: str) -> NoReturn:
    """Ends the process with a reason. torchrun repeats what is in the error file, below its own traceback."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": reason, "extraInfo": {"timestamp": int(time.time())}}
        Path(file).write_text(json.dumps({"message": message}))
    parser.error(reason)


@record  # torchrun then ends with the traceback of this process, not only with its own
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()

    if "RANK" not in os.environ:
        refuse(
            parser,
            "this process has no rank. Start it by torchrun: torchrun --nproc-per-node 2 "
            "examples/serve_two_gpus.py MODEL PROMPT",
        )
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = AutoConfig.from_pretrained(args.model)
    if reason := why_not(config, ranks):
        fit = [n for n in range(1, ranks) if not why_not(config, n)]
        advice = f"number, such as {fit[-1]}: torchrun --nproc-per-node N" if fit else "model"
        refuse(parser, f"{args.model} {reason}. Choose another {advice}")
    as_numbers = all(word.isdigit() for word in args.prompt.split())
    tokenizer = None
    if not as_numbers:
        numbers = 'Give the prompt as token numbers: "17 4 25"'
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
        except Exception as error:  # each kind of tokenizer raises its own errors
            refuse(parser, f"{args.model} has no tokenizer that can be loaded: {error}\n{numbers}")
        if not tokenizer(args.prompt).input_ids:
            # some kinds have no vocabulary if their files are missing
            refuse(parser, f"{args.model} has no tokenizer. {numbers}")
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        if device.index >= torch.cuda.device_count():
            refuse(
                parser,
                f"process {device.index} has no GPU; there are {torch.cuda.device_count()}, one for each "
                "process (torchrun --nproc-per-node)",
            )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)

    fp4_ops.register_with_transformers()
    divided = DistributedConfig(tp_size=ranks, ep_size=ranks, ep_implementation="fp4") if ranks > 1 else None
    if getattr(config, "quantization_config", None):
        model = AutoModelForCausalLM.from_pretrained(args.model, distributed_config=divided)
    else:
        dtype = torch.bfloat16 if on_gpus else "auto"
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, distributed_config=divided)
        report = fp4_ops.prepare(model)
        if rank == 0:
            print(report)
    model.eval()

    if tokenizer is None:
        ids = torch.tensor([[int(word) for word in args.prompt.split()]])
    else:
        ids = tokenizer(args.prompt, return_tensors="pt").input_ids
    stream = Stream(tokenizer, rank)
    with torch.inference_mode():
        model.generate(ids.to(device), max_new_tokens=args.new_tokens, do_sample=False, streamer=stream)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
