"""After compilation: packed weights follow their parameters; gradients, options, Inductor's caches."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
import torch._inductor.compile_fx
from conftest import more
from moe_models import Block, Recorder, relative_error
from places import HELPERS

from fp4_ops import backends
from fp4_ops.compile_passes.emit.writer import Writer
from fp4_ops.compile_passes.options import inductor_patches, parse, version_hash
from fp4_ops.compile_passes.weights import packed as packed_weights
from fp4_ops.compile_passes.weights.facts import Facts
from fp4_ops.compile_passes.weights.packed import store
from fp4_ops.compile_passes.weights.specs import PackSpec
from fp4_ops.meta.layouts import byte_view

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EXACT = 1e-5


@pytest.fixture
def compiled_block():
    block, recorder = Block("grouped_mm"), Recorder(activation="bf16")
    compiled = torch.compile(block, backend=recorder)
    x = torch.randn(10, Block.H)
    with torch.no_grad():
        compiled(x)
    return block, compiled, recorder, x


def check(block: Block, compiled, x: torch.Tensor) -> None:
    with torch.no_grad():
        assert relative_error(compiled(x), block.twin()(x)) < EXACT


# --- weights that change ---


def test_in_place_updates_are_noticed(compiled_block):
    block, compiled, recorder, x = compiled_block
    check(block, compiled, x)
    with torch.no_grad():
        block.w13.mul_(-1.5)
    check(block, compiled, x)
    block.load_state_dict(Block("grouped_mm").state_dict())
    check(block, compiled, x)
    assert recorder.compilations == 1


def test_new_data_is_noticed(compiled_block):
    block, compiled, recorder, x = compiled_block
    block.w2.data = torch.randn_like(block.w2)
    check(block, compiled, x)
    assert recorder.compilations == 1


def test_swapped_contents_are_noticed():
    """torch.utils.swap_tensors refuses what has weak references: the cache has none to the tensors."""
    block, other = Block("grouped_mm"), Block("grouped_mm")
    kept = store(PackSpec("nvfp4", "plain", transposed=False))
    before, parameter = kept.get(block.w13), block.w13
    codes = before[0].clone()  # what is packed anew takes its place
    freed = [weakref.ref(t) for t in before]
    torch.utils.swap_tensors(block.w13, other.w13)
    assert block.w13 is parameter
    after, want = kept.get(block.w13), torch.ops.fp4.quantize(block.w13.detach(), "nvfp4")
    assert all(torch.equal(byte_view(a), byte_view(b)) for a, b in zip(after, want, strict=True))
    assert not torch.equal(codes, after[0])
    del before, after, other, parameter
    block.w13 = None
    gc.collect()
    assert len(kept) == 0 and all(ref() is None for ref in freed)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("assign", [False, True])
def test_modules_that_swap_contents(assign):
    """`load_state_dict` and `.to` after a compiled call."""
    block, x = Block("grouped_mm"), torch.randn(10, Block.H)
    compiled = torch.compile(block, backend="fp4", options={"activation": "bf16"})
    check(block, compiled, x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        block.load_state_dict(Block("grouped_mm").state_dict(), assign=assign)
        check(block, compiled, x)
        block.to(torch.float64).to(torch.float32)
        check(block, compiled, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_new_parameter_is_noticed(compiled_block):
    block, compiled, _, x = compiled_block
    block.w13 = torch.nn.Parameter(torch.randn_like(block.w13))
    check(block, compiled, x)


def test_packed_weights_of_a_replaced_parameter_are_freed_at_once(compiled_block):
    """The compiled function is still there, and was not called again."""
    block, compiled, _, x = compiled_block
    kept = next(s for s in packed_weights._stores.values() if (id(block.w13),) in s._entries)
    packed = [weakref.ref(t) for t in kept._entries[id(block.w13),].packed]
    assert all(ref() is not None for ref in packed)
    block.w13 = torch.nn.Parameter(torch.randn_like(block.w13))
    gc.collect()
    assert [ref() for ref in packed] == [None] * len(packed)
    check(block, compiled, x)


def test_weights_are_asked_for_only_when_something_changed(monkeypatch):
    """Not before every step: that took microseconds a weight."""
    asked = []
    entry = packed_weights.PackedWeights.entry
    monkeypatch.setattr(
        packed_weights.PackedWeights,
        "entry",
        lambda self, w, *but: asked.append(w[0]) or entry(self, w, *but),
    )
    block, x = Block("grouped_mm"), torch.randn(10, Block.H)
    compiled = torch.compile(block, backend=Recorder(activation="bf16"))
    check(block, compiled, x)
    asked.clear()
    for _ in range(3):
        check(block, compiled, x)
    assert asked == []
    with torch.no_grad():
        block.w2.mul_(2.0)
    check(block, compiled, x)
    assert {id(w) for w in asked} == {id(block.w13), id(block.w2)}


def test_each_weight_is_packed_once_for_all_graphs(compiled_block, monkeypatch):
    block, compiled, _, x = compiled_block
    packed = []
    original = PackSpec.pack
    monkeypatch.setattr(PackSpec, "pack", lambda spec, w: packed.append(w) or original(spec, w))
    other = torch.compile(block, backend=Recorder(activation="int8"), dynamic=True)
    with torch.inference_mode():
        other(torch.randn(3, Block.H))
        compiled(x)
        compiled(torch.randn(1, Block.H))
    assert packed == []
    with torch.no_grad():
        block.w2.add_(1.0)
        compiled(x)
        other(x)
    assert len(packed) == 1 and packed[0] is block.w2


def test_packed_weights_die_with_their_parameter():
    block = Block("batched_mm")
    with torch.no_grad():
        torch.compile(block, backend=Recorder())(torch.randn(4, Block.H))
    stores = [s for s in packed_weights._stores.values() if (id(block.w13),) in s._entries]
    packed = [
        weakref.ref(t) for s in stores for w in (block.w13, block.w2) for t in s._entries[id(w),].packed
    ]
    assert len(packed) == 3 * 2
    del block
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in packed] == [None] * len(packed)


def test_weights_made_in_inference_mode_work():
    with torch.inference_mode():
        block = Block("grouped_mm")
        x = torch.randn(4, Block.H)
        got = torch.compile(block, backend=Recorder(activation="bf16"))(x)
        assert relative_error(got, block.twin()(x)) < EXACT


def test_packing_in_inference_mode_does_not_taint_later_calls():
    block = Block("grouped_mm")
    x = torch.randn(4, Block.H)
    compiled = torch.compile(block, backend=Recorder(activation="bf16"))
    with torch.inference_mode():
        compiled(x)
    spec = next(spec for spec, s in packed_weights._stores.items() if (id(block.w13),) in s._entries)
    assert not any(t.is_inference() for t in store(spec).get(block.w13))
    check(block, compiled, x)


def test_the_compiled_graph_does_not_need_the_originals(compiled_block):
    _, _, recorder, _ = compiled_block
    (graph,) = recorder.graphs
    shapes = [tuple(n.meta["val"].shape) for n in graph.graph.find_nodes(op="placeholder")]
    assert (Block.E, 2 * Block.I, Block.H) not in shapes and (Block.E, 2 * Block.I, Block.H // 2) in shapes


# --- mutated inputs and aliases ---


def test_a_mutated_input_is_written_to():
    class Accumulate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block("grouped_mm")
            self.register_buffer("seen", torch.zeros(6, Block.H))

        def forward(self, x, cache):
            y = self.block(x)
            cache[2:5].copy_(y[:3])
            self.seen.add_(y)
            return y * 2

    module, recorder = Accumulate(), Recorder(activation="bf16")
    x, cache = torch.randn(6, Block.H), torch.zeros(8, Block.H)
    compiled = torch.compile(module, backend=recorder)
    with torch.no_grad():
        y = compiled(x, cache)
        assert recorder.ops == ["fp4::moe"]
        assert torch.equal(cache[2:5], y[:3] / 2) and not cache[:2].any()
        compiled(x, cache)
    assert torch.equal(module.seen, y)


def test_an_output_that_aliases_a_mutated_input_is_left_to_inductor():
    class Alias(Block):
        def forward(self, x, cache):
            cache.add_(super().forward(x))
            return cache[1:], cache.view(-1)

    module, recorder = Alias("grouped_mm"), Recorder(activation="bf16")
    x, cache = torch.randn(6, Block.H), torch.zeros(6, Block.H)
    with torch.no_grad():
        tail, flat = torch.compile(module, backend=recorder)(x, cache)
    assert "shares memory" in recorder.frames[0].note
    cache.fill_(3.0)
    assert (tail == 3).all() and (flat == 3).all()


# --- gradients ---


def test_gradients_are_the_original_ones(caplog):
    block = Block("grouped_mm")
    x = torch.randn(6, Block.H)
    want = copy.deepcopy(block)
    want(x).square().sum().backward()
    with caplog.at_level(logging.WARNING, "fp4_ops"):
        torch.compile(block, backend="fp4")(x).square().sum().backward()
    for got, expected in zip(block.parameters(), want.parameters()):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-3, atol=1e-4)
    assert "gradients may be asked for" in caplog.text


def test_the_same_module_changes_over_when_gradients_are_off():
    block, recorder = Block("grouped_mm"), Recorder(activation="bf16")
    compiled = torch.compile(block, backend=recorder)
    x = torch.randn(6, Block.H)
    torch.testing.assert_close(compiled(x), block(x))
    check(block, compiled, x)
    assert [bool(f.note) for f in recorder.frames] == [True, False]


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "fp4"}, "format is 'fp4'; it must be one of: nvfp4, mxfp4"),
        ({"activation": "fp16"}, "activation is 'fp16'; it must be one of: auto, bf16, fp8, int8"),
        ({"no_such_thing": 1}, "unknown option 'no_such_thing'"),
    ],
)
def test_wrong_options_are_named(options, message):
    compiled = torch.compile(Block("batched_mm"), backend="fp4", options=options)
    with torch.no_grad(), pytest.raises(Exception, match="fp4: " + message):
        compiled(torch.randn(2, Block.H))


def test_inductors_options_and_modes_reach_it():
    assert parse("reduce-overhead", None).inductor == {"triton.cudagraphs": True}
    chosen = parse("max-autotune-no-cudagraphs", {"epilogue_fusion": False, "format": "mxfp4"})
    assert chosen.inductor["max_autotune"] and chosen.inductor["epilogue_fusion"] is False
    assert (chosen.format, chosen.activation) == ("mxfp4", "auto")
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        parse("fast", None)


@pytest.mark.parametrize("mode", list(torch._inductor.list_mode_options()))
def test_a_mode_is_what_it_is_for_torchs_own_backend(mode, monkeypatch):
    given = {}

    def compile_fx(gm, inputs, *, config_patches=None, **_):
        given[backend] = dict(config_patches or {})
        return gm

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    for backend in ("inductor", "fp4"):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(Block("batched_mm"), backend=backend, mode=mode)(torch.randn(2, Block.H))
    cache_key = given["fp4"].pop("post_grad_custom_pre_pass")
    assert "fp4_ops" in cache_key.uuid()
    assert given["fp4"].pop("size_asserts") is False
    assert given["fp4"] == given["inductor"] == torch._inductor.list_mode_options(mode)


@torch.library.custom_op("fp4_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("options", [None, {"size_asserts": True}])
def test_sizes_are_checked_again_only_for_others_operators_and_if_asked(options, others):
    from torch._inductor.utils import run_and_get_code

    block = Block("batched_mm")
    compiled = torch.compile(lambda x: block(twice(x) if others else x), backend="fp4", options=options)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, torch.randn(2, Block.H))
    assert "torch.ops.fp4.moe" in code
    assert ("assert_size_stride(" in code.split("def call(")[1]) == (others or options is not None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_autotuning_computes_the_same(form):
    """As a mode, and beside options of ours: torch.compile takes either a mode or options."""
    block, x = Block(form), torch.randn(5, Block.H)
    options = {"activation": "bf16", "format": "mxfp4"}
    want = block.twin("mxfp4")(x)
    for added in ({}, torch._inductor.list_mode_options("max-autotune")):
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="fp4", fullgraph=True, options={**options, **added})
        with torch.no_grad():
            assert relative_error(compiled(x), want) < EXACT
    outs = []
    for mode in ("default", "max-autotune"):
        torch._dynamo.reset()
        with torch.no_grad():
            outs.append(torch.compile(block, backend="fp4", fullgraph=True, mode=mode)(x))
    assert relative_error(outs[1], outs[0]) < 0.03  # 0 unless an int8 code is rounded to the next one


def test_int8_is_refused_off_the_cpu():
    assert parse(None, None).a_format("cuda")[0] == "none"
    with pytest.raises(ValueError, match=r"activation='int8' needs the Mma kernels\. This device"):
        parse(None, {"activation": "int8"}).a_format("cuda")


def test_int8_rows_of_a_gpu_are_of_a_block_alone(monkeypatch):
    monkeypatch.setattr(backends, "quantises_int8", lambda device_type, layout: layout == "mma_bf16")
    graph = torch.fx.Graph()
    like = graph.placeholder("w")
    graph.output(like)
    like.meta["val"] = SimpleNamespace(device=torch.device("cuda"))
    writer = Writer(
        torch.fx.GraphModule(torch.nn.Module(), graph), parse(None, {"activation": "int8"}), Facts(set())
    )
    assert writer.activations(like, "mma_bf16", block=True).format == "int8"
    alone = writer.activations(like, "mma_bf16")
    assert alone.format == "none" and "only fp4::moe" in alone.why
    with pytest.raises(ValueError, match="activation='int8' needs"):
        writer.activations(like, "plain", block=True)


# --- Inductor's caches ---

CACHED = """
import json, sys, torch
sys.path.insert(0, {helpers!r})
from moe_styles import STYLES
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
def total(what):
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return aot[f"autograd_cache_{{what}}"] + inductor[f"fxgraph_cache_{{what}}"]
for run in sys.argv[2:]:
    name, experts, format = run.split(":")
    block, x = STYLES[name](experts=int(experts)), torch.randn(5, 32)
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        compiled = torch.compile(block, backend="fp4", options={{"format": format, "activation": "bf16"}})
        got, want = compiled(x), block.twin(format)(x)
    error = ((got - want).norm() / want.norm()).item()
    print("RESULT", json.dumps([total("hit"), total("miss"), error]))
