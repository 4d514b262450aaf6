"""Packs experts one weight at a time while a model's 16-bit weights are being read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import check_activation
from ..experts.find import Plan, find_experts, logical_shape
from ..experts.packed import PackedWeight
from ..host_memory import return_freed_memory
from ..meta.dtensors import split_over_processes
from ..meta.formats import known_activation
from ..meta.layouts import LAYOUTS, preferred_layout
from ..quantization import find_method
from .expert_lists import find_lists
from .pack_experts import (
    A_FORMATS,
    Quantizer,
    check_finite,
    choose_implementation,
    chosen_a_format,
    finish_module,
)
from .prepare_report import PreparedModule, PrepareReport


class ArrivingExperts:
    """Packs each expert weight of a model on the meta device as soon as its values arrive.

    `parameters` lists the weights that it packs. It leaves out three kinds of experts: those that are modules
    of their own, those that several processes share, and those that transformers ties by name. `pack_experts`
    packs these when all weights have arrived.

    shared: parameters that transformers ties.
    same: maps the name of an experts module to the first one with the same weights. Such weights are packed
        once, when the first of their names arrives.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str,
        activation: str,
        trainable_inputs: bool,
        shared: set[str],
        same: Mapping[str, str],
        batch_invariant: bool = False,
    ) -> None:
        self.format, self.activation, self.trainable_inputs = format, activation, trainable_inputs
        self.batch_invariant = batch_invariant
        self.found: dict[str, Any] = {}
        self.plans: dict[str, Plan] = {}
        self.parameters: dict[str, tuple[str, str]] = {}
        """For each parameter name: the experts module, and "gate_up" or "down"."""
        self._others: dict[str, list[str]] = {}
        """For each experts module: the others in `same` that have its weights."""
        self._refusals: dict[str, str] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        """For each experts module: the bytes of its weights before and after they were packed."""
        self._quantizer: Quantizer | None = None
        self._device, self._dtype = "cpu", torch.bfloat16
        if any(find_lists(model)):
            return
        try:
            self.found, self.plans, self._refusals = find_experts(model)
        except ValueError:  # there is nothing to prepare; pack_experts raises the error later
            return
        self._shapes = {
            logical_shape(getattr(self.found[name], attribute), p.transposed)[1:]
            for name, p in self.plans.items()
            for _, attribute in p.form.weights
        }
        for name, p in self.plans.items():
            places = {f"{name}.{attribute}": (name, matrix) for matrix, attribute in p.form.weights}
            if shared.isdisjoint(places):
                self.parameters |= places
        for name, first in same.items():
            if first not in self.plans:
                continue
            weights = self.plans[first].form.weights
            if all(f"{first}.{attribute}" in self.parameters for _, attribute in weights):
                self._others.setdefault(first, []).append(name)
                self.parameters |= {f"{name}.{attribute}": (first, matrix) for matrix, attribute in weights}

    def takes(self, name: str) -> bool:
        """Returns whether a parameter is packed when it arrives."""
        if name not in self.parameters:
            return False
        module, attribute = self.found[self.parameters[name][0]], name.rpartition(".")[2]
        return not split_over_processes(module._parameters.get(attribute))

    def names_of(self, parameter: str) -> list[str]:
        """Returns all names of a weight: several, if modules share it."""
        first, attribute = self.parameters[parameter][0], parameter.rpartition(".")[2]
        return [f"{name}.{attribute}" for name in (first, *self._others.get(first, ()))]

    def pack(self, parameter: str, weight: Tensor) -> None:
        """Puts a PackedWeight in place of a parameter whose values are `weight`."""
        name, matrix = self.parameters[parameter]
        module, p, attribute = self.found[name], self.plans[name], parameter.rpartition(".")[2]
        if isinstance(getattr(module, attribute), PackedWeight):
            return  # it has arrived under another of its names
        if weight.shape != module._parameters[attribute].shape:
            raise ValueError(
                f"fp4: the weights for {parameter} make a tensor {list(weight.shape)}; the model's is "
                f"{list(module._parameters[attribute].shape)}. The folder is of another model, or incomplete"
            )
        check_finite(parameter, weight)
        quantizer = self._quantizer or self._quantizer_for(weight)
        activation = known_activation(p.gate)
        split = matrix == "gate_up" and activation.gated and not activation.interleaved
        packed = quantizer.pack(
            weight, name, matrix, transposed=p.transposed,
            interleaved=split and LAYOUTS[quantizer.layout].interleaved,
        )  # fmt: skip
        before, after = self._sizes.get(name, (0, 0))
        self._sizes[name] = (before + weight.nbytes, after + packed.num_bytes)
        owners = {
            id(m): m for n in (name, *self._others.get(name, ())) if (m := self.found.get(n)) is not None
        }
        for owner in owners.values():
            del owner._parameters[attribute]
            owner.add_module(attribute, packed)
        for done in (*owners.values(), packed):
            done._is_hf_initialized = True  # transformers must not initialise it at random
        if weight.device.type == "cpu":
            return_freed_memory()

    def _quantizer_for(self, weight: Tensor) -> Quantizer:
        device, self._dtype = weight.device.type, weight.dtype
        self._device = device
        wanted = A_FORMATS[self.activation] or "auto"
        layout = preferred_layout(
            device, *self._shapes, dtype=weight.dtype, format=self.format, a_format=wanted,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        check_activation(self.activation, device, layout)
        self._quantizer = Quantizer(self.format, find_method("rtn", self.format), None, layout)
        return self._quantizer

    def finish(self, model: nn.Module) -> list[str]:
        """Makes the experts that have arrived run in 4 bits; returns their names."""
        done = []
        for name, p in self.plans.items():
            module = self.found[name]
            if all(isinstance(getattr(module, attribute), PackedWeight) for _, attribute in p.form.weights):
                finish_module(
                    module, p, self.activation, self.trainable_inputs, self._dtype, self.batch_invariant
                )
                done.append(name)
        if done:
            choose_implementation(model)
        return done

    def report(self, done: list[str], rest: PrepareReport | None) -> PrepareReport:
        """Returns the report of `prepare` for a model whose weights have arrived.

        done: the experts that `finish` returned.
        rest: the report of `pack_experts` for the same model, if it was called after `finish`.
        """
        if not done:
            assert rest is not None  # pack_experts raises if there is nothing to pack
            return rest
        assert self._quantizer is not None
        layout = self._quantizer.layout
        a_format = chosen_a_format(self.activation, self._device, layout)
        report = rest or PrepareReport(self.format, layout, a_format)
        others = {module.name: module for module in report.modules}
        others |= {name: self._prepared(name) for name in done}
        report.modules = [
            others.get(name) or PreparedModule(name, self._refusals[name]) for name in self.found
        ]
        return report

    def _prepared(self, name: str) -> PreparedModule:
        p = self.plans[name]
        return PreparedModule(name, "", p.gate, p.shape, *self._sizes.get(name, (0, 0)))
