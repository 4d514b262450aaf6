"""Models for tests of the compiler: tiny models of the families, and a block with one change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import TRANSPOSED
from recorder import Recorder as Recorder
from recorder import fake_quantised
from recorder import relative_error as relative_error
from recorder import token_errors as token_errors
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")  # registers grouped_mm_fallback

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def config(family: str, **changes: Any) -> Any:
    """Make a config with two layers, 4 or 8 experts, hidden size 64 and unusual intermediate sizes."""
    t = transformers
    c = {**_COMMON, **changes}
    if family == "mixtral":
        return t.MixtralConfig(**c, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
    if family == "qwen3_moe":
        return t.Qwen3MoeConfig(
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 48, **c},
            head_dim=16,
            num_experts=8,
            norm_topk_prob=True,
        )
    if family == "olmoe":
        return t.OlmoeConfig(**c, intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    if family == "gpt_oss":
        return t.GptOssConfig(
            **c, head_dim=16, intermediate_size=80, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=16, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
    assert family == "deepseek_v3"
    return t.DeepseekV3Config(
        **{**c, "num_key_value_heads": 4}, moe_intermediate_size=32, intermediate_size=64, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip


def build(family: str, dtype: torch.dtype, implementation: str, **changes: Any) -> nn.Module:
    """Make a model with random weights and biases. transformers initialises biases with zeros."""
    model = transformers.AutoModelForCausalLM.from_config(config(family, **changes), dtype=dtype).eval()
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 3 or "bias" in name:
                p.normal_(0, 0.1)
    return model


def that_answers(family: str, **changes: Any) -> nn.Module:
    """Return a model that continues different prompts differently: its embeddings have size one.

    transformers draws embeddings of size 0.02. Biases may be much larger, and then all prompts have the same
    continuation.
    """
    model = build(family, torch.float32, "grouped_mm", **changes)
    nn.init.normal_(model.get_input_embeddings().weight)
    return model


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, _COMMON["vocab_size"], (batch, length))


def fake_quantised_model(model: nn.Module, format: str = "nvfp4") -> nn.Module:
    """Make a float32 copy whose expert weights are the values of the packed weights."""
    transposed = type(model).__name__.startswith("GptOss")
    twin = copy.deepcopy(model).float()
    with torch.no_grad():
        for p, original in zip(twin.parameters(), model.parameters(), strict=True):
            if p.dim() == 3:
                p.copy_(fake_quantised(original, format, transposed))
    return twin


def exact(family: str, model: nn.Module) -> nn.Module:
    """Make a copy in the same dtype whose expert weights are the values of the packed weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            if p.dim() == 3 and "experts" in name:
                p.copy_(fake_quantised(p, "nvfp4", family in TRANSPOSED))
    return twin


