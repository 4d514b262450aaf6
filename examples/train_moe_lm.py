"""Trains a Mixture-of-Experts language model of 110 million parameters, then measures how much accuracy it
loses in 4 bits.

    python examples/train_moe_lm.py --minutes 3 --out results      # on a GPU
    python examples/train_moe_lm.py --size tiny --minutes 0.2      # tries the script on a CPU

The text is on every machine that has Python with torch: sources and documentation of the standard library and
of site-packages. One file in fifty, chosen by a checksum of its path, is held out. The script also trains the
tokenizer (BPE). Calibration text is a part of the training text. The script prints the table of `evaluate`,
the goals, and the worst experts. It writes these files under --out:

    accuracy_moe_lm.txt, accuracy_moe_lm.json, weight_errors.json, weight_errors.png (with matplotlib)
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

from fp4_ops.quantization import METHODS, calibrate
from fp4_ops.quantization.evaluation import Evaluation, evaluate
from fp4_ops.quantization.report import error_report

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh"}
HELDOUT_SHARE = 50
END = "<|end|>"


@dataclass(frozen=True)
class Size:
    """The size of a model, and the amount of work."""

    vocabulary: int
    hidden: int
    layers: int
    experts: int
    top_k: int
    intermediate: int
    length: int
    batch: int
    text: int
    """The largest number of bytes of training text."""
    windows: int
    """The number of windows for evaluation, and also for calibration."""


SIZES = {
    "100m": Size(8192, 512, 8, 32, 4, 256, length=1024, batch=32, text=200_000_000, windows=128),
    "tiny": Size(512, 64, 2, 8, 2, 48, length=128, batch=8, text=6_000_000, windows=8),
}


def build(size: Size) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=max(1, size.hidden // 256),
        head_dim=64,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.intermediate,
        intermediate_size=size.intermediate,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=size.length,
        output_router_logits=True,  # adds the loss that keeps the experts evenly used
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def files() -> Iterator[tuple[str, str]]:
    """Yields (path, text), each text once. The order mixes packages but is always the same."""
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    found = {p: r for r in roots for p in r.rglob("*") if p.suffix in SUFFIXES}
    seen = set()
    order = sorted((zlib.crc32(p.relative_to(r).as_posix().encode()), p) for p, r in found.items())
    for checksum, path in order:
        if not path.is_file() or not 200 < path.stat().st_size < 500_000:
            continue
        data = path.read_bytes()
        content = zlib.crc32(data)
        if content not in seen:
            seen.add(content)
            yield ("heldout" if checksum % HELDOUT_SHARE == 0 else "train"), data.decode(errors="replace")


def load_tokens(size: Size) -> tuple[Tensor, Tensor, str]:
    """Returns (training tokens, held-out tokens, a line about them)."""
    texts: dict[str, list[str]] = {"train": [], "heldout": []}
    total = 0
    for split, text in files():
        texts[split].append(text)
        total += len(text)
        if total > size.text:
            break
    tokenizer = ByteLevelBPETokenizer()
    sample = texts["train"][:: max(1, total // 20_000_000)]
    tokenizer.train_from_iterator(
        sample, vocab_size=size.vocabulary, special_tokens=[END], show_progress=False
    )

    def encode(parts: list[str]) -> Tensor:
        end, out = tokenizer.token_to_id(END), []
        for start in range(0, len(parts), 1000):
            for encoding in tokenizer.encode_batch(parts[start : start + 1000]):
                out.append(torch.tensor([*encoding.ids, end], dtype=torch.int32))
        return torch.cat(out)

    train, heldout = (encode(texts[split]) for split in ("train", "heldout"))
    line = (
        f"{total / 1e6:.0f} M characters of text. {len(texts['train'])} files, {len(train) / 1e6:.1f} M "
        f"tokens to train on; held out: {len(texts['heldout'])} files, {len(heldout) / 1e6:.2f} M tokens"
    )
    return train, heldout, line


def train(model: nn.Module, tokens: Tensor, size: Size, minutes: float) -> list[str]:
    """Trains with AdamW on a float32 copy of the bfloat16 weights, with a cosine schedule over the given
    time. Returns the log."""
    device = tokens.device
    weights = list(model.parameters())
    masters = [p.detach().float() for p in weights]
    peak, log = 2e-3, []
    decay = {"params": [m for m in masters if m.dim() > 1], "weight_decay": 0.1}
    rest = {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decay, rest], lr=peak, betas=(0.9, 0.95), fused=True)
    window = torch.arange(size.length, device=device)
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            warmup = min(1.0, (step + 1) / 200)
            group["lr"] = peak * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(tokens) - size.length, (size.batch, 1), device=device)
        batch = tokens[starts + window].long()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        for master, p in zip(masters, weights):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        step += 1
        if step % 200 == 0 or step == 10:
            rate = step * batch.numel() / (time.monotonic() - start)
            log.append(f"{100 * done:3.0f} %  step {step}  loss {loss.item():.3f}  {rate:.0f} tokens/s")
            print(log[-1], flush=True)
    return log


def windows(tokens: Tensor, count: int, length: int) -> Tensor:
    """Returns `count` windows, spread evenly over the tokens."""
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return torch.stack([tokens[s : s + length] for s in starts.tolist()]).long()


def goals(table: Evaluation) -> list[str]:
    """Returns lines with the best nvfp4 results and the goals of the project."""
    rows = {(r.method, r.activations): r for r in table.rows if r.format == "nvfp4"}

    def best(calibrated: bool) -> str:
        names = [m.name for m in METHODS.values() if (m.calibration != "none") == calibrated]
        return min((n for n in names if (n, "W4A16") in rows), key=lambda n: rows[n, "W4A16"].ratio)

    lines = []
    for what, calibrated, goal in (("without", False, 1.01), ("with", True, 1.005)):
        r = rows[best(calibrated), "W4A16"]
        lines.append(f"best nvfp4 {what} calibration: {r.method} {r.ratio:.5f} (goal: at most {goal})")
    for mode in ("W4A8 fp8", "W4A8 int8"):
        lines.append(f"{mode} adds (goal: at most 0.002):")
        for (method, activations), r in rows.items():
            if activations == "W4A16":
                lines.append(f"    {method:15} {rows[method, mode].ratio - r.ratio:+.5f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--size", choices=list(SIZES), default="100m")
    parser.add_argument("--out", type=Path, default=Path("build/accuracy"))
    args = parser.parse_args()
    size = SIZES[args.size]
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    lines = [
        f"{torch.cuda.get_device_name() if device == 'cuda' else platform.processor() or 'CPU'}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    ]
    model = build(size).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    lines.append(f"Qwen3-MoE, {parameters / 1e6:.1f} M parameters: {asdict(size)}")
    train_tokens, heldout, about = load_tokens(size)
    lines.append(about)
    print("\n".join(lines), flush=True)
    log = train(model, train_tokens.to(device), size, args.minutes)
    model.config.output_router_logits = False
    model.eval()

    test = windows(heldout, size.windows, size.length).to(device)
    calibration = calibrate(
        model, windows(train_tokens, size.windows, size.length).to(device), batch=size.batch
    )
    fewest = min(int(t.min()) for t in calibration.tokens.values())
    lines += [f"trained {args.minutes} min, the last of {len(log)} log lines: {log[-1] if log else ''}"]
    lines += [f"calibration: {size.windows * size.length} tokens, the least busy expert saw {fewest}"]
    start = time.monotonic()
    table = evaluate(model, test, calibration=calibration, batch=size.batch)
    lines += ["", str(table), "", *goals(table), f"(evaluated in {time.monotonic() - start:.0f} s)"]
    report = error_report(model, "nvfp4", "search")
    lines += ["", str(report)]
    text = "\n".join(lines)
    print(text)

    (args.out / "accuracy_moe_lm.txt").write_text(text + "\n")
    about_run = {"machine": lines[0], "model": lines[1], "text": about, "log": log, **asdict(table)}
    (args.out / "accuracy_moe_lm.json").write_text(json.dumps(about_run, indent=1) + "\n")
    (args.out / "weight_errors.json").write_text(report.to_json() + "\n")
    try:
        report.save_picture(args.out / "weight_errors.png")
    except ImportError as error:
        print(error)


if __name__ == "__main__":
    main()
