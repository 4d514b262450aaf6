"""Weights that change without a new version or address: the next call uses the new values."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import repository_styles  # noqa: F401  adds its styles to STYLES
import torch
from conftest import more
from moe_models import Block, Recorder, relative_error
from moe_styles import STYLES
from places import HELPERS
from torch import Tensor, nn

import fp4_ops
from fp4_ops.compile_passes.weights import packed as packed_weights
from fp4_ops.compile_passes.weights.packed import PackedWeights, note_writes
from fp4_ops.compile_passes.weights.specs import PackSpec

EXACT = 1e-4
"""Rounding of outputs that are differences of large numbers. An update that is not seen gives far more."""
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def a_stack() -> nn.Module:
    return Block("grouped_mm")


def a_list() -> nn.Module:
    return STYLES["where loop"](bias=True)


def transposed_stacks() -> nn.Module:
    return STYLES["dense einsum"]()


class Checked:
    """A compiled module, whose every call is compared with what its weights say at that time."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.recorder = module, Recorder(activation="bf16")
        self.compiled = torch.compile(module, backend=self.recorder)
        self.x = torch.randn(9, module.H)

    def check(self) -> None:
        with torch.no_grad():
            want = self.module.twin()(self.x)
            assert relative_error(self.compiled(self.x), want) < EXACT
        assert set(self.recorder.ops) == {"fp4::moe"} and self.recorder.compilations == 1


def seen(module: nn.Module, *changes: Callable[[nn.Module], None]) -> None:
    checked = Checked(module)
    checked.check()
    for change in changes:
        before = [p.detach().clone() for p in module.parameters()]
        change(module)
        assert any(not torch.equal(p, b) for p, b in zip(module.parameters(), before))
        checked.check()
    checked.check()


# --- optimizers ---


def a_step(make: Callable[..., torch.optim.Optimizer], **options) -> Callable[[nn.Module], None]:
    def step(module: nn.Module) -> None:
        optimizer = make(module.parameters(), **options)
        x = torch.randn(7, module.H)
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


