"""The README.md that `python -m fp4_ops quantize` writes: what it says is true, and its command works."""

from __future__ import annotations

import importlib.metadata
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from checkpoint_samples import tiny

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint

yaml = pytest.importorskip("yaml")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_snapshot(hub: Path) -> Path:
    """Returns the folder of a model in the hub's cache, whose name is a commit."""
    folder = hub / "models--ORG--NAME" / "snapshots" / COMMIT
    tiny().save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def front_matter(card: Path) -> dict[str, object]:
    _, found, _ = card.read_text().split("---\n", 2)
    loaded = yaml.safe_load(found)
    assert isinstance(loaded, dict)
    return loaded


CARD = f"""---
license: mit
base_model: ORG/NAME
base_model_relation: quantized
tags:
- fp4_ops
- 4-bit
- mxfp4
- int4_g32
---

# ORG/NAME in 4 bits

fp4_ops VERSION made this folder from `ORG/NAME`:

- 48 expert matrices in mxfp4, 8 linear layers in int4_g32, stored as mxfp4-pack-quantized and pack-quantized
- all other weights as they were
- the experts by method `rtn`
- the linear layers rounded to nearest

```
hf download ORG/NAME --revision {COMMIT} --local-dir NAME
python -m fp4_ops quantize NAME -o OUT --format mxfp4 --method rtn --attention int4_g32
```

Load it with `fp4_ops.load_checkpoint(None, FOLDER)`. Its accuracy is not known:
`python -m fp4_ops eval FOLDER --text FILE` measures it.

The card of `ORG/NAME`, which describes the original weights: [README.source.md](README.source.md).
"""


def test_the_result_has_a_card_of_its_own(tmp_path, monkeypatch):
    source, out = hub_snapshot(tmp_path / "hub"), tmp_path / "out"
    (source / "README.md").write_text("---\nlicense: mit\n---\n# NAME in bfloat16\n")
    quantize_checkpoint(source, out, "mxfp4", attention="int4_g32", progress=False)
    assert (out / "README.md").read_text() == CARD.replace("VERSION", version("fp4_ops"))
    assert (out / "README.source.md").read_text() == (source / "README.md").read_text()
    (source / "README.md").unlink()
    quantize_checkpoint(source, tmp_path / "third", progress=False)
    assert "README.source.md" not in (tmp_path / "third" / "README.md").read_text()
    assert not (tmp_path / "third" / "README.source.md").exists()


@pytest.mark.parametrize("name", ["NAME", "a name with spaces"])
def test_the_printed_command_makes_the_same_folder(name, tmp_path, monkeypatch):
    """It names a folder, as the command takes no other name."""
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained(name)
    calibration = torch.randint(128, (2, 32))
    quantize_checkpoint(name, "out", method="weighted", calibration=calibration, batch=1, progress=False)
    card = Path("out/README.md").read_text()
    command = next(line for line in card.splitlines() if line.startswith("python"))
    assert "--calibration TEXT --calibration-windows 2 --length 32 --batch 1" in command
    assert "experts by method `weighted`, calibrated with 2 windows of 32 tokens" in card
    quantize_checkpoint(name, "out2", "mxfp4", method="search", attention="mxfp4", progress=False)
    command = next(line for line in Path("out2/README.md").read_text().splitlines() if "python" in line)
    words = shlex.split(command)[3:]
    assert words[1] == name
    words[words.index("OUT")] = "again"
    main(words)
    assert contents(Path("out2")) == contents(Path("again"))


def test_only_experts_are_said_to_be_calibrated(tmp_path):
    tiny().save_pretrained(tmp_path / "bf16")
    report = quantize_checkpoint(
        tmp_path / "bf16", tmp_path / "out", method="gptq", attention="nvfp4",
        calibration=torch.zeros(1, 16, dtype=torch.int64), progress=False,
    )  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert report.unseen > 0  # a token that repeats is seen by few experts
    assert "- the experts by method `gptq`, calibrated with 1 windows of 16 tokens\n" in card
    assert f"- {report.unseen} experts saw no token of the calibration text: quantised without it\n" in card
    assert "- the linear layers rounded to nearest\n" in card


SOURCE = """---
language:
- "no"
- en
license: other
license_name: apache-2.0-x
license_link: LICENSE
model-index:
- name: NAME
  results:
  - task: {type: text-generation}
    metrics: [{type: perplexity, value: 3.2}]
metrics:
- perplexity
# a comment
tags: [moe, "4-bit",
  chat]
pipeline_tag: text-generation
base_model: ORG/BASE
base_model_relation: finetune
---
# NAME
"""

TAGS = {
    "in brackets": "tags: [moe, chat]",
    "one": "tags: moe",
    "by line": "tags:\n  - moe\n  - chat",
    "none": "tags:",
}


