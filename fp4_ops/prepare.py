"""Defines `prepare`, which replaces the expert weights of a model by 4-bit ones in place and frees the
originals."""

from __future__ import annotations

from typing import Any

from torch import nn

from .distributed.workspace import MAX_TOKENS
from .experts.find import check_model
from .models.expert_slots import check_placement, place_experts
from .models.fp8_linear import FP8
from .models.outside_experts import KEEP, find_outside
from .models.pack_experts import pack_experts
from .models.prepare_report import PrepareReport
from .quantization import Calibration


def prepare(
    model: nn.Module,
    format: str = "nvfp4",
    activation: str = "auto",
    *,
    attention: str = KEEP,
    dense: str = KEEP,
    head: str = KEEP,
    method: str = "rtn",
    calibration: Calibration | None = None,
    trainable_inputs: bool = False,
    ep_group: Any = None,
    max_tokens: int = MAX_TOKENS,
    batch_invariant: bool = False,
    gpu_memory: int | str | None = None,
) -> PrepareReport:
    """Replaces the expert weights of a transformers model by 4-bit ones, in place. The originals are freed.

    Afterwards every experts module calls `torch.ops.fp4.moe`, in eager mode and under torch.compile,
    torch.export and generate(). Weights are quantised one expert at a time, so the extra memory is less than
    one weight tensor. A calibrated method needs extra memory for all packed weights.

    model: a model, or a part of one, with transformers experts modules; weights float32, bfloat16 or float16.
        Experts that are modules of their own, in a ModuleList or ModuleDict called `experts` (transformers
        4), keep their code. The weights of their Linears become FP4Tensors, with one product each;
        backend="fp4" turns these into one `fp4::moe`. Their activations stay in the model's dtype, and
        calibrated methods do not work for them.
    format: a name of `fp4_ops.meta.formats.FORMATS`: "nvfp4", "mxfp4", "int4", "int4_g64" or "int4_g32".
    activation: how activations are quantised for the products. "bf16" leaves them in the model's dtype.
        "int8" quantises them in blocks of 32 on a CPU. On GPUs except Hopper it uses blocks of 128, only for
        many tokens, and rounds the weights to int8, too. "fp8" quantises them by rows (CPU, Hopper).
        "nvfp4" and "mxfp4" quantise them to the FP4 format of the weights: every device can compute this,
        Blackwell's tensor cores multiply it directly, and it reduces the accuracy (docs/accuracy.md). "auto"
        is int8 on a CPU. On Hopper it is the model's dtype for few tokens and fp8 for many, or always fp8 for
        int4 weights. On other devices it is the model's dtype.
    attention, dense, head: formats for the nn.Linear layers outside the experts. "keep" leaves them as they
        are; a 4-bit format packs their weights, and "fp8" puts them into e4m3 with a float32 scale for each
        row (docs/accuracy.md). "attention" means layers with "attn" or "attention" in their names, "head"
        means the output head, and "dense" means all others (shared experts, dense layers). Routers and
        embeddings always stay. The activations of these layers stay in the model's dtype. Method "rtn" rounds
        these weights, whatever `method` says.
    method: how the experts' weights are quantised, a name of `fp4_ops.quantization.METHODS`: see
        docs/accuracy.md.
    calibration: for the methods that need it, from `fp4_ops.quantization.calibrate(model, tokens)`.
    trainable_inputs: True lets gradients pass through the experts to their inputs, to train adapters (LoRA)
        and layers before them. The experts themselves are frozen and get no gradient. Without it, a backward
        through the experts is an error.
    ep_group: a torch.distributed process group over which the experts are spread. This process then keeps
        its own experts and calls `fp4::moe_ep` with its own tokens. All processes of the group must run the
        model's blocks equally often. None: each process has all experts, or the part of them that
        transformers gave it (DTensors, by `DistributedConfig(tp_size, ep_size)`) and whose results
        transformers adds up. See docs/several_gpus.md.
    max_tokens: for experts that are spread over GPUs of one node: the largest number of tokens that a process
        sends to a block at once over NVLink. It determines the size of the buffers. Calls with more tokens
        use torch.distributed's collectives.
    batch_invariant: True makes a token's results in 4 bits independent of the rest of its batch, bit for bit.
        It is slower where the usual kernels for many tokens sum in another order
        (docs/operators.md#batch-invariance). The rest of the model computes as before. ValueError if the
        device has no such kernels, or if layers are to be in fp8, whose results depend on the number of rows.
    gpu_memory: for a model in host memory whose experts do not fit on the GPU: how much of the GPU's memory
        to use, as bytes or text ("20GiB"). The model then moves to the current GPU, except the experts. They
        stay in pinned host memory, and the rest of the budget becomes slots for the experts in use
        (docs/larger_than_the_gpu.md). ValueError if the budget is too small; the model is then prepared, and
        stays where it is. Without a GPU everything stays in host memory.

    Returns a report with one entry for each experts module. Modules that fp4::moe cannot express are left
    alone and keep running as before; the report says why. Raises ValueError if nothing could be prepared, or
    if weights are on the meta device or hold NaN or infinity; the model is then unchanged.
    """
    check_model(model)
    if gpu_memory is not None:
        check_placement(gpu_memory, trainable_inputs, ep_group)
    outside = find_outside(
        model, {"attention": attention, "dense": dense, "head": head}, trainable_inputs, batch_invariant
    )
    report = pack_experts(
        model, format, activation, method=method, calibration=calibration, trainable_inputs=trainable_inputs,
        ep_group=ep_group, max_tokens=max_tokens, batch_invariant=batch_invariant,
    )  # fmt: skip
    report.outside = outside.pack()
    in_fp8 = any(weights.format == FP8 for weights in report.outside)
    if hasattr(model, "save_pretrained") and (in_fp8 or any(m.calls_moe for m in report.modules)):
        from .integrations.transformers.quantizer import attach  # which imports transformers

        attach(model, report, format, activation, trainable_inputs, batch_invariant)
    if gpu_memory is not None:
        report.memory = place_experts(model, gpu_memory)
    return report
