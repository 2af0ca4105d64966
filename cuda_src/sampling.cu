// Draw a token from each row of logits or probabilities, of those that top-k, top-p and min-p leave.
//
//   weight(i) = exp((x[i] - max x) / temperature)        of logits
//   weight(i) = max(x[i], 0)                             of probabilities
//   kept      = a prefix of the tokens in order of x, largest first, ties by the lower id
//   token     = i with probability weight(i) / sum of the kept weights
//
// The draw has two steps, so that it needs few random numbers and no running sums over the row. The vocabulary is cut
// into groups of 32 ids. First the groups race: group g, whose kept weights sum to W[g], arrives after an
// exponentially distributed time of rate W[g], so the first is g with probability W[g] / sum W. Then one of its ids is
// drawn by its share. Both random numbers come from Philox at (seed, offset, g), so that the token depends on nothing
// else, and on no order of execution.
//
// Top-p is had by rejection (as in FlashInfer, but with the race): a drawn token is kept if what weighs more sums to
// less than p; else it and all behind it go, and the draw is repeated. That is the distribution over the kept set,
// without its bound, after 1 + ln(1 / p) rounds at most on average.
//
// Grid: CLUSTER blocks per row. A warp takes tiles of 1024 ids; lane l holds in tile t the group
// {1024 t + 128 j + 4 l + c : j < 8, c < 4}, which it alone reads, once from global memory and then from shared
// memory, as far as that holds the row. What a pass over the row finds, a warp leaves in a slot per tile, in every
// block of the cluster; whoever needs the sum then adds up its block's own slots, always in the same order.
#include "common/cluster.cuh"
#include "common/philox.cuh"
#include "common/warp.cuh"

constexpr int TILE = 1024;
constexpr int MIN_WARPS = 6, MAX_WARPS = 16;
constexpr int MAX_TOPS = 256;
constexpr int CAPACITY = 192;  // candidates that can be ranked, one by a thread
constexpr int MAX_LISTED = 96; // the largest k that is looked for among candidates
constexpr int NO_ID = 0x7fffffff;

enum Mode { SOFTMAX, TOP_K_RENORM, TOP_P_RENORM, TOP_K_MASK };

// Tokens with x > value, and those with x == value up to this id.
struct Bound {
    float value;
    int id;
};

__device__ __forceinline__ bool keeps(Bound bound, float x, int id) {
    return x > bound.value || (x == bound.value && id <= bound.id);
}

__device__ __forceinline__ Bound tighter(Bound a, Bound b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b;
}

// What a bound keeps of ids that are all up to its id, or all behind it: x > threshold.
__device__ __forceinline__ float threshold(Bound bound, int last_id) {
    if (last_id > bound.id) return bound.value;
    const float below = from_sortable(sortable(bound.value) - 1);
    return bound.value == 0 ? -1e-45f : bound.value == -CUDART_INF_F ? -CUDART_INF_F : below;
}

// The larger, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Orders by value, then by the lower id; 0 is below them all.
__device__ __forceinline__ unsigned long long candidate(float x, int id) {
    return (unsigned long long)sortable(x == 0 ? 0.f : x) << 32 | ~unsigned(id);
}

// -log2(an exponentially distributed time, in units of ln 2). Near its end, 1 - v would lose the short times.
__device__ __forceinline__ float earliness(unsigned bits) {
    const float v = fmaf(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 0.25f, 1.f / 3), 0.5f), 1.f) * LOG2_E;
    return -fast_log2(v < 0x1p-6f ? series : -fast_log2(1.f - v));
}

__device__ __forceinline__ void store_four(float* to, const float* x) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}

template <typename T> __device__ __forceinline__ void store_four(T* to, const float* x) {
    uint2 bits;
    T* values = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] = from_float<T>(x[c]);
    __stcs(reinterpret_cast<uint2*>(to), bits);
}

template <typename T, Mode MODE> struct OutOf {
    using type = T;
};
template <typename T> struct OutOf<T, SOFTMAX> {
    using type = float;
};

template <typename T> struct VectorOf {
    using type = uint2;
};
template <> struct VectorOf<float> {
    using type = uint4;
};

// The random numbers of a row.
struct Stream {
    unsigned long long seed, offset;

    __device__ __forceinline__ uint4 at(unsigned place, unsigned round) const {
        return philox(make_uint4(place, round, unsigned(offset), unsigned(offset >> 32)), seed);
    }
};

struct Tally {
    int count[2];
    float sum[2];
};

// The sizes that the host lays memory out by.
struct Layout {
    int tiles; // of the row
    int tiles_per_block;
    int cached_tiles;  // of a block, in shared memory; the others are read again
    int tops_per_tile; // a power of two
    int topped_tiles;  // of a block: those whose lanes' largest values are kept, the first ones
};

// What one block needs to draw from sorted candidates by itself.
struct Listed {
    float weight[MAX_LISTED];
    float before[MAX_LISTED]; // the sum of the better ones
    int group[MAX_LISTED];
    unsigned long long best[MAX_LISTED / 32];
    int chosen[MAX_LISTED / 32];
};

__device__ __forceinline__ int group_of(int id) { return id / TILE * 32 + id / 4 % 32; }

template <bool PROBS> __device__ __forceinline__ float combine(float x, float y) { return PROBS ? x - y : x + y; }

