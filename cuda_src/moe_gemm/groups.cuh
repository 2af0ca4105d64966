// The rows of each expert's group, and the tile of a block.
#pragma once
#include "common/warp.cuh"
#include "moe_gemm/params.cuh"

// The rows of an expert's group. Offsets outside of the rows count as their ends.
struct GroupRows {
    int first, count;
};

__device__ __forceinline__ GroupRows rows_of(const GemmParams& p, int expert) {
    GroupRows group;
    if (p.max_tokens) {
        group.first = expert * p.max_tokens;
        group.count = min(max(p.offsets[expert], 0), p.max_tokens);
    } else {
        const int* const at = p.offsets + expert * p.offset_words;
        group.first = min(max(at[0], 0), p.rows);
        group.count = max(min(at[p.offset_words], p.rows), group.first) - group.first;
    }
    return group;
}

// The row of `a` for row `row` of the product. A number that names no token counts as the nearest that does.
__device__ __forceinline__ int source_of(const GemmParams& p, int row) {
    return p.row_token ? min(max(p.row_token[row], 0), p.tokens - 1) : row;
}

// The group that a block's tile is of.
struct GroupTile {
    int expert, begin, end; // begin, end: its rows
    int before, tiles;      // tiles of TOKENS rows: of all groups before, and of this one
};

// Find the group that has tile `wanted` of all groups' tiles; false if there are not so many. All threads of the block
// call this, and `found` is in shared memory.
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
