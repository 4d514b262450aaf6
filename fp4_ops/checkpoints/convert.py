"""Converts a bf16 checkpoint to a 4-bit one, file by file, in bounded memory. It can be resumed.

Each file of the source becomes the file of the same name in the result. A result file gets its name only when
it is complete. config.json is written last, so a folder with a config.json is complete. A progress file lists
what is done; a run that was killed continues with the first unfinished file.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from ..models.outside_experts import KEEP, Kind, chosen_formats
from ..quantization import Method, find_method, quantize_weight
from ..runtime.devices import usable_device
from .check import Header, check_loadable
from .convert_report import ConvertReport
from .dialects import (
    EXPERTS_TARGET,
    Codes,
    Dialect,
    StoredWeight,
    describe,
    dialects_of,
    encode,
    writing_dialect,
)
from .files import (
    CHUNK,
    DAMAGED,
    INCOMPLETE,
    CheckpointError,
    Reader,
    TensorInfo,
    Writer,
    are_neighbours,
    read_header,
    write_json,
)
from .folder import Folder
from .outside import find_outside, is_linear
from .progress import progress_bar
from .resume import Progress
from .source import MATRIX, PARTNER, eight_bits, stack_of

if TYPE_CHECKING:
    from .calibrated import CalibratedLayers

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IN_FLIGHT = 64 << 20
"""The most bytes that are read ahead of the quantiser, and the most that wait to be written."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Endings of files that hold weights or list them. These are not copied."""


@dataclass(frozen=True)
class Unit:
    """A step of the work: what is read, and the resulting tensors."""

    reads: list[tuple[TensorInfo, ...]]
    """Each entry is one matrix [N, K], or two that are quantised as one [gate; up]."""
    names: list[str]
    """The resulting weights: one, or gate and up, or one of these and "" for the other, which another file
    has. Empty: `reads` is one tensor, copied as it is."""
    outputs: list[Header]
    dialect: Dialect | None = None
    """How the result is stored; None for tensors that are not quantised."""
    transposed: bool = False
    """The matrices are stored [K, N]."""
    dequantized: bool = False
    """True if it is in 8 bits and is written in the model's dtype instead of copied."""
    rounded: bool = False
    """True if it is rounded, whatever the experts' method is: a linear layer outside the experts."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read from this step's own source file, without a partner's in another file."""
        if self.names and not all(self.names):
            return self.reads[0][self.names.index("") ^ 1].nbytes
        return sum(info.nbytes for read in self.reads for info in read)


