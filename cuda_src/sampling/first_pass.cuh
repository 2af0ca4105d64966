// Load a row, and find its maximum, its sum of weights and the group of 32 ids that wins the race (sample.cu).
//
// The row's maximum is not known yet. Therefore the weights of a group are relative to the group's maximum, and the sum
// of a tile is relative to the tile's maximum. The final reduction rescales the sums of the tiles.
#pragma once
#include "sampling/random.cuh"
#include "sampling/row.cuh"

// Replace -inf by the lowest finite float, because inf - inf would be NaN.
__device__ __forceinline__ float reference_of(float max_value) { return fmaxf(max_value, -LARGEST_FLOAT); }

struct Group {
    float max_value;
    float partial_sum[4] = {}; // of the weights, relative to `max_value`
    float earliness = 0;       // -log2 of the arrival time in the race

    __device__ __forceinline__ float sum() const {
        return (partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3]);
    }
};

template <bool RACE, typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void read_vectors(const Row<T, PROBS, CLUSTER>& x, int tile, bool cached, float4* to,
                                             Stream stream, Group& found) {
    using Vector = typename VectorOf<T>::type;
    Vector bits[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) bits[j] = *reinterpret_cast<const Vector*>(x.values + x.id_of(tile, x.lane, 4 * j));
    if (RACE) found.earliness = earliness(stream.at(tile * 32 + x.lane, 0).x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.limit(x.unpack(bits[j]));
        found.max_value = max_or_nan(found.max_value, x.largest(four));
        if (cached) to[32 * j] = four;
    }
    const float reference = reference_of(found.max_value);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.limit(x.unpack(bits[j]));
        found.partial_sum[0] += x.relative(four.x, reference), found.partial_sum[1] += x.relative(four.y, reference);
        found.partial_sum[2] += x.relative(four.z, reference), found.partial_sum[3] += x.relative(four.w, reference);
    }
}

// Read a lane's group of ids value by value, for a tile that allows no vector loads.
template <bool RACE, typename Row>
__device__ __forceinline__ void read_values(const Row& x, int local_tile, bool cached, float4* to, Stream stream,
                                            Group& found) {
    const int tile = x.first_tile + local_tile;
#pragma unroll 2
    for (int j = 0; j < 8; ++j) {
        const float4 four = x.combined_at(x.id_of(tile, x.lane, 4 * j));
        found.max_value = max_or_nan(found.max_value, x.largest(four));
        if (cached) to[32 * j] = four;
    }
    if (RACE) found.earliness = earliness(stream.at(tile * 32 + x.lane, 0).x);
    const float reference = reference_of(found.max_value);
    x.for_each(local_tile, [&](int, float value, int c) { found.partial_sum[c] += x.relative(value, reference); });
}

// Publish a tile's results and the maximum of each segment. `started` is true if all blocks of the cluster have
// started, so that their shared memory exists.
template <typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void publish_tile(Row<T, PROBS, CLUSTER>& x, int tile, const Group& group, bool& started) {
    const int segments = x.layout.segments_per_tile, segment_lanes = 32 / segments;
    float max_in_tile = group.max_value;
    for (int step = 1; step < segment_lanes; step *= 2)
        max_in_tile = max_or_nan(max_in_tile, __shfl_xor_sync(FULL_WARP, max_in_tile, step));
    const float max_in_segment = max_in_tile;
    for (int step = segment_lanes; step < 32; step *= 2)
        max_in_tile = max_or_nan(max_in_tile, __shfl_xor_sync(FULL_WARP, max_in_tile, step));
    const float mine = group.sum();
    const float distance = x.shift(reference_of(group.max_value), reference_of(max_in_tile));
    const float tile_sum = lanes_sum<32>(PROBS ? mine : mine * fast_exp2(distance));
    const float key = mine > 0 ? x.log2_of(mine) + distance + group.earliness : -CUDART_INF_F;
    const unsigned first = __reduce_max_sync(FULL_WARP, sortable(key));
    const int first_lane = __ffs(__ballot_sync(FULL_WARP, sortable(key) == first)) - 1;
    if (!started) {
        cluster_wait<CLUSTER>();
        started = true;
    }
    x.publish(tile, make_uint4(__float_as_uint(from_sortable(first)), tile * 32 + first_lane,
                               __float_as_uint(max_in_tile), __float_as_uint(tile_sum)));
    for (int start = 0; start < CLUSTER * segments; start += 32) {
        const int at = start + x.lane;
        const float value = __shfl_sync(FULL_WARP, max_in_segment, at % segments * segment_lanes);
        if (at < CLUSTER * segments)
            dsmem_store<CLUSTER>(at / segments, &x.segment_max[tile * segments + at % segments], value);
    }
}

// RACE: also run the race of the groups.
template <bool RACE, typename T, bool PROBS, int CLUSTER>
__device__ __forceinline__ void load(Row<T, PROBS, CLUSTER>& x, Stream stream) {
    x.clear_list();
    cluster_arrive<CLUSTER>();
    // If CLUSTER is 1, cluster_wait is __syncthreads(), which all warps must reach, so the loop cannot contain it.
    if (CLUSTER == 1) __syncthreads();
    bool started = CLUSTER == 1;
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        const int tile = x.first_tile + local_tile;
        float4* to = x.cache + local_tile * (TILE / 4) + x.lane;
        const bool cached = local_tile < x.layout.cached_tiles;
        Group group{PROBS ? 0.f : -CUDART_INF_F};
        if (x.can_load_vectors(x.values, tile) && !x.second)
            read_vectors<RACE>(x, tile, cached, to, stream, group);
        else
            read_values<RACE>(x, local_tile, cached, to, stream, group);
        if (local_tile < x.layout.group_max_tiles) x.group_max[local_tile * 32 + x.lane] = group.max_value;
        publish_tile(x, tile, group, started);
    }
    if (!started) cluster_wait<CLUSTER>();
    x.slots_of_pass();
}

// Return the row's maximum, or NaN if the row has a NaN.
template <typename Row> __device__ __forceinline__ float find_row_max(const Row& x) {
    unsigned key = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) key = max(key, sortable(__uint_as_float(x.slots[i].z)));
    return from_sortable(__reduce_max_sync(FULL_WARP, key));
}

template <typename Row> __device__ __forceinline__ void find_sum_and_winner(const Row& x, float& sum, int& winner) {
    unsigned key = 0, group = 0;
    sum = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) {
        const uint4 slot = x.slots[i];
        const float distance = x.shift(reference_of(__uint_as_float(slot.z)), x.row_max);
        const float tile_sum = __uint_as_float(slot.w);
        sum += Row::IS_PROBS ? tile_sum : tile_sum * fast_exp2(distance);
        const unsigned tile_key = sortable(__uint_as_float(slot.x) + distance);
        if (tile_key > key) key = tile_key, group = slot.y;
    }
    sum = lanes_sum<32>(sum);
    const unsigned first = __reduce_max_sync(FULL_WARP, key);
    winner = ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
}
