"""Reads 4-bit checkpoints in every dialect of `dialects/`, writes them shard by shard, and saves them from
models."""

from .convert import ConvertReport, quantize_checkpoint
from .dialects import DIALECTS, Dialect
from .files import CheckpointError

__all__ = ["DIALECTS", "CheckpointError", "ConvertReport", "Dialect", "quantize_checkpoint"]
