"""Quantises weights with little loss: methods, calibration, and measures of the accuracy.

    quantize_weight(w, "nvfp4", "search")    quantises one weight, by any method of METHODS
    calibrate(model, tokens)                 measures what calibrated methods need

`fp4_ops.prepare(model, method=..., calibration=...)` does this for a model. docs/accuracy.md compares
methods.
"""

from .calibration import Calibration, calibrate
from .methods import METHODS, Method, find_method
from .weight import quantize_weight

__all__ = ["METHODS", "Calibration", "Method", "calibrate", "find_method", "quantize_weight"]
