// Collect the candidates: a list of the best tokens of a row. The list has at most one token per thread, so each thread
// finds the rank of its token by counting the better tokens.
#pragma once
#include "sampling/shared.cuh"

// Append the tokens whose value x satisfies `low <= x < high` to the candidate lists of the first `blocks` blocks. All
// of these blocks get the same list, in arbitrary order. Return the number of these tokens; tokens beyond CAPACITY are
// counted but not stored. `passes` is the number of passes over the row made so far.
template <typename Row> __device__ __forceinline__ int gather(int passes, int blocks, float low, float high) {
    Row x = recall<Row>(passes);
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        unsigned wanted = 0;
        if (x.lane_top(local) >= low) {
            const int first = x.id_of(x.first_tile + local, x.lane, 0);
            x.for_each(local, [&](int id, float value, int c) {
                wanted |= unsigned(value >= low && value < high && id < x.vocab) << ((id - first) / 32 + c);
            });
            int position = wanted ? dsmem_atomic_add<Row::BLOCKS>(0, x.list_size, __popc(wanted)) : 0;
            for (unsigned left = wanted; left && position < CAPACITY; left &= left - 1, ++position) {
                const int id = x.id_of(x.first_tile + local, x.lane, __ffs(left) - 1);
                for (int rank = 0; rank < blocks; ++rank)
                    dsmem_store<Row::BLOCKS>(rank, &x.list[position], candidate(x.at(id), id));
            }
        }
        const unsigned mine = __popc(wanted);
        __syncwarp();
        x.leave(x.first_tile + local, make_uint4(__reduce_add_sync(FULL_WARP, mine), 0, 0, 0));
    }
    const uint4* found = x.slots_of_pass();
    unsigned size = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) size += found[i].x;
    return __reduce_add_sync(FULL_WARP, size);
}

// Sort the list, largest first.
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

// Return a threshold such that at least k tokens of the row, but not many more, have a value of at least the threshold.
// The threshold is at or just below the k-th largest entry of `tops`, which holds the largest value of each part of
// each tile (row.cuh). One warp calls this function.
template <typename Row> __device__ __forceinline__ float reached_by(const Row& x, int k) {
    constexpr int MINE = MAX_TOPS / 32, SPARE = 16;
    // Tokens of weight 0 are never drawn, so they need not be candidates. If fewer than k entries of `tops` have a
    // weight above 0, every token with a weight above 0 is a candidate.
    const unsigned least = sortable(Row::IS_PROBS ? 1e-45f : -LARGEST_FLOAT);
    unsigned keys[MINE];
#pragma unroll
    for (int n = 0; n < MINE; ++n) keys[n] = 0;
    unsigned low = ~0u;
    for (int base = 0; base < x.layout.tiles * x.layout.tops_per_tile; base += MAX_TOPS)
#pragma unroll
        for (int n = 0; n < MINE; ++n) {
            const int i = base + 32 * n + x.lane;
            if (i >= x.layout.tiles * x.layout.tops_per_tile) break;
            const unsigned key = sortable(x.tops[i]);
            keys[n] = max(keys[n], key);
            low = min(low, key);
        }
    low = max(__reduce_min_sync(FULL_WARP, low), least);
    unsigned high = sortable(x.top) + 1;
    const auto count = [&](unsigned from) {
        unsigned mine = 0;
#pragma unroll
        for (int n = 0; n < MINE; ++n) mine += keys[n] >= from;
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
