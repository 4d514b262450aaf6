"""Attention of few tokens in prepared models runs without cuDNN, and the user's switch is restored."""

from __future__ import annotations

import threading

import pytest
import torch
from families import tiny

import fp4_ops
from fp4_ops.models import attention_plans

pytest.importorskip("transformers")
IDS = torch.arange(8).reshape(2, 4)


@pytest.fixture
def model(monkeypatch):
    """A prepared model that notes torch's switch in each call. The CPU stands for a GPU."""
    monkeypatch.setattr(attention_plans, "_on_gpu", lambda x: True)
    model = tiny("qwen3_moe")
    fp4_ops.prepare(model)
    model.seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda *_: model.seen.append(is_on()))
    yield model
    assert is_on()
    assert attention_plans._cudnn._calls == 0 and not attention_plans._open_calls()


def is_on() -> bool:
    return torch.backends.cuda.cudnn_sdp_enabled()


@torch.no_grad()
def test_few_tokens_run_without_cudnn(model):
    model(IDS)
    model(inputs_embeds=torch.randn(2, 4, 64))
    assert model.seen == [False, False] and is_on()


def test_calls_that_keep_cudnn(model, monkeypatch):
    model(IDS)  # gradients are on
    with torch.no_grad():
        monkeypatch.setattr(attention_plans, "MOST_TOKENS", 7)
        model(IDS)
        monkeypatch.setattr(attention_plans, "_on_gpu", lambda x: x.is_cuda)
        model(IDS[:, :1])
    assert model.seen == [True] * 3


@torch.no_grad()
def test_the_switch_is_restored_after_an_error_and_stays_off_if_it_was(model):
    with pytest.raises(IndexError):
        model(IDS + 1000)
    assert is_on()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        model(IDS)
        assert not is_on()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_threads_share_the_switch(model):
    """A call that ends first does not turn cuDNN on for one that still runs."""
    inside, ended = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert ended.wait(10)

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(wait)

    def call():
        with torch.no_grad():
            model(IDS)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(10)
    handle.remove()
    call()
    still_off = not is_on()
    ended.set()
    thread.join()
    assert still_off and model.seen == [False, False]


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_keep_torchs_choice(model):
    graphs = []

    def backend(gm, inputs):
        graphs.append(is_on())
        return gm.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    handle = list(model.model.layers[0].self_attn._forward_pre_hooks)[-1]
    del model.model.layers[0].self_attn._forward_pre_hooks[handle]
    for _ in range(2):
        compiled(IDS, use_cache=False)
    assert graphs == [True]


def test_preparing_twice_adds_no_second_hook(model):
    before = len(model.model._forward_pre_hooks), len(model.model._forward_hooks)
    attention_plans.avoid_attention_plans(model)
    assert (len(model.model._forward_pre_hooks), len(model.model._forward_hooks)) == before
