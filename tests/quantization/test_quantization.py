"""Quantisation methods against brute force and textbook recursions in float64."""

from __future__ import annotations

import copy

import pytest
import reference as ref
import torch

import fp4_ops
from fp4_ops.experts.find import find_experts
from fp4_ops.meta.formats import FORMATS
from fp4_ops.quantization import METHODS, calibrate, find_method, quantize_weight
from fp4_ops.quantization.experts import MATRICES, Arithmetic, computing, experts_modules
from fp4_ops.quantization.grid import dequantize_weight

F64 = torch.float64
EXACT_MANTISSAS = (0, 2, 4)
DAMPING = 0.05  # of the mean of H's diagonal, added to it


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Weights whose rows differ in size and whose blocks now and then hold an outlier."""
    w = torch.randn(shape) * torch.exp(torch.randn(*shape[:-1], 1)) * 0.02
    return (w * torch.where(torch.rand(shape) < 0.02, 5.0, 1.0)).to(dtype).to(device)


def moments(*lead: int, k: int) -> torch.Tensor:
    """E[x x^T] of inputs with strong correlations and a wide range of sizes."""
    x = torch.randn(*lead, 4 * k, k) @ (torch.randn(*lead, k, k) * torch.logspace(0, -1.5, k))
    return x.mT @ x / (4 * k)


def dequantized(q: tuple, format: str) -> torch.Tensor:
    return ref.dequantize(q[0], q[1], q[2], format)


def block_errors(w: torch.Tensor, values: torch.Tensor, format: str, weights=None) -> torch.Tensor:
    error = (w.to(F64) - values).square()
    if weights is not None:
        error = error * weights.to(F64)[..., None, :]
    return ref.blocks(error, ref.BLOCK[format]).sum(-1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", [(3, 17, 58), (2, 2, 5, 34), (9, 16), (1, 1, 2), (4, 0, 32)])
@pytest.mark.parametrize("format", ref.FORMATS)
def test_rtn_is_the_operator_bit_for_bit(format, shape, dtype, device):
    w = draw(*shape, dtype=dtype, device=device)
    w[..., :1, :16] = 0
    packed, scale, factor = quantize_weight(w, format)
    want = torch.ops.fp4.quantize(w, format)
    assert torch.equal(packed, want[0])
    assert torch.equal(scale.view(torch.uint8), want[1].view(torch.uint8))
    assert (factor is None and want[2].numel() == 0) if format != "nvfp4" else torch.equal(factor, want[2])


@pytest.mark.parametrize("format", ref.FORMATS)
def test_dequantize_is_exact(format, device):
    w = ref.random_weight(format, 2, 7, 58, device=device)
    got = dequantize_weight(*w.operands(), FORMATS[format])
    assert torch.equal(got, w.dense.float())
    if format in ref.INT4_FORMATS:
        return
    # Four significant bits are what e4m3 holds; these scales stay within its range.
    low, high = (0x28, 0x48) if format == "nvfp4" else (122, 130)
    scale = w.scale.view(torch.uint8).clamp(low, high).view(w.scale.dtype)
    rounded = dequantize_weight(w.packed, scale, None, FORMATS[format], significant_bits=4)
    exact = ref.dequantize(w.packed, scale, torch.ones(2, device=device), format).float()
    assert torch.equal(rounded, exact.to(torch.float8_e4m3fn).float())
    assert torch.equal(rounded, exact) == (format == "mxfp4")


def every_scale(w: torch.Tensor, global_scale, format: str, allowed=None, weights=None) -> torch.Tensor:
    """The least error of each block over all scales that exist, [..., N, blocks]."""
    best = torch.full(ref.blocks(w, ref.BLOCK[format]).shape[:-1], torch.inf, dtype=F64)
    top = {"nvfp4": 127, "mxfp4": 255}[format]
    for code in range(top):
        if allowed is not None and code & 7 not in allowed:
            continue
        scale = torch.full(best.shape, code, dtype=torch.uint8).view(ref.SCALE_DTYPE[format])
        step = ref.scale_values(scale)
        if format == "nvfp4":
            step = step * global_scale.to(F64)[..., None, None]
        step = step.repeat_interleave(ref.BLOCK[format], -1)[..., : w.shape[-1]]
        codes = ref.nearest_e2m1(torch.where(step == 0, 0, w.to(F64) / step))
        error = block_errors(w, ref.E2M1[codes.long()] * step, format, weights)
        best = torch.minimum(best, error)
    return best


@pytest.mark.parametrize(
    "method, format",
    [
        ("search", "nvfp4"),
        ("search", "mxfp4"),
        ("fp8_exact", "nvfp4"),
        ("weighted", "nvfp4"),
        ("weighted", "mxfp4"),
    ],
)
def test_search_finds_the_best_of_all_scales(method, format):
    w = draw(2, 11, 90)
    weights = moments(2, k=90).diagonal(dim1=-2, dim2=-1) if method == "weighted" else None
    q = quantize_weight(w, format, method, calibration=weights)
    allowed = EXACT_MANTISSAS if method == "fp8_exact" else None
    if weights is not None:
        weights = weights + DAMPING * weights.mean(-1, keepdim=True)
    best = every_scale(w, q[2], format, allowed, weights)
    got = block_errors(w, dequantized(q, format), format, weights)
    # A few blocks want a scale out of reach: where one column carries nearly all the weight, for example.
    misses = got > best * (1 + 1e-5)
    assert misses.float().mean() <= 0.02, (got / best).max()
    assert got.sum() <= best.sum() * 1.03  # one such block was seen to make up 1.7 %


def damped(moments: torch.Tensor) -> torch.Tensor:
    """Return the weights of squared errors of "weighted", [..., K], from moments [..., K, K]."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    return diagonal + DAMPING * diagonal.mean(-1, keepdim=True)


