"""Which products belong to one block: several blocks of the same shape in a graph, and experts after a
Linear."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import more
from moe_models import Recorder, relative_error
from moe_style_base import twin_of
from moe_styles import STYLES, Expert, Style, relu2
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MOE = "fp4::moe"
H, INTER = 32, 48


def check(module: nn.Module, ops: list[str], twin: nn.Module | None = None) -> Recorder:
    """The ops, at two lengths under one compilation, and the result of the same model over exact weights."""
    recorder = Recorder(activation="bf16")
    twin = twin if twin is not None else twin_of(module)
    compiled = torch.compile(module, backend=recorder, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for n in (11, 7):
            x = torch.randn(n, H)
            got, want = compiled(x), twin(x)
            assert relative_error(got, want) < 1e-5, recorder.reasons
    assert recorder.ops == ops, recorder.reasons
    assert recorder.compilations == 1
    return recorder


# --- a Linear before the experts ---


def latent(name: str, act=None, bias: bool = False) -> type[Style]:
    class Latent(STYLES[name]):
        def build(self):
            super().build()
            self.fc1, self.fc2 = (nn.Linear(H, H, bias=bias) for _ in range(2))

        def experts_of(self, x, ids, weights):
            z = self.fc1(x)
            return self.fc2(super().experts_of(z if act is None else act(z), ids, weights))

    return Latent


LATENT = ["slot mask loop (boolean masks)", "gather + bmm", "dense stack"]
LATENT_TOO = [
    "one-hot loop (transformers 4)", "flat mask loop (index_put)", "scatter_add loop, 3D parameters",
    "dense loop, masked sum", "dense einsum", "gather + einsum (gpt-fast)", "sorted grouped_mm (torchtitan)",
    "sorted splits, one-hot counts, restored by index_put (DeepSeek-V3's own)",
]  # fmt: skip


@pytest.mark.parametrize("name", [*LATENT, *map(more, LATENT_TOO)])
def test_a_linear_before_the_experts(name):
    recorder = check(latent(name)(experts=3), [MOE])
    assert not any("fc" in weight for weight in recorder.sites[0].weights)


@pytest.mark.parametrize("act", [F.relu, more(F.silu)])
@pytest.mark.parametrize("expert", ["gated", "relu2"])
def test_a_linear_with_bias_and_activation_before_the_experts(act, expert):
    style = latent("where loop", act, bias=True)
    if expert == "gated":
        check(style(experts=3, bias=True), [MOE])
    else:
        check(style(experts=3, act=relu2, gated=False), [MOE])


def test_two_linears_before_the_experts():
    class Deep(STYLES["where loop"]):
        def build(self):
            super().build()
            self.fc0, self.fc1 = nn.Linear(H, INTER), nn.Linear(INTER, H)

        def experts_of(self, x, ids, weights):
            return super().experts_of(self.fc1(F.relu(self.fc0(x))), ids, weights)

    check(Deep(experts=3), [MOE])


def test_layers_of_latent_experts():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(latent("where loop", F.silu)(experts=3) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    check(Layers(), [MOE] * 2)


# --- blocks side by side ---


class Towers(nn.Module):
    def __init__(self, name: str, how: str, blocks: int = 2) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(STYLES[name](experts=3) for _ in range(blocks))
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        outs = [block(x) for block in self.blocks]
        if self.how == "sum":
            return sum(outs, x)
        if self.how == "product":
            return outs[0] * outs[1]
        if self.how == "apart":
            return torch.cat([self.norm(y) for y in outs])
        return torch.cat(outs, -1)


class Siamese(Towers):
    """The same block for two inputs."""

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        if self.how == "sum":
            return block(x) + block(x.flip(0))
        return block(x) * block(x.flip(0)) if self.how == "product" else torch.cat([block(x), block(-x)])


SIDE_BY_SIDE = [
    ("where loop", "sum"), ("dense stack", "product"), ("soft mixture of all experts", "cat"),
    ("slot mask loop (boolean masks)", "apart"), ("dense loop, scattered weights", "sum"),
]  # fmt: skip
SIDE_BY_SIDE_TOO = [
    (name, how)
    for name in (
        "where loop", "dense stack", "soft mixture of all experts", "flat mask loop (index_put)",
        "dense loop, masked sum", "gather + bmm", "dense einsum", "sorted grouped_mm (torchtitan)",
        "sorted splits, one-hot counts, restored by index_put (DeepSeek-V3's own)",
    )
    for how in ("sum", "product", "cat", "apart")
    if (name, how) not in SIDE_BY_SIDE
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "how"), [*SIDE_BY_SIDE, *(more(*case) for case in SIDE_BY_SIDE_TOO)])
def test_two_blocks_of_one_shape(name, how):
    check(Towers(name, how), [MOE] * 2)


@pytest.mark.parametrize(
    ("name", "how"),
    [("where loop", "product"), ("dense stack", "sum"), more("soft mixture of all experts", "cat")],
)
def test_one_block_for_two_inputs(name, how):
    check(Siamese(name, how, 1), [MOE] * 2)


def test_three_blocks():
    check(Towers("where loop", "sum", 3), [MOE] * 3)


def test_task_experts_beside_shared_ones():
    """Progressive layered extraction: the outputs of the shared experts are added to the sum of each task."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def experts() -> nn.ModuleList:
                return nn.ModuleList(Expert(H, INTER, F.silu, gated=True, bias=False) for _ in range(2))

            self.tasks, self.shared = nn.ModuleList([experts(), experts()]), experts()
            self.gates = nn.ModuleList(nn.Linear(H, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            shared, out = [e(x) for e in self.shared], []
            for task, gate in zip(self.tasks, self.gates):
                y = torch.stack([*(e(x) for e in task), *shared], 1)
                out.append((y * torch.softmax(gate(x), -1).unsqueeze(-1)).sum(1))
            return torch.cat(out, -1)

    module = Tasks()
    twin = copy.deepcopy(module)
    for experts in (*twin.tasks, twin.shared):
        for e in experts:
            exact(e)
    check(module, [MOE] * 2, twin)


def exact(expert: Expert) -> None:
    """Returns the dequantised values of packed weights."""
    for parts in ([expert.w1.weight.data, expert.w3.weight.data], [expert.w2.weight.data]):
        packed = torch.ops.fp4.quantize(torch.cat(parts), "nvfp4")
        whole = torch.ops.fp4.dequantize(*packed, "nvfp4", torch.float32)
        for part, new in zip(parts, whole.split([p.shape[0] for p in parts])):
            part.copy_(new)


# --- look-alikes ---


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(H, 4, bias=False), nn.Linear(4, INTER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def test_a_block_beside_one_that_stays():
    towers = Towers("where loop", "sum")
    odd = towers.blocks[1]
    odd.list[1].w1 = LoRA(odd.list[1].w1)
    twin = copy.deepcopy(towers)
    twin.blocks[0] = towers.blocks[0].twin()
    recorder = check(towers, [MOE], twin)
    assert "is corrected by one of smaller rank (LoRA)" in recorder.reasons
    assert "w + scale * b @ a" in recorder.sites[-1].change
