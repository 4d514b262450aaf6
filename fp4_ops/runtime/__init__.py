"""Loads the native runtime, and the fitted and tuned numbers by which it chooses kernels."""
