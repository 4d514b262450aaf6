"""GPTQ (Frantar et al., 2022) for block-scaled 4-bit formats, many experts at once.

Minimises E |W x - Q x|^2 = tr((W - Q) H (W - Q)^T), H = E[x x^T], column by column: column j is rounded, and
the later columns compensate its error. With U the upper Cholesky factor of H^-1, the error e_j = (w_j - q_j)
/ U_jj costs e_j^2, and w_i -= e_j U_ji for all i > j.

A block's scale is chosen when the block is reached, from the weights as compensated so far. The recursion
inside the block runs for every candidate, and the candidate with the least cost is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..meta.formats import Format
from .grid import quantize_values, scale_grid

Candidate = tuple[Tensor, Tensor, Tensor | None]
"""For each block: a scale code, its step in units of the weights, and whether it is allowed (None: all
are)."""


def gptq(
    w: Tensor, moments: Tensor, fmt: Format, candidates: Callable[[Tensor], Iterable[Candidate]]
) -> tuple[Tensor, Tensor]:
    """Quantises w [E, N, K] with moments [E, K, K] = H to (code values [E, N, K], scale codes [E, N,
    blocks]).

    candidates: maps weights [E, N, 1, block] to the scales to try for them, tensors [E, N, 1].
    """
    w = w.clone()
    k = w.shape[-1]
    factor = _inverse_factor(moments)
    values = torch.empty_like(w)
    codes = w.new_empty((*w.shape[:2], fmt.num_blocks(k)), dtype=scale_grid(fmt).bits)
    for index, start in enumerate(range(0, k, fmt.block)):
        end = min(start + fmt.block, k)
        inside = factor[:, start:end, start:end]
        block = w[..., start:end]
        tried = list(candidates(block[:, :, None]))
        code, step = (torch.stack(parts) for parts in zip(*((c, s) for c, s, _ in tried)))  # [C, E, N, 1]
        rounded, lost = _round_block(block, inside, step, fmt)
        cost = lost.square().sum(-1)  # [C, E, N]
        for i, (_, _, allowed) in enumerate(tried):
            if allowed is not None:
                cost[i].masked_fill_(~allowed[..., 0], torch.inf)
        best = cost.argmin(0, keepdim=True)  # [1, E, N]
        codes[..., index] = code[..., 0].gather(0, best)[0]
        pick = best[..., None].expand(1, *block.shape)
        values[..., start:end] = rounded.gather(0, pick)[0]
        w[..., end:] -= lost.gather(0, pick)[0] @ factor[:, start:end, end:]
    return values, codes


def _round_block(block: Tensor, factor: Tensor, step: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Runs the recursion inside a block [E, N, b] for each candidate step [C, E, N, 1]: code values and e
    [C, E, N, b]."""
    e, _, k = block.shape
    # Columns come before rows, so that values that are used together are adjacent: [E, b, C, N].
    work = block.mT[:, :, None].repeat(1, 1, len(step), 1)
    values, lost = torch.empty_like(work), torch.empty_like(work)
    step = step[..., 0].transpose(0, 1)  # [E, C, N]
    for j in range(k):
        column = work[:, j]
        values[:, j] = quantize_values(column, step, fmt)
        error = (column - values[:, j] * step) / factor[:, j, j].view(e, 1, 1)
        lost[:, j] = error
        work[:, j + 1 :] -= error[:, None] * factor[:, j, j + 1 :, None, None]
    return values.permute(2, 0, 3, 1).contiguous(), lost.permute(2, 0, 3, 1).contiguous()


def damping(diagonal: Tensor) -> Tensor:
    """Returns the number to add to the diagonal [E, K] of H: a twentieth of its mean.

    With few calibration tokens H is singular. For an expert without tokens H = 0, and all its columns have
    the same weight. On the demo model, shares from 0.01 to 0.3 made no visible difference.
    """
    mean = diagonal.mean(-1, keepdim=True)
    return torch.where(mean == 0, 1.0, 0.05 * mean)


def _inverse_factor(moments: Tensor) -> Tensor:
    """Returns the upper triangular U with U^T U = (H + damping)^-1."""
    h = moments.clone()
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    diagonal += damping(diagonal)
    # Cholesky from the last row up, H = R R^T with R upper triangular: then U = R^-1.
    r = torch.linalg.cholesky(h.flip(-2, -1)).flip(-2, -1)
    return torch.linalg.solve_triangular(r, torch.eye(len(r[0]), device=r.device), upper=True)
