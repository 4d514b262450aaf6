"""`fp4_ops.decoding_loop` on a GPU: a step is one CUDA graph, and the tokens are those of `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers
from moe_models import tokens
from test_generation import CASES, Streamer, both, prepared

from fp4_ops import decoding_loop
from fp4_ops.integrations.transformers import step_graph

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture
def graphs(monkeypatch) -> list[step_graph.GraphStep]:
    """Return the steps that were captured."""
    captured: list[step_graph.GraphStep] = []
    capture = step_graph.GraphStep._capture

    def counted(self, token):
        capture(self, token)
        captured.append(self)

    monkeypatch.setattr(step_graph.GraphStep, "_capture", counted)
    return captured


def on_gpu(options: dict) -> dict:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@pytest.mark.parametrize("backend", ["inductor", "fp4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_same_tokens(family, backend, graphs):
    model = prepared(family).cuda()
    options = {"triton.cudagraphs": True}
    config = transformers.CompileConfig(backend=backend, mode=None, options=options)
    same = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": 9}
    for case in ("greedy", "padding", "padding, sampling", "processors", "everything", "eos"):
        given = {**same, **on_gpu(CASES[case]())}
        for _ in range(2):  # again, with memory that was used before
            want, got, next_want, next_got = both(model, given)
            assert torch.equal(got, want), case
            assert next_want == next_got
    assert len(graphs) >= 6 and not any(g.given_up for g in graphs)


def test_a_streamer_and_a_cache_that_goes_on(graphs):
    model = prepared("mixtral").cuda()
    first, streams, answers = tokens(2, 5).cuda().clamp(min=1), [], []
    for loop in (None, decoding_loop):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        options = {"do_sample": False, "max_new_tokens": 8, "past_key_values": cache, "custom_generate": loop}
        ids = model.generate(first, **options)
        answers.append(model.generate(torch.cat([ids, first[:, :1]], 1), **options))
        streams.append(Streamer())
        model.generate(first[:1], max_new_tokens=7, cache_implementation="static", do_sample=False,
                       custom_generate=loop, streamer=streams[-1])  # fmt: skip
    assert torch.equal(*answers)
    assert all(torch.equal(a, b) for a, b in zip(streams[1].got, streams[0].got, strict=True))
    assert len(graphs) == 3


def test_a_step_that_waits_is_left_as_it_is():
    calls, given_up = [], []
    total = torch.zeros((), device="cuda")

    def step(token):
        calls.append(total.add_(token.sum()).item())
        return total.clone()

    graph = step_graph.GraphStep(step, lambda: given_up.append(len(calls)))
    for n in range(1, 5):
        assert graph(torch.ones(2, device="cuda")).item() == 2 * n
    assert given_up == [1] and len(calls) == 4 and graph.graph is None


def test_a_step_that_does_not_wait_is_captured():
    calls = []
    total = torch.zeros((), device="cuda")

    def step(token):
        calls.append(None)
        return total.add_(token.sum()).clone()

    graph = step_graph.GraphStep(step, lambda: pytest.fail("given up"))
    for n in range(1, 7):
        assert graph(torch.full((2,), float(n), device="cuda")).item() == n * (n + 1)
    assert len(calls) == 2
