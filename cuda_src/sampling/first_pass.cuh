// The first pass over a row: load it, and find its largest value, the sum of its weights and the winner of the race of
// all groups.
//
// Weights are relative to the largest value of the row, which is not known yet. So each lane takes the largest value of
// its group instead, each tile that of the tile, and whoever adds up the slots scales them to that of the row.
#pragma once
#include "sampling/random.cuh"
#include "sampling/row.cuh"

// The reference for weights relative to `top`: a difference of infinities would be NaN.
__device__ __forceinline__ float reference_of(float top) { return fmaxf(top, -LARGEST_FLOAT); }

// Each warp leaves its tiles' largest value, sum of weights and first group of the race, and in `tops` the largest values
// of parts of the tile. RACE: whether groups race.
template <bool RACE, typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void load(Row<T, PROBS, CLUSTER>& x, Stream stream) {
    using Vector = typename VectorOf<T>::type;
    x.clear_list();
    cluster_arrive<CLUSTER>();
    // One block waits for nobody else, and its barrier must be where its warps are together.
    if (CLUSTER == 1) __syncthreads();
    bool started = CLUSTER == 1;
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        const int tile = x.first_tile + local;
        float4* to = x.cache + local * (TILE / 4) + x.lane;
        const bool cached = local < x.layout.cached_tiles;
        float most = PROBS ? 0.f : -CUDART_INF_F, part[4] = {}, early = 0;
        if (x.whole(x.values, tile) && !x.second) {
            Vector bits[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                bits[j] = *reinterpret_cast<const Vector*>(x.values + x.id_of(tile, x.lane, 4 * j));
            // While the values are on their way.
            if (RACE) early = earliness(stream.at(tile * 32 + x.lane, 0).x);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 four = x.limit(x.unpack(bits[j]));
                most = max_or_nan(most, x.largest(four));
                if (cached) to[32 * j] = four;
            }
            const float reference = reference_of(most);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 four = x.limit(x.unpack(bits[j]));
                part[0] += x.relative(four.x, reference), part[1] += x.relative(four.y, reference);
                part[2] += x.relative(four.z, reference), part[3] += x.relative(four.w, reference);
            }
        } else {
#pragma unroll 2
            for (int j = 0; j < 8; ++j) {
                const float4 four = x.combined_at(x.id_of(tile, x.lane, 4 * j));
                most = max_or_nan(most, x.largest(four));
                if (cached) to[32 * j] = four;
            }
            if (RACE) early = earliness(stream.at(tile * 32 + x.lane, 0).x);
            const float reference = reference_of(most);
            x.for_each(local, [&](int, float value, int c) { part[c] += x.relative(value, reference); });
        }
        if (local < x.layout.topped_tiles) x.lane_tops[local * 32 + x.lane] = most;

        const int parts = x.layout.tops_per_tile, part_lanes = 32 / parts;
        float tile_top = most;
        for (int step = 1; step < part_lanes; step *= 2)
            tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
        const float part_top = tile_top;
        for (int step = part_lanes; step < 32; step *= 2)
            tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
        const float mine = (part[0] + part[1]) + (part[2] + part[3]);
        const float distance = x.shift(reference_of(most), reference_of(tile_top));
        const float tile_sum = lanes_sum<32>(PROBS ? mine : mine * fast_exp2(distance));
        const float key = mine > 0 ? x.log2_of(mine) + distance + early : -CUDART_INF_F;
        const unsigned first = __reduce_max_sync(FULL_WARP, sortable(key));
        const int first_lane = __ffs(__ballot_sync(FULL_WARP, sortable(key) == first)) - 1;
        if (!started) {
            // The blocks of the cluster have all started, so that they can be written to.
            cluster_wait<CLUSTER>();
            started = true;
        }
        x.leave(tile, make_uint4(__float_as_uint(from_sortable(first)), tile * 32 + first_lane,
                                 __float_as_uint(tile_top), __float_as_uint(tile_sum)));
        for (int base = 0; base < CLUSTER * parts; base += 32) {
            const int at = base + x.lane;
            const float value = __shfl_sync(FULL_WARP, part_top, at % parts * part_lanes);
            if (at < CLUSTER * parts) store_in<CLUSTER>(at / parts, &x.tops[tile * parts + at % parts], value);
        }
    }
    if (!started) cluster_wait<CLUSTER>();
    x.slots_of_pass();
}

// The largest value of the row, for x.top. NaN is above all.
template <typename Row> __device__ __forceinline__ float find_top(const Row& x) {
    unsigned key = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) key = max(key, sortable(__uint_as_float(x.slots[i].z)));
    return from_sortable(__reduce_max_sync(FULL_WARP, key));
}

// The sum of all weights, and the group that wins the first round among all.
template <typename Row> __device__ __forceinline__ void digest(const Row& x, float& sum, int& winner) {
    unsigned key = 0, group = 0;
    sum = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) {
        const uint4 slot = x.slots[i];
        const float distance = x.shift(reference_of(__uint_as_float(slot.z)), x.top);
        const float weighs = __uint_as_float(slot.w);
        sum += Row::IS_PROBS ? weighs : weighs * fast_exp2(distance);
        const unsigned its = sortable(__uint_as_float(slot.x) + distance);
        if (its > key) key = its, group = slot.y;
    }
    sum = lanes_sum<32>(sum);
    const unsigned first = __reduce_max_sync(FULL_WARP, key);
    winner = ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
}
