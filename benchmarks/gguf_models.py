"""Writes GGUF files of models with real shapes and random blocks, for llama.cpp.

`MODELS` has models that people use: Qwen3-30B-A3B in Q4_K_M, and gpt-oss-120b with MXFP4 experts and its
other weights in Q8_0. The values of matrices have a standard deviation of about 0.02, and those of the
embedding of 1, because otherwise tokens could get the same routing in later layers. The weights of norms are
1. The file has no tokenizer, because llama-bench uses random token ids.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
POOL_BYTES = 1 << 26
"""Number of random bytes that all tensors repeat. Each tensor starts at a different one."""


@dataclass(frozen=True)
class Type:
    number: int
    values: int
    """Values in a block."""
    size: int
    """Bytes of a block."""

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        assert shape[0] % self.values == 0, shape
        return math.prod(shape) // self.values * self.size


TYPES = {
    "F32": Type(0, 1, 4), "Q8_0": Type(8, 32, 34), "Q4_K": Type(12, 256, 144), "Q6_K": Type(14, 256, 210),
    "MXFP4": Type(39, 32, 17),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    """In the file's order: the length of a row comes first."""
    type: str

    @property
    def deviation(self) -> float:
        return 1 if self.name == "token_embd.weight" else 0.02


@dataclass(frozen=True)
class Model:
    architecture: str
    bits: str
    layers: int
    numbers: dict[str, Any]

    def tensors(self, layers: int) -> Iterator[Tensor]:
        yield from (qwen3 if self.architecture == "qwen3moe" else gpt_oss)(self.numbers, layers)

    def fields(self, layers: int) -> dict[str, Any]:
        fields = {"general.architecture": self.architecture, "tokenizer.ggml.model": "no_vocab"}
        numbers = {**self.numbers, "block_count": layers}
        return fields | {f"{self.architecture}.{name}": value for name, value in numbers.items()}


