"""The backend on transformers' own models: the five families, both forms of experts, one to many tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.compile_fx
from conftest import more
from moe_models import FAMILIES, Recorder, build, fake_quantised_model, relative_error, that_answers, tokens

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FORMS = ("grouped_mm", "batched_mm")


def first(output):
    """Some families return the router's scores too."""
    return output[0] if isinstance(output, tuple) else output


# Each family in both forms, each form in both dtypes: the dtype alternates from family to family. With the
# first form of each family here, every form has had both.
DTYPES = (torch.bfloat16, torch.float32)
LAYERS = [
    (f, form, DTYPES[(i + j) % 2]) if j == i // 2 % 2 else more(f, form, DTYPES[(i + j) % 2])
    for i, f in enumerate(FAMILIES)
    for j, form in enumerate(FORMS)
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "form", "dtype"), LAYERS)
def test_a_layer_of_every_family_is_one_operator_and_right(family, form, dtype):
    """One compilation for all token counts and one for a single token, as stock has."""
    model = build(family, dtype, form)
    layer = model.model.layers[1].mlp
    twin = fake_quantised_model(model).to(dtype).model.layers[1].mlp
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(layer, backend=recorder, dynamic=True)
    compilations = []
    for count in (7, 12, 9, 1):
        x = torch.randn(1, count, 64, dtype=dtype)
        with torch.no_grad():
            got, want = first(compiled(x)), first(twin(x))
        assert got.dtype == dtype
        assert relative_error(got, want) < (2e-2 if dtype == torch.bfloat16 else 1e-5)  # one token: 1e-2
        compilations.append(recorder.compilations)
    assert compilations == [1, 1, 1, 2]
    assert recorder.ops == ["fp4::moe"] * 2, recorder.reasons
    for site in recorder.sites:
        assert site.activation == ("swigluoai" if family == "gpt_oss" else "silu")
        assert site.weights[0].endswith("gate_up_proj") and site.weights[1].endswith("down_proj")


@pytest.mark.parametrize(("family", "form"), [("mixtral", "grouped_mm"), more("gpt_oss", "batched_mm")])
def test_a_whole_model_compiled_once_for_all_lengths(family, form):
    model = build(family, torch.float32, form)
    twin = fake_quantised_model(model)
    recorder = Recorder(activation="bf16")
    compiled = torch.compile(model, backend=recorder, dynamic=True)
    for batch, length in ((1, 7), (1, 11)):
        ids = tokens(batch, length)
        with torch.inference_mode():
            got = compiled(ids, use_cache=False).logits
            assert relative_error(got, twin(ids, use_cache=False).logits) < 1e-4
    assert recorder.compilations == 1
    assert recorder.ops == ["fp4::moe"] * 2


def test_layers_that_share_code_share_one_compilation():
    """Regional compile: every layer has its own weights, and gets its own packed ones."""
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=3)
    twin = fake_quantised_model(model)
    recorder = Recorder(activation="bf16")
    for layer in model.model.layers:
        layer.mlp.compile(backend=recorder, dynamic=True)
    ids = tokens(1, 6)
    with torch.no_grad():
        got = model(ids, use_cache=False).logits
        assert relative_error(got, twin(ids, use_cache=False).logits) < 1e-4
    assert recorder.compilations == 1
    assert recorder.ops == ["fp4::moe"]


def generate(model, backend, cache: str, **config) -> torch.Tensor:
    compile_config = transformers.CompileConfig(backend=backend, **config)
    compile_config._compile_all_devices = True  # transformers compiles on CUDA only unless told so
    ids = (torch.arange(2 * 5) * 37 % 128).view(2, 5)
    return model.generate(
        ids, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=cache,
        compile_config=compile_config,
    )  # fmt: skip


