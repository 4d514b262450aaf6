"""`prepare` with attention, dense layers and the output head in 4 bits or in fp8."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter

import pytest
import torch
from moe_models import build, relative_error, that_answers, tokens
from safetensors.torch import load_file
from torch import nn
from torch._inductor.utils import run_and_get_code

import fp4_ops
from fp4_ops.checkpoints import load, quantize_checkpoint
from fp4_ops.integrations.transformers import quantizer
from fp4_ops.integrations.transformers.reference import load_reference
from fp4_ops.models.fp8_linear import CODES, FP8Linear
from fp4_ops.models.memory_plan import plan_memory
from fp4_ops.models.outside_experts import KINDS, kind_of
from fp4_ops.tensor import FP4Tensor

NAMES = {
    "model.layers.0.self_attn.q_proj.weight": "attention",
    "model.layers.3.linear_attn.in_proj_qkvz.weight": "attention",
    "model.layers.0.mlp.shared_expert.gate_proj.weight": "dense",
    "model.layers.0.mlp.down_proj.weight": "dense",
    "backbone.layers.1.mixer.in_proj.weight": "dense",
    "lm_head.weight": "head",
    "model.layers.0.mlp.gate.weight": None,
    "model.layers.0.mlp.shared_expert_gate.weight": None,
    "model.layers.0.block_sparse_moe.router.weight": None,
    "model.embed_tokens.weight": None,
}


def test_kinds_by_name():
    assert {name: kind_of(name) for name in NAMES} == NAMES


def in_4_bits(model: nn.Module) -> dict[str, str]:
    found = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: weight.format for name, weight in found.items() if isinstance(weight, FP4Tensor)}


def linears(model: nn.Module) -> list[str]:
    return [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]


def test_a_kind_that_the_model_has_not():
    with pytest.raises(ValueError, match="dense is 'mxfp4', and the model has no such linear layer"):
        fp4_ops.prepare(build("qwen3_moe", torch.float32, "grouped_mm"), dense="mxfp4")


@pytest.mark.parametrize("kinds", [("attention",), ("dense",), ("head",), KINDS])
def test_each_kind_by_its_own_word(kinds):
    """The chosen layers compute with the values of their codes, and no other layer changes."""
    model, ids = build("deepseek_v3", torch.float32, "grouped_mm"), tokens(2, 7)
    names = [n for n in linears(model) if kind_of(n) in kinds]
    twin = copy.deepcopy(model)
    report = fp4_ops.prepare(model, "nvfp4", activation="bf16", **dict.fromkeys(kinds, "mxfp4"))
    fp4_ops.prepare(twin, "nvfp4", activation="bf16")
    for name in names:
        linear = twin.get_submodule(name.removesuffix(".weight"))
        linear.weight = nn.Parameter(fp4_ops.quantize(linear.weight.detach(), "mxfp4").dequantize())
    assert in_4_bits(model) == dict.fromkeys(names, "mxfp4")
    assert [w.kind for w in report.outside] == list(kinds)
    assert all(f"{w.kind}: {w.layers} linear layers, mxfp4" in str(report) for w in report.outside)
    with torch.no_grad():
        got = model(input_ids=ids, use_cache=False).logits
        assert relative_error(got, twin(input_ids=ids, use_cache=False).logits) < 1e-4


def test_a_tied_head_leaves_the_embeddings_alone(tmp_path):
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm", tie_word_embeddings=True), tokens(2, 7)
    embeddings = model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    fp4_ops.prepare(model, "nvfp4", head="nvfp4", attention="nvfp4")
    assert model.get_input_embeddings().weight is embeddings and torch.equal(embeddings, before)
    assert isinstance(model.lm_head.weight, FP4Tensor) and not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    loaded = fp4_ops.load_checkpoint(None, tmp_path)
    assert in_4_bits(loaded) == in_4_bits(model)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        got = loaded(input_ids=ids, use_cache=False).logits
    assert relative_error(got, want) < 1e-5  # a file holds reciprocals of global scales


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(attention="int8"), "attention is 'int8'; it must be one of: keep, nvfp4, .*, fp8$"),
        (dict(format="fp8"), "format is 'fp8'; it must be one of: nvfp4"),
        (dict(head="nvfp4", trainable_inputs=True), "trainable_inputs=True, and head is 'nvfp4'"),
        (dict(head="fp8", trainable_inputs=True), "trainable_inputs=True, and head is 'fp8'"),
        (dict(head="fp8", batch_invariant=True), "batch_invariant=True, and head is 'fp8'"),
        (dict(attention="int4"), "q_proj.weight holds NaN or infinity, which have no 4-bit code"),
        (dict(attention="fp8", head="int4"), "q_proj.weight holds NaN or infinity, which have no fp8 code"),
        (dict(dense="fp8"), "dense is 'fp8', and the model has no such linear layer"),
    ],
)
def test_what_cannot_be_done_leaves_the_model_unchanged(arguments, words):
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    if "attention" in arguments:
        model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=words):
        fp4_ops.prepare(model, **arguments)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


# --- fp8 ---


def in_fp8(model: nn.Module) -> dict[str, FP8Linear]:
    return {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, FP8Linear)}


def with_its_values(model: nn.Module) -> nn.Module:
    """Returns a copy with an nn.Linear of the same values for each layer in fp8."""
    twin = copy.deepcopy(model)
    for name, module in in_fp8(twin).items():
        plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        plain.weight = nn.Parameter(module.dequantize(), requires_grad=False)
        plain.bias = module.bias
        twin.set_submodule(name.removesuffix(".weight"), plain)
    return twin


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("kinds", [("attention",), ("head",), KINDS])
def test_each_kind_in_fp8(kinds, family):
    """The chosen layers compute with the values of their codes, and no other layer changes."""
    model, ids = build(family, torch.float32, "grouped_mm"), tokens(2, 7)
    kinds = [kind for kind in kinds if kind in map(kind_of, linears(model))]
    names = [n for n in linears(model) if kind_of(n) in kinds]
    modules, before = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    nbytes = Counter(
        {k: sum(before[n].nbytes for n in names if kind_of(n) == k) for k in kinds}
    )  # fmt: skip
    report = fp4_ops.prepare(model, "nvfp4", activation="bf16", **dict.fromkeys(kinds, "fp8"))
    assert list(in_fp8(model)) == names
    assert all(modules[n] is m for n, m in model.named_modules() if n in modules)
    for weights in report.outside:
        rows = sum(m.out_features for n, m in in_fp8(model).items() if kind_of(n) == weights.kind)
        assert weights.bytes_before == nbytes[weights.kind]
        assert weights.bytes_after == nbytes[weights.kind] // 4 + 4 * rows
        assert f"{weights.kind}: {weights.layers} linear layers, fp8, " in str(report)
    for name, module in in_fp8(model).items():
        error = (module.dequantize() - before[name]).abs()
        assert (error <= before[name].abs() / 16 + module.weight_scale[:, None] / 512).all()
    assert relative_error(logits(model, ids), logits(with_its_values(model), ids)) < 1e-5
    for cast in (nn.Module.bfloat16, nn.Module.float):
        cast(model)
        assert all(m.weight.dtype == CODES for m in in_fp8(model).values())
    assert logits(model, ids).isfinite().all()


def test_fp8_and_4_bits_beside_each_other():
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm"), tokens(2, 7)
    fp4_ops.prepare(model, "nvfp4", attention="fp8", head="nvfp4")
    assert in_4_bits(model) == {"lm_head.weight": "nvfp4"} and len(in_fp8(model)) == 8
    assert relative_error(logits(model, ids), logits(with_its_values(model), ids)) < 1e-5


def test_a_tied_head_in_fp8_leaves_the_embeddings_alone():
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm", tie_word_embeddings=True), tokens(2, 7)
    embeddings = model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    fp4_ops.prepare(model, "nvfp4", head="fp8")
    assert model.get_input_embeddings().weight is embeddings and torch.equal(embeddings, before)
    assert list(in_fp8(model)) == ["lm_head.weight"] and not model.config.tie_word_embeddings
    model.tie_weights()
    assert model.lm_head.weight.dtype == CODES and model.get_input_embeddings().weight is embeddings
    assert relative_error(logits(model, ids), logits(with_its_values(model), ids)) < 1e-5


def test_layers_that_share_a_weight_share_its_codes():
    model = build("qwen3_moe", torch.float32, "grouped_mm")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    report = fp4_ops.prepare(model, "nvfp4", attention="fp8")
    assert second.q_proj.weight is first.q_proj.weight and second.k_proj.weight is not first.k_proj.weight
    assert second.q_proj.weight_scale is first.q_proj.weight_scale
    unique = {id(m.weight): m for m in in_fp8(model).values()}.values()
    assert report.outside[0].bytes_after == sum(m.weight.nbytes + m.weight_scale.nbytes for m in unique)


def test_an_odd_number_of_inputs():
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    model.model.layers[0].self_attn.extra = nn.Linear(7, 3)
    with pytest.raises(ValueError, match="has an odd number of inputs, 7; leave attention out, or use 'fp8'"):
        fp4_ops.prepare(model, "nvfp4", attention="nvfp4")
    fp4_ops.prepare(model, "nvfp4", attention="fp8")
    assert model.model.layers[0].self_attn.extra(torch.randn(2, 7)).shape == (2, 3)


def same_codes(a: nn.Module, b: nn.Module) -> None:
    """Asserts that two models have the same layers in fp8, with the same codes and scales."""
    first, second = in_fp8(a), in_fp8(b)
    assert first.keys() == second.keys() and first
    for name, module in first.items():
        assert torch.equal(module.weight.view(torch.uint8), second[name].weight.view(torch.uint8)), name
        assert torch.equal(module.weight_scale, second[name].weight_scale), name


@pytest.mark.parametrize(
    "family, head", [("qwen3_moe", "fp8"), ("deepseek_v3", "nvfp4"), ("gpt_oss", "keep")]
)
def test_a_folder_keeps_the_codes(family, head, tmp_path, monkeypatch):
    model, ids = build(family, torch.bfloat16, "grouped_mm"), tokens(2, 7)
    fp4_ops.prepare(model, "mxfp4", attention="fp8", head=head)
    want = logits(model, ids)
    model.save_pretrained(tmp_path / "first")
    loaded = fp4_ops.load_checkpoint(None, tmp_path / "first")
    same_codes(loaded, model)
    assert in_4_bits(loaded) == in_4_bits(model)
    report = loaded.hf_quantizer.report
    assert set(report.fp8) == set(in_fp8(model)) and not report.dense and "fp8, as stored" in str(report)
    assert relative_error(logits(loaded, ids), want) < 1e-2
    reference, _ = load_reference(tmp_path / "first", "cpu", torch.bfloat16)
    for name, module in in_fp8(model).items():
        assert type(reference.get_submodule(name.removesuffix(".weight"))) is nn.Linear
        assert torch.equal(reference.get_parameter(name), module.dequantize(torch.bfloat16))
    loaded.save_pretrained(tmp_path / "again")
    same_codes(fp4_ops.load_checkpoint(None, tmp_path / "again"), model)
    for options in ({"trainable_inputs": True}, {"batch_invariant": True}, {}):
        monkeypatch.setattr(load, "has_kernel", lambda device, there=bool(options): there)
        ordinary = fp4_ops.load_checkpoint(None, tmp_path / "first", **options)
        assert not in_fp8(ordinary) and set(ordinary.hf_quantizer.report.dense) == set(in_fp8(model))
        for name, module in in_fp8(model).items():
            assert torch.equal(ordinary.get_parameter(name), module.dequantize(torch.bfloat16))


def test_compressed_tensors_reads_the_folder(tmp_path):
    """The fields of config.json are those of its scheme, and its reader gives the values of the codes."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy, QuantizationType

    model = build("qwen3_moe", torch.bfloat16, "grouped_mm")
    fp4_ops.prepare(model, "nvfp4", attention="fp8", head="fp8")
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stored)
    assert config.format == "mixed-precision" and not set(config.ignore) & set(in_fp8(model))
    scheme = next(s for s in config.config_groups.values() if s.format == "float-quantized")
    assert [f"{name}.weight" for name in scheme.targets] == list(in_fp8(model))
    weights = scheme.weights
    assert (weights.num_bits, weights.type) == (8, QuantizationType.FLOAT)
    # vLLM takes CompressedTensorsW8A16Fp8 for these, and wants weight_scale in float32 [N, 1].
    assert weights.strategy == QuantizationStrategy.CHANNEL and weights.symmetric and not weights.dynamic
    assert scheme.input_activations is None
    tensors = load_file(tmp_path / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    for name, module in in_fp8(model).items():
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == name[:-7]}
        assert own.keys() == {"weight", "weight_scale"} and own["weight"].dtype == CODES
        assert own["weight_scale"].dtype == torch.float32
        assert own["weight_scale"].shape == (module.out_features, 1)
        theirs = compressor.decompress(dict(own), scheme)["weight"].float()
        torch.testing.assert_close(theirs, module.dequantize(), rtol=2**-7, atol=0)


