"""The shipped demo model: small, decent, and hardly worse in 4 bits. The quickstart runs."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from places import ROOT

import fp4_ops
import fp4_ops.__main__

transformers = pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def demo() -> ModuleType:
    module = example("demo")
    module.DEVICE = "cpu"
    return module


def test_the_checkpoint_is_small():
    assert sum(p.stat().st_size for p in (EXAMPLES / "demo_model").iterdir()) < 10e6


def test_its_tokens_are_bytes(tmp_path):
    """Each byte is a token of its own value: in the folder, after `quantize`, and from the script."""
    folder, out = EXAMPLES / "demo_model", tmp_path / "FOLDER"
    fp4_ops.__main__.main(["quantize", str(folder), "-o", str(out)])
    example("train_demo_model").save_tokenizer(tmp_path / "made")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "made" / file).read_text()) == json.loads((folder / file).read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # transformers 4 knows this class, and not the "TokenizersBackend" that transformers 5 writes
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "backend" not in settings
    text = (folder / "heldout.txt").read_text()[:5000] + "\0\x7f\u00ad \u00e4\u20ac\U0001f600\r\n  "
    for place in (folder, out, tmp_path / "made"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        assert tokenizer(text, verbose=False).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


@torch.no_grad()
def test_it_predicts_unseen_code_almost_as_well_in_4_bits():
    module = demo()
    module.HELDOUT_BYTES = 16 * module.WINDOW
    path = EXAMPLES / "demo_model"
    bits, sizes = {}, {}
    for format in ("bf16", "nvfp4", "mxfp4"):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        if format != "bf16":
            fp4_ops.prepare(model, format)
        bits[format] = module.heldout_loss(module.Variant(format, model, module.step)) / math.log(2)
        sizes[format] = module.weight_bytes(model)
    assert bits["bf16"] < 2.0  # a byte drawn at its own frequency costs more than 4
    for format in ("nvfp4", "mxfp4"):
        assert bits[format] < bits["bf16"] + 0.05, bits
        assert sizes[format][0] < 0.4 * sizes["bf16"][0] and sizes[format][1] < 0.29 * sizes["bf16"][1]


@pytest.mark.more
@torch.no_grad()
def test_the_demo_measures_samples_and_prints(capsys):
    module = demo()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        EXAMPLES / "demo_model", dtype=torch.bfloat16
    ).eval()
    variants = [module.Variant("stock", model, module.step), module.Variant("again", model, module.step)]
    prompts = {batch: torch.randint(32, 127, (batch, module.PROMPT)) for batch in module.BATCHES}
    for variant in variants:
        module.warm_up(variant, prompts)
        for batch, prompt in prompts.items():
            module.measure(variant, batch, prompt)
    module.print_table(variants)
    assert "7.81     7.08" in capsys.readouterr().out
    text = module.sample(variants[0])
    assert len(text) == len(module.SAMPLE_PROMPT) + module.SAMPLE_BYTES
    want = model.generate(
        torch.tensor([list(module.SAMPLE_PROMPT)]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert text.startswith(bytes(want[0].tolist()).decode())


@pytest.mark.slow
@pytest.mark.more  # calls nothing that other tests do not
def test_the_quickstart_runs():
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 rewritten, 0 left alone" in done.stdout
    assert "prepared 2 experts modules" in done.stdout
