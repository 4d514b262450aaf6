"""`generate(custom_generate=fp4_ops.decoding_loop)`: the tokens of transformers' own, with less Python."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from conftest import more
from moe_models import that_answers, tokens
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import fp4_ops
from fp4_ops.integrations.transformers import generation, step_graph

NEW = 7
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe")


def prepared(family: str, **changes) -> torch.nn.Module:
    model = that_answers(family, **changes)
    fp4_ops.prepare(model, activation="bf16")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    """Made when they are asked for; no test changes one."""

    class Made(dict):
        def __missing__(self, family):
            self[family] = prepared(family)
            return self[family]

    return Made()


@pytest.fixture
def ours(monkeypatch) -> list[None]:
    """As long as calls of our loop were made."""
    calls: list[None] = []
    run = generation._Decoding.run

    def counted(self):
        calls.append(None)
        return run(self)

    monkeypatch.setattr(generation._Decoding, "run", counted)
    return calls


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []
        self.ended = False

    def put(self, value) -> None:
        assert value.device.type == "cpu"
        self.got.append(value.clone())

    def end(self) -> None:
        self.ended = True


class Favour(LogitsProcessor):
    """Looks at all ids, and needs them contiguous."""

    def __call__(self, ids, scores):
        counts = torch.bincount(ids.view(-1), minlength=scores.shape[-1])
        return scores + counts % 3


class SumStops(StoppingCriteria):
    """Row by row, by all of its ids."""

    def __call__(self, ids, scores, **kwargs):
        return ids.view(len(ids), -1).sum(-1) % 3 == 0


def padded_prompt() -> dict[str, torch.Tensor]:
    ids = tokens(3, 6)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


CASES = {
    "greedy": lambda: {"input_ids": tokens(2, 5)},
    "one row, one token": lambda: {"input_ids": tokens(1, 1), "max_new_tokens": 1},
    "sampling": lambda: {"input_ids": tokens(3, 4), "do_sample": True, "top_k": 9, "temperature": 1.7},
    "several answers": lambda: {"input_ids": tokens(1, 4), "do_sample": True, "num_return_sequences": 3},
    "processors": lambda: {"input_ids": tokens(2, 5), "repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "padding": padded_prompt,
    "padding, sampling": lambda: {**padded_prompt(), "do_sample": True, "top_p": 0.9},
    "own processor": lambda: {"input_ids": tokens(3, 5), "logits_processor": LogitsProcessorList([Favour()])},
    "own criterion": lambda: {
        "input_ids": tokens(3, 5), "stopping_criteria": StoppingCriteriaList([SumStops()])
    },
    "everything": lambda: {
        **padded_prompt(), "do_sample": True, "min_new_tokens": 2, "eos_token_id": list(range(1, 40)),
        "logits_processor": LogitsProcessorList([Favour()]),
    },
    "eos": lambda: {"input_ids": tokens(3, 5), "eos_token_id": list(range(1, 40)), "max_new_tokens": 20},
    "eos, sampling": lambda: {
        "input_ids": tokens(2, 5), "eos_token_id": list(range(1, 30)), "do_sample": True
    },
    "max_time": lambda: {"input_ids": tokens(2, 5), "max_time": 600.0},
}  # fmt: skip


def both(
    model, options: dict, **more_options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run transformers' loop and ours. Return both results, and the next random number after each."""
    results = []
    seed = int(torch.randint(2**31, ()))
    for loop in (None, fp4_ops.decoding_loop):
        torch.manual_seed(seed)
        given = {"max_new_tokens": NEW, "do_sample": False, **options, **more_options}
        results += [model.generate(**given, custom_generate=loop), torch.rand(())]
    return results[0], results[2], results[1], results[3]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(5)
def test_same_tokens(case, family, cache, models, ours):
    want, got, next_want, next_got = both(models[family], CASES[case](), cache_implementation=cache)
    assert torch.equal(got, want)
    assert next_want == next_got
    sliding = family == "gpt_oss" and cache == "static"  # layers of another kind
    assert len(ours) == (not sliding)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_stop_is_seen_a_step_late(cache, models, ours, monkeypatch):
    """As on a GPU: the step in vain leaves nothing, at the end of the given length either."""
    monkeypatch.setattr(generation, "_looks_late", lambda device: True)
    lengths = set()
    for _ in range(12):
        options = {"input_ids": tokens(2, 5), "eos_token_id": list(range(1, 60)), "max_new_tokens": 4}
        want, got, *_ = both(models["mixtral"], options, cache_implementation=cache)
        assert torch.equal(got, want)
        lengths.add(got.shape[1])
    assert len(ours) == 12 and len(lengths) > 1


