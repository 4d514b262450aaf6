"""Measures what 4 bits cost a language model: perplexity, and the change of next-token probabilities."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from ..meta.formats import FORMATS
from .activations import ACTIVATION_MODES, ActivationMode
from .calibration import Calibration
from .experts import MATRICES, Arithmetic, ExpertsModule, computing, experts_modules
from .grid import dequantize_weight
from .methods import METHODS, find_method
from .weight import quantize_weight

CACHED_LOGITS = 4 << 30
"""The largest number of bytes of the original model's logits to keep. If there are more, the original model
runs again for each row."""


@dataclass(frozen=True)
class Row:
    """Result of one configuration. The fields from `ratio` on compare it with the original model."""

    format: str
    method: str
    activations: str
    perplexity: float
    ratio: float
    """Perplexity divided by that of the original model."""
    ratio_error: float | None
    """Standard error of the ratio, from how much the windows differ from each other. One window has none."""
    kl: float
    """Mean over positions of KL(original || this), in nats."""
    agreement: float
    """Share of positions where both models rank the same next token first."""
    seconds: float
    """Time to quantise the weights."""

    def __str__(self) -> str:
        error = "-" if self.ratio_error is None else f"{self.ratio_error:.5f}"
        return (
            f"{self.format:8} {self.method:15} {self.activations:11} {self.perplexity:10.4f} "
            f"{self.ratio:8.5f} {error:>7} {self.kl:9.6f} {100 * self.agreement:7.2f}% "
            f"{self.seconds:7.2f} s"
        )


HEAD = (
    f"{'weights':8} {'method':15} {'activations':11} {'perplexity':>10} {'ratio':>8} {'+-':>7} "
    f"{'KL':>9} {'same top':>8} {'quantise':>9}"
)


@dataclass
class Evaluation:
    """The table that `evaluate` makes."""

    tokens: int
    dtype: str
    rows: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        about = f"{self.tokens} tokens; compared with the model in {self.dtype}"
        return "\n".join([about, HEAD, "-" * len(HEAD), *map(str, self.rows)])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


Packed = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Stored:
    """An experts module's weights as a 4-bit checkpoint stores them."""

    format: str
    packed: dict[str, Packed]
    """Packed weights in layout plain, by matrix."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tensor,
    *,
    formats: Sequence[str] = tuple(FORMATS),
    methods: Sequence[str] = tuple(METHODS),
    activations: Sequence[str] = tuple(ACTIVATION_MODES),
    calibration: Calibration | None = None,
    batch: int = 8,
    on_row: Callable[[Row], None] | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> Evaluation:
    """Measures perplexity and agreement for every combination of format, method and activations.

    The first row is the model itself. The second row has experts in float32 without quantisation; it shows
    how much of a difference is only rounding. The experts are emulated in float32 with the weights and
    activations that the operators would use, so every combination runs on any device. The rest of the model
    runs in its own dtype. W4A4 uses the weights' own format.

    tokens: int64 [windows, length], on the model's device. A window has at least 2 tokens, because all but
        its first are predicted.
    calibration: without it, methods that need it are left out.
    on_row: a function that is called with each row when it is ready.
    stored: codes by module, if the model's weights come from a 4-bit checkpoint. They have rows with method
        "stored", before the rows of methods that quantise the values again.

    Raises ValueError, after the first row, if the model has no experts that `prepare` takes. The model does
    not change. Extra memory: the packed weights, and up to 4 GiB of logits.
    """
    combinations = _combinations(formats, methods, activations, calibration)
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            f"fp4: tokens is {list(tokens.shape)}; it must be [windows, length], with a window or more of 2 "
            "tokens or more: all but the first are predicted"
        )
    refused = None
    try:
        modules = experts_modules(model)
        some = modules[0].weight("down")
    except ValueError as error:  # the model itself can still be scored
        modules, refused, some = [], error, next(model.parameters())
    comparison = _Comparison(model, tokens, batch)
    dtype = str(some.dtype).removeprefix("torch.")
    result = Evaluation(comparison.positions, dtype)

    def add(names: tuple[str, str, str], arithmetics: list[Arithmetic], seconds: float) -> None:
        perplexity, ratio, error, kl, agreement = comparison.score(arithmetics)
        result.rows.append(Row(*names, perplexity, ratio, error, kl, agreement, seconds))
        if on_row is not None:
            on_row(result.rows[-1])

    add((dtype, "-", "-"), [], 0.0)
    if refused is not None:
        raise refused
    add(("float32", "-", "-"), [Arithmetic(m) for m in modules], 0.0)
    if stored:
        own_formats = sorted({s.format for s in stored.values()})
        for mode in (ACTIVATION_MODES[name] for name in activations):
            if mode.name not in FORMATS or own_formats == [mode.name]:
                own = [_stored_or_whole(m, stored, mode) for m in modules]
                add(("+".join(own_formats), "stored", mode.label), own, 0.0)
    for format, method, modes in combinations:
        start = time.perf_counter()
        packed = [_quantized(m, format, method, calibration) for m in modules]
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for mode in modes:
            arithmetics: list[Arithmetic] = [
                Emulated(m, format, weights, mode) for m, weights in zip(modules, packed)
            ]
            add((format, method, mode.label), arithmetics, seconds)
    return result


def _combinations(
    formats: Sequence[str],
    methods: Sequence[str],
    activations: Sequence[str],
    calibration: Calibration | None,
) -> list[tuple[str, str, list[ActivationMode]]]:
    for name in activations:
        if name not in ACTIVATION_MODES:
            raise ValueError(
                f"fp4: activations is {name!r}; it must be one of: {', '.join(ACTIVATION_MODES)}"
            )
    found = []
    for format in formats:
        if format not in FORMATS:
            raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
        modes = [ACTIVATION_MODES[a] for a in activations if a not in FORMATS or a == format]
        for name in methods:
            if name in METHODS and format not in METHODS[name].formats:
                continue
            if find_method(name, format).calibration == "none" or calibration is not None:
                found.append((format, name, modes))
    return found


def _quantized(
    experts: ExpertsModule, format: str, method: str, calibration: Calibration | None
) -> dict[str, Packed]:
    needs = METHODS[method].calibration != "none"
    return {
        matrix: quantize_weight(
            experts.weight(matrix),
            format,
            method,
            calibration=calibration.get(experts.name, matrix) if needs and calibration else None,
        )
        for matrix in MATRICES
    }


class Emulated(Arithmetic):
    """Experts with packed weights and rounded activations."""

    def __init__(
        self, experts: ExpertsModule, format: str, packed: dict[str, Packed], mode: ActivationMode
    ) -> None:
        super().__init__(experts)
        self.format, self.packed, self.mode = FORMATS[format], packed, mode

    def quantize_input(self, x: Tensor) -> Tensor:
        return self.mode.round(x)

    def weight(self, matrix: str, expert: int) -> Tensor:
        codes, scale, factor = self.packed[matrix]
        return dequantize_weight(
            codes[expert],
            scale[expert],
            None if factor is None else factor[expert],
            self.format,
            # Only Hopper's kernels round weights, and only for e2m1.
            significant_bits=self.mode.weight_bits if self.format.element == "e2m1" else None,
        )


def _stored_or_whole(
    experts: ExpertsModule, stored: Mapping[str, Stored], mode: ActivationMode
) -> Arithmetic:
    own = stored.get(experts.name)
    return Arithmetic(experts) if own is None else Emulated(experts, own.format, own.packed, mode)


class _Comparison:
    """Scores the model with other experts against its own logits, which are kept if they are small enough."""

    def __init__(self, model: nn.Module, tokens: Tensor, batch: int) -> None:
        self.model, self.batches = model, tokens.split(batch)
        self.positions = tokens.shape[0] * (tokens.shape[1] - 1)
        self._kept: dict[int, Tensor] = {}
        self._nll: Tensor | None = None  # the original's, by window

    def _logits(self, windows: Tensor) -> Tensor:
        return self.model(input_ids=windows, use_cache=False).logits

    def _original(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        logits = self._logits(self.batches[index])
        if logits.nbytes * len(self.batches) <= CACHED_LOGITS:
            self._kept[index] = logits
        return logits

    def score(self, arithmetics: Sequence[Arithmetic]) -> tuple[float, float, float | None, float, float]:
        """Returns (perplexity, ratio, its standard error, KL, agreement).

        The first call must pass no experts.
        """
        sums = []
        for index, windows in enumerate(self.batches):
            want = self._original(index)
            with computing(arithmetics):
                got = self._logits(windows)
            for ids, p, q in zip(windows, want, got):  # one window at a time: vocabularies are large
                log_p, log_q = p[:-1].float().log_softmax(-1), q[:-1].float().log_softmax(-1)
                nll = -log_q.gather(-1, ids[1:, None])
                kl = log_p.exp() * (log_p - log_q)
                same = log_p.argmax(-1) == log_q.argmax(-1)
                sums.append(torch.stack([nll.double().sum(), kl.double().sum(), same.double().sum()]))
        means = torch.stack(sums) * len(sums) / self.positions  # [windows, 3]
        nll, kl, same = means.mean(0).tolist()
        if self._nll is None:
            self._nll = means[:, 0]
        more = means[:, 0] - self._nll
        ratio = math.exp(more.mean().item())
        error = ratio * (more.std() / math.sqrt(len(more))).item() if len(more) > 1 else None
        return math.exp(nll), ratio, error, kl, same