@pytest.mark.parametrize("hub", [True, False])
def test_the_front_matter_of_the_source_is_kept(hub, tmp_path):
    """The hub reads the licence, the languages and the task from it. A measurement is not true of the
    result."""
    source = hub_snapshot(tmp_path)
    if not hub:
        source = source.rename(tmp_path / "NAME")
    (source / "README.md").write_text(SOURCE.replace("\n", "\r\n"), encoding="utf-8-sig", newline="")
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    base = ("ORG/NAME", "quantized") if hub else ("ORG/BASE", "finetune")
    assert front_matter(tmp_path / "out" / "README.md") == {
        "language": ["no", "en"],
        "license": "other",
        "license_name": "apache-2.0-x",
        "license_link": "LICENSE",
        "pipeline_tag": "text-generation",
        "base_model": base[0],
        "base_model_relation": base[1],
        "tags": ["moe", "4-bit", "chat", "fp4_ops", "nvfp4"],
    }


@pytest.mark.parametrize("how", TAGS)
def test_tags_of_the_source_are_kept(how, tmp_path):
    tiny().save_pretrained(tmp_path / "bf16")
    (tmp_path / "bf16" / "README.md").write_text(f"---\n{TAGS[how]}\n---\n")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    own = yaml.safe_load(TAGS[how])["tags"] or []
    own = [own] if isinstance(own, str) else own
    assert front_matter(tmp_path / "out" / "README.md") == {"tags": [*own, "fp4_ops", "4-bit", "nvfp4"]}


@pytest.mark.parametrize(
    "card", [b"\xff\xfe no text", b"---\nlicense: mit\n", b"", b"# NAME\n---\na: b\n---\n"]
)
def test_a_source_card_without_front_matter(card, tmp_path):
    tiny().save_pretrained(tmp_path / "bf16")
    (tmp_path / "bf16" / "README.md").write_bytes(card)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert front_matter(tmp_path / "out" / "README.md") == {"tags": ["fp4_ops", "4-bit", "nvfp4"]}
    assert (tmp_path / "out" / "README.source.md").read_bytes() == card


def test_no_file_of_the_source_is_overwritten(tmp_path):
    """The source was itself made from a folder in 4 bits, or has a file of this name."""
    source, out = tmp_path / "bf16", tmp_path / "out"
    tiny().save_pretrained(source)
    for name in ("README.md", "README.source.md", "README.source-2.md"):
        (source / name).write_text(f"{name} of the source")
    quantize_checkpoint(source, out, progress=False)
    assert (out / "README.source.md").read_text() == "README.source.md of the source"
    assert (out / "README.source-2.md").read_text() == "README.source-2.md of the source"
    assert (out / "README.source-3.md").read_text() == "README.md of the source"
    assert "[README.source-3.md](README.source-3.md)" in (out / "README.md").read_text()


def test_a_source_tree_has_no_version(tmp_path, monkeypatch):
    def unknown(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    tiny().save_pretrained(tmp_path / "bf16")
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", progress=False)
    assert "\nfp4_ops made this folder from `bf16`:\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("inside", ["", "models--ORG--NAME"])
def test_a_folder_that_is_no_snapshot_has_its_own_name(inside, tmp_path):
    source = tmp_path / inside / "mine"
    tiny().save_pretrained(source)
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    assert "# mine in 4 bits\n" in (tmp_path / "out" / "README.md").read_text()


HUB = {
    "nothing fetched": ("models--ORG--NAME", "refs/main", r"`hf download ORG/NAME`"),
    "no snapshot has one": (
        "models--ORG--NAME",
        f"snapshots/{COMMIT}/tokenizer.json",
        r"the folder of ORG/NAME in the hub's cache, and no snapshot in it has one.*`hf download ORG/NAME`",
    ),
    "a snapshot without one": (
        f"models--ORG--NAME/snapshots/{COMMIT}",
        "tokenizer.json",
        f"not every file was fetched.*`hf download ORG/NAME --revision {COMMIT}`",
    ),
    "the cache": (".", f"models--ORG--NAME/snapshots/{COMMIT}/config.json", f"such as .*/snapshots/{COMMIT}"),
    "the cache, nothing fetched": (".", "models--ORG--NAME/refs/main", "such as .*/snapshots/COMMIT"),
    "an empty folder": ("models", "", "it is empty"),
}


@pytest.mark.parametrize("what", HUB)
def test_folders_of_the_cache_say_what_to_do(what, tmp_path):
    folder, file, message = HUB[what]
    folder = tmp_path / folder
    folder.mkdir(parents=True, exist_ok=True)
    if file:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    for call in (
        lambda: fp4_ops.load_checkpoint(None, folder),
        lambda: quantize_checkpoint(folder, tmp_path / "out", progress=False),
    ):
        with pytest.raises(CheckpointError, match=f"has no config.json: .*{message}"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_snapshot_whose_weights_are_not_whole(tmp_path):
    source = hub_snapshot(tmp_path)
    (source / "model.safetensors").unlink()
    (source.parent.parent / "blobs").mkdir()
    (source.parent.parent / "blobs" / "01.incomplete").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="a download has not finished"):
        quantize_checkpoint(source, tmp_path / "out", progress=False)
