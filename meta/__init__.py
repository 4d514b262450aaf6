"""Defines the fp4 operators without kernels: formats, layouts, argument checks, fake kernels.

This package imports nothing from the rest of fp4_ops.
"""
