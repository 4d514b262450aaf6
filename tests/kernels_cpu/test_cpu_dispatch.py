"""Every kernel family of the CPU (FP4_CPU_CAPABILITY), not only the family that this machine would choose.

A process chooses its kernels at its first call. So each family runs in another process, which runs this file
as a script. It computes every case and prints a JSON object with the failures and the number of comparisons.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import traceback

import forks
import processes
import pytest
import reference
import torch

import fp4_ops  # noqa: F401  loads the operators

CAPABILITIES = ("scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")
LAYOUTS = ("plain", "tile16")
KINDS = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}
CALLS = (
    # M, N, K: panels of 16 rows with and without a rest, K = 32 x odd, K that no block divides, K of more
    # than one piece of a row.
    (0, 37, 96),
    (1, 16, 32),
    (1, 50, 70),
    (2, 33, 192),
    (7, 5, 34),
    (7, 80, 160),
    (65, 31, 66),
    (65, 37, 96),
    (19, 17, 546),
)
# In units of the bound for float32: one step of the codes of a few hidden values.
STEP = {"int8": 500, "fp8": 1000, "nvfp4": 5000, "mxfp4": 5000}


def check_products(format: str, a_kind: str, layout: str) -> int:
    """grouped_mm and indexed_mm with an empty expert in the middle; returns the comparisons made."""
    for m, n, k in CALLS:
        w = reference.random_weight(format, 3, n, k, layout=layout)
        a = reference.random_activations(m, k, kind=KINDS[a_kind])
        bias = torch.randn(3, n, dtype=torch.bfloat16)
        first = int(torch.randint(0, m + 1, ()))
        offs = torch.tensor([first, first, m], dtype=torch.int32)
        ids = reference.m_indices(offs, m)
        want = reference.indexed_mm(a.exact, w.dense, ids, bias)
        bounds = reference.ProductBounds.of(a.exact, w.dense, ids)
        for out_dtype in (torch.float32, torch.bfloat16):
            options = {**w.options(), **a.options(), "out_dtype": out_dtype}
            got = torch.ops.fp4.grouped_mm(
                a.data, *w.operands(), offs, a.scale, bias, a.global_scale, **options
            )
            bounds.assert_close(got, want, out_dtype)
            shuffled = torch.randperm(m)
            r = a.rows(shuffled)
            got = torch.ops.fp4.indexed_mm(
                r.data, *w.operands(), ids[shuffled], r.scale, bias, r.global_scale, **options
            )
            bounds.rows(shuffled).assert_close(got, want[shuffled], out_dtype)
    return 4 * len(CALLS)


def check_moe(format: str, a_kind: str, layout: str) -> int:
    """The whole block for each activation function, with an id that no expert has."""
    quantised = a_kind in ("int8", "fp8", "nvfp4", "mxfp4")
    flip = int(torch.randint(2, ()))  # one token or some, in turn
    for i, activation in enumerate(reference.GATES):
        tokens, inter = (1, 19)[(i + flip) % 2], (48, 290)[i // 2 % 2]
        w13 = reference.random_weight(
            format, 4, reference.rows_per_column(activation) * inter, 64, layout=layout
        )
        w2 = reference.random_weight(format, 4, 64, inter, layout=layout)
        x = (torch.randn(tokens, 64) * 4).to(torch.float32 if quantised else KINDS[a_kind])
        ids = torch.randint(0, 5, (tokens, 3))
        weights = torch.rand(tokens, 3)
        options = {"activation": activation, "a_format": a_kind if quantised else "none"}
        want = reference.moe(x, ids, weights, w13.dense, w2.dense, **options)
        got = torch.ops.fp4.moe(
            x,
            ids,
            weights,
            *w13.operands(),
            *w2.operands(),
            out_dtype=torch.float32,
            **w13.options(),
            **options,
        )
        # A hidden value at the middle between two codes may land on either.
        factor, between = STEP.get(a_kind, 1), 0.0
        if quantised and reference.relative_error(got, want) > 1e-5:
            between = reference.moe_between_codes(x, ids, weights, w13.dense, w2.dense, **options)
        reference.assert_close(got, want, torch.float32, max(64, inter), factor, more=between)
    return len(reference.GATES)


def check_quantize(format: str, a_kind: str, layout: str) -> int:
    """The definition's bits: short blocks, zeros of both signs, ties, scales from subnormal to saturated."""
    shapes = ((3, 2), (5, 14), (7, 94), (4, 1100))
    for k in shapes:
        x = torch.randn(k) * torch.exp2(torch.randint(-24, 12, k).float())
        x[0], x[1] = torch.randint(-24, 25, k[1:]) / 4, 0.0
        x[1, ::2] = -0.0
        x = x.to(KINDS[a_kind])
        for got, want in zip(torch.ops.fp4.quantize(x, format), reference.quantize(x, format)):
            got, want = got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)
            assert torch.equal(got, want), k
    return len(shapes)


