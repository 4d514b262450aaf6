"""Implements `fp4::moe_ep` and `fp4::all_reduce`. The first is `fp4::moe` between torch.distributed's
collectives.

Sums over ranks are computed in float32 and rounded once to the result's dtype. If the group's ranks have a
workspace (NVLink), kernels exchange the data. Each rank's part is then rounded to that dtype before the sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from ..meta import group_checks, operand_checks
from ..meta.check_parts import dtype_name
from . import workspace
from .collectives import Group
from .local import Local
from .shares import own_experts

OWN, SAME, SUM = KINDS = (
    "fp4::moe_ep with tokens 'own'", "fp4::moe_ep with tokens 'same'", "fp4::all_reduce",
)  # fmt: skip


def moe_ep(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor,
    w13: Tensor, w13_scale: Tensor, w13_global_scale: Tensor | None,
    w2: Tensor, w2_scale: Tensor, w2_global_scale: Tensor | None,
    w13_bias: Tensor | None = None, w2_bias: Tensor | None = None, *,
    num_experts: int, tokens: str, group_name: str, max_tokens: int | None = None,
    format: str, layout: str = "plain", activation: str = "silu", a_format: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Computes out[t] = sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]). The experts are spread over
    the ranks.

    num_experts: E, the number of experts on all ranks. w13 and w2 hold only the experts of this rank
        (`own_experts`).
    topk_ids: numbers among all experts, in [0, E).
    tokens: "same" if all ranks have the same x, ids and weights; "own" if each has its own, T >= 0.
    max_tokens: the largest number of tokens of a rank. It must be the same on all ranks. None: the ranks
        exchange their numbers of tokens first.
    """
    experts = group_checks.check_moe_ep(
        x, topk_ids, topk_weights, w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale,
        format, layout, activation, a_format, w13_bias, w2_bias, num_experts, tokens, max_tokens,
    )  # fmt: skip
    dtype = operand_checks.resolve_out_dtype(x, out_dtype)
    group = Group.named("fp4::moe_ep", group_name)
    own = own_experts(num_experts, group.size, group.rank)
    if len(own) != experts.up.groups:
        raise RuntimeError(
            f"fp4::moe_ep: w13 has {experts.up.groups} experts; of {num_experts} on {group.size} ranks, rank "
            f"{group.rank} must have {len(own)}"
        )
    local = Local(
        experts, num_experts, own,
        (w13, w13_scale, w13_global_scale, w2, w2_scale, w2_global_scale, w13_bias, w2_bias),
        {"format": format, "layout": layout, "activation": activation}, a_format,
    )  # fmt: skip
    space = workspace.of(group_name) if x.is_cuda else None
    if tokens == "same":
        pairs = topk_ids.numel()
        ids = topk_ids - own.start if own.start else topk_ids  # ids of other ranks are out of range
        if space is not None and space.sums(x.numel() * dtype.itemsize):
            return space.all_reduce(local.sums(x, ids, topk_weights, pairs, dtype))
        if x.device.type == "cpu":
            _told(group, SAME, x, topk_ids, topk_weights, -1)
        return group.sum(local.sums(x, ids, topk_weights, pairs, torch.float32)).to(dtype)
    counts = _counts(group, space, x, topk_ids, topk_weights, max_tokens)
    pairs, most = sum(counts) * topk_ids.shape[1], max(counts)
    wide = x.shape[1] * max(x.itemsize, dtype.itemsize), x.shape[1] * min(x.itemsize, dtype.itemsize)
    if space is not None and most and all(space.takes(most, w, topk_ids.shape[1]) for w in wide):
        return _through(space, local, x, topk_ids.contiguous(), topk_weights.contiguous(), most, pairs, dtype)
    rows = _Rows(group, counts, x.shape[0])
    x, topk_ids, topk_weights = (
        rows.of_all(t, padding) for t, padding in ((x, 0), (topk_ids, -1), (topk_weights, 0))
    )
    part = local.sums(x, topk_ids - own.start, topk_weights, pairs, torch.float32)
    return rows.sum_of_own(part).to(dtype)


