"""Knows the folders that the Hugging Face hub's client makes: models--ORG--NAME/snapshots/COMMIT."""

from __future__ import annotations

from pathlib import Path

_MODEL = "models--"
SNAPSHOTS = "snapshots"


def model_name(path: Path) -> str | None:
    """Returns the model's name on the hub if `path` is a model's folder in the cache, else None."""
    name = path.resolve().name
    return name.removeprefix(_MODEL).replace("--", "/") if name.startswith(_MODEL) else None


def snapshot(path: Path) -> tuple[str, str] | None:
    """Returns the model's name on the hub and the commit if `path` is a snapshot in the cache, else None."""
    path = path.resolve()
    name = model_name(path.parent.parent) if path.parent.name == SNAPSHOTS else None
    return (name, path.name) if name else None


def is_unfinished(path: Path) -> bool:
    """Returns whether the client has left the beginning of a file, for a folder that it fills."""
    begun = [path / ".cache/huggingface/download"]
    if snapshot(path):
        begun.append(path.resolve().parent.parent / "blobs")
    return any(any(folder.glob("*.incomplete")) for folder in begun)


def why_no_config(path: Path) -> str:
    """Says which folder of the cache has no config.json, and what to do. Returns "" for other folders."""
    found = sorted(path.glob(f"{SNAPSHOTS}/*/config.json"), key=lambda file: file.lstat().st_mtime)
    if found:
        return f"it is a model in the hub's cache. Give its snapshot, {found[-1].parent}"
    if name := model_name(path):
        return (
            f"it is the folder of {name} in the hub's cache, and no snapshot in it has one. Fetch the model "
            f"(`hf download {name}`), and give the folder that the command prints"
        )
    if here := snapshot(path):
        return (
            f"it is a snapshot of {here[0]} in the hub's cache, into which not every file was fetched. Fetch "
            f"the others: `hf download {here[0]} --revision {here[1]}`"
        )
    if models := sorted(path.glob(f"{_MODEL}*")):
        found = sorted(path.glob(f"{_MODEL}*/{SNAPSHOTS}/*/config.json"))
        example = found[0].parent if found else models[0] / SNAPSHOTS / "COMMIT"
        return f"it is the hub's cache. Give the snapshot of one model, such as {example}"
    return ""
