"""Unusual folders: saved twice, incomplete, moved, or written by another program; and full disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil

import pytest
import torch
from checkpoint_folders import HOW, assert_holds, loaded
from checkpoint_samples import edit_json, save_tensors, tiny, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fp4_ops
from fp4_ops.__main__ import main
from fp4_ops.checkpoints import CheckpointError, quantize_checkpoint
from fp4_ops.checkpoints.dense import DenseModel
from fp4_ops.checkpoints.hf import FP4Config
from fp4_ops.integrations.transformers import quantizer as hf
from fp4_ops.tensor import FP4Tensor

INDEX = "model.safetensors.index.json"
CT = "nvfp4-pack-quantized"


@pytest.fixture
def registered():
    with hf.registered():
        yield


def in_shards(path, count=3, below="", metadata=True):
    """Puts the tensors of model.safetensors into shards."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_tensors(path, tensors, shards=count)
    if below:
        (path / below).mkdir()
        for file in path.glob("model-*.safetensors"):
            file.rename(path / below / file.name)
        edit_json(
            path / INDEX,
            lambda c: c.update(weight_map={n: f"{below}/{f}" for n, f in c["weight_map"].items()}),
        )
    if not metadata:
        edit_json(path / INDEX, lambda c: c.pop("metadata", None))


@HOW
def test_the_single_file_counts_where_an_index_is_there_too(how, registered, tmp_path):
    """transformers keeps the index when it saves one file over shards, and reads the single file."""
    values = write_folder(tmp_path, tiny(), CT)
    for names in ({"lm_head.weight": "model-00001-of-00009.safetensors"}, {}):
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        model = loaded(tmp_path, how)
        assert_holds(model, values)
        assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


