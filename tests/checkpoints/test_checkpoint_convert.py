"""`python -m fp4_ops quantize` gives the weights of `prepare` in bounded memory, and resumes after a stop."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import edit_json, experts_of, save_tensors, tiny
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, convert, quantize_checkpoint, resume
from fp4_ops.experts.packed import PackedWeight


@pytest.fixture
def source(tmp_path) -> Path:
    return save(tmp_path / "bf16", tiny())


def save(path: Path, model: Any, shard: str = "60KB") -> Path:
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text("{}")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_values_are_those_of_prepare(family, format, tmp_path):
    model = tiny(family)
    report = quantize_checkpoint(save(tmp_path / "bf16", model), tmp_path / "out", format, progress=False)
    fp4_ops.prepare(model, format)
    loaded = fp4_ops.load_checkpoint(None, tmp_path / "out")
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    for name, want in packed.items():
        got = loaded.get_submodule(name)
        assert torch.equal(got.packed, want.packed), name
        assert torch.equal(got.block_scale.view(torch.uint8), want.block_scale.view(torch.uint8)), name
        if format == "nvfp4":  # its reciprocal is what the file holds
            torch.testing.assert_close(got.global_scale, want.global_scale, rtol=1.2e-7, atol=0)
    assert report.dialect == loaded.hf_quantizer.report.dialect
    # mixtral's and qwen's gate and up count as two
    e = len(next(iter(packed.values())).packed)
    assert report.matrices == e * len(experts_of(model)) * (2 if family == "gpt_oss" else 3)
    assert str(report).startswith(f"{tmp_path / 'out'}: {report.matrices} expert matrices in {format}, ")


@pytest.mark.parametrize(
    "method, format", [("search", "nvfp4"), ("four_over_six", "nvfp4"), ("search", "int4_g32")]
)
def test_methods(method, format, source, tmp_path):
    quantize_checkpoint(source, tmp_path / "rtn", format, progress=False)
    main(["quantize", str(source), "-o", str(tmp_path / method), "--format", format, "--method", method])
    model = tiny()
    model.load_state_dict(type(model).from_pretrained(source).state_dict())
    fp4_ops.prepare(model, format, method=method)
    got = fp4_ops.load_checkpoint(None, tmp_path / method).state_dict()
    for name, want in model.state_dict().items():
        if name.endswith(("packed", "block_scale")):
            assert torch.equal(got[name].view(torch.uint8), want.view(torch.uint8)), name
    assert contents(tmp_path / "rtn") != contents(tmp_path / method)


def test_everything_else_is_copied(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    before, after = all_tensors(source), all_tensors(tmp_path / "out")
    kept = [n for n in before if ".experts." not in n]
    assert len(kept) > 10 and kept == [n for n in after if ".experts." not in n]
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    files = {f.name for f in (tmp_path / "out").iterdir()}
    assert files == {f.name for f in source.iterdir()} | {"README.md"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            assert set(f.keys()) == {n for n, where in index["weight_map"].items() if where == file.name}


def test_named_chat_templates_are_copied(tmp_path):
    """They are in a folder that tokenizers read. Other folders are not copied."""
    source, out = save(tmp_path / "bf16", tiny()), tmp_path / "out"
    for name in ("additional_chat_templates/tool_use.jinja", "onnx/model.json", "checkpoint-1/config.json"):
        (source / name).parent.mkdir()
        (source / name).write_text(f"{name} of the source")
    quantize_checkpoint(source, out, progress=False)
    assert [f.name for f in out.iterdir() if f.is_dir()] == ["additional_chat_templates"]
    name = "additional_chat_templates/tool_use.jinja"
    assert (out / name).read_text() == f"{name} of the source"


def test_paths_with_spaces_and_files_in_place_of_folders(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["quantize", str(source), "-o", "a folder"])
    advice = capsys.readouterr().out.splitlines()[-1]
    assert "load_checkpoint(None, 'a folder')" in advice and "eval 'a folder' --text" in advice
    Path("a file").touch()
    with pytest.raises(SystemExit) as error:
        main(["quantize", str(source), "-o", "a file"])
    assert str(error.value) == "fp4: a file is a file; it must be a new or empty folder"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 11, 30])
def test_a_killed_run_is_resumed_with_the_same_result(after, source, tmp_path, monkeypatch):
    whole = quantize_checkpoint(source, tmp_path / "whole", progress=False)
    assert whole.files > 3 and whole.resumed == 0
    quantize, count, notes = convert._Pipeline._quantize, 0, tmp_path / "out" / resume.PROGRESS

    def dies(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            while after >= 11 and not json.loads(notes.read_text())["done"]:
                time.sleep(0.01)  # the first file is whole, and the writing thread notes it
            raise Killed
        return quantize(self, *args)

    def slow(self: Any) -> None:  # the run dies while the writing thread gives a file its name
        close(self)
        time.sleep(0.05)

    close = convert.Writer.close
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(convert._Pipeline, "_quantize", dies)
        patch.setattr(convert.Writer, "close", slow)
        quantize_checkpoint(source, tmp_path / "out", progress=False)
    left = {f.name for f in (tmp_path / "out").iterdir()}
    assert "config.json" not in left and "model.safetensors.index.json" not in left
    with pytest.raises(CheckpointError, match=r"unfinished result of `quantize`. Run the same command again"):
        fp4_ops.load_checkpoint(None, tmp_path / "out")
    for file in left - {resume.PROGRESS}:  # what has its name is whole
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    resumed = quantize_checkpoint(source, tmp_path / "out", progress=False)
    assert resumed.resumed == len(left) - 1 and (after < 11 or resumed.resumed > 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_a_kill_leaves_is_not_taken_for_a_file(source, tmp_path, monkeypatch):
    """SIGKILL leaves a .partial file or, between two steps, a complete file that is not recorded as done."""
    quantize_checkpoint(source, tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(convert._Pipeline, "_quantize", lambda *_: (_ for _ in ()).throw(Killed()))
        quantize_checkpoint(source, tmp_path / "out", progress=False)
    first = min(tmp_path.glob("whole/*.safetensors")).name
    (tmp_path / "out" / first).write_bytes(b"half")
    (tmp_path / "out" / f"{first}.partial").write_bytes(b"half")
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_job_does_not_resume(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(convert._Pipeline, "_quantize", lambda *_: (_ for _ in ()).throw(Killed()))
        quantize_checkpoint(source, tmp_path / "out", progress=False)
    for options in ({"format": "mxfp4"}, {"method": "search"}):
        with pytest.raises(CheckpointError, match="a run on another source, format or method"):
            quantize_checkpoint(source, tmp_path / "out", progress=False, **options)
    with pytest.raises(CheckpointError, match=r"is not empty.*a run into it has finished"):
        quantize_checkpoint(source, source, progress=False)
    quantize_checkpoint(source, tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "twice", progress=False)
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_gate_and_up_in_different_files(format, tmp_path):
    model = tiny()
    one = save(tmp_path / "one", model, "1GB")
    tensors = all_tensors(one)
    two = tmp_path / "two"
    two.mkdir()
    (two / "config.json").write_text((one / "config.json").read_text())
    order = sorted(tensors, key=lambda n: (n.endswith("up_proj.weight"), n))
    save_tensors(two, {n: tensors[n] for n in order}, shards=2)
    files = [{*load_file(f)} for f in sorted(two.glob("*.safetensors"))]
    split = [n for n in files[1] if "experts" in n and n.replace("up_proj", "gate_proj") in files[0]]
    assert split
    for folder in (one, two):
        quantize_checkpoint(folder, folder / "out", format, progress=False)
    want, got = all_tensors(one / "out"), all_tensors(two / "out")
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8)), name


@pytest.mark.parametrize("spaces", [1, 3, 4])
def test_headers_of_any_length(spaces, tmp_path):
    """safetensors' own writer begins the data at a multiple of 8, but the format does not require this."""
    source = save(tmp_path / "bf16", tiny(), "1GB")
    quantize_checkpoint(source, tmp_path / "want", progress=False)
    file = source / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    longer = (length + spaces).to_bytes(8, "little") + data[8 : 8 + length] + b" " * spaces
    file.write_bytes(longer + data[8 + length :])
    quantize_checkpoint(source, tmp_path / "got", progress=False)
    assert contents(tmp_path / "got") == contents(tmp_path / "want")


