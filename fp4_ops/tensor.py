"""Defines FP4Tensor, which holds packed codes, scales and format as one tensor with the original's shape and
dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .meta.dtensors import refuse_dtensors
from .meta.formats import FORMATS
from .meta.layouts import LAYOUTS, block_scales, byte_view
from .meta.torch_internals import make_wrapper_subclass, no_torch_function
from .runtime.relayout import Operands, relayout

aten = torch.ops.aten


class FP4Tensor(torch.Tensor):
    """A 4-bit weight that replaces the original weight in products.

    packed uint8 [..., N, K/2], block_scale [..., N, ceil(K/block)], global_scale float32 [...] (None for
    formats without one), format and weight_layout: the operands of `torch.ops.fp4.*`. `shape` and `dtype`
    are the original's; `transposed` says that the last two dimensions are swapped.

    These work: `x @ w.t()`, `F.linear(x, w, b)`, `torch.bmm(x, w.mT)`, `F.grouped_mm(x, w.mT, offs=offs)`,
    `w[i]`, `.to()`, `clone`, `detach`, `copy_`, `torch.save`, `nn.Parameter(w, requires_grad=False)`,
    `torch.compile`. `copy_` of an ordinary tensor quantises it into place. Anything else raises
    NotImplementedError and names the function: nothing is ever dequantised silently.
    """

    packed: Tensor
    held_scale: Tensor
    """Block scales. float8 scales are held as uint8."""
    global_scale: Tensor | None
    format: str
    weight_layout: str
    transposed: bool
    k: int
    method: str = "rtn"
    """How `copy_` quantises new values: a name of `fp4_ops.quantization.METHODS`."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        block_scale: Tensor | None = None,
        global_scale: Tensor | None = None,
        *,
        format: str = "",
        dtype: torch.dtype | None = None,
        layout: str = "plain",
        transposed: bool = False,
        k: int | None = None,
        requires_grad: bool = False,
        method: str = "rtn",
    ) -> FP4Tensor:
        if isinstance(packed, FP4Tensor):  # tools rebuild a parameter by type(p)(p, requires_grad=...)
            return packed._map(torch.Tensor.detach).requires_grad_(requires_grad)  # type: ignore[return-value]
        if block_scale is None or not format or dtype is None:
            raise TypeError("FP4Tensor: block_scale, format and dtype must be given; fp4_ops.quantize does")
        operands = {"packed": packed, "block_scale": block_scale, "global_scale": global_scale}
        refuse_dtensors("FP4Tensor", operands.items())
        shape = [*packed.shape[:-1], packed.shape[-1] * 2 if k is None else k]
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        if transposed:
            for sizes in (shape, strides):
                sizes[-2], sizes[-1] = sizes[-1], sizes[-2]
        return make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=packed.device, requires_grad=False
        )

    def __init__(
        self,
        packed: Tensor,
        block_scale: Tensor | None = None,
        global_scale: Tensor | None = None,
        *,
        format: str = "",
        dtype: torch.dtype | None = None,
        layout: str = "plain",
        transposed: bool = False,
        k: int | None = None,
        requires_grad: bool = False,
        method: str = "rtn",
    ) -> None:
        if isinstance(packed, FP4Tensor) or block_scale is None:
            return  # `detach` has set all attributes
        self.packed = byte_view(packed)
        self.held_scale = byte_view(block_scale)
        # `torch.ops.fp4.quantize` returns an empty tensor for a format without global scales.
        empty = global_scale is not None and global_scale.shape == (0,)
        self.global_scale = None if empty and not FORMATS[format].has_global_scale else global_scale
        self.format = format
        self.weight_layout = layout  # `Tensor.layout` is torch's own attribute
        self.transposed = transposed
        self.k = packed.shape[-1] * 2 if k is None else k  # kernel layouts may pad it
        if method != "rtn":
            self.method = method

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        tensors = ["packed", "held_scale"] + (["global_scale"] if self.global_scale is not None else [])
        return tensors, self._context()

    def inner_tensors(self) -> list[Tensor]:
        """Returns the tensors that `__tensor_flatten__` names, without its other results."""
        held = [self.packed, self.held_scale]
        return held if self.global_scale is None else [*held, self.global_scale]

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> FP4Tensor:
        return FP4Tensor(tensors["packed"], tensors["held_scale"], tensors.get("global_scale"), **context)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        notes = (
            f", layout={self.weight_layout}" * (self.weight_layout != "plain")
            + ", transposed" * self.transposed
        )
        dtype = str(self.dtype).removeprefix("torch.")
        return f"FP4Tensor({self.format}, {list(self.shape)}, {dtype}, {self.device}{notes})"

    def _stable_hash_for_caching(self) -> str:
        """Returns everything that a graph can depend on. AOTAutograd's cache calls this."""
        inner = [(t.dtype, t.shape, t.stride(), t.device) for t in self._held() if t is not None]
        own = (self.dtype, self.shape, self.stride(), self.transposed, self.k, self.requires_grad)
        return repr((self._options(), own, inner))

    def _options(self) -> dict[str, str]:
        return {"format": self.format, "layout": self.weight_layout}

    def _context(self) -> dict[str, Any]:
        own = {"dtype": self.dtype, "transposed": self.transposed, "k": self.k, "method": self.method}
        return {**self._options(), **own}

    @property
    def block_scale(self) -> Tensor:
        return block_scales(self.held_scale, self.format, self.weight_layout)

    def _operands(self) -> Operands:
        return self.packed, self.block_scale, self.global_scale

    def _held(self) -> Operands:
        return self.packed, self.held_scale, self.global_scale

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, also from files with float8 block scales."""
        if "block_scale" in state:
            state = {**state, "held_scale": byte_view(state["block_scale"])}
            del state["block_scale"]
        self.__dict__.update(state)

    def _map(self, function: Callable[[Tensor], Tensor], **changes: Any) -> FP4Tensor:
        """Returns the same tensor with `function` applied to codes and scales."""
        context = {**self._context(), **changes}
        inner = (None if t is None else function(t) for t in self._held())
        return FP4Tensor(*inner, **context)  # type: ignore[arg-type, misc]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Number of bytes that codes and scales take."""
        return sum(t.nbytes for t in self._held() if t is not None)

    def numpy(self, *, force: bool = False) -> Any:
        _refuse(
            "numpy",
            "it holds several tensors, which cannot be one NumPy array (disk offloading asks for one)",
        )

    def share_memory_(self) -> FP4Tensor:
        """Moves codes and scales to shared memory. The wrapper itself has no memory."""
        for t in self._held():
            if t is not None:
                t.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(t.is_shared() for t in self._held() if t is not None)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Returns the values of the codes as a plain tensor of `dtype` (default: the original's)."""
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("FP4Tensor.dequantize has no gradient: 4-bit weights are for inference")
        dtype = dtype or self.dtype
        values: Tensor = torch.ops.fp4.dequantize(
            *self._operands(), self.format, dtype, layout=self.weight_layout
        )
        values = values[..., : self.k]
        return values.transpose(-2, -1) if self.transposed else values

    def prepack(self, layout: str) -> FP4Tensor:
        """Returns the same weight in another layout ("plain", or a kernel's layout: meta/layouts.py)."""
        if layout == self.weight_layout:
            return self
        operands = relayout(self._operands(), self.format, self.k, self.weight_layout, layout)
        context = {**self._context(), "layout": layout}
        return FP4Tensor(*operands, **context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        implementation = IMPLEMENTATIONS.get(func)
        refuse_dtensors(f"{func} on an FP4Tensor", _named(func, args, kwargs))
        if implementation is None:
            # In inference mode, torch asks a subclass before it writes `w.mT` as `w.transpose`.
            found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
            _refuse(func, "FP4Tensor does not support this function")
        if func.is_view and torch.is_inference_mode_enabled():
            # torch lets a view count the changes of its base, so it is an inference tensor only if that is.
            with torch.inference_mode(args[0].is_inference()):
                return implementation(func, *args, **(kwargs or {}))
        return implementation(func, *args, **(kwargs or {}))


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Returns (name, value) of each argument, by the schema."""
    return [*zip((argument.name for argument in func._schema.arguments), args), *(kwargs or {}).items()]


def _refuse(func: Any, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{func} on an FP4Tensor: {why}. Use torch.ops.fp4.* with its packed, block_scale and global_scale, "
        "or call .dequantize() first."
    )


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}


Function = TypeVar("Function", bound=Callable[..., Any])


def _implements(*functions: Any) -> Callable[[Function], Function]:
    def register(implementation: Function) -> Function:
        IMPLEMENTATIONS.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


# --- moving and viewing ---


@_implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _same(func: Any, w: FP4Tensor, **kwargs: Any) -> FP4Tensor:
    kwargs.pop("memory_format", None)  # packed codes have no memory format
    return w._map(lambda t: func(t, **kwargs))


@_implements(aten._pin_memory.default)
def _pin_memory(func: Any, w: FP4Tensor, device: Any = None) -> FP4Tensor:
    return w._map(lambda t: func(t, device))


@_implements(aten.is_pinned.default)
def _is_pinned(func: Any, w: FP4Tensor, device: Any = None) -> bool:
    return all(func(t, device) for t in w._held() if t is not None)


@_implements(aten._to_copy.default, aten.empty_like.default)
def _to_copy(func: Any, w: FP4Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> FP4Tensor:
    """Moves codes and scales to a new device. A new dtype applies to products and to `dequantize`."""
    kwargs.pop("memory_format", None)
    dtype = dtype or w.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        _refuse(func, f"its dtype cannot be {str(dtype).removeprefix('torch.')}")
    device = torch.device(kwargs.get("device") or w.device)
    if device.type != w.device.type:  # a kernel layout belongs to one kind of device
        if LAYOUTS[w.weight_layout].batch_invariant and device.type != "meta":
            _refuse(func, f"it is batch invariant on {w.device.type}, and would not be on {device.type}")
        w = w.prepack("plain")
    return w._map(lambda t: func(t, **kwargs), dtype=dtype)


@_implements(aten.copy_.default)
def _copy(func: Any, w: FP4Tensor, source: Tensor, non_blocking: bool = False) -> FP4Tensor:
    """Copies the codes of another FP4Tensor, or quantises an ordinary tensor into place."""
    if not isinstance(w, FP4Tensor):
        _refuse(func, "an ordinary tensor cannot take its values")
    if w.shape != source.shape:
        _refuse(func, f"{list(source.shape)} does not fit {w}")
    if not isinstance(source, FP4Tensor):
        _overwrite(w, source)
        return w
    if w.format != source.format or w.transposed != source.transposed:
        _refuse(func, f"{source} does not fit {w}")
    source = source.prepack(w.weight_layout)
    for to, value in zip(w._held(), source._held(), strict=True):
        if to is not None and value is not None:
            to.copy_(value, non_blocking)
    return w


def _overwrite(w: FP4Tensor, values: Tensor) -> None:
    from .quantization.overwrite import Codes, check_memory, check_values

    check_memory(f"an FP4Tensor {list(w.shape)}", w.packed)
    check_values(f"an FP4Tensor {list(w.shape)}", values)
    values = values.detach().transpose(-2, -1) if w.transposed else values.detach()
    lead = w.packed.shape[:-2]
    count = lead.numel()
    held = (None if t is None else t.view(count, *t.shape[len(lead) :]) for t in w._held())
    packed, scale, factor = held
    assert packed is not None and scale is not None
    codes = Codes(packed, scale, factor, w.format, w.weight_layout, w.k, method=w.method)
    codes.overwrite(slice(0, count), values.reshape(count, *values.shape[-2:]))


@_implements(aten.t.default)
def _t(func: Any, w: FP4Tensor) -> FP4Tensor:
    return w._map(aten.alias.default, transposed=not w.transposed)


@_implements(aten.transpose.int)
def _transpose(func: Any, w: FP4Tensor, dim0: int, dim1: int) -> FP4Tensor:
    if w.dim() < 2 or {dim0 % w.dim(), dim1 % w.dim()} != {w.dim() - 2, w.dim() - 1}:
        _refuse(func, "only its last two dimensions can be transposed")
    return _t(func, w)


@_implements(aten.permute.default)
def _permute(func: Any, w: FP4Tensor, dims: list[int]) -> FP4Tensor:
    """Is what `w.T` of a matrix calls."""
    order = [dim % w.dim() for dim in dims]
    if order == list(range(w.dim())):
        return _same(aten.alias.default, w)
    if w.dim() < 2 or order != [*range(w.dim() - 2), w.dim() - 1, w.dim() - 2]:
        _refuse(func, "only its last two dimensions can be transposed")
    return _t(func, w)


@_implements(aten.select.int)
def _select(func: Any, w: FP4Tensor, dim: int, index: int) -> FP4Tensor:
    if w.dim() < 3 or dim % w.dim() >= w.dim() - 2:
        _refuse(func, "it can only be indexed by whole matrices")
    return w._map(lambda t: func(t, dim % w.dim(), index))


@_implements(aten.expand.default, aten.view.default, aten._unsafe_view.default)
def _reshape(func: Any, w: FP4Tensor, size: list[int], **kwargs: Any) -> FP4Tensor:
    """Keeps the shape, or repeats one matrix without a copy. torch.matmul makes these calls before bmm."""
    lead, matrix = list(size[:-2]), list(size[-2:])
    if len(size) == w.dim() and all(s in (-1, d) for s, d in zip(size, w.shape)):
        return w._map(aten.alias.default)
    one = _one_matrix(w)
    keeps = len(size) > 2 and all(s in (-1, d) for s, d in zip(matrix, w.shape[-2:]))
    if one is None or not keeps or -1 in lead:
        _refuse(func, f"its shape {list(w.shape)} cannot become {list(size)}")
    return one._map(lambda t: t.expand(*lead, *t.shape))


def _one_matrix(w: FP4Tensor) -> FP4Tensor | None:
    """Return the matrix that a stack repeats; None if its matrices differ."""
    lead = w.dim() - 2
    if any(n > 1 and stride for n, stride in zip(w.packed.shape[:lead], w.packed.stride())):
        return None
    return w._map(lambda t: t[(0,) * lead])


# --- products ---


def _check_product(func: Any, a: Any, w: Any, *, transposed: bool = True) -> None:
    """Checks that `a` is an ordinary tensor and the product sums over the quantised dimension of w."""
    if not isinstance(w, FP4Tensor) or isinstance(a, FP4Tensor):
        _refuse(func, "only the right operand of a product can be an FP4Tensor")
    if w.transposed != transposed:
        _refuse(
            func,
            "it is quantised along its last dimension, so only products that sum over that dimension "
            "(x @ w.mT) are computed; gradients would sum over the other one and do not exist",
        )


def _mm_rows(a: Tensor, w: FP4Tensor, bias: Tensor | None) -> Tensor:
    """Returns a [..., K] @ w [N, K].T, with the bias."""
    out: Tensor = torch.ops.fp4.mm(a.reshape(-1, a.shape[-1]), *w._operands(), None, bias, **w._options())
    return out.view(*a.shape[:-1], out.shape[-1])


@_implements(aten.mm.default)
def _mm(func: Any, a: Tensor, w: FP4Tensor) -> Tensor:
    _check_product(func, a, w)
    return _mm_rows(a, w, None)


@_implements(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, a: Tensor, w: FP4Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    _check_product(func, a, w)
    if beta != 1 or alpha != 1 or tuple(bias.shape) != (w.shape[-1],):
        _refuse(func, "the added tensor must be a bias of one row, with beta = alpha = 1")
    return _mm_rows(a, w, bias)


@_implements(aten.linear.default)
def _linear(func: Any, a: Tensor, w: FP4Tensor, bias: Tensor | None = None) -> Tensor:
    _check_product(func, a, w, transposed=False)
    return _mm_rows(a, w, bias)


@_implements(aten.bmm.default)
def _bmm(func: Any, a: Tensor, w: FP4Tensor) -> Tensor:
    _check_product(func, a, w)
    if (one := _one_matrix(w)) is not None:
        return _mm_rows(a, one, None)
    every_row = torch.full((a.shape[0],), a.shape[1], dtype=torch.int32, device=a.device)
    out: Tensor = torch.ops.fp4.grouped_mm_masked(a, *w._operands(), every_row, **w._options())
    return out


@_implements(aten._grouped_mm.default)
def _grouped_mm(
    func: Any,
    a: Tensor,
    w: FP4Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check_product(func, a, w)
    if a.dim() != 2 or w.dim() != 3 or offs is None:
        _refuse(func, "a must have 2 dimensions, the weight 3, and offs must be given")
    options = {**w._options(), "out_dtype": out_dtype}
    out: Tensor = torch.ops.fp4.grouped_mm(a, *w._operands(), offs, None, bias, **options)
    return out


torch.serialization.add_safe_globals([FP4Tensor])