// The four values from `id` on, where they do not lie as a vector, or another row goes with them. What lies behind the
// end of the row weighs nothing. No inline function: it would be compiled dozens of times.
template <typename T, bool PROBS>
__device__ __noinline__ float4 slow_four(const T* values, const T* second, int vocab, int id) {
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        x[c] = id + c < vocab ? to_float(values[id + c]) : PROBS ? 0.f : -CUDART_INF_F;
        if (second && id + c < vocab) x[c] = combine<PROBS>(x[c], to_float(second[id + c]));
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

// A row as the cluster holds it, in float32.
template <typename T, bool PROBS, int CLUSTER> struct Row {
    using Vector = typename VectorOf<T>::type;
    static constexpr int BLOCKS = CLUSTER;
    static constexpr float LEAST = PROBS ? 0.f : -LARGEST_FLOAT;

    const T* values;
    const T* second; // added to logits, subtracted from probabilities; or null
    int vocab;
    Layout layout;
    float scale; // log2(e) / temperature
    int lane, warp, warps, first_tile, local_tiles, turn;
    float4* cache;            // [cached_tiles, 8, 32]
    uint4* slots;             // [2, tiles]
    unsigned long long* list; // [CAPACITY]
    float* lane_tops;         // [topped_tiles, 32]
    float* tops;              // [tiles, tops_per_tile]
    int* list_size;
    float top; // after `find_top`

    __device__ Row(const T* values, const T* second, int vocab, Layout layout, float scale, float4* shared,
                   int* list_size)
        : values(values), second(second), vocab(vocab), layout(layout), scale(scale), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32), warps(blockDim.x / 32), turn(0), cache(shared), list_size(list_size) {
        first_tile = cluster_rank<CLUSTER>() * layout.tiles_per_block;
        local_tiles = max(0, min(layout.tiles_per_block, layout.tiles - first_tile));
        slots = reinterpret_cast<uint4*>(cache + layout.cached_tiles * (TILE / 4));
        list = reinterpret_cast<unsigned long long*>(slots + 2 * layout.tiles);
        lane_tops = reinterpret_cast<float*>(list + CAPACITY);
        tops = lane_tops + layout.topped_tiles * 32;
    }

    // --- reading --------------------------------------------------------------------------------------

    __device__ __forceinline__ bool whole(const T* from, int tile) const {
        return reinterpret_cast<unsigned long long>(from) % sizeof(Vector) == 0 && (tile + 1) * TILE <= vocab;
    }

    __device__ __forceinline__ float4 unpack(Vector bits) const {
        const T* x = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
    }

    // A difference of infinite logits would be NaN. Less than nothing weighs nothing.
    __device__ __forceinline__ float limit(float x) const {
        return PROBS ? max_or_nan(x, 0.f) : min_or_nan(x, LARGEST_FLOAT);
    }

    __device__ __forceinline__ float4 limit(float4 x) const {
        return make_float4(limit(x.x), limit(x.y), limit(x.z), limit(x.w));
    }

    __device__ __forceinline__ float largest(float4 x) const {
        return max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w));
    }

    // One value, as it lies in global memory.
    __device__ __forceinline__ float at_memory(int id) const { return to_float(values[id]); }

    // The same as the passes see it.
    __device__ __forceinline__ float at(int id) const {
        const float x = at_memory(id);
        return limit(second ? combine<PROBS>(x, to_float(second[id])) : x);
    }

    __device__ __forceinline__ float4 combined_at(int id) const {
        return limit(slow_four<T, PROBS>(values, second, vocab, id));
    }

    // Hand `take(id, value, c)` the values of this lane's group of a tile, c the place in their four.
    template <typename Take> __device__ __forceinline__ void for_each(int local, Take take) const {
        const int tile = first_tile + local;
        const int first = id_of(tile, lane, 0);
        const bool fast = whole(values, tile) && !second;
        // Not all at once: 32 values would fill the registers.
#pragma unroll 1
        for (int half = 0; half < 8; half += 4) {
            float4 four[4];
            if (local < layout.cached_tiles) {
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = cache[(local * 8 + half + j) * 32 + lane];
            } else if (fast) {
                Vector bits[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    bits[j] = *reinterpret_cast<const Vector*>(values + first + 128 * (half + j));
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = limit(unpack(bits[j]));
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = combined_at(first + 128 * (half + j));
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int id = first + 128 * (half + j);
                take(id, four[j].x, 0), take(id + 1, four[j].y, 1), take(id + 2, four[j].z, 2),
                    take(id + 3, four[j].w, 3);
            }
        }
    }

    // exp of a value's distance from a reference, which must be finite; a probability as it is.
    __device__ __forceinline__ float relative(float x, float reference) const {
        return PROBS ? x : fast_exp2((x - reference) * scale);
    }

    __device__ __forceinline__ float weight(float x) const { return relative(x, top); }

    // Probabilities may be so small that fast_log2 would take them for 0.
    __device__ __forceinline__ float log2_of(float x) const { return PROBS ? __log2f(x) : fast_log2(x); }

    // log2 of what a weight relative to `from` grows by relative to `to`.
    __device__ __forceinline__ float shift(float from, float to) const { return PROBS ? 0.f : (from - to) * scale; }

    // Load the row. Each warp leaves its tiles' largest value, sum of weights and first group of the race, and in `tops`
    // the largest values of parts of the tile.
    template <bool RACE> __device__ __forceinline__ void load(Stream stream) {
        clear_list();
        cluster_arrive<CLUSTER>();
        // One block waits for nobody else, and its barrier must be where its warps are together.
        if (CLUSTER == 1) __syncthreads();
        bool started = CLUSTER == 1;
        for (int local = warp; local < local_tiles; local += warps) {
            const int tile = first_tile + local;
            float4* to = cache + local * (TILE / 4) + lane;
            const bool cached = local < layout.cached_tiles;
            float most = PROBS ? 0.f : -CUDART_INF_F, part[4] = {}, early = 0;
            if (whole(values, tile) && !second) {
                Vector bits[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    bits[j] = *reinterpret_cast<const Vector*>(values + id_of(tile, lane, 4 * j));
                // While the values are on their way.
                if (RACE) early = earliness(stream.at(tile * 32 + lane, 0).x);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float4 x = limit(unpack(bits[j]));
                    most = max_or_nan(most, largest(x));
                    if (cached) to[32 * j] = x;
                }
                const float reference = fmaxf(most, -LARGEST_FLOAT);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float4 x = limit(unpack(bits[j]));
                    part[0] += relative(x.x, reference), part[1] += relative(x.y, reference);
                    part[2] += relative(x.z, reference), part[3] += relative(x.w, reference);
                }
            } else {
#pragma unroll 2
                for (int j = 0; j < 8; ++j) {
                    const float4 x = combined_at(id_of(tile, lane, 4 * j));
                    most = max_or_nan(most, largest(x));
                    if (cached) to[32 * j] = x;
                }
                if (RACE) early = earliness(stream.at(tile * 32 + lane, 0).x);
                const float reference = fmaxf(most, -LARGEST_FLOAT);
                for_each(local, [&](int, float x, int c) { part[c] += relative(x, reference); });
            }
            if (local < layout.topped_tiles) lane_tops[local * 32 + lane] = most;

            const int parts = layout.tops_per_tile, part_lanes = 32 / parts;
            float tile_top = most;
            for (int step = 1; step < part_lanes; step *= 2)
                tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
            const float part_top = tile_top;
            for (int step = part_lanes; step < 32; step *= 2)
                tile_top = max_or_nan(tile_top, __shfl_xor_sync(FULL_WARP, tile_top, step));
            const float mine = (part[0] + part[1]) + (part[2] + part[3]);
            const float distance = shift(fmaxf(most, -LARGEST_FLOAT), fmaxf(tile_top, -LARGEST_FLOAT));
            const float tile_sum = lanes_sum<32>(PROBS ? mine : mine * fast_exp2(distance));
            const float key = mine > 0 ? log2_of(mine) + distance + early : -CUDART_INF_F;
            const unsigned first = __reduce_max_sync(FULL_WARP, sortable(key));
            const int first_lane = __ffs(__ballot_sync(FULL_WARP, sortable(key) == first)) - 1;
            if (!started) {
                // The blocks of the cluster have all started, so that they can be written to.
                cluster_wait<CLUSTER>();
                started = true;
            }
            leave(tile, make_uint4(__float_as_uint(from_sortable(first)), tile * 32 + first_lane,
                                   __float_as_uint(tile_top), __float_as_uint(tile_sum)));
            for (int base = 0; base < CLUSTER * parts; base += 32) {
                const int at = base + lane;
                const float value = __shfl_sync(FULL_WARP, part_top, at % parts * part_lanes);
                if (at < CLUSTER * parts) dsmem_store<CLUSTER>(at / parts, &tops[tile * parts + at % parts], value);
            }
        }
        if (!started) cluster_wait<CLUSTER>();
        slots_of_pass();
    }

    // Whether there is something to draw, and no NaN.
    __device__ __forceinline__ bool valid() const {
        return PROBS ? top > 0 && top <= LARGEST_FLOAT : top >= -LARGEST_FLOAT;
    }

    __device__ __forceinline__ void find_top() {
        // NaN is above all.
        unsigned key = 0;
        for (int i = lane; i < layout.tiles; i += 32) key = max(key, sortable(__uint_as_float(slots[i].z)));
        top = from_sortable(__reduce_max_sync(FULL_WARP, key));
    }

    // The sum of all weights, and the group that wins the first round among all.
    __device__ __forceinline__ void digest(float& sum, int& winner) const {
        unsigned key = 0, group = 0;
        sum = 0;
        for (int i = lane; i < layout.tiles; i += 32) {
            const uint4 slot = slots[i];
            const float distance = shift(fmaxf(__uint_as_float(slot.z), -LARGEST_FLOAT), top);
            const float weighs = __uint_as_float(slot.w);
            sum += PROBS ? weighs : weighs * fast_exp2(distance);
            const unsigned its = sortable(__uint_as_float(slot.x) + distance);
            if (its > key) key = its, group = slot.y;
        }
        sum = lanes_sum<32>(sum);
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        winner = ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
    }

    __device__ __forceinline__ int id_of(int tile, int in_lane, int e) const {
        return tile * TILE + 128 * (e / 4) + 4 * in_lane + e % 4;
    }

    // --- what tiles leave for all ---------------------------------------------------------------------

    __device__ __forceinline__ void leave(int tile, uint4 found) {
        if (lane < CLUSTER) dsmem_store<CLUSTER>(lane, &slots[turn * layout.tiles + tile], found);
    }

    // Wait for the slots of a pass. The next pass writes the others: a slow block may still read these.
    __device__ __forceinline__ const uint4* slots_of_pass() {
        cluster_sync<CLUSTER>();
        const uint4* read = slots + turn * layout.tiles;
        turn ^= 1;
        return read;
    }

    // No less than the largest value of this lane's group.
    __device__ __forceinline__ float lane_top(int local) const {
        return local < layout.topped_tiles ? lane_tops[local * 32 + lane] : CUDART_INF_F;
    }

    // --- passes over the row --------------------------------------------------------------------------

    // The lowest id of those with the largest value.
    __device__ __forceinline__ int best() {
        for (int local = warp; local < local_tiles; local += warps) {
            int id = NO_ID;
            if (lane_top(local) >= top) {
                for_each(local, [&](int at, float x, int) {
                    if (x == top) id = min(id, at);
                });
            }
            __syncwarp();
            leave(first_tile + local, make_uint4(__reduce_min_sync(FULL_WARP, id), 0, 0, 0));
        }
        const uint4* found = slots_of_pass();
        int id = NO_ID;
        for (int i = lane; i < layout.tiles; i += 32) id = min(id, int(found[i].x));
        return __reduce_min_sync(FULL_WARP, id);
    }

    // The group that wins a round among what a bound keeps; only warp 0 gets to know.
    __device__ __forceinline__ int race(Bound bound, unsigned round, Stream stream) {
        for (int local = warp; local < local_tiles; local += warps) {
            const int tile = first_tile + local;
            float part[4] = {};
            if (lane_top(local) >= bound.value) {
                for_each(local, [&](int id, float x, int c) {
                    if (keeps(bound, x, id)) part[c] += weight(x);
                });
            }
            const float mine = (part[0] + part[1]) + (part[2] + part[3]);
            unsigned key = 0;
            if (mine > 0) {
                const unsigned group = tile * 32 + lane;
                key = sortable(log2_of(mine) + earliness(stream.at(group, round).x));
            }
            const unsigned first = __reduce_max_sync(FULL_WARP, key);
            const int first_lane = __ffs(__ballot_sync(FULL_WARP, key == first)) - 1;
            leave(tile, make_uint4(first, tile * 32 + first_lane, 0, 0));
        }
        const uint4* found = slots_of_pass();
        if (warp > 0) return 0;
        unsigned key = 0, group = 0;
        for (int i = lane; i < layout.tiles; i += 32) {
            const uint4 slot = found[i];
            if (slot.x > key) key = slot.x, group = slot.y;
        }
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        return ~__reduce_max_sync(FULL_WARP, key == first ? ~group : 0);
    }

    // An id of the group, drawn by its share of the kept weights; its value too.
    __device__ __forceinline__ int draw(int group, Bound bound, unsigned round, Stream stream, float& value) const {
        const int id = id_of(group / 32, group % 32, lane);
        float x = 0, share = 0;
        if (id < vocab) {
            x = at(id);
            if (keeps(bound, x, id)) share = weight(x);
        }
        const float up_to = lanes_inclusive_sum<32>(share);
        const float target = uniform(stream.at(group, round).y) * __shfl_sync(FULL_WARP, up_to, 31);
        // A sum in another order can be smaller than that before it: the share decides too.
        const unsigned reached = __ballot_sync(FULL_WARP, up_to > target && share > 0);
        const unsigned any = __ballot_sync(FULL_WARP, share > 0);
        const int chosen = reached ? __ffs(reached) - 1 : 31 - __clz(any);
        value = __shfl_sync(FULL_WARP, x, chosen);
        return __shfl_sync(FULL_WARP, id, chosen);
    }

    // The counts of what two bounds keep, the first being the looser, and the sums of the weights.
    __device__ __forceinline__ Tally tally(Bound first, Bound other) {
        for (int local = warp; local < local_tiles; local += warps) {
            Tally mine = {};
            if (lane_top(local) >= first.value)
                for_each(local, [&](int id, float x, int) {
                    if (id >= vocab || !keeps(first, x, id)) return;
                    const float w = weight(x);
                    mine.count[0] += 1, mine.sum[0] += w;
                    if (keeps(other, x, id)) mine.count[1] += 1, mine.sum[1] += w;
                });
            __syncwarp();
            uint4 found;
            found.x = __reduce_add_sync(FULL_WARP, unsigned(mine.count[0]));
            found.y = __reduce_add_sync(FULL_WARP, unsigned(mine.count[1]));
            found.z = __float_as_uint(lanes_sum<32>(mine.sum[0]));
            found.w = __float_as_uint(lanes_sum<32>(mine.sum[1]));
            leave(first_tile + local, found);
        }
        const uint4* found = slots_of_pass();
        Tally total = {};
        for (int i = lane; i < layout.tiles; i += 32) {
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

    // The sum of the weights of what a bound keeps.
    __device__ __forceinline__ float mass(Bound bound) {
        for (int local = warp; local < local_tiles; local += warps) {
            const int tile = first_tile + local;
            float part[4] = {};
            if (lane_top(local) >= bound.value) {
                // The ids matter in one tile only.
                if (tile * TILE <= bound.id && bound.id < tile * TILE + TILE - 1) {
                    for_each(local, [&](int id, float x, int c) {
                        if (keeps(bound, x, id)) part[c] += weight(x);
                    });
                } else {
                    const float above = threshold(bound, tile * TILE + TILE - 1);
                    for_each(local, [&](int, float x, int c) {
                        if (x > above) part[c] += weight(x);
                    });
                }
            }
            __syncwarp();
            const float tile_sum = lanes_sum<32>((part[0] + part[1]) + (part[2] + part[3]));
            leave(tile, make_uint4(0, 0, __float_as_uint(tile_sum), 0));
        }
        const uint4* found = slots_of_pass();
        float sum = 0;
        for (int i = lane; i < layout.tiles; i += 32) sum += __uint_as_float(found[i].z);
        return lanes_sum<32>(sum);
    }

    // --- bounds ---------------------------------------------------------------------------------------

    __device__ __forceinline__ void clear_list() {
        if (threadIdx.x == 0) *list_size = 0;
    }

    // Put the tokens with low <= x < high into the lists of the first `blocks` blocks, in one order, if they fit. Returns
    // how many there are.
    __device__ __forceinline__ int gather(int blocks, float low, float high) {
        for (int local = warp; local < local_tiles; local += warps) {
            unsigned wanted = 0;
            if (lane_top(local) >= low) {
                const int first = id_of(first_tile + local, lane, 0);
                for_each(local, [&](int id, float x, int c) {
                    wanted |= unsigned(x >= low && x < high && id < vocab) << ((id - first) / 32 + c);
                });
                int position = wanted ? dsmem_atomic_add<CLUSTER>(0, list_size, __popc(wanted)) : 0;
                for (unsigned left = wanted; left && position < CAPACITY; left &= left - 1, ++position) {
                    const int id = id_of(first_tile + local, lane, __ffs(left) - 1);
                    for (int rank = 0; rank < blocks; ++rank)
                        dsmem_store<CLUSTER>(rank, &list[position], candidate(at(id), id));
                }
            }
            const unsigned mine = __popc(wanted);
            __syncwarp();
            leave(first_tile + local, make_uint4(__reduce_add_sync(FULL_WARP, mine), 0, 0, 0));
        }
        const uint4* found = slots_of_pass();
        unsigned size = 0;
        for (int i = lane; i < layout.tiles; i += 32) size += found[i].x;
        return __reduce_add_sync(FULL_WARP, size);
    }

    // Sort the list, largest first.
    __device__ __forceinline__ void sort_list(int size) {
        static_assert(CAPACITY <= 32 * MIN_WARPS, "a thread has one");
        const int i = threadIdx.x;
        const unsigned long long mine = i < size ? list[i] : 0;
        int rank = 0;
        if (i < size) {
#pragma unroll 8
            for (int other = 0; other < size; ++other) rank += list[other] > mine;
        }
        __syncthreads();
        if (i < size) list[rank] = mine;
        __syncthreads();
    }

    __device__ __forceinline__ Bound bound_at(int rank) const {
        const unsigned long long found = list[rank];
        return {from_sortable(unsigned(found >> 32)), int(~unsigned(found))};
    }

    // Whether the k best are looked for among candidates; the same for all variants, whose sums differ in rounding.
    __device__ __forceinline__ bool lists(int k) const {
        return k <= MAX_LISTED && 2 * k <= layout.tiles * layout.tops_per_tile;
    }

    // A value that at least k tokens reach, and few more: nearly the k-th largest of the tops.
    __device__ __forceinline__ float reached_by(int k) const {
        constexpr int MINE = MAX_TOPS / 32, SPARE = 16;
        // Tokens that weigh nothing are never drawn: without k others, all others are kept.
        const unsigned least = sortable(PROBS ? 1e-45f : -LARGEST_FLOAT);
        unsigned keys[MINE];
#pragma unroll
        for (int n = 0; n < MINE; ++n) keys[n] = 0;
        unsigned low = ~0u;
        for (int base = 0; base < layout.tiles * layout.tops_per_tile; base += MAX_TOPS)
#pragma unroll
            for (int n = 0; n < MINE; ++n) {
                const int i = base + 32 * n + lane;
                if (i >= layout.tiles * layout.tops_per_tile) break;
                const unsigned key = sortable(tops[i]);
                keys[n] = max(keys[n], key);
                low = min(low, key);
            }
        low = max(__reduce_min_sync(FULL_WARP, low), least);
        unsigned high = sortable(top) + 1;
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

    // A token of the k best of the list, by one block: the same rounds as over the row. `all_sum` is what top-p is a
    // share of, if not of the k best.
    __device__ __forceinline__ int draw_listed(Listed& listed, int size, int k, float least, float top_p, float all_sum,
                                               Stream stream, float& value) {
        sort_list(size);
        const int i = threadIdx.x, best = min(k, size);
        Bound mine = {-CUDART_INF_F, NO_ID};
        if (i < best) {
            mine = bound_at(i);
            listed.weight[i] = weight(mine.value);
            listed.group[i] = group_of(mine.id);
        }
        int kept = __syncthreads_count(i < best && mine.value >= least);
        int chosen = 0;
        for (unsigned round = 0;; ++round) {
            const int group = group_of(mine.id);
            uint4 bits;
            float group_sum = 0;
            unsigned key = 0;
            if (i < best) {
                if (i < kept) bits = stream.at(group, round);
                float before = 0;
#pragma unroll 4
                for (int other = 0; other < best; ++other) {
                    const float its = listed.weight[other];
                    if (other < i) before += its;
                    if (other < kept && listed.group[other] == group) group_sum += its;
                }
                // The same in each round; a slow thread may still be reading it.
                if (round == 0) listed.before[i] = before;
                if (i < kept && group_sum > 0) key = sortable(log2_of(group_sum) + earliness(bits.x));
            }
            if (i < MAX_LISTED) {
                const unsigned first = __reduce_max_sync(FULL_WARP, key);
                const unsigned lowest = __reduce_max_sync(FULL_WARP, key == first ? ~unsigned(group) : 0);
                if (lane == 0) listed.best[warp] = (unsigned long long)first << 32 | lowest;
            }
            __syncthreads();
            const float of_sum = all_sum > 0 ? all_sum : listed.before[best - 1] + listed.weight[best - 1];
            // So little may be wanted that the best token is enough.
            if (top_p < 1 && top_p * of_sum <= listed.weight[0]) break;
            unsigned long long winner = 0;
#pragma unroll
            for (int n = 0; n < MAX_LISTED / 32; ++n) winner = max(winner, listed.best[n]);
            // Of the group's ids the lowest by which the sum has passed the share, and its rank.
            int found = NO_ID;
            if (i < kept && group == int(~unsigned(winner))) {
                float up_to = listed.weight[i];
                if (up_to < group_sum) {
                    up_to = 0;
                    for (int other = 0; other < kept; ++other)
                        if (listed.group[other] == group && bound_at(other).id <= mine.id)
                            up_to += listed.weight[other];
                }
                // Where the sum is no normal number its share may round to all of it, which nothing passes.
                const bool passed = up_to > uniform(bits.y) * group_sum || up_to == group_sum;
                if (passed && listed.weight[i] > 0) found = mine.id * 128 + i;
            }
            if (i < MAX_LISTED) {
                found = __reduce_min_sync(FULL_WARP, unsigned(found));
                if (lane == 0) listed.chosen[warp] = found;
            }
            __syncthreads();
            found = NO_ID;
#pragma unroll
            for (int n = 0; n < MAX_LISTED / 32; ++n) found = min(found, listed.chosen[n]);
            chosen = found % 128;
            if (!(top_p < 1) || listed.before[chosen] < top_p * of_sum) break;
            kept = chosen;
        }
        const Bound its = bound_at(chosen);
        value = its.value;
        return its.id;
    }
};

// --- the passes as functions ------------------------------------------------------------------------------

// Inlined wherever they are needed, the passes would not fit the instruction cache. Those off the usual way are
// functions. They would force the row out of its registers if they took its address: instead they start from a copy in
// shared memory. A pass takes the number of passes before it, which says whose turn the slots are.
template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // what the k best reach
    Bound drawn;
    Listed listed;
    int list_size;
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// By one thread, before a barrier, once `top` is known.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

template <typename Row> __device__ __forceinline__ Row recall(int passes) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.turn = passes % 2;
    return x;
}

template <typename Row> __device__ __noinline__ int best(int passes) { return recall<Row>(passes).best(); }

template <typename Row> __device__ __forceinline__ float mass(int passes, Bound bound) {
    return recall<Row>(passes).mass(bound);
}

template <typename Row> __device__ __noinline__ Tally tally(int passes, Bound first, Bound other) {
    return recall<Row>(passes).tally(first, other);
}

template <typename Row> __device__ __forceinline__ int gather(int passes, int blocks, float low, float high) {
    return recall<Row>(passes).gather(blocks, low, high);
}

// A round over the row; in warp 0 also the draw.
template <typename Row>
__device__ __noinline__ Bound draw_round(int passes, Bound bound, int winner, unsigned round, Stream stream) {
    Row x = recall<Row>(passes);
    if (winner < 0) winner = x.race(bound, round, stream);
    Bound drawn = {};
    if (x.warp == 0) drawn.id = x.draw(winner, bound, round, stream, drawn.value);
    return drawn;
}

template <typename Row>
__device__ __forceinline__ Bound draw_listed(int size, int k, float least, float top_p, float all_sum, Stream stream) {
    Bound drawn;
    drawn.id = recall<Row>(0).draw_listed(common<Row>().listed, size, k, least, top_p, all_sum, stream, drawn.value);
    return drawn;
}

struct Search {
    Bound bound;
    int passes;
};

// The bound of the shortest prefix whose count (BY_COUNT) or whose sum of weights reaches `target`: narrow an
// interval of values until the tokens in it fit the list.
template <typename Row, bool BY_COUNT> __device__ __noinline__ Search bound_by_search(int passes, float target) {
    Row x = recall<Row>(0);
    constexpr int CLUSTER = Row::BLOCKS;
    // At least `target` at or above the low key; less at or above the high one.
    unsigned low = sortable(Row::LEAST), high = sortable(x.top) + 1;
    const Bound all = {from_sortable(low), NO_ID};
    const Tally below = tally<Row>(passes++, all, all);
    int low_count = below.count[0], high_count = 0;
    float high_sum = 0;
    if (!(BY_COUNT ? low_count >= target : below.sum[0] >= target)) return {{from_sortable(low), NO_ID}, passes};
    while (low_count - high_count > CAPACITY / 2 && high - low > 1) {
        const unsigned step = max(1u, (high - low) / 3);
        const unsigned key_p = low + step, key_q = max(low + step, high - step);
        const Tally found =
            tally<Row>(passes++, Bound{from_sortable(key_p), NO_ID}, Bound{from_sortable(key_q), NO_ID});
        const bool above_q = BY_COUNT ? found.count[1] >= target : found.sum[1] >= target;
        const bool above_p = BY_COUNT ? found.count[0] >= target : found.sum[0] >= target;
        if (above_q)
            low = key_q, low_count = found.count[1];
        else {
            high = key_q, high_count = found.count[1], high_sum = found.sum[1];
            if (above_p)
                low = key_p, low_count = found.count[0];
            else
                high = key_p, high_count = found.count[0], high_sum = found.sum[0];
        }
    }
    const float value = from_sortable(low);
    if (low_count - high_count > CAPACITY / 2) {
        // More ties than the list takes: which id is the last?
        const float each = x.weight(value);
        const int ties = low_count - high_count;
        int wanted = BY_COUNT ? int(target) - high_count : ties;
        if (!BY_COUNT && each > 0) wanted = int(fminf(float(ties), ceilf((target - high_sum) / each)));
        wanted = max(1, min(ties, wanted));
        int first = 0, last = x.vocab - 1;
        while (first < last) {
            const int middle = first + (last - first) / 2;
            if (tally<Row>(passes++, Bound{value, middle}, Bound{value, middle}).count[0] - high_count >= wanted)
                last = middle;
            else
                first = middle + 1;
        }
        return {{value, first}, passes};
    }
    x.clear_list();
    cluster_sync<CLUSTER>();
    const int size = gather<Row>(passes++, CLUSTER, value, from_sortable(high));
    x.sort_list(size);
    if (BY_COUNT) return {x.bound_at(max(0, min(size, int(target) - high_count) - 1)), passes};
    float before = high_sum;
    for (int base = 0; base < size; base += 32) {
        const int i = base + x.lane;
        const float up_to = lanes_inclusive_sum<32>(i < size ? x.weight(x.bound_at(min(i, size - 1)).value) : 0.f);
        const unsigned reached = __ballot_sync(FULL_WARP, i < size && before + up_to >= target);
        if (reached) return {x.bound_at(base + __ffs(reached) - 1), passes};
        before += __shfl_sync(FULL_WARP, up_to, 31);
    }
    return {x.bound_at(size - 1), passes};
}

template <typename Row> __device__ __forceinline__ Search top_k_bound(int passes, int k) {
    if (stored<Row>().lists(k)) {
        const float low = recall<Row>(0).reached_by(k);
        const int size = gather<Row>(passes++, Row::BLOCKS, low, CUDART_INF_F);
        if (size <= CAPACITY) {
            Row x = recall<Row>(0);
            x.sort_list(size);
            // As a conditional expression this crashes NVRTC 13.0.
            Bound bound = {low, NO_ID};
            if (k <= size) bound = x.bound_at(k - 1);
            return {bound, passes};
        }
    }
    return bound_by_search<Row, true>(passes, k);
}

// --- the kernels ------------------------------------------------------------------------------------------

struct SampleParams {
    const void* values;       // [rows, vocab] T: logits, or probabilities
    const void* second;       // a bias [vocab] T for logits; draft probabilities [batch, drafts, vocab]; or null
    int* ids;                 // [batch]; with drafts [batch, drafts + 1]
    unsigned char* valid;     // [batch] bool, or null
    float* logprobs;          // [batch], or null
    const float* temperature; // [batch], or null for the scalar below; so are top_p and min_p
    const float* top_p;
    const float* min_p;
    const void* top_k;       // [batch] int32, or int64 where wide & 1
    const void* seed;        // [batch], int64 where wide & 2
    const void* offset;      // [batch], int64 where wide & 4
    const void* indices;     // [batch]: the row of each; int64 where wide & 8; or null
    unsigned char* finished; // [batch] bool, or null
    int* sequence_length;    // [batch], or null
    const int* draft_ids;    // [batch, drafts], or null
    int* accepted;           // [batch]
    int* emitted;            // [batch]
    long long row_stride;
    unsigned long long scalar_seed, scalar_offset;
    int own_offsets; // of the scalar, row i takes the i-th
    int rows, vocab, scalar_top_k, end_id, drafts;
    Layout layout;
    int wide;
    int single; // the arrays that hold one number for all: top_k 1, seed 2, offset 4, temperature 8, top_p 16, min_p 32
    int joint;
    float scalar_temperature, scalar_top_p, scalar_min_p;
};

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// What a row is asked for.
struct Request {
    Stream stream;
    float scale, top_p, min_p;
    int top_k;
    bool greedy;
};

template <bool PROBS> __device__ __forceinline__ Request request_of(const SampleParams& params, int i) {
    const auto place = [&](int bit) { return params.single & bit ? 0 : i; };
    Request asked;
    asked.stream.seed = params.seed ? integer_at(params.seed, params.wide & 2, place(2)) : params.scalar_seed;
    asked.stream.offset = params.offset ? integer_at(params.offset, params.wide & 4, place(4))
                                        : params.scalar_offset + (params.own_offsets ? i : 0);
    const float temperature = params.temperature ? params.temperature[place(8)] : params.scalar_temperature;
    asked.top_p = params.top_p ? params.top_p[place(16)] : params.scalar_top_p;
    asked.min_p = params.min_p ? params.min_p[place(32)] : params.scalar_min_p;
    const long long k = params.top_k ? integer_at(params.top_k, params.wide & 1, place(1)) : params.scalar_top_k;
    asked.top_k = k < 1 || k > params.vocab ? params.vocab : k;
    asked.scale = LOG2_E / temperature;
    asked.greedy = asked.top_k == 1;
    if (!PROBS && !(asked.scale > 0 && asked.scale < 1e30f)) {
        // No temperature, or next to none, leaves the best.
        asked.greedy = true;
        asked.scale = 1e30f;
    }
    return asked;
}

// By one thread.
template <bool PROBS, typename Row>
__device__ __forceinline__ void write_result(const SampleParams& params, int i, long long drawn_at, const Row& x,
                                             int id, float value, float sum) {
    params.ids[drawn_at] = id;
    if (params.valid) params.valid[i] = x.valid();
    if (params.logprobs) {
        const float log2_prob = (PROBS ? x.log2_of(value) : (value - x.top) * x.scale) - x.log2_of(sum);
        params.logprobs[i] = x.valid() ? log2_prob / LOG2_E : -CUDART_INF_F;
    }
    if (params.sequence_length) params.sequence_length[i] += 1;
    if (params.finished) params.finished[i] = id == params.end_id;
}

// After the first pass: what the filters leave.
template <bool PROBS, typename Row>
__device__ __forceinline__ void sample_filtered(const SampleParams& params, int i, long long drawn_at, int winner) {
    const Request asked = request_of<PROBS>(params, i);
    Common<Row>& shared = common<Row>();
    const Row& x = stored<Row>();
    const bool first_block = cluster_rank<Row::BLOCKS>() == 0;
    int passes = 1;
    Bound drawn = {x.top, 0};
    if (x.valid()) {
        const float top_p = asked.top_p;
        const float p = fminf(asked.min_p, 1.f);
        const float least = !(p > 0) ? -CUDART_INF_F : PROBS ? x.top * p : x.top + fast_log2(p) / x.scale;
        bool done = false;
        if (asked.greedy) {
            drawn.id = best<Row>(passes++);
            done = true;
        } else if (asked.top_k < params.vocab && x.lists(asked.top_k)) {
            const int size = gather<Row>(passes++, 1, shared.low, CUDART_INF_F);
            if (size <= CAPACITY) {
                if (!first_block) return;
                const float all_sum = params.joint && top_p < 1 ? shared.sum : 0.f;
                drawn = draw_listed<Row>(size, asked.top_k, least, top_p, all_sum, asked.stream);
                done = true;
            }
        }
        if (!done) {
            Bound bound = {-CUDART_INF_F, NO_ID};
            if (asked.top_k < params.vocab) {
                const Search found = bound_by_search<Row, true>(passes, asked.top_k);
                bound = found.bound, passes = found.passes;
            }
            float of_sum = shared.sum;
            if (top_p < 1 && !params.joint && bound.value > -CUDART_INF_F) of_sum = mass<Row>(passes++, bound);
            if (least > -CUDART_INF_F) bound = tighter(bound, {least, NO_ID});
            // So little is wanted that the best token is enough.
            if (top_p < 1 && !(top_p * of_sum > (PROBS ? x.top : 1.f))) {
                drawn.id = best<Row>(passes++);
                done = true;
            }
            for (unsigned round = 0; !done; ++round) {
                const bool all = !(bound.value > -CUDART_INF_F);
                const Bound its = draw_round<Row>(passes, bound, all ? winner : -1, round, asked.stream);
                if (!all) ++passes;
                if (threadIdx.x == 0) shared.drawn = its;
                __syncthreads();
                drawn = shared.drawn;
                if (!(top_p < 1)) break;
                bound = {drawn.value, drawn.id - 1};
                done = mass<Row>(passes++, bound) < top_p * of_sum;
            }
        }
    }
    if (first_block && threadIdx.x == 0) write_result<PROBS>(params, i, drawn_at, x, drawn.id, drawn.value, shared.sum);
}

extern __shared__ float4 shared[];

template <typename T, bool PROBS, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_WARPS, 2)
    sample(const __grid_constant__ SampleParams params) {
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        const int i = blockIdx.x / CLUSTER;
        const bool first_block = cluster_rank<CLUSTER>() == 0;
        if (params.finished && params.finished[i]) {
            if (first_block && threadIdx.x == 0) {
                params.ids[i] = params.end_id;
                if (params.valid) params.valid[i] = true;
                if (params.logprobs) params.logprobs[i] = 0;
            }
            return;
        }
        long long row = params.indices ? integer_at(params.indices, params.wide & 8, i) : i;
        row = max(0ll, min(row, (long long)params.rows - 1));
        const T* second = static_cast<const T*>(params.second);
        long long drawn_at = i;
        const Request asked = request_of<PROBS>(params, i);
        if (PROBS && params.draft_ids) {
            // A draft is accepted with probability target / draft; the first refused one ends the row.
            int refused = params.drafts, accepted = 0;
            for (int base = 0; base < params.drafts; base += 32) {
                const int n = base + threadIdx.x % 32;
                bool accept = false;
                if (n < params.drafts) {
                    const long long at = (long long)i * params.drafts + n;
                    const int id = params.draft_ids[at];
                    if (id >= 0 && id < params.vocab) {
                        const float draft = to_float(second[at * params.vocab + id]);
                        const float target =
                            to_float(static_cast<const T*>(params.values)[(at + i) * params.vocab + id]);
                        accept = uniform(asked.stream.at(n, ~0u).z) * draft < target;
                    }
                }
                const unsigned inside = params.drafts - base >= 32 ? ~0u : (1u << (params.drafts - base)) - 1;
                const unsigned accepts = __ballot_sync(FULL_WARP, accept);
                accepted += __popc(accepts);
                if (refused == params.drafts && (inside & ~accepts)) refused = base + __ffs(inside & ~accepts) - 1;
            }
            drawn_at = row = (long long)i * (params.drafts + 1) + refused;
            second =
                refused < params.drafts ? second + ((long long)i * params.drafts + refused) * params.vocab : nullptr;
            if (first_block) {
                for (int n = threadIdx.x; n <= params.drafts; n += blockDim.x)
                    if (n != refused)
                        params.ids[(long long)i * (params.drafts + 1) + n] =
                            n < refused ? params.draft_ids[(long long)i * params.drafts + n] : -1;
                if (threadIdx.x == 0) params.accepted[i] = accepted, params.emitted[i] = refused;
            }
        }

        using RowOfT = Row<T, PROBS, CLUSTER>;
        Common<RowOfT>& in_common = common<RowOfT>();
        RowOfT x(static_cast<const T*>(params.values) + row * params.row_stride, second, params.vocab, params.layout,
                 asked.scale, shared, &in_common.list_size);
        const bool listing = !asked.greedy && asked.top_k < params.vocab && x.lists(asked.top_k);
        const bool plain = !asked.greedy && asked.top_k == params.vocab && !(asked.top_p < 1) && !(asked.min_p > 0);
        int winner = 0;
        while (true) {
            x.template load<true>(asked.stream);
            if (x.warp == 0) {
                float sum = 0;
                x.find_top();
                if (!listing || (params.joint && asked.top_p < 1) || params.logprobs) x.digest(sum, winner);
                // Draft and target may agree but for rounding: then the target alone is drawn from.
                const bool again = PROBS && x.second && !x.valid();
                if (plain && first_block && !again) {
                    int id = 0;
                    float value = 0;
                    const Bound all = {-CUDART_INF_F, NO_ID};
                    if (x.valid()) id = x.draw(winner, all, 0, asked.stream, value);
                    if (x.lane == 0) write_result<PROBS>(params, i, drawn_at, x, id, value, sum);
                }
                if (x.lane == 0) {
                    in_common.sum = sum;
                    store(x);
                }
                if (listing && x.valid()) {
                    const float low = x.reached_by(asked.top_k);
                    if (x.lane == 0) in_common.low = low;
                }
            }
            if (plain && !x.second) return;
            __syncthreads();
            if (!PROBS || !x.second || stored<RowOfT>().valid()) break;
            x.second = nullptr;
            x.turn = 0;
            cluster_sync<CLUSTER>();
        }
        if (!plain) sample_filtered<PROBS, RowOfT>(params, i, drawn_at, winner);
    }
}

