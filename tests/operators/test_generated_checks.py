"""csrc/generate/operator_checks.py: the C++ that it writes, and the Python that it refuses to translate."""

from __future__ import annotations

import ast
import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "csrc"))  # as setup.py does

from generate import operator_checks as generate


def translated(source: str) -> str:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return "\n".join(generate.Function(node, set(generate.PARTS)).lines)


def test_an_optional_argument():
    source = """
def check_it(name: str, t: torch.Tensor | None, like: torch.Tensor, columns: int) -> None:
    check(t is not None, lambda: f"{name} is missing; {columns} columns need one")
    assert t is not None
    if t.dtype in FLOATING and columns // 2 == like.shape[-1]:
        check_shape(name, t, (*leading(like, -1), columns))
"""
    assert (
        translated(source)
        == """\
inline void check_it(std::string_view name, const OptionalTensor& t, const Tensor& like, int64_t columns) {
  if (!(bool(t)))
    fail(name, " is missing; ", columns, " columns need one");
  if ((contains(kFloating, (*t).scalar_type())) && ((columns / 2) == size(like, -1))) {
    check_shape(name, (*t), with_last(leading(like, -1), columns));
  }
}"""
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("for d in t.shape:\n        check_dim('t', t, d)", "for d in t.shape"),
        ("check_dim('t', t=t, dim=2)", "has named arguments"),
        ("print(t)", "print(t)"),
        ("check(max(t.dim(), 2) == 2, lambda: 'no')", "max(t.dim(), 2)"),
        ("check(t.stride(0) == 1, lambda: 'no')", "t.stride(0)"),
        ("check(t.dtype == torch.complex64, lambda: 'no')", "torch.complex64"),
        ("check(0 < t.dim() < 3, lambda: 'no')", "0 < t.dim() < 3"),
        ("n = m = t.dim()", "n = m"),
    ],
)
def test_what_it_cannot_translate_it_names(body, said):
    with pytest.raises(generate.CannotTranslate, match=r"checks\.py, line 2: ") as raised:
        translated(f"def check_it(t: torch.Tensor) -> None:\n    {body}\n")
    assert said in str(raised.value)


def test_an_argument_without_a_type():
    with pytest.raises(generate.CannotTranslate, match="the type of t is ''"):
        translated("def check_it(t) -> None:\n    return\n")
