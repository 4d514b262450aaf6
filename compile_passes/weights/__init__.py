"""Weights packed at run time, and those that a model holds in 4 bits already."""
