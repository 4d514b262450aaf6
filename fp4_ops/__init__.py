"""4-bit Mixture-of-Experts for stock PyTorch.

    torch.compile(model, backend="fp4")

Operators are `torch.ops.fp4.*` (schemas: csrc/schema.cpp); what each argument means is in docs/operators.md.
"""

from . import _library

_library.load()
