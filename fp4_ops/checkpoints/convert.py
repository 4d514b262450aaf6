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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..meta.formats import FORMATS
from ..models.outside_experts import KEEP, chosen_formats
from ..quantization import Method, find_method, quantize_weight
from ..runtime.devices import usable_device
from .check import check_loadable
from .convert_plan import Plan, Unit
from .dialects import (
    Codes,
    StoredWeight,
    dialects_of,
    encode,
)
from .files import (
    CHUNK,
    CheckpointError,
    Reader,
    TensorInfo,
    Writer,
    are_neighbours,
    read_header,
    write_json,
)
from .folder import Folder
from .foreign import PROGRESS
from .model_card import CARD, write_card
from .progress import progress_bar
from .resume import Progress

if TYPE_CHECKING:
    from .calibrated import CalibratedLayers

IN_FLIGHT = 64 << 20
"""The largest number of bytes that are read ahead of the quantiser, and also that wait to be written."""

INSTEAD_OF_FP8 = (
    "quantize writes these layers in 4 bits or leaves them; for fp8 load the folder, and call "
    "fp4_ops.prepare(model, {kind}='fp8') or give from_pretrained an FP4Config({kind}='fp8')"
)
"""Advice in the error for linear layers in fp8."""

CONTINUES = "Once this is fixed, the same command or call continues with the first file that is not done"
"""Advice after an error of the disk."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Endings of files that hold weights or list them. These are not copied."""

_TEMPLATES = "additional_chat_templates"
"""The folder with a tokenizer's named chat templates. Other folders of the source may be anything."""


@dataclass(frozen=True)
class ConvertReport:
    """Result of `quantize_checkpoint`."""

    out: Path
    format: str
    dialect: str
    matrices: int
    files: int
    resumed: int
    """Files that an earlier run had finished."""
    bytes_before: int
    bytes_after: int
    unseen: int = 0
    """Experts that no token of the calibration text reached."""
    outside: int = 0
    """Expert matrices that have no place in the model, so that no text can calibrate them."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """The number of linear layers outside the experts that are in 4 bits, too, by format."""

    @property
    def contents(self) -> str:
        """Says what is in 4 bits, and in which dialect it is stored."""
        counts = {self.format: [f"{self.matrices} expert matrices"]}
        for format, count in self.linears.items():
            counts.setdefault(format, []).append(f"{count} linear layers")
        what = ", ".join(f"{' and '.join(kinds)} in {format}" for format, kinds in counts.items())
        return f"{what}, stored as {self.dialect}"

    @property
    def uncalibrated(self) -> list[str]:
        """Says which experts were quantised without the calibration text."""
        lines = []
        if self.unseen:
            lines.append(f"{self.unseen} experts saw no token of the calibration text: quantised without it")
        if self.outside:
            lines.append(f"{self.outside} matrices are no part of the model that runs: quantised without it")
        return lines

    def __str__(self) -> str:
        resumed = f" ({self.resumed} from an earlier run)" if self.resumed else ""
        files = f"{self.files} file{'s' * (self.files != 1)}"
        lines = [
            f"{self.out}: {self.contents}, {files}{resumed}, "
            f"{_size(self.bytes_before)} -> {_size(self.bytes_after)}"
        ]
        return "\n".join(lines + self.uncalibrated)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


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
    format: the format of the experts.
    attention, dense, head: formats for linear layers outside the experts, or "keep", as in `fp4_ops.prepare`.
        These layers are rounded, whatever the method is.
    method: one of fp4_ops.quantization.METHODS. The gate and up matrices of an expert are quantised as one,
        so that they have one global scale.
    calibration: tokens, int64 [windows, length], for the methods that need them. They run through the
        original model, `batch` windows at a time, as in `fp4_ops.quantization.calibrate`.
    device: where matrices are quantised, and the model runs.

    The memory needed is a few matrices, whatever the size of the files. With calibration it is the model
    without its experts, the experts of one decoder layer, the moments of their inputs (float32 [E, K, K] for
    gptq), and the outputs of a layer for all tokens. The layers' codes wait in files beside the result.

    Raises CheckpointError, naming file and tensor, if something cannot be read or quantised, and OSError,
    naming the file, if the disk is full. `out` then has no config.json.
    """
    if format not in FORMATS:
        raise ValueError(f"fp4: format is {format!r}; it must be one of: {', '.join(FORMATS)}")
    chosen, device = find_method(method, format), usable_device(device)
    _check_calibration(chosen, calibration)
    kinds = chosen_formats({"attention": attention, "dense": dense, "head": head}, INSTEAD_OF_FP8)
    folder, to = Folder(source), Path(out)
    plan = Plan(folder, format, kinds)
    outputs = (output for file in folder.files for unit in plan.units(file) for output in unit.outputs)
    check_loadable(folder, outputs, dialects_of(plan.stored), runs=calibration is not None)
    resumable = Progress(folder, to, format, method, calibration, batch, kinds)
    layers = None
    if calibration is not None:
        from .calibrated import CalibratedLayers, Text  # this imports transformers, which only a model needs

        text = Text(calibration, batch)
        layers = CalibratedLayers(folder, plan.weights, to, format, chosen, text, device, plan.eight)
    try:
        return _convert(plan, to, resumable, chosen, device, layers, progress)
    except OSError as error:
        error.add_note(f"fp4: {CONTINUES}")
        raise


