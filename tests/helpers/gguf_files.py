"""Writes GGUF files of tiny models byte by byte from the format's description, and computes the values of
their experts.

Names, orders and metadata are those of llama.cpp's converter. They are repeated here, so that a mistake in
the tables of fp4_ops.checkpoints.gguf is found.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import torch
from checkpoint_samples import E2M1, e8m0_values
from torch import Tensor, nn

TYPE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ2_XXS": 16,
        "BF16": 30, "MXFP4": 39, "NVFP4": 40}  # fmt: skip
SIZE = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210),
        "IQ2_XXS": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36)}  # fmt: skip
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Stored = tuple[str, tuple[int, ...], bytes]
"""A tensor: its type, its shape with the slowest dimension first, its bytes."""


def _text(s: str) -> bytes:
    return struct.pack("<Q", len(s.encode())) + s.encode()


def _value(v: Any) -> bytes:
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + _text(v)
    if v and isinstance(v[0], str):
        return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(_text, v))
    return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Stored], version: int = 3) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    offset, data = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        header += (
            _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        )
        header += struct.pack("<IQ", TYPE[kind], offset)
        data += raw + bytes(-len(raw) % 32)
        offset = len(data)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def plain(tensor: Tensor, kind: str = "F32") -> Stored:
    return kind, tuple(tensor.shape), raw(tensor.detach().to(_DTYPES[kind]))


def q8_0(tensor: Tensor) -> tuple[Stored, Tensor]:
    """Return a tensor in Q8_0, and its float64 values."""
    blocks = tensor.detach().float().unflatten(-1, (-1, 32))
    d = (blocks.abs().amax(-1, True) / 127).half()
    codes = (blocks / d.float()).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    data = torch.cat([d.view(torch.uint8), codes.view(torch.uint8)], -1)
    values = (codes.double() * d.double()).flatten(-2)
    return ("Q8_0", tuple(tensor.shape), raw(data)), values


def experts(kind: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Return random blocks, uint8 [..., blocks, bytes], and their float64 values [..., K]."""
    *rows, k = shape
    block, size = SIZE[kind]
    data = torch.randint(0, 256, (*rows, k // block, size), dtype=torch.uint8)
    if kind in ("Q4_0", "Q4_1"):
        scales = (torch.rand(*rows, k // block, size // 2 - 8) * 0.02 + 0.001).half()
        data[..., : size - 16] = scales.view(torch.uint8)
        codes = torch.cat([data[..., size - 16 :] & 15, data[..., size - 16 :] >> 4], -1).double()
        values = codes * scales[..., :1].double()
        values = (
            values - 8 * scales[..., :1].double() if kind == "Q4_0" else values + scales[..., 1:].double()
        )
    elif kind == "MXFP4":
        data[..., 0] = torch.randint(117, 124, data.shape[:-1])
        codes = torch.cat([data[..., 1:] & 15, data[..., 1:] >> 4], -1).long()
        values = _e2m1(codes) * e8m0_values(data[..., :1])
    else:
        assert kind == "NVFP4"
        scales = (torch.rand(*rows, k // block, 4) * 0.2 + 0.02).to(torch.float8_e4m3fn)
        data[..., :4] = scales.view(torch.uint8)
        parts = data[..., 4:].unflatten(-1, (4, 8))
        codes = torch.cat([parts & 15, parts >> 4], -1).long()
        values = (_e2m1(codes) * scales.double()[..., None]).flatten(-2)
    return data, values.flatten(-2)


def _e2m1(codes: Tensor) -> Tensor:
    return torch.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7])


_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{m}_proj": f"ffn_{m}" for m in ("gate", "up", "down")},
    **{f"mlp.shared_expert{s}.{m}_proj": f"ffn_{m}_shexp" for s in ("", "s") for m in ("gate", "up", "down")},
}  # fmt: skip
_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}  # fmt: skip


def _name(arch: str, name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    match = re.match(r"model\.layers\.(\d+)\.(.*)$", name)
    assert match, name
    layer, rest = match.groups()
    if rest.endswith("e_score_correction_bias"):
        return f"blk.{layer}.exp_probs_b.bias"
    if rest == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    module, _, suffix = rest.rpartition(".")
    found = _LAYER[module]
    if found == "ffn_norm" and arch in ("gpt-oss", "glm4moe"):
        found = "post_attention_norm"
    return f"blk.{layer}.{found}.{suffix}"


def _permuted(w: Tensor, heads: int) -> Tensor:
    """Put the rows of q or k into llama.cpp's order."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def metadata_of(arch: str, c: Any) -> dict[str, Any]:
    """Return the metadata that describe a config."""
    heads = c.num_attention_heads
    own = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "expert_used_count": c.num_experts_per_tok,
        "expert_count": next(
            getattr(c, n) for n in ("num_local_experts", "n_routed_experts", "num_experts") if hasattr(c, n)
        ),
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }  # fmt: skip
    head = getattr(c, "head_dim", None) or c.hidden_size // heads
    if arch == "llama":
        own["rope.dimension_count"] = head
    elif arch == "deepseek2":
        own |= {
            "attention.q_lora_rank": c.q_lora_rank, "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.key_length": c.qk_nope_head_dim + c.qk_rope_head_dim,
            "attention.value_length": c.v_head_dim,
            "rope.dimension_count": c.qk_rope_head_dim, "leading_dense_block_count": c.first_k_dense_replace,
            "expert_shared_count": c.n_shared_experts, "expert_weights_scale": c.routed_scaling_factor,
            "expert_weights_norm": c.norm_topk_prob, "expert_group_count": c.n_group,
            "expert_group_used_count": c.topk_group,
            "expert_gating_func": 2 if c.model_type == "deepseek_v3" else 1,
        }  # fmt: skip
    else:
        own["attention.key_length"] = head
    if arch == "glm4moe":
        own |= {
            "rope.dimension_count": int(head * c.rope_parameters["partial_rotary_factor"]),
            "leading_dense_block_count": c.first_k_dense_replace, "expert_shared_count": c.n_shared_experts,
            "expert_weights_scale": c.routed_scaling_factor, "expert_weights_norm": c.norm_topk_prob,
        }  # fmt: skip
    if arch == "gpt-oss":
        own["attention.sliding_window"] = c.sliding_window
    return {
        "general.architecture": arch, "general.name": "tiny", "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": [1, 2], **{f"{arch}.{key}": value for key, value in own.items()},
    }  # fmt: skip


def tensors_of(
    arch: str, model: nn.Module, kinds: dict[str, str], dense: str = "F32", split_mla: bool = False
) -> dict[str, Stored]:
    """Return a model's tensors with random experts, and give `model` the values of these experts.

    kinds: ggml's type of "gate", "up" and "down". dense: ggml's type of matrices outside of experts.
    """
    c: Any = model.config
    found: dict[str, Stored] = {}
    with torch.no_grad():
        for name, p in model.state_dict().items():
            if name == "lm_head.weight" and c.tie_word_embeddings:
                continue
            if ".experts." in name:
                found |= _experts(arch, name, p, kinds)
                continue
            value = p
            gguf = _name(arch, name)
            quantised = dense == "Q8_0" and p.dim() == 2 and p.shape[-1] % 32 == 0 and "inp" not in gguf
            if quantised:  # in the order of the model, because blocks are inside a row
                p.copy_(q8_0(p)[1])
            if arch == "llama" and ("attn_q." in gguf or "attn_k." in gguf):
                value = _permuted(p, c.num_attention_heads if "attn_q." in gguf else c.num_key_value_heads)
            if "gate_inp_shexp" in gguf:
                value = p.flatten()
            if split_mla and "attn_kv_b" in gguf:
                k, v = p.unflatten(0, (c.num_attention_heads, -1)).split(
                    [c.qk_nope_head_dim, c.v_head_dim], 1
                )
                found[gguf.replace("kv_b", "k_b")] = plain(k.transpose(1, 2))
                found[gguf.replace("kv_b", "v_b")] = plain(v)
                continue
            found[gguf] = (
                q8_0(value)[0]
                if quantised
                else plain(value, "F32" if dense == "Q8_0" or p.dim() < 2 else dense)
            )
            if not quantised and dense in _DTYPES and p.dim() > 1:
                p.copy_(p.to(_DTYPES[dense]))
    return found


def _experts(arch: str, name: str, p: Tensor, kinds: dict[str, str]) -> dict[str, Stored]:
    layer = name.split(".")[2]
    start = f"blk.{layer}.ffn_"
    turned = arch == "gpt-oss"
    if name.endswith("_bias"):
        parts = {"gate": p[:, ::2], "up": p[:, 1::2]} if "gate_up" in name else {"down": p}
        return {f"{start}{m}_exps.bias": plain(part) for m, part in parts.items()}
    matrices = p.transpose(1, 2) if turned else p
    if "down" in name:
        places = {"down": matrices}
    elif turned:
        places = {"gate": matrices[:, ::2], "up": matrices[:, 1::2]}
    else:
        places = dict(zip(("gate", "up"), matrices.chunk(2, 1)))
    found: dict[str, Stored] = {}
    for matrix, place in places.items():
        kind = kinds[matrix]
        if kind in _DTYPES:
            found[f"{start}{matrix}_exps.weight"] = plain(place, kind)
            place.copy_(place.to(_DTYPES[kind]))
            continue
        if kind == "Q8_0":
            stored, values = q8_0(place)
        else:
            data, values = experts(kind, *place.shape)
            stored = kind, tuple(place.shape), raw(data)
        if kind == "NVFP4":
            second = torch.tensor([0.5, 0.25]).repeat(len(place))[: len(place)]
            values = values * second.double()[:, None, None]
            found[f"{start}{matrix}_exps.scale"] = plain(second)
        found[f"{start}{matrix}_exps.weight"] = stored
        place.copy_(values)
    return found
