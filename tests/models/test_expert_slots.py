"""Models whose experts exceed the GPU: slots within a budget, the same results, and clear errors."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from moe_models import Recorder, build, tokens
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import fp4_ops
from fp4_ops.models import expert_slots, memory_plan
from fp4_ops.models.expert_slots import ExpertSlots, place_experts
from fp4_ops.models.memory_plan import plan_memory


@pytest.fixture(autouse=True)
def small_reserve_on_the_cpu(monkeypatch):
    """Budgets of tiny models need not hold a cache of keys and values. The inputs are on the CPU, so a GPU of
    this machine is not used."""
    monkeypatch.setattr(memory_plan, "RESERVE_LEAST", 1)
    monkeypatch.setattr(expert_slots, "default_device", lambda: torch.device("cpu"))


class Calls(TorchDispatchMode):
    """Names of the operators of ours that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp4":
            self.names.append(func._schema.name.removeprefix("fp4::"))
        return func(*args, **(kwargs or {}))


def budget(prepared: torch.nn.Module, share: float) -> int:
    """Bytes that leave slots for about this share of the experts."""
    plan = plan_memory(prepared, 2**40)
    return int((plan.dense_bytes + share * plan.expert_bytes) / 0.9) + 4096


def both(family: str, share: float = 0.7, activation: str = "bf16", **changes):
    """A prepared model, and the same with a budget."""
    model = build(family, torch.float32, "grouped_mm", **changes)
    other = copy.deepcopy(model)
    fp4_ops.prepare(model, "nvfp4", activation=activation)
    report = fp4_ops.prepare(other, "nvfp4", activation=activation, gpu_memory=budget(model, share))
    return model, other, report


def slots_of(model: torch.nn.Module) -> list[ExpertSlots]:
    return [m for m in model.modules() if isinstance(m, ExpertSlots)]


@pytest.mark.parametrize("activation", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_results_are_those_without_a_budget(family, activation):
    """Bit for bit; each block is one operator, and the report says what lies where."""
    model, other, report = both(family, activation=activation)
    ids = tokens(2, 5)
    with torch.no_grad(), Calls() as calls:
        got = other(input_ids=ids).logits
    assert calls.names.count("moe_slots") == 2
    with torch.no_grad():
        torch.testing.assert_close(got, model(input_ids=ids).logits, rtol=0, atol=0)
    experts, top_k = other.config.get_text_config().num_local_experts, other.config.num_experts_per_tok
    counts = {s.count for s in slots_of(other)}
    assert len(slots_of(other)) == 2 and len(counts) == 1 and top_k <= counts.pop() < experts
    assert re.search(
        rf"slots for {experts} experts in each of 2 layers; all experts .* in pinned", str(report)
    )
    assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("sequences", [1, 3])
def test_generate_gives_the_tokens_without_a_budget(sequences):
    """All logits have the same bits."""
    model, other, _ = both("qwen3_moe", share=0.5, num_local_experts=16)
    ids = tokens(sequences, 7)
    options = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 90, "do_sample": False, "pad_token_id": 0,
        "cache_implementation": "static", "custom_generate": fp4_ops.decoding_loop, "output_logits": True,
        "return_dict_in_generate": True, "disable_compile": True,
    }  # fmt: skip
    got, want = (m.generate(ids, **options) for m in (other, model))
    assert slots_of(other) and torch.equal(got.sequences, want.sequences)
    for step, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert torch.equal(a, b), step


