"""Saves and loads graphs: `torch.compile(model, backend="fp4", ...).forward.aot_compile(...)`.

torch saves the code that Inductor compiled. This module adds the arguments that the code takes and the way
weights are packed. The weights belong to the loading process and are packed there at the first call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from .dynamo.api import BundledAOTAutogradSerializableCallable, SerializableCallable
from .graph.repeat import Undo
from .options import version_hash
from .weights.runtime import Swap, runtime


class Precompiled(SerializableCallable):
    """The result of `runtime`, with the data that it was made from."""

    def __init__(
        self, compiled: Callable[..., Any], keep: list[int], swaps: list[Swap], undo: Undo | None
    ) -> None:
        self.compiled, self.made_from = compiled, (keep, swaps, undo)
        self._run = runtime(compiled, *self.made_from)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Precompiled) -> bytes:
        bundled = BundledAOTAutogradSerializableCallable
        compiled = bundled.serialize_compile_artifacts(bundled(fn.compiled))
        return pickle.dumps((version_hash(), compiled, fn.made_from))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Precompiled:
        version, compiled, made_from = pickle.loads(data)
        if version != version_hash():
            raise RuntimeError(
                "fp4: the precompiled model was saved by another build of fp4_ops or torch; compile it again"
            )
        bundled = BundledAOTAutogradSerializableCallable
        return cls(bundled.deserialize_compile_artifacts(compiled), *made_from)