OPTIMIZERS = {
    "Adam, fused": (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
    "Adagrad, fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "AdamW, a loop": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [a_stack, more(a_list)], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step(name, make):
    cls, options = OPTIMIZERS[name]
    seen(make(), *[a_step(cls, **options)] * 2)


def test_a_step_so_small_that_samples_miss_it():
    """The optimizer itself tells: one element of one weight has a gradient."""
    block = Block("grouped_mm")

    def step(module: Block) -> None:
        optimizer = torch.optim.SGD([module.w2], lr=1.0, fused=True)
        module.w2.grad = torch.zeros_like(module.w2)
        module.w2.grad[1, 3, 5] = 100.0
        optimizer.step()
        module.w2.grad = None

    seen(block, step)


def test_a_step_of_another_model_packs_nothing(monkeypatch):
    checked = Checked(a_stack())
    checked.check()
    packed = count_packing(monkeypatch)
    other = nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    torch.optim.AdamW(other.parameters(), fused=True).step()
    checked.check()
    assert packed == []


def test_a_compiled_step():
    def step(module: nn.Module) -> None:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        module(torch.randn(7, module.H)).square().sum().backward()
        torch.compile(optimizer.step, backend="aot_eager")()
        optimizer.zero_grad()

    checked = Checked(a_stack())
    checked.check()
    step(checked.module)
    checked.check()


# --- writes past autograd ---


def through_data(module: nn.Module) -> None:
    for p in module.parameters():
        p.data += torch.randn_like(p) * 0.1


def scaled(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.mul_(-1.5)


def merged(module: nn.Module) -> None:
    """As an adapter is: a product of low rank is added."""
    for p in module.parameters():
        if p.dim() >= 2:
            p.data += torch.randn(*p.shape[:-1], 1) * torch.randn(p.shape[-1]) * 0.1


def averaged(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.lerp_(torch.randn_like(p), 0.01)


def by_numpy(module: nn.Module) -> None:
    for p in module.parameters():
        p.detach().numpy()[...] *= 2


def by_address(module: nn.Module) -> None:
    for p in module.parameters():
        new = torch.randn_like(p)
        ctypes.memmove(p.data_ptr(), new.data_ptr(), p.nbytes)


def loaded_by_expert(module: nn.Module) -> None:
    """As servers load: one expert of one parameter at a time."""
    weight = max(module.parameters(), key=Tensor.numel)
    (weight.data[1] if weight.dim() == 3 else weight.data).copy_(torch.randn(weight.shape[-2:]))


def by_a_graph_that_writes(module: nn.Module) -> None:
    def write(weights: list[Tensor]) -> None:
        for w in weights:
            w.mul_(0.5)

    torch.compile(write, backend="aot_eager")([p.data for p in module.parameters()])


WRITES = [
    through_data, scaled, merged, averaged, by_numpy, by_address, loaded_by_expert, by_a_graph_that_writes
]  # fmt: skip
MODULES = [a_stack, a_list, transposed_stacks]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", MODULES, ids=lambda f: f.__name__)
def test_writes_past_autograd(make):
    seen(make(), *WRITES)


def test_writes_to_inference_tensors():
    with torch.inference_mode():
        block = Block("grouped_mm")
        compiled = torch.compile(block, backend=Recorder(activation="bf16"))
        x = torch.randn(5, Block.H)
        for _ in range(3):
            assert relative_error(compiled(x), block.twin()(x)) < EXACT
            for p in (block.w13, block.w2):
                p.copy_(torch.randn_like(p))


def count_packing(monkeypatch) -> list[Tensor]:
    packed: list[Tensor] = []
    original = PackSpec.pack
    monkeypatch.setattr(PackSpec, "pack", lambda spec, *w: packed.append(w) or original(spec, *w))
    return packed


def test_two_graphs_pack_a_changed_weight_once(monkeypatch):
    block, x = a_stack(), torch.randn(9, Block.H)
    compiled = [torch.compile(block, backend=Recorder(activation=a), dynamic=False) for a in ("bf16", "int8")]
    with torch.no_grad():
        for c in compiled:
            c(x)
        packed = count_packing(monkeypatch)
        for change in (through_data, through_data):
            change(block)
            for c in compiled * 2:
                assert relative_error(c(x), block.twin()(x)) < 0.03
        assert len(packed) == 2 * 2


def test_one_weight_that_is_seen_makes_the_others_suspect():
    """w2 changes in one element of each expert that no sample holds: w13 changes, too, and gives it away."""
    checked = Checked(a_stack())
    checked.check()
    w13, w2 = checked.module.w13, checked.module.w2
    entry = next(e for s in packed_weights._stores.values() for k, e in s._entries.items() if k == (id(w2),))
    (samples,) = entry.samples
    held = {a for at, n in zip(samples.at.tolist(), samples.sizes.tolist()) for a in range(at, at + n)}
    flat = w2.data.view(-1)
    unseen = [i for i in range(flat.numel()) if flat[i].data_ptr() not in held]
    # Of each expert, for the draw may leave any one without a token.
    experts = {i // w2[0].numel(): i for i in unseen}
    assert len(experts) == len(w2)
    flat[list(experts.values())] = 50.0
    with pytest.raises(AssertionError):
        checked.check()
    w13.data.mul_(1.01)
    checked.check()
    # What nobody sees: refresh.
    flat[unseen[-1]] = -50.0
    assert fp4_ops.refresh(checked.module) == 2
    checked.check()
    # Or say it.
    flat[unseen[0]] = 1.0
    note_writes([w2])
    checked.check()


def test_refresh_keeps_addresses_and_says_how_much_it_did():
    checked = Checked(a_list())
    assert fp4_ops.refresh(checked.module) == 0
    checked.check()
    ids = {id(p) for p in checked.module.parameters()}

    def packed() -> list[Tensor]:
        entries = [e for s in packed_weights._stores.values() for k, e in s._entries.items() if ids & set(k)]
        return [t for e in entries for t in e.packed]

    before = packed()
    with torch.inference_mode():
        scaled(checked.module)
        assert fp4_ops.refresh(checked.module) >= 2
    assert all(a is b for a, b in zip(before, packed(), strict=True))
    checked.check()
    assert fp4_ops.refresh(a_stack()) == 0
    with pytest.raises(TypeError, match=r"refresh takes a torch\.nn\.Module; it got list"):
        fp4_ops.refresh([checked.module])


def test_reset_forgets_what_was_packed():
    block, x = a_stack(), torch.randn(9, Block.H)
    with torch.no_grad():
        torch.compile(block, backend="fp4", options={"activation": "bf16"})(x)
        assert any(map(len, packed_weights._stores.values()))
        torch.compiler.reset()
        assert not any(map(len, packed_weights._stores.values()))


def test_an_unchanged_model_is_not_packed_again(monkeypatch):
    checked = Checked(a_list())
    checked.check()
    asked = []
    monkeypatch.setattr(PackedWeights, "entry", lambda *a: asked.append(a))
    for _ in range(3):
        checked.check()
    assert asked == []


# --- several processes ---

RANK = """
import copy, json, os, sys, torch, torch.distributed as dist
sys.path.insert(0, {helpers!r})
from moe_models import Block, Recorder, relative_error
torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(rank + 10 * int(sys.argv[3]))
found = {{}}
block, recorder = Block("grouped_mm"), Recorder(activation="bf16")
compiled = torch.compile(block, backend=recorder)
x = torch.randn(9, Block.H)

def check(name):
    with torch.no_grad():
        found[name] = relative_error(compiled(x), block.twin()(x))

def each(write):
    for p in block.parameters():
        write(p.detach() if p.requires_grad else p)

check("before")
each(lambda p: dist.broadcast(p, 0)); check("broadcast")
each(lambda p: p.copy_(torch.randn_like(p))); check("copy_")
each(lambda p: dist.all_reduce(p)); check("all_reduce")
each(lambda p: p.copy_(torch.randn_like(p))); check("copy_ again")
each(lambda p: (dist.send(p, 1) if rank == 0 else dist.recv(p, 0))); check("recv")
each(lambda p: dist.broadcast_object_list([0], 0)); check("nothing")
torch._dynamo.reset()

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block("grouped_mm") for _ in range(3))
    def forward(self, x):
        for b in self.blocks:
            x = b(x) + x
        return x

torch.manual_seed(1)
model = Model().requires_grad_(False)
plain = copy.deepcopy(model)
mesh = init_device_mesh("cpu", (2,))
for b in model.blocks:
    fully_shard(b, mesh=mesh)
fully_shard(model, mesh=mesh)
recorder = Recorder(activation="bf16")
compiled = torch.compile(model, backend=recorder)
errors = []
with torch.no_grad():
    for _ in range(4):
        x = torch.randn(9, Block.H)
        errors.append(relative_error(compiled(x), plain(x)))
found["fsdp"] = max(errors)
notes = [f.note for f in recorder.frames if f.note]
notes += [s.reason for f in recorder.frames for s in f.sites if not s.rewritten]
assert not any(s.rewritten for f in recorder.frames for s in f.sites)
print("RESULT", json.dumps([found, notes, [s.change for f in recorder.frames for s in f.sites]]))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # without Python's end, where a thread of gloo's may still be there and C++ terminates
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[list]:
    folder = tmp_path_factory.mktemp("ranks")
    code = RANK.format(helpers=str(HELPERS))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    seed = str(torch.randint(1000, (1,)).item())
    command = [sys.executable, "-W", "ignore", "-c", code]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), seed],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    results = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        results.append(json.loads(out.split("RESULT")[1].strip().splitlines()[0]))
    return results


@pytest.mark.more
def test_collectives_that_write_to_weights(ranks):
    for errors, _, _ in ranks:
        errors = {k: v for k, v in errors.items() if k != "fsdp"}
        assert len(errors) == 7 and max(errors.values()) < EXACT, errors


@pytest.mark.more
def test_weights_that_fsdp_gathers_are_refused_with_words(ranks):
    for errors, notes, changes in ranks:
        assert errors["fsdp"] < EXACT
        assert any("FSDP gathers the weight " in note and "w13 anew for each call" in note for note in notes)
        assert any("prepare" in change for change in changes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_has_no_code_is_named(value):
    block = a_list()
    with torch.no_grad():
        block.list[2].w2.weight[3, 4] = value
        with pytest.raises(ValueError, match=r"fp4: the weight list\[2\]\.w2\.weight holds NaN or infinity"):
            torch.compile(block, backend=Recorder())(torch.randn(9, block.H))
        block.list[2].w2.weight[3, 4] = 1.0
    Checked(block).check()


@pytest.mark.parametrize("make", [a_stack, more(a_list)], ids=lambda f: f.__name__)
def test_a_weight_whose_memory_was_freed_is_named(make):
    """To read it would end the process."""
    checked = Checked(make())
    checked.check()
    weights = [p for n, p in checked.module.named_parameters() if "router" not in n and "gate" not in n]
    held = [w.detach().clone() for w in weights]
    for w in weights:
        w.untyped_storage().resize_(0)
    with torch.no_grad(), pytest.raises(ValueError, match=r"the weight .*w\S+ has no memory: .*prepare"):
        checked.compiled(checked.x)
    for w, before in zip(weights, held):
        w.untyped_storage().resize_(before.nbytes)
        w.data.copy_(before * 1.5)
    checked.check()


@pytest.mark.parametrize("make", [a_stack, more(a_list)], ids=lambda f: f.__name__)
def test_another_default_device_is_no_device_of_the_weights(make):
    """`torch.set_default_device`, or a `with torch.device`, is where new tensors go that name no device."""
    checked = Checked(make())
    with torch.no_grad():
        want = checked.module.twin()(checked.x)
        with torch.device("meta"):
            got = checked.compiled(checked.x)
        assert relative_error(got, want) < EXACT


def test_copies_of_a_model_do_not_share(monkeypatch):
    checked = Checked(a_stack())
    checked.check()
    other = copy.deepcopy(checked.module)
    through_data(other)
    packed = count_packing(monkeypatch)
    checked.check()
    assert packed == []


def test_all_experts_in_one_vector():
    """Wherever it lies in memory."""
    module = STYLES["where loop, weights cut from one vector"]()
    checked, size = Checked(module), module.every.numel()
    checked.check()
    module.every.data.mul_(1.5)
    checked.check()
    module.every.data = (torch.randn(size + 5) / 6)[5:]
    checked.check()
