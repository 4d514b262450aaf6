"""Requests in one batch get the same results as alone: `generate_batch` and `transformers serve`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import transformers
from conftest import more
from moe_models import Recorder, fake_quantised_model, that_answers, tokens
from places import ROOT
from torch import nn

import fp4_ops

NEW = 8
LENGTHS = (3, 9, 5, 17, 4, 1)


def prepared(family: str) -> nn.Module:
    model = that_answers(family)
    fp4_ops.prepare(model, activation="bf16")
    return model


def alone(model: nn.Module, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def batched(model: nn.Module, prompts: list[list[int]], **options) -> list[list[int]]:
    """With room for a few requests at a time, and prompts that are read in parts."""
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # transformers 5.17 has another name for it.
    page = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    sizes = {page: 16, "num_blocks": 16, "max_batch_tokens": 12, "max_requests_per_batch": 3}
    batching = transformers.ContinuousBatchingConfig(**{**sizes, **options})
    found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    assert not [r.error for r in found.values() if r.error]
    return [found[f"req_{i}"].generated_tokens for i in range(len(prompts))]


def draw() -> list[list[int]]:
    """Without the padding token 0, which `generate` would hide in a prompt."""
    return [tokens(1, n)[0].clamp(min=1).tolist() for n in LENGTHS]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", more("mixtral"), more("olmoe")])
def test_generate_batch_of_a_prepared_model(family):
    model, prompts = prepared(family), draw()
    want = [alone(model, p) for p in prompts]
    assert batched(model, prompts) == want
    assert len({tuple(w) for w in want}) > 1


@pytest.mark.more
@pytest.mark.slow
def test_generate_batch_with_the_backend(fresh_dynamo):
    """Its compile options take the backend; the model starts from values that 4 bits hold exactly."""
    model, prompts = fake_quantised_model(that_answers("qwen3_moe")), draw()
    want = [alone(model, p) for p in prompts]
    recorder = Recorder(activation="bf16")

    def backend(gm, inputs):  # a config copies what is not a function
        return recorder(gm, inputs)

    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=False, dynamic=True)
    assert batched(model, prompts, varlen_compile_config=config) == want
    assert set(recorder.ops) == {"fp4::moe"}


PAGE = ROOT / "docs/generation.md"


@pytest.mark.more
@pytest.mark.slow
def test_the_documented_command_serves_a_folder(folder, registered):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    typed = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (command,) = (command for command in typed if "serve FOLDER" in command)
    port = free_port()
    command = command.replace("python -c", f"exec {sys.executable} -c").replace("FOLDER", str(folder)).strip()
    server = subprocess.Popen(
        ["bash", "-c", f"{command} --device cpu --port {port}"], stdout=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    prompt = draw()[1]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    try:
        wait_for(port, lambda: server.poll() is None)
        body = {"model": str(folder), "prompt": " ".join(f"w{t}" for t in prompt), "max_tokens": NEW}
        answer = get(port, "/v1/completions", {**body, "temperature": 0.0})
    finally:
        server.kill()
        server.wait()
    want = [f"w{i}" for i in alone(model, prompt) if i]  # without the padding token
    assert answer["choices"][0]["text"].split() == want


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def get(port: int, path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://localhost:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def wait_for(port: int, alive=lambda: True) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            get(port, "/health")
            return
        except OSError:
            assert alive(), "the server ended"
            time.sleep(0.1)
    raise TimeoutError("the server does not answer")


class Server:
    """`transformers serve` in a thread of this process, over a folder."""

    def __init__(self, folder: Path, **options) -> None:
        from transformers.cli.serve import Serve

        self.port = free_port()
        self.serve = Serve(
            force_model=str(folder),
            device="cpu",
            port=self.port,
            non_blocking=True,
            log_level="error",
            **options,
        )
        wait_for(self.port)


def words(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of words w0, w1, ..."""
    import tokenizers

    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A prepared model as `save_pretrained` writes it, with a tokenizer."""
    where = tmp_path_factory.mktemp("served")
    model = prepared("qwen3_moe")
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    model.save_pretrained(where)
    words(128).save_pretrained(where)
    return where


@pytest.mark.parametrize("continuous", [True, more(False)])
def test_transformers_serve_answers_concurrent_requests_as_alone(continuous, folder, registered):
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    assert any(hasattr(m, "_fp4_recipe") for m in model.modules())
    prompts = draw()
    # Text is without the padding token 0, which a model may give as any other.
    want = [" ".join(f"w{i}" for i in alone(model, p) if i) for p in prompts]
    sizes = {"cb_num_blocks": 16, "cb_max_batch_tokens": 12} if continuous else {}
    server = Server(folder, continuous_batching=continuous, **sizes)
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        prompt = " ".join(f"w{t}" for t in prompts[i])
        body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, "temperature": 0.0}
        got[i] = get(server.port, "/v1/completions", body)["choices"][0]["text"]

    try:
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        server.serve.kill_server()
    assert [got[i].strip() for i in range(len(prompts))] == want