def test_a_returned_cache_has_no_step_too_many(models, ours, monkeypatch):
    monkeypatch.setattr(generation, "_looks_late", lambda device: True)
    options = {
        "input_ids": tokens(1, 5),
        "eos_token_id": list(range(1, 100)),
        "return_dict_in_generate": True,
    }
    want, got, *_ = both(models["mixtral"], options, output_scores=True, output_logits=True)
    assert torch.equal(got.sequences, want.sequences)
    assert got.past_key_values.get_seq_length() == want.past_key_values.get_seq_length()
    for name in ("scores", "logits"):
        assert len(got[name]) == len(want[name]) > 0
        assert all(torch.equal(a, b) for a, b in zip(got[name], want[name]))
    assert type(got) is type(want) and got.keys() == want.keys()
    assert len(ours) == 1


def test_16_bit_logits_are_compared_without_a_copy(ours, monkeypatch):
    """As on a GPU. Both loops take the first of equal logits."""
    dtypes = []
    monkeypatch.setattr(generation, "_compares_fast", lambda logits: dtypes.append(logits.dtype) or True)
    model = prepared("mixtral").bfloat16()
    want, got, *_ = both(model, {"input_ids": tokens(3, 5)})
    assert torch.equal(got, want)
    both(model, {"input_ids": tokens(3, 5), "do_sample": True})
    assert dtypes == [torch.bfloat16] * NEW and len(ours) == 2
    for x in (torch.randint(-3, 3, (9, 99)), torch.tensor([[1.0, torch.nan, torch.inf, torch.nan]])):
        assert torch.equal(x.bfloat16().argmax(-1), x.float().argmax(-1))


@pytest.mark.parametrize("end", [True, False])
def test_a_streamer_gets_what_generate_gives_it(end, models):
    options = {"input_ids": tokens(1, 5), "max_new_tokens": 12}
    if end:
        options["eos_token_id"] = list(range(1, 60))
    streams = []
    for loop in (None, fp4_ops.decoding_loop):
        streams.append(Streamer())
        models["qwen3_moe"].generate(**options, do_sample=False, streamer=streams[-1], custom_generate=loop)
    want, got = streams
    assert got.ended and len(got.got) == len(want.got) > 1
    assert all(torch.equal(a, b) for a, b in zip(got.got, want.got))


def test_a_cache_goes_on(models, ours):
    """A conversation: the second call begins where the first ended."""
    model, first = models["mixtral"], tokens(2, 5)
    answers = []
    for loop in (None, fp4_ops.decoding_loop):
        cache = transformers.DynamicCache(config=model.config)
        options = {"do_sample": False, "max_new_tokens": 4, "past_key_values": cache, "custom_generate": loop}
        ids = model.generate(first, **options)
        answers.append(model.generate(torch.cat([ids, first[:, :2]], 1), **options))
    assert torch.equal(*answers)
    assert len(ours) == 2


@pytest.mark.parametrize("static", [True, more(False)])
def test_the_compiled_step_is_compiled_once(static, models, ours, fresh_dynamo):
    frames = Counter()

    def backend(gm, inputs, mode=None):
        frames["compiled"] += 1
        return gm

    config = transformers.CompileConfig(backend=backend)  # asks for it, so a step on a CPU is compiled
    options = padded_prompt() if static else {"input_ids": tokens(2, 5)}
    options |= {"do_sample": False, "max_new_tokens": 9, "cache_implementation": "static"}
    model = prepared("mixtral")
    want = model.generate(**options)
    got = model.generate(**options, compile_config=config, custom_generate=fp4_ops.decoding_loop)
    assert torch.equal(got, want)
    assert frames["compiled"] == 1 and len(ours) == 1


def test_a_static_cache_that_is_used_again_needs_no_new_compilation(ours, fresh_dynamo):
    compiled = Counter()

    def backend(gm, inputs, mode=None):
        compiled["graphs"] += 1
        return gm

    config = transformers.CompileConfig(backend=backend)
    model = prepared("qwen3_moe")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    for steps in (4, 9, 4):
        cache.reset()
        ids = tokens(2, 5).clamp(min=1)  # 0 is padding, with which generate passes a mask, too
        options = {"do_sample": False, "max_new_tokens": steps}
        got = model.generate(
            ids, **options, past_key_values=cache, compile_config=config,
            custom_generate=fp4_ops.decoding_loop,
        )  # fmt: skip
        assert torch.equal(got, model.generate(ids, **options))
    assert compiled["graphs"] == 1 and len(ours) == 3


