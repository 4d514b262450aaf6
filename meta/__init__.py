"""What an fp4 operator means before any kernel runs: formats, layouts, argument checks, fake kernels.

Imports nothing from the rest of the package.
"""
