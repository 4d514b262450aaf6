"""`one_hot` with a number of classes that depends on the data, captured in the graph of the experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from package_styles import SlicesOfCountedPlaces

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def cut(ids, x):
    """[..., :c] of at least c columns, c being a size of x."""
    c = x.shape[0] // 2
    return F.one_hot(ids, max(ids.max() + 1, c))[..., :c]


def cut_by_a_number(ids, x):
    return F.one_hot(ids, num_classes=max(5, ids.max() + 2))[..., :5]


def clamped(ids, x):
    return F.one_hot(ids, (ids.max() + 1).clamp(min=x.shape[0]))[..., : x.shape[0]]


def whole(ids, x):
    return F.one_hot(ids, ids.max() + 1).sum(-2)


def at_most(ids, x):
    """The tensor is no more than 3, so that there are less columns than are asked for."""
    return F.one_hot(ids.clamp(max=2), (ids.max() + 1).clamp(2, 3))[..., :7]


@pytest.mark.parametrize("function", [cut, cut_by_a_number, clamped, whole, at_most])
def test_as_many_classes_as_a_tensor_says(function):
    recorder = Recorder()
    compiled = torch.compile(function, backend=recorder, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for n, most in ((8, 4), (10, 3), (12, 9), (8, 1)):
            ids, x = torch.randint(0, most, (3, n)), torch.randn(n, 2)
            got, want = compiled(ids, x), function(ids, x)
            assert got.dtype == want.dtype and torch.equal(got, want), (n, most)
    assert function is at_most or recorder.compilations == 1


def test_an_id_beyond_the_classes_is_an_error():
    compiled = torch.compile(lambda ids: F.one_hot(ids, ids.max()), backend=Recorder(), fullgraph=True)
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        compiled(torch.tensor([0, 2]))


@pytest.mark.parametrize("backend", [more("fp4"), "recorder"])
def test_experts_behind_it_are_in_its_graph(backend):
    module, recorder = SlicesOfCountedPlaces(), Recorder(activation="bf16")
    options = {"options": {"activation": "bf16"}} if backend == "fp4" else {}
    compiled = torch.compile(
        module,
        backend=recorder if backend == "recorder" else backend,
        dynamic=True,
        fullgraph=True,
        **options,
    )
    with torch.no_grad():
        for n in (9, 14):
            x = torch.randn(n, module.H)
            assert relative_error(compiled(x), module.twin()(x)) < 1e-5
    assert backend == "fp4" or recorder.ops == ["fp4::moe"]
