// What the two loading warpgroups of attend_two_loaders share.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

constexpr int TWO_LOADERS_THREADS = 4 * WARPGROUP;
constexpr int LOADING_WARPS = 2 * WARPGROUP / 32;

// The barrier full[buffer][ROTARY_FULL] is that of the rotary part; a half has full[buffer][half].
constexpr int ROTARY_FULL = 2;

// The warp's number among those that load. Taken from one lane, so that what follows from it needs no register of each
// lane.
__device__ __forceinline__ int loading_warp() {
    return __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0) - 2 * WARPGROUP / 32;
}
