"""Launches csrc/sm90/prefill*.cu: grouped products with many rows for each expert, limited by tensor
cores."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ..backends.launchers.library import address, call, library, multiprocessors, stream
from ..meta.formats import Activation
from . import _native
from ._native import Choice, PrefillArguments, PrefillKernel, RowMode
from .product import DTYPES, Int4Weight, NativeWeight, Routing, bias_type, gate_of

MODES = {
    Routing.DENSE: RowMode.DENSE,
    Routing.OFFS: RowMode.CONTIGUOUS,
    Routing.MASKED: RowMode.MASKED,
}
CHOOSE = -1
"""Value of `config` that lets the launcher choose a candidate by the sizes."""
KERNELS = tuple(PrefillKernel.__members__)
"""Names of `PrefillKernel`, by rows and weights.

With e2m1 weights in blocks of 16 or 32: fp8 rows, fp16 rows from rows.to_half, bfloat16 rows, fp16 rows in
plain order, int8 rows. With int4 weights in groups of 128, 64 or 32: fp8 rows.
"""


def gates(gate: Activation, out: torch.dtype) -> bool:
    """True if `run` can apply this activation to results of this dtype.

    One lane has both gate and up of a column in its sums. The function must be cheap, compared with the
    products.
    """
    known = gate.gated and gate.function == "silu" and (gate.limit is not None or not gate.up_offset)
    return known and gate.interleaved and out != torch.float32


def for_block(kernel: str, block: int) -> str:
    """Returns the kernel for e2m1 weights in blocks of `block`. `kernel` is the one for blocks of 16."""
    return kernel if block == 16 else f"{kernel}_b{block}"


def launch(
    kernel: str, x: Tensor, x_scale: Tensor | None, w: NativeWeight | Int4Weight, factor: Tensor,
    route: Tensor | None, routing: Routing, rows: int, out: Tensor, gate: Activation | None, early: bool,
    config: int, leaves_rest: bool = False,
) -> None:  # fmt: skip
    """Launches one of KERNELS. `factor`, float32 [groups], multiplies all results. The other arguments are as
    in `run`."""
    size = workspace_bytes(kernel, multiprocessors(x.device.index))
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    arguments = PrefillArguments(
        x=address(x),
        x_scale=address(x_scale),
        codes=address(w.codes),
        scales=address(w.scales),
        global_scale=address(factor),
        bias=address(w.bias),
        out=address(out),
        group_rows=address(route),
        workspace=address(workspace),
        m=rows,
        groups=w.groups,
        n=w.n,
        k=x.shape[-1],
        kp=w.kp,
        mode=MODES[routing],
        out_type=DTYPES[out.dtype],
        bias_type=bias_type(w.bias),
        gate=gate_of(gate),
        early=early,
        leaves_rest=leaves_rest,
        config=config,
        stream=stream(),
    )
    call("fp4_kernel_prefill", PrefillKernel[kernel], arguments.address)


def run(
    x: Tensor,
    x_scale: Tensor | None,
    w: NativeWeight,
    route: Tensor | None,
    routing: Routing,
    rows: int,
    out: Tensor,
    *,
    gate: Activation | None = None,
    early: bool = False,
    config: int = CHOOSE,
    leaves_rest: bool = False,
) -> None:
    """Multiplies x [M, ...], sorted by expert, into out [M, n].

    Rows without an expert become zeros; with `leaves_rest` they are not written.

    The forms of x, and how each form uses the weights:

    - e4m3 [M, kp] in the layout's order, with x_scale [M]. Weights are folded into e4m3.
    - fp16 [M, kp] in the layout's order, from rows.to_half, with x_scale [M]. Weights are exact.
    - In layout mma_bf16: bfloat16 (with `_sm80.so` also fp16) [M, K] in plain order, 16-byte aligned. x_scale
      may be None, which means ones. Weights are exact.
    - In layout mma_bf16: int8 [M, kp] with x_scale [kp / 128, M]. Weights are rounded to int8.

    `rows`: M, or the rows of each group if the routing is masked. `gate`: out [M, n / 2] of 16 bits, gated in
    float32; the weight has gate and up rows interleaved, and `gates` says whether the kernels know the
    activation. `config`: the index of a candidate. `early`: weights may be loaded before the previous kernel
    ends. The previous kernel may then write x and x_scale, but nothing else that this kernel reads. All
    kernels before it must have ended when it began.
    """
    of_rows = {torch.float16: "fp16" if w.bf16 else "half", torch.bfloat16: "bf16", torch.int8: "int8"}
    kernel = for_block(of_rows.get(x.dtype, "w4a8"), w.block)
    launch(kernel, x, x_scale, w, w.global_scale, route, routing, rows, out, gate, early, config, leaves_rest)


def run_int4(
    x: Tensor, x_scale: Tensor, w: Int4Weight, route: Tensor | None, routing: Routing, rows: int, out: Tensor,
    *, gate: Activation | None = None, early: bool = False, config: int = CHOOSE,
) -> None:  # fmt: skip
    """Launches csrc/sm90/prefill_int4.cu. The arguments are as in `run`. x is e4m3 [M, kp]; weights are
    rounded to e4m3."""
    kernel = {128: "int4", 64: "int4_g64", 32: "int4_g32"}[w.group]
    launch(kernel, x, x_scale, w, w.factor, route, routing, rows, out, gate, early, config)


@functools.cache
def candidates(kernel: str = "w4a8") -> list[str]:
    """Describes the candidates that `config` of `run` chooses from. `kernel` is one of KERNELS."""
    return candidates_of(library(), kernel)


def candidates_of(loaded: ctypes.CDLL | None, kernel: str) -> list[str]:
    """Describes the candidates of a library of kernels."""
    assert loaded is not None
    name = loaded.fp4_kernel_prefill_config_name
    name.restype = ctypes.c_char_p
    which = PrefillKernel[kernel]
    return [name(which, i).decode() for i in range(loaded.fp4_kernel_prefill_configs(which))]


@functools.cache
def workspace_bytes(kernel: str, sms: int) -> int:
    """Returns the size of a launch's scratch memory, for tiles that SMs share."""
    return workspace_bytes_of(library(), kernel, sms)


def workspace_bytes_of(loaded: ctypes.CDLL | None, kernel: str, sms: int) -> int:
    assert loaded is not None
    function = loaded.fp4_kernel_prefill_workspace
    function.restype = ctypes.c_int64
    return function(PrefillKernel[kernel], sms)


def choose(
    routing: Routing,
    groups: int,
    rows: int,
    n: int,
    kp: int,
    sms: int,
    kernel: str = "w4a8",
    config: int = -1,
) -> Choice:
    """Returns the choice of CHOOSE on a GPU of `sms` SMs. The arguments are as for `run` and `candidates`.

    The choice has a candidate; its time in seconds by the launcher's model; a number of tiles; the tokens in
    a tile of a dense product (0: the same as for any group); and whether SMs claim tiles. If fewer tiles than
    that number remain after the full waves, all SMs share them (0: never).
    """
    return choose_of(library(), MODES[routing], groups, rows, n, kp, sms, kernel, config)


def choose_of(
    loaded: ctypes.CDLL | None,
    mode: RowMode,
    groups: int,
    rows: int,
    n: int,
    kp: int,
    sms: int,
    kernel: str,
    config: int = -1,
) -> Choice:
    """Returns the choice of CHOOSE with a library of kernels."""
    assert loaded is not None
    function = ctypes.cast(loaded.fp4_kernel_prefill_choose, ctypes.c_void_p).value
    return _native.prefill_choose(function, PrefillKernel[kernel], mode, groups, rows, n, kp, sms, config)