@pytest.mark.parametrize("family", [more("mixtral"), "gpt_oss"])
def test_generate_with_a_static_cache(family):
    """Decode steps write to the cache in place; sliding-window layers too. transformers compiles these only
    and prefills as ever, so the model starts from values that 4 bits hold exactly."""
    model = fake_quantised_model(that_answers(family))
    recorder = Recorder(activation="bf16")

    def backend(gm, inputs, mode=None):
        assert mode == "reduce-overhead"
        return recorder(gm, inputs)

    got = generate(model, backend, "static")
    assert set(recorder.ops) == {"fp4::moe"} and recorder.compilations <= 2
    want = model.generate(got[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, want)


@pytest.mark.more
def test_generate_with_a_dynamic_cache():
    model = that_answers("mixtral")
    recorder = Recorder(activation="bf16")
    twin = fake_quantised_model(model)
    want = twin.generate(tokens(1, 5), max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.forward = torch.compile(model.forward, backend=recorder)
    got = model.generate(want[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, want)
    assert set(recorder.ops) == {"fp4::moe"}


def test_tied_weights_and_layers_that_share_an_expert_parameter():
    model = build("mixtral", torch.float32, "grouped_mm", tie_word_embeddings=True)
    a, b = (layer.mlp.experts for layer in model.model.layers)
    b.gate_up_proj = a.gate_up_proj
    twin = fake_quantised_model(model)
    recorder = Recorder(activation="bf16")
    ids = tokens(1, 7)
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(ids, use_cache=False).logits
        assert relative_error(got, twin(ids, use_cache=False).logits) < 1e-4
    (graph,) = recorder.graphs
    packed = [n for n in graph.graph.find_nodes(op="placeholder") if "_fp4_" in n.name]
    assert len(packed) == 3 * 3  # three weights, not four


def test_a_model_that_already_calls_the_operators_passes_through():
    """What `prepare` makes: packed buffers and `torch.ops.fp4.moe` in the model itself."""

    class Prepared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("w13", (4, 64, 32)), ("w2", (4, 32, 32))):
                for part, t in zip(
                    ("", "_scale", "_global"), torch.ops.fp4.quantize(torch.randn(shape), "nvfp4")
                ):
                    self.register_buffer(name + part, t)

        def forward(self, x, ids, weights):
            return torch.ops.fp4.moe(
                x, ids, weights, self.w13, self.w13_scale, self.w13_global, self.w2, self.w2_scale,
                self.w2_global, format="nvfp4",
            )  # fmt: skip

    model = Prepared()
    x, ids = torch.randn(5, 32), torch.randint(0, 4, (5, 2))
    weights = torch.rand(5, 2)
    recorder = Recorder()
    with torch.no_grad():
        got = torch.compile(model, backend=recorder)(x, ids, weights)
        assert torch.equal(got, model(x, ids, weights))
    assert recorder.ops == ["fp4::moe"] and "itself" in recorder.sites[0].form


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "activation", "bound"), [more("grouped_mm", "bf16", 1e-2), ("batched_mm", "int8", 3e-2)]
)
def test_through_inductor_itself(form, activation, bound):
    """The registered backend, whole: bf16 model, int8 activations, dynamic lengths, found by name."""
    model = build("mixtral", torch.bfloat16, form, num_hidden_layers=1)
    layer = model.model.layers[0].mlp
    twin = fake_quantised_model(model).bfloat16().model.layers[0].mlp
    compiled = torch.compile(layer, backend="fp4", options={"activation": activation}, dynamic=True)
    for count in (9, 6, 1):
        x = torch.randn(1, count, 64, dtype=torch.bfloat16)
        with torch.inference_mode():
            assert relative_error(compiled(x), twin(x)) < bound


@pytest.mark.more
@pytest.mark.slow
def test_generate_through_inductor_by_name(monkeypatch):
    """transformers' CompileConfig passes mode="reduce-overhead" unless told otherwise."""
    model = fake_quantised_model(that_answers("mixtral", num_hidden_layers=1))
    got = generate(model, "fp4", "static", mode=None, options={"activation": "bf16"})
    want = model.generate(got[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, want)
    plain = copy.deepcopy(model)
    # Nor need Inductor compile that: what it is given for a mode is held in test_compile_runtime.py.
    given = []
    monkeypatch.setattr(
        torch._inductor.compile_fx, "compile_fx", lambda gm, *_, **more: given.append(more) or gm
    )
    assert generate(plain, "fp4", "static").shape == got.shape
    assert given and all(more["config_patches"]["triton.cudagraphs"] for more in given)
