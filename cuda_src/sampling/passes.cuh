// Passes over a loaded row by all threads of the cluster: find the best token, draw one token, or sum the weights of
// the tokens that a bound keeps (order.cuh). `passes` is the number of passes that the cluster has already made.
#pragma once
#include "sampling/random.cuh"
#include "sampling/shared.cuh"

// Return the lowest id of the row that has the largest value.
template <typename Row> __device__ __noinline__ int best(int passes) {
    Row x = recall<Row>(passes);
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        int id = NO_ID;
        if (x.lane_top(local) >= x.top) {
            x.for_each(local, [&](int at, float value, int) {
                if (value == x.top) id = min(id, at);
            });
        }
        __syncwarp();
        x.leave(x.first_tile + local, make_uint4(__reduce_min_sync(FULL_WARP, id), 0, 0, 0));
    }
    const uint4* found = x.slots_of_pass();
    int id = NO_ID;
    for (int i = x.lane; i < x.layout.tiles; i += 32) id = min(id, int(found[i].x));
    return __reduce_min_sync(FULL_WARP, id);
}

// Return the group that wins the race of a round. Only the tokens that the bound keeps take part in the race. The
// result is valid in warp 0 only.
template <typename Row> __device__ __forceinline__ int race(Row& x, Bound bound, unsigned round, Stream stream) {
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        const int tile = x.first_tile + local;
        float part[4] = {};
        if (x.lane_top(local) >= bound.value) {
            x.for_each(local, [&](int id, float value, int c) {
                if (keeps(bound, value, id)) part[c] += x.weight(value);
            });
        }
        const float mine = (part[0] + part[1]) + (part[2] + part[3]);
        unsigned key = 0;
        if (mine > 0) {
            const unsigned group = tile * 32 + x.lane;
            key = sortable(x.log2_of(mine) + earliness(stream.at(group, round).x));
        }
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        const int first_lane = __ffs(__ballot_sync(FULL_WARP, key == first)) - 1;
        x.leave(tile, make_uint4(first, tile * 32 + first_lane, 0, 0));
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

// Draw one of the group's ids that the bound keeps, with a probability proportional to its weight. Return the id, and
// set `value` to its value. Run by one warp.
template <typename Row>
__device__ __forceinline__ int draw(const Row& x, int group, Bound bound, unsigned round, Stream stream, float& value) {
    const int id = x.id_of(group / 32, group % 32, x.lane);
    float own = 0, share = 0;
    if (id < x.vocab) {
        own = x.at(id);
        if (keeps(bound, own, id)) share = x.weight(own);
    }
    const float up_to = lanes_inclusive_sum<32>(share);
    const float target = uniform(stream.at(group, round).y) * __shfl_sync(FULL_WARP, up_to, 31);
    // The prefix sums of different lanes are rounded differently. Therefore a lane whose token has weight 0 may be the
    // first lane that exceeds the target. Such a lane must not be chosen.
    const unsigned reached = __ballot_sync(FULL_WARP, up_to > target && share > 0);
    const unsigned any = __ballot_sync(FULL_WARP, share > 0);
    const int chosen = reached ? __ffs(reached) - 1 : 31 - __clz(any);
    value = __shfl_sync(FULL_WARP, own, chosen);
    return __shfl_sync(FULL_WARP, id, chosen);
}

// Draw one of the tokens that the bound keeps. Return its value and id as a Bound, valid in warp 0 only. `winner` is
// the group that wins the round's race, or negative if it is not known yet.
template <typename Row>
__device__ __noinline__ Bound draw_round(int passes, Bound bound, int winner, unsigned round, Stream stream) {
    Row x = recall<Row>(passes);
    if (winner < 0) winner = race(x, bound, round, stream);
    Bound drawn = {};
    if (x.warp == 0) drawn.id = draw(x, winner, bound, round, stream, drawn.value);
    return drawn;
}

struct Tally {
    int count[2];
    float sum[2];
};

// For each of two bounds, count the tokens that the bound keeps, and sum their weights. `first` must keep all tokens
// that `other` keeps.
template <typename Row> __device__ __forceinline__ Tally tally(Row& x, Bound first, Bound other) {
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        Tally mine = {};
        if (x.lane_top(local) >= first.value)
            x.for_each(local, [&](int id, float value, int) {
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
        x.leave(x.first_tile + local, found);
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

template <typename Row> __device__ __noinline__ Tally tally(int passes, Bound first, Bound other) {
    Row x = recall<Row>(passes);
    return tally(x, first, other);
}

// Return the sum of the weights of the tokens that a bound keeps.
template <typename Row> __device__ __forceinline__ float mass(int passes, Bound bound) {
    Row x = recall<Row>(passes);
    for (int local = x.warp; local < x.local_tiles; local += x.warps) {
        const int tile = x.first_tile + local;
        float part[4] = {};
        if (x.lane_top(local) >= bound.value) {
            // Ids must be compared only in the tile that contains the bound's id. In the other tiles, comparing values
            // is enough.
            if (tile * TILE <= bound.id && bound.id < tile * TILE + TILE - 1) {
                x.for_each(local, [&](int id, float value, int c) {
                    if (keeps(bound, value, id)) part[c] += x.weight(value);
                });
            } else {
                const float above = threshold(bound, tile * TILE + TILE - 1);
                x.for_each(local, [&](int, float value, int c) {
                    if (value > above) part[c] += x.weight(value);
                });
            }
        }
        __syncwarp();
        const float tile_sum = lanes_sum<32>((part[0] + part[1]) + (part[2] + part[3]));
        x.leave(tile, make_uint4(0, 0, __float_as_uint(tile_sum), 0));
    }
    const uint4* found = x.slots_of_pass();
    float sum = 0;
    for (int i = x.lane; i < x.layout.tiles; i += 32) sum += __uint_as_float(found[i].z);
    return lanes_sum<32>(sum);
}
