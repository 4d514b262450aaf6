"""Writes what was proved: one operator for a block, or single products."""