"""


def in_another_process(
    folder: Path, seed: int, *runs: str, fork: bool = False
) -> list[tuple[int, int, float]]:
    """(hits, misses, error) of each style:experts:format, one after the other."""
    code = CACHED.format(helpers=str(HELPERS))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = ["-W", "ignore", "-c", code, str(seed), *runs]
    if fork:
        out = forks.run(command, env)
    else:
        out = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    return [tuple(json.loads(line.split("\n")[0])) for line in out.stdout.split("RESULT")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["gather + bmm:4", more("where loop:3")])
def test_caches_across_processes(block, tmp_path):
    """A second process hits and computes with its own weights, packed by itself; another option misses."""
    (first,) = in_another_process(tmp_path, 1, f"{block}:nvfp4", fork=True)
    again, other = in_another_process(tmp_path, 2, f"{block}:nvfp4", f"{block}:mxfp4")
    for hits, misses, error in (first, other):
        assert (hits, error < EXACT) == (0, True) and misses > 0
    hits, misses, error = again
    assert (misses, error < EXACT) == (0, True) and hits > 0


def test_the_version_is_part_of_the_cache_key():
    (key,) = inductor_patches(parse(None, None)).values()
    assert key.uuid() == next(iter(inductor_patches(parse(None, None)).values())).uuid()
    assert len(key.uuid().split()[1]) == 64

    class Mine(type(key).__base__):
        seen = 0

        def __call__(self, graph):
            Mine.seen += 1

        def uuid(self):
            return "mine"

    mine = inductor_patches(parse(None, {"post_grad_custom_pre_pass": Mine()}))["post_grad_custom_pre_pass"]
    mine(torch.fx.Graph())
    assert Mine.seen == 1 and mine.uuid() == f"{key.uuid()}mine"


@pytest.mark.parametrize("source", ["mixture.py", "formats.py", "_C.so"])
def test_a_changed_source_is_another_cache_key(monkeypatch, source):
    before, read = version_hash(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + b"#" * p.name.startswith(source[:-3]))
    try:
        version_hash.cache_clear()
        assert version_hash() != before
    finally:
        monkeypatch.undo()
        version_hash.cache_clear()
    assert version_hash() == before
