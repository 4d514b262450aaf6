"""Which experts a process holds."""

from __future__ import annotations


def own_experts(num_experts: int, processes: int, rank: int) -> range:
    """As `torch.chunk` and DTensor's Shard(0) divide them: in order, equally many each, the last ones fewer or none."""
    each = -(-num_experts // processes)
    return range(min(rank * each, num_experts), min((rank + 1) * each, num_experts))


def described(ranks: list[int]) -> str:
    """"rank 1", "ranks 1 and 2"."""
    names = [str(rank) for rank in ranks]
    many = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"rank{'s' * (len(names) > 1)} {many}"
