"""Assigns experts to processes."""

from __future__ import annotations


def own_experts(num_experts: int, processes: int, rank: int) -> range:
    """Returns the experts of a rank, about num_experts / processes. DTensor's Shard(0) divides them in the
    same way."""
    return range(num_experts * rank // processes, num_experts * (rank + 1) // processes)


def described(ranks: list[int]) -> str:
    """ "rank 1", "ranks 1 and 2"."""
    names = [str(rank) for rank in ranks]
    many = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"rank{'s' * (len(names) > 1)} {many}"
