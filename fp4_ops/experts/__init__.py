"""Experts of a model: how they are found, hold 4-bit weights, and run.

A model that was pickled whole names these classes here.
"""

from .packed import Company, ExpertsForm, Half, PackedWeight, Recipe, SharedLayout

__all__ = ["Company", "ExpertsForm", "Half", "PackedWeight", "Recipe", "SharedLayout"]
