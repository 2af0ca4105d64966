// Rows of each expert's group, and the search for a block's tile.
#pragma once
#include "common/warp.cuh"
#include "moe_gemm/params.cuh"

// Rows of an expert's group. Offsets are clamped to the existing rows.
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

// Return the row of `a` for row `row` of the result. Entries of row_token are clamped to the existing tokens.
__device__ __forceinline__ int source_of(const GemmParams& p, int row) {
    return p.row_token ? min(max(p.row_token[row], 0), p.tokens - 1) : row;
}

// The group that contains a tile.
struct GroupTile {
    int expert, begin, end; // the group has rows begin to end - 1
    int before, tiles;      // number of tiles of TOKENS rows in all earlier groups, and in this group
};

// `wanted` is an index over the tiles of all groups. Set `found`, which is in shared memory, to the group that contains
// this tile. Return false if `wanted` is past the last tile. All threads of the block call this.
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