struct RenormalizeParams {
    const void* values;       // [rows, vocab] T
    void* out;                // [rows, vocab] T; float32 for SOFTMAX
    const float* temperature; // [rows], or null for the scalar; so are top_k and top_p
    const float* top_p;
    const void* top_k; // int64 where wide
    long long row_stride;
    int vocab, scalar_top_k;
    Layout layout;
    int wide;
    int single; // the array holds one number for all
    float scalar_temperature, scalar_top_p;
};

// Whole rows instead of tokens:
//
//   SOFTMAX       weight / sum of the weights
//   TOP_K_RENORM  the k largest probabilities / their sum, 0 elsewhere; TOP_P_RENORM likewise
//   TOP_K_MASK    the k largest logits, -inf elsewhere
//
// Rows with nothing to normalize become 0; rows with NaN become NaN. With a mask both stay as they are.
template <typename T, Mode MODE, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_WARPS, 2)
    renormalize(const __grid_constant__ RenormalizeParams params) {
    constexpr bool PROBS = MODE == TOP_K_RENORM || MODE == TOP_P_RENORM;
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        using RowOfT = Row<T, PROBS, CLUSTER>;
        const int i = blockIdx.x / CLUSTER;
        const float temperature =
            params.temperature ? params.temperature[params.single ? 0 : i] : params.scalar_temperature;
        const float top_p = params.top_p ? params.top_p[params.single ? 0 : i] : params.scalar_top_p;
        // The limit of a low temperature: all on the best.
        float scale = LOG2_E / temperature;
        if (!(scale > 0 && scale < 1e30f)) scale = 1e30f;
        long long top_k =
            params.top_k ? integer_at(params.top_k, params.wide, params.single ? 0 : i) : params.scalar_top_k;
        if (top_k < 1 || top_k > params.vocab) top_k = params.vocab;

        RowOfT x(static_cast<const T*>(params.values) + i * params.row_stride, nullptr, params.vocab, params.layout,
                 scale, shared, &common<RowOfT>().list_size);
        x.template load<false>({});
        x.find_top();
        if (threadIdx.x == 0) store(x);
        __syncthreads();
        const bool valid = x.valid();
        Bound bound = {-CUDART_INF_F, NO_ID};
        float inverse = 0, factor = 1;
        if (valid) {
            float sum;
            int winner;
            x.digest(sum, winner);
            Search found = {bound, 1};
            if (MODE == SOFTMAX && x.scale == 1e30f) found.bound = {x.top, best<RowOfT>(found.passes++)};
            if ((MODE == TOP_K_RENORM || MODE == TOP_K_MASK) && top_k < params.vocab)
                found = top_k_bound<RowOfT>(found.passes, top_k);
            if (MODE == TOP_P_RENORM && top_p < 1) found = bound_by_search<RowOfT, false>(found.passes, top_p * sum);
            bound = found.bound;
            if (bound.value > -CUDART_INF_F && MODE != TOP_K_MASK) sum = mass<RowOfT>(found.passes, bound);
            // The reciprocal of the smallest sums is no float.
            if (PROBS && sum < 0x1p-100f) factor = 0x1p100f;
            inverse = 1 / (sum * factor);
        } else if (MODE != TOP_K_MASK) {
            inverse = x.top != x.top ? CUDART_NAN_F : 0.f;
        }
        using Out = typename OutOf<T, MODE>::type;
        Out* out = static_cast<Out*>(params.out) + (long long)i * params.vocab;
        const bool vectors =
            params.vocab % 4 == 0 && reinterpret_cast<unsigned long long>(out) % (4 * sizeof(Out)) == 0;
        for (int local = x.warp; local < x.local_tiles; local += x.warps) {
            float y[4];
            x.for_each(local, [&](int id, float value, int c) {
                const bool kept = keeps(bound, value, id);
                if (MODE == TOP_K_MASK)
                    // The row has no infinity any more, the result shall.
                    y[c] = !(kept || !valid) ? -CUDART_INF_F : value == LARGEST_FLOAT ? x.at_memory(id) : value;
                else if (valid)
                    y[c] = kept ? x.weight(value) * factor * inverse : 0.f;
                else
                    y[c] = inverse;
                if (vectors) {
                    if (c == 3 && id < params.vocab) store_four(out + id - 3, y);
                } else if (id < params.vocab) {
                    out[id] = from_float<Out>(y[c]);
                }
            });
        }
    }
}
