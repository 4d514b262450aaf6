"""`python -m fp4_ops selftest` covers all operators, passes on this machine, and fails if an operator is
wrong."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from functools import partial

import pytest
import reference
import torch
from conftest import SEED

from fp4_ops import selftest
from fp4_ops.meta.fakes import OPERATORS
from fp4_ops.meta.formats import A_FORMATS, ACTIVATIONS, FORMATS
from fp4_ops.runtime import oracle

ARGUMENTS = argparse.Namespace(seed=SEED, bench=False)
ROWS = {"offs_to_m_indices", "m_indices_to_offs", "to_masked", "from_masked"}


def test_every_operator_format_layout_and_kind_has_a_case():
    cases = list(selftest.cases("cpu"))
    kinds = ["float32", "bfloat16", "float16", "int8", "fp8", "nvfp4", "mxfp4"]
    layouts = ["plain", "tile16", "tile16_invariant"]
    products = {(c.operator, c.format, c.layout, c.kind) for c in cases if c.operator != "moe"}
    assert products == set(itertools.product(selftest.PRODUCTS, FORMATS, layouts, kinds))
    blocks = {(c.format, c.layout, c.kind) for c in cases if c.operator == "moe"}
    assert blocks == set(itertools.product(FORMATS, layouts, A_FORMATS))
    assert {c.activation for c in cases if c.operator == "moe"} == set(ACTIVATIONS)
    done = {c.operator for c in cases} | {what.split()[0] for what, *_ in selftest.conversions("cpu")}
    # unpack is part of prepack's check; gradients and orders of rows are exact, or torch's own; a step's have
    # no 4-bit weight; moe_slots is moe over other memory; the rest needs several processes.
    others = {"unpack", "moe_input_grads", "moe_slots", "moe_ep", "all_reduce"}
    others |= {"attention", "cached_attention", "fp8_linear", "linears", "packed_linears", "router"}
    others |= {"top_experts", "update_cache"}
    assert set(OPERATORS) - done == {*others, *ROWS}


def test_on_a_gpu_triton_takes_kinds_in_turn(monkeypatch):
    monkeypatch.setattr(selftest, "layouts", lambda device: ["plain"])
    cases = [c for c in selftest.cases("cuda") if c.operator != "moe"]
    in_turn = cases[: len(FORMATS) * len(selftest.PRODUCTS)]
    assert {c.kind for c in in_turn} == {"float32", "bfloat16", "float16", "fp8", "nvfp4", "mxfp4"}
    assert len({(c.format, c.operator) for c in in_turn}) == len(in_turn)


def test_on_a_gpu_fp8_rows_by_mxfp4_have_all_their_cases(monkeypatch):
    """They have kernels of their own on compute capability 10.x."""
    monkeypatch.setattr(selftest, "layouts", lambda device: ["plain"])
    pair = [c for c in selftest.cases("cuda") if (c.format, c.layout, c.kind) == ("mxfp4", "plain", "fp8")]
    assert {c.operator for c in pair} == {*selftest.PRODUCTS, "moe"}


def test_fp4_tensor_cores_have_all_their_cases(monkeypatch):
    monkeypatch.setattr(selftest, "layouts", lambda device: ["plain"])
    before = len(list(selftest.cases("cuda")))
    monkeypatch.setattr(selftest, "multiplies_fp4", lambda format, a_format: format == a_format == "nvfp4")
    added = list(selftest.cases("cuda"))[before:]
    assert [c.operator for c in added] == [*selftest.PRODUCTS, "moe"]
    assert {(c.format, c.kind, c.layout) for c in added} == {("nvfp4", "nvfp4", "plain")}


def a_few(monkeypatch) -> None:
    chosen = [c for i, c in enumerate(selftest.cases("cpu")) if (i + SEED) % 29 == 0]
    monkeypatch.setattr(selftest, "cases", lambda device: iter(chosen))
    monkeypatch.setattr(selftest, "SHAPE", (4, 64, 64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_passes_and_ends_with_one_line(monkeypatch, capsys):
    a_few(monkeypatch)
    selftest.main(ARGUMENTS)
    said = capsys.readouterr().out
    assert "FAILED" not in said and "RAISED" not in said
    last = said.strip().splitlines()[-1]
    assert " 0 failed, " in last and torch.__version__ in last and "kernels: cpu" in last


@pytest.mark.parametrize("wrong", ["values", "NaN", "an error"])
def test_a_wrong_operator_is_found(monkeypatch, capsys, wrong):
    a_few(monkeypatch)
    right = selftest.product

    def product(case, device):
        got, want = right(case, device)
        if wrong == "an error":
            raise RuntimeError("no kernel image is available")
        return (got * 1.02 if wrong == "values" else torch.where(got == got.max(), torch.nan, got)), want

    monkeypatch.setattr(selftest, "product", product)
    with pytest.raises(SystemExit) as left:
        selftest.main(ARGUMENTS)
    said = capsys.readouterr().out
    assert left.value.code == 1 and "FAILED  cpu  " in said
    assert ("RAISED" in said and "no kernel image" in said) == (wrong == "an error")


def test_a_failure_has_a_line_of_its_own(monkeypatch, capsys):
    """The bar of a terminal is cleared before the line, and drawn again after it."""
    a_few(monkeypatch)
    monkeypatch.setattr(selftest, "tqdm", partial(selftest.tqdm, file=sys.stdout, mininterval=0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(selftest, "product", lambda case, device: (torch.ones(2), torch.zeros(2)))
    selftest.run("cpu")
    said = capsys.readouterr().out
    assert "it/s" in said
    assert all(at == 0 or said[at - 1] in "\r\n" for at in (m.start() for m in re.finditer("FAILED", said)))


@pytest.mark.more
def test_all_of_it():
    result = selftest.run("cpu")
    assert result.failed == [] and result.checked > 500


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 0.0], [3.0, 4.0], 0.8),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], math.inf),
        ([math.nan, 4.0], [3.0, 4.0], math.inf),
        ([math.nan, 0.0], [0.0, 0.0], math.inf),
        ([math.inf, 4.0], [3.0, 4.0], math.inf),
    ],
)
def test_relative_error(got, want, error):
    """The package's, and the tests' own, which takes only finite numbers."""
    tensors = torch.tensor(got), torch.tensor(want)
    assert oracle.relative_error(*tensors) == error
    if all(map(math.isfinite, got)):
        assert reference.relative_error(*tensors) == error
    else:
        with pytest.raises(AssertionError):
            reference.relative_error(*tensors)


def test_weights_that_hopper_always_rounds():
    """As the oracle of the tests rounds int4, and to a nearest e4m3 in nvfp4."""
    torch.manual_seed(SEED)
    for format in ("int4", "int4_g32"):
        w = reference.random_weight(format, 3, 64, 256)
        factor = torch.ops.fp4.prepack(w.packed, w.scale, w.global_scale, format, "sm90_int4")[2]
        want = reference.fold_int4(w.packed, w.scale, format)
        assert torch.equal(oracle.folded(w.dense, factor, "sm90_int4"), want)
    exact = oracle.random_weight((3, 64, 256), "nvfp4", "sm90_invariant", "cpu")
    made = oracle.folded(exact.exact, exact.global_scale, "sm90_invariant")
    assert ((made - exact.exact).abs() <= exact.exact.abs() / 16).all()
    assert 1.8e-2 < oracle.relative_error(made, exact.exact) < 2.6e-2
    assert [oracle.folds(layout, "fp8") for layout in ("sm90", "sm90_invariant", "sm90_int4", "plain")] == [
        False, True, True, False,
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_time():
    """tests/kernels_cuda/test_fp4_rows_gpu.py has the table."""
    (line,) = selftest.bench()
    assert "--bench times kernels on a GPU" in line


def test_a_failed_check_does_not_hide_the_times(monkeypatch, capsys):
    a_few(monkeypatch)
    monkeypatch.setattr(selftest, "run", lambda device: selftest.Result(device, 1, ["mm"]))
    monkeypatch.setattr(selftest, "bench", lambda: iter(["a table"]))
    with pytest.raises(SystemExit):
        selftest.main(argparse.Namespace(seed=SEED, bench=True))
    assert "1 failed" in (said := capsys.readouterr().out) and said.endswith("a table\n")
