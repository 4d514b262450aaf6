"""batch_invariant=True: a token's bits stay the same in any batch, through every door (docs/operators.md)."""

from __future__ import annotations

import pytest
import torch
from moe_models import build, transformers
from torch import nn

import fp4_ops
from fp4_ops.backends import reader
from fp4_ops.experts.find import is_experts
from fp4_ops.experts.packed import PackedWeight
from fp4_ops.integrations.transformers.quantizer import FP4Config
from fp4_ops.meta import layouts
from fp4_ops.tensor import FP4Tensor

TOKENS, HIDDEN, LAYOUT = 120, 64, "tile16_invariant"
DTYPE = torch.float32
"""In bfloat16 most sums in another order would round to the same."""
GPU_SIZES = {"moe_intermediate_size": 64}
"""The kernels of GPUs need multiples of 64."""


def model_of(family: str = "qwen3_moe", layers: int = 1, **sizes: int) -> nn.Module:
    return build(family, DTYPE, "grouped_mm", num_hidden_layers=layers, **sizes)


def layouts_of(model: nn.Module) -> set[str]:
    packed = {m.layout for m in model.modules() if isinstance(m, PackedWeight)}
    return packed | {p.weight_layout for p in model.parameters() if isinstance(p, FP4Tensor)}


class Experts(nn.Module):
    """The experts alone, over given routes: a router in bf16 is torch's own product."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.experts = next(m for m in model.modules() if is_experts(m))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ids, weights)


def routed(tokens: int, experts: int = 8, top_k: int = 3) -> tuple[torch.Tensor, ...]:
    """x, ids and weights. Two tokens in three have the same first expert, so it has many rows."""
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    same = torch.rand(tokens) < 2 / 3
    ids[same] = torch.where(ids[same] == 1, 0, ids[same])
    ids[same, 0] = 1
    return torch.randn(tokens, HIDDEN, dtype=DTYPE), ids, torch.rand(tokens, top_k).to(DTYPE)


@torch.no_grad()
def differing(run, *inputs: torch.Tensor) -> int:
    """Returns how many of random batches give some token other bits than the batch of all."""
    whole, other = run(*inputs), 0
    count = inputs[0].shape[0]
    for size in (1, 2, 7, *torch.randint(3, count, (6,)).tolist()):
        at = torch.randperm(count)[:size]
        other += not torch.equal(run(*(t[at] for t in inputs)), whole[at])
    return other


@pytest.mark.parametrize("activation", ["auto", "bf16", "nvfp4"])
def test_a_prepared_models_experts(activation):
    model = model_of()
    report = fp4_ops.prepare(model, "nvfp4", activation, batch_invariant=True)
    assert report.layout == LAYOUT and layouts_of(model) == {LAYOUT}
    assert differing(Experts(model), *routed(TOKENS)) == 0


@pytest.mark.skipif(
    torch.ops.fp4.cpu_capability() != "amx_bf16", reason="only AMX's kernels sum float32 rows in two orders"
)
def test_without_the_option_bits_do_depend_on_the_batch():
    model = model_of()
    fp4_ops.prepare(model, "nvfp4", "bf16")
    assert differing(Experts(model), *routed(TOKENS)) > 0


def test_linear_layers_outside_the_experts_and_shared_experts():
    model = model_of("deepseek_v3", 2)
    every = dict.fromkeys(("attention", "dense", "head"), "mxfp4")
    fp4_ops.prepare(model, "nvfp4", batch_invariant=True, **every)
    assert layouts_of(model) == {LAYOUT}
    x = torch.randn(TOKENS, HIDDEN, dtype=DTYPE)
    found = [(n, m) for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), FP4Tensor)]
    assert any("shared_experts" in name for name, _ in found)
    for name, linear in found:
        rows = torch.randn(TOKENS, linear.in_features, dtype=DTYPE)
        assert differing(linear, rows) == 0, name
    assert differing(model.lm_head, x) == 0


def test_saved_and_loaded(tmp_path):
    model = model_of()
    fp4_ops.prepare(model, "nvfp4", dense="keep", attention="nvfp4", batch_invariant=True)
    model.save_pretrained(tmp_path)
    inputs = routed(TOKENS)
    with torch.no_grad():
        want = Experts(model)(*inputs)
    loaded = fp4_ops.load_checkpoint(None, tmp_path, batch_invariant=True)
    assert layouts_of(loaded) == {LAYOUT}
    assert layouts_of(fp4_ops.load_checkpoint(None, tmp_path)) == {"tile16"}
    with torch.no_grad():  # a folder stores 1 / global_scale, which rounds
        torch.testing.assert_close(Experts(loaded)(*inputs), want, rtol=1e-5, atol=1e-5)
    assert differing(Experts(loaded), *inputs) == 0


def test_while_a_folder_in_16_bits_is_loaded(tmp_path):
    model_of().save_pretrained(tmp_path)
    config = FP4Config("nvfp4", "bf16", head="nvfp4", batch_invariant=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert layouts_of(model) == {LAYOUT}
    assert differing(Experts(model), *routed(TOKENS)) == 0


def test_the_models_choice_counts_for_a_state_dict_and_for_a_new_device():
    plain, invariant = model_of(), model_of()
    fp4_ops.prepare(plain)
    fp4_ops.prepare(invariant, batch_invariant=True)
    memory = next(m for m in invariant.modules() if isinstance(m, PackedWeight)).packed.data_ptr()
    invariant.load_state_dict(plain.state_dict())
    assert layouts_of(invariant) == {LAYOUT} and layouts_of(plain) == {"tile16"}
    first = next(m for m in invariant.modules() if isinstance(m, PackedWeight))
    assert first.packed.data_ptr() == memory
    first.set_layout("tile16")  # the same bytes
    assert first.packed.data_ptr() == memory and first.layout == "tile16"
    for weight in first.shared_layout.weights:
        weight.set_layout("plain")  # as on the way to another device
    assert first.shared_layout.settle() == "" and layouts_of(invariant) == {LAYOUT}


class Chosen(Experts):
    """Experts that a row of scores chooses, without a product, so that only fp4::moe sums."""

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weights, ids = scores.topk(3)
        return self.experts(x, ids, weights)


def test_compiled_from_16_bits():
    options = {"batch_invariant": True, "activation": "bf16"}
    model = Chosen(model_of())
    scores = torch.rand(TOKENS, 8)
    scores[: TOKENS * 2 // 3, 1] += 1
    inputs = torch.randn(TOKENS, HIDDEN, dtype=DTYPE), scores.to(DTYPE)
    with torch.no_grad():
        sites = fp4_ops.explain(model, *inputs, options=options).sites
    assert [(s.op, s.layout) for s in sites] == [("fp4::moe", LAYOUT)]
    compiled = torch.compile(model, backend="fp4", options=options, dynamic=True)
    assert differing(compiled, *inputs) == 0


def test_compiled_over_4_bit_linears_that_were_prepared():
    model = model_of()
    fp4_ops.prepare(model, attention="nvfp4", batch_invariant=True)
    linear = model.model.layers[0].self_attn.o_proj
    x = torch.randn(TOKENS, linear.in_features, dtype=DTYPE)
    with torch.no_grad():
        sites = fp4_ops.explain(linear, x, options={"activation": "bf16"}).sites
    assert [(s.op, s.layout) for s in sites] == [("fp4::mm", LAYOUT)]


def test_exported():
    model = model_of()
    fp4_ops.prepare(model, "mxfp4", batch_invariant=True)
    inputs = routed(TOKENS)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(Experts(model), inputs, dynamic_shapes=({0: tokens},) * 3)
    run = program.module()
    assert differing(run, *inputs) == 0
    with torch.no_grad():
        assert torch.equal(run(*inputs), Experts(model)(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "activation", "dtype", "layout"),
    [
        ("nvfp4", "auto", torch.bfloat16, "mma_bf16_invariant"),
        ("mxfp4", "auto", torch.float16, "sm90_invariant"),
        ("nvfp4", "fp8", torch.bfloat16, "sm90_invariant"),
        ("int4_g32", "auto", torch.bfloat16, "sm90_int4_invariant"),
    ],
)
def test_a_prepared_models_experts_on_a_gpu(format, activation, dtype, layout):
    if reader(layout, "cuda", 0) is None:
        pytest.skip(f"the kernels of this GPU do not read layout {layout}")
    model = model_of(**GPU_SIZES).to("cuda", dtype)
    report = fp4_ops.prepare(model, format, activation, batch_invariant=True)
    assert layouts_of(model) == {layout}, report
    x, ids, weights = (t.cuda() for t in routed(TOKENS))
    assert differing(Experts(model), x.to(dtype), ids, weights.to(dtype)) == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_from_16_bits_on_a_gpu():
    if reader("mma_bf16_invariant", "cuda", 0) is None:
        pytest.skip("no native kernels for this GPU")
    model = Chosen(model_of(**GPU_SIZES)).to("cuda", torch.bfloat16)
    scores = torch.rand(TOKENS, 8, device="cuda")
    scores[: TOKENS * 2 // 3, 1] += 1
    inputs = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda"), scores.bfloat16()
    compiled = torch.compile(model, backend="fp4", options={"batch_invariant": True}, dynamic=True)
    assert differing(compiled, *inputs) == 0


def test_a_device_without_such_kernels_is_named(monkeypatch):
    monkeypatch.setitem(layouts._preferred, "cuda", lambda: ("mma_bf16",))
    monkeypatch.delitem(layouts._reads, "cuda", raising=False)
    monkeypatch.delitem(layouts._plain, "cuda", raising=False)
    words = "batch_invariant=True, and no batch invariant kernel on cuda multiplies weights 64 x 32 in nvfp4"
    with pytest.raises(ValueError, match=words):
        layouts.preferred_layout("cuda", (64, 32), format="nvfp4", batch_invariant=True)


def test_the_option_must_be_a_bool():
    with pytest.raises(ValueError, match="batch_invariant is 1; it must be True or False"):
        fp4_ops.explain(nn.Linear(8, 8), torch.randn(2, 8), options={"batch_invariant": 1})