def test_all_experts_fit():
    model, other, report = both("qwen3_moe", share=1.2)
    assert not slots_of(other) and report.memory is not None and report.memory.resident
    ids = tokens(1, 4)
    with torch.no_grad():
        torch.testing.assert_close(other(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


@pytest.mark.slow
def test_compiled():
    """The operator stays in one graph for all lengths, and explain says what lies where."""
    _, other, _ = both("qwen3_moe", num_hidden_layers=1)
    recorder = Recorder()
    compiled = torch.compile(other, backend=recorder, dynamic=True, fullgraph=True)
    counts = []
    with torch.no_grad():
        for length in (7, 4, 9):
            ids = tokens(1, length)
            want = other(input_ids=ids, use_cache=False).logits
            got = compiled(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            counts.append(recorder.compilations)
    assert len(set(counts)) == 1
    called = [n.target for n in recorder.graphs[-1].graph.nodes if n.op == "call_function"]
    assert called.count(torch.ops.fp4.moe_slots.default) == 1
    report = str(fp4_ops.explain(other, input_ids=tokens(1, 4), use_cache=False))
    assert "fp4::moe_slots" in report and "slots for 8 experts in each of 1 layers" in report


@pytest.mark.more
@pytest.mark.slow
def test_a_block_compiled_by_inductor():
    """The generated code calls the operator, for any number of tokens."""
    _, other, _ = both("qwen3_moe")
    block = other.model.layers[0].mlp
    compiled = torch.compile(block, backend="fp4", fullgraph=True, dynamic=True)
    with torch.no_grad():
        x = torch.randn(1, 5, 64)
        _, code = run_and_get_code(compiled, x)
        assert [text.count("fp4.moe_slots") > 0 for text in code] == [True]
        for each in (x, torch.randn(1, 3, 64)):
            torch.testing.assert_close(compiled(each), block(each), rtol=1e-4, atol=1e-4)


def test_budgets_that_do_not_suffice():
    """The error names both figures, and the model stays as it was prepared."""
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    with pytest.raises(
        ValueError, match=r"gpu_memory is 9\.77 KiB; it must be at least \d.*: the parts outside"
    ):
        fp4_ops.prepare(model, "nvfp4", activation="bf16", gpu_memory=10_000)
    assert not slots_of(model)
    model(input_ids=tokens(1, 3))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gpu_memory": "20 apples"}, "gpu_memory is '20 apples'; it must be a number of bytes"),
        ({"gpu_memory": "1GiB", "trainable_inputs": True}, "trainable_inputs=True, and gpu_memory is given"),
        ({"gpu_memory": "1GiB", "ep_group": object()}, "gpu_memory is given, and the experts are divided"),
    ],
)
def test_options_that_do_not_work_together(options, words):
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=words):
        fp4_ops.prepare(model, "nvfp4", **options)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_slots_forget_weights_that_change():
    """New weights, biases and dtypes empty the slots: on a GPU these hold copies of the old ones."""
    _, other, _ = both("gpt_oss")
    first, second = slots_of(other)

    def changed(change) -> list[bool]:
        for slots in (first, second):
            slots.state.fill_(5)
        change()
        return [
            bool((s.state[: s.experts] == -1).all() and not s.state[s.experts :].any())
            for s in (first, second)
        ]

    experts = other.model.layers[0].mlp.experts
    down = torch.randn(4, 80, 64)
    name = "model.layers.0.mlp.experts."
    assert changed(lambda: fp4_ops.update(other, name + "down_proj", down)) == [True, False]
    bias = torch.randn_like(experts.down_proj_bias)
    assert changed(lambda: fp4_ops.update(other, name + "down_proj_bias", bias)) == [True, False]
    assert changed(lambda: other.load_state_dict(other.state_dict())) == [True, True]
    assert changed(other.bfloat16) == [True, True]
    other(input_ids=tokens(1, 3))
    other.to("meta")
    with Calls() as calls:
        other(input_ids=tokens(1, 3).to("meta"))
    assert "moe" in calls.names and "moe_slots" not in calls.names  # all weights are in one memory


def test_a_folder_is_loaded_within_a_budget(tmp_path):
    model, _, _ = both("qwen3_moe")
    model.save_pretrained(tmp_path)
    plain = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16")
    placed = fp4_ops.load_checkpoint(None, tmp_path, activation="bf16", gpu_memory=budget(plain, 0.7))
    ids = tokens(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(placed(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=0)
    assert len(slots_of(placed)) == 2
    assert "slots for 8 experts in each of 2 layers" in str(placed.hf_quantizer.report)
    with pytest.raises(ValueError, match="gpu_memory is given, and the experts are divided"):
        fp4_ops.load_checkpoint(None, tmp_path, gpu_memory="1GiB", ep_group=object())


@pytest.mark.parametrize(
    "how", [{}, {"cache_implementation": "static"}, {"custom_generate": fp4_ops.decoding_loop}]
)
def test_generate_takes_long_prompts_in_parts(how, monkeypatch):
    """No call of the model has more tokens than the plan says; the tokens are those without a budget."""
    monkeypatch.setattr(memory_plan, "TOKENS_LEAST", 8)
    model, other, report = both("qwen3_moe")
    assert report.memory is not None and report.memory.prompt_tokens == 8
    assert "at most 8 tokens at once, so generate takes longer ones in parts" in str(report)
    lengths: list[int] = []
    other.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True, **how}
    for sequences, length, want in ((2, 11, [4, 4, 3]), (1, 8, [8]), (1, 9, [8, 1])):
        ids = tokens(sequences, length)
        lengths.clear()
        assert torch.equal(other.generate(ids, **options), model.generate(ids, **options))
        assert lengths == [*want, 1, 1]
    lengths.clear()
    other.generate(tokens(1, 8), prefill_chunk_size=5, **options)  # the caller's own parts are smaller
    assert lengths == [5, 3, 1, 1]
    mine = copy.deepcopy(other)
    del other
    assert mine._prefill.__self__ is mine


def test_experts_that_layers_share_have_one_cache():
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    fp4_ops.prepare(model, "nvfp4", activation="bf16")
    place_experts(model, budget(model, 0.7))
    assert len(slots_of(model)) == 1
    model(input_ids=tokens(1, 3))


def test_memory_that_cannot_be_pinned(monkeypatch):
    """The error has CUDA's number, the memory that is available and the limit of this process."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(memory_plan, "_available", lambda: 3 * 2**30)
    monkeypatch.setattr(memory_plan.resource, "getrlimit", lambda _: (65536, 65536))
    words = r"pin 5\.00 MiB of experts \(CUDA error 2\): 3\.00 GiB .* may lock 64\.00 KiB \(`ulimit -l`\)"
    with pytest.raises(RuntimeError, match=words):
        expert_slots.map_block(expert_slots.host_block(5 << 20), torch.device("cuda"))
