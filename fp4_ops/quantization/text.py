"""Reads a text file as windows of tokens, for calibration and evaluation."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor

from ..meta.arguments import whole_number


def read_windows(
    file: str | os.PathLike[str],
    model: str | os.PathLike[str],
    vocab_size: int,
    *,
    count: int,
    length: int,
) -> Tensor:
    """Returns the text's first tokens, int64 [at most count, length], on the CPU.

    model: a folder or name whose tokenizer is used. A model of 256 tokens reads the file's
        bytes, whatever they are.

    Raises ValueError if there is no tokenizer or it belongs to another model, if the file cannot be read, is
    not UTF-8, or is shorter than one window.
    """
    if count < 1 or length < 1:
        raise ValueError(f"fp4: {count} windows of {length} tokens: both must be at least 1")
    ids = torch.tensor(_tokens(Path(file), model, vocab_size), dtype=torch.int64)
    count = min(count, len(ids) // length)
    if count == 0:
        raise ValueError(
            f"fp4: {file} has {len(ids)} tokens; one window is {length}. Give a longer text, or a smaller "
            "length"
        )
    if ids.max() >= vocab_size:
        raise ValueError(
            f"fp4: the tokenizer of {model} gives token {ids.max()}; the model has {vocab_size}, 0 to "
            f"{vocab_size - 1}"
        )
    return ids[: count * length].view(count, length)


def check_text(file: str | os.PathLike[str]) -> None:
    """Raises ValueError if the file cannot be read, before a model is loaded for it."""
    if not Path(file).is_fifo():  # whoever opens a pipe and closes it may take text away
        _bytes(Path(file), 0)


def _bytes(file: Path, most: int = -1) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise ValueError(f"fp4: {file} cannot be read: {error.strerror}") from None


def _tokens(file: Path, model: str | os.PathLike[str], vocab_size: int) -> list[int]:
    data = _bytes(file)
    if vocab_size == 256:  # a model of bytes
        return list(data)
    from transformers import AutoTokenizer

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"fp4: {file} is not UTF-8: {error}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # each kind of tokenizer raises its own errors
        raise ValueError(f"fp4: {model} has no tokenizer that can be loaded: {error}") from None
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        # some kinds are None if their files are missing
        raise ValueError(
            f"fp4: {model} has no tokenizer: {type(tokenizer).__name__} without a vocabulary. Put the "
            "tokenizer's files (tokenizer.json, tokenizer_config.json) beside its config.json"
        )
    return tokenizer(text, verbose=False).input_ids


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that calibrate."""
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="UTF-8 text for the methods that need it"
    )
    parser.add_argument(
        "--calibration-windows",
        type=whole_number(1),
        default=128,
        help="most windows of the calibration text (default: 128)",
    )
    one_or_more = whole_number(1)
    parser.add_argument("--length", type=one_or_more, default=512, help="tokens in a window (default: 512)")
    parser.add_argument(
        "--batch", type=one_or_more, default=8, help="windows that run at a time (default: 8)"
    )
