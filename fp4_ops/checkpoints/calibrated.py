"""Quantises with methods that need calibration text, one decoder layer at a time.

All windows of the text run through the original model layer by layer. The output of a layer is kept until the
next layer has used it. The experts of a layer are read, measured while they run, quantised, and freed. Their
codes wait in a spool until the files that contain them can be written. The codes are those of
`fp4_ops.prepare(model, method=..., calibration=calibrate(model, windows))`.

The input of the next layer is spooled, too, so a run that was killed continues with the layer it had reached.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..quantization import quantize_weight
from ..quantization.calibration import Recorder
from ..quantization.experts import MATRICES, ExpertsModule, computing
from ..quantization.methods import Method
from .dense import DenseModel
from .dialects import Codes, StoredWeight
from .files import CheckpointError, Reader, TensorInfo, Writer, read_header
from .folder import Folder
from .progress import progress_bar

SPOOL = ".fp4_calibrated"
"""The name of the spool folder, beside the result."""


@dataclass(frozen=True)
class Text:
    """Calibration text, int64 [windows, length], and the number of windows that run at a time."""

    windows: Tensor
    batch: int


class CalibratedLayers:
    """Quantises the experts of a folder's decoder layers in turn, and hands out their codes.

    names: the tensors that hold experts' weights. A matrix of a stack is asked for as `name[expert]`.
    """

    def __init__(
        self,
        folder: Folder,
        names: Iterable[str],
        out: Path,
        format: str,
        method: Method,
        text: Text,
        device: torch.device,
        eight: dict[str, StoredWeight],
    ) -> None:
        self.format, self.method, self.text = format, method, text
        self._dense = DenseModel(folder, names, device, eight)
        self._spool = out / SPOOL
        self._layers, path = _decoder_layers(self._dense)
        at = {m.name: int(m.name.removeprefix(f"{path}.").partition(".")[0]) for m in self._dense.experts}
        self._of_layer: list[list[ExpertsModule]] = [[] for _ in self._layers]
        for m in self._dense.experts:
            self._of_layer[at[m.name]].append(m)
        self._where: dict[str, tuple[int, str, int]] = {}  # for each matrix: layer, parameter, expert
        for name, target in self._dense.targets.items():
            layer = at[target.parameter.rpartition(".")[0]]
            if target.expert is not None:
                self._where[name] = (layer, target.parameter, target.expert)
            else:
                for i in range(folder.tensors[name].shape[0]):
                    self._where[f"{name}[{i}]"] = (layer, target.parameter, i)
        self._headers: dict[int, dict[str, TensorInfo]] = {}
        self.unseen = 0
        """The number of experts that no token reached, in the finished layers."""

    def __contains__(self, name: str) -> bool:
        """Returns whether a matrix belongs to the model. Others have no calibration."""
        return name in self._where

    def __len__(self) -> int:
        """Returns the number of matrices that have a calibration."""
        return len(self._where)

    def layer(self, name: str) -> int:
        """Returns the layer of a matrix."""
        return self._where[name][0]

    def codes(self, name: str) -> Codes:
        """Returns a matrix in 4 bits. For a gate or an up, returns both in one matrix."""
        layer, parameter, expert = self._where[name]
        if layer not in self._headers:
            self._headers[layer] = read_header(self._file(layer))
        tensors = self._headers[layer]
        with Reader() as reader:  # a reader of its own, because several threads call this
            packed, block_scale, global_scale = (
                reader.read(tensors[key].row(expert)) if key in tensors else None for key in _keys(parameter)
            )
        assert packed is not None and block_scale is not None
        return Codes(packed, block_scale, global_scale)

    def forget(self, layer: int) -> None:
        """Frees a layer's codes, which are no longer needed."""
        self._headers.pop(layer, None)
        self._file(layer).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the spool after everything is done."""
        shutil.rmtree(self._spool)

    @torch.no_grad()
    def run(self, progress: bool) -> Iterator[int]:
        """Quantises layer after layer. Yields the number of finished layers each time it grows."""
        self._spool.mkdir(exist_ok=True)
        total = sum(map(self._dense.nbytes, self._dense.experts))
        last = max(i for i, modules in enumerate(self._of_layer) if modules)
        with Reader(once=True) as reader, progress_bar(total, "calibrating", progress) as bar:
            hidden, calls = self._inputs()
            start = self._resume(hidden)
            bar.update(sum(self._dense.nbytes(m) for modules in self._of_layer[:start] for m in modules))
            if start:
                yield start
            for i in range(start, last + 1):
                for experts in self._of_layer[i]:
                    self._dense.load(experts, reader)
                recorders = [Recorder(m, self.method.calibration == "full") for m in self._of_layer[i]]
                with computing(recorders):
                    for batch, x in enumerate(hidden):
                        hidden[batch] = _output(self._layers[i], x, *calls[batch][i])
                self._quantize(i, recorders)
                for experts in self._of_layer[i]:
                    self._dense.free(experts)
                    bar.update(self._dense.nbytes(experts))
                self._save_state(i + 1, hidden)
                yield i + 1

    def _quantize(self, layer: int, recorders: list[Recorder]) -> None:
        made: dict[str, Tensor] = {}
        for recorder in recorders:
            for matrix in MATRICES:
                made |= self._quantize_matrix(recorder, matrix)
            self.unseen += int((recorder.tokens == 0).sum())
        if made:
            _write(self._file(layer), made)

    def _quantize_matrix(self, recorder: Recorder, matrix: str) -> dict[str, Tensor]:
        parameter = self._dense.parameter(recorder.experts, matrix)
        moments = recorder.moments(matrix)
        if not moments.isfinite().all():
            raise CheckpointError(
                f"fp4: with the calibration text, inputs of {parameter} are NaN or infinite; they must be "
                "finite. Use "
                "another text, or method 'search', which needs none"
            )
        codes = quantize_weight(
            recorder.experts.weight(matrix), self.format, self.method.name, calibration=moments
        )
        return {key: t.cpu() for key, t in zip(_keys(parameter), codes) if t is not None}

    def _inputs(self) -> tuple[list[Tensor], list[list[Call]]]:
        """Returns, for each batch, the input of the first layer and the other arguments of every layer.

        The model runs with layers that do nothing, because the other arguments do not depend on the hidden
        states.
        """
        hidden, calls = [], []
        for windows in self.text.windows.split(self.text.batch):
            stubs = [_Stub(layer, is_last=layer is self._layers[-1]) for layer in self._layers]
            try:
                with suppress(_Enough):
                    self._dense.model(input_ids=windows.to(self._dense.device), use_cache=False)
            finally:
                for stub in stubs:
                    stub.remove()
            hidden.append(stubs[0].hidden)
            calls.append([stub.call for stub in stubs])
        return hidden, calls

    def _file(self, layer: int) -> Path:
        return self._spool / f"layer-{layer:05}.safetensors"

    def _states(self) -> list[Path]:
        return sorted(self._spool.glob("state-*.safetensors"))

    def _save_state(self, layer: int, hidden: list[Tensor]) -> None:
        """Saves the inputs of `layer`. All layers before it are done."""
        old = self._states()
        state = {str(i): x.cpu() for i, x in enumerate(hidden)} | {"unseen": torch.tensor([self.unseen])}
        _write(self._spool / f"state-{layer:05}.safetensors", state)
        for file in old:
            file.unlink()

    def _resume(self, hidden: list[Tensor]) -> int:
        """Returns the layer to continue with, and sets `hidden` to its input."""
        states = self._states()
        if not states:
            return 0
        with Reader() as reader:
            state = read_header(states[-1])
            for i, x in enumerate(hidden):
                hidden[i] = reader.read(state[str(i)], x.device)
            self.unseen = int(reader.read(state["unseen"]))
        return int(states[-1].stem.rpartition("-")[2])


def _keys(parameter: str) -> tuple[str, str, str]:
    return f"{parameter}.packed", f"{parameter}.block_scale", f"{parameter}.global_scale"


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    writer = Writer(file, [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])
    try:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _decoder_layers(dense: DenseModel) -> tuple[nn.ModuleList, str]:
    """Returns the list of layers that contains all experts modules, and its name."""
    modules = dict(dense.model.named_modules())

    def lists(experts: ExpertsModule) -> Iterator[str]:
        parts = experts.name.split(".")
        prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
        return (p for p in prefixes if isinstance(modules[p], nn.ModuleList))

    found = {next(lists(m), "") for m in dense.experts}
    path = found.pop()
    if found or not path:
        raise CheckpointError(
            "fp4: the experts of this model are not in one list of layers, which calibration layer by layer "
            "needs; load it, use fp4_ops.prepare(calibration=...), and save it"
        )
    layers = modules[path]
    assert isinstance(layers, nn.ModuleList)
    return layers, path


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer except its hidden states."""


class _Enough(Exception):
    """Ends a run of the model after all layers were called."""


class _Stub:
    """Replaces a layer's forward and notes its arguments."""

    hidden: Tensor
    call: Call

    def __init__(self, layer: nn.Module, is_last: bool) -> None:
        self._layer, self._is_last = layer, is_last
        layer.forward = self._forward  # type: ignore[assignment]

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            self.hidden, *rest = args
        else:
            self.hidden, rest = kwargs.pop("hidden_states"), []
        self.call = (tuple(rest), kwargs)
        if self._is_last:
            raise _Enough
        return self.hidden

    def remove(self) -> None:
        self._layer.__dict__.pop("forward", None)


def _output(layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    out = layer(hidden, *args, **kwargs)
    return out if isinstance(out, Tensor) else out[0]