# Float32 sums of 128 squares are within 8e-6 of the truth; a scale that is chosen by them, within twice that.
SUMS = 5e-5


@pytest.mark.parametrize("method", ("search", "weighted"))
@pytest.mark.parametrize("format", ref.INT4_FORMATS)
def test_int4_search_takes_the_best_of_its_scales(format, method):
    """Block by block: every fourth bfloat16 from half an octave below amax / 7.5 to an eighth above it."""
    w, h, block = draw(2, 11, 290), moments(2, k=290), ref.BLOCK[format]
    weights = damped(h) if method == "weighted" else None
    nearest = ref.quantize(w, format)[1]
    best = torch.full(nearest.shape, torch.inf, dtype=F64)
    for offset in range(-64, 17, 4):
        scale = (nearest.view(torch.int16) + offset).view(torch.bfloat16)
        step = ref.scale_values(scale).repeat_interleave(block, -1)[..., :290]
        values = (w.to(F64) / step).round().clamp(-8, 7) * step
        best = torch.minimum(best, block_errors(w, values, format, weights))
    q = quantize_weight(w, format, method, calibration=h)
    got = block_errors(w, dequantized(q, format), format, weights)
    assert torch.allclose(got, best, rtol=SUMS, atol=0)
    assert (q[1] != nearest).any()


@pytest.mark.parametrize("size", (1e-30, 1.0, 1e30))
@pytest.mark.parametrize("method", ("search", "weighted"))
@pytest.mark.parametrize("format", ("mxfp4", *ref.INT4_FORMATS))
def test_search_never_has_more_error_than_rtn(format, method, size, device):
    """Block by block; only nvfp4's global scale keeps rtn's scale from being among the candidates."""
    w, h = draw(3, 24, 290) * size, moments(3, k=290)
    w[0, :, :140] = 0
    weights = damped(h) if method == "weighted" else None
    rtn, searched = (
        block_errors(
            w, dequantized(quantize_weight(w.to(device), format, m, calibration=h.to(device)), format).cpu(),
            format, weights,
        )
        for m in ("rtn", method)
    )  # fmt: skip
    assert (searched <= rtn * (1 + SUMS)).all()
    assert searched.sum() < rtn.sum()
    assert (searched[0, :, 0] == 0).all()


