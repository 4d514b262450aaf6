"""Loads a model without its experts' weights, and reads those weights one module at a time.

The rest of a Mixture-of-Experts model is small. transformers loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..experts.names import HALVES
from ..quantization.experts import MATRICES, ExpertsModule, experts_modules
from .dialects import StoredWeight
from .families import model_class, register_families
from .files import DAMAGED, INCOMPLETE, OTHER_MODEL, CheckpointError, Reader, TensorInfo
from .folder import Folder
from .load import LoadReport, Source, check_info, detach_places, load_dense
from .placement import Placement, Target, pattern_of, place, rules

METHOD = "fp4_without_experts"


class _WithoutExperts(QuantizationConfigMixin):
    """Config that tells `_Loader` which tensors `from_pretrained` must leave in the files.

    names: the experts' tensors.
    eight: the weights in 8 bits, by the tensor of their codes.
    """

    def __init__(self, names: Iterable[str], eight: dict[str, StoredWeight]) -> None:
        self.quant_method: Any = METHOD
        self.names = list(names)
        self.eight = eight

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}


class _Loader(HfQuantizer):
    """A quantizer for transformers, because it lets only quantizers change a model before its weights are
    loaded."""

    requires_calibration = False
    quantization_config: _WithoutExperts

    targets: dict[str, Target]
    experts: list[ExpertsModule]
    shapes: dict[str, tuple[int, ...]]
    """Shapes as the model stores them, by parameter."""
    dense: Placement
    """Placement of weights in 8 bits that belong to no expert."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        target = rules(model)
        eight, names = self.quantization_config.eight, set(self.quantization_config.names)
        self.dense = place(model, {w.name: w for n, w in eight.items() if n not in names})
        detach_places(model, self.dense)
        self.targets = {name: target(name) for name in self.quantization_config.names}
        self.experts = experts_modules(model)
        self.shapes = {}
        for m in self.experts:
            for matrix in MATRICES:
                attribute = getattr(m.form, matrix)
                self.shapes[f"{m.name}.{attribute}"] = tuple(getattr(m.module, attribute).shape)
                m.module._parameters[attribute] = None
            m.module._is_hf_initialized = True  # transformers must not initialise it at random
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        patterns = {rf"{t.parameter}$".replace(".", r"\.") for t in self.targets.values()}
        patterns |= {pattern_of(w.name + suffix) for w in eight.values() for suffix in w.dialect.suffixes}
        model._keys_to_ignore_on_load_unexpected = ignored | patterns | self.dense.patterns

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), Reader() as reader:
            source = Source(reader.read, LoadReport("", ""))
            for parameter, placed in self.dense.dense.items():
                owner, _, attribute = parameter.rpartition(".")
                module = model.get_submodule(owner)
                module._parameters[attribute] = load_dense(placed, torch.device("cpu"), source)
        return model

    def is_serializable(self, **_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


Part = tuple[Target, TensorInfo]


class DenseModel:
    """A folder's model, with the weights of its experts modules left in the files.

    names: the tensors that hold experts' weights. `targets` has the place of each. Tensors with no place in
        `experts` do not belong to the model (layers that predict further tokens, for example).

    Raises CheckpointError for weights that are missing or have another shape than the model's.
    """

    def __init__(
        self, folder: Folder, names: Iterable[str], device: torch.device, eight: dict[str, StoredWeight]
    ) -> None:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _WithoutExperts
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = _Loader
        self.device, self._eight = device, eight
        register_families()
        config = AutoConfig.from_pretrained(folder.path)
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):  # we read it
                del part.quantization_config
        how = _WithoutExperts(names, eight)
        model, info = model_class(config).from_pretrained(
            folder.path, config=config, quantization_config=how, output_loading_info=True
        )
        check_info(info, folder.path)
        loader: _Loader = model.hf_quantizer
        self.model: Any = model.to(device).eval()
        self.experts, self._shapes = loader.experts, loader.shapes
        self.targets = {n: t for n, t in loader.targets.items() if t.parameter in self._shapes}
        self._parts: dict[str, list[Part]] = {parameter: [] for parameter in self._shapes}
        for name, target in self.targets.items():
            self._parts[target.parameter].append((target, folder.tensors[name]))
        for m in self.experts:
            for matrix in MATRICES:
                self._check(m, matrix)

    def parameter(self, experts: ExpertsModule, matrix: str) -> str:
        return f"{experts.name}.{getattr(experts.form, matrix)}"

    def nbytes(self, experts: ExpertsModule) -> int:
        """Returns the number of bytes of the weights in the files."""
        return sum(info.nbytes for m in MATRICES for _, info in self._parts[self.parameter(experts, m)])

    def load(self, experts: ExpertsModule, reader: Reader) -> None:
        """Reads the weights of one module. Raises CheckpointError for those that hold NaN or infinity."""
        for matrix in MATRICES:
            parameter = self.parameter(experts, matrix)
            dtype = self._dtype(parameter)
            weight = torch.empty(self._shapes[parameter], dtype=dtype, device=self.device)
            for target, info in self._parts[parameter]:
                for part, spot in _places(weight, target, info, experts.transposed):
                    tensor = self._read(part, reader, dtype)
                    if not tensor.isfinite().all():
                        raise CheckpointError(
                            f"fp4: {info} cannot be quantised: it holds NaN or infinity. {DAMAGED}"
                        )
                    spot.copy_(tensor)
            experts.module._parameters[getattr(experts.form, matrix)] = nn.Parameter(weight, False)

    def _dtype(self, parameter: str) -> torch.dtype:
        """Returns a dtype that holds all parts of a weight. Parts in 8 bits count as the model's dtype."""
        found: set[torch.dtype] = {
            self.model.dtype if info.name in self._eight else info.dtype for _, info in self._parts[parameter]
        }
        return found.pop() if len(found) == 1 else torch.float32

    def _read(self, part: TensorInfo, reader: Reader, dtype: torch.dtype) -> Tensor:
        tensor = reader.read(part, self.device)
        name, _, expert = part.name.partition("[")
        if name not in self._eight:
            return tensor
        stored = self._eight[name]
        one = int(expert[:-1]) if expert else None
        return stored.dialect.matrix(stored, one, tensor, lambda t: reader.read(t, self.device), dtype)

    def free(self, experts: ExpertsModule) -> None:
        for matrix in MATRICES:
            experts.module._parameters[getattr(experts.form, matrix)] = None

    def _check(self, experts: ExpertsModule, matrix: str) -> None:
        """Checks that each part of the weight is there exactly once."""
        parameter = self.parameter(experts, matrix)
        parts, shape = self._parts[parameter], self._shapes[parameter]
        e, n, k = (shape[0], shape[2], shape[1]) if experts.transposed else shape
        for target, info in parts:
            one = (n // 2 if target.half else n, k)
            wanted = shape if target.expert is None else one
            if info.shape != wanted:
                raise CheckpointError(
                    f"fp4: {info} has shape {list(info.shape)}; the model's is {list(wanted)}. {OTHER_MODEL}"
                )
        have = sorted((t.expert, t.half) for t, _ in parts if t.expert is not None)
        halves = HALVES if any(half for _, half in have) else ("",)
        want = [(expert, half) for expert in range(e) for half in halves]
        if have != want and not (len(parts) == 1 and not have):
            lacking = sorted({i for i, _ in set(want) - set(have)})
            raise CheckpointError(
                f"fp4: the checkpoint's weights for {parameter} are not those of {e} experts, each once"
                + f": expert {lacking[0]} is missing" * bool(lacking)
                + f". {INCOMPLETE}"
            )


def _places(
    weight: Tensor, target: Target, info: TensorInfo, transposed: bool
) -> Iterable[tuple[TensorInfo, Tensor]]:
    """Yields pairs: what to read of a weight's part, and the tensor to which it goes."""
    if target.expert is None:
        return ((info.row(i), matrix) for i, matrix in enumerate(weight))
    matrix = weight[target.expert].T if transposed else weight[target.expert]
    if target.half:
        matrix = matrix.chunk(2)[HALVES.index(target.half)]
    return ((info, matrix),)
