"""Decodes the weights of a folder in float64, from the formats' own definitions.

It shares neither names nor arithmetic with fp4_ops.checkpoints. The dtypes and the names of the tensors
decide the format. If two formats are possible (gptq and awq, int4 and int8 in bytes), the config decides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
AWQ = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble of a word that holds column 0, 1, ..."""

Values = dict[str, Tensor]


def e2m1(packed: Tensor) -> Tensor:
    """Decodes bytes [..., K/2]. The lower k is in the low nibble."""
    raw = packed.view(torch.uint8)
    codes = torch.stack([raw & 15, raw >> 4], -1).flatten(-2).long()
    return torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiplies codes [N, K] by their scale: one number, one for each row, or [rows of blocks, columns of
    blocks]."""
    n, k = codes.shape
    if scale.numel() == 1:
        return codes * scale.reshape(())
    if scale.dim() == 4:  # ModelOpt keeps a dimension of one beside each
        scale = scale[:, 0, :, 0]
    if scale.shape in ((n,), (n, 1)):
        return codes * scale.reshape(n, 1)
    rows, columns = (1, -(-k // scale.shape[1])) if scale.shape[0] == n else (128, 128)
    return codes * scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def e8m0(raw: Tensor) -> Tensor:
    return torch.exp2(raw.view(torch.uint8).double() - 127)


def nibbles(words: Tensor, along: int) -> Tensor:
    """Unpacks int32 words of eight codes, 0 to 15, along a dimension. The first code is in the lowest
    bits."""
    shifts = torch.arange(0, 32, 4)
    codes = (words.transpose(along, -1).unsqueeze(-1) >> shifts) & 15
    return codes.flatten(-2).transpose(along, -1).double()


def awq_columns(words: Tensor) -> Tensor:
    codes = nibbles(words, 1).unflatten(1, (-1, 8))
    return codes[..., AWQ].flatten(1)


class Folder:
    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for file in path.glob("*.safetensors"):
            self.tensors |= load_file(file)
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.config: dict[str, Any] = config.get("quantization_config") or {}
        self.of4: Values = {}
        """Weights in 4 bits [N, K] by name. The name of an expert in a stack ends in # and its number."""
        self.of8: Values = {}
        for name in self.tensors:
            self._read(name)

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def _read(self, name: str) -> None:
        t = self.tensors[name]
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            scale = self.tensors[base + "_scale"]
            if t.dtype == torch.int32:
                self.of4[base] = self._pack_quantized(base, t, scale)
            elif (divisor := self.get(base + "_global_scale")) is not None:
                self.of4[base] = scaled(e2m1(t), scale.double()) / divisor.double()
            else:
                self.of4[base] = scaled(e2m1(t), e8m0(scale))
        elif name.endswith(".weight") and self.get(name + "_scale") is not None:
            scale, second = self.tensors[name + "_scale"], self.get(name + "_scale_2")
            exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
            if t.dtype == torch.uint8:
                factor = 1.0 if second is None else second.double()
                self.of4[name] = scaled(e2m1(t), e8m0(scale) if exponents else scale.double()) * factor
            elif t.dtype == torch.float8_e4m3fn:
                self.of8[name] = scaled(t.double(), e8m0(scale) if exponents else scale.double())
            elif t.dtype == torch.int8:
                groups = (self.config.get("config_groups") or {}).values()
                bits = {(g.get("weights") or {}).get("num_bits") for g in groups}
                (self.of4 if 4 in bits else self.of8)[name] = scaled(t.double(), scale.double())
        elif name.endswith(".qweight"):
            base = name.removesuffix(".qweight")
            self.of4[base] = self._words(base, t)
        elif t.dim() == 3 and t.dtype == torch.uint8 and (s := self.get(name + "_weight_scale")) is not None:
            second = self.tensors[name + "_weight_scale_2"].double().reshape(-1)
            for i, (codes, scale) in enumerate(zip(t, s)):
                value = scaled(e2m1(codes.T.contiguous()), scale.T.double()) * second[min(i, len(second) - 1)]
                self.of4[f"{name}#{i}"] = value

    def _pack_quantized(self, base: str, packed: Tensor, scale: Tensor) -> Tensor:
        n, k = self.tensors[base + "_shape"].tolist()
        codes, zeros = nibbles(packed, 1)[:, :k] - 8, self.get(base + "_zero_point")
        group = -(-k // scale.shape[1])
        index = self.get(base + "_g_idx")
        column = torch.arange(k) // group if index is None else index.long()
        if zeros is not None:
            codes = codes - (nibbles(zeros, 0)[:n] - 8)[:, column]
        return codes * scale.double()[:, column]

    def _words(self, base: str, words: Tensor) -> Tensor:
        scales, zeros = self.tensors[base + ".scales"].double(), self.tensors[base + ".qzeros"]
        packing = f"{self.config.get('quant_method')} {self.config.get('packing_format')}"
        if "awq" in packing:
            codes, zero = awq_columns(words), awq_columns(zeros)
            column = torch.arange(codes.shape[0]) // -(-codes.shape[0] // scales.shape[0])
            return ((codes - zero[column]) * scales[column]).T
        codes, zero = nibbles(words, 0), nibbles(zeros, 1)
        if self.config.get("checkpoint_format", "gptq") != "gptq_v2":  # others store zeros minus one
            zero = (zero + 1) % 16
        index = self.get(base + ".g_idx")
        group = -(-codes.shape[0] // scales.shape[0])
        column = torch.arange(codes.shape[0]) // group if index is None else index.long()
        return ((codes - zero[column]) * scales[column]).T
