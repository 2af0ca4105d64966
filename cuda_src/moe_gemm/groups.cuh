#pragma once
#include "common/warp.cuh"
#include "moe_gemm/params.cuh"

// Rows of an expert's group, clamped to the existing rows.
struct GroupRows {
    int first, count;
};

__device__ __forceinline__ GroupRows rows_of(const GemmParams& p, int expert) {
    GroupRows group;
    if (p.max_tokens) {
        group.first = expert * p.max_tokens;
        group.count = min(max(p.offsets[expert], 0), p.max_tokens);
    } else {
        const int* const at = p.offsets + expert * p.offset_stride;
        group.first = min(max(at[0], 0), p.rows);
        group.count = max(min(at[p.offset_stride], p.rows), group.first) - group.first;
    }
    return group;
}

// Return the row of `a` for row `row` of the result, clamped to the existing tokens.
__device__ __forceinline__ int source_of(const GemmParams& p, int row) {
    return p.row_token ? min(max(p.row_token[row], 0), p.tokens - 1) : row;
}

struct GroupTile {
    int expert, begin, end; // rows of the group: begin to end - 1
    int before, tiles;      // tiles of TOKENS rows: in all earlier groups, in this group
};

// Find the group of tile `wanted`, an index over the tiles of all groups. All threads of the block call this. `found`
// is in shared memory. Return false if `wanted` is past the last tile.
template <int TOKENS, int THREADS>
__device__ __forceinline__ bool find_tile(const GemmParams& p, int wanted, GroupTile& found) {
    constexpr int WARPS = THREADS / 32;
    __shared__ int sums[WARPS];
    const int thread = threadIdx.x, warp = thread / 32;
    int all = 0;
    for (int start = 0; start < p.experts; start += THREADS) {
        const int e = start + thread;
        int begin = 0, end = 0;
        if (e < p.experts) {
            const GroupRows group = rows_of(p, e);
            begin = group.first, end = group.first + group.count;
        }
        const int tiles = (end - begin + TOKENS - 1) / TOKENS;
        const int upto = lanes_inclusive_sum<32>(tiles);
        if (thread % 32 == 31) sums[warp] = upto;
        __syncthreads();
        int before = all + upto - tiles;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            before += i < warp ? sums[i] : 0;
            all += sums[i];
        }
        if (wanted >= before && wanted - before < tiles) {
            found.expert = e, found.begin = begin, found.end = end;
            found.before = before, found.tiles = tiles;
        }
        __syncthreads();
        if (wanted < all) return true;
    }
    return false;
}
