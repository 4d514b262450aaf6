"""Supports FSDP2 around a prepared model. FSDP2 shards only parameters, and packed weights are buffers."""

from __future__ import annotations

from torch import nn

from ..experts.packed import PackedWeight


def packed_as_parameters(model: nn.Module) -> int:
    """Makes the 4-bit expert weights of a prepared model uint8 Parameters without gradients, in place.

    Call it between `prepare` or `load_checkpoint` and `torch.distributed.fsdp.fully_shard`. Each process then
    keeps about 1/R of the weights, as whole experts, and FSDP gathers the weights of a layer while the layer
    runs. Without this call each process keeps all weights; results are the same. From then on the weights
    keep their device and their layout.

    Returns the bytes that became parameters. Global scales, one number for each expert, stay buffers. Raises
    ValueError for a model without such weights, and for a model whose experts are already spread or split:
    their parts are different weights on each process, but FSDP would treat them as one.
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