class Plan:
    """Plan of the files that `quantize_checkpoint` writes, made from the source's headers alone."""

    def __init__(self, folder: Folder, format: str, kinds: Mapping[Kind, str]) -> None:
        """kinds: the linear layers outside the experts that are quantised, too, with their formats."""
        self.folder, self.format = folder, format
        tensors = folder.tensors
        for info in tensors.values():
            if info.foreign:
                raise CheckpointError(
                    f"fp4: {info} has dtype {info.foreign}, which cannot be copied. Quantise the original "
                    "weights"
                )
        self.eight = eight_bits(folder)
        """The source's weights in 8 bits, by the tensor of their codes. They are dequantised on the way."""
        self._scales = {
            w.name + s for w in self.eight.values() for s in w.dialect.suffixes if s != w.dialect.packed
        }
        name = folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16"
        self.dtype = getattr(torch, str(name).removeprefix("torch."), torch.bfloat16)
        """The dtype for weights in 8 bits that do not belong to experts."""
        places = {place: n for n, info in tensors.items() if (place := stack_of(info)) is not None}
        self.stacks = {n: self._is_transposed(owner, places) for (owner, _), n in places.items()}
        """For each stack, whether it is [E, K, N]."""
        singles = [n for n in tensors if MATRIX.match(n)]
        self.gated = any(MATRIX.sub(r"\2", n) in ("gate_proj", "w1") for n in singles)
        if not singles and not self.stacks:
            other = next((n for n in tensors if "expert" in n), None)
            family = folder.config.get("model_type") or "model of no known type"
            raise CheckpointError(
                f"fp4: {folder.path}, a {family}, has no expert weights (...experts.N.gate_proj.weight and "
                "the like, or ...experts.gate_up_proj)"
                + f", which {other} is none of"
                * bool(other)
                + ": nothing was written. If it is a Mixture of Experts, load it and compile it with "
                "torch.compile(model, backend='fp4')"
            )
        self.outside = find_outside(folder, kinds)
        k: dict[str, set[int]] = {}
        for name, own in [*((n, format) for n in (*singles, *self.stacks)), *self.outside.items()]:
            k.setdefault(own, set()).add(self._check(tensors[name], own))
        self.dialects = {
            own: writing_dialect(own, folder.config.get("model_type"), sizes, not self.outside)
            for own, sizes in k.items()
        }
        """The dialect of each format of the result. The experts' is the first."""
        self.dialect = self.dialects[format]
        if self.dialect.stacked and singles:
            raise CheckpointError(
                f"fp4: {folder.path} has expert weights both stacked and one by one; all must be stored "
                "one way"
            )
        self.weights = (*singles, *self.stacks)
        """The tensors that hold experts' weights."""
        self.matrices = len(singles) + sum(tensors[n].shape[0] for n in self.stacks)

    def _is_transposed(self, owner: str, places: dict[tuple[str, str], str]) -> bool:
        """Returns whether the stacks are [E, K, N], judged by the sizes of gate_up (or up alone) and down."""
        names = [places.get((owner, part)) for part in ("gate_up_proj", "up_proj", "down_proj")]
        parts, up, down = 2 if names[0] else 1, names[0] or names[1], names[2]
        if up is None or down is None:
            one = self.folder.tensors[up or down or ""]
            raise CheckpointError(
                f"fp4: {one} has no counterpart (gate_up_proj or up_proj, down_proj) beside it. {INCOMPLETE}"
            )
        first, second = self.folder.tensors[up], self.folder.tensors[down]
        (e, a, b), (e2, c, d) = first.shape, second.shape
        if e == e2 and (a, b) == (parts * d, c):
            return False
        if e == e2 and (b, a) == (parts * c, d):
            return True
        raise CheckpointError(
            f"fp4: {first} {list(first.shape)} does not fit {second.name} {list(second.shape)}"
        )

    def _check(self, info: TensorInfo, format: str) -> int:
        """Checks a weight that is to be in `format` and returns its K."""
        if info.dtype not in SOURCE_DTYPES and info.name not in self.eight:
            raise CheckpointError(
                f"fp4: {info} is {info.dtype}; it must be bfloat16, float16 or float32. Quantise the "
                "original weights"
            )
        if len(info.shape) != (3 if info.name in self.stacks else 2):
            raise CheckpointError(f"fp4: {info} has shape {list(info.shape)}; it must be [N, K]")
        k = info.shape[-2 if self.stacks.get(info.name) else -1]
        if k % (block := FORMATS[format].block):
            raise CheckpointError(
                f"fp4: {info} has K = {k}; {format} files need a multiple of {block}. Use another format"
            )
        self._partner(info)
        return k

    def _partner(self, info: TensorInfo) -> TensorInfo | None:
        """Returns the up matrix of a gate, or the gate of an up."""
        match = MATRIX.match(info.name)
        if match is None or match[2] not in PARTNER:
            return None
        if not self.gated:  # an up without a gate
            return None
        name = f"{match[1]}{PARTNER[match[2]]}.weight"
        partner = self.folder.tensors.get(name)
        if partner is None:
            raise CheckpointError(f"fp4: {info} has no {name} beside it. {INCOMPLETE}")
        if partner.shape != info.shape or partner.dtype != info.dtype:
            raise CheckpointError(
                f"fp4: {info} and {name} differ in shape or dtype; they must be alike. {DAMAGED}"
            )
        return partner

    @property
    def stored(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        targets: dict[str, list[str]] = {self.format: [EXPERTS_TARGET]}
        for name, format in self.outside.items():
            targets.setdefault(format, []).append(name.removesuffix(".weight"))
        groups = [(self.dialects[format], names) for format, names in targets.items()]
        linears = (n for n in self.folder.tensors if is_linear(self.folder, n) and n not in self.outside)
        return describe(groups, sorted(n.removesuffix(".weight") for n in linears))

    def layers(self, file: Path, calibrated: CalibratedLayers) -> set[int]:
        """Returns the layers that must be done before the result of a source file can be written."""
        reads = (read[0].name for unit in self.units(file) if unit.names for read in unit.reads)
        return {calibrated.layer(name) for name in reads if name in calibrated}

    def units(self, file: Path) -> Iterator[Unit]:
        """Yields the work for one source file, in the order in which its result is written."""
        taken: set[str] = set()
        for info in self.folder.of_file(file):
            if info.name in taken or info.name in self._scales:
                continue
            if info.name in self.stacks:
                yield from self._stack(info)
            elif MATRIX.match(info.name):
                partner = self._partner(info)
                pair = [info, partner] if partner else [info]
                pair.sort(key=lambda t: t.name.endswith((".up_proj.weight", ".w3.weight")))
                taken.update(t.name for t in pair)
                names = [t.name.removesuffix(".weight") if t.file == file else "" for t in pair]
                outputs = [o for name in names if name for o in _outputs(name, info.shape, self.dialect)]
                yield Unit([tuple(pair)], names, outputs, self.dialect)
            elif info.name in self.outside:
                name = info.name.removesuffix(".weight")
                own = self.dialects[self.outside[info.name]]
                yield Unit([(info,)], [name], _outputs(name, info.shape, own), own, rounded=True)
            elif info.name in self.eight:
                yield Unit([(info,)], [], [(info.name, self.dtype, info.shape)], dequantized=True)
            else:
                yield Unit([(info,)], [], [(info.name, info.dtype, info.shape)])

    def _stack(self, info: TensorInfo) -> Iterator[Unit]:
        e, a, b = info.shape
        transposed = self.stacks[info.name]
        shape = (b, a) if transposed else (a, b)
        rows: list[tuple[TensorInfo, ...]] = [(info.row(i),) for i in range(e)]
        if self.dialect.stacked:
            outputs = _outputs(info.name, (e, *shape), self.dialect)
            yield Unit(rows, [info.name], outputs, self.dialect, transposed)
            return
        place = stack_of(info)
        assert place is not None
        for i, row in enumerate(rows):
            name = f"{place[0]}.{i}.{place[1]}"
            yield Unit([row], [name], _outputs(name, shape, self.dialect), self.dialect, transposed)


def _outputs(name: str, shape: tuple[int, ...], dialect: Dialect) -> list[Header]:
    """Returns the headers of a weight's tensors in a dialect."""
    *rows, k = shape
    format = FORMATS[dialect.format]
    with torch.device("meta"):
        packed = torch.empty((*rows, k // 2), dtype=torch.uint8)
        block_scale = torch.empty((*rows, format.num_blocks(k)), dtype=format.scale_dtype)
    codes = Codes(packed, block_scale, torch.ones(()) if format.has_global_scale else None)
    return [(key, t.dtype, tuple(t.shape)) for key, t in encode(name, codes, dialect).items()]


def quantize_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str = "nvfp4",
    *,
    attention: str = KEEP,
    dense: str = KEEP,
    head: str = KEEP,
    method: str = "rtn",
    calibration: Tensor | None = None,
    batch: int = 8,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> ConvertReport:
    """Quantises the expert weights of a checkpoint folder, and copies everything else.

    source: a folder of safetensors files in bfloat16, float16 or float32, and its config.json.
    out: a folder that does not exist, is empty, or holds what an earlier run of the same command left.
    format: the experts'. attention, dense, head: formats for linear layers outside the experts, or "keep", as
        in `fp4_ops.prepare`. These layers are rounded, whatever the method is.
    method: one of fp4_ops.quantization.METHODS. The gate and up matrices of an expert are quantised as one,
        so that they have one global scale.
    calibration: tokens, int64 [windows, length], for the methods that need them. They run through the
        original model, `batch` windows at a time, as in `fp4_ops.quantization.calibrate`.
    device: where matrices are quantised, and the model runs.

    The memory needed is a few matrices, whatever the size of the files. With calibration it is the model
    without its experts, the experts of one decoder layer, the moments of their inputs (float32 [E, K, K] for
    gptq), and what a layer puts out for all tokens; the layers' codes wait beside the result in files.

    Raises CheckpointError, naming file and tensor, if something cannot be read or quantised. `out` then has
    no config.json.
    """
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    chosen, device = find_method(method, format), usable_device(device)
    _check_calibration(chosen, calibration)
    kinds = chosen_formats({"attention": attention, "dense": dense, "head": head})
    folder, to = Folder(source), Path(out)
    plan = Plan(folder, format, kinds)
    outputs = (output for file in folder.files for unit in plan.units(file) for output in unit.outputs)
    check_loadable(folder, outputs, dialects_of(plan.stored))
    resumable = Progress(folder, to, format, method, calibration, batch, kinds)
    layers = None
    if calibration is not None:
        from .calibrated import CalibratedLayers, Text  # this imports transformers, which only a model needs

        text = Text(calibration, batch)
        layers = CalibratedLayers(folder, plan.weights, to, format, chosen, text, device, plan.eight)
    resumable.begin()
    total = sum(t.nbytes for t in folder.tensors.values())
    with progress_bar(total, "quantizing", progress) as bar:
        for files in _ready(plan, layers, progress):
            with _Pipeline(chosen, device, layers, plan.eight) as pipeline:
                for file in files:
                    if resumable.is_done(file):
                        bar.update(sum(t.nbytes for t in folder.of_file(file)))
                        continue
                    result = to / folder.name(file)
                    result.parent.mkdir(parents=True, exist_ok=True)
                    done = partial(resumable.done, file)
                    pipeline.convert(list(plan.units(file)), result, bar.update, done)
                pipeline.flush()
    report = _finish(plan, to, resumable, layers)
    if layers is not None:
        layers.close()
    return report


def _check_calibration(method: Method, tokens: Tensor | None) -> None:
    if tokens is None:
        if method.calibration != "none":
            raise ValueError(
                f"fp4: method {method.name!r} needs calibration text: calibration is None; give one "
                "(--calibration FILE)"
            )
        return
    if method.calibration == "none":
        raise ValueError(
            f"fp4: method {method.name!r} takes no calibration: leave the text out, or use a method that "
            "takes one (weighted, gptq)"
        )
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise ValueError(
            f"fp4: calibration is {tokens.dtype} {list(tokens.shape)}; it must be int64 [windows, length]"
        )


def _ready(plan: Plan, layers: CalibratedLayers | None, progress: bool) -> Iterator[list[Path]]:
    """Yields lists of source files that are ready to be converted. The next list comes after these are
    done."""
    files = plan.folder.files
    if layers is None:
        yield files
        return
    needs = {file: plan.layers(file, layers) for file in files}
    waiting, kept = list(files), set().union(*needs.values())
    for count in layers.run(progress):
        ready = [file for file in waiting if all(layer < count for layer in needs[file])]
        yield ready
        waiting = [file for file in waiting if file not in ready]
        for layer in kept - set().union(*(needs[file] for file in waiting)):
            layers.forget(layer)
            kept.remove(layer)
    assert not waiting


class Part(NamedTuple):
    """A piece that is read for a unit: a matrix, or some of the bytes that are copied."""

    unit: Unit
    infos: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


def _parts(units: list[Unit]) -> Iterator[Part]:
    for unit in units:
        for read in unit.reads:
            if unit.names or unit.dequantized:
                yield Part(unit, read)
            else:
                yield from (Part(unit, (chunk,)) for chunk in read[0].chunks())


def _runs(units: list[Unit], nbytes: int) -> Iterator[list[Part]]:
    """Groups the parts of units: neighbours in a file together, up to `nbytes` bytes."""
    run: list[Part] = []
    for part in _parts(units):
        size = sum(p.nbytes for p in run) + part.nbytes
        if run and (size > nbytes or not are_neighbours((*run[-1].infos, *part.infos))):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


class _Pipeline:
    """One thread reads ahead, several quantise one matrix each, and one writes. Copies skip the quantisers.

    At most IN_FLIGHT bytes wait on either side. Each quantising thread uses only itself: threads that spin
    while they wait for each other would slow the reading and writing threads.
    """

    def __init__(
        self,
        method: Method,
        device: torch.device,
        layers: CalibratedLayers | None,
        eight: dict[str, StoredWeight],
    ) -> None:
        self.method, self.device, self._layers = method, device, layers
        self._eight = eight
        self._reader = Reader(once=True)
        self._threads = torch.get_num_threads()
        workers = self._threads if self.device.type == "cpu" else 1
        self._reading, self._writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._working = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        self._behind: deque[tuple[int, Future[Any]]] = deque()
        self._unfinished: list[Writer] = []
        self._failed = False
        """True if a step of the writing thread has raised. Later steps, which depend on it, are skipped."""

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool in (self._reading, self._working, self._writing):
            pool.shutdown(cancel_futures=True)
        for writer in self._unfinished:
            writer.abandon()
        self._reader.close()
        torch.set_num_threads(self._threads)  # for threads that start from now on

    def convert(
        self,
        units: list[Unit],
        file: Path,
        update: Callable[[int], Any],
        done: Callable[[], Any],
    ) -> None:
        """Converts one file. It may not yet be on the disk when this returns. Calls `done` when it is."""
        writer = Writer(file, [o for unit in units for o in unit.outputs])
        self._unfinished.append(writer)
        parts = self._ahead(units)
        for unit in units:
            if not unit.names:
                self._write(0, writer.begin, *unit.outputs[0])
                whole = [unit.reads[0][0]]
                for info in whole if unit.dequantized else whole[0].chunks():
                    self._write(info.nbytes, writer.append, next(parts))
            else:
                codes = [next(parts) for _ in unit.reads]
                for name, tensor in _encode(unit, codes):
                    self._write(tensor.nbytes, writer.write, name, tensor)
            update(unit.nbytes)
        self._write(0, self._complete, writer, done)

    def _complete(self, writer: Writer, done: Callable[[], Any]) -> None:
        """Gives a file its name and notes it. It is one step, so that an interrupt cannot cancel half."""
        writer.close()
        self._unfinished.remove(writer)
        done()

    def flush(self) -> None:
        while self._behind:
            self._behind.popleft()[1].result()

    def _write(self, nbytes: int, function: Callable[..., Any], *args: Any) -> None:
        self._behind.append((nbytes, self._writing.submit(self._step, function, *args)))
        while self._behind and (self._behind[0][1].done() or sum(n for n, _ in self._behind) > IN_FLIGHT):
            self._behind.popleft()[1].result()

    def _step(self, function: Callable[..., Any], *args: Any) -> None:
        if self._failed:
            return
        try:
            function(*args)
        except BaseException:
            self._failed = True
            raise

    def _ahead(self, units: list[Unit]) -> Iterator[Any]:
        """Yields, in order, the Codes of each matrix, and the bytes of copied tensors in pieces."""
        waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        held = 0
        todo = self._submit(units)
        while True:
            while held < IN_FLIGHT and (submitted := next(todo, None)) is not None:
                waiting.append(submitted)
                held += submitted[0]
            if not waiting:
                return
            nbytes, result = waiting.popleft()
            yield result()
            held -= nbytes

    def _submit(self, units: list[Unit]) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Starts to read and quantise the parts. Yields the size of each, and a function that waits for
        its result."""
        for run in _runs(units, 0 if self._layers else CHUNK):
            infos = run[0].infos
            if self._layers and run[0].unit.names and infos[0].name in self._layers:
                yield run[0].nbytes, self._reading.submit(self._layers.codes, infos[0].name).result
                continue
            read = self._reading.submit(self._read, [part.infos for part in run])
            for i, part in enumerate(run):
                if part.unit.names:
                    yield part.nbytes, self._working.submit(self._quantize, part, read, i).result
                elif part.unit.dequantized:
                    dtype = part.unit.outputs[0][1]
                    yield part.nbytes, self._working.submit(self._values, part, read, i, dtype).result
                else:
                    yield part.nbytes, partial(lambda read, i: read.result()[i], read, i)

    def _read(self, reads: list[tuple[TensorInfo, ...]]) -> list[Tensor]:
        return [self._reader.read_joint(reads[0])] if len(reads) == 1 else self._reader.read_run(reads)

    def _values(self, part: Part, read: Future[list[Tensor]], i: int, dtype: torch.dtype) -> Tensor:
        """Returns what was read for a part. Weights in 8 bits are decoded."""
        matrix = read.result()[i]
        if part.infos[0].name.partition("[")[0] not in self._eight:
            return matrix
        values = []
        with Reader() as reader:
            for info, codes in zip(part.infos, matrix.split([t.shape[0] for t in part.infos])):
                stored, expert = self._stored(info)
                if codes.dim() == 3:  # all experts in one tensor, not one by one
                    values.append(stored.dialect.dequantize(stored, reader.read, dtype))
                else:
                    values.append(stored.dialect.matrix(stored, expert, codes, reader.read, dtype))
        return torch.cat(values)

    def _stored(self, info: TensorInfo) -> tuple[StoredWeight, int | None]:
        """Returns the 8-bit weight that is read. If it holds all experts, also which expert is wanted."""
        name, _, expert = info.name.partition("[")
        return self._eight[name], int(expert[:-1]) if expert else None

    def _quantize(self, part: Part, read: Future[list[Tensor]], i: int) -> Codes:
        matrix = self._values(part, read, i, torch.float32)
        matrix = (matrix.T if part.unit.transposed else matrix).to(self.device).contiguous()
        assert part.unit.dialect is not None
        format = part.unit.dialect.format
        try:
            if self.method.name == "rtn" or part.unit.rounded:
                packed, block_scale, factor = torch.ops.fp4.quantize(matrix, format)
            else:
                k = matrix.shape[-1]  # calibrated methods get here for matrices that no text reaches
                nothing = matrix.new_zeros(k, k) if self.method.calibration != "none" else None
                packed, block_scale, factor = quantize_weight(
                    matrix, format, self.method.name, calibration=nothing
                )
        except (RuntimeError, ValueError) as error:
            names = " and ".join(map(str, part.infos))
            raise CheckpointError(f"fp4: {names} cannot be quantised: {error}") from None
        global_scale = factor.cpu() if factor is not None and factor.numel() else None
        return Codes(packed.cpu(), block_scale.cpu(), global_scale)


def _encode(unit: Unit, codes: list[Codes]) -> Iterator[tuple[str, Tensor]]:
    dialect = unit.dialect
    assert dialect is not None
    if dialect.stacked:
        scales = torch.stack([c.block_scale.view(torch.uint8) for c in codes])
        whole = Codes(torch.stack([c.packed for c in codes]), scales.view(codes[0].block_scale.dtype), None)
        yield from encode(unit.names[0], whole, dialect).items()
        return
    (joint,) = codes
    rows = joint.packed.shape[0] // len(unit.names)
    for i, name in enumerate(unit.names):
        if name:
            part = slice(i * rows, (i + 1) * rows)
            one = Codes(joint.packed[part], joint.block_scale[part], joint.global_scale)
            yield from encode(name, one, dialect).items()


def _finish(plan: Plan, to: Path, progress: Progress, layers: CalibratedLayers | None) -> ConvertReport:
    """Completes the folder: writes the index, the files beside the weights, and last the config."""
    folder = plan.folder
    results = [folder.name(f) for f in folder.files]
    weight_map = {name: result for result in results for name in read_header(to / result)}
    after = sum((to / result).stat().st_size for result in results)
    if folder.index is not None:
        write_json(
            to / folder.name(folder.index),
            {"metadata": {"total_size": after}, "weight_map": dict(sorted(weight_map.items()))},
        )
    # ModelOpt's file says how the source was stored, as its config.json did.
    skip = {"config.json", "hf_quant_config.json", *results}
    for file in sorted(folder.path.iterdir()):
        if file.is_file() and file.name not in skip and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, to / file.name)
    own = {key: value for key, value in folder.config.items() if key != "compression_config"}
    if text := own.get("text_config"):
        own["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    config = {**own, "quantization_config": plan.stored}
    write_json(to / "config.json", config)
    progress.file.unlink()
    before = sum(t.nbytes for t in folder.tensors.values())
    return ConvertReport(
        to,
        plan.format,
        " and ".join(dict.fromkeys(d.name for d in plan.dialects.values())),
        plan.matrices,
        len(folder.files),
        progress.resumed,
        before,
        after,
        layers.unseen if layers else 0,
        plan.matrices - len(layers) if layers else 0,
        Counter(plan.outside.values()),
    )