def _convert(
    plan: Plan,
    to: Path,
    resumable: Progress,
    method: Method,
    device: torch.device,
    layers: CalibratedLayers | None,
    progress: bool,
) -> ConvertReport:
    folder = plan.folder
    resumable.begin()
    total = sum(t.nbytes for t in folder.tensors.values())
    with progress_bar(total, "quantizing", progress) as bar:
        for files in _ready(plan, layers, progress):
            with _Pipeline(method, device, layers, plan.eight) as pipeline:
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
    """One thread reads ahead, several threads quantise one matrix each, and one thread writes. Tensors that
    are only copied skip the quantisers.

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
                k = matrix.shape[-1]  # a calibrated method comes here for matrices that no text reaches
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
    skip = {"config.json", "hf_quant_config.json", CARD, PROGRESS, *results}
    for file in sorted(folder.path.iterdir()):
        adapter = file.name.startswith("adapter_model.")  # adapter_config.json is useless without it
        if file.is_file() and file.name not in skip and (adapter or not file.name.endswith(_WEIGHTS)):
            shutil.copyfile(file, to / file.name)
    if (folder.path / _TEMPLATES).is_dir():
        shutil.copytree(
            folder.path / _TEMPLATES, to / _TEMPLATES, copy_function=shutil.copyfile, dirs_exist_ok=True
        )
    own = {key: value for key, value in folder.config.items() if key != "compression_config"}
    if text := own.get("text_config"):
        own["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    config = {**own, "quantization_config": plan.stored}
    before = sum(t.nbytes for t in folder.tensors.values())
    report = ConvertReport(
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
    _write_card(plan, report, progress.job)
    write_json(to / "config.json", config)
    progress.file.unlink()
    return report


def _write_card(plan: Plan, report: ConvertReport, job: Mapping[str, Any]) -> None:
    eight = f", but those in 8 bits became {str(plan.dtype).removeprefix('torch.')}" if plan.eight else ""
    facts = [
        report.contents,
        f"all other weights as they were{eight}",
        f"the experts by method `{job['method']}`",
    ]
    options = {"format": plan.format, "method": job["method"], **job.get("outside the experts", {})}
    if text := job.get("calibration"):
        windows, length = text["shape"]
        facts[-1] += f", calibrated with {windows} windows of {length} tokens"
        options |= {"calibration": "TEXT", "calibration-windows": str(windows), "length": str(length)}
        options |= {"batch": str(text["batch"])}
    facts += report.uncalibrated
    if plan.outside:
        facts.append("the linear layers rounded to nearest")
    write_card(plan.folder.path, report.out, facts, plan.dialects, options)
