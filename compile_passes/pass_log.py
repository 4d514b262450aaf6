"""Defines a pass: an object with a name. Each run is timed and logged, and graphs are written on request.

`TORCH_LOGS="+fp4_ops"` prints a line for each run. `TORCH_COMPILE_DEBUG=1` writes the graphs as files into
torch's debug folder, `TORCH_TRACE=folder` into torch's structured trace, which tlparse shows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from torch import fx

from ..meta.torch_internals import logging_internals, trace_structured
from .dynamo.api import dynamo_timed, get_debug_dir

log = logging.getLogger("fp4_ops")

State = TypeVar("State")


@dataclass(frozen=True)
class Pass(Generic[State]):
    """`run` changes a graph, or adds to the state that passes share. It is skipped if `when` is false."""

    name: str
    run: Callable[[State], None]
    when: Callable[[State], bool] = lambda _: True


@dataclass(frozen=True)
class PassRun:
    """One run of a pass on one graph."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int

    def __str__(self) -> str:
        return f"{self.name}: {1e3 * self.seconds:.2f} ms, {self.nodes_before} -> {self.nodes_after} nodes"


_graphs = itertools.count()


@dataclass
class PassLog:
    """The runs of passes on one of Dynamo's graphs, in order; a graph rewritten twice has them twice."""

    title: str
    runs: list[PassRun] = field(default_factory=list)
    current: str = ""
    """The pass that runs now, or that failed."""
    _number: int = field(default_factory=_graphs.__next__)
    _text: str = ""
    """The graph as it was written last."""

    def run(self, passes: Sequence[Pass[State]], state: State, graph: fx.Graph) -> None:
        """Run the passes in order; all of them change `graph`."""
        for one in passes:
            if one.when(state):
                with self.timed(one.name, graph):
                    one.run(state)

    @contextlib.contextmanager
    def timed(self, name: str, graph: fx.Graph) -> Iterator[list[fx.Graph]]:
        """Time the block as a run of pass `name`. If it makes a new graph, it puts that into the list."""
        self.current, nodes = name, len(graph.nodes)
        if not self.runs:
            self._write("input", graph)
        made: list[fx.Graph] = []
        start = time.perf_counter()
        with dynamo_timed(f"fp4_{name}"):  # for Dynamo's compile_times() and tlparse
            yield made
        seconds = time.perf_counter() - start
        graph = made[0] if made else graph
        self.runs.append(PassRun(name, seconds, nodes, len(graph.nodes)))
        log.debug("%s: pass %s", self.title, self.runs[-1])
        self._write(name, graph)
        self.current = ""

    def _write(self, name: str, graph: fx.Graph) -> None:
        """Write the current graph, unless nobody asked for it or the pass did not change it."""
        from ..meta.torch_internals import inductor_config

        files, trace = inductor_config.trace.enabled, bool(logging_internals.trace_log.handlers)
        if not (files or trace):
            return
        text = graph.python_code("self", verbose=True).src
        if text == self._text:
            return
        self._text, name = text, f"{len(self.runs):02}_{name}"
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"fp4_{name}", "encoding": "string"},
            payload_fn=lambda: text,
        )
        if files:
            folder = Path(get_debug_dir(), "fp4_ops", f"graph_{self._number}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(f"# {self.title}\n{text}")
