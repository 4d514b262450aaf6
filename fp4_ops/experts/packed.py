"""Defines modules that hold 4-bit expert weights, and the implementation `fp4` in transformers' registry that
runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module

from ..distributed.parts import Part, local
from ..meta.formats import FORMATS, activation_name, known_activation
from ..meta.gradients import call
from ..meta.layouts import LAYOUTS, block_scales, byte_view, packed_spec, preferred_layout, same_bytes
from ..runtime.input_gradients import FrozenExperts
from ..runtime.relayout import Operands, relayout

IMPLEMENTATION = "fp4"
"""Our name among transformers' experts implementations ("eager", "grouped_mm", ...)."""

STORED_FORMATS = ("mxfp4", "nvfp4", "int4", "int4_g64", "int4_g32")
"""State dicts store a format's index in this list, so new formats go to the end."""

IN_PLACE = (
    "and as parameters (packed_as_parameters) they keep the one that they have. Move or load the model "
    "before they become parameters"
)

_MOE = torch.ops.fp4.moe.default
"""The overload itself, so that a call need not choose one."""
_MOE_SLOTS = torch.ops.fp4.moe_slots.default

SLOTS = "fp4_slots"
"""Name of the child of an experts module that has slots on a GPU (models/expert_slots.py)."""


@dataclass(frozen=True)
class ExpertsForm:
    """The names of a family's two expert weights, [E, 2 I, H] and [E, H, I]. Both may be transposed.

    Experts without a gate have only up [E, I, H]. A bias that a module lacks has the name "".
    """

    gate_up: str
    down: str
    gate_up_bias: str
    down_bias: str

    @property
    def weights(self) -> tuple[tuple[str, str], ...]:
        """Returns ("gate_up" or "down", its attribute) for each weight."""
        return ("gate_up", self.gate_up), ("down", self.down)

    def of(self, module: nn.Module) -> ExpertsForm:
        """Returns the form for this module. Under torch.compile, asking a module for a missing attribute
        costs 2 us a call."""
        names = (self.gate_up_bias, self.down_bias)
        biases = (name if getattr(module, name, None) is not None else "" for name in names)
        return ExpertsForm(self.gate_up, self.down, *biases)


@dataclass(frozen=True)
class Recipe:
    """How one experts module runs. It stays on the module, where `experts_forward` reads it."""

    form: ExpertsForm
    gate: str
    """The activation function, a name of meta.formats.ACTIVATIONS."""
    a_format: str | None
    """How activations are quantised for the products. None chooses by device at each run."""
    trainable_inputs: bool = False
    """True if gradients pass to the hidden states and the routing weights."""
    part: Part | None = None
    """This process's part of the experts, if it does not have all."""
    interleaved_gate: str = field(init=False)
    """The same activation for interleaved rows gate 0, up 0, gate 1, ... It is stored, so that torch.compile
    need not compute it."""

    def __post_init__(self) -> None:
        own = known_activation(self.gate)
        turned = replace(own, interleaved=own.gated)
        object.__setattr__(self, "interleaved_gate", activation_name(turned) or "")


def auto_a_format(device_type: str, layout: str = "plain") -> str:
    """Returns how activations are quantised on a device: int8 on a CPU. On Hopper the kernels choose by
    the number of tokens, or always fp8 for int4 weights. On other devices it is the model's own dtype."""
    if device_type == "cpu":
        return "int8"
    formats = LAYOUTS[layout].a_formats or ("none",)
    if "none" not in formats:
        return formats[0]
    return "auto" if "auto" in formats else "none"


