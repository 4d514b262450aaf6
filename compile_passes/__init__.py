"""Finds Mixture-of-Experts blocks in captured graphs and rewrites them onto fp4 operators."""
