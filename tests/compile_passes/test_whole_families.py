"""Whole models of transformers' families: no graph is left to Inductor."""

from __future__ import annotations

import random

import pytest
import torch
from conftest import SEED, more
from families import FAMILIES, tiny
from moe_models import Recorder, exact, relative_error, tokens
from torch import nn

WITH_CATS_OF_SEVERAL_RANKS = ["hy_v4", more("inkling2_text"), more("deepseek_v4")]
"""Their caches join `torch.tensor([])` and tensors of four dimensions."""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(model: nn.Module, ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    out = model(ids, **kwargs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("family", WITH_CATS_OF_SEVERAL_RANKS)
def test_a_whole_model(family):
    model, recorder = tiny(family, "grouped_mm"), Recorder(activation="bf16")
    ids = tokens(2, 7)
    with torch.no_grad():
        got = run(torch.compile(model, backend=recorder), ids)
        assert relative_error(got, run(exact(family, model), ids)) < 1e-3
    assert recorder.ops, recorder.reasons


ONLY_BLOCKS = (
    *("axk2", "bailing_hybrid", "dbrx", "deepseek_v32", "glm4v_moe_text", "glm_moe_dsa", "kimi_linear"),
    *("longcat_flash", "mistral_large4_text", "nllb-moe", "qwen3_5_moe_text", "qwen4_exp_text"),
    "switch_transformers",
)
"""In these configurations, which are for blocks of experts, transformers' own models cannot run."""

REST = [f for f in FAMILIES if f not in ("hy_v4", "inkling2_text", "deepseek_v4", *ONLY_BLOCKS)]


@pytest.mark.more
@pytest.mark.parametrize("family", REST)
def test_no_pass_fails(family):
    model, recorder = tiny(family), Recorder(activation="bf16")
    kwargs = {"decoder_input_ids": tokens(1, 5)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        run(torch.compile(model, backend=recorder), tokens(2, 7), **kwargs)
    assert recorder.frames and not [f for f in recorder.frames if " failed: " in f.note]


THROUGH_INDUCTOR = (
    *("mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3", "granitemoehybrid", "jamba", "nemotron_h"),
    "qwen3_vl_moe_text",
)


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("family", random.Random(SEED).sample(THROUGH_INDUCTOR, 1))
def test_a_drawn_family_through_inductor(family):
    """As users call a model: default arguments, which make a cache; several sequences; a second length."""
    model = tiny(family)
    twin = exact(family, model)
    compiled = torch.compile(model, backend="fp4", options={"activation": "bf16"})
    with torch.no_grad():
        for length in (7, 11):
            ids = tokens(2, length)
            assert relative_error(run(compiled, ids), run(twin, ids)) < 1e-3


class Heads(nn.Module):
    """Latent attention whose projections are absorbed into the queries: a batched product for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b = nn.Linear(48, 4 * 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.softmax(-1).amax()
        return torch.einsum("thd,hdc->thc", x.view(-1, 4, 32), self.kv_b.weight.view(4, 32, 48)) * scale


NAMES = [("self_attn", []), ("heads", []), ("experts", ["fp4::grouped_mm_masked"])]


@pytest.mark.parametrize(("name", "ops"), NAMES)
def test_batched_products_of_heads_stay(name, ops):
    model, recorder = nn.Sequential(), Recorder(activation="bf16")
    model.add_module(name, Heads())
    with torch.no_grad():
        torch.compile(model, backend=recorder)(torch.randn(6, 128))
    assert recorder.ops == ops