NAME = "model.layers.1.mlp.experts.2.gate_proj.weight"

BAD = {
    "NaN": (lambda t: t[NAME].view(-1)[7].fill_(torch.nan), r"cannot be quantised: .*(NaN|inf)"),
    "infinity": (lambda t: t[NAME].view(-1)[7].fill_(torch.inf), r"cannot be quantised: .*(NaN|inf)"),
    "dtype": (lambda t: t.update({NAME: t[NAME].double()}), r"is torch.float64; it must be bfloat16"),
    "shape": (
        lambda t: t.update({NAME: t[NAME][:5].clone()}),
        r"and .*up_proj.weight \[.*; they must be alike",
    ),
    "half dtype": (
        lambda t: t.update({NAME: t[NAME].half()}),
        r"is torch.\w+ and .*weight torch.\w+; both are read",
    ),
    "partner": (lambda t: t.pop(NAME.replace("gate", "up")), r"has no .*experts.2.up_proj.weight beside it"),
    "K": (lambda t: t.update({NAME: torch.ones(96, 8)}), r"has K = 8; nvfp4 files need a multiple of 16"),
}


@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("what", BAD)
def test_bad_sources_are_named_and_leave_no_checkpoint(what, method, tmp_path):
    folder = save(tmp_path / "bf16", tiny(), "1GB")
    edit, message = BAD[what]
    tensors = all_tensors(folder)
    edit(tensors)
    save_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        quantize_checkpoint(folder, tmp_path / "out", method=method, progress=False)
    assert NAME in str(error.value) and "model.safetensors" in str(error.value)
    out = tmp_path / "out"
    assert not out.exists() or {f.name for f in out.iterdir()} == {resume.PROGRESS}


