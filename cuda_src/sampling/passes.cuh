// All threads of the cluster make these passes over a loaded row. `passes_done` counts the earlier passes. A bound
// (order.cuh) selects the tokens that take part.
#pragma once
#include "sampling/random.cuh"
#include "sampling/shared.cuh"

template <typename Row> __device__ __noinline__ int best(int passes_done) {
    Row x = recall<Row>(passes_done);
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        int id = NO_ID;
        if (x.group_max_at(local_tile) >= x.row_max) {
            x.for_each(local_tile, [&](int at, float value, int) {
                if (value == x.row_max) id = min(id, at);
            });
        }
        __syncwarp();
        x.publish(x.first_tile + local_tile, make_uint4(__reduce_min_sync(FULL_WARP, id), 0, 0, 0));
    }
    const uint4* found = x.slots_of_pass();
    int id = NO_ID;
    for (int i = x.lane; i < x.layout.tiles; i += 32) id = min(id, int(found[i].x));
    return __reduce_min_sync(FULL_WARP, id);
}

// Return the group that wins the race (sample.cu); valid in warp 0.
template <typename Row> __device__ __forceinline__ int race(Row& x, Bound bound, unsigned round, Stream stream) {
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        const int tile = x.first_tile + local_tile;
        float partial_sum[4] = {};
        if (x.group_max_at(local_tile) >= bound.value) {
            x.for_each(local_tile, [&](int id, float value, int c) {
                if (keeps(bound, value, id)) partial_sum[c] += x.weight(value);
            });
        }
        const float mine = (partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3]);
        unsigned key = 0;
        if (mine > 0) {
            const unsigned group = tile * 32 + x.lane;
            key = sortable(x.log2_of(mine) + earliness(stream.at(group, round).x));
        }
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        const int first_lane = __ffs(__ballot_sync(FULL_WARP, key == first)) - 1;
        x.publish(tile, make_uint4(first, tile * 32 + first_lane, 0, 0));
    }
    const uint4* found = x.slots_of_pass();
    if (x.warp > 0) return 0;
    unsigned key = 0, group = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) {
        const uint4 slot = found[i];
        if (slot.x > key) key = slot.x, group = slot.y;
    }
    const unsigned first = __reduce_max_sync(FULL_WARP, key);
    return ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
}

// Draw one id of the group, with a probability proportional to its weight. One warp runs this.
template <typename Row>
__device__ __forceinline__ int draw(const Row& x, int group, Bound bound, unsigned round, Stream stream, float& value) {
    const int id = x.id_of(group / 32, group % 32, x.lane);
    float lane_value = 0, weight = 0;
    if (id < x.vocab) {
        lane_value = x.at(id);
        if (keeps(bound, lane_value, id)) weight = x.weight(lane_value);
    }
    const float prefix_sum = lanes_inclusive_sum<32>(weight);
    const float target = uniform(stream.at(group, round).y) * __shfl_sync(FULL_WARP, prefix_sum, 31);
    // Lanes round their prefix sums differently, so a lane of weight 0 may be the first above the target.
    const unsigned reached = __ballot_sync(FULL_WARP, prefix_sum > target && weight > 0);
    const unsigned any = __ballot_sync(FULL_WARP, weight > 0);
    const int chosen = reached ? __ffs(reached) - 1 : 31 - __clz(any);
    value = __shfl_sync(FULL_WARP, lane_value, chosen);
    return __shfl_sync(FULL_WARP, id, chosen);
}

// The result is valid in warp 0. A negative `winner` means that the race has not been run.
template <typename Row>
__device__ __noinline__ Bound draw_round(int passes_done, Bound bound, int winner, unsigned round, Stream stream) {
    Row x = recall<Row>(passes_done);
    if (winner < 0) winner = race(x, bound, round, stream);
    Bound drawn = {};
    if (x.warp == 0) drawn.id = draw(x, winner, bound, round, stream, drawn.value);
    return drawn;
}

struct Tally {
    int count[2];
    float sum[2];
};

// The bound `first` must keep all tokens that the bound `other` keeps.
template <typename Row> __device__ __forceinline__ Tally tally(Row& x, Bound first, Bound other) {
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        Tally mine = {};
        if (x.group_max_at(local_tile) >= first.value)
            x.for_each(local_tile, [&](int id, float value, int) {
                if (id >= x.vocab || !keeps(first, value, id)) return;
                const float w = x.weight(value);
                mine.count[0] += 1, mine.sum[0] += w;
                if (keeps(other, value, id)) mine.count[1] += 1, mine.sum[1] += w;
            });
        __syncwarp();
        uint4 found;
        found.x = __reduce_add_sync(FULL_WARP, unsigned(mine.count[0]));
        found.y = __reduce_add_sync(FULL_WARP, unsigned(mine.count[1]));
        found.z = __float_as_uint(lanes_sum<32>(mine.sum[0]));
        found.w = __float_as_uint(lanes_sum<32>(mine.sum[1]));
        x.publish(x.first_tile + local_tile, found);
    }
    const uint4* found = x.slots_of_pass();
    Tally total = {};
    for (int i = x.lane; i < x.layout.tiles; i += 32) {
        const uint4 slot = found[i];
        total.count[0] += slot.x, total.count[1] += slot.y;
        total.sum[0] += __uint_as_float(slot.z), total.sum[1] += __uint_as_float(slot.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        total.count[i] = __reduce_add_sync(FULL_WARP, unsigned(total.count[i]));
        total.sum[i] = lanes_sum<32>(total.sum[i]);
    }
    return total;
}

template <typename Row> __device__ __noinline__ Tally tally(int passes_done, Bound first, Bound other) {
    Row x = recall<Row>(passes_done);
    return tally(x, first, other);
}

template <typename Row> __device__ __forceinline__ float mass(int passes_done, Bound bound) {
    Row x = recall<Row>(passes_done);
    for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
        const int tile = x.first_tile + local_tile;
        float partial_sum[4] = {};
        if (x.group_max_at(local_tile) >= bound.value) {
            // Only the tile that contains bound.id needs to compare ids.
            if (tile * TILE <= bound.id && bound.id < tile * TILE + TILE - 1) {
                x.for_each(local_tile, [&](int id, float value, int c) {
                    if (keeps(bound, value, id)) partial_sum[c] += x.weight(value);
                });
            } else {
                const float above = threshold(bound, tile * TILE + TILE - 1);
                x.for_each(local_tile, [&](int, float value, int c) {
                    if (value > above) partial_sum[c] += x.weight(value);
                });
            }
        }
        __syncwarp();
        const float tile_sum = lanes_sum<32>((partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3]));
        x.publish(tile, make_uint4(0, 0, __float_as_uint(tile_sum), 0));
    }
    const uint4* found = x.slots_of_pass();
    float sum = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) sum += __uint_as_float(found[i].z);
    return lanes_sum<32>(sum);
}
