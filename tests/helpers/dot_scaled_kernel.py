"""A Triton kernel with one `tl.dot_scaled` of FP4 operands, compiled for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(a, a_scale, b, b_scale, out, BLOCK: tl.constexpr):
    M: tl.constexpr = 64
    N: tl.constexpr = 32
    K: tl.constexpr = 128
    m, n = tl.arange(0, M), tl.arange(0, N)
    byte, block = tl.arange(0, K // 2), tl.arange(0, K // BLOCK)
    left = tl.load(a + m[:, None] * (K // 2) + byte[None, :])
    right = tl.load(b + n[None, :] * (K // 2) + byte[:, None])
    left_scale = tl.load(a_scale + m[:, None] * (K // BLOCK) + block[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // BLOCK) + block[None, :])
    acc = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e2m1")
    tl.store(out + m[:, None] * N + n[None, :], acc)


def compiled(architecture: int, nvfp4: bool) -> Any:
    scale = "*fp8e4nv" if nvfp4 else "*u8"
    signature = {"a": "*u8", "a_scale": scale, "b": "*u8", "b_scale": scale, "out": "*fp32"}
    names = [*signature, "BLOCK"]
    source = ASTSource(
        fn=product,
        signature={**signature, "BLOCK": "constexpr"},
        constexprs={(5,): 16 if nvfp4 else 32},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in signature},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
