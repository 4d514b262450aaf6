"""The format tables in Python and C++ agree with the reference."""

from __future__ import annotations

from dataclasses import replace

import reference
import torch

import fp4_ops.meta.fakes
from fp4_ops.meta.formats import (
    A_FORMATS,
    ACTIVATIONS,
    E2M1_VALUES,
    ELEMENTS,
    FORMATS,
    activation_name,
    find_activation,
)
from fp4_ops.meta.layouts import LAYOUTS

fp4 = torch.ops.fp4


def test_the_python_table():
    assert sorted(FORMATS) == sorted(reference.FORMATS)
    assert torch.equal(torch.tensor(E2M1_VALUES, dtype=torch.float64), reference.E2M1[:8])
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert fmt.block == reference.BLOCK[name] and fmt.scale_dtype == reference.SCALE_DTYPE[name]
        assert fmt.has_global_scale == (name == "nvfp4")
        assert [fmt.num_blocks(k) for k in (1, fmt.block, fmt.block + 1)] == [1, 1, 2]
        assert fmt.bytes_per_weight() == 0.5 + {"nvfp4": 1 / 16, "mxfp4": 1 / 32}.get(name, 2 / fmt.block)
        assert torch.equal(torch.tensor(ELEMENTS[fmt.element], dtype=torch.float64), reference.VALUES[name])


def test_the_cpp_table_is_its_twin():
    """Every format the Python table has, the C++ kernels know with the same block, scale and second scale."""
    for name, fmt in FORMATS.items():
        x = torch.randn(3, 4, 2 * fmt.block + 2)
        packed, scale, global_scale = fp4.quantize(x, name)
        assert scale.dtype == fmt.scale_dtype and scale.shape[-1] == fmt.num_blocks(x.shape[-1]) == 3
        assert (global_scale.numel() > 0) == fmt.has_global_scale
        # one block's scale moves that block's values and no others
        scale.view(torch.int16 if scale.itemsize == 2 else torch.uint8)[..., 1] += 1
        before = fp4.dequantize(packed, *fp4.quantize(x, name)[1:], name, torch.float64)
        after = fp4.dequantize(packed, scale, global_scale, name, torch.float64)
        changed = (before != after).any(0).any(0).nonzero().flatten()
        assert fmt.block <= changed.min() and changed.max() < 2 * fmt.block


def test_the_cpp_names():
    """The C++ kernels list the same formats, layouts, activations and activation formats."""
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1).to(torch.float8_e4m3fn)

    def message(call) -> str:
        try:
            call()
        except RuntimeError as error:
            return str(error)
        raise AssertionError("no error")

    one = torch.ones(())
    text = message(lambda: fp4.dequantize(codes, scale, one, "no", torch.float32))
    assert text == f"format is 'no'; it must be one of: {', '.join(sorted(FORMATS))}"
    text = message(lambda: fp4.dequantize(codes, scale, one, "nvfp4", torch.float32, layout="no"))
    assert text == f"layout is 'no'; it must be one of: {', '.join(sorted(LAYOUTS))}"

    w13 = fp4.quantize(torch.randn(1, 32, 16), "nvfp4")
    w2 = fp4.quantize(torch.randn(1, 16, 16), "nvfp4")
    x, ids, weights = torch.randn(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for what, names in (("activation", ACTIVATIONS), ("a_format", A_FORMATS)):
        text = message(lambda what=what: fp4.moe(x, ids, weights, *w13, *w2, format="nvfp4", **{what: "no"}))
        assert text == f"{what} is 'no'; it must be one of: {', '.join(sorted(names))}"
        for name in names:
            up = w13 if what != "activation" or ACTIVATIONS[name].gated else w2
            assert fp4.moe(x, ids, weights, *up, *w2, format="nvfp4", **{what: name}).shape == (1, 16)


NUMBERS = (
    "1",
    "0.5",
    "7.",
    "1e3",
    "2.5e-3",
    "1e+3",
    "1e400",
    "1e-400",
    "+1",
    "-1",
    "0",
    ".5",
    "1e",
    "0x1",
    "",
)


def test_activations_with_a_limit():
    """Python and C++ read the same names, and refuse the same; a name is found under the name made of it."""
    w13 = fp4.quantize(torch.randn(1, 32, 16), "nvfp4")
    w2 = fp4.quantize(torch.randn(1, 16, 16), "nvfp4")
    x, ids, weights = torch.randn(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    taken = 0
    for name in (f"{base}(limit={n})" for base in ("silu", "gelu_interleaved", "swigluoai") for n in NUMBERS):
        found = find_activation(name)
        try:
            fp4.moe(x, ids, weights, *w13, *w2, format="nvfp4", activation=name)
        except RuntimeError:
            assert found is None, name
            continue
        assert found is not None, name
        again = find_activation(activation_name(found))
        assert again is not None and replace(again, name=name) == found
        taken += 1
    assert taken == 3 * 6
    assert activation_name(find_activation("swigluoai(limit=7)")) == "swigluoai"
    assert activation_name(replace(ACTIVATIONS["swigluoai"], interleaved=False, limit=10.0)) == (
        "swigluoai_halves(limit=10)"
    )
    assert activation_name(replace(ACTIVATIONS["silu"], alpha=1.5)) is None


def test_every_schema_has_a_fake_in_the_same_order():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fp4::")]
    computing = {n.removeprefix("fp4::") for n in names} - {"cpu_capability", "cpu_threads"}
    assert computing == set(fp4_ops.meta.fakes.OPERATORS)
    for name in computing:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fp4::{name}", "CPU"), name
