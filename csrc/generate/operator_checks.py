"""Translates meta/operand_checks.py and meta/checks.py to C++ functions of the same names and arguments.

Such a function may use `check`, `if`, assignments, `return`, functions that csrc/common/checks.h has under
the same names, sizes of tensors, and fields of the tables. After `assert t is not None`, the optional
argument t is known to be there. Anything else raises an error that names the line.
"""

from __future__ import annotations

import ast
from pathlib import Path

from .header import header

TYPES = {
    "str": "std::string_view",
    "int": "int64_t",
    "bool": "bool",
    "torch.Tensor": "const Tensor&",
    "torch.Tensor | None": "const OptionalTensor&",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "std::optional<ScalarType>",
    "Shape": "const Shape&",
    "Dtypes": "Dtypes",
    "Format": "const Format&",
    "Layout": "const Layout&",
    "Weight": "const WeightShape&",
}
RETURNED = {**TYPES, "None": "void", "Weight": "WeightShape", "Stored": "Stored", "Experts": "Experts"}
DTYPES = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
}
TABLES = {"FORMATS": "kFormats", "LAYOUTS": "kLayouts"}
FIELDS = {
    "dtype": "{0}.scalar_type()",
    "parts": "{0}.parts()",
    "format": "(*{0}.format)",
    "layout": "(*{0}.layout)",
}
METHODS = {"dim", "numel", "padded", "leaves", "num_blocks"}
OPERATORS: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "/",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.And: "&&",
    ast.Or: "||",
}
PARTS = frozenset(("check_name", "check_dtype", "check_shape", "check_device", "check_activation"))
HELPERS = frozenset(("leading", "common", "dtype_name", "dtype_names", "len"))


class CannotTranslate(Exception):
    pass


def operator_checks() -> str:
    """Returns the text of build/operator_checks.h."""
    meta = Path(__file__).parents[2] / "fp4_ops" / "meta"
    files = ("operand_checks.py", "checks.py")
    nodes = [node for name in files for node in ast.parse((meta / name).read_text()).body]
    body: list[str] = []
    known, dtypes = set(PARTS), dict[str, list[str]]()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple() as value):
                body.append(_constant(name, value, dtypes))
            case ast.FunctionDef(name=name):
                body += ["", *Function(node, known).lines]
                known.add(name)
    return header("csrc/generate/operator_checks.py of meta/checks.py; common/checks.h includes it.", body)


