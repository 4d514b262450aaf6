"""vLLM's engine on a CPU: from 4-bit folders it answers as transformers does from the same weights.

`make test-vllm`. The engine runs in an environment of its own (helpers/vllm_environment.py).
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import vllm_environment
from installs import CannotInstall
from places import HELPERS
from vllm_folders import FOLDERS, ONLINE, answer, reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NEW = 16
SERVED = tuple(FOLDERS)[:5]
OFFLINE = tuple(FOLDERS)[5:]
LENGTHS = (3, 9, 5, 17, 4, 1, 30, 12, 7, 21, 2, 14, 6, 25, 10, 19)
"""Lengths of 16 prompts that are asked at one time."""


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return vllm_environment.python()
    except CannotInstall as error:
        pytest.skip(f"{vllm_environment.REQUIREMENT} cannot be installed: {error}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return vllm_environment.environment(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("folders")


def folder(name: str, folders: Path) -> Path:
    if not (folders / name).exists():
        FOLDERS[name](folders / name)
    return folders / name


def draw(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [torch.randint(1, 128, (n,)).tolist() for n in lengths]


def flags(name: str) -> dict[str, str]:
    return {"quantization": "fp4_ops"} if name in ONLINE else {}


class Server:
    """`vllm serve` over a folder."""

    def __init__(self, python: Path, environment: dict[str, str], path: Path, log: Path, name: str) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        self.path, self.log = path, log
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port",
            str(self.port), "--dtype", "float32", "--max-model-len", "128", "--skip-tokenizer-init",
            "--enforce-eager", *[part for key, value in flags(name).items() for part in (f"--{key}", value)],
        ]  # fmt: skip
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"http://localhost:{self.port}/health", timeout=5)
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.2)
        raise TimeoutError(self.log.read_text()[-3000:])

    def ask(self, prompt: list[int]) -> list[int]:
        """The tokens of a streamed answer."""
        body = {
            "model": str(self.path), "prompt": prompt, "max_tokens": NEW, "temperature": 0.0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://localhost:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        tokens: list[int] = []
        with urllib.request.urlopen(request, timeout=300) as lines:
            for line in lines:
                text = line.decode().removeprefix("data: ").strip()
                if text and text != "[DONE]":
                    for choice in json.loads(text)["choices"]:
                        tokens += choice.get("token_ids") or []
        return tokens


@pytest.fixture
def server(request, python, environment, folders, tmp_path) -> Iterator[Server]:
    name = request.param
    started = Server(python, environment, folder(name, folders), tmp_path / "log", name)
    try:
        started.wait()
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


@pytest.mark.parametrize("server", SERVED, indirect=True)
def test_sixteen_requests_at_once_are_answered_as_in_transformers(server):
    prompts, got = draw(), {}

    def ask(i: int) -> None:
        got[i] = server.ask(prompts[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = reference(server.path.name, server.path)
    want = [answer(model, prompt, NEW) for prompt in prompts]
    assert [got.get(i) for i in range(len(prompts))] == want
    assert len({tuple(w) for w in want}) > len(want) // 2
    said = re.findall(r"fp4_ops runs (.*)", server.log.read_text())
    assert len(said) == 1 and "expert blocks" in said[0], said


def run(
    python: Path, environment: dict[str, str], cases: list[dict[str, Any]], where: Path
) -> dict[str, Any]:
    """The results of a worker, by the cases' names, and under "" what it printed."""
    (where / "cases.json").write_text(json.dumps(cases))
    command = [
        str(python),
        str(HELPERS / "vllm_worker.py"),
        str(where / "cases.json"),
        str(where / "results"),
    ]
    env = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=env, cwd=where, capture_output=True, text=True, timeout=1200)
    lines = (where / "results").read_text().splitlines() if (where / "results").exists() else []
    results: dict[str, Any] = {r["name"]: r for r in map(json.loads, lines)}
    assert len(results) == len(cases), done.stdout[-2000:] + done.stderr[-4000:]
    return results | {"": done.stdout + done.stderr}


def test_other_dialects_and_families_answer_as_in_transformers(python, environment, folders, tmp_path):
    prompts = draw(LENGTHS[:6])
    cases = [
        {
            "name": name,
            "folder": str(folder(name, folders)),
            "prompts": prompts,
            "new": NEW,
            "options": flags(name),
        }
        for name in OFFLINE
    ]
    results = run(python, environment, cases, tmp_path)
    wrong = {}
    for name in OFFLINE:
        model = reference(name, folders / name)
        want = [answer(model, prompt, NEW) for prompt in prompts]
        if results[name].get("tokens") != want:
            wrong[name] = results[name].get("error") or [results[name]["tokens"], want]
    assert not wrong, f"{wrong}\n{results[''][-3000:]}"


