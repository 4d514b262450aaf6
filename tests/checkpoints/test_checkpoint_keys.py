"""Config keys that change the meaning of the weights: an error names each key that is not supported."""

from __future__ import annotations

import copy
import json

import pytest
from checkpoint_folders import HOW, loaded
from checkpoint_samples import STORED, edit_json, tiny, write_folder

from fp4_ops.checkpoints import CheckpointError
from fp4_ops.checkpoints.dialects import dialects_of
from fp4_ops.integrations.transformers import quantizer as hf


@pytest.fixture
def registered():
    with hf.registered():
        yield


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}
    },
    "auto-round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "mx_fp",
        "packing_format": "auto_round:llm_compressor", "extra_config": {"a": {"bits": 16}},
    },
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False, "version": "gemm"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {}}},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def applied(*places):
    steps = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"config_groups": {"R": {"type": "hadamard", "apply": steps}}}


SPIN = {
    "algorithm": "spinquant",
    "r1": True,
    "r2": True,
    "r3": False,
    "r4": False,
    "online_r1_rotation": False,
}
QUARK = {"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False, "online_r1_rotation": None}
REFUSED = {
    "compressed-tensors": [
        *(({"transform_config": applied(p)}, p) for p in ("input", "output", "q_attn", "k_cache", "new")),
        ({"transform_config": applied("weight_input", "input")}, "input"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"moe_sparsity_config": {"layers": [1]}}, "without some of its experts"),
    ],
    "auto-round": [
        ({"rotation_config": {"algorithm": "hadamard", "backend": "transform", "block_size": 32}}, "rotated"),
        ({"rotation_config": "default"}, "rotated"),
        ({"rotation_configs": [SPIN, {**SPIN, "r4": True}]}, "r4"),
        ({"spinquant_config": {**SPIN, "online_r1_rotation": True}}, "online_r1_rotation"),
        ({"super_bits": 6}, "quantised themselves"),
    ],
    "quark": [
        ({"algo_config": [{**QUARK, "r4": True}]}, "r4"),
        ({"algo_config": [{"name": "awq"}, {**QUARK, "online_r1_rotation": True}]}, "online_r1_rotation"),
        ({"algo_config": {**QUARK, "r3": True}}, "r3"),
        ({"algo_config": [{"name": "quarot", "r1": True}]}, "r3"),
        ({"algo_config": [{"name": "svdquant", "svd_rank": 32}]}, "svdquant"),
    ],
    "gptq": [
        ({"rotation": "hadamard"}, "rotated"),
        ({"pack_dtype": "int8"}, "int32"),
        ({"is_marlin_format": True}, "Marlin"),
    ],
    "awq": [({"pack_method": "order"}, "reorder"), ({"rotation_config": {"backend": "auto"}}, "rotated")],
    "modelopt": [({"pre_quant_scale": True}, "scales the inputs"), ({"lora_rank": 32}, "low rank")],
    "fp8": [({"scale_fmt": "e5m3"}, "ue8m0")],
}
ACCEPTED = {
    "compressed-tensors": [
        {"transform_config": {}}, {"transform_config": applied("weight_input", "weight_output")},
        {"sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}, {"provider": "auto-round"},
    ],
    "auto-round": [{"rotation_config": {}}, {"rotation_config": SPIN}, {"iters": 200},
                   {"rotation_config": {"backend": "inplace", "allow_online_rotation": False}}],
    "quark": [{"algo_config": None}, {"algo_config": []}, {"algo_config": [QUARK, {"name": "smooth"}]},
              {"export": {"weight_format": "real_quantized"}}],
    "gptq": [{"rotation": None}, {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}, {"pack_dtype": "int32"}],
    "awq": [{"modules_to_not_convert": ["lm_head"]}, {"backend": "autoawq"}],
    "modelopt": [{"pre_quant_scale": False}, {"producer": {"name": "modelopt"}}, {"kv_cache_scheme": "FP8"}],
    "mxfp4": [{"dequantize": False}],
    "fp8": [{"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}],
}  # fmt: skip


@pytest.mark.parametrize("maker", REFUSED)
def test_what_is_not_computed_is_refused_by_name(maker):
    for change, why in REFUSED[maker]:
        (key,) = change
        with pytest.raises(CheckpointError, match=rf"here has {key} \(.*{why}"):
            dialects_of({**CONFIGS[maker], **change}, "here")


@pytest.mark.parametrize("maker", ACCEPTED)
def test_what_is_in_the_weights_already_is_accepted(maker):
    for change in ({}, *ACCEPTED[maker]):
        assert dialects_of({**CONFIGS[maker], **change}, "here"), change


def places(config, path=()):
    """Every object of a config that a maker's keys are in."""
    yield path
    for key in ("config_groups", "group_0", "weights", "extra_config", "a", "global_quant_config", "weight"):
        if isinstance(config.get(key), dict):
            inner = places(config[key], (*path, key))
            yield from (p for p in inner if p[-1] not in ("config_groups", "extra_config"))


@pytest.mark.parametrize("maker", CONFIGS)
def test_keys_that_nobody_knows_are_refused_anywhere(maker):
    for path in places(CONFIGS[maker]):
        for value in ("mirrored", 3, {"a": 1}, True):
            config = copy.deepcopy(CONFIGS[maker])
            part = config
            for key in path:
                part = part[key]
            part["new_key"] = value
            with pytest.raises(
                CheckpointError, match=r"has new_key.*does not know: it may change.*remove the"
            ):
                dialects_of(config, "here")
        for value in (None, False, [], {}, ""):
            part["new_key"] = value
            dialects_of(config, "here")


@HOW
def test_folders_whose_weights_are_rotated_are_refused(how, registered, tmp_path):
    write_folder(tmp_path, tiny(), "mxfp4-pack-quantized")
    stored = {**STORED["mxfp4-pack-quantized"], "transform_config": applied("input", "weight_input")}
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=stored))
    with pytest.raises(CheckpointError, match=r"transform_config.*rotated.*location 'input'"):
        loaded(tmp_path, how)
    stored["transform_config"] = applied("weight_output")
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=stored))
    loaded(tmp_path, how)


def test_int4_that_is_rotated_does_not_go_to_transformers(registered):
    dispatch = hf.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for maker, change in (("gptq", {"rotation": "hadamard"}), ("compressed-tensors", {"new_key": 1})):
        with pytest.raises(CheckpointError, match=json.dumps(change).split('"')[1]):
            dispatch[maker].from_dict({**CONFIGS[maker], **change})
    assert (
        type(dispatch["fp8"].from_dict({**CONFIGS["fp8"], "new_key": 1})).__name__ == "FineGrainedFP8Config"
    )


@pytest.mark.parametrize("stored", [
    ["a"], "a",
    {**STORED["mxfp4-pack-quantized"], "config_groups": [1]},
    {**STORED["mxfp4-pack-quantized"], "config_groups": {"a": None, "b": 1}},
    {**CONFIGS["gptq"], "group_size": "all"},
    {**CONFIGS["modelopt"], "quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]},
])  # fmt: skip
def test_configs_that_no_tool_writes_are_named(stored, registered, tmp_path):
    write_folder(tmp_path, tiny(), "mxfp4-pack-quantized")
    edit_json(tmp_path / "config.json", lambda c: c.update(quantization_config=stored))
    with pytest.raises(CheckpointError, match=r"quantization_config.*Take the config.json that was written"):
        loaded(tmp_path, "load_checkpoint")
