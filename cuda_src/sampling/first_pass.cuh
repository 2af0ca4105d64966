// Make the first pass over a row: load it, and find its largest value, the sum of its weights and the group that wins
// the race (the random choice of a group of 32 ids, see sample.cu).
//
// Weights are relative to the largest value of the row, which this pass does not know yet. Therefore a group's sum is
// relative to the largest value of the group, and the sum in a tile's slot (the entry of `slots` with the tile's
// result) is relative to the largest value of the tile. The final reduction over the slots rescales these sums.
#pragma once
#include "sampling/random.cuh"
#include "sampling/row.cuh"

// Return the reference value for weights if the largest value is `top`. The reference is finite even if `top` is -inf,
// because inf - inf would be NaN.
__device__ __forceinline__ float reference_of(float top) { return fmaxf(top, -LARGEST_FLOAT); }

// The results of one lane: it reads one group of 32 ids per tile.
struct Group {
    float top;          // the largest value
    float part[4] = {}; // four partial sums of the weights, relative to `top`
    float early = 0;    // -log2 of the group's random time in the race

    __device__ __forceinline__ float sum() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

// Read a lane's group of a tile with vector loads, and write it to the cache in shared memory if `cached`.
template <bool RACE, typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void read_vectors(const Row<T, PROBS, CLUSTER>& x, int tile, bool cached, float4* to,
                                             Stream stream, Group& found) {
    using Vector = typename VectorOf<T>::type;
    Vector bits[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) bits[j] = *reinterpret_cast<const Vector*>(x.values + x.id_of(tile, x.lane, 4 * j));
    // Compute the random number while the loads are in flight.
    if (RACE) found.early = earliness(stream.at(tile * 32 + x.lane, 0).x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.limit(x.unpack(bits[j]));
        found.top = max_or_nan(found.top, x.largest(four));
        if (cached) to[32 * j] = four;
    }
    const float reference = reference_of(found.top);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.limit(x.unpack(bits[j]));
        found.part[0] += x.relative(four.x, reference), found.part[1] += x.relative(four.y, reference);
        found.part[2] += x.relative(four.z, reference), found.part[3] += x.relative(four.w, reference);
    }
}

// Read a lane's group value by value, for tiles that cannot use vector loads. Write it to the cache in shared memory if
// `cached`.
template <bool RACE, typename Row>
__device__ __forceinline__ void read_values(const Row& x, int local, bool cached, float4* to, Stream stream,
                                            Group& found) {
    const int tile = x.first_tile + local;
#pragma unroll 2
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.combined_at(x.id_of(tile, x.lane, 4 * j));
        found.top = max_or_nan(found.top, x.largest(four));
        if (cached) to[32 * j] = four;
    }
    if (RACE) found.early = earliness(stream.at(tile * 32 + x.lane, 0).x);
    const float reference = reference_of(found.top);
    x.for_each(local, [&](int, float value, int c) { found.part[c] += x.relative(value, reference); });
}

// Store the results of a tile. The tile's slot gets four values: the race key of the tile's fastest group, the index of
// that group, the tile's largest value, and the sum of the tile's weights. `tops` gets the largest value of each of the
// `tops_per_tile` parts of the tile. If `started` is false, first wait until all blocks of the cluster have started,
// because only then may this block write to their shared memory.
template <typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void leave_tile(Row<T, PROBS, CLUSTER>& x, int tile, const Group& group, bool& started) {
    const int parts = x.layout.tops_per_tile, part_lanes = 32 / parts;
    float tile_top = group.top;
    for (int step = 1; step < part_lanes; step *= 2)
        tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
    const float part_top = tile_top;
    for (int step = part_lanes; step < 32; step *= 2)
        tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
    const float mine = group.sum();
    const float distance = x.shift(reference_of(group.top), reference_of(tile_top));
    const float tile_sum = lanes_sum<32>(PROBS ? mine : mine * fast_exp2(distance));
    const float key = mine > 0 ? x.log2_of(mine) + distance + group.early : -CUDART_INF_F;
    const unsigned first = __reduce_max_sync(FULL_WARP, sortable(key));
    const int first_lane = __ffs(__ballot_sync(FULL_WARP, sortable(key) == first)) - 1;
    if (!started) {
        cluster_wait<CLUSTER>();
        started = true;
    }
    x.leave(tile, make_uint4(__float_as_uint(from_sortable(first)), tile * 32 + first_lane, __float_as_uint(tile_top),
                             __float_as_uint(tile_sum)));
    for (int base = 0; base < CLUSTER * parts; base += 32) {
        const int at = base + x.lane;
        const float value = __shfl_sync(FULL_WARP, part_top, at % parts * part_lanes);
        if (at < CLUSTER * parts) dsmem_store<CLUSTER>(at / parts, &x.tops[tile * parts + at % parts], value);
    }
}

// Load the row, and store the results of its tiles in all blocks of the cluster. RACE: also run the race of the groups.
template <bool RACE, typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void load(Row<T, PROBS, CLUSTER>& x, Stream stream) {
    x.clear_list();
    cluster_arrive<CLUSTER>();
    // If CLUSTER is 1, `cluster_wait` is a plain __syncthreads(). All warps must reach it, so it cannot be in the loop
    // below.
    if (CLUSTER == 1) __syncthreads();
    bool started = CLUSTER == 1;
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        const int tile = x.first_tile + local;
        float4* to = x.cache + local * (TILE / 4) + x.lane;
        const bool cached = local < x.layout.cached_tiles;
        Group group{PROBS ? 0.f : -CUDART_INF_F};
        if (x.whole(x.values, tile) && !x.second)
            read_vectors<RACE>(x, tile, cached, to, stream, group);
        else
            read_values<RACE>(x, local, cached, to, stream, group);
        if (local < x.layout.topped_tiles) x.lane_tops[local * 32 + x.lane] = group.top;
        leave_tile(x, tile, group, started);
    }
    if (!started) cluster_wait<CLUSTER>();
    x.slots_of_pass();
}

// Return the largest value of the row, for x.top. Return NaN if the row has a NaN.
template <typename Row> __device__ __forceinline__ float find_top(const Row& x) {
    unsigned key = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) key = max(key, sortable(__uint_as_float(x.slots[i].z)));
    return from_sortable(__reduce_max_sync(FULL_WARP, key));
}

// Find the sum of all weights of the row, and the group that wins the first race.
template <typename Row> __device__ __forceinline__ void find_sum_and_winner(const Row& x, float& sum, int& winner) {
    unsigned key = 0, group = 0;
    sum = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) {
        const uint4 slot = x.slots[i];
        const float distance = x.shift(reference_of(__uint_as_float(slot.z)), x.top);
        const float tile_sum = __uint_as_float(slot.w);
        sum += Row::IS_PROBS ? tile_sum : tile_sum * fast_exp2(distance);
        const unsigned tile_key = sortable(__uint_as_float(slot.x) + distance);
        if (tile_key > key) key = tile_key, group = slot.y;
    }
    sum = lanes_sum<32>(sum);
    const unsigned first = __reduce_max_sync(FULL_WARP, key);
    winner = ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
}
