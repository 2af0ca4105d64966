// What the loading warpgroups of attend_pair share: which tokens of a tile a block of a pair loads, and how the other gets
// them.
//
// In a pair (CLUSTER == 2) block r brings tokens 32 r ... 32 r + 31 of each tile to its own shared memory, and has the copy
// engine carry them on to the same place in the other block. A half of a buffer is filled again when the computing
// warpgroups of both blocks have freed it: each frees it in both. A barrier `full` counts what the own warps bring, which
// announce as many bytes as the other block sends.
#pragma once
#include "common/cluster.cuh"
#include "mla_decode/wgmma_tokens.cuh"

// The barrier full[buffer][ROTARY_FULL] is that of the rotary part, where a half has one barrier.
constexpr int ROTARY_FULL = 2;

// The warp's number among those that load. Taken from one lane, so that what follows from it needs no register of each lane.
__device__ __forceinline__ int loading_warp() {
    return __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0) - 2 * WARPGROUP / 32;
}

// Start copying `bytes` of this block's shared memory to the same place in block `rank` of the cluster; they count at the
// barrier there that has the same address as `barrier`. What other threads wrote is behind their fence_proxy_async.
__device__ __forceinline__ void copy_to_block(unsigned rank, unsigned from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     map_shared_rank(from, rank)),
                 "r"(from), "r"(bytes), "r"(map_shared_rank(barrier, rank))
                 : "memory");
}

// A warp has written BYTES from `from` on in each of N tiles, one behind the other: tell this block's computing warpgroups,
// and have the same carried to the other block of a pair.
template <int CLUSTER, int N, int BYTES>
__device__ __forceinline__ void publish_to_pair(unsigned rank, unsigned from, unsigned full) {
    fence_proxy_async();
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(full);
    } else {
        if (lane == 0) mbarrier_arrive_expect_tx(full, N * BYTES);
        if (lane < N) copy_to_block(rank ^ 1, from + lane * TILE_BYTES, BYTES, full);
        __syncwarp();
    }
}
