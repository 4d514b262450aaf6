"""Weights that are packed at run time, and weights that a model already holds in 4 bits."""