@pytest.mark.parametrize("way", ["two processes", "two processes, experts spread", "compiled"])
def test_other_ways_to_run_answer_the_same(way, python, environment, folders, tmp_path):
    """Three units of the experts' middle for two processes; q, k and v in 4 bits under vLLM's compiler."""
    options: dict[str, Any] = {"enforce_eager": way != "compiled"}
    if way != "compiled":
        options |= {"tensor_parallel_size": 2, "enable_expert_parallel": way.endswith("spread")}
    name = "linears" if way == "compiled" else "nvfp4"
    path, prompts = folder(name, folders), draw(LENGTHS[:6])
    case = {"name": name, "folder": str(path), "prompts": prompts, "new": NEW, "options": options}
    results = run(python, environment, [case], tmp_path)
    model = reference(name, path)
    want = [answer(model, prompt, NEW) for prompt in prompts]
    assert results[name].get("tokens") == want, f"{results[name]}\n{results[''][-3000:]}"


def test_pooling_and_prompts_in_pieces(python, environment, folders, tmp_path):
    """An embedding of a prompt; prompts that are longer than a step of the engine."""
    path, prompts = folder("nvfp4", folders), draw(LENGTHS[:4])
    words = {f"w{i}": i for i in range(128)}
    vocabulary = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(vocabulary).save(str(path / "tokenizer.json"))
    pooling = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    pieces = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    cases = [
        {"name": "pooling", "new": 0, "options": pooling},
        {"name": "pieces", "new": NEW, "options": pieces},
    ]
    cases = [{"folder": str(path), "prompts": prompts, **case} for case in cases]
    results = run(python, environment, cases, tmp_path)
    model = reference("nvfp4", path)
    want = [answer(model, prompt, NEW) for prompt in prompts]
    assert results["pieces"].get("tokens") == want, f"{results['pieces']}\n{results[''][-3000:]}"
    with torch.no_grad():
        last = [model.model(torch.tensor([p])).last_hidden_state[0, -1] for p in prompts]
    got = torch.tensor(results["pooling"]["tokens"])
    assert torch.allclose(got, F.normalize(torch.stack(last), dim=-1), atol=1e-4)


def test_what_is_not_done_is_refused_before_weights_are_read(python, environment, folders, tmp_path):
    path = str(folder("nvfp4", folders))
    cases = [
        {"name": "lora", "options": {"enable_lora": True}},
        {"name": "eplb", "options": {"enable_eplb": True, "enable_expert_parallel": True}},
        {"name": "own", "options": {"quantization": "compressed-tensors"}},
    ]
    cases = [{"folder": path, "prompts": [[1, 2]], "new": 2, **case} for case in cases]
    results = run(python, environment, cases, tmp_path)
    assert "fp4: LoRA is enabled" in results["lora"]["error"]
    assert "Expert parallelism load balancing" in results["eplb"]["error"]  # vLLM's own words
    assert "fp4" not in results["own"]["error"]  # vLLM's own method, which has no kernel for it here
    assert "fp4_ops runs" not in results[""]


@pytest.mark.parametrize("how", ["FP4_VLLM", "VLLM_PLUGINS", "version", "kernels"])
def test_vllm_stays_as_it_is(how, python, environment, tmp_path):
    """Whoever turns it off, and where it cannot run: vLLM does not know its name, and a warning says why."""
    env = dict(environment)
    before = ""
    if how == "FP4_VLLM":
        env["FP4_VLLM"] = "0"
    elif how == "VLLM_PLUGINS":
        env["VLLM_PLUGINS"] = "another"
    elif how == "version":
        before = "import vllm; vllm.__version__ = '9.9.0'\n"
    else:
        before = "import torch, fp4_ops\nfp4_ops.integrations = None\n"
        before += "def broken(*a, **k): raise RuntimeError('of another build')\n"
        before += "import fp4_ops.integrations.vllm as ours; ours._try_kernels = broken\n"
    program = before + (
        "import vllm.plugins as p; p.load_general_plugins()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as m\n"
        "print('KNOWN', 'fp4_ops' in m)\n"
    )
    done = subprocess.run(
        [str(python), "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert "KNOWN False" in done.stdout, done.stdout + done.stderr
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "keeps its own kernels" in line]
    assert len(warnings) == (how in ("version", "kernels")), done.stdout + done.stderr


def test_nothing_is_imported_where_vllm_is_not_used(python, environment, tmp_path):
    program = "import fp4_ops, sys; print([m for m in sys.modules if m.partition('.')[0] == 'vllm'])"
    done = subprocess.run(
        [str(python), "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
