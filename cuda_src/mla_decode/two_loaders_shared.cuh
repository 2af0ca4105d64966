// Constants of the producer warpgroups of attend_two_loaders, and the index of a producer warp.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

constexpr int TWO_LOADERS_THREADS = 4 * WARPGROUP;
constexpr int LOADING_WARPS = 2 * WARPGROUP / 32;

// full[buffer][half] is the full barrier of each half of the value columns, and full[buffer][ROTARY_FULL] is the full
// barrier of the rotary part.
constexpr int ROTARY_FULL = 2;

// Return the warp's index among the producer warps. The shuffle tells the compiler that the index is uniform, which
// saves registers per lane.
__device__ __forceinline__ int loading_warp() {
    return __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0) - 2 * WARPGROUP / 32;
}
