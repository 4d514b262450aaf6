"""Says what to do if a launcher of kernels returns a cudaError_t, or a `LaunchError` of
csrc/device/interface.h, which is negative.

csrc/cuda/library.cpp has the same words for C++; tests/kernels_cuda/test_cuda_errors.py compares the two.
"""

from __future__ import annotations

NO_CODE = (
    "this build of fp4_ops has no code for this GPU. Build it again with FP4_CUDA_ARCHS=all, and see "
    "`python -m fp4_ops info`"
)
OLD_DRIVER = "the GPU's driver is older than this CUDA needs. Update the driver"
BROKEN_BEFORE = (
    "a kernel before this one, of any library, read or wrote where it must not, or was stopped. Nothing runs "
    "on the GPU in this process any more. Start it again with CUDA_LAUNCH_BLOCKING=1 to see which kernel it "
    "is"
)
ADVICE = {
    -1: "the kernel takes no such sizes or addresses, and fp4_ops should not have chosen it. Send the "
    "maintainers this message and the sizes of the operands",
    -2: "the GPU's driver has no cuTensorMapEncodeTiled, which came with CUDA 12. Update the driver",
    -3: "a thread block of this GPU may not have as much shared memory as any of these kernels needs. "
    'Convert the weights to layout="plain", which has other kernels',
    2: "the GPU's memory is full. Free some, or run fewer tokens at once",
    35: OLD_DRIVER,
    98: NO_CODE,
    209: NO_CODE,
    222: OLD_DRIVER,
    700: BROKEN_BEFORE,
    702: BROKEN_BEFORE,
    715: BROKEN_BEFORE,
    716: BROKEN_BEFORE,
    719: BROKEN_BEFORE,
}
"""Advice by cudaError_t or LaunchError."""
OTHERWISE = (
    "The number is a cudaError_t. It may come from a kernel before this one: run again with "
    "CUDA_LAUNCH_BLOCKING=1 to see which, and send the maintainers what `python -m fp4_ops info` prints"
)


def failed(what: str, error: int) -> RuntimeError:
    """Returns the exception for a CUDA call or launch that returned this number."""
    happened = "launched nothing, reason" if error < 0 else "failed with CUDA error"
    return RuntimeError(f"fp4: {what} {happened} {error}: {ADVICE.get(error, OTHERWISE)}")
