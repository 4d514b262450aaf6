"""FP4 rows times FP4 weights, both multiplied as they are by Blackwell's tensor cores (`tl.dot_scaled`).

nvfp4 x nvfp4 and mxfp4 x mxfp4 alone: an instruction reads one kind of block scales for both operands. Other
pairs and other GPUs, and sm_121 with an older Triton, take the rows as bfloat16 values (activations.py).

Nobody has run these kernels: what they compile to, and their arithmetic in Triton's interpreter, is tested.
Each tile is compared with the dequantised product on the user's GPU before its first use (support.py).
"""
