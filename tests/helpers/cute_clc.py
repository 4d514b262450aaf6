"""Cluster launch control in NVIDIA's CuTe DSL: its dynamic persistent scheduler and pipeline of responses.

`python cute_clc.py FOLDER CTAS` writes PTX to the folder. It needs `nvidia-cutlass-dsl` and no GPU. Each warp
of each thread block of the cluster reads the responses. Warp 0 of the first one asks for them.
"""

import os
import sys

os.environ |= {"CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": sys.argv[1]}

import cuda.bindings.driver as driver
import cutlass
from cutlass import cute, pipeline, utils

CTAS = int(sys.argv[2])
STAGES, WARPS, RESPONSE_BYTES = 1, 2, 16


@cute.kernel
def walk(params: utils.ClcDynamicPersistentTileSchedulerParams, out: cute.Pointer):
    memory = utils.SmemAllocator()
    response = memory.allocate_array(cutlass.Int128, 1)
    barriers = memory.allocate_array(cutlass.Int64, 2 * STAGES)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    responses = pipeline.PipelineClcFetchAsync.create(
        barrier_storage=barriers, num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * WARPS * CTAS),
        tx_count=RESPONSE_BYTES, cta_layout_vmnk=cute.make_layout((1, CTAS, 1, 1)),
    )  # fmt: skip
    tiles = utils.ClcDynamicPersistentTileScheduler.create(
        params, cute.arch.block_idx(), cute.arch.grid_dim(), response
    )
    asked = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
    read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
    tile = tiles.initial_work_tile_info()
    while tile.is_valid_tile:
        if warp == 0 and rank == 0:
            responses.producer_acquire(asked)
            tiles.advance_to_next_work(responses.producer_get_barrier(asked))
            asked.advance()
        cute.make_tensor(out, cute.make_layout(1 << 20))[tile.tile_idx[0]] = warp
        responses.consumer_wait(read)
        tile = tiles.get_current_work()
        responses.consumer_release(read)
        read.advance()


@cute.jit
def launch(out: cute.Pointer, stream: driver.CUstream):
    params = utils.ClcDynamicPersistentTileSchedulerParams((1024, 1, 1), (CTAS, 1, 1))
    walk(params, out).launch(
        grid=utils.ClcDynamicPersistentTileScheduler.get_grid_shape(params), block=(32 * WARPS, 1, 1),
        cluster=(CTAS, 1, 1), stream=stream,
    )  # fmt: skip


if __name__ == "__main__":
    place = cute.runtime.make_ptr(cutlass.Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
    cute.compile(launch, place, driver.CUstream(0))