@HOW
def test_a_save_in_16_bits_beside_shards_in_4_is_never_mixed_with_them(how, registered, tmp_path):
    original = tiny()
    write_folder(tmp_path, original, CT)
    in_shards(tmp_path)
    save_file({n: p.detach().clone() for n, p in original.named_parameters()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none of model.safetensors is.*too\..*remove the one"):
        loaded(tmp_path, how)


def test_quantize_takes_the_single_file(tmp_path):
    tiny().save_pretrained(tmp_path / "a", max_shard_size="50KB")
    assert (tmp_path / "a" / INDEX).exists()
    tiny().save_pretrained(tmp_path / "a")
    quantize_checkpoint(tmp_path / "a", tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / INDEX).exists()
    got = fp4_ops.load_checkpoint(None, tmp_path / "out").lm_head.weight
    assert torch.equal(got, load_file(tmp_path / "a" / "model.safetensors")["lm_head.weight"])


@HOW
@pytest.mark.parametrize("below, metadata", [("shards", True), ("", False)])
def test_shards_in_a_folder_below_and_an_index_without_metadata(how, below, metadata, registered, tmp_path):
    values = write_folder(tmp_path, tiny(), CT)
    in_shards(tmp_path, below=below, metadata=metadata)
    assert_holds(loaded(tmp_path, how), values)


def test_quantize_of_shards_in_a_folder_below(tmp_path):
    tiny().save_pretrained(tmp_path / "a")
    in_shards(tmp_path / "a", below="shards", metadata=False)
    quantize_checkpoint(tmp_path / "a", tmp_path / "out", progress=False)
    tiny().save_pretrained(tmp_path / "b")
    assert len(fp4_ops.load_checkpoint(None, tmp_path / "out").hf_quantizer.report.experts) == 2
    assert sorted(f.parent.name for f in (tmp_path / "out").rglob("*.safetensors")) == ["shards"] * 3


@HOW
def test_the_file_that_the_config_names(how, registered, tmp_path):
    values = write_folder(tmp_path, tiny(), CT)
    (tmp_path / "model.safetensors").rename(tmp_path / "experts.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    edit_json(tmp_path / "config.json", lambda c: c.update(transformers_weights="experts.safetensors"))
    assert_holds(loaded(tmp_path, how), values)


INDEXES = {
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "is not a JSON object"),
    "no map": ('{"metadata": {}}', "has no weight_map; it must be an object that names a file for each"),
    "an empty map": ('{"weight_map": {}}', "has a weight_map that is empty"),
    "a list of names": ('{"weight_map": ["a"]}', "has a weight_map that is a list"),
    "no file": ('{"weight_map": {"lm_head.weight": null}}', "names None for lm_head.weight"),
    "another place": ('{"weight_map": {"a": "../a.safetensors"}}', "leads out of the folder"),
    "a missing shard": ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors.*No such file.*Fetch"),
}


@pytest.mark.parametrize("what", INDEXES)
def test_bad_indexes_are_named(what, tmp_path):
    write_folder(tmp_path, tiny(), CT)
    (tmp_path / "model.safetensors").unlink()
    text, message = INDEXES[what]
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        fp4_ops.load_checkpoint(None, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)


STARTS = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
    "page": (b"<!DOCTYPE html><html>", "is a web page.*Fetch it again"),
    "pickle": (b"PK\x03\x04" + bytes(99), "is a pickle of torch.save"),
    "gguf": (b"GGUF" + bytes(99), "is a GGUF file"),
    "nothing": (b"", "is empty"),
}  # fmt: skip


@pytest.mark.parametrize("what", STARTS)
def test_files_that_are_something_else(what, tmp_path):
    write_folder(tmp_path, tiny(), CT)
    content, message = STARTS[what]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors {message}"):
        fp4_ops.load_checkpoint(None, tmp_path)


@pytest.mark.parametrize("index", [False, True])
def test_a_link_to_nothing(index, tmp_path):
    write_folder(tmp_path, tiny(), CT)
    if index:
        in_shards(tmp_path)
    name = sorted(tmp_path.glob("model*.safetensors"))[0]
    name.unlink()
    name.symlink_to("../blobs/0123")
    with pytest.raises(CheckpointError, match=rf"{name.name} cannot be read: it is a link to ../blobs/0123"):
        fp4_ops.load_checkpoint(None, tmp_path)


FILES = {
    "pickles": ("pytorch_model.bin", r"pytorch_model.bin is not read: torch.save.*save_pretrained"),
    "HQQ": ("qmodel.pt", r"qmodel.pt is not read: HQQ.*fp4_ops quantize"),
    "shards without index": ("model-00001-of-00002.safetensors", "need the index"),
    "a variant's shards without index": ("model.x-00001-of-00002.safetensors", "need the index"),
    "a variant's index": (
        "model.safetensors.index.fp16.json",
        r'variant "fp16".*variant="fp16"\).*rename that file to model.safetensors.index.json',
    ),
    "a variant": ("model.fp16.safetensors", r'variant "fp16".*rename that file to model.safetensors$'),
    "an adapter": ("adapter_model.safetensors", "is an adapter"),
    "another name": ("gptq_model-4bit-128g.safetensors", "Rename a single file to model.safetensors"),
    "below": ("sub/model.safetensors", "its folder sub has one. Give that"),
    "a download": ("model.safetensors.part", "a download, model.safetensors.part, has not finished"),
    "one of the hub's": (".cache/huggingface/download/x.incomplete", "a download has not finished"),
    "nothing": ("README.md", "it holds no weights"),
}


@pytest.mark.parametrize("what", FILES)
def test_folders_without_weights_say_what_is_there(what, tmp_path):
    name, message = FILES[what]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_bytes(b"")
    for call in (
        lambda: fp4_ops.load_checkpoint(None, tmp_path),
        lambda: quantize_checkpoint(tmp_path, tmp_path / "out", progress=False),
    ):
        with pytest.raises(CheckpointError, match=f"has neither model.safetensors nor {INDEX}: .*{message}"):
            call()


@pytest.mark.parametrize("shards", [False, True])
def test_a_variant_is_read_once_its_file_has_the_usual_name(shards, tmp_path):
    tiny().save_pretrained(tmp_path, variant="x", **({"max_shard_size": "60KB"} if shards else {}))
    with pytest.raises(CheckpointError) as error:
        quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)
    named = re.search(r': (\S+) is of variant "x".* rename that file to (\S+)$', str(error.value))
    (tmp_path / named[1]).rename(tmp_path / named[2])
    assert named[2] == (INDEX if shards else "model.safetensors")
    quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)
    fp4_ops.load_checkpoint(None, tmp_path / "out")


