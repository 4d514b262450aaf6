"""What a run of `quantize` has done already, kept beside its result so that a killed one goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from .files import CheckpointError, Folder, read_header, read_json, write_json

PROGRESS = ".fp4_quantize.json"


class Progress:
    """Which files of the result are whole, and of what source and options."""

    def __init__(
        self, folder: Folder, to: Path, format: str, method: str, calibration: Tensor | None, batch: int
    ) -> None:
        stats = {f.name: f.stat() for f in folder.files}
        self.to, self.file = to, to / PROGRESS
        self.job: dict[str, Any] = {
            "source": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
            "format": format,
            "method": method,
        }
        if calibration is not None:
            text = hashlib.sha256(calibration.contiguous().numpy().tobytes()).hexdigest()
            self.job["calibration"] = {"tokens": text, "shape": list(calibration.shape), "batch": batch}
        self.files: list[str] = []
        if self.file.exists():
            state = read_json(self.file)
            if state.get("job") != self.job:
                raise CheckpointError(
                    f"fp4: {to} holds the beginning of a run on another source, format or method, or with "
                    "another calibration text; remove it"
                )
            self.files = state["done"]
        elif to.exists() and any(to.iterdir()):
            raise CheckpointError(f"fp4: {to} is not empty; it must be a new or empty folder")
        self.resumed = len(self.files)

    def begin(self) -> None:
        self.to.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"job": self.job, "done": self.files})

    def is_done(self, file: Path) -> bool:
        return file.name in self.files and bool(read_header(self.to / file.name))

    def done(self, file: Path) -> None:
        self.files.append(file.name)
        write_json(self.file, {"job": self.job, "done": self.files})
