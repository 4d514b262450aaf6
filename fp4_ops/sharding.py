"""Supports FSDP2 around a prepared model. FSDP2 shards only parameters, and packed weights are buffers."""

from __future__ import annotations

from torch import nn

from .experts import PackedWeight


def packed_as_parameters(model: nn.Module) -> int:
    """Makes uint8 Parameters, without gradients, of the 4-bit expert weights of a prepared model, in place.

    Call it between `prepare` or `load_checkpoint` and `torch.distributed.fsdp.fully_shard`: each process then
    keeps about 1/R of them, whole experts, and FSDP gathers a layer's while it runs. Without it each process
    keeps all, and results are the same. The weights keep their device and their layout from then on.

    Returns the bytes that became parameters; global scales, a number an expert, stay buffers. Raises
    ValueError for a model without such weights, and for one whose experts are spread or split already:
    their parts are different weights on each process, which FSDP takes to be one.
    """
    weights = {name: m for name, m in model.named_modules() if isinstance(m, PackedWeight)}
    if not weights:
        raise ValueError("fp4: packed_as_parameters: the model has no 4-bit experts. Call prepare first")
    for name, weight in weights.items():
        if weight.part is not None:
            raise ValueError(
                f"fp4: packed_as_parameters: {name} has {weight.part}. FSDP leaves them as they are, which "
                "is right; call fully_shard alone"
            )
    for weight in weights.values():
        weight.become_parameters()
    return sum(p.nbytes for weight in weights.values() for p in weight.parameters())
