"""The example that serves a model from several processes runs, here with two and gloo on the CPU."""

from __future__ import annotations

import forks
import pytest
import torch
from checkpoint_samples import tiny
from places import ROOT
from processes import environment, start

transformers = pytest.importorskip("transformers", "5.23")
pytest.importorskip("transformers.distributed")
distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

EXAMPLE = ROOT / "examples/serve_two_gpus.py"


@pytest.mark.more
def test_two_processes_stream_what_one_says(tmp_path):
    """Activations in 8 bits round in groups that do not depend on the number of processes. But scores of a
    random model nearly tie: a token that is said must be nearly the best of one process."""
    import fp4_ops

    model = tiny()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    processes = start(str(EXAMPLE), 2, tmp_path, "5 6 7", "--new-tokens", "6")
    logs = [p.communicate(timeout=600)[0].decode() for p in processes]
    if any("requires `accelerate`" in log for log in logs):
        pytest.skip("transformers splits models with accelerate, which is not installed")
    assert [p.returncode for p in processes] == [0, 0], "\n".join(log[-3000:] for log in logs)
    lines = logs[0].splitlines()
    assert any("4 of 8 experts, on rank 0 of 2" in line for line in lines)
    (at,) = (i for i, line in enumerate(lines) if line.startswith("[6 tokens, the first after"))
    said = [int(word) for word in lines[at - 1].split()]
    fp4_ops.prepare(model)
    with torch.no_grad():
        scores = model(torch.tensor([[5, 6, 7, *said[:-1]]])).logits[0, 2:]
    behind = scores.max(-1).values - scores[range(6), said]
    assert (behind / scores.std(-1)).median() < 0.1, behind
    assert not any(line.startswith("[6 tokens") for line in logs[1].splitlines())


@pytest.mark.parametrize(
    "place, words",
    [
        ({}, "this process has no rank. Start it by torchrun: torchrun --nproc-per-node 2"),
        pytest.param(
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"},
            "has 8 experts a block, which 16 processes cannot share equally. Choose another number, such as ",
            marks=pytest.mark.more,
        ),
        pytest.param(
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"},
            "processes cannot share equally. Choose another number, such as ",
            marks=pytest.mark.more,
        ),
    ],
    ids=["no torchrun", "more processes than experts", "more processes than heads"],
)
def test_it_says_how_it_is_started(place, words, tmp_path):
    tiny().config.save_pretrained(tmp_path)
    env = {k: v for k, v in environment(**place).items() if k in place or k not in ("RANK", "WORLD_SIZE")}
    done = forks.run([str(EXAMPLE), str(tmp_path), "5 6 7"], env)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr[-2000:]


@pytest.mark.parametrize(
    "broken, words",
    [
        (False, "3 processes cannot share equally. Choose another number, such as 2: torchrun"),
        pytest.param(True, "ValueError: fp4: model.layers.0.mlp.experts.", marks=pytest.mark.more),
    ],
    ids=["a number that does not fit", "experts with NaN"],
)
def test_torchrun_ends_with_the_reason(broken, words, tmp_path):
    """After the traceback of its own."""
    model = tiny()
    if broken:
        model.model.layers[0].mlp.experts.down_proj.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2" if broken else "3", str(EXAMPLE)]
    done = forks.run([*command, str(tmp_path), "5 6 7"], environment())
    said = done.stderr.rpartition("ChildFailedError")[2]
    assert done.returncode == 1 and words in said.rpartition("Root Cause")[2], done.stderr[-3000:]


def test_for_a_model_without_experts_it_names_no_number(tmp_path):
    transformers.Qwen3Config(num_attention_heads=2, num_key_value_heads=2).save_pretrained(tmp_path)
    env = environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    done = forks.run([str(EXAMPLE), str(tmp_path), "5 6 7"], env)
    said = done.stderr
    assert done.returncode == 2 and said.endswith("has no experts. Choose another model\n"), said


@pytest.mark.parametrize(
    "family, reason",
    [("qwen3_moe", ""), ("mixtral", " that can be loaded: ")],
    ids=["one without a vocabulary", "none"],
)
def test_a_text_needs_a_tokenizer(family, reason, tmp_path):
    tiny(family).config.save_pretrained(tmp_path)
    env = environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    done = forks.run([str(EXAMPLE), str(tmp_path), "some text"], env)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and "Traceback" not in said, said[-2000:]
    assert f"has no tokenizer{reason}" in said and said.endswith('as token numbers: "17 4 25"'), said


@pytest.mark.more
def test_one_process_serves_alone(tmp_path):
    model = tiny()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    (process,) = start(str(EXAMPLE), 1, tmp_path, "5 6 7", "--new-tokens", "3")
    log = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0 and "[3 tokens, the first after" in log, log[-3000:]