def _through(
    space: workspace.Workspace, local: Local, x: Tensor, ids: Tensor, weights: Tensor, tokens: int,
    pairs: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Exchanges tokens through a workspace. `tokens` is the padded number of each rank."""
    ready, here = None, space.ranks * tokens * ids.shape[1]
    many = tokens * x.shape[1] * x.itemsize >= workspace.FP8_BYTES and dtype != torch.float32
    if many and local.sends_fp8(x, space.ranks, pairs, here):
        values, factor = torch.ops.fp4.quantize_fp8(x, layout=local.experts.up.layout.a_layout)
        got = space.gather(values, ids, weights, tokens, local.num_experts, factor)
        ready = got.rows, got.factors
        like = space.rows_like(tokens, x)
    else:
        got = space.gather(as_operand(x), ids, weights, tokens, local.num_experts)
        like = got.rows
    parts = local.parts(like, ready, got.ids, got.weights, pairs, dtype, space.ranks)
    return space.reduce(parts, got, ids, weights, tokens, local.num_experts, dtype)


def as_operand(x: Tensor) -> Tensor:
    """Returns a contiguous tensor whose address is a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _counts(
    group: Group,
    space: workspace.Workspace | None,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    max_tokens: int | None,
) -> list[int]:
    """Returns the number of tokens of each rank, with padding."""
    if max_tokens is not None:
        if x.device.type == "cpu":  # there it costs little; on a GPU nothing waits for an answer
            _told(group, OWN, x, ids, weights, max_tokens)
        return [max_tokens] * group.size
    if space is not None and torch.cuda.is_current_stream_capturing():
        return [x.shape[0]] * group.size  # the ranks exchange no numbers; the kernels compare them
    return _told(group, OWN, x, ids, weights, -1)


def _told(
    group: Group, kind: str, x: Tensor, ids: Tensor | None, weights: Tensor | None, most: int
) -> list[int]:
    """Returns the number of tokens of each rank. Raises RuntimeError if the ranks' calls do not match.

    Without this check gloo would end the process or add unrelated data.
    """
    rows, width = (x.shape[0], x.shape[1:].numel()) if x.dim() else (1, 1)
    own = [KINDS.index(kind), rows, width, operand_checks.FLOATING.index(x.dtype), most]
    if ids is not None and weights is not None:
        own += [ids.shape[1], operand_checks.FLOATING.index(weights.dtype), int(ids.dtype == torch.int64)]
    own += [0] * (8 - len(own)) + [_checksum(ids) if kind == SAME and ids is not None else 0]
    told = group.gather(torch.tensor(own, dtype=torch.int64, device=x.device)).tolist()
    for rank, other in enumerate(told):
        if other[0] != own[0]:
            raise RuntimeError(
                f"{group.what}: rank {rank} of {group.size} calls {KINDS[other[0]]}, and this rank {kind}; "
                "all ranks must make the same calls in the same order. Start all ranks anew"
            )
    if any(other[2:8] != own[2:8] for other in told) or (
        kind != OWN and any(other[1] != own[1] for other in told)
    ):
        raise RuntimeError(f"{group.what}: {_difference(kind, x, ids, weights, most)}")
    if any(other[8] != told[0][8] for other in told):
        assert ids is not None
        _check_same(group, ids)
    return [count for _, count, *_ in told]


def _checksum(ids: Tensor) -> int:
    """Returns a 63-bit hash of the experts that each token chooses, in any order."""
    places = torch.arange(1, len(ids) + 1, device=ids.device)[:, None]
    return int(((ids.long() + 1) * places).sum() & (2**63 - 1))


def _check_same(group: Group, ids: Tensor) -> None:
    """Raises RuntimeError if most tokens choose other experts on another rank.

    Then the ranks have different tokens, and their sum would mix them. A few tokens may differ, because
    scores can differ in the last bit between processors.
    """
    every = group.gather(ids.long().sort(-1).values)
    others = int((every != every[0]).any(-1).any(0).sum())
    if others > 1 and 2 * others > len(ids):
        raise RuntimeError(
            f"{group.what}: tokens is 'same', and {others} of {len(ids)} tokens choose other experts on "
            "another rank: the ranks have different tokens, as where a sequence or a batch is divided over "
            "them. Pass tokens='own' (prepare(model, ep_group=...)), or give all ranks the same tokens"
        )


def _difference(kind: str, x: Tensor, ids: Tensor | None, weights: Tensor | None, most: int) -> str:
    here = f"here x is {dtype_name(x.dtype)} {list(x.shape)}"
    if ids is None or weights is None:
        return f"x differs between ranks in dtype or shape; {here}"
    here = (
        f"here they are {dtype_name(x.dtype)} {list(x.shape)}, {dtype_name(ids.dtype)} "
        f"{list(ids.shape)} and {dtype_name(weights.dtype)}"
    )
    if kind == SAME:
        return f"x, topk_ids and topk_weights differ between ranks, and tokens is 'same'; {here}"
    if most >= 0:
        here += f", and max_tokens is {most}, which must be one number on all ranks"
    return (
        "x, topk_ids and topk_weights differ between ranks in dtypes, hidden size or top_k; "
        f"{here}; only T may differ"
    )


class _Rows:
    """Tokens of all ranks, in the order of the ranks."""

    def __init__(self, group: Group, counts: list[int], own: int) -> None:
        self.group, self.counts, self.own = group, counts, own

    def of_all(self, t: Tensor, padding: int) -> Tensor:
        if missing := max(self.counts) - t.shape[0]:
            t = F.pad(t, (0, 0, 0, missing), value=padding)
        return torch.cat([rows[:n] for rows, n in zip(self.group.gather(t), self.counts)])

    def sum_of_own(self, part: Tensor) -> Tensor:
        """Returns the sum over the ranks of part [all rows, H], only for this rank's rows."""
        padded = max(self.counts)
        if len(set(self.counts)) > 1:
            split = part.split(self.counts)
            part = torch.stack([F.pad(t, (0, 0, 0, padded - t.shape[0])) for t in split])
        return self.group.sum_of_own(part.view(self.group.size, padded, part.shape[-1]))[: self.own]


def all_reduce(x: Tensor, *, group_name: str) -> Tensor:
    """Returns the sum of the ranks' x as a new tensor. x must have the same shape on all ranks."""
    group_checks.check_all_reduce(x)
    space = workspace.of(group_name) if x.is_cuda else None
    if space is not None and space.sums(x.nbytes):
        return space.all_reduce(as_operand(x))
    group = Group.named("fp4::all_reduce", group_name)
    if x.device.type == "cpu":
        _told(group, SUM, x, None, None, -1)
    total = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return group.sum(total).to(x.dtype)


_LIBRARY = Library("fp4", "IMPL")
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("moe_ep", moe_ep, _device)
    _LIBRARY.impl("all_reduce", all_reduce, _device)
