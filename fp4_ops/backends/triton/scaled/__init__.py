"""Products of FP4 rows and FP4 weights. Blackwell's tensor cores multiply both directly (`tl.dot_scaled`).

Both operands must be nvfp4, or both mxfp4, because an instruction reads one kind of block scales. For other
pairs, on other GPUs, and on sm_121 with an older Triton, rows are converted to bfloat16 (activations.py).

Nobody has run these kernels on a GPU. Tests check the compiled code, and the arithmetic in Triton's
interpreter. Each tile is compared with the dequantised product on the user's GPU before its first use
(support.py).
"""
