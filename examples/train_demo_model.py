"""Trains the small Mixture-of-Experts language model of the demo on Python's standard library.

    python examples/train_demo_model.py --minutes 14 --out examples/demo_model

The script uses a GPU if there is one; three minutes are then enough. The model is a Qwen3-MoE of 3.9 million
parameters that reads and writes bytes. A token is a byte; servers get a tokenizer that says so. The
training text is the standard library without its tests, which every machine with Python has. One file in
twenty, chosen by a checksum of its path, is held out; `heldout.txt` is a part of these files. The files under
--out are:

    config.json, generation_config.json, model.safetensors (bfloat16), heldout.txt,
    tokenizer.json, tokenizer_config.json
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

# Folders that are left out: tests, tables, generated files, other people's packages.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3"}
SEQUENCE = 512
BATCH = {"cpu": 6, "cuda": 32}
HELDOUT_BYTES = 200_000


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        moe_intermediate_size=64,
        intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )


def is_heldout(path: str) -> bool:
    return zlib.crc32(path.encode()) % 20 == 0


def load_text() -> tuple[bytes, bytes]:
    """Returns (training text, held-out text): the standard library's sources in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p.relative_to(root) for p in root.rglob("*.py"))
    files = [f for f in files if not SKIPPED & set(f.parts)]
    train, heldout = [], []
    for file in files:
        (heldout if is_heldout(file.as_posix()) else train).append((root / file).read_bytes())
    return b"\n".join(train), b"\n".join(heldout)


def to_tokens(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that gives each byte of UTF-8 its own value as token."""
    # ByteLevel writes a byte as the character of its number if that can be seen, else as one from U+0100 on.
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in own]
    written = {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(others)}
    made = Tokenizer(models.BPE({written[b]: b for b in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def save_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    # transformers 5 writes names that transformers 4 does not know. Both know this one.
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text())
    written.pop("backend", None)
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    windows = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    losses = [model(input_ids=w, labels=w).loss for w in windows.split(8)]
    return torch.stack(losses).mean().item() / math.log(2)


def train(minutes: float, seed: int) -> tuple[torch.nn.Module, bytes]:
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    train_text, heldout_text = load_text()
    tokens, heldout = to_tokens(train_text).to(device), to_tokens(heldout_text[:HELDOUT_BYTES]).to(device)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).to(device)
    model.config.output_router_logits = True  # adds the loss that keeps the experts evenly used
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.1f} M parameters, {len(tokens) / 1e6:.1f} MB of text, {minutes} min on {device}"
    )
    window = torch.arange(SEQUENCE, device=device)

    peak = 3e-3
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        warmup = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(tokens) - SEQUENCE, (BATCH[device], 1), device=device)
        batch = tokens[starts + window]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            rate = step * batch.numel() / (time.monotonic() - start)
            print(f"{100 * done:3.0f} %  step {step}  loss {loss.item():.3f}  {rate:.0f} bytes/s", flush=True)

    model.config.output_router_logits = False
    model.eval().to(torch.bfloat16)
    print(f"held out: {bits_per_byte(model, heldout):.3f} bits per byte", flush=True)
    return model, heldout_text[:HELDOUT_BYTES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo_model")
    args = parser.parse_args()

    model, heldout = train(args.minutes, args.seed)
    model.save_pretrained(args.out)
    save_tokenizer(args.out)
    (args.out / "heldout.txt").write_bytes(heldout)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
