"""All readers of a folder agree on the values of its weights, for each kind of folder.

The readers are load_checkpoint, a registered from_pretrained, save_pretrained after it, eval and report.
For the same values in bf16, quantize and prepare are compared, too.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples
import pytest
import test_checkpoint_makers as makers
import test_checkpoint_modelopt as modelopt
import torch
from checkpoint_folders import MODELOPT, dequantised, family, family_folder, loaded, outputs, write_mixed
from conftest import more
from moe_models import tokens
from safetensors.torch import load_file
from test_checkpoint_calibrated import words
from test_checkpoint_eight_bits import put_stacks

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint
from fp4_ops.checkpoints.families import model_class
from fp4_ops.integrations.transformers.reference import load_reference


def samples(dialect: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        made = checkpoint_samples.tiny("gpt_oss" if dialect == "gpt-oss-mxfp4" else "qwen3_moe")
        checkpoint_samples.write_folder(path, made, dialect)

    return write


def folded(path: Path) -> None:
    """Gate's global scale three times up's."""
    checkpoint_samples.write_folder(
        path, checkpoint_samples.tiny(), "modelopt-nvfp4",
        factors=lambda half, expert: 2.0**-9 * (3 if half == "gate" else 1),
    )  # fmt: skip


def of_family(name: str, dialect: str) -> Callable[[Path], Any]:
    return lambda path: family_folder(path, family(name), dialect)


def made_by(maker: str) -> Callable[[Path], Any]:
    return lambda path: makers.write_folder(path, makers.model(), makers.MAKERS[maker])


def eight_and_four(path: Path) -> None:
    modelopt.write_fused(path, "gpt_oss", "NVFP4", "K")
    name = "model.layers.0.mlp.experts"
    put_stacks(path, family("gpt_oss"), "one", "_weight_scale", only=name)
    tensors = load_file(path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not (n.startswith(name) and n.endswith("_scale_2"))}
    checkpoint_samples.save_tensors(path, kept)
    layers = {name: {"quant_algo": "FP8"}, "model.layers.1.mlp.experts": {"quant_algo": "NVFP4"}}
    config = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    checkpoint_samples.edit_json(path / "config.json", lambda c: c.update(quantization_config=config))


FOLDERS: dict[str, Callable[[Path], Any]] = {
    **{dialect: samples(dialect) for dialect in checkpoint_samples.STORED},
    "folded": folded,
    "ModelOpt, mixed": lambda path: write_mixed(path, "modelopt", "tensor"),
    "compressed-tensors, mixed": lambda path: write_mixed(path, "compressed-tensors", "channel"),
    "fused": lambda path: modelopt.write_fused(path, "gpt_oss", "NVFP4", "K"),
    "fused, one layer in FP8": eight_and_four,
    "own code": of_family("llama4_text", "modelopt-nvfp4"),
    "mixtral": of_family("mixtral", "nvfp4-pack-quantized"),
    **{name: made_by(name) for name in makers.READ},
}
QUICK = (
    "nvfp4-pack-quantized",
    "ModelOpt, mixed",
    "fused, one layer in FP8",
    "own code",
    "gptq",
    "actorder weight",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [k if k in QUICK else more(k) for k in FOLDERS])
def test_all_agree(kind, registered, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    FOLDERS[kind](folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    words(folder, vocabulary)
    ids = tokens(2, 6) % vocabulary
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gate and up were folded
        one, two = (loaded(folder, how) for how in ("load_checkpoint", "from_pretrained"))
        reference, _ = load_reference(folder, "cpu", torch.float32)
    held = dequantised(one)
    assert held
    again = dequantised(two)
    assert held.keys() == again.keys() and all(torch.equal(held[n], again[n]) for n in held)
    assert torch.equal(outputs(one, ids), outputs(two, ids))

    # What eval and report measure: the same values in ordinary parameters.
    for name, value in held.items():
        p = reference.get_parameter(name)
        assert torch.equal(p if p.shape == value.shape and torch.equal(p, value) else p.mT, value), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = fp4_ops.load_checkpoint(None, folder, activation="bf16", dtype=torch.float32)
    got, want = outputs(exact, ids), outputs(reference, ids)
    assert (got - want).norm() <= 1e-4 * want.norm()

    # prepare's save_pretrained, of what was loaded.
    one.save_pretrained(tmp_path / "again")
    saved = dequantised(loaded(tmp_path / "again", "load_checkpoint"))
    assert saved.keys() == held.keys()
    for name, value in held.items():
        torch.testing.assert_close(saved[name], value, rtol=2.5e-7, atol=0)

    # eval and report, as commands.
    text = torch.randint(0, vocabulary, (64,))
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in text.tolist()))
    common = [str(folder), "--length", "16", "--device", "cpu"]
    rows = tmp_path / "rows.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = ["report", *common, "--json", str(tmp_path / "report.json")]
        main(report)
        command = ["eval", *common, "--text", str(tmp_path / "text"), "--windows", "4", "--formats", "nvfp4"]
        command += ["--methods", "rtn", "--activations", "bf16", "--json", str(rows)]
        if one.hf_quantizer.report.own_code:
            with pytest.raises(SystemExit, match="no experts modules"):
                main(command)
        else:
            main(command)
    assert "is in 4 bits already" in capsys.readouterr().out or one.hf_quantizer.report.own_code
    errors = json.loads((tmp_path / "report.json").read_text())["errors"]
    assert {e["module"] for e in errors} >= {n.rpartition(".")[0] for n in held if "expert" in n}
    assert all(e["sqnr"] is None or e["sqnr"] > 10 for e in errors)
    if rows.exists():
        table = {r["method"]: r for r in json.loads(rows.read_text())["rows"]}
        windows = text.view(4, 16)
        logits = outputs(reference, windows)[:, :-1].float().flatten(0, 1)
        want = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()
        assert math.log(table["-"]["perplexity"]) == pytest.approx(want, rel=3e-2)
        assert math.log(table["stored"]["perplexity"]) == pytest.approx(want, rel=3e-2)

    # quantize does not take it, and takes the same values in bf16; prepare makes the same of these.
    with pytest.raises(CheckpointError, match=r"is quantised already .*load_checkpoint loads it"):
        quantize_checkpoint(folder, tmp_path / "twice", progress=False)
    del reference.config.quantization_config
    reference.hf_quantizer = None
    plain = reference.to(torch.bfloat16)
    plain.config.dtype = torch.bfloat16
    plain.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "made", "mxfp4", progress=False)
    made = dequantised(loaded(tmp_path / "made", "load_checkpoint"))
    if not one.hf_quantizer.report.own_code:
        bf16 = model_class(plain.config).from_pretrained(tmp_path / "bf16")
        fp4_ops.prepare(bf16, "mxfp4")
        prepared = dequantised(bf16)
        assert prepared.keys() == made.keys() and all(torch.equal(prepared[n], made[n]) for n in made)