def interleave(rows: Tensor) -> Tensor:
    """Reorders [E, 2 I, ...] from all gates before all ups to gate 0, up 0, gate 1, ..."""
    e, n = rows.shape[:2]
    return rows.reshape(e, 2, n // 2, *rows.shape[2:]).transpose(1, 2).reshape(rows.shape)


def deinterleave(rows: Tensor) -> Tensor:
    """Undoes `interleave`."""
    e, n = rows.shape[:2]
    return rows.reshape(e, n // 2, 2, *rows.shape[2:]).transpose(1, 2).reshape(rows.shape)


@dataclass
class Half:
    """The gate or the up of one expert that arrived alone and waits for the other (new_weights.py)."""

    rows: Tensor
    largest: Tensor
    """Its largest magnitude over all processes, float32 [1]."""
    state: str = "waiting"
    """"read": the weights were used while it waited, so it may belong to an update that was interrupted.
    "kept": it is the second of two halves, and was kept because the first one was "read"."""


class PackedWeight(nn.Module):
    """The 4-bit form of an expert weight [E, N, K], in place of its Parameter.

    Buffers: packed uint8 [E, N, K/2], block_scale [E, N, ceil(K/block)], global_scale float32 [E] (nvfp4).
    float8 block scales are stored as uint8. Calling the module returns these three, as `torch.ops.fp4.*` take
    them. Libraries that move weights when they are needed (offloading) hook into this call.

    A kernel layout may pad K; `k` is the K of the weight itself. `interleaved`: while in layout sm90, row 2i
    is gate i and row 2i + 1 is up i, although the model keeps all gates before all ups. Every other layout
    has the model's order. `.to(device)` moves the buffers and reorders them for that device. `.to(dtype)` and
    `.half()` do not change them.

    The state dict contains format and layout, so weights that were saved on one device load on another. It
    also contains `part`, the part of a weight that this process holds, because another process's share has
    the same shapes. `method`: how new values are quantised, the same as for the first values
    (`fp4_ops.quantization.METHODS`).
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        block_scale: Tensor,
        global_scale: Tensor | None,
        format: str,
        layout: str,
        k: int | None = None,
        interleaved: bool = False,
        part: Part | None = None,
        method: str = "rtn",
    ) -> None:
        super().__init__()
        self.format, self.layout, self.interleaved = format, layout, interleaved
        self.part, self.method = part, method
        self.k = 2 * packed.shape[-1] if k is None else k
        self.register_buffer("packed", byte_view(packed))
        self.register_buffer("block_scale", byte_view(block_scale))
        self.register_buffer("global_scale", global_scale)
        if part is not None:
            rank = torch.tensor([part.rank], dtype=torch.int32, device=packed.device)
            self.register_buffer("owner", rank, persistent=False)

    def forward(self) -> Operands:
        """Returns packed, block_scale and global_scale."""
        return self.packed, block_scales(self.block_scale, self.format, self.layout), self.global_scale

    def copy_(self, *_: object) -> None:
        """Raises AttributeError, because codes cannot hold 16-bit values."""
        raise AttributeError(
            "fp4: the weight is in 4 bits, so values cannot be copied or assigned to it. Give them to "
            "fp4_ops.update(model, name, tensor) or model.load_state_dict, which quantise them"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":  # nn.Module would keep it, and nothing would read it
            self.copy_(value)
        super().__setattr__(name, value)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.block_scale, self.global_scale) if t is not None)

    def check_owner(self) -> None:
        """Raises RuntimeError if another process's share overwrote this one's: a program that broadcasts a
        module's buffers also writes `owner`. On a GPU, where reading is slow, `owner` is read only after
        writes."""
        owner = self._buffers["owner"]
        if type(owner) is not Tensor or owner.is_meta:
            return
        version = 0 if self.packed.is_inference() else self.packed._version  # inference tensors have none
        if owner.is_cuda and version == self.__dict__.get("_seen", 0):
            return
        self.__dict__["_seen"] = version
        if self.part is not None and int(owner) != self.part.rank:
            raise RuntimeError(
                f"fp4: this process held {self.part}, and those of rank {int(owner)} were written over them: "
                "buffers were broadcast. Call prepare or load_checkpoint anew, then DistributedDataParallel "
                "with the model itself, not with a module around it, or leave out the buffers of the experts"
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight [E, N, K] that the codes represent."""
        note_read(self)
        values = torch.ops.fp4.dequantize(*self(), self.format, dtype, layout=self.layout)
        values = values[..., : self.k]
        return deinterleave(values) if self.interleaved else values

    def in_layout(self, layout: str) -> Operands:
        """Returns packed, block_scale and global_scale in another layout."""
        operands: Operands = self()
        if same_bytes(layout, self.layout):
            return operands
        packed, scale, factor = relayout(operands, self.format, self.k, self.layout, layout)
        if not self.interleaved:
            return packed, scale, factor
        if layout != "plain":
            raise ValueError(f"fp4: interleaved rows go to layout 'plain' first, not to '{layout}'")
        return deinterleave(packed), deinterleave(byte_view(scale)).view(scale.dtype), factor

    def become_parameters(self) -> None:
        """Makes packed and block_scale Parameters, because FSDP shards only these. Their layout is then
        fixed."""
        for name in ("packed", "block_scale"):
            if name in self._buffers:
                tensor: Any = self._buffers.pop(name)
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def set_layout(self, layout: str) -> None:
        """Converts the buffers to another layout."""
        if same_bytes(layout, self.layout):
            self.layout = layout
            return
        if self._parameters:
            raise ValueError(f"fp4: the 4-bit weights need layout '{layout}' there, {IN_PLACE}")
        if self.interleaved and layout != "plain":
            self.set_layout("plain")
        packed, scale, self.global_scale = self.in_layout(layout)
        self.packed, self.block_scale = byte_view(packed), byte_view(scale)
        self.layout, self.interleaved = layout, False

    @property
    def shared_layout(self) -> SharedLayout:
        """Returns the weights that one operator reads together with this one."""
        return self.__dict__.get("_company") or SharedLayout([self])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        old, new = self.packed.device.type, fn(self.packed.new_empty(0)).device.type
        if old != new:
            self.set_layout("plain")  # while the weights are on the device of the old layout
        if self._parameters:
            self._apply_to_parameters(fn, recurse)
        for name, buffer in list(self._buffers.items()):
            if buffer is not None:  # as bytes: a new dtype must not change codes
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)
        self.shared_layout.follow(fn, moved=old != new)
        return self

    def _apply_to_parameters(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Applies `fn` to parameters as torch does: conversions do not change uint8, and FSDP puts its own
        tensors here."""
        buffers, self._buffers = self._buffers, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers = buffers

    def get_extra_state(self) -> Tensor:
        """Returns format, layout and part as a tensor, so that any checkpoint file can hold them."""
        how = [STORED_FORMATS.index(self.format), list(LAYOUTS).index(self.layout), self.interleaved]
        if self.part is None:
            return torch.tensor(how, dtype=torch.uint8, device="cpu")
        return torch.tensor([*how, *self.part.numbers], dtype=torch.int32, device="cpu")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Makes room for weights that were saved in another layout. `set_extra_state` then reorders them."""
        extra = state_dict.get(prefix + "_extra_state")
        if extra is not None and not isinstance(extra, Tensor):
            # torch.distributed.checkpoint's placeholder: the state dict holds this module's own buffers.
            state_dict[prefix + "_extra_state"] = self.get_extra_state()
        if state_dict.get(prefix + "packed", self.packed) is not self.packed:
            self.__dict__.pop("_halves", None)
        for name in ("packed", "block_scale"):
            if (saved := state_dict.get(prefix + name)) is not None:  # float8 in older state dicts
                state_dict[prefix + name] = byte_view(saved)
        state, packed, scale = (state_dict.get(prefix + n) for n in ("_extra_state", "packed", "block_scale"))
        complete = state is not None and packed is not None and scale is not None
        if state is not None and (words := self._of_another_part(state)):
            args[-1].append(f"{prefix.rstrip('.')}: {words}")
            return
        if (
            self._parameters
            and state is not None
            and not same_bytes(list(LAYOUTS)[int(state[1])], self.layout)
        ):
            args[-1].append(f"{prefix.rstrip('.')}: saved in another layout than '{self.layout}', {IN_PLACE}")
            return
        if complete and STORED_FORMATS[int(state[0])] == self.format:
            fmt, layout = FORMATS[self.format], list(LAYOUTS.values())[int(state[1])]
            e, n, _ = self.packed.shape
            own = scale.dtype if scale.dtype in fmt.scale_dtypes else None
            spec = packed_spec(fmt, layout, (e,), n, self.k, own)
            if packed.shape != spec[0][0]:
                *_, errors = args
                text = f"{list(packed.shape)} was saved, this model's is {list(spec[0][0])}"
                errors.append(f"size mismatch for {prefix}packed: {text}")
                return
            for name, wanted in zip(("packed", "block_scale", "global_scale"), (*spec, None), strict=False):
                if name in self._parameters:
                    continue  # they stay in one layout, which set_extra_state checks
                buffer = self._buffers[name]
                if wanted is None:
                    self._buffers[name] = None
                else:
                    shape, dtype = wanted[0], torch.uint8 if wanted[1].itemsize == 1 else wanted[1]
                    if buffer is None or (buffer.shape, buffer.dtype) != (shape, dtype):
                        self._buffers[name] = self.packed.new_empty(shape, dtype=dtype)
        if isinstance(own := state_dict.get(prefix + "weight"), Tensor):
            args[-1].append(
                f"fp4: {prefix}weight is {own.dtype} and the weight is in 4 bits; load it through the "
                "experts module or the whole model, or give it to fp4_ops.update(model, name, tensor)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _of_another_part(self, state: Tensor) -> str:
        """Returns why weights with this extra state do not belong to this process, or "" if they do."""
        saved = Part.of_numbers(state.tolist()[3:])
        if saved is None and self.part is None:
            return ""
        if saved is not None and self.part is not None and saved.numbers == self.part.numbers:
            return ""
        saved_part, own = (str(part) if part else "all experts, whole" for part in (saved, self.part))
        return (
            f"the state dict has {saved_part}, and this process holds {own}. Each process must load what it "
            "saved itself, among as many processes; or load the model anew and prepare it"
        )

    def set_extra_state(self, state: Tensor) -> None:
        """Reads the format, layout and part of the loaded buffers. torch calls it after it has loaded
        them."""
        format, layout = STORED_FORMATS[int(state[0])], list(LAYOUTS)[int(state[1])]
        if format != self.format:
            raise ValueError(
                f"fp4: the weights to load are {format}; this model was prepared as {self.format}. "
                "Prepare it "
                f"with format={format!r}"
            )
        own, self.layout = self.layout, layout
        wanted, self.interleaved = self.interleaved, len(state) > 2 and bool(state[2])
        if wanted != self.interleaved:
            self.set_layout("plain")
        self.set_layout(own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("part", None)  # older pickles
        self.__dict__.setdefault("method", "rtn")
        self.block_scale = byte_view(self.block_scale)  # float8 in older pickles
        register()  # a model that was pickled whole may be the first use of fp4_ops in its process

    def extra_repr(self) -> str:
        e, n, _ = self.packed.shape
        return f"experts={e}, n={n}, k={self.k}, format={self.format!r}, layout={self.layout!r}"


class SharedLayout:
    """The weights of one experts module. They share one layout that suits all of them and their activations.

    `dtype`: the dtype of the activations, None if unknown. `a_format`: how they will be quantised, as an
    argument of `fp4::moe`. `batch_invariant`: True if the kernels of the layout must be batch invariant.
    """

    batch_invariant = False
    """Default for models that older releases pickled."""

    def __init__(
        self,
        weights: list[PackedWeight],
        dtype: torch.dtype | None = None,
        a_format: str = "none",
        batch_invariant: bool = False,
    ) -> None:
        self.weights, self.dtype, self.a_format = weights, dtype, a_format
        self.batch_invariant = batch_invariant

    def join(self) -> None:
        """Connects the weights, so that they keep one layout wherever they move."""
        for weight in self.weights:
            weight.__dict__["_company"] = self

    def settle(self, device_type: str | None = None) -> str:
        """Converts all weights to the fastest layout. If it cannot hold their scales, converts them to layout
        plain and returns the reason, else "".

        device_type: the device whose kernels will read them. None means the device where they are.
        """
        first, reason = self.weights[0], ""
        layout = preferred_layout(
            device_type or first.packed.device.type, *((w.packed.shape[-2], w.k) for w in self.weights),
            dtype=self.dtype, format=first.format, a_format=self.a_format,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        try:
            self._set(layout)
        except (RuntimeError, ValueError) as error:  # the layout cannot represent these scales
            if self.batch_invariant:
                raise ValueError(
                    f"fp4: batch_invariant=True, and {error}. Leave batch_invariant out"
                ) from None
            reason = str(error)
            self._set("plain")
        return reason

    def _set(self, layout: str) -> None:
        for weight in self.weights:
            weight.set_layout(layout)

    def follow(self, fn: Callable[[Tensor], Tensor], moved: bool) -> None:
        """Updates the layout after `fn` moved a weight to another device (`moved`) or changed its dtype."""
        old = self.dtype
        if old is not None:
            self.dtype = fn(torch.empty(0, dtype=old, device=self.weights[0].packed.device)).dtype
        devices = {w.packed.device for w in self.weights}  # several devices while a module is being moved
        if (moved or old != self.dtype) and len(devices) == 1 and devices.pop().type != "meta":
            self.settle()


Company = SharedLayout
"""The old name, in models that older releases pickled."""


def note_read(weight: nn.Module) -> None:
    """Marks waiting halves of gate and up as read, because the weights were used meanwhile."""
    waiting: dict[int, dict[str, Half]] = weight.__dict__.get("_halves", {})
    for halves in waiting.values():
        for half in halves.values():
            if half.state == "waiting":
                half.state = "read"


def _operands(weight: Any) -> Operands:
    """Returns `weight()`, without `nn.Module.__call__` if nothing hooks into it."""
    own = weight.__dict__
    if "_halves" in own:
        note_read(weight)
    if (
        type(weight) is not PackedWeight
        or "forward" in own  # accelerate's offloading
        or own["_parameters"]  # FSDP may put parameters here
        or own["_forward_pre_hooks"] or own["_forward_hooks"]
        or own["_backward_hooks"] or own["_backward_pre_hooks"]
        or _every_module._global_forward_pre_hooks or _every_module._global_forward_hooks
        or _every_module._global_backward_hooks or _every_module._global_backward_pre_hooks
    ):  # fmt: skip
        whole: Operands = weight()
        return whole
    buffers = own["_buffers"]
    scale = block_scales(buffers["block_scale"], own["format"], own["layout"])
    return buffers["packed"], scale, buffers["global_scale"]


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs experts, as transformers' implementation `fp4`: hidden_states [T, H], top_k_index and
    top_k_weights [T, k] -> [T, H].

    Modules that were not prepared share the model's config, so they come here, too. They run as before.
    """
    recipe: Recipe | None = getattr(self, "_fp4_recipe", None)
    if recipe is None:
        return _previous_forward(self)(self, hidden_states, top_k_index, top_k_weights)
    tokens = recipe.part.tokens if recipe.part is not None else ""
    return run_experts(self, recipe, hidden_states, top_k_index, top_k_weights, tokens)


def _lost(module: nn.Module, attribute: str) -> RuntimeError:
    """Returns the error of an experts module that has lost a 4-bit weight."""
    return RuntimeError(
        f"fp4: {attribute} of {type(module).__name__} was deleted or replaced, and these experts run only "
        "with a weight in 4 bits. Give new values to fp4_ops.update(model, name, tensor) or "
        "model.load_state_dict, which quantise them; or load the model anew and prepare it"
    )


def run_experts(
    module: nn.Module,
    recipe: Recipe,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    tokens: str,
) -> Tensor:
    """Runs a prepared module. `tokens` is as in `fp4::moe_ep`, with ids of all experts; "" means ids of
    this process's experts."""
    form = recipe.form
    modules: Any = module._modules  # faster than nn.Module.__getattr__
    w13, w2 = modules.get(form.gate_up), modules.get(form.down)
    if w13 is None or w2 is None:
        raise _lost(module, form.gate_up if w13 is None else form.down)
    bias = getattr(module, form.gate_up_bias) if form.gate_up_bias else None
    down_bias = getattr(module, form.down_bias) if form.down_bias else None
    if recipe.part is not None:  # weights under FSDP are DTensors
        bias, down_bias = (None if b is None else local(b) for b in (bias, down_bias))
    gate = recipe.gate
    if type(hidden_states) is Tensor and not torch.compiler.is_compiling():
        if recipe.part is not None:
            w13.check_owner()
            w2.check_owner()
        up, down = _operands(w13), _operands(w2)
    else:  # tracing must see the modules
        up, down = w13(), w2()
    if w13.interleaved:
        bias, gate = interleave(bias) if bias is not None else None, recipe.interleaved_gate
    a_format = recipe.a_format
    if a_format is None:
        a_format = auto_a_format(hidden_states.device.type, w13.layout)
    operands = (*up, *down, bias, down_bias)
    slots: Any = modules.get(SLOTS)
    if slots is not None and slots.slots is not None:
        out: Tensor = call(
            _MOE_SLOTS, hidden_states, top_k_index, top_k_weights, *operands, slots.slots, slots.state,
            format=w13.format, layout=w13.layout, activation=gate, a_format=a_format,
        )  # fmt: skip
        return out
    if tokens:
        part = recipe.part
        assert part is not None
        out = torch.ops.fp4.moe_ep(
            hidden_states, top_k_index, top_k_weights, *operands,
            num_experts=part.experts, tokens=tokens, group_name=part.group_name,
            format=w13.format, layout=w13.layout, activation=gate, a_format=a_format,
        )  # fmt: skip
        return out
    if recipe.trainable_inputs and torch.is_grad_enabled():
        options = {"format": w13.format, "layout": w13.layout, "activation": gate, "a_format": a_format}
        out = FrozenExperts.apply(hidden_states, top_k_index, top_k_weights, options, *operands)
        return out
    out = call(
        _MOE, hidden_states, top_k_index, top_k_weights, *operands,
        format=w13.format, layout=w13.layout, activation=gate, a_format=a_format,
    )  # fmt: skip
    return out


def slot_weights(module: Any) -> list[Tensor | None]:
    """Returns the weights and biases that `fp4::moe_slots` gets from a prepared module."""
    form = module._fp4_recipe.form
    weights = [t for name in (form.gate_up, form.down) for t in module._modules[name]()]
    return [
        *weights,
        *(getattr(module, name) if name else None for name in (form.gate_up_bias, form.down_bias)),
    ]


def _previous_forward(module: nn.Module) -> Callable[..., Tensor]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own: Callable[..., Tensor] = type(module).forward.__wrapped__  # type: ignore[attr-defined]  # under transformers' decorator
    previous = getattr(module, "_fp4_previous", "eager")
    chosen: Callable[..., Tensor] = own if previous == "eager" else ALL_EXPERTS_FUNCTIONS[previous]
    return chosen


def register() -> None:
    """Registers `fp4` in transformers, and keeps its other implementations from running 4-bit experts."""
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    cls: Any = PreTrainedModel
    setter = cls.set_experts_implementation
    if not hasattr(setter, "_fp4"):
        cls.set_experts_implementation = checked = functools.wraps(setter)(_checked(setter))
        checked._fp4 = True  # type: ignore[attr-defined]


def _checked(setter: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `set_experts_implementation`: for 4-bit weights it accepts only ours."""

    def set_experts_implementation(self: nn.Module, experts_implementation: Any) -> Any:
        named = experts_implementation
        names = set(named.values()) if isinstance(named, dict) else {named}
        packed = next((name for name, m in self.named_modules() if hasattr(m, "_fp4_recipe")), None)
        if packed is not None and names != {IMPLEMENTATION}:
            raise ValueError(
                f"fp4: set_experts_implementation({named!r}): {packed} holds 4-bit weights, which only "
                f"'{IMPLEMENTATION}' runs, and prepare has set that. For another one load the model anew."
            )
        return setter(self, experts_implementation)

    return set_experts_implementation