def test_four_over_six_takes_the_better_of_two():
    w = draw(2, 33, 70)
    _, scale, factor = q = quantize_weight(w, "nvfp4", "four_over_six")
    amax = ref.blocks(w, 16).abs().amax(-1)
    errors = []
    for target in (6, 4):
        code = ref.round_e4m3(amax / target / factor[:, None, None])
        step = (ref.scale_values(code) * factor.to(F64)[:, None, None]).repeat_interleave(16, -1)[..., :70]
        errors.append(block_errors(w, ref.E2M1[ref.nearest_e2m1(w / step).long()] * step, "nvfp4"))
    assert len({*scale.view(torch.uint8).flatten().tolist()}) > 8
    got = block_errors(w, dequantized(q, "nvfp4"), "nvfp4")
    assert torch.allclose(got, torch.minimum(*errors), rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ("fp8_exact", "gptq_fp8_exact"))
def test_fp8_exact_weights_are_e4m3_numbers(method):
    w = draw(3, 20, 64)
    packed, scale, _ = quantize_weight(w, "nvfp4", method, calibration=moments(3, k=64))
    assert {*(scale.view(torch.uint8) & 7).flatten().tolist()} <= {*EXACT_MANTISSAS}
    values = ref.dequantize(packed, scale, torch.ones(3), "nvfp4").float() / 8  # 6 x 448 is past e4m3's range
    normal = values.abs() >= 2**-6
    assert normal.float().mean() > 0.5
    assert torch.equal(values.to(torch.float8_e4m3fn).float()[normal], values[normal])
    ordinary = ref.dequantize(*quantize_weight(w, "nvfp4")[:2], torch.ones(3), "nvfp4").float() / 8
    assert not torch.equal(ordinary.to(torch.float8_e4m3fn).float(), ordinary)


def nearest_value(x: torch.Tensor, format: str) -> torch.Tensor:
    """Return the value of the nearest code, float64."""
    if format in ref.INT4_FORMATS:
        return x.round().clamp(-8, 7)
    return ref.E2M1[ref.nearest_e2m1(x).long()]


