"""Experts spread over two GPUs, by NCCL and by kernels that write into each other's memory."""

from __future__ import annotations

import json

import pytest
import torch
from processes import outcomes, start
from test_several_ranks import REFUSED, RIGHT

from fp4_ops.distributed import nvlink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
needs_kernels = pytest.mark.skipif(nvlink.library() is None, reason="needs fp4_ops/_nvlink.so")


@pytest.mark.parametrize("way", ["nccl", pytest.param("nvlink", marks=needs_kernels)])
def test_operators_over_a_group_of_gpus(way, tmp_path):
    for outcome in outcomes("spread_experts.py", 2, tmp_path, way, gpus=True):
        assert {name: outcome[name] for name in RIGHT} == dict.fromkeys(RIGHT, "right")
        for name, words in REFUSED.items():
            with pytest.raises(RuntimeError, match=words.replace("(", r"\(")):
                raise RuntimeError(outcome[name])


@needs_kernels
def test_replays_of_graphs(tmp_path):
    for outcome in outcomes("spread_graphs.py", 2, tmp_path, gpus=True):
        assert outcome == dict.fromkeys(outcome, "right")


@needs_kernels
@pytest.mark.parametrize(
    "how, words",
    [
        ("late", "rank 1 did not come within 4 s"),
        ("killed", "rank 1 did not come within 4 s"),
        ("other", "rank 1 calls for the sum of 512 bytes, and this rank for the sum of 256 bytes"),
    ],
)
def test_a_lost_rank_is_named(how, words, tmp_path):
    processes = start("lost_gpu_ranks.py", 2, tmp_path, how, gpus=True)
    logs = [p.communicate(timeout=600)[0].decode() for p in processes]
    told = json.loads((tmp_path / "rank0.json").read_text())
    assert told["at once"] != "no error" and told["seconds"] < 30, told
    named = f"fp4::all_reduce: on rank 0 of 2: {words}"
    assert named in told["again"] and named in logs[0], (told, logs[0][-2000:])
