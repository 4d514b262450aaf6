"""Stores the progress of `quantize` beside its result, so that a killed run can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..models.outside_experts import Kind
from .files import CheckpointError, read_header, read_json, write_json
from .folder import Folder
from .foreign import PROGRESS


class Progress:
    """The files of the result that are complete, and their source and options."""

    def __init__(
        self,
        folder: Folder,
        to: Path,
        format: str,
        method: str,
        calibration: Tensor | None,
        batch: int,
        outside: Mapping[Kind, str],
    ) -> None:
        stats = {folder.name(f): f.stat() for f in folder.files}
        self.folder, self.to, self.file = folder, to, to / PROGRESS
        self.job: dict[str, Any] = {
            "source": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
            "format": format,
            "method": method,
        }
        if outside:
            self.job["outside the experts"] = dict(outside)
        if calibration is not None:
            text = hashlib.sha256(calibration.contiguous().numpy().tobytes()).hexdigest()
            self.job["calibration"] = {"tokens": text, "shape": list(calibration.shape), "batch": batch}
        self.files: list[str] = []
        if to.exists() and not to.is_dir():
            raise CheckpointError(f"fp4: {to} is a file; it must be a new or empty folder")
        if self.file.exists():
            state = read_json(self.file)
            if state.get("job") != self.job:
                raise CheckpointError(
                    f"fp4: {to} holds the beginning of a run on another source, format or method, or with "
                    "another calibration text; remove it"
                )
            self.files = list(state.get("done", ()))
            self._check_done()
        elif to.exists() and any(file.name != f"{PROGRESS}.partial" for file in to.iterdir()):
            there = (
                ". It has a config.json: a run into it has finished, or it is another model. "
                "fp4_ops.load_checkpoint loads a result"
            )
            raise CheckpointError(
                f"fp4: {to} is not empty; it must be a new or empty folder"
                + there * (to / "config.json").exists()
            )
        self.resumed = len(self.files)

    def begin(self) -> None:
        self.to.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"job": self.job, "done": self.files})

    def _check_done(self) -> None:
        """Forgets files of the result that are missing or incomplete, so that they are made again."""
        for name in list(self.files):
            try:
                read_header(self.to / name)
            except CheckpointError as error:
                if "calibration" in self.job:  # the codes of their layers no longer exist
                    raise CheckpointError(
                        f"{error}\nfp4: an earlier run wrote it, and its calibrated codes are not kept: "
                        f"remove {self.to} and begin again"
                    ) from None
                self.files.remove(name)

    def is_done(self, file: Path) -> bool:
        return self.folder.name(file) in self.files

    def done(self, file: Path) -> None:
        """Notes that the result of a source file is whole and on the disk."""
        self.files.append(self.folder.name(file))
        write_json(self.file, {"job": self.job, "done": self.files})
