"""Measures how a checkpoint is quantised with calibration text, layer by layer: the time, the peak memory,
and a run that is killed half-way.

    python benchmarks/checkpoint_calibrated.py --method gptq --layers 4 --dir DIR

Makes a bf16 Qwen3-MoE with random weights in DIR (0.2 GB for each layer), whose tokens are bytes. Then it
runs `python -m fp4_ops quantize` on the model twice, with this repository's sources as text. The second run
is killed (SIGKILL) after half of the layers, and started again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import record
import torch
from checkpoint_stream import machine, run, same, weights
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fp4_ops.checkpoints.calibrated import SPOOL
from fp4_ops.meta.formats import FORMATS
from fp4_ops.quantization import METHODS

SOURCES = Path(__file__).parent.parent / "fp4_ops"


def make_source(folder: Path, layers: int) -> None:
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, moe_intermediate_size=512, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def quantize(step: str, command: list[str], out: Path, kill_after: int | None = None) -> record.Row:
    """Runs the command. kill_after: the number of finished layers after which it gets a SIGKILL."""

    def enough() -> bool:
        return any(int(f.stem[-5:]) >= kill_after for f in out.glob(f"{SPOOL}/state-*.safetensors"))

    seconds, processor, peak, text = run([*command, "-o", str(out)], None if kill_after is None else enough)
    return {
        "table": "quantize", "step": step, "seconds": seconds, "processor_seconds": processor,
        "peak_gb": peak, "said": text.partition(": ")[2].strip(),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--method", default="gptq", choices=[m for m in METHODS if METHODS[m].calibration != "none"]
    )
    parser.add_argument("--format", default="nvfp4", choices=list(FORMATS))
    parser.add_argument("--windows", type=int, default=16, help="of 256 bytes")
    parser.add_argument(
        "--dir", type=Path, required=True, help="scratch space: 0.4 GB for each layer, removed afterwards"
    )


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    source, whole, resumed, text = (args.dir / name for name in ("bf16", "whole", "resumed", "text"))
    command = [
        sys.executable, "-m", "fp4_ops", "quantize", str(source), "--format", args.format,
        "--method", args.method, "--calibration", str(text), "--length", "256",
        "--calibration-windows", str(args.windows),
    ]  # fmt: skip
    try:
        # Make it in another process, because the peak of a child process starts at the memory of its parent.
        maker = multiprocessing.get_context("spawn").Process(target=make_source, args=(source, args.layers))
        maker.start()
        maker.join()
        text.write_bytes(b"".join(f.read_bytes() for f in sorted(SOURCES.rglob("*.py"))))
        size = sum(f.stat().st_size for f in weights(source))
        yield {"table": "source", **machine(), "layers": args.layers, "gb": size / 1e9}
        yield quantize("whole", command, whole)
        yield quantize(f"killed after {args.layers // 2} layers", command, resumed, args.layers // 2)
        yield quantize("resumed", command, resumed)
        yield {"table": "result", "resumed_is": "identical" if same(whole, resumed) else "DIFFERENT"}
        assert same(whole, resumed)
    finally:
        for folder in (source, whole, resumed):
            shutil.rmtree(folder, ignore_errors=True)
        text.unlink(missing_ok=True)


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
