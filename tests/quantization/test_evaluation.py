"""Emulated activations, the evaluation table, the error report and their commands."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import threading

import checkpoint_samples
import huggingface_hub
import moe_models
import pytest
import reference as ref
import torch

import fp4_ops
from fp4_ops import accuracy
from fp4_ops.__main__ import main
from fp4_ops.meta.formats import FORMATS
from fp4_ops.quantization import calibrate, quantize_weight
from fp4_ops.quantization.activations import ACTIVATION_MODES
from fp4_ops.quantization.evaluation import Emulated, evaluate
from fp4_ops.quantization.experts import MATRICES, experts_modules
from fp4_ops.quantization.report import error_report, weight_errors

F64 = torch.float64


@pytest.fixture
def model():
    return moe_models.build("qwen3_moe", torch.float32, "eager")


def test_activations_are_what_the_operators_make(device):
    x = torch.randn(37, 72, device=device) * torch.exp(torch.randn(37, 1, device=device))
    x[3] = 0
    assert torch.equal(ACTIVATION_MODES["bf16"].round(x), x)
    for name, want in (
        ("int8", ref.dequantize_int8(*ref.quantize_int8(x))),
        ("fp8", ref.dequantize_fp8(*ref.quantize_fp8(x))),
        *((f, ref.dequantize(*ref.quantize(x[:, None], f), f)[:, 0]) for f in ref.FP4_FORMATS),
    ):
        assert torch.allclose(ACTIVATION_MODES[name].round(x).to(F64), want, rtol=1e-6, atol=0), name
        assert not torch.equal(want, x.to(F64))


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_emulated_experts_are_the_operator(model, mode):
    experts = experts_modules(model)[0]
    # Scales that fp8 products take exactly: the CPU's do not round weights.
    packed = {m: quantize_weight(experts.weight(m), "nvfp4", "fp8_exact") for m in MATRICES}
    x, ids = torch.randn(29, 64), torch.stack([torch.randperm(8)[:3] for _ in range(29)])
    weights = torch.rand(29, 3)
    got = Emulated(experts, "nvfp4", packed, ACTIVATION_MODES[mode]).forward(x, ids, weights)
    a_format = "none" if mode == "bf16" else mode
    want = torch.ops.fp4.moe(
        x, ids, weights, *packed["gate_up"], *packed["down"], format="nvfp4", activation="silu",
        a_format=a_format,
    )  # fmt: skip
    dense = (ref.dequantize(*packed[m], "nvfp4") for m in MATRICES)
    between = ref.moe_between_codes(x, ids, weights, *dense, a_format=a_format)
    # A rounding of h that falls the other way moves one value by a step.
    assert (got - want).norm() < (1e-5 if mode == "bf16" else 2e-3) * want.norm() + between


def perplexity(model, tokens) -> float:
    return math.exp(
        torch.stack([model(input_ids=t[None], labels=t[None]).loss for t in tokens]).mean().item()
    )


@torch.no_grad()
def test_rows_are_those_of_prepared_models():
    # Every expert for every token: an int8 rounding that falls the other way turns no router's choice.
    model = moe_models.build("qwen3_moe", torch.float32, "eager", num_experts_per_tok=8)
    assert model.config.num_experts == 8
    tokens, text = moe_models.tokens(5, 24), moe_models.tokens(4, 24)
    calibration = calibrate(model, text)
    before = {name: p.clone() for name, p in model.named_parameters()}
    table = evaluate(
        model, tokens, methods=["rtn", "fp8_exact", "gptq"], activations=["bf16", "int8"],
        calibration=calibration, batch=2,
    )  # fmt: skip
    assert table.tokens == 5 * 23
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    first, second, *rows = table.rows
    want = model(input_ids=tokens).logits
    assert first.perplexity == pytest.approx(perplexity(model, tokens), rel=1e-5)
    assert (first.ratio, first.kl, first.agreement) == (1, 0, 1)
    assert second.ratio == pytest.approx(1, abs=1e-5) and second.kl < 1e-6
    configurations = [("nvfp4", "rtn"), ("nvfp4", "fp8_exact"), ("nvfp4", "gptq")]
    configurations += [(f, m) for f in ("mxfp4", *ref.INT4_FORMATS) for m in ("rtn", "gptq")]
    assert [(r.format, r.method, r.activations) for r in rows] == [
        (f, m, a) for f, m in configurations for a in ("W4A16", "W4A8 int8")
    ]
    for r in rows:
        prepared = copy.deepcopy(model)
        activation = {"W4A16": "bf16", "W4A8 int8": "int8"}[r.activations]
        fp4_ops.prepare(prepared, r.format, activation, method=r.method, calibration=calibration)
        got = prepared(input_ids=tokens).logits
        assert r.perplexity == pytest.approx(perplexity(prepared, tokens), rel=1e-4)
        assert r.ratio == pytest.approx(r.perplexity / first.perplexity, rel=1e-6)
        p, q = (x[:, :-1].to(F64).log_softmax(-1) for x in (want, got))
        kl = (p.exp() * (p - q)).sum(-1)
        assert r.kl == pytest.approx(kl.mean().item(), rel=0.02)
        agreement = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        assert r.agreement == pytest.approx(agreement, abs=1.5 / kl.numel())
        nll = [
            torch.nn.functional.cross_entropy(x[:, :-1].mT, tokens[:, 1:], reduction="none").mean(-1)
            for x in (want, got)
        ]
        error = (nll[1] - nll[0]).std().item() / 5**0.5
        assert r.ratio_error == pytest.approx(error, rel=0.05)


@torch.no_grad()
def test_one_window_has_no_standard_error(model):
    arguments = {"formats": ["nvfp4"], "methods": ["rtn"], "activations": ["bf16"]}
    table = evaluate(model, moe_models.tokens(1, 12), **arguments)
    assert [r.ratio_error for r in table.rows] == [None] * 3 and "nan" not in str(table)
    json.loads(table.to_json(), parse_constant=pytest.fail)
    with pytest.raises(ValueError, match=r"tokens is \[3, 1\]; it must be \[windows, length\]"):
        evaluate(model, moe_models.tokens(3, 1), **arguments)


@torch.no_grad()
def test_logits_need_not_be_kept(model, monkeypatch):
    tokens = moe_models.tokens(4, 12)
    arguments = {"formats": ["nvfp4"], "methods": ["rtn"], "activations": ["nvfp4"], "batch": 2}
    kept = evaluate(model, tokens, **arguments)
    monkeypatch.setattr("fp4_ops.quantization.evaluation.CACHED_LOGITS", 0)
    again = evaluate(model, tokens, **arguments)
    for a, b in zip(kept.rows, again.rows, strict=True):
        assert (a.activations, a.perplexity, a.kl) == (b.activations, b.perplexity, b.kl)
    assert kept.rows[2].kl > 0


@torch.no_grad()
def test_fp8_products_round_weights_unless_their_scales_are_exact(model, monkeypatch):
    """With activations left alone, only the rounding of the weights remains."""
    exact = ACTIVATION_MODES["bf16"].round
    mode = ACTIVATION_MODES["fp8"]
    monkeypatch.setitem(ACTIVATION_MODES, "fp8", type(mode)(mode.name, mode.label, exact, mode.weight_bits))
    table = evaluate(
        model, moe_models.tokens(3, 16), formats=["nvfp4"], methods=["search", "fp8_exact"],
        activations=["bf16", "fp8"],
    )  # fmt: skip
    search, search_fp8, exact_, exact_fp8 = table.rows[2:]
    assert search.kl != search_fp8.kl
    assert (exact_.perplexity, exact_.kl) == (exact_fp8.perplexity, exact_fp8.kl)


def test_unknown_names_are_refused(model):
    tokens = moe_models.tokens(2, 8)
    for message, arguments in (
        ("activations is 'int9'; it must be one of: bf16", {"activations": ["int9"]}),
        ("format is 'fp4'", {"formats": ["fp4"]}),
        ("method is 'best'", {"methods": ["best"]}),
    ):
        with pytest.raises(ValueError) as error:
            evaluate(model, tokens, **arguments)
        assert message in str(error.value)


@pytest.mark.parametrize("format", ref.FORMATS)
def test_weight_errors(format, device):
    w = torch.randn(3, 20, 56, device=device) * torch.exp(torch.randn(3, 20, 1, device=device))
    w[1] *= 1e-25
    q = quantize_weight(w, format)
    sqnr, saturated = weight_errors(w, *q, format)
    error = w.to(F64) - ref.dequantize(*q, format)
    want = 10 * (w.to(F64).square().sum((1, 2)) / error.square().sum((1, 2))).log10()
    packed, scale, factor = q
    # Saturated: the largest of a block is nearer to the 8 that e2m1 lacks than to its 6; int4 has no 8.
    step = ref.scale_values(scale) * (factor.to(F64)[:, None, None] if format == "nvfp4" else 1)
    largest = ref.blocks(w.to(F64), FORMATS[format].block).abs().amax(-1)
    assert torch.allclose(
        saturated.to(F64), (largest > (8 if format in ref.INT4_FORMATS else 7) * step).to(F64).mean((1, 2))
    )
    if format == "nvfp4":
        assert (saturated == 0).all()  # e4m3 scales are off by a sixteenth at most
    assert torch.allclose(sqnr.to(F64), want, atol=1e-3)
    if format == "nvfp4":  # halved scales clip what was above 3.5
        _, clipped = weight_errors(w, packed, scale, factor / 2, format)
        assert (clipped > 0.9).all()
    # Weights that are just what the codes stand for lose nothing.
    one = torch.ones(1, device=device) if format == "nvfp4" else None
    exact = ref.dequantize(packed[:1], scale[:1], one, format).float()
    assert weight_errors(exact, packed[:1], scale[:1], one, format)[0].isinf()


@torch.no_grad()
def test_report_names_the_bad_expert(model, tmp_path):
    bad = experts_modules(model)[1]
    weight = bad.weight("down")
    weight[5] = weight[5].sign() * 2.5  # half-way between two codes,
    weight[5, :, ::16] = 6.0  # since each block has a 6
    report = error_report(model, "nvfp4", "rtn")
    assert len(report.errors) == 2 * 2 * 8
    worst = report.worst(1)[0]
    assert (worst.module, worst.matrix, worst.expert) == (bad.name, "down", 5)
    assert f"{bad.name} down           5" in str(report).split("worst experts:")[1].splitlines()[1]
    loaded = json.loads(report.to_json())
    assert loaded["format"] == "nvfp4" and loaded["errors"][0]["sqnr"] == report.errors[0].sqnr
    for m in experts_modules(model):
        for matrix in MATRICES:
            q = quantize_weight(m.weight(matrix), "nvfp4")
            sqnr, _ = weight_errors(m.weight(matrix), *q, "nvfp4")
            mine = [e.sqnr for e in report.errors if (e.module, e.matrix) == (m.name, matrix)]
            assert mine == sqnr.tolist()


@pytest.mark.parametrize("dialect", ["nvfp4-pack-quantized", "modelopt-nvfp4", "mxfp4-pack-quantized"])
def test_commands_on_folders_in_4_bits(dialect, tmp_path, capsys):
    """Their own values, global scales and all: what load_checkpoint computes."""
    model = moe_models.build("qwen3_moe", torch.bfloat16, "grouped_mm", vocab_size=256, num_hidden_layers=2)
    model.config.moe_intermediate_size = 96
    model = type(model)(model.config).to(torch.bfloat16)
    values = checkpoint_samples.write_folder(
        tmp_path / "model", model, dialect, factors=lambda half, expert: 2.0**-11, linears=("lm_head",)
    )
    text = tmp_path / "text"
    text.write_bytes(bytes(torch.randint(0, 256, (200,)).tolist()))
    common = [str(tmp_path / "model"), "--length", "32", "--device", "cpu"]
    table = tmp_path / "table.json"
    main(["eval", *common, "--text", str(text), "--methods", "rtn", "--activations", "bf16",
          "--formats", "nvfp4", "--json", str(table)])  # fmt: skip
    assert "is in 4 bits already" in capsys.readouterr().out
    rows = {(r["format"], r["method"]): r for r in json.loads(table.read_text())["rows"]}

    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)
    windows = torch.tensor(list(text.read_bytes())[: 6 * 32]).view(6, 32)
    with torch.no_grad():
        logits = model(windows).logits[:, :-1].float()
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    own = "mxfp4" if dialect.startswith("mxfp4") else "nvfp4"
    assert math.log(rows["bfloat16", "-"]["perplexity"]) == pytest.approx(want, rel=2e-2)
    assert math.log(rows[own, "stored"]["perplexity"]) == pytest.approx(want, rel=2e-2)
    assert rows[own, "stored"]["kl"] < 0.2

    main(["report", *common, "--json", str(tmp_path / "r.json"), "--format", "mxfp4"])
    errors = [e["sqnr"] for e in json.loads((tmp_path / "r.json").read_text())["errors"]]
    assert len(errors) == 32 and (own == "mxfp4" or all(10 < e < 30 for e in errors))


@torch.no_grad()
def test_picture(model, tmp_path):
    pytest.importorskip("matplotlib")
    experts_modules(model)[0].weight("down")[0] = 0  # nothing is lost: infinite
    report = error_report(model, "mxfp4", "search")
    assert json.loads(report.to_json())["errors"][8]["sqnr"] is None
    report.save_picture(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_commands(tmp_path, capsys):
    model = moe_models.build("qwen3_moe", torch.bfloat16, "grouped_mm", vocab_size=256)
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text"
    text.write_bytes(bytes(torch.randint(0, 256, (400,)).tolist()))
    common = [str(tmp_path / "model"), "--length", "32", "--device", "cpu"]
    calibration = ["--calibration", str(text), "--calibration-windows", "4"]

    table = tmp_path / "table.json"
    main(
        ["eval", *common, "--text", str(text), "--windows", "3", "--methods", "rtn", "weighted",
         "--activations", "bf16", "fp8", "nvfp4", "--json", str(table), *calibration]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert re.search(r"^calibration: the model reads \d+ windows of \d+ tokens\n3 windows", out, re.MULTILINE)
    rows = json.loads(table.read_text())["rows"]
    assert len(rows) == 2 + 2 * 3 + (1 + 3) * 2 * 2  # W4A4 nvfp4 only of its own weights
    assert out.count("W4A8 fp8") == 5 * 2 and out.count("weighted") == 3 + 4 * 2 and "W4A4 nvfp4" in out
    assert json.loads(table.read_text())["tokens"] == 3 * 31

    main(["eval", *common, "--text", str(text), "--methods", "rtn", "gptq", "--activations", "bf16"])
    out = capsys.readouterr().out
    assert "no --calibration text, so these methods are left out: gptq" in out
    assert out.count("rtn") == len(FORMATS)

    main(["report", *common, "--method", "gptq", "--json", str(tmp_path / "r.json"), *calibration])
    assert "worst experts:" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "r.json").read_text())["errors"]) == 32

    with pytest.raises(SystemExit, match="has 400 tokens; one window is 512"):
        main(["eval", str(tmp_path / "model"), "--text", str(text)])


@pytest.mark.parametrize("named", [True, False], ids=["named", "of a shell"])
def test_text_from_a_pipe_is_read_whole(named, tmp_path, capsys):
    moe_models.build("qwen3_moe", torch.bfloat16, "grouped_mm", vocab_size=256).save_pretrained(tmp_path)
    content = bytes(torch.randint(0, 256, (4 * 32,)).tolist())
    reading, writing = (-1, -1) if named else os.pipe()
    text = tmp_path / "pipe" if named else f"/dev/fd/{reading}"
    if named:
        os.mkfifo(text)

    def write() -> None:
        with open(text if named else writing, "wb") as pipe:
            pipe.write(content)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    command = ["eval", str(tmp_path), "--length", "32", "--device", "cpu", "--methods", "rtn"]
    main([*command, "--activations", "bf16", "--formats", "nvfp4", "--text", str(text)])
    writer.join(60)
    assert not writer.is_alive() and "4 windows of 32 tokens" in capsys.readouterr().out
    if not named:
        os.close(reading)


@pytest.mark.parametrize(
    "command, option, value",
    [
        ("quantize a -o b", "--batch", "-3"),
        ("quantize a -o b", "--calibration-windows", "0"),
        ("eval a --text b", "--windows", "0"),
        ("eval a --text b", "--length", "half"),
        ("report a", "--batch", "0"),
        ("selftest", "--seed", "-1"),
        ("selftest", "--seed", str(2**64)),
    ],
)
def test_commands_refuse_numbers_out_of_range(command, option, value, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), option, value])
    assert f"argument {option}: '{value}' must be a whole number" in capsys.readouterr().err


def test_commands_say_in_a_line_what_is_not_there(tmp_path, monkeypatch):
    given = str(tmp_path / "none")
    for name in (given, "./none", "a/b/none"):
        with pytest.raises(SystemExit, match=r"none is not a folder here, and it cannot be a name of the"):
            main(["report", name, "--device", "cpu"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    session, calls = type(huggingface_hub.get_session()), []
    send = session.send
    monkeypatch.setattr(session, "send", lambda *a, **kw: calls.append(a) or send(*a, **kw))
    for command in (["report", "nobody/none"], ["eval", "none", "--text", __file__]):
        with pytest.raises(
            SystemExit, match=r"none is not a folder here, .* cannot be reached \(http.*local"
        ):
            main([*command, "--device", "cpu"])
    assert len(calls) == 2  # one for each command
    monkeypatch.chdir(tmp_path)
    for name, words in (("m.gguf", "is a GGUF file"), ("m.safetensors", "is a file. Give the folder")):
        (tmp_path / name).touch()
        for path in (name, f"./{name}", str(tmp_path / name)):
            with pytest.raises(SystemExit, match=f"{name} {words}"):
                main(["report", path, "--device", "cpu"])
    assert len(calls) == 2
    with pytest.raises(SystemExit, match="device is 'nowhere', which is not there"):
        main(["eval", given, "--text", given, "--device", "nowhere"])
    with pytest.raises(SystemExit, match="device is 'nowhere', which is not there"):
        main(["quantize", given, "-o", given, "--device", "nowhere"])
    text = ["--text", str(tmp_path / "no.txt")]
    for command in (["eval", given, *text], ["report", given, "--calibration", text[1]]):
        with pytest.raises(SystemExit, match=r"no\.txt cannot be read: No such file"):  # before the model
            main([*command, "--device", "cpu"])
    monkeypatch.setattr(accuracy, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"errors.png needs matplotlib: pip install matplotlib"):
        main(["report", given, "--device", "cpu", "--picture", "errors.png"])
