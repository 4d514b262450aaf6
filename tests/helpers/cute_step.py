"""A step of csrc/sm100 in NVIDIA's CuTe DSL: scales to tensor memory, and the products of 256 K (fp8: 128).

`python cute_step.py TOKENS FOLDER FORMAT CTAS` writes PTX to the folder. It needs `nvidia-cutlass-dsl` and no
GPU. With CTAS 2, a pair shares the step. Before it, the codes of the weights are copied to shared memory.
Where things are in shared and in tensor memory, and the words that say so, are the library's choice.
"""

import os
import sys

os.environ |= {"CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": sys.argv[2]}

import cuda.bindings.driver as driver
import cutlass
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

TOKENS = int(sys.argv[1])
CTAS = int(sys.argv[4])
GROUP = tcgen05.CtaGroup.TWO if CTAS == 2 else tcgen05.CtaGroup.ONE
FP8, BLOCK = sys.argv[3] == "fp8", 16 if sys.argv[3] == "nvfp4" else 32
TILE = 128 * CTAS, TOKENS, 128 if FP8 else 256
CODES, SCALES = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN if BLOCK == 16 else cutlass.Float8E8M0FNU
ROWS = cutlass.Float8E4M3FN if FP8 else CODES
HELD = cutlass.Int8 if FP8 else CODES
"""What NVIDIA's kernels take for the layout of codes in containers of eight bits."""
SUM_COLUMNS, SCALE_COLUMNS = 256, 16


@cute.kernel
def step(mma: cute.TiledMma, load: cute.CopyAtom, codes: cute.Tensor, a_layout: cute.ComposedLayout,
         b_layout: cute.ComposedLayout, sfa_layout: cute.Layout, sfb_layout: cute.Layout):  # fmt: skip
    memory = cutlass.utils.SmemAllocator()
    a = memory.allocate_tensor(HELD, a_layout.outer, 1024, a_layout.inner)
    b = memory.allocate_tensor(ROWS, b_layout.outer, 1024, b_layout.inner)
    sfa = memory.allocate_tensor(SCALES, sfa_layout, 1024)
    sfb = memory.allocate_tensor(SCALES, sfb_layout, 1024)
    held = memory.allocate_array(cutlass.Int32, 1)
    barrier = memory.allocate_array(cutlass.Int64, 1)
    cute.arch.alloc_tmem(512, held, CTAS == 2)
    cute.arch.sync_threads()
    columns = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, held)
    sums = cute.make_tensor(columns, mma.make_fragment_C(mma.partition_shape_C(TILE[:2])).layout)

    def scales(offset, make_layout, memory_layout):
        pointer = cute.recast_ptr(columns + offset, dtype=SCALES)
        one = cute.slice_(memory_layout, (None, None, None, 0))
        return cute.make_tensor(pointer, make_layout(mma, TILE, BLOCK, one))

    def copy(shared, tensor):
        tensor = cute.filter_zeros(tensor)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(GROUP), SCALES)
        tiled = tcgen05.make_s2t_copy(atom, tensor)
        part = tiled.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(tiled, part.partition_S(cute.filter_zeros(shared)))
        cute.copy(tiled, source[(None, None, None, None, 0)], part.partition_D(tensor))

    rank = cute.arch.block_idx_in_cluster() if CTAS == 2 else 0
    tile = cute.local_tile(codes, (TILE[0], TILE[2]), (0, 0))
    to, source = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(a, 0, 3),
        cute.group_modes(mma.get_slice(rank).partition_A(tile), 0, 3),
    )  # fmt: skip
    cute.copy(load, source, to[(None, 0)], tma_bar_ptr=barrier)
    t_sfa = scales(SUM_COLUMNS, blockscaled.make_tmem_layout_sfa, sfa_layout)
    t_sfb = scales(SUM_COLUMNS + SCALE_COLUMNS, blockscaled.make_tmem_layout_sfb, sfb_layout)
    copy(sfa, t_sfa)
    copy(sfb, t_sfb)
    mma.set(tcgen05.Field.ACCUMULATE, False)
    first = (None, None, None, 0)
    a, b = mma.make_fragment_A(a)[first], mma.make_fragment_B(b)[first]
    cute.gemm(mma, sums, [a, t_sfa], [b, t_sfb], sums)
    if CTAS == 2:
        tcgen05.commit(barrier, 3, GROUP)
    else:
        tcgen05.commit(barrier)


@cute.jit
def launch(given: cute.Pointer, stream: driver.CUstream):
    mma = blackwell.make_blockscaled_trivial_tiled_mma(
        CODES, ROWS, OperandMajorMode.K, OperandMajorMode.K, SCALES, BLOCK, GROUP, TILE[:2]
    )
    a_layout = blackwell.make_smem_layout_a(mma, TILE, HELD, 1)
    load, codes = cute.nvgpu.make_tiled_tma_atom_A(
        cpasync.CopyBulkTensorTileG2SOp(GROUP),
        cute.make_tensor(given, cute.make_ordered_layout((1024, 1024), order=(1, 0))),
        cute.slice_(a_layout, (None, None, None, 0)), TILE, mma, (CTAS, 1, 1, 1),
        internal_type=HELD if FP8 else None,
    )  # fmt: skip
    step(
        mma, load, codes, a_layout,
        blackwell.make_smem_layout_b(mma, TILE, ROWS, 1),
        blockscaled.make_smem_layout_sfa(mma, TILE, BLOCK, 1),
        blockscaled.make_smem_layout_sfb(mma, TILE, BLOCK, 1),
    ).launch(grid=(CTAS, 1, 1), block=(32, 1, 1), cluster=(CTAS, 1, 1), stream=stream)  # fmt: skip


if __name__ == "__main__":
    place = cute.runtime.make_ptr(CODES, 0, cute.AddressSpace.gmem, assumed_align=32)
    cute.compile(launch, place, driver.CUstream(0))
