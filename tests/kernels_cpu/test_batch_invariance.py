"""Batch invariance: where docs/operators.md promises it, a token's bits do not depend on its batch.

A process chooses its kernels at its first call. So each family of kernels runs in another process, which runs
this file as a script.
"""

from __future__ import annotations

import itertools
import json
import sys

import forks
import processes
import pytest
import reference
import torch

import fp4_ops  # noqa: F401  loads the operators

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 200, 6, 2, 160, 96
CAPABILITIES = ("scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")
A_FORMATS = ("none", "int8", "fp8", "nvfp4", "mxfp4")
LAYOUTS = ("plain", "tile16", "tile16_invariant")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def holds(capability: str, format: str, a_format: str, layout: str, dtype: torch.dtype) -> bool:
    """True where docs/operators.md promises it."""
    if layout == "tile16_invariant":
        return True
    if capability == "amx_bf16":
        return a_format == "int8" and format != "nvfp4"
    return capability != "avx512_bf16" or a_format != "none" or dtype != torch.bfloat16


def routing() -> torch.Tensor:
    """Experts [T, top_k]; two tokens in three have the same first one, so it has many rows."""
    ids = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :TOP_K]
    same = torch.rand(TOKENS) < 2 / 3
    ids[same] = torch.where(ids[same] == 1, 0, ids[same])
    ids[same, 0] = 1
    return ids


def check(format: str, a_format: str, layout: str, dtype: torch.dtype) -> int:
    """A block and single products, whole and in batches of other tokens and sizes. Returns their number."""
    w13 = reference.random_weight(format, EXPERTS, 2 * INNER, HIDDEN, layout=layout)
    w2 = reference.random_weight(format, EXPERTS, HIDDEN, INNER, layout=layout)
    if format == "mxfp4" and torch.rand(()) < 0.5:  # as of blocks of zeros, some so far from the rest
        w13.scale.view(torch.uint8)[:, ::3, ::2] = 0
    x, ids, weights = torch.randn(TOKENS, HIDDEN, dtype=dtype), routing(), torch.rand(TOKENS, TOP_K)

    def block(at: torch.Tensor) -> torch.Tensor:
        return torch.ops.fp4.moe(
            x[at], ids[at], weights[at], *w13.operands(), *w2.operands(), **w13.options(), a_format=a_format,
            out_dtype=torch.float32,
        )  # fmt: skip

    rows = (x, None) if a_format == "none" else torch.ops.fp4.quantize_int8(x)

    def product(at: torch.Tensor) -> torch.Tensor:
        a, scale = (None if t is None else t[at] for t in rows)
        return torch.ops.fp4.indexed_mm(
            a, *w13.operands(), ids[at, 0].int(), a_scale=scale, **w13.options(), out_dtype=torch.float32
        )  # fmt: skip

    whole = torch.arange(TOKENS)
    sizes = [1, 2, *torch.randint(3, TOKENS, (8,)).tolist()]
    for run in (block, product) if a_format in ("none", "int8") else (block,):
        want = run(whole)
        for size in sizes:
            at = torch.randperm(TOKENS)[:size]
            assert torch.equal(run(at), want[at]), f"{run.__name__}, {size} tokens"
    return len(sizes)


def main(capability: str, seed: str) -> None:
    torch.manual_seed(int(seed))
    done = {}
    for case in itertools.product(reference.KERNEL_FORMATS, A_FORMATS, LAYOUTS, DTYPES):
        format, a_format, layout, dtype = case
        if holds(capability, *case) and torch.rand(()) < (0.15 if capability == "scalar" else 0.5):
            try:
                done[str(case)] = check(format, a_format, layout, dtype)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None
    print(json.dumps(done))


@pytest.mark.parametrize(
    "capability", [*(pytest.param(c, marks=pytest.mark.more) for c in CAPABILITIES[:3]), *CAPABILITIES[3:]]
)
def test_a_tokens_bits_do_not_depend_on_its_batch(capability: str) -> None:
    env = processes.environment(FP4_CPU_CAPABILITY=capability, OMP_NUM_THREADS="1")
    seed = str(torch.randint(0, 2**31, ()).item())
    child = forks.run([__file__, capability, seed], env)
    if capability != "scalar" and child.returncode != 0 and "FP4_CPU_CAPABILITY" in child.stderr:
        pytest.skip(f"this machine cannot run the {capability} kernels")
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
