"""Measures perplexity and KL divergence for formats, methods and activations, with the demo model or one
trained here.

    python benchmarks/accuracy.py                        examples/demo_model, activations left as they are
    python benchmarks/accuracy.py --minutes 2.2          a 110 M Mixture-of-Experts, trained on this GPU
    python benchmarks/accuracy.py --minutes 0.1 --size tiny

The first command runs `python -m fp4_ops eval` on one half of examples/demo_model/heldout.txt, and calibrates
on the other half. The others run examples/train_moe_lm.py. `ratio` is the perplexity divided by that of the
model in bf16, `ratio_error` is its standard error, and `kl` is in nats per token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import record
import transformers  # noqa: F401  for the record's versions: other processes use it

DEMO = record.ROOT / "examples" / "demo_model"
SPLIT = 60_000
"""Bytes of the held-out text that are used for perplexity. The rest is used for calibration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, help="minutes of training; default: the demo model")
    parser.add_argument("--size", default="100m", help="size of the model that is trained")


def rows(args: argparse.Namespace) -> Iterator[record.Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from demo(Path(folder)) if args.minutes is None else trained(Path(folder), args)


def demo(folder: Path) -> Iterator[record.Row]:
    data = (DEMO / "heldout.txt").read_bytes()
    text, calibration, table = (folder / name for name in ("text", "calibration", "table.json"))
    text.write_bytes(data[:SPLIT])
    calibration.write_bytes(data[SPLIT:])
    command = [
        sys.executable, "-m", "fp4_ops", "eval", str(DEMO), "--text", str(text), "--windows", "64",
        "--activations", "bf16", "--calibration", str(calibration), "--calibration-windows", "273",
        "--json", str(table),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    yield from perplexities(json.loads(table.read_text()))


def trained(folder: Path, args: argparse.Namespace) -> Iterator[record.Row]:
    script = record.ROOT / "examples" / "train_moe_lm.py"
    options = ["--minutes", str(args.minutes), "--size", args.size, "--out", str(folder)]
    subprocess.run([sys.executable, str(script), *options], check=True, stdout=subprocess.DEVNULL)
    table = json.loads((folder / "accuracy_moe_lm.json").read_text())
    model = table["model"].partition(": {")[0]
    yield {"table": "model", "model": model, "text": table["text"], "tokens": table["tokens"]}
    yield from perplexities(table)
    yield from weight_errors(json.loads((folder / "weight_errors.json").read_text()))


def weight_errors(report: dict) -> Iterator[record.Row]:
    """Yields the signal-to-quantisation-noise ratio of the weights, over the experts of a module."""
    of = {"table": "weight errors", "format": report["format"], "method": report["method"]}
    by_matrix = itertools.groupby(report["errors"], lambda e: (e["module"], e["matrix"]))
    for (module, matrix), errors in by_matrix:
        sqnr, saturated = zip(*((e["sqnr"], e["saturated"]) for e in errors))
        yield {
            **of, "module": module, "matrix": matrix, "experts": len(sqnr), "sqnr_db_min": min(sqnr),
            "sqnr_db_median": statistics.median(sqnr), "saturated": statistics.mean(saturated),
        }  # fmt: skip


def perplexities(table: dict) -> Iterator[record.Row]:
    for row in table["rows"]:
        yield {"table": "perplexity", **row}


if __name__ == "__main__":
    record.main(__doc__, add_arguments, rows)