def test_what_does_not_take_fp8_says_what_does(tmp_path):
    ids = tokens(1, 4)
    model = build("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"call fp4_ops.prepare\(model, head='fp8'\) before torch.compile"):
        fp4_ops.explain(model, ids, options={"head": "fp8"})
    prepared = copy.deepcopy(model)
    fp4_ops.prepare(prepared, "nvfp4", head="fp8")
    told = str(fp4_ops.explain(prepared, ids))
    assert re.search(r"fp4::\w*linear\w*  from the model, which calls it itself\n +kernel cpu \w+", told)
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"call fp4_ops.prepare\(model, dense='fp8'\) or give"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", dense="fp8")
    assert not (tmp_path / "out").exists()


def test_from_pretrained_with_fp8(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm"), tokens(2, 7)
    model.save_pretrained(tmp_path)
    config = quantizer.FP4Config("nvfp4", attention="fp8", head="fp8")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    fp4_ops.prepare(model, "nvfp4", attention="fp8", head="fp8")
    assert list(in_fp8(loaded)) == list(in_fp8(model)) and len(in_fp8(model)) == 9
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    with pytest.raises(ValueError, match="batch_invariant=True, and dense is 'fp8'"):
        quantizer.FP4Config("nvfp4", dense="fp8", batch_invariant=True)


def calls(code: list[str], name: str) -> list[str]:
    """Returns the lines of Inductor's code that call an operator."""
    return [line for line in "\n".join(code).splitlines() if f"torch.ops.fp4.{name}.default(" in line]


def test_a_compiled_step(fresh_dynamo):
    """The norm joins q, k and v, the residual joins o, and the head its norm."""
    model, ids = build("qwen3_moe", torch.bfloat16, "grouped_mm"), tokens(1, 1)
    fp4_ops.prepare(model, "nvfp4", activation="bf16", attention="fp8", head="fp8")
    want = logits(model, ids)
    with torch.no_grad():
        compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, backend="fp4")
        got, code = run_and_get_code(compiled, ids)
    assert relative_error(got, want) < 2e-2
    made = calls(code, "linears")
    # Operands: x, weights, biases, the norm's weight, eps, residual, ...
    three = [line for line in made if "[None, None, None], arg" in line]
    alone = [line for line in made if "[None], None, 0.0, " in line]
    with_norm = [line for line in made if "[None], arg" in line]
    assert (len(three), len(alone), len(with_norm)) == (2, 2, 1) and len(made) == 5
    assert all("[None], None, 0.0, None" not in line for line in alone)  # each adds the residual
    assert not calls(code, "fp8_linear")


def test_steps_are_compiled_once(fresh_dynamo):
    """The eager model and generate's compiled steps choose the same tokens."""
    transformers = pytest.importorskip("transformers")
    model, ids = that_answers("qwen3_moe"), tokens(2, 5)
    fp4_ops.prepare(model, "nvfp4", activation="bf16", attention="fp8", head="fp8")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    want = model.generate(ids, **options, disable_compile=True)
    frames = Counter()

    def backend(graph, inputs, mode=None):
        frames["compiled"] += 1
        frames["products"] += sum("fp4.fp8_linear" in str(node.target) for node in graph.graph.nodes)
        return graph

    config = transformers.CompileConfig(backend=backend)  # asks for it, so a step on a CPU is compiled
    loop = {"compile_config": config, "custom_generate": fp4_ops.decoding_loop}
    got = model.generate(ids, **options, **loop)
    assert torch.equal(got, want) and frames["compiled"] == 1 and frames["products"] == 9


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_accelerate_offloads_the_layers(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, ids = build("qwen3_moe", torch.float32, "grouped_mm"), tokens(2, 5)
    fp4_ops.prepare(model, "nvfp4", attention="fp8", head="fp8")
    want, cpu = logits(model, ids), torch.device("cpu")
    if way == "cpu_offload":
        model = accelerate.cpu_offload(model, cpu, offload_buffers=True)
    else:
        model = accelerate.disk_offload(model, str(tmp_path), cpu, offload_buffers=True)
    for _ in range(2):
        assert torch.equal(logits(model, ids), want)
        assert all(m.weight.is_meta and m.weight_scale.is_meta for m in in_fp8(model).values())


def test_a_memory_plan_counts_codes_and_keeps_the_size_of_activations():
    # The projection of the queries is the largest weight outside the experts.
    model = build("qwen3_moe", torch.bfloat16, "grouped_mm", num_attention_heads=16)
    plain = copy.deepcopy(model)
    fp4_ops.prepare(plain, "nvfp4")
    report = fp4_ops.prepare(model, "nvfp4", attention="fp8", head="fp8")
    before, after = (plan_memory(m, "2GiB") for m in (plain, model))
    saved = sum(w.bytes_before - w.bytes_after for w in report.outside)
    assert before.dense_bytes - after.dense_bytes == saved > 0
    assert after.activations == before.activations and after.cache_token_bytes == before.cache_token_bytes