FOLDERS = {
    "an adapter": ("adapter_config.json", r"it is an adapter \(PEFT\).*Give the folder of the model"),
    "a pipeline": ("model_index.json", "a pipeline of diffusers"),
    "the hub's cache": ("snapshots/0af3/config.json", "Give its snapshot, .*snapshots/0af3"),
    "below": ("sub/config.json", "its folder sub has one. Give that"),
    "weights alone": ("model.safetensors", "it holds only weights. Fetch the config.json"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_folders_without_a_config_say_what_they_are(what, tmp_path):
    name, message = FOLDERS[what]
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text("{}")
    for call in (
        lambda: fp4_ops.load_checkpoint(None, tmp_path),
        lambda: quantize_checkpoint(tmp_path, tmp_path / "out", progress=False),
    ):
        with pytest.raises(CheckpointError, match=f"has no config.json: .*{message}"):
            call()


CONFIGS = {
    "a comma": (b'{\n"a": 1,\n}', "is not JSON: .*line 3 column 1.*Correct that if you edited it"),
    "a mark": (b'\xef\xbb\xbf{"model_type": "x"}', "is not JSON in UTF-8 without a byte order mark. Save it"),
    "UTF-16": ('{"model_type": "x"}'.encode("utf-16"), "is not JSON in UTF-8"),
    "no type": (b'{"quantization_config": {"quant_method": "mxfp4"}}', "has no model_type"),
    "a tool": (b'{"quantization_config": {"quant_method": "aqlm"}}', "'aqlm'; .* are: modelopt, compressed-"),
    "no method": (
        b'{"quantization_config": {"bits": 4}}',
        "a quantization_config without a quant_method",
    ),
    "gguf": (b'{"quantization_config": {"quant_method": "gguf"}}', "load_checkpoint the .gguf file itself"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_odd_configs_are_named(what, tmp_path):
    text, message = CONFIGS[what]
    write_folder(tmp_path, tiny("gpt_oss"), "gpt-oss-mxfp4")
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        fp4_ops.load_checkpoint(None, tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_scales_of_another_dtype_say_what_to_do(dtype, tmp_path):
    write_folder(tmp_path, tiny(), CT)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, t in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = t.view(torch.uint8) if dtype == torch.uint8 else t.float()
    save_tensors(tmp_path, tensors)
    with pytest.raises(
        CheckpointError, match=rf"is {dtype}; it must be float8_e4m3fn, as config.json says {CT}. Take the"
    ):
        fp4_ops.load_checkpoint(None, tmp_path)


@HOW
def test_an_index_with_absolute_paths(how, registered, tmp_path):
    """The absolute paths are correct until the folder is moved."""
    path = tmp_path / "first"
    values = write_folder(path, tiny(), CT)
    in_shards(path)
    edit_json(
        path / INDEX, lambda c: c.update(weight_map={n: str(path / f) for n, f in c["weight_map"].items()})
    )
    assert_holds(loaded(path, how), values)
    path.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"first/model-0.*absolute path.*write the files' names alone"):
        fp4_ops.load_checkpoint(None, tmp_path / "moved")


def renamed(path, change):
    tensors = load_file(path / "model.safetensors")
    save_tensors(path, {change(name): t for name, t in tensors.items()})


def fp8_attention_that_nobody_mentions(path):
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_tensors(path, tensors | {name + "_scale": torch.ones(1)})


PLACES = {
    "fewer layers": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(num_hidden_layers=1)),
        r"no place in the model: model.layers has only 1 modules. config.json describes another model",
    ),
    "wrapper": (
        lambda p: renamed(p, "module.{}".format),
        r"its name begins with 'module', and .*not a wrapper",
    ),
    "fp8 attention": (
        fp8_attention_that_nobody_mentions,
        r"q_proj.weight_scale .*q_proj.weight is torch.float8_e4m3fn, and the config does not say",
    ),
}


@pytest.mark.parametrize("what", PLACES)
def test_weights_without_a_place_say_why(what, tmp_path):
    change, words = PLACES[what]
    write_folder(tmp_path, tiny(), CT)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_quantize_names_the_prefix_of_a_wrapper(tmp_path):
    tiny().save_pretrained(tmp_path)
    renamed(tmp_path, "module.{}".format)
    with pytest.raises(
        CheckpointError, match=r"begins with 'module'.*or rename the tensors. Nothing was written"
    ):
        quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)


@HOW
def test_experts_that_the_files_lack_are_an_error(how, registered, tmp_path):
    """from_pretrained would leave these weights random and only report them."""
    write_folder(tmp_path, tiny(), CT)
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path, {n: t for n, t in tensors.items() if ".layers.1.mlp.experts." not in n})
    with pytest.raises(
        CheckpointError, match=r"no values for model.layers.1.mlp.experts.gate_up_proj and 1 more"
    ):
        loaded(tmp_path, how)


