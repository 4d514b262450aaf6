"""Reads a checkpoint folder: which of its files hold the weights, and what their headers say.

The choice of files follows transformers, because it reads the rest of the model from the same folder: the
file that the config names, else the single file, else the shards that the index names. If a folder was saved
twice, in one file and in shards, only the single file is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import DAMAGED, INCOMPLETE, CheckpointError, TensorInfo, read_header, read_json
from .foreign import why_no_config, why_no_weights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Folder:
    """A checkpoint folder: its config, and the contents of its files.

    Every header is read and checked here, so that a truncated shard or a missing file is found before
    anything is loaded or written.

    files: the files that transformers has chosen (`variant=`, `subfolder=`). None: choose them by its rule.
    """

    def __init__(self, path: str | os.PathLike[str], files: Sequence[Path] | None = None) -> None:
        self.path = Path(path)
        check_folder(self.path)
        if not os.path.lexists(self.path / "config.json") and (why := why_no_config(self.path)):
            raise CheckpointError(f"fp4: {self.path} has no config.json: {why}")
        self.config = self.json("config.json")
        self.index: Path | None = None
        """The index that names the files, if they are shards."""
        of_tensor: dict[str, Path] = {}
        if files is None:
            first = _first_file(self.path, self.config)
            files = [first]
            if first.name.endswith(".index.json"):
                self.index, of_tensor = first, weight_map(self.path, first)
                files = list(of_tensor.values())
        elif len(files) > 1 and (self.path / INDEX).is_file():
            indexed = weight_map(self.path, self.path / INDEX)
            if set(indexed.values()) == set(files):
                self.index, of_tensor = self.path / INDEX, indexed
        self.files = sorted(set(files))
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, info in read_header(file).items():
                # Some files hold a second copy of tensors that the index assigns to another file.
                if of_tensor.get(name, file) != file:
                    continue
                if name in self.tensors:
                    raise CheckpointError(f"fp4: {info} is in {self.tensors[name].file.name} too. {DAMAGED}")
                self.tensors[name] = info
        for name, file in of_tensor.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(
                    f"fp4: {self.index} says that {file.name} holds {name}, which it does not. {INCOMPLETE}"
                )

    @classmethod
    def of_files(cls, files: Sequence[str | os.PathLike[str]]) -> Folder:
        """Finds the folder of files that transformers has chosen: the nearest parent with a config.json."""
        paths = [Path(file) for file in files]
        above = Path(os.path.commonpath([file.parent for file in paths]))
        path = next((p for p in (above, *above.parents) if (p / "config.json").exists()), above)
        return cls(path, paths)

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def name(self, file: Path) -> str:
        """Returns the name of a file within the folder, as the index has it."""
        return file.relative_to(self.path).as_posix()

    def of_file(self, file: Path) -> Iterator[TensorInfo]:
        """Yields the file's tensors in the order of their bytes."""
        return iter(sorted((t for t in self.tensors.values() if t.file == file), key=lambda t: t.offset))


def headers(files: Iterable[str | os.PathLike[str]]) -> dict[str, TensorInfo]:
    """Reads the tensors of files that transformers has chosen from their headers alone, without a config and
    an index. Only safetensors files are read. A second copy of a tensor replaces the first, as in
    transformers."""
    found: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            found |= read_header(file)
    return found


def check_folder(path: Path) -> None:
    """Raises CheckpointError if `path` is no folder."""
    if path.is_dir():
        return
    if path.is_file():
        what = "is a file. Give the folder that it is in"
        if path.suffix == ".gguf":
            what = (
                "is a GGUF file. fp4_ops.load_checkpoint reads it, and save_pretrained then writes a folder"
            )
        raise CheckpointError(f"fp4: {path} {what}")
    link = ", but a link to one that is not there" * path.is_symlink()
    raise CheckpointError(
        f"fp4: {path} is not a folder{link}; it must be a local one with safetensors files. To load a model "
        "of the Hugging Face hub, fetch it (`hf download NAME --local-dir DIR`), or call "
        "fp4_ops.register_with_transformers() and from_pretrained"
    )


def check_name(path: Path) -> None:
    """Raises CheckpointError for a path that safetensors, and so transformers, cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"fp4: the path {os.fsencode(path)!r} is not UTF-8, and safetensors opens only paths "
            "that are. Rename the folder"
        ) from None


def _first_file(path: Path, config: dict[str, Any]) -> Path:
    """Returns the single file, or the index of the shards."""
    if named := config.get("transformers_weights"):
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(
                f"fp4: transformers_weights of {path / 'config.json'} is {named!r}; it must be the name of a "
                "safetensors file or of an index of such"
            )
        return _inside(path, named, path / "config.json")
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    for name in (SINGLE, INDEX):
        if (path / name).is_symlink():
            return path / name  # a broken link; reading it will raise
    raise CheckpointError(f"fp4: {path} has neither {SINGLE} nor {INDEX}: {why_no_weights(path)}")


def weight_map(path: Path, index: Path) -> dict[str, Path]:
    """Returns the file that an index names for each tensor. Raises CheckpointError if it names none."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        what = "no weight_map" if found is None else f"a weight_map that is {_kind(found)}"
        raise CheckpointError(
            f"fp4: {index} has {what}; it must be an object that names a file for each tensor. {DAMAGED}"
        )
    for name, file in found.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(
                f"fp4: {index} names {file!r} for {name}; it must be the name of a file. {DAMAGED}"
            )
    return {name: _inside(path, file, index) for name, file in found.items()}


def _kind(value: object) -> str:
    return "empty" if not value else f"a {type(value).__name__}"


def _inside(path: Path, name: str, where: Path) -> Path:
    """Returns a file of the folder by its name. Raises CheckpointError for a name that leads out of the
    folder."""
    if Path(name).is_absolute():
        if (inside := Path(os.path.relpath(name, path))).parts[:1] not in ((), ("..",)):
            return path / inside
        raise CheckpointError(
            f"fp4: {where} names {name}, an absolute path that is not in the folder {path}; names must be "
            "relative to the folder. If it was moved or copied, write the files' names alone"
        )
    if ".." in Path(name).parts:
        raise CheckpointError(f"fp4: {where} names {name}, which leads out of the folder {path}. {DAMAGED}")
    return path / name
