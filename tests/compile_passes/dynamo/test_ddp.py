"""DDP cuts graphs where its buckets of gradients end. Without gradients, experts' graphs stay whole."""

from __future__ import annotations

import pytest
import torch
from moe_styles import STYLES
from recorder import Recorder
from torch import Tensor, nn

import fp4_ops

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = STYLES["where loop"]()
        self.head = nn.Linear(self.moe.H, self.moe.H)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))


@pytest.mark.parametrize("bucket", [4096, 2**20], ids=["several buckets", "one bucket"])
def test_experts_in_ddp(group, bucket, monkeypatch):
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", bucket)
    module = Model()
    wrapped = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket / 2**20)
    recorder, x = Recorder(activation="bf16"), torch.randn(9, module.moe.H)
    compiled = torch.compile(wrapped, backend=recorder)
    with torch.no_grad():
        got, want = compiled(x), module(x)
    assert recorder.compilations == 1 and recorder.ops == ["fp4::moe"], recorder.reasons
    torch.testing.assert_close(got, want, rtol=0.3, atol=0.3)
    assert not torch.equal(got, want)
    assert [s.op for s in fp4_ops.explain(wrapped, x).sites] == ["fp4::moe"]

    compiled(x).sum().backward()  # gradients are exchanged bucket by bucket, as with any backend
    assert all(p.grad is not None for p in module.parameters())
    assert (recorder.compilations > 2) == (bucket == 4096)


@pytest.mark.parametrize("bucket", [4096, 2**20], ids=["several buckets", "one bucket"])
def test_training_is_told(group, bucket, monkeypatch, caplog):
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", bucket)
    module = Model()
    wrapped = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket / 2**20)
    torch.compile(wrapped, backend=Recorder())(torch.randn(9, module.moe.H))
    (told,) = [r.getMessage() for r in caplog.records if r.name == "fp4_ops"]
    assert "left to Inductor, because gradients may be asked for" in told
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="strict=True, but not all experts"):
        torch.compile(wrapped, backend=Recorder(strict=True))(torch.randn(9, module.moe.H))
    torch._dynamo.reset()
    caplog.clear()
    wrapped = nn.parallel.DistributedDataParallel(Dense(), bucket_cap_mb=bucket / 2**20)
    torch.compile(wrapped, backend=Recorder(strict=True))(torch.randn(2, 32))
    assert caplog.records == []


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_graphs_of_other_backends_are_cut_as_before(group, monkeypatch):
    monkeypatch.setattr(distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(gm)
        return gm.forward

    wrapped = nn.parallel.DistributedDataParallel(Dense(), bucket_cap_mb=1024 / 2**20)
    with torch.no_grad():
        torch.compile(wrapped, backend=backend)(torch.randn(2, 32))
    assert len(graphs) == 3