def constant_name(name: str) -> str:
    """Converts a name such as FLOATING_OR_DOUBLE to kFloatingOrDouble."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def _constant(name: str, value: ast.Tuple, seen: dict[str, list[str]]) -> str:
    """Returns a tuple of dtypes as a C++ array. It may contain (*NAME) tuples that were `seen` before."""
    seen[name] = []
    for item in value.elts:
        if isinstance(item, ast.Starred) and isinstance(item.value, ast.Name):
            seen[name] += seen[item.value.id]
        else:
            seen[name].append(_dtype(item))
    return f"inline constexpr ScalarType {constant_name(name)}[] = {{{', '.join(seen[name])}}};"


def _dtype(node: ast.expr) -> str:
    text = ast.unparse(node).removeprefix("torch.")
    if text not in DTYPES:
        raise CannotTranslate(f"checks.py, line {node.lineno}: {ast.unparse(node)} has no name in DTYPES")
    return f"ScalarType::{DTYPES[text]}"


class Function:
    """Translates one function, line by line."""

    def __init__(self, node: ast.FunctionDef, known: set[str]) -> None:
        self.known = known
        self.optional: set[str] = set()
        """Arguments that may still be None at this line."""
        self.there: set[str] = set()
        """Optional arguments that are known not to be None at this line."""
        arguments = []
        for a in node.args.args:
            kind = ast.unparse(a.annotation) if a.annotation else ""
            if kind not in TYPES:
                self.fail(a, f"the type of {a.arg} is '{kind}'")
            if kind.endswith("| None"):
                self.optional.add(a.arg)
            arguments.append(f"{TYPES[kind]} {a.arg}")
        returned = RETURNED[ast.unparse(node.returns) if node.returns else "None"]
        self.lines = [f"inline {returned} {node.name}({', '.join(arguments)}) {{"]
        self.block(node.body, 1)
        self.lines.append("}")

    def fail(self, node: ast.AST, what: str) -> None:
        raise CannotTranslate(f"checks.py, line {getattr(node, 'lineno', '?')}: {what}; it has no C++")

    def write(self, depth: int, text: str) -> None:
        self.lines.append("  " * depth + text)

    def block(self, statements: list[ast.stmt], depth: int) -> None:
        for statement in statements:
            self.statement(statement, depth)

    def statement(self, node: ast.stmt, depth: int) -> None:
        match node:
            case ast.Expr(value=ast.Constant()):  # the docstring
                pass
            case ast.Expr(
                value=ast.Call(func=ast.Name(id="check"), args=[condition, ast.Lambda(body=words)])
            ):
                self.write(depth, f"if (!({self.expression(condition)}))")
                self.write(depth + 1, f"fail({', '.join(self.parts(words))});")
            case ast.Expr(value=ast.Call() as call):
                self.write(depth, f"{self.expression(call)};")
            case ast.Assert(test=ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()])):
                self.known_to_be_there(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.write(depth, f"const auto& {name} = {self.expression(value)};")
            case ast.If(test=test, body=body, orelse=orelse):
                self.conditional(test, body, orelse, depth)
            case ast.Return(value=None):
                self.write(depth, "return;")
            case ast.Return(value=ast.expr() as value):
                self.write(depth, f"return {self.expression(value)};")
            case _:
                self.fail(node, ast.unparse(node))

    def conditional(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], depth: int) -> None:
        self.write(depth, f"if ({self.expression(test)}) {{")
        before = set(self.optional), set(self.there)
        match test:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()]):
                self.known_to_be_there(name)
        self.block(body, depth + 1)
        self.optional, self.there = before
        match test:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is()]) if isinstance(body[-1], ast.Return):
                self.known_to_be_there(name)
        if orelse:
            self.write(depth, "} else {")
            self.block(orelse, depth + 1)
        self.write(depth, "}")

    def known_to_be_there(self, name: str) -> None:
        self.optional.discard(name)
        self.there.add(name)

    def parts(self, node: ast.expr) -> list[str]:
        """Returns the parts of a message, in the order in which C++ streams them."""
        match node:
            case ast.JoinedStr(values=values):
                return [part for value in values for part in self.parts(value)]
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return [self.expression(value)]
            case _:
                return [self.expression(node)]

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool() as value):
                return "true" if value else "false"
            case ast.Constant(value=None):
                return "std::nullopt"
            case ast.Constant(value=int() as value):
                return str(value)
            case ast.Constant(value=str() as value):
                escaped = value.replace("\\", "\\\\").replace('"', '\\"')
                return f'"{escaped}"'
            case ast.JoinedStr():
                return f"text({', '.join(self.parts(node))})"
            case ast.Name(id=name):
                if name.isupper():
                    return constant_name(name)
                return f"(*{name})" if name in self.there else name
            case ast.Attribute(value=ast.Name(id="torch")):
                return _dtype(node)
            case ast.Attribute(value=value, attr=attr):
                return FIELDS.get(attr, f"{{0}}.{attr}").format(self.expression(value))
            case ast.Subscript(value=ast.Name(id=table), slice=key) if table in TABLES:
                return f"entry({TABLES[table]}, {self.expression(key)})"
            case ast.Subscript(value=ast.Attribute(value=tensor, attr="shape"), slice=index):
                return f"size({self.expression(tensor)}, {self.expression(index)})"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return f"-{value}"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!({self.expression(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return f"({self.expression(left)} {OPERATORS[type(op)]} {self.expression(right)})"
            case ast.BoolOp(op=op, values=values):
                return f" {OPERATORS[type(op)]} ".join(f"({self.expression(v)})" for v in values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self.expression(test)} ? {self.choice(body)} : {self.choice(orelse)})"
            case ast.Tuple(elts=[ast.Starred(value=first), *rest]):
                return f"with_last({', '.join(map(self.expression, (first, *rest)))})"
            case ast.Tuple(elts=elts):
                return f"Shape{{{', '.join(map(self.expression, elts))}}}"
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.comparison(left, op, right)
            case ast.Call():
                return self.call(node)
        self.fail(node, ast.unparse(node))
        raise AssertionError

    def choice(self, node: ast.expr) -> str:
        """Returns one side of a conditional. A literal becomes a text, because the two have different C++
        types.
        """
        text = self.expression(node)
        return f"text({text})" if isinstance(node, ast.Constant) and isinstance(node.value, str) else text

    def comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        match op:
            case ast.Is() | ast.IsNot():
                said = self.expression(left)
                if isinstance(left, ast.Name) and left.id in self.there:
                    self.fail(left, f"{left.id} is known to be there")
                return f"!{said}" if isinstance(op, ast.Is) else f"bool({said})"
            case ast.In():
                return f"contains({self.expression(right)}, {self.expression(left)})"
            case ast.Eq() if isinstance(right, ast.Name) and right.id.isupper():
                return f"same({self.expression(left)}, {self.expression(right)})"
            case _ if type(op) in OPERATORS:
                return f"{self.expression(left)} {OPERATORS[type(op)]} {self.expression(right)}"
        self.fail(left, f"a comparison by {type(op).__name__}")
        raise AssertionError

    def call(self, node: ast.Call) -> str:
        if node.keywords:
            self.fail(node, f"{ast.unparse(node)} has named arguments")
        arguments = [self.expression(a) for a in node.args]
        match node.func:
            case ast.Name(id="Weight"):
                return f"WeightShape{{{self.rows(node)}}}"
            case ast.Name(id="Stored" | "Experts" as name):
                return f"{name}{{{self.rows(node)}}}"
            case ast.Name(id="len"):
                return f"std::size({arguments[0]})"
            case ast.Name(id=name) if name in self.known or name in HELPERS:
                return f"{name}({', '.join(arguments)})"
            case ast.Attribute(value=value, attr=attr) if attr in METHODS:
                of = self.expression(value)
                there = "->" if isinstance(value, ast.Name) and value.id in self.optional else "."
                return f"{of}{there}{attr}({', '.join(arguments)})"
        self.fail(node, ast.unparse(node))
        raise AssertionError

    def rows(self, node: ast.Call) -> str:
        """Returns the fields of a result. Rows of tables are passed by address."""
        return ", ".join(
            f"&{self.expression(a)}"
            if isinstance(a, ast.Name) and a.id in ("fmt", "order")
            else self.expression(a)
            for a in node.args
        )
