"""Proves which parts of a graph are Mixtures of Experts, and what each part of a mixture computes."""