CHECKS = {"products": check_products, "moe": check_moe, "quantize": check_quantize}
CASES = (
    *itertools.product(("products", "moe"), reference.KERNEL_FORMATS, KINDS, LAYOUTS),
    *itertools.product(("quantize",), reference.FORMATS, ("f32", "bf16", "f16"), ("plain",)),
)


def main(seed: str, draw: str = "1", *kinds: str) -> None:
    """draw: one in how many cases is computed. kinds: the activations of these cases; none: all."""
    results = {"capability": torch.ops.fp4.cpu_capability()}
    cases = [case for case in CASES if not kinds or case[2] in kinds]
    for case in random.Random(seed).sample(cases, -(-len(cases) // int(draw))):
        check, format, a_kind, layout = case
        torch.manual_seed(int(seed))
        try:
            results[":".join(case)] = CHECKS[check](format, a_kind, layout)
        except (AssertionError, RuntimeError):
            results[":".join(case)] = traceback.format_exc()
    print(json.dumps(results))


def run(capability: str, *arguments: str) -> subprocess.CompletedProcess:
    env = processes.environment(FP4_CPU_CAPABILITY=capability, OMP_NUM_THREADS="1")
    return forks.run([*arguments], env)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels(capability) -> None:
    """All cases in one test: as tests of their own, several workers would start the process again."""
    child = run(capability, __file__, str(torch.randint(0, 2**31, ()).item()))
    if capability != "scalar" and child.returncode != 0 and "FP4_CPU_CAPABILITY" in child.stderr:
        pytest.skip(f"this machine cannot run the {capability} kernels")
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found.pop("capability") == capability
    assert set(found) == set(map(":".join, CASES))
    wrong = {case: outcome for case, outcome in found.items() if not (isinstance(outcome, int) and outcome)}
    assert not wrong, "\n".join(f"{case}:\n{outcome}" for case, outcome in wrong.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", reference.FORMATS)
def test_threads_do_not_change_a_bit(format, layout) -> None:
    """Work enough for several threads, whose shares begin and end inside an expert."""
    w = reference.random_weight(format, 3, 171, 1024, layout=layout)
    a = torch.randn(50, 1024)
    offs = torch.tensor([9, 9, 47], dtype=torch.int32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.ops.fp4.grouped_mm(a, *w.operands(), offs, **w.options())
        torch.set_num_threads(3)
        shared = torch.ops.fp4.grouped_mm(a, *w.operands(), offs, **w.options())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, shared)
    want = reference.indexed_mm(a.double(), w.dense, reference.m_indices(offs, 50))
    reference.assert_close(shared, want, torch.float32, 1024)


def test_unknown_capability_names_the_variable() -> None:
    child = run("sse9", "-c", "import torch, fp4_ops; torch.ops.fp4.cpu_capability()")
    assert child.returncode != 0
    assert (
        "the environment variable FP4_CPU_CAPABILITY is 'sse9'; on this machine it must be one of:"
        in child.stderr
    )
    assert "scalar" in child.stderr


def test_an_error_in_a_thread_keeps_its_words() -> None:
    """Several threads share the work, and torch's C interface for that carries no exception."""
    code = "torch.set_num_threads(3); torch.ops.fp4.quantize(torch.randn(8, 256, 128), 'nvfp4')"
    child = run("sse9", "-c", f"import torch, fp4_ops; {code}")
    assert "FP4_CPU_CAPABILITY is 'sse9'" in child.stderr.splitlines()[-1]


@pytest.mark.parametrize("format", reference.FORMATS)
def test_a_damaged_weight_is_an_error_with_any_number_of_threads(format) -> None:
    """Kernels would read an e4m3 NaN as 480. A weight in a kernel layout was checked when it was made."""
    packed, scale, factor = reference.random_weight(format, 3, 171, 1024).operands()
    if scale.dtype.itemsize == 1:
        scale.view(torch.uint8)[1, 170, 3] = 0xFF
    else:
        scale[1, 170, 3] = torch.nan
    a, ends = torch.randn(50, 1024), torch.tensor([9, 29, 47], dtype=torch.int32)
    codes, steps = torch.ops.fp4.quantize_int8(a)
    weight = (packed, scale, factor, ends)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (a, a.bfloat16()):
                with pytest.raises(RuntimeError, match="block_scale has NaN values"):
                    torch.ops.fp4.grouped_mm(rows, *weight, format=format)
            with pytest.raises(RuntimeError, match="block_scale has NaN values"):
                torch.ops.fp4.grouped_mm(codes, *weight, steps, format=format)
    finally:
        torch.set_num_threads(before)
    no_rows = torch.tensor([9, 9, 47], dtype=torch.int32)  # an expert without rows is not read
    assert torch.ops.fp4.grouped_mm(a, packed, scale, factor, no_rows, format=format).isfinite().all()


if __name__ == "__main__":
    main(*sys.argv[1:])
