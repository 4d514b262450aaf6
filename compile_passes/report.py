"""Report of the passes: the data behind `fp4_ops.explain` and the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .naming import location, module_path
from .refusal import Refusal


@dataclass(frozen=True)
class Gain:
    """Estimate of the weight bytes that a step of `tokens` tokens reads at a place. Nothing is measured.

    The estimate assumes that tokens choose their k of E experts uniformly and independently. Then a step
    reads E (1 - (1 - k/E)^tokens) experts. A model that runs every expert for every token reads all of them.
    `speedup` is the ratio of the bytes. It bounds the gain of decode, where reading weights takes the time,
    but not of prefill.
    """

    tokens: int
    experts_read: float
    bytes_before: int
    bytes_after: int
    speedup: float

    def __str__(self) -> str:
        return (
            f"estimate from bytes: at {self.tokens} tokens a step reads {_mib(self.bytes_before)} -> "
            f"{_mib(self.bytes_after)} of weights (about {self.experts_read:.3g} experts), so at most "
            f"{self.speedup:.1f}x faster where that is the limit (decode)"
        )


@dataclass(frozen=True)
class Load:
    """How a place reads its weights: each of `tokens` rows uses `k` of `experts` matrices. `tokens` is None
    if unknown."""

    experts: int
    k: int
    tokens: int | None
    all_before: bool = False
    """True if the model itself runs every expert for every token."""

    def gain(self, bytes_before: int, bytes_after: int) -> Gain | None:
        if self.tokens is None or not bytes_after:
            return None
        read = self.experts * (1 - (1 - min(self.k, self.experts) / self.experts) ** self.tokens)
        before = self.experts if self.all_before else read
        old, new = round(bytes_before * before / self.experts), round(bytes_after * read / self.experts)
        return Gain(self.tokens, round(read, 2), old, new, round(old / new, 2)) if new else None


def hint(size: Any) -> int | None:
    """Return the value of a size in this run, or None."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else None


@dataclass(frozen=True)
class Site:
    """One place that looks like experts: rewritten to `op`, or left alone because of `reason` (`op` is None).

    A call of an fp4 operator that the model makes itself has an `op` too, and no `weights`.
    """

    op: str | None
    """The operator that replaced it, such as "fp4::moe"."""
    reason: str
    """Why it was left alone, or why no better operator was possible."""
    where: str
    """The line of the model that computes it."""
    module: str = ""
    """The path of the module that runs that line, such as model.layers.0.mlp."""
    weights: tuple[str, ...] = ()
    """The parameters, as Dynamo names them."""
    shape: str = ""
    form: str = ""
    kernel: str = ""
    format: str = ""
    layout: str = ""
    activation: str = ""
    """The gate's activation function, for a whole block."""
    a_format: str = ""
    """Format of activations in the products, and why."""
    bytes_before: int = 0
    bytes_after: int = 0
    gain: Gain | None = None
    """The estimate for the traced step. None if the model already held the weights in 4 bits."""
    change: str = ""
    """The smallest change to the model that would help, or "none: " and the reason why no change helps."""

    @property
    def rewritten(self) -> bool:
        return self.op is not None

    @property
    def place(self) -> str:
        return f"{self.where}, module {self.module}" if self.module else self.where

    def __str__(self) -> str:
        weights = ", ".join(self.weights[:4])
        if len(self.weights) > 4:
            weights += f", ... ({len(self.weights)} parameters)"
        if self.op is not None and not self.weights:
            return f"{self.op}  from {self.form}\n    kernel {self.kernel}\n    at {self.place}"
        change = [f"    change: {self.change}"] if self.change else []
        if self.op is None:
            more = [f"    weights {weights}"] if weights else []
            return "\n".join([f"left alone: {self.reason}", *change, f"    at {self.place}", *more])
        lines = [
            f"{self.op}  {self.shape}  from {self.form}",
            f"    kernel {self.kernel}, {self.format}, layout {self.layout}, activations {self.a_format}"
            + (f", gate {self.activation}" if self.activation else ""),
            f"    weights {weights}: {_mib(self.bytes_before)} -> {_mib(self.bytes_after)}",
            f"    at {self.place}",
            *([f"    {self.gain}"] if self.gain else []),
        ]
        return "\n".join([*lines, *([f"    {self.reason}"] if self.reason else []), *change])


def left_alone(refusal: Refusal) -> Site:
    """Describe a refused place as text."""
    where, module = location(refusal.site), module_path(refusal.site)
    return Site(None, refusal.reason, where, module, change=refusal.change)


def each_told_once(refusals: Iterable[Refusal]) -> list[Refusal]:
    """Return one refusal of each group that looks the same to a reader, such as the refusals of one line for
    each expert."""
    return list({left_alone(r): r for r in refusals}.values())


