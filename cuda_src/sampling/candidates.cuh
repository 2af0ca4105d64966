// Collect the candidates, a list of the best tokens of a row.
#pragma once
#include "sampling/shared.cuh"

// Append the tokens with `low <= value < high` to the lists of the first `blocks` blocks, and return the number of
// these tokens. Tokens beyond CAPACITY are not stored.
template <typename Row> __device__ __forceinline__ int gather(int passes_done, int blocks, float low, float high) {
    Row x = recall<Row>(passes_done);
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        unsigned wanted = 0;
        if (x.group_max_at(local_tile) >= low) {
            const int first = x.id_of(x.first_tile + local_tile, x.lane, 0);
            x.for_each(local_tile, [&](int id, float value, int c) {
                wanted |= unsigned(value >= low && value < high && id < x.vocab) << ((id - first) / 32 + c);
            });
            int position = wanted ? dsmem_atomic_add<Row::BLOCKS>(0, x.list_size, __popc(wanted)) : 0;
            for (unsigned left = wanted; left && position < CAPACITY; left &= left - 1, ++position) {
                const int id = x.id_of(x.first_tile + local_tile, x.lane, __ffs(left) - 1);
                for (int rank = 0; rank < blocks; ++rank)
                    dsmem_store<Row::BLOCKS>(rank, &x.list[position], order_key(x.at(id), id));
            }
        }
        const unsigned mine = __popc(wanted);
        __syncwarp();
        x.publish(x.first_tile + local_tile, make_uint4(__reduce_add_sync(FULL_WARP, mine), 0, 0, 0));
    }
    const uint4* found = x.slots_of_pass();
    unsigned size = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) size += found[i].x;
    return __reduce_add_sync(FULL_WARP, size);
}

template <typename Row> __device__ __forceinline__ void sort_list(const Row& x, int size) {
    static_assert(CAPACITY <= 32 * MIN_WARPS, "one candidate per thread");
    const int i = threadIdx.x;
    const unsigned long long mine = i < size ? x.list[i] : 0;
    int rank = 0;
    if (i < size) {
#pragma unroll 8
        for (int other = 0; other < size; ++other) rank += x.list[other] > mine;
    }
    __syncthreads();
    if (i < size) x.list[rank] = mine;
    __syncthreads();
}

// Return a threshold at or just below the k-th largest entry of `segment_max` (row.cuh). At least k tokens reach it.
// One warp runs this.
template <typename Row> __device__ __forceinline__ float list_threshold(const Row& x, int k) {
    constexpr int PER_LANE = MAX_SEGMENTS / 32, SPARE = 16;
    // The smallest value whose weight is above 0. Tokens of weight 0 are never drawn.
    const unsigned least = sortable(Row::IS_PROBS ? 1e-45f : -LARGEST_FLOAT);
    unsigned keys[PER_LANE];
#pragma unroll
    for (int n = 0; n < PER_LANE; ++n) keys[n] = 0;
    unsigned low = ~0u;
    for (int start = 0; start < x.layout.tiles * x.layout.segments_per_tile; start += MAX_SEGMENTS)
#pragma unroll
        for (int n = 0; n < PER_LANE; ++n) {
            const int i = start + 32 * n + x.lane;
            if (i >= x.layout.tiles * x.layout.segments_per_tile) break;
            const unsigned key = sortable(x.segment_max[i]);
            keys[n] = max(keys[n], key);
            low = min(low, key);
        }
    low = max(__reduce_min_sync(FULL_WARP, low), least);
    unsigned high = sortable(x.row_max) + 1;
    const auto count = [&](unsigned from) {
        unsigned mine = 0;
#pragma unroll
        for (int n = 0; n < PER_LANE; ++n) mine += keys[n] >= from;
        return int(__reduce_add_sync(FULL_WARP, mine));
    };
    int reach = count(low);
    if (reach < k) return from_sortable(least);
    while (reach > k + SPARE && high - low > 1) {
        const unsigned middle = low + (high - low) / 2;
        const int above = count(middle);
        if (above >= k)
            low = middle, reach = above;
        else
            high = middle;
    }
    return from_sortable(low);
}