def test_sources_that_are_no_moe_or_truncated(source, tmp_path):
    with pytest.raises(ValueError, match="needs calibration text"):
        quantize_checkpoint(source, tmp_path / "out", method="gptq")
    with pytest.raises(ValueError, match="format is 'fp3'; it must be one of: nvfp4, mxfp4"):
        quantize_checkpoint(source, tmp_path / "out", "fp3")
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated"):
        quantize_checkpoint(source, tmp_path / "out")
    dense = tmp_path / "dense"
    dense.mkdir()
    save_tensors(dense, {"model.layers.0.mlp.gate_proj.weight": torch.ones(32, 32)})
    (dense / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no expert weights"):
        quantize_checkpoint(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["gpt_oss", "another"])
def test_stacked_experts_are_written_as_their_family_reads_them(model_type, tmp_path):
    """The sizes decide between [E, N, K] and [E, K, N], and never the family's name."""
    e, h, i = 3, 64, 96
    at, config = "model.layers.0.mlp.experts", {
        "model_type": model_type, "hidden_size": h, "intermediate_size": i, "num_local_experts": e,
        "num_hidden_layers": 1, "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    up, down = torch.randn(e, 2 * i, h).bfloat16(), torch.randn(e, h, i).bfloat16()
    for transposed in (False, True):
        folder = tmp_path / f"{transposed}"
        folder.mkdir()
        flip = (lambda t: t.transpose(1, 2).contiguous()) if transposed else (lambda t: t)
        save_tensors(folder, {f"{at}.gate_up_proj": flip(up), f"{at}.down_proj": flip(down)})
        (folder / "config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            quantize_checkpoint(folder, folder / "out", "mxfp4", progress=False)
        unknown = "whether the result can be loaded is not known" in " ".join(str(w.message) for w in said)
        assert unknown == (model_type == "another")
        got = all_tensors(folder / "out")
        for name, weight in (("gate_up_proj", up), ("down_proj", down)):
            packed, scale, _ = torch.ops.fp4.quantize(weight, "mxfp4")
            if model_type == "gpt_oss":
                assert torch.equal(got[f"model.layers.0.mlp.experts.{name}_blocks"].flatten(-2), packed)
                assert torch.equal(got[f"model.layers.0.mlp.experts.{name}_scales"], scale.view(torch.uint8))
            else:
                for expert in range(e):
                    assert torch.equal(
                        got[f"model.layers.0.mlp.experts.{expert}.{name}.weight_packed"], packed[expert]
                    )
    edit_json(folder / "config.json", lambda c: c.clear())
    save_tensors(folder, {f"{at}.gate_up_proj": up, f"{at}.down_proj": down[:, :, :64].clone()})
    with pytest.raises(CheckpointError, match=r"gate_up_proj .*\[3, 192, 64\] does not fit .*\[3, 64, 64\]"):
        quantize_checkpoint(folder, tmp_path / "no")


def test_the_command(source, tmp_path, capsys):
    main(["quantize", str(source), "-o", str(tmp_path / "out"), "--format", "mxfp4"])
    report, advice = capsys.readouterr().out.splitlines()
    assert "48 expert matrices in mxfp4, stored as mxfp4-pack-quantized" in report
    assert f"load_checkpoint(None, '{tmp_path / 'out'}')" in advice
    with pytest.raises(SystemExit, match="method 'four_over_six' is for nvfp4; format is 'int4_g32'"):
        main(["quantize", str(source), "-o", str(tmp_path / "no"), "--format", "int4_g32",
              "--method", "four_over_six"])  # fmt: skip
    with pytest.raises(SystemExit, match="is quantised already"):
        main(["quantize", str(tmp_path / "out"), "-o", str(tmp_path / "again")])


MEMORY = """
import resource, sys, fp4_ops
from fp4_ops.checkpoints import convert
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, large, out = sys.argv[1:]
convert.IN_FLIGHT = 16 << 20
convert.quantize_checkpoint(small, out + "/small", progress=False)
before = peak()
convert.quantize_checkpoint(large, out + "/large", progress=False)
print(peak() - before)
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in kilobytes")
def test_memory_does_not_depend_on_the_size_of_the_files(source, tmp_path):
    large = tmp_path / "bf16_large"
    large.mkdir()
    matrix = torch.randn(1024, 1024).bfloat16()
    parts = ("gate_proj", "up_proj", "down_proj")
    tensors = {f"x.experts.{e}.{p}.weight": matrix.clone() for e in range(24) for p in parts}
    save_tensors(large, tensors | {"embed.weight": torch.zeros(48 << 20, 2).bfloat16()})
    (large / "config.json").write_text("{}")
    assert (large / "model.safetensors").stat().st_size > 320 << 20
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, source, large, tmp_path / "out"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    # Read ahead 16 MiB, written behind 16 MiB, copied in chunks of 16 MiB, and the matrices at work.
    assert int(out.stdout) < 100 << 20
