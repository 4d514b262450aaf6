"""Checks that the installed wheel computes and that torch finds its backend. `make wheel` runs it in a new
environment."""

import torch

compiled = torch.compile(torch.nn.ReLU(), backend="fp4")
x = torch.randn(4, 64)
with torch.no_grad():
    assert torch.equal(compiled(x), x.relu())

w = torch.randn(96, 64)
packed, block_scale, global_scale = torch.ops.fp4.quantize(w, "nvfp4")
exact = torch.ops.fp4.dequantize(packed, block_scale, global_scale, "nvfp4", torch.float64)
out = torch.ops.fp4.mm(x, packed, block_scale, global_scale, format="nvfp4")
want = x.double() @ exact.T
error = ((out - want).norm() / want.norm()).item()
assert error < 1e-5, error
print(f"the wheel works: torch {torch.__version__}, error {error:.1e}")