class Logits(nn.Module):
    """Maps ids to logits without a cache, as programs export a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


class Block(nn.Module):
    """A router and experts like transformers' grouped_mm and batched_mm, with one change, `changed`."""

    E, K, H, I = 6, 2, 32, 48  # noqa: E741

    def __init__(self, form: str, changed: str = "", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form, self.changed = form, changed
        self.router = nn.Parameter(torch.randn(self.E, self.H, dtype=dtype))
        self.w13 = nn.Parameter(torch.randn(self.E, 2 * self.I, self.H, dtype=dtype) / self.H**0.5)
        self.w2 = nn.Parameter(torch.randn(self.E, self.H, self.I, dtype=dtype) / self.I**0.5)

    def forward(self, x: torch.Tensor) -> Any:
        scores, ids = torch.topk(torch.softmax(x @ self.router.T, -1), self.K)
        return (self.grouped if self.form == "grouped_mm" else self.batched)(x, ids, scores)

    def is_(self, *names: str) -> bool:
        return self.changed in names

    def activation(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        if self.is_("gate is the second half"):
            gate, up = up, gate
        if self.is_("alpha"):
            return gate * torch.sigmoid(1.5 * gate) * up
        if self.is_("silu spelled out"):
            return gate * torch.sigmoid(gate) * up
        if self.is_("gelu"):
            return nn.functional.gelu(gate) * up
        if self.is_("gelu tanh"):
            return up * nn.functional.gelu(gate, approximate="tanh")
        if self.is_("up offset"):
            return nn.functional.silu(gate) * (up + 1)
        if self.is_("up is clamped"):
            return nn.functional.silu(gate) * up.clamp(-1, 1)
        return nn.functional.silu(gate) * up

    def product(self, a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        op = torch._grouped_mm if a.dtype == torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback
        return op(a, w.transpose(-2, -1), offs=offs)

    def offsets(self, ids: torch.Tensor) -> torch.Tensor:
        top = {"histc range": self.E + 3, "histc to E": self.E}.get(self.changed, self.E - 1)
        return torch.cumsum(torch.histc(ids.float(), bins=self.E, min=0, max=top), 0, dtype=torch.int32)

    def grouped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        flat, k = ids.reshape(-1), self.K
        sorted_ids, perm = torch.sort(flat, descending=self.is_("descending"))
        counted = (flat + 1) % self.E if self.is_("offs of other ids") else sorted_ids
        offs = self.offsets(counted)
        mask = (sorted_ids >= self.E).unsqueeze(-1)
        a = (
            x[torch.arange(perm.numel(), device=x.device) // k]
            if self.is_("rows not sorted")
            else x[perm // k]
        )
        if self.is_("expert-parallel masks"):
            a = a.masked_fill(mask, 0.0)
        if self.is_("weight is written to"):
            self.w13.data.mul_(1.0)
        h = self.product(a, self.w13, offs)
        if self.is_("expert-parallel masks"):
            h = h.masked_fill(mask, 0.0)
        if self.is_("another mask"):
            h = h.masked_fill((sorted_ids >= self.E - 1).unsqueeze(-1), 0.0)
        act = self.activation(h)
        if self.is_("weight is written to later"):
            self.w13.data.mul_(1.0)
        other = (
            self.offsets((sorted_ids + 1) % self.E).sort()[0] if self.is_("down routes otherwise") else offs
        )
        y = self.product(act, self.w2, other)
        if self.is_("expert-parallel masks"):
            y = y.masked_fill(mask, 0.0)
        if self.is_("bias that is no expert's"):
            y = y + x.mean(0)
        flat_weights = weights.reshape(-1)
        y = y * (flat_weights if self.is_("weights not sorted") else flat_weights[perm]).unsqueeze(-1)
        if self.is_("rows scaled twice"):
            y = y * flat_weights[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.numel(), device=x.device)
        if self.is_("argsort inverse"):
            inverse = perm.argsort()
        y = y[perm if self.is_("permuted again") else inverse]
        out = y.view(x.shape[0], k, -1).sum(dim=0 if self.is_("sum over tokens") else 1)
        return (out, h) if self.is_("gate/up is returned too") else (out, y) if self.is_("rows too") else out

    def batched(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat, k = ids.reshape(-1), self.K
        if self.is_("clamped ids"):
            flat = flat.clamp(0, self.E - 1)
        if self.is_("ids from the end"):
            flat = flat - self.E
        a = x.repeat(k, 1) if self.is_("rows in another order") else x.repeat_interleave(k, 0)
        if self.is_("weight is written to"):
            self.w13.data.mul_(1.0)
        h = torch.bmm(self.w13[flat], a.unsqueeze(-1)).squeeze(-1)
        down = (flat + 1) % self.E if self.is_("down routes otherwise") else flat
        y = torch.bmm(self.w2[down], self.activation(h).unsqueeze(-1)).squeeze(-1)
        if self.is_("rows scaled twice"):
            y = y * flat.unsqueeze(-1)
        y = y * weights.reshape(-1).unsqueeze(-1)
        return y.view(x.shape[0], k, -1).sum(1)

    def twin(self, format: str = "nvfp4") -> Block:
        """Make the same module with the values of the packed weights."""
        twin = copy.deepcopy(self)
        with torch.no_grad():
            for name in ("w13", "w2"):
                getattr(twin, name).copy_(fake_quantised(getattr(self, name), format))
        return twin
