"""Lists whose length depends on the data: captured if they are used only as an index."""

from __future__ import annotations

import pytest
import torch
from moe_models import Recorder, relative_error
from moe_styles import ListStyle

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Listed(ListStyle):
    def rows(self, x, token):
        tokens = token.tolist()
        return x[tokens]

    def experts_of(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.list):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(self.rows(x, token)) * weights[token, slot, None])
        return out


class ListedAtOnce(Listed):
    def rows(self, x, token):
        return x[token.tolist(), :]


class ListedAndWritten(Listed):
    """The list is what the tensor was."""

    def rows(self, x, token):
        taken = token.clone()
        tokens = taken.tolist()
        taken += 1
        return x[tokens]


class ListedAndCounted(Listed):
    def rows(self, x, token):
        tokens = token.tolist()
        return x[tokens] * (1 + len(tokens))


class ListedAndPassedOn(Listed):
    def taken(self, x, tokens):
        return x[tokens]

    def rows(self, x, token):
        tokens = token.tolist()
        return self.taken(x, tokens)


class ListedAndReversed(Listed):
    def rows(self, x, token):
        tokens = token.tolist()
        return x[tokens[::-1]]


class ListedWhatIsIndexed(Listed):
    def rows(self, x, token):
        tokens = token.tolist()
        first = [tokens[0] for _ in tokens]
        return x[first]


@pytest.mark.parametrize("style", [Listed, ListedAtOnce, ListedAndWritten])
def test_a_list_that_is_an_index_is_captured(style):
    module, recorder = style(experts=3), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (9, 5):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert recorder.ops == ["fp4::moe"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "style", [ListedAndCounted, ListedAndPassedOn, ListedAndReversed, ListedWhatIsIndexed]
)
def test_a_list_that_is_more_is_python_s(style):
    module, recorder = style(experts=3), Recorder(activation="bf16")
    compiled = torch.compile(module, backend=recorder, dynamic=True)
    x = torch.randn(9, module.H)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert relative_error(compiled(x), module(x)) < 1e-5
    assert not recorder.ops