def test_stop_strings_are_refused_by_transformers(models):
    """transformers keeps the tokenizer, which it needs for the argument, from any loop that is a callable."""
    model, ids = models["mixtral"], tokens(2, 5)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, custom_generate=fp4_ops.decoding_loop, stop_strings=["a"], tokenizer=object())


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"use_cache": False},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"prefill_chunk_size": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_rest_runs_in_the_loop_of_transformers(options, models, ours):
    want, got, *_ = both(models["mixtral"], {"input_ids": tokens(2, 5), **options})
    want, got = (r if isinstance(r, torch.Tensor) else r.sequences for r in (want, got))
    assert torch.equal(got, want)
    assert not ours


def test_a_model_with_preparations_of_its_own(ours):
    model = prepared("mixtral")

    class Own(type(model)):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return super().prepare_inputs_for_generation((input_ids + 1) % 128, **kwargs)

    model.__class__ = Own
    want, got, *_ = both(model, {"input_ids": tokens(2, 5)})
    assert torch.equal(got, want)
    assert not ours


@pytest.mark.parametrize("options", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 2}])
def test_assisted_generation_is_refused(options, models):
    model = models["mixtral"]
    if "assistant_model" in options:
        options = {"assistant_model": prepared("mixtral", num_hidden_layers=1)}
    with pytest.raises(
        ValueError, match=r"ask for assisted generation .*Call generate without custom_generate"
    ):
        model.generate(tokens(1, 5), custom_generate=fp4_ops.decoding_loop, max_new_tokens=4, **options)


def test_a_streamer_with_beams_is_refused(models):
    with pytest.raises(ValueError, match="streamer is given with num_beams > 1"):
        models["mixtral"].generate(
            tokens(1, 5),
            custom_generate=fp4_ops.decoding_loop,
            num_beams=2,
            streamer=Streamer(),
            max_new_tokens=2,
        )


def python_calls(call) -> int:
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_fewer_calls_of_python_functions_a_step(cache, models):
    """Without the model's own, which are the same: what a step takes beyond a call of the model."""
    model, ids = models["mixtral"], tokens(1, 4)
    options = {"do_sample": False, "cache_implementation": cache}

    def steps(loop) -> int:
        few, many = (
            python_calls(lambda n=n: model.generate(ids, max_new_tokens=n, custom_generate=loop, **options))
            for n in (3, 13)
        )
        return (many - few) // 10

    steps(None)  # what is imported and cached at the first call
    with torch.no_grad():
        past = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=past)
        of_model = python_calls(lambda: model(ids[:, :1], past_key_values=past))
    theirs, own = steps(None) - of_model, steps(fp4_ops.decoding_loop) - of_model
    assert own < theirs / 2, (own, theirs, of_model)


def test_several_threads(models):
    """Each call has its own state, and its own streamer."""
    model, prompts = models["qwen3_moe"], [tokens(1, n) for n in (3, 4, 5, 6)]
    want = [model.generate(p, max_new_tokens=NEW, do_sample=False) for p in prompts]
    got: dict[int, torch.Tensor] = {}
    streams = [Streamer() for _ in prompts]

    def run(i: int) -> None:
        got[i] = model.generate(
            prompts[i], max_new_tokens=NEW, do_sample=False, streamer=streams[i],
            custom_generate=fp4_ops.decoding_loop,
        )  # fmt: skip

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, stream in enumerate(streams):
        assert torch.equal(got[i], want[i])
        assert torch.equal(torch.cat([t.view(-1) for t in stream.got]), want[i].view(-1))


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({}, ("inductor", None, None)),
        ({"mode": "max-autotune"}, ("inductor", "max-autotune-no-cudagraphs", None)),
        ({"mode": "default"}, None),
        ({"backend": "fp4", "mode": None, "options": {"format": "nvfp4"}}, None),
        (
            {"backend": "fp4", "mode": None, "options": {"triton.cudagraphs": True, "format": "mxfp4"}},
            ("fp4", None, {"format": "mxfp4"}),
        ),
        ({"mode": None, "options": {"triton.cudagraphs": True}}, ("inductor", None, None)),
        ({"backend": "cudagraphs"}, None),
    ],
)
def test_a_configuration_without_its_cuda_graphs(given, plain):
    config = transformers.CompileConfig(**given)
    before = config.to_dict()
    changed = step_graph.without_graphs(config)
    assert (changed and (changed.backend, changed.mode, changed.options)) == plain
    assert config.to_dict() == before


def test_captures_of_a_thread_share_a_stream(monkeypatch):
    """cuBLAS keeps a workspace for each stream, so each capture must not have a new one."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, object()))
    monkeypatch.setattr(step_graph, "_streams", threading.local())
    first = step_graph._capture_stream(0)
    assert step_graph._capture_stream(0) is first and step_graph._capture_stream(1)[0] == 1
    with ThreadPoolExecutor(1) as other:
        assert other.submit(step_graph._capture_stream, 0).result() is not first