@dataclass(frozen=True)
class PassRun:
    """One run of a pass on one graph."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int

    def __str__(self) -> str:
        return f"{self.name}: {1e3 * self.seconds:.2f} ms, {self.nodes_before} -> {self.nodes_after} nodes"


@dataclass
class Frame:
    """One graph that Dynamo captured."""

    name: str
    sites: list[Site] = field(default_factory=list)
    note: str = ""
    """Why the whole graph was left to Inductor, if it was."""
    change: str = ""
    """The change to the model that would help in that case."""
    also: list[str] = field(default_factory=list)
    """Texts about other rewrites of this graph, such as routers and attention."""
    not_compiled: str = ""
    """Inductor's error if it could not compile the rewritten graph in this process. The graph then runs as
    captured."""
    unrouted: list[Site] = field(default_factory=list)
    """Products that could belong to experts, although neither a router nor a name shows it. They stay as they
    are without a warning, like linear layers."""
    passes: list[PassRun] = field(default_factory=list)
    """Each pass that ran, in order, with its time."""

    def __str__(self) -> str:
        head = f"graph {self.name}: "
        if self.note:
            head += self.note
        elif not self.sites:
            head += "nothing that looks like experts"
        else:
            head += _count(self.sites)
        sites = ("  " + str(s).replace("\n", "\n  ") for s in self.sites)
        change = [f"  change: {self.change}"] if self.change else []
        failed = [f"  {_NOT_COMPILED}{self.not_compiled}"] if self.not_compiled else []
        dense = (
            f"  no experts: {s.reason}\n      change: {s.change}\n      at {s.place}" for s in self.unrouted
        )
        return "\n".join([head, *failed, *change, *sites, *dense, *(f"  {text}" for text in self.also)])


_NOT_COMPILED = (
    "Inductor could not compile this graph with experts in 4 bits, so it runs as the model has it. "
    "This is a fault of fp4_ops; please report it. The error: "
)


@dataclass
class Report:
    """Everything that was found in one run of a model."""

    frames: list[Frame] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)
    """Reasons why Dynamo ended a graph. Code between two graphs runs in Python."""
    skipped: int = 0
    """Number of frames that Dynamo did not capture."""
    not_captured: list[str] = field(default_factory=list)
    """The latest 64 of these frames: function, file and line, and the line and reason that stopped Dynamo."""
    seen_through: list[str] = field(default_factory=list)
    """Branches on a number of rows that were left out of the graphs, because the code that they skip does
    nothing without rows."""
    hints: list[str] = field(default_factory=list)
    """The smallest changes that would let more be rewritten."""
    memory: str = ""
    """A plan that says where the weights are stored, if the model was given a budget (gpu_memory)."""

    @property
    def sites(self) -> list[Site]:
        return [s for f in self.frames for s in f.sites]

    @property
    def bytes_before(self) -> int:
        """Bytes of all weights that were rewritten, each counted once."""
        return sum(dict(self._weight_bytes(after=False)).values())

    @property
    def bytes_after(self) -> int:
        return sum(dict(self._weight_bytes(after=True)).values())

    def _weight_bytes(self, after: bool) -> list[tuple[tuple[str, ...], int]]:
        return [(s.weights, s.bytes_after if after else s.bytes_before) for s in self.sites if s.rewritten]

    def __str__(self) -> str:
        out = [str(f) for f in self.frames]
        out += [
            f"no branch at {place}: what it skips was proved to do nothing without rows"
            for place in self.seen_through
        ]
        out += [f"graph break: {reason}" for reason in self.graph_breaks]
        if self.skipped:
            runs = "1 function runs as it" if self.skipped == 1 else f"{self.skipped} functions run as they"
            out.append(
                f"{runs} always did, because Dynamo could not capture {'it' if self.skipped == 1 else 'them'}"
            )
            out += [f"  {told}" for told in self.not_captured]
        out += [f"hint: {hint}" for hint in self.hints]
        if self.memory:
            out.append(self.memory)
        graphs = "1 graph" if len(self.frames) == 1 else f"{len(self.frames)} graphs"
        total = f"{_count(self.sites)} in {graphs}"
        if self.bytes_before:
            total += f"; expert weights {_mib(self.bytes_before)} -> {_mib(self.bytes_after)}"
        return "\n".join([*out, total])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return {**asdict(self), **totals}


def _count(sites: list[Site]) -> str:
    own = sum(s.rewritten and not s.weights for s in sites)
    done = sum(s.rewritten for s in sites) - own
    text = f"{done} rewritten, {len(sites) - done - own} left alone"
    return f"{text}, {own} as the model has it" if own else text


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB"
