"""4-bit checkpoints: read in every dialect of `dialects/`, written shard by shard, saved from models."""

from .convert import ConvertReport, quantize_checkpoint
from .dialects import DIALECTS, Dialect
from .files import CheckpointError

__all__ = ["DIALECTS", "CheckpointError", "ConvertReport", "Dialect", "quantize_checkpoint"]