def textbook_gptq(w: torch.Tensor, h: torch.Tensor, step: torch.Tensor, format: str) -> torch.Tensor:
    """Optimal brain quantisation in column order, float64: w [N, K], h [K, K], step [N, K] -> values."""
    w, k = w.to(F64).clone(), w.shape[1]
    h = h.to(F64) + DAMPING * h.diagonal().mean() * torch.eye(k, dtype=F64)
    inverse = torch.linalg.inv(h)
    out = torch.empty_like(w)
    for j in range(k):
        out[:, j] = nearest_value(w[:, j] / step[:, j], format) * step[:, j]
        lost = (w[:, j] - out[:, j]) / inverse[j, j]
        w = w - lost[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return out


@pytest.mark.parametrize("format", ref.FORMATS)
def test_gptq_is_the_textbook_recursion(format):
    k = 150 if format in ref.INT4_FORMATS else 58  # several blocks, the last one short
    w, h = draw(2, 12, k), moments(2, k=k)
    q = quantize_weight(w, format, "gptq", calibration=h)
    got = dequantized(q, format)
    for e in range(2):
        step = ref.scale_values(q[1][e]) * (q[2][e].to(F64) if format == "nvfp4" else 1)
        want = textbook_gptq(w[e], h[e], step.repeat_interleave(ref.BLOCK[format], -1)[:, :k], format)
        # A tie that float32 breaks otherwise changes the rest of its row.
        same = torch.isclose(got[e], want, rtol=1e-5).all(-1)
        assert same.float().mean() >= 0.75, same


@pytest.mark.parametrize("format", ref.FP4_FORMATS)
def test_each_method_is_best_at_what_it_minimises(format):
    w, h = draw(4, 64, 128), moments(4, k=128)
    errors = {
        m: w.to(F64) - dequantized(quantize_weight(w, format, m, calibration=h), format)
        for m in METHODS
        if format in METHODS[m].formats
    }

    def measured(hessian: torch.Tensor) -> dict[str, float]:
        return {m: (e @ hessian.to(F64) * e).sum().item() for m, e in errors.items()}

    plain = measured(torch.eye(128))
    by_column = measured(torch.diag_embed(h.diagonal(dim1=-2, dim2=-1)))
    output = measured(h)
    assert min(plain, key=plain.get) == "search"
    assert min((m for m in errors if not METHODS[m].compensate), key=by_column.get) == "weighted"
    assert output["gptq"] < 0.7 * min(v for m, v in output.items() if not METHODS[m].compensate)
    if format == "nvfp4":
        assert plain["four_over_six"] < plain["rtn"]
        assert output["gptq"] < output["gptq_fp8_exact"] < output["fp8_exact"]


@pytest.mark.parametrize("format", ref.INT4_FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_int4_methods_on_correlated_inputs(format, seed):
    """Fixed data: bounds with margin."""
    torch.manual_seed(seed)
    w, h = draw(2, 32, 256), moments(2, k=256)
    output, by_column = {}, {}
    for method in ("rtn", "search", "weighted", "gptq"):
        e = w.to(F64) - dequantized(quantize_weight(w, format, method, calibration=h), format)
        output[method] = (e @ h.to(F64) * e).sum().item()
        by_column[method] = (e.square() * h.to(F64).diagonal(dim1=1, dim2=2)[:, None]).sum().item()
    assert output["gptq"] < 0.5 * min(output[m] for m in ("rtn", "search", "weighted"))  # 0.27 to 0.42
    assert by_column["weighted"] < 0.95 * by_column["rtn"]  # 0.71 to 0.87


@pytest.mark.parametrize("format", ("nvfp4", "int4_g32"))
def test_gptq_without_correlations_is_the_search(format):
    w = draw(2, 8, 48)
    h = torch.eye(48).expand(2, 48, 48)
    assert_as_good(w, quantize_weight(w, format, "gptq", calibration=h), format)


def assert_as_good(w: torch.Tensor, q, format: str) -> None:
    """As `search`, block by block. Weights of errors, be they all equal, round them otherwise, and a tie of
    two scales may go the other way; but nearly all codes are the same."""
    want = quantize_weight(w, format, "search")
    errors = [block_errors(w, dequantized(each, format), format) for each in (q, want)]
    assert torch.allclose(*errors, rtol=1e-5, atol=0)
    assert (q[0] == want[0]).double().mean() > 0.9


@pytest.mark.parametrize("format", ("nvfp4", "int4_g32"))
def test_an_expert_without_tokens_is_quantised_like_the_others(format):
    w = draw(2, 8, 48)
    for method in ("weighted", "gptq"):
        assert_as_good(w, quantize_weight(w, format, method, calibration=torch.zeros(2, 48, 48)), format)


@pytest.mark.parametrize(
    "format, method", [(f, m.name) for m in METHODS.values() for f in ("nvfp4", "int4") if f in m.formats]
)
def test_zeros_tiny_and_huge_weights(format, method):
    # int4's block scale has bfloat16's range. One block, each error at most half a step of amax / 7.5, and
    # amax at most the norm: sqrt(32) / 15.
    tiny, bound = (1e-38, 0.2) if format == "nvfp4" else (1e-30, 0.4)
    for scale in (0.0, tiny, 1e30):
        w = draw(1, 4, 32) * scale
        q = quantize_weight(w, format, method, calibration=torch.eye(32)[None])
        values = dequantized(q, format)
        assert values.isfinite().all()
        assert (values - w.to(F64)).norm() <= bound * w.to(F64).norm()


@pytest.mark.parametrize("format", ("nvfp4", "int4_g32"))
def test_strided_and_chunked_weights_give_the_same(format, monkeypatch):
    w = draw(5, 40, 24, dtype=torch.bfloat16).transpose(1, 2)
    h = moments(5, k=40)
    for method in ("rtn", "search", "gptq"):
        whole = quantize_weight(w.contiguous(), format, method, calibration=h)
        monkeypatch.setattr("fp4_ops.quantization.weight.CHUNK", {"cpu": 2 * 24 * 40})
        monkeypatch.setattr("fp4_ops.quantization.weight.ROUNDED", {"cpu": 2 * 7 * 40})
        for a, b in zip(whole, quantize_weight(w, format, method, calibration=h), strict=True):
            assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        monkeypatch.undo()


@pytest.mark.parametrize("method", ("search", "weighted"))
@pytest.mark.parametrize("format", ("nvfp4", "int4_g32"))
def test_a_near_tie_of_two_scales_goes_by_the_values_alone(format, method, monkeypatch):
    """Blocks bisected to where the scale changes: the errors of two scales differ in the last bits."""
    calibration = torch.rand(1, 32) if method == "weighted" else None

    def quantized(w):
        return quantize_weight(w, format, method, calibration=calibration)

    low, high = draw(1, 512, 32), draw(1, 512, 32)
    low[..., ::16], high[..., ::16] = 4.0, 4.0  # the largest of each block: the same scales are tried
    first = quantized(low)[1].float()
    for _ in range(26):
        middle = (low + high) / 2
        as_low = (quantized(middle)[1].float() == first).all(-1, keepdim=True)
        low, high = torch.where(as_low, middle, low), torch.where(as_low, high, middle)
    want = quantized(low)
    monkeypatch.setattr("fp4_ops.quantization.weight.ROUNDED", {"cpu": 7 * 32})
    for w in (low, low.mT.contiguous().mT, low.repeat_interleave(2, -1)[..., ::2]):
        for a, b in zip(want, quantized(w), strict=True):
            assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture
def threads():
    """Sets how many there are."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", (1, 5))
def test_threads_give_the_same(count, threads, monkeypatch):
    w, h = draw(count, 40, 96, dtype=torch.bfloat16), moments(count, k=96)
    monkeypatch.setattr("fp4_ops.quantization.weight.CHUNK", {"cpu": 40 * 96})
    for method in METHODS:
        made = []
        for number in (1, 3):
            threads(number)
            with torch.inference_mode(number == 3):
                made.append(quantize_weight(w, "nvfp4", method, calibration=h))
            assert torch.get_num_threads() == number
        for a, b in zip(*made, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), method
    w[-1, 3, 3] = torch.nan
    with pytest.raises(ValueError, match="w holds NaN or infinity"):
        quantize_weight(w, "nvfp4", "search")
    assert torch.get_num_threads() == 3


def test_what_does_not_fit_is_refused_by_name():
    w = draw(2, 4, 32)
    for message, arguments in (
        ("format is 'nvfp5'", (w, "nvfp5")),
        ("method is 'best'; it must be one of: rtn", (w, "nvfp4", "best")),
        ("method 'four_over_six' is for nvfp4; format is 'mxfp4'", (w, "mxfp4", "four_over_six")),
        ("method 'four_over_six' is for nvfp4; format is 'int4'", (w, "int4", "four_over_six")),
        ("method 'fp8_exact' is for nvfp4; format is 'int4_g64'", (w, "int4_g64", "fp8_exact")),
        ("method 'gptq_fp8_exact' is for nvfp4; format is 'int4_g32'", (w, "int4_g32", "gptq_fp8_exact")),
        ("calibration is missing; method 'weighted' needs (2, 32)", (w, "int4", "weighted")),
        ("w holds NaN or infinity", (w / 0, "int4")),
        ("w has K = 3; it must be even", (w[..., :3], "nvfp4")),
        ("w is torch.int32", (w.int(), "nvfp4")),
        ("w holds NaN or infinity", (w / 0, "nvfp4")),
        ("w is on the meta device", (w.to("meta"), "nvfp4")),
        ("calibration is missing; method 'gptq' needs (2, 32, 32)", (w, "nvfp4", "gptq")),
    ):
        with pytest.raises(ValueError) as error:
            quantize_weight(*arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"calibration is \(2, 32\); method 'gptq' needs \(2, 32, 32\)"):
        quantize_weight(w, "nvfp4", "gptq", calibration=torch.ones(2, 32))


# --- models ---

moe_models = pytest.importorskip("moe_models", reason="needs transformers")


@pytest.mark.parametrize("family", moe_models.FAMILIES)
@torch.no_grad()
def test_arithmetic_is_the_models_own(family):
    model = moe_models.build(family, torch.float32, "eager")
    ids = moe_models.tokens(2, 11)
    want = model(input_ids=ids).logits
    with computing(Arithmetic(m) for m in experts_modules(model)):
        got = model(input_ids=ids).logits
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(input_ids=ids).logits, want)


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
@torch.no_grad()
def test_calibration_is_the_weighted_second_moment(family):
    model = moe_models.build(family, torch.float32, "eager")
    experts = experts_modules(model)[-1]
    seen: list[tuple] = []
    hook = experts.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())), with_kwargs=True
    )
    ids = moe_models.tokens(5, 16)
    calibration = calibrate(model, ids, batch=2)
    hook.remove()
    diagonal = calibrate(model, ids, full=False)
    little = calibrate(model, ids, batch=2, max_bytes=1)  # one module at a time
    for m in experts_modules(model):
        for matrix in MATRICES:
            want = calibration.get(m.name, matrix)
            assert torch.allclose(little.get(m.name, matrix), want, rtol=1e-3, atol=1e-5 * want.abs().max())
            assert little.shape(m.name, matrix) == tuple(want.shape)
    x, choice, routing = (torch.cat([s[i] for s in seen[:3]]) for i in range(3))
    for e in range(len(experts.weight("down"))):
        token, slot = (choice == e).nonzero(as_tuple=True)
        assert calibration.tokens[experts.name][e] == len(token)
        weight = routing[token, slot].to(F64).square()
        up = x[token] @ experts.weight("gate_up")[e].T
        bias = experts.bias("gate_up")
        h = experts.module._apply_gate(up if bias is None else up + bias[e])
        for matrix, a in (("gate_up", x[token]), ("down", h)):
            a = a.to(F64)
            want = (a * weight[:, None]).T @ a / max(weight.sum().item(), 1e-300)
            got = calibration.get(experts.name, matrix)[e]
            assert torch.allclose(got.to(F64), want, rtol=1e-4, atol=1e-5 * want.abs().max())
            assert torch.allclose(diagonal.get(experts.name, matrix)[e], got.diagonal(), rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ("nvfp4", "int4", "int4_g32"))
@pytest.mark.parametrize("method", ("search", "gptq"))
@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
@torch.no_grad()
def test_prepare_quantises_by_the_method(family, method, format):
    model = moe_models.build(family, torch.float32, "eager")
    ids = moe_models.tokens(4, 16)
    little = method == "gptq" and family == "gpt_oss"
    calibration = calibrate(model, ids, max_bytes=1 if little else 1 << 30) if method == "gptq" else None
    twin = copy.deepcopy(model)
    for m in experts_modules(twin):
        for matrix in MATRICES:
            moments = calibration.get(m.name, matrix) if calibration else None
            q = quantize_weight(m.weight(matrix), format, method, calibration=moments)
            m.weight(matrix).copy_(dequantize_weight(*q, FORMATS[format]))
    fp4_ops.prepare(model, format, "bf16", method=method, calibration=calibration)
    got, want = model(input_ids=ids).logits, twin(input_ids=ids).logits
    errors = [moe_models.relative_error(a, b) for a, b in zip(got, want)]
    # A near tie in a router may fall the other way in one of the four sequences.
    assert sorted(errors)[2] < 1e-4, errors


def test_prepare_refuses_before_it_changes_anything():
    model = moe_models.build("qwen3_moe", torch.float32, "eager")
    shallow = moe_models.build("qwen3_moe", torch.float32, "eager", num_hidden_layers=1)
    one = calibrate(shallow, moe_models.tokens(1, 8))
    for message, arguments in (
        ("method is 'best'", {"method": "best"}),
        ("calibration is missing; method 'gptq' needs (8, 64, 64)", {"method": "gptq"}),
        ("has no inputs of model.layers.1.mlp.experts (gate_up)", {"method": "gptq", "calibration": one}),
    ):
        with pytest.raises(ValueError) as error:
            fp4_ops.prepare(model, "nvfp4", **arguments)
        assert message in str(error.value)
    with pytest.raises(ValueError, match="method 'four_over_six' is for nvfp4; format is 'int4'"):
        fp4_ops.prepare(model, "int4", method="four_over_six")
    with pytest.raises(ValueError, match="format is 'nvfp5'; it must be one of: nvfp4, mxfp4, int4"):
        find_method("rtn", "nvfp5")  # as from_pretrained with FP4Config asks for it
    assert len(find_experts(model)[1]) == 2  # still plain
