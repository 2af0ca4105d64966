// Define the constants of attend_two_loaders' producer warpgroups.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

constexpr int TWO_LOADERS_THREADS = 4 * WARPGROUP;
constexpr int PRODUCER_WARPS = 2 * WARPGROUP / 32;

// full[buffer][ROTARY_FULL] is the full barrier of the rotary part, and full[buffer][half] is the full barrier of a
// half of the value columns.
constexpr int ROTARY_FULL = 2;

// The shuffle tells the compiler that the index is uniform, which saves registers.
__device__ __forceinline__ int producer_warp() {
    return __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0) - 2 * WARPGROUP / 32;
}