def test_a_config_with_more_layers_than_the_files(registered, tmp_path):
    write_folder(tmp_path, tiny(), CT)
    edit_json(tmp_path / "config.json", lambda c: c.update(num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"but no such layer. config.json describes another model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("how", ["load_checkpoint", "from_pretrained", "FP4Config"])
@pytest.mark.parametrize("dialect", [CT, "modelopt-nvfp4"])
def test_codes_without_a_quantization_config(dialect, how, registered, tmp_path):
    """transformers alone lists them as UNEXPECTED, and leaves the experts random."""
    write_folder(tmp_path, tiny(), dialect)
    edit_json(tmp_path / "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(
        CheckpointError, match=r"weight.* codes .*but config.json has no.*that was written with"
    ):
        if how == "FP4Config":
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4Config())
        else:
            loaded(tmp_path, how)


def test_ordinary_folders_with_further_tensors_are_left_to_transformers(registered, tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.extra.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.extra.weight"}


@pytest.mark.parametrize("how", ["load_checkpoint", "from_pretrained"])
def test_a_given_config_with_fewer_layers(how, registered, tmp_path):
    """As with 16-bit folders: the other layers are left out."""
    values = write_folder(tmp_path, tiny(), CT, linears=("model.layers.1.self_attn.q_proj",))
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.layer_types = 1, None
    if how == "load_checkpoint":
        model = fp4_ops.load_checkpoint(config, tmp_path)
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    assert_holds(model, {n: v for n, v in values.items() if ".layers.0." in n})
    report = str(model.hf_quantizer.report)
    assert "model.layers.1.mlp.experts" in report and "config has fewer layers than the folder" in report


def test_a_folder_whose_own_config_has_fewer_layers(tmp_path):
    write_folder(tmp_path, tiny(), CT)
    edit_json(tmp_path / "config.json", lambda c: c.update(num_hidden_layers=1, layer_types=None))
    with pytest.raises(CheckpointError, match=r"layers has only 1 modules. config.json describes another"):
        fp4_ops.load_checkpoint(None, tmp_path)


def test_quantize_blames_the_folder_for_a_weight_of_another_shape(tmp_path):
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[name] = torch.zeros(0, tensors[name].shape[1], dtype=torch.bfloat16)
    save_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj.*config.json describes another model") as error:
        quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)
    assert "is a qwen3_moe" not in str(error.value) and not (tmp_path / "out").exists()


def test_gguf_files_are_not_quantised(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for given in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(CheckpointError, match=r"m.gguf is .*GGUF.*fp4_ops.load_checkpoint reads it"):
            quantize_checkpoint(given, tmp_path / "out", progress=False)


def test_names_that_are_no_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"org/model is not a folder.*hf download NAME"):
        fp4_ops.load_checkpoint(None, "org/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config.json is a file. Give the folder"):
        fp4_ops.load_checkpoint(None, tmp_path / "config.json")


MAKERS = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, "bitsandbytes"),
    "exl2": ({"quant_method": "exl2", "bits": 4.0}, None, "ExLlama's EXL2"),
    "exl3": ({"quant_method": "exl3", "bits": 4.0}, None, "ExLlama's EXL3"),
    "hqq": ({"quant_method": "hqq", "quant_config": {}}, None, "HQQ"),
    "mlx": ({"group_size": 64, "bits": 4}, None, "MLX"),
    "mlx, one key": (None, None, "MLX"),
    "bitsandbytes' tensors": (None, "lm_head.weight.quant_state.bitsandbytes__nf4", "bitsandbytes: it has"),
    "EXL3's tensors": (None, "lm_head.trellis", "EXL3: it has lm_head.trellis"),
    "codes without a config": (None, "lm_head.weight_packed", "uint8: codes.*no quantization_config"),
    "ordinary": (None, "lm_head.weight", "is not quantised"),
}  # fmt: skip


