"""Warns once about modules compiled with this backend that run in a graph of another backend.

If a compiled module calls another one, Dynamo makes one graph of both and calls only the outer backend. The
inner module then runs with its original weights. The graph shows it: Dynamo's source of a weight names each
module on the way to it, and its guards name each compiled function that it looked into. The warning names
those that this backend compiled. With "strict" it is an error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx, nn

from ...meta.text import some_of
from ..graph.traced_nodes import asks_for_gradients
from ..naming import plain_path, source_name
from . import left_out
from .api import BackendCompilerFailed
from .rules import is_ours, within

if TYPE_CHECKING:
    from types import CodeType

    from .api import Function, OptimizeContext, OutputGraph, Source

log = logging.getLogger("fp4_ops")

_CHANGE = (
    '  change: compile the whole with backend="fp4", which gives Inductor everything else; or call '
    "fp4_ops.prepare(model), whose packed weights need no backend"
)
_INLINED = "_torchdynamo_inline"
_OUTSIDE = ("attention", "dense", "head", "linear")
"""Options that choose weights outside the experts."""

_compiled: weakref.WeakKeyDictionary[Function, Mapping[str, object]] = weakref.WeakKeyDictionary()
"""Functions that torch.compile returned for this backend, with their options."""
_told_of: weakref.WeakSet[nn.Module | Function] = weakref.WeakSet()
"""Modules and functions that a warning has already named."""


class _Inner(NamedTuple):
    """A module or a function that was compiled with this backend."""

    path: str
    thing: Any
    options: Mapping[str, object]

    def __str__(self) -> str:
        is_module = isinstance(self.thing, nn.Module)
        return f"{self.path} ({type(self.thing).__name__})" if is_module else self.thing.__qualname__


def note_compiled(method: Function) -> Function:
    """For OptimizeContext.__call__, which wraps what is compiled."""

    def call(self: OptimizeContext, fn: Any) -> object:
        compiled = method(self, fn)
        if is_ours(self.callback):
            if not isinstance(compiled, nn.Module):
                _, _compiled[compiled] = left_out.backend_of(self.callback)
            return compiled
        before: Any = vars(fn).get("forward") if isinstance(fn, nn.Module) else fn
        if hasattr(before, _INLINED) and before in _compiled and before not in _told_of:
            _told_of.add(before)
            log.warning(
                'backend="fp4" has no effect on %s, because it is compiled once more, with '
                'backend="%s", and torch.compile keeps the last.',
                type(getattr(fn, "_orig_mod", fn)).__name__ if isinstance(fn, nn.Module) else fn.__qualname__,
                _name(self.callback),
            )
        return compiled

    return call


def another_backend(method: Function) -> Function:
    """For OutputGraph.call_user_compiler, which hands a graph to its backend."""

    def call_user_compiler(
        self: OutputGraph, gm: fx.GraphModule, inputs: Sequence[object], *args: object
    ) -> object:
        ours = is_ours(self.compiler_fn)
        if _compiled and not (ours or self.export or asks_for_gradients(gm, inputs)):
            left_out.note_other(inputs, _name(self.compiler_fn))
            _tell(self, gm)
        return method(self, gm, inputs, *args)

    return call_user_compiler


def _name(backend: object) -> str:
    """Return the name of a backend as the user gave it."""
    names = [getattr(b, "compiler_name", None) for b in within(backend)]
    return str(next(filter(None, names), getattr(backend, "__name__", "another")))


def _tell(output: OutputGraph, gm: fx.GraphModule) -> None:
    """Warn about modules in this graph that ask for 4 bits, or raise if one of them is "strict"."""
    found = [inner for inner in _inner(output, gm) if _would_change(inner)]
    new = [inner for inner in found if inner.thing not in _told_of]
    strict = any(inner.options.get("strict") is True for inner in found)
    if not new and not strict:
        return
    names = [str(inner) for inner in new or found]
    text = (
        f'backend="fp4" has no effect on {some_of(names)}: what calls it is compiled with '
        f'backend="{_name(output.compiler_fn)}", and Dynamo makes one graph of both. So its experts run in '
        f"their own weights.\n{_CHANGE}"
    )
    if strict:
        error = RuntimeError(f"fp4: strict=True, but not all experts run in 4 bits. {text}")
        raise BackendCompilerFailed(output.compiler_fn, error, None) from error
    _told_of.update(inner.thing for inner in new)
    log.warning("%s", text)


def _inner(output: OutputGraph, gm: fx.GraphModule) -> Iterator[_Inner]:
    scope = {"L": output.local_scope, "G": output.global_scope}
    own = _called_module(output.root_tx.f_code)
    seen: set[Function] = set()
    for path in (*_holders(gm), *_looked_into(output)):
        try:
            value = None if path == own else eval(path, scope)
        except Exception:  # not all of Dynamo's names can be evaluated outside its guards
            continue
        function = _by_this_backend(value)
        if function is not None and function not in seen:
            seen.add(function)
            value = getattr(value, "_orig_mod", value)
            yield _Inner(plain_path(path), value, _compiled[function])


def _called_module(code: CodeType) -> str:
    """Return Dynamo's name of the module whose call is this frame. Nothing inside the frame calls it."""
    return f"L['{code.co_varnames[0]}']" if code.co_name in left_out.WHOLE and code.co_varnames else ""


def _holders(gm: fx.GraphModule) -> list[str]:
    """Dynamo's names of everything that holds an input of the graph, each once."""
    found: dict[Source, str] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        while source is not None and source not in found:
            found[source] = source_name(source)
            source = getattr(source, "base", None)
    return list(dict.fromkeys(found.values()))


def _looked_into(output: OutputGraph) -> list[str]:
    """Dynamo's names of compiled functions that are part of the graph."""
    sources = (guard.originating_source for guard in output.guards)
    return sorted({source_name(s.base) for s in sources if getattr(s, "member", "") == _INLINED})


def _by_this_backend(value: Any) -> Function | None:
    """The compiled function that runs if a module or a function is called."""
    ways = (value._compiled_call_impl, value.forward) if isinstance(value, nn.Module) else (value,)
    functions = (getattr(way, "__func__", way) for way in ways if hasattr(way, _INLINED))
    return next((f for f in functions if f in _compiled), None)


def _would_change(inner: _Inner) -> bool:
    """Return whether a module may have weights for 4 bits. A dense module would run the same with this
    backend."""
    if not isinstance(inner.thing, nn.Module):
        return True
    if any(inner.options.get(kind) not in (None, False, "keep") for kind in _OUTSIDE):
        return True
    stacked = any(p.dim() == 3 and p.is_floating_point() for p in inner.thing.parameters())
    return stacked or left_out.has_experts(inner.thing)