MODELS = {
    "qwen3-30b": Model("qwen3moe", "Q4_K_M", 48, {
        "vocab_size": 151936, "context_length": 40960, "embedding_length": 2048, "feed_forward_length": 6144,
        "expert_feed_forward_length": 768, "expert_count": 128, "expert_used_count": 8,
        "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
        "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }),
    "gpt-oss-120b": Model("gpt-oss", "MXFP4 and Q8_0", 36, {
        "vocab_size": 201088, "context_length": 131072, "embedding_length": 2880, "feed_forward_length": 2880,
        "expert_feed_forward_length": 2880, "expert_count": 128, "expert_used_count": 4,
        "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 150000.0,
        "attention.sliding_window": 128,
    }),
}  # fmt: skip


def has_more_bits(layer: int, layers: int) -> bool:
    """Says whether Q4_K_M stores attn_v and ffn_down of a layer in Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def qwen3(n: dict[str, Any], layers: int) -> Iterator[Tensor]:
    hidden, inner, experts = n["embedding_length"], n["expert_feed_forward_length"], n["expert_count"]
    dim = n["attention.key_length"]
    q, kv = n["attention.head_count"] * dim, n["attention.head_count_kv"] * dim
    yield Tensor("token_embd.weight", (hidden, n["vocab_size"]), "Q4_K")
    yield Tensor("output_norm.weight", (hidden,), "F32")
    yield Tensor("output.weight", (hidden, n["vocab_size"]), "Q6_K")
    for i in range(layers):
        larger = "Q6_K" if has_more_bits(i, layers) else "Q4_K"
        for name, shape, kind in (
            ("attn_norm", (hidden,), "F32"),
            ("attn_q", (hidden, q), "Q4_K"),
            ("attn_k", (hidden, kv), "Q4_K"),
            ("attn_v", (hidden, kv), larger),
            ("attn_q_norm", (dim,), "F32"),
            ("attn_k_norm", (dim,), "F32"),
            ("attn_output", (q, hidden), "Q4_K"),
            ("ffn_norm", (hidden,), "F32"),
            ("ffn_gate_inp", (hidden, experts), "F32"),
            ("ffn_gate_exps", (hidden, inner, experts), "Q4_K"),
            ("ffn_up_exps", (hidden, inner, experts), "Q4_K"),
            ("ffn_down_exps", (inner, hidden, experts), larger),
        ):
            yield Tensor(f"blk.{i}.{name}.weight", shape, kind)


def gpt_oss(n: dict[str, Any], layers: int) -> Iterator[Tensor]:
    hidden, inner, experts = n["embedding_length"], n["expert_feed_forward_length"], n["expert_count"]
    heads, dim = n["attention.head_count"], n["attention.key_length"]
    q, kv = heads * dim, n["attention.head_count_kv"] * dim
    yield Tensor("token_embd.weight", (hidden, n["vocab_size"]), "Q8_0")
    yield Tensor("output_norm.weight", (hidden,), "F32")
    yield Tensor("output.weight", (hidden, n["vocab_size"]), "Q8_0")
    for i in range(layers):
        for name, shape, kind in (
            ("attn_q", (hidden, q), "Q8_0"),
            ("attn_k", (hidden, kv), "Q8_0"),
            ("attn_v", (hidden, kv), "Q8_0"),
            ("attn_output", (q, hidden), "Q8_0"),
            ("ffn_gate_inp", (hidden, experts), "F32"),
            ("ffn_gate_exps", (hidden, inner, experts), "MXFP4"),
            ("ffn_up_exps", (hidden, inner, experts), "MXFP4"),
            ("ffn_down_exps", (inner, hidden, experts), "MXFP4"),
        ):
            yield Tensor(f"blk.{i}.{name}.weight", shape, kind)
            yield Tensor(f"blk.{i}.{name}.bias", shape[1:], "F32")
        for name, size in (("attn_norm", hidden), ("post_attention_norm", hidden), ("attn_sinks", heads)):
            yield Tensor(f"blk.{i}.{name}.weight", (size,), "F32")


def pool(kind: str, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Returns random blocks of a type as bytes. Their scales give the values a standard deviation."""
    type = TYPES[kind]
    count = POOL_BYTES // type.size
    if kind == "F32":
        return rng.normal(0, deviation, count).astype("<f4").view(np.uint8)
    blocks = rng.integers(0, 256, (count, type.size), np.uint8)
    scale = lambda value: np.frombuffer(np.array(value * deviation, "<f2").tobytes(), np.uint8)  # noqa: E731
    if kind == "Q8_0":
        blocks[:, :2] = scale(0.0135)
    elif kind == "Q4_K":  # a scale and a minimum: 7.5 minima centre the 16 codes
        blocks[:, :2], blocks[:, 2:4] = scale(0.004), scale(0.03)
    elif kind == "Q6_K":
        blocks[:, -2:] = scale(7.3e-4)
    else:
        assert deviation == 0.02
        blocks[:, 0] = rng.integers(119, 121, count)
    return blocks.reshape(-1)


def encode(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def fill(tensor: Tensor, source: np.ndarray, first: int, target: np.ndarray) -> None:
    """Fills a tensor with the blocks of the pool from the first on, or with ones."""
    if "norm" in tensor.name:
        target.view("<f4")[:] = 1
        return
    at, done = first * TYPES[tensor.type].size % len(source), 0
    while done < len(target):
        part = source[at:][: len(target) - done]
        target[done : done + len(part)] = part
        done, at = done + len(part), 0


def write(path: Path, model: Model, layers: int, seed: int = 0) -> int:
    """Writes a file and returns its size. Threads fill its pages, so that 60 GB take seconds in memory."""
    tensors, fields = list(model.tensors(layers)), model.fields(layers)
    sizes = [TYPES[t.type].bytes_of(t.shape) for t in tensors]
    starts = [0, *itertools.accumulate(padded(s) for s in sizes)]
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    head += [text(name) + encode(value) for name, value in fields.items()]
    for t, start in zip(tensors, starts):
        dims = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        head.append(text(t.name) + dims + struct.pack("<IQ", TYPES[t.type].number, start))
    header = b"".join(head)
    begin = padded(len(header))
    rng = np.random.default_rng(seed)
    kinds = sorted({(t.type, t.deviation) for t in tensors})
    pools = {kind: pool(*kind, rng) for kind in kinds}
    first = rng.integers(0, 1 << 20, len(tensors)).tolist()
    with path.open("w+b") as file:
        file.truncate(begin + starts[-1])
        with mmap.mmap(file.fileno(), 0) as pages:
            data = np.frombuffer(pages, np.uint8)
            data[: len(header)] = np.frombuffer(header, np.uint8)
            targets = [data[begin + start :][:size] for start, size in zip(starts, sizes)]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                list(
                    threads.map(
                        lambda t, at, to: fill(t, pools[t.type, t.deviation], at, to), tensors, first, targets
                    )
                )
            del data, targets
    return begin + starts[-1]
