"""`prepare`: swaps the expert weights of a model for 4-bit ones, in place, and frees the originals."""

from __future__ import annotations

from typing import Any

from torch import nn

from .distributed.workspace import MAX_TOKENS
from .outside_experts import KEEP, find_outside
from .pack_experts import pack_experts
from .prepare_report import PrepareReport
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
) -> PrepareReport:
    """Replaces the expert weights of a transformers model by 4-bit ones, in place; the originals are freed.

    Afterwards every experts module calls `torch.ops.fp4.moe`, in eager mode, under torch.compile,
    torch.export and generate() alike. Weights are taken one expert at a time, so the extra memory needed
    meanwhile is less than one weight tensor; with a calibrated method, that of all packed weights.

    model: a model, or a part of one, with transformers experts modules; weights float32, bfloat16 or float16.
        Experts that are modules of their own, in a ModuleList or ModuleDict called `experts` (transformers
        4), keep their code: their Linears' weights become FP4Tensors, one product each, of which
        backend="fp4" makes one `fp4::moe`. Their activations stay in the model's dtype, with no calibrated
        method.
    format: a name of `fp4_ops.meta.formats.FORMATS`: "nvfp4", "mxfp4", "int4", "int4_g64" or "int4_g32".
    activation: how activations enter the products. "bf16" leaves them in the model's dtype, "int8" quantises
        them in blocks of 32 on a CPU, of 128 on GPUs but Hopper (of many tokens; the weights are rounded to
        int8, too), "fp8" by rows (CPU, Hopper). "nvfp4" and "mxfp4" quantise them to
        the FP4 that the weights have: every device computes that, Blackwell's tensor cores multiply it, and
        it costs accuracy (docs/accuracy.md). "auto" is int8 on a CPU; on Hopper the model's dtype for few
        tokens and fp8 for many, or always fp8 for int4; elsewhere the model's dtype.
    attention, dense, head: what becomes of the nn.Linear layers outside the experts. "keep" leaves them as
        they are; a format packs their weights. "attention" means layers with "attn" or "attention" in their
        names, "head" means the output head, and "dense" means all others (shared experts, dense layers).
        Routers and embeddings always stay. Activations stay in the model's dtype there. Method "rtn" rounds
        these weights, whatever `method` says.
    method: how the experts' weights are quantised, a name of `fp4_ops.quantization.METHODS`: see
        docs/accuracy.md.
    calibration: for the methods that need it, from `fp4_ops.quantization.calibrate(model, tokens)`.
    trainable_inputs: gradients pass through the experts to what goes into them, so that adapters (LoRA) and
        layers before them can be trained. The experts themselves are frozen: they have no gradient. Without
        it, a backward through the experts is an error.
    ep_group: a torch.distributed process group, over which the experts are spread: this process keeps its
    own, and
        calls `fp4::moe_ep` with tokens of its own. All its processes must run the model's blocks equally
        often.
        None: each process has all experts, or the part of them that transformers gave it (DTensors, by
        `DistributedConfig(tp_size, ep_size)`), whose results transformers adds up. See docs/several_gpus.md.
    max_tokens: of experts that are spread over GPUs of one node, the most tokens that a process brings to a
        block at once by NVLink: it sizes the buffers. Calls with more go by torch.distributed's collectives.

    Returns a report with one entry for each experts module; those that fp4::moe cannot express are left
    alone and keep running as before, with the reason in the report. Raises ValueError if nothing could be
    prepared, if weights are on the meta device or hold NaN or infinity; the model is then unchanged.
    """
    outside = find_outside(model, {"attention": attention, "dense": dense, "head": head}, trainable_inputs)
    report = pack_experts(
        model, format, activation, method=method, calibration=calibration, trainable_inputs=trainable_inputs,
        ep_group=ep_group, max_tokens=max_tokens,
    )  # fmt: skip
    report.outside = outside.pack()
    if hasattr(model, "save_pretrained") and any(m.calls_moe for m in report.modules):
        from .checkpoints.hf import attach  # which imports transformers

        attach(model, format, activation, trainable_inputs)
    return report
