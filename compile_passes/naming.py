"""Names nodes in messages by the user's names and lines, never by the graph's."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import fx

TORCH = str(torch.__file__).removesuffix("__init__.py")
_LONG = 80
"""Most characters of a line that a message quotes."""


def called(node: fx.Node) -> str:
    """Return an input's name in the model. For another node return the operator and the user's code."""
    if node.op == "placeholder":
        return input_name(node)
    packet = getattr(node.target, "overloadpacket", node.target)
    name = str(getattr(packet, "__name__", packet)).strip("_")
    code = source_line(node)
    return f"{name} (`{code}`)" if code else name


def source_line(node: fx.Node) -> str:
    """Return the user's code that a node comes from: the innermost line outside torch."""
    frames = _frames(node)
    code = frames[-1][3].strip() if frames else ""
    return code if len(code) <= _LONG else f"{code[:_LONG]}..."


def _frames(node: fx.Node) -> list[tuple[str, str, str, str]]:
    """Return (path, line, function, code) of all frames outside torch."""
    found = re.findall(
        r'File "([^"]+)", line (\d+), in (\S+)(?:\n    ([^\n]*))?', node.meta.get("stack_trace") or ""
    )
    return [f for f in found if not f[0].startswith(TORCH)]


def source_name(source: Any) -> str:
    """Return Dynamo's source of an input, such as L['self']._modules['experts']._parameters['down_proj']."""
    name = getattr(source, "name", "")
    return name if isinstance(name, str) else name()  # a method in older torch


def location(node: fx.Node) -> str:
    """Return file, line and function of the user's code that a node comes from."""
    frames = _frames(node)
    if not frames:
        return called(node) if node.op == "placeholder" else node.name
    path, line, function, _ = frames[-1]
    return f"{short_path(path)}:{line} in {function}"


def short_path(path: str) -> str:
    return "/".join(path.split("/")[-3:])


def module_path(node: fx.Node) -> str:
    """The module whose code a node comes from, as the model's own paths name it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return re.sub(r"^L__self___?", "", plain_path(list(stack.values())[-1][0]))


def input_name(placeholder: fx.Node) -> str:
    """A graph input's name in the model, such as model.layers[0].mlp.experts.down_proj."""
    name = plain_path(source_name(getattr(placeholder, "_dynamo_source", None)))
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", name) or placeholder.name


class _Path(NamedTuple):
    """A graph input's name in the model, in the place of Dynamo's source."""

    name: str


def note_path(placeholder: fx.Node, path: str) -> None:
    """Note a graph input's name in the model, for graphs that Dynamo did not make."""
    placeholder._dynamo_source = _Path(path)  # type: ignore[attr-defined]


def plain_path(path: str) -> str:
    """Dynamo's path as a person writes it, from the module that was compiled."""
    path = re.sub(r"\.__dict__\['_(modules|parameters|buffers)'\]", r"._\1", path)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"^.*\.cell_contents\.?|^L\['self'\]$|^L\['\w+'\]\.", "", path)
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)
