"""The base of all backends.

It loads the libraries and the native runtime. It has the fitted and tuned numbers by which kernels are
chosen, and the exact results with which they are compared.
"""