@pytest.mark.parametrize("what", MAKERS)
def test_other_makers_folders_are_named(what, tmp_path):
    stored, name, message = MAKERS[what]
    config = {"model_type": "qwen3_moe"}
    if stored:
        config["quantization_config"] = stored
    if what.startswith("mlx"):
        config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dtype = torch.bfloat16 if what == "ordinary" else torch.uint8
    save_tensors(tmp_path, {name or "lm_head.weight": torch.zeros(4, 4, dtype=dtype)})
    with pytest.raises(
        CheckpointError, match=re.escape(message) if "*" not in message else message
    ) as raised:
        fp4_ops.load_checkpoint(None, tmp_path)
    assert ("is not quantised" in str(raised.value)) == (what == "ordinary")
    if what != "ordinary":
        with pytest.raises(CheckpointError, match=re.escape(message) if "*" not in message else message):
            quantize_checkpoint(tmp_path, tmp_path / "out", progress=False)


@HOW
@pytest.mark.parametrize("dtype", ["U32", "F8_E4M3FNUZ", "F4"])
def test_tensors_of_odd_dtypes_that_nobody_reads(dtype, how, registered, tmp_path):
    values = write_folder(tmp_path, tiny(), CT)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["model.layers.0.input_scale"] = {"dtype": dtype, "shape": [8], "data_offsets": [end, end]}
    nbytes = {"U32": 32, "F8_E4M3FNUZ": 8, "F4": 4}[dtype]
    header["model.layers.0.input_scale"]["data_offsets"][1] += nbytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(nbytes))
    assert_holds(loaded(tmp_path, how), values)


@HOW
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_4_bits_is_not_tied(tied, how, registered, tmp_path):
    original = tiny()
    values = write_folder(tmp_path, original, CT, linears=("lm_head",))
    edit_json(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=tied))
    model = loaded(tmp_path, how)
    assert_holds(model, values)
    assert isinstance(model.lm_head.weight, FP4Tensor)
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight)
    assert not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "again")
    assert isinstance(fp4_ops.load_checkpoint(None, tmp_path / "again").lm_head.weight, FP4Tensor)


