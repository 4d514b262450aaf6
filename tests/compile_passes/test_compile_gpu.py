"""The backend on an NVIDIA GPU: CUDA graphs, generate(), changed routing and changed weights at replay."""

from __future__ import annotations

import pytest
import torch
from moe_models import Block, build, fake_quantised_model, relative_error, that_answers, token_errors

import fp4_ops
from fp4_ops.backends import quantises_int8
from fp4_ops.compile_passes.neighbours import topk

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_replays_follow_routing_and_weights(form, mode):
    block = Block(form, dtype=torch.bfloat16).cuda()
    compiled = torch.compile(block, backend="fp4", mode=mode)
    with torch.inference_mode():
        for step in range(6):
            x = torch.randn(8, Block.H, dtype=torch.bfloat16, device="cuda")
            if step == 4:
                block.w13.mul_(-0.5)  # recorded graphs must see the new packed weights
            typical, whole = token_errors(compiled(x).clone(), block.twin()(x))
            # Of 400 tokens, one has two equal scores in bfloat16, of which either may be chosen.
            assert typical < 1.5e-2 and whole < 0.9, (typical, whole)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_generate_with_cuda_graphs(family):
    """transformers compiles decode steps with mode="reduce-overhead" and switches them to batched_mm."""
    model = fake_quantised_model(that_answers(family)).cuda()
    ids = torch.randint(1, 128, (2, 5), device="cuda")
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    want = model.generate(ids, **options)
    config = transformers.CompileConfig(backend="fp4")
    got = model.generate(ids, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(got, want)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_routers_without_topk(mode):
    """A prepared model's routers run torch's topk no more; the report says what runs, the answer stays."""
    model = build("qwen3_moe", torch.float32, "grouped_mm").cuda()
    fp4_ops.prepare(model)
    compiled = torch.compile(model, backend="fp4", mode=mode)
    with torch.no_grad():
        for _ in range(4):
            ids = torch.randint(1, 128, (2, 5), device="cuda")
            got = compiled(ids, use_cache=False).logits.clone()
            assert relative_error(got, model(ids, use_cache=False).logits) < 1e-4
        report = fp4_ops.explain(model, ids, use_cache=False)
        with torch.profiler.profile() as profile:
            compiled(ids, use_cache=False)
    runs = "fp4::top_experts" if topk.has_kernel(ids.device) else "rounds of a maximum"
    assert f"2 topk of 3 in 8 became {runs}" in str(report)
    assert not any("topk" in event.key.lower() for event in profile.key_averages())


def test_int8_is_refused_by_name():
    if quantises_int8("cuda", "mma_bf16"):
        pytest.skip("this GPU has kernels for int8 rows")
    compiled = torch.compile(Block("batched_mm").cuda(), backend="fp4", options={"activation": "int8"})
    with torch.no_grad(), pytest.raises(Exception, match="activation='int8' needs the Mma kernels"):
        compiled(torch.randn(2, Block.H, device="cuda"))