@pytest.fixture
def little_space():
    """Imitates a disk that is full after a number of bytes of a file: one write is incomplete, and the next
    one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))

    yield limit
    limit(None)


@pytest.mark.parametrize("nbytes", [8192, 20_000])
def test_a_full_disk_is_one_line_and_the_run_continues(nbytes, little_space, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    tiny().save_pretrained(source, max_shard_size="50KB")
    quantize_checkpoint(source, tmp_path / "want", progress=False)
    little_space(nbytes)
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", str(source), "-o", str(out)])
    little_space(None)
    text = str(stopped.value)
    assert os.strerror(errno.EFBIG) in text and "out" in text and text.count("\n") == 0
    done = json.loads((out / ".fp4_quantize.json").read_text())["done"]
    assert sorted(done) == sorted(f.name for f in out.glob("*.safetensors"))
    assert not list(out.glob("*.partial"))
    main(["quantize", str(source), "-o", str(out)])
    for file in (tmp_path / "want").iterdir():
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name


@pytest.mark.parametrize("full", ["json", "copy", "spool"])
def test_a_full_disk_names_the_file_and_the_call_continues(full, little_space, tmp_path, capsys):
    """Whatever is written: the progress, files beside the weights, layers that were calibrated."""
    source, out = tmp_path / "source", tmp_path / "out"
    tiny().save_pretrained(source)
    (source / "tokenizer.json").write_bytes(os.urandom(3_000_000))  # more than any file of the result
    text = torch.randint(32, (2, 16)) if full == "spool" else None
    how = dict(method="gptq" if full == "spool" else "rtn", calibration=text, progress=False)
    most, file = {
        "json": (20, r"\.fp4_quantize\.json"),
        "copy": (1_000_000, r"source/tokenizer\.json.*out/tokenizer\.json"),
        "spool": (2000, r"layer-00000\.safetensors"),
    }[full]
    little_space(most)
    with pytest.raises(OSError, match=rf"{os.strerror(errno.EFBIG)}.*{file}") as stopped:
        quantize_checkpoint(source, out, **how)
    assert "the same command or call continues" in stopped.value.__notes__[0]
    if full == "copy":
        with pytest.raises(SystemExit, match=rf"^fp4: \S*{file}: .*continues with the first file"):
            main(["quantize", str(source), "-o", str(out)])
    little_space(None)
    quantize_checkpoint(source, out, **how)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    fp4_ops.load_checkpoint(None, out)


@pytest.mark.parametrize("most, file", [(20, "again"), (20_000, "again/model.safetensors")])
def test_save_pretrained_on_a_full_disk_names_the_file(most, file, little_space, tmp_path):
    model = tiny()
    fp4_ops.prepare(model)
    little_space(most)
    with pytest.raises(
        OSError, match=rf"^\[Errno \d+\] fp4: \S*{file} could not be written: .*again"
    ) as stopped:
        model.save_pretrained(tmp_path / "again")
    assert stopped.value.errno == errno.EFBIG
    little_space(None)
    model.save_pretrained(tmp_path / "again")
    fp4_ops.load_checkpoint(None, tmp_path / "again")


@pytest.mark.parametrize("lacking", ["lm_head.weight", "model.layers.0.input_layernorm.weight"])
def test_calibration_needs_all_weights_before_it_runs(lacking, tmp_path, monkeypatch):
    """The config's class is another package's, so only calibration says which model will run."""
    source, out = tmp_path / "source", tmp_path / "out"
    tiny().save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    del tensors[lacking]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["TheirMoeForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(DenseModel, "__init__", None)  # what builds the model
    words = rf"has no values for {lacking}, .* calibration runs the model\..*'search'"
    with pytest.raises(CheckpointError, match=words):
        quantize_checkpoint(
            source, out, method="gptq", calibration=torch.randint(32, (2, 16)), progress=False
        )
    assert not out.exists()
    with pytest.warns(UserWarning, match=f"has no values for {lacking}"):
        quantize_checkpoint(source, out, method="search", progress=False)


def test_a_file_of_the_result_that_is_gone_is_made_again(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    tiny().save_pretrained(source, max_shard_size="50KB")
    finish = fp4_ops.checkpoints.convert._finish

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(fp4_ops.checkpoints.convert, "_finish", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, out, progress=False)
    files = sorted(out.glob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    monkeypatch.setattr(fp4_ops.checkpoints.convert, "_finish", finish)
    report = quantize_checkpoint(source, out, progress=False)
    assert report.resumed == len(files) - 2
    shutil.rmtree(source)
    fp4_ops.load_checkpoint(None, out)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    tiny().save_pretrained(tmp_path / "source")
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"file.*[Nn]ot a directory"):
        main(["quantize", str(tmp_path / "source"), "-o", str(tmp_path / "file" / "out")])


ARGUMENTS = {
    "activation": ({"activation": "bf16"}, CT, lambda m: experts(m)._fp4_recipe.a_format == "none"),
    "trainable_inputs": ({"trainable_inputs": True}, CT, lambda m: m.hf_quantizer.is_trainable),
    "requantize": ({"requantize": "mxfp4"}, "int4", lambda m: experts(m).down_proj.format == "mxfp4"),
}  # fmt: skip


def experts(model):
    return model.model.layers[0].mlp.experts


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_from_pretrained_takes_the_arguments_of_load_checkpoint(name, known, tmp_path):
    options, dialect, holds = ARGUMENTS[name]
    if dialect == "int4":
        tiny().save_pretrained(tmp_path / "source")
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", "int4_g32", progress=False)
    else:
        (tmp_path / "out").mkdir()
        write_folder(tmp_path / "out", tiny(), dialect)
    with hf.registered() if known else contextlib.nullcontext():
        model = type(tiny()).from_pretrained(tmp_path / "out", quantization_config=hf.FP4Config(**options))
    want = fp4_ops.load_checkpoint(None, tmp_path / "out", **options)
    assert holds(model) and holds(want)
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)
    model.to(torch.float16)
    with torch.no_grad():
        assert model(input_ids=ids).logits.dtype == torch.float16


def test_a_folder_that_transformers_does_not_know_is_not_quantised_again(tmp_path):
    write_folder(tmp_path, tiny(), "modelopt-nvfp4")
    with pytest.raises(CheckpointError, match=r"is quantised already.*register_with_transformers"):
        type(tiny()).from_pretrained(tmp_path, quantization_config=hf.FP4Config())


@HOW
@pytest.mark.parametrize("stored", ["modelopt without a method", "compression_config"])
def test_configs_in_their_older_places(stored, how, registered, tmp_path):
    values = write_folder(tmp_path, tiny(), "modelopt-nvfp4" if stored[0] == "m" else CT)
    if stored == "compression_config":
        edit_json(
            tmp_path / "config.json", lambda c: c.update(compression_config=c.pop("quantization_config"))
        )
    else:
        edit_json(tmp_path / "config.json", lambda c: c["quantization_config"].pop("quant_method"))
    assert_holds(loaded(tmp_path, how), values)
