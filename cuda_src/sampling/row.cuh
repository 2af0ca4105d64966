// Distribute a row of logits or probabilities over a cluster of blocks.
//
// Tiles of TILE ids are distributed over the blocks, then over the warps. Lane l reads one group of 32 ids of tile t:
// `1024 * t + 128 * j + 4 * l + c` for j < 8 and c < 4. Later passes read a tile from shared memory if it is cached
// there.
//
// A pass publishes one result per tile, in the tile's slot (a uint4) of every block. After a barrier each warp reduces
// the slots in the same order, so all warps get the same bits.
//
// A small top-k searches a list of candidates. To find them, the first pass stores the maximum of each segment. A
// segment is a range of neighbouring groups; a tile has `segments_per_tile` segments of equal size.
#pragma once
#include "common/cluster.cuh"
#include "common/warp.cuh"
#include "sampling/order.cuh"

constexpr int TILE = 1024;
constexpr int MIN_WARPS = 6, MAX_WARPS = 16;
constexpr int MAX_SEGMENTS = 256; // per row, so that one warp can compare their maxima
constexpr int CAPACITY = 192;     // candidates in the list; each thread ranks one
constexpr int MAX_LIST_K = 96;    // the largest k that uses the list of candidates

struct Layout {
    int tiles; // of the row
    int tiles_per_block;
    int cached_tiles;      // per block, in shared memory
    int segments_per_tile; // a power of two
    int group_max_tiles;   // tiles of a block with entries in `group_max`
};

template <typename T> struct VectorOf {
    using type = uint2;
};
template <> struct VectorOf<float> {
    using type = uint4;
};

template <bool PROBS> __device__ __forceinline__ float combine(float x, float y) { return PROBS ? x - y : x + y; }

// Return the values of ids `id` to `id + 3`, combined with the row `second`. Ids past the end of the row get a value of
// weight 0. The function is not inlined, because dozens of places call it.
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

// A row of probabilities (PROBS) or logits, read as float32.
template <typename T, bool PROBS, int CLUSTER> struct Row {
    using Vector = typename VectorOf<T>::type;
    static constexpr bool IS_PROBS = PROBS;
    static constexpr int BLOCKS = CLUSTER;
    static constexpr float LEAST = PROBS ? 0.f : -LARGEST_FLOAT;

    const T* values;
    const T* second; // added to logits, subtracted from probabilities; or null
    int vocab;
    Layout layout;
    float scale; // 2 log2(e) / temperature
    int lane, warp, warps;
    int first_tile, local_tiles;
    int parity;               // the half of `slots` that the next pass writes
    float4* cache;            // [cached_tiles, 8, 32]
    uint4* slots;             // [2, tiles]
    unsigned long long* list; // [CAPACITY]
    float* group_max;         // [group_max_tiles, 32]
    float* segment_max;       // [tiles, segments_per_tile]
    int* list_size;
    float row_max;

    __device__ Row(const T* values, const T* second, int vocab, Layout layout, float scale, float4* shared,
                   int* list_size)
        : values(values), second(second), vocab(vocab), layout(layout), scale(scale), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32), warps(blockDim.x / 32), parity(0), cache(shared), list_size(list_size) {
        first_tile = cluster_rank<CLUSTER>() * layout.tiles_per_block;
        local_tiles = max(0, min(layout.tiles_per_block, layout.tiles - first_tile));
        slots = reinterpret_cast<uint4*>(cache + layout.cached_tiles * (TILE / 4));
        list = reinterpret_cast<unsigned long long*>(slots + 2 * layout.tiles);
        group_max = reinterpret_cast<float*>(list + CAPACITY);
        segment_max = group_max + layout.group_max_tiles * 32;
    }

    static constexpr int bytes(int tiles, int cached_tiles, int group_max_tiles, int segments_per_tile) {
        return cached_tiles * TILE * 4 + 2 * tiles * 16 + CAPACITY * 8 +
               (group_max_tiles * 32 + tiles * segments_per_tile) * 4;
    }

    // --- reading --------------------------------------------------------------------------------------

    // Return the id of element e (0 to 31) of a lane's group.
    __device__ __forceinline__ int id_of(int tile, int in_lane, int e) const {
        return tile * TILE + 128 * (e / 4) + 4 * in_lane + e % 4;
    }

    __device__ __forceinline__ bool can_load_vectors(const T* from, int tile) const {
        return reinterpret_cast<unsigned long long>(from) % sizeof(Vector) == 0 && (tile + 1) * TILE <= vocab;
    }

    __device__ __forceinline__ float4 unpack(Vector bits) const {
        const T* x = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
    }

    // Clamp +inf logits, because inf - inf would be NaN. Clamp negative probabilities to 0.
    __device__ __forceinline__ float limit(float x) const {
        return PROBS ? max_or_nan(x, 0.f) : min_or_nan(x, LARGEST_FLOAT);
    }

    __device__ __forceinline__ float4 limit(float4 x) const {
        return make_float4(limit(x.x), limit(x.y), limit(x.z), limit(x.w));
    }

    __device__ __forceinline__ float largest(float4 x) const {
        return max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w));
    }

    __device__ __forceinline__ float unclamped_at(int id) const { return to_float(values[id]); }

    __device__ __forceinline__ float at(int id) const {
        const float x = unclamped_at(id);
        return limit(second ? combine<PROBS>(x, to_float(second[id])) : x);
    }

    __device__ __forceinline__ float4 combined_at(int id) const {
        return limit(slow_four<T, PROBS>(values, second, vocab, id));
    }

    // Call take(id, value, id % 4) for each value of this lane's group.
    template <typename Take> __device__ __forceinline__ void for_each(int local_tile, Take take) const {
        const int tile = first_tile + local_tile;
        const int first = id_of(tile, lane, 0);
        const bool fast = can_load_vectors(values, tile) && !second;
        // 32 values at once would use too many registers.
#pragma unroll 1
        for (int half = 0; half < 8; half += 4) {
            float4 four[4];
            if (local_tile < layout.cached_tiles) {
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = cache[(local_tile * 8 + half + j) * 32 + lane];
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

    // --- weights --------------------------------------------------------------------------------------

    // For logits, return `log2(weight(x) / weight(reference))`. The difference of two finite logits may overflow, so
    // both are halved, and `scale` includes a factor of 2.
    __device__ __forceinline__ float distance(float x, float reference) const {
        return fmaf(x, 0.5f, -0.5f * reference) * scale;
    }

    // Return the weight of x relative to `reference`. A probability is its own weight.
    __device__ __forceinline__ float relative(float x, float reference) const {
        return PROBS ? x : fast_exp2(distance(x, reference));
    }

    __device__ __forceinline__ float weight(float x) const { return relative(x, row_max); }

    // fast_log2 would flush a subnormal probability to 0.
    __device__ __forceinline__ float log2_of(float x) const { return PROBS ? __log2f(x) : fast_log2(x); }

    // Return log2 of the factor that turns a weight relative to `from` into a weight relative to `to`.
    __device__ __forceinline__ float shift(float from, float to) const { return PROBS ? 0.f : distance(from, to); }

    // Return whether the row has a token to draw and no NaN.
    __device__ __forceinline__ bool valid() const {
        return PROBS ? row_max > 0 && row_max <= LARGEST_FLOAT : row_max >= -LARGEST_FLOAT;
    }

    // --- candidates -----------------------------------------------------------------------------------

    __device__ __forceinline__ void clear_list() {
        if (threadIdx.x == 0) *list_size = 0;
    }

    __device__ __forceinline__ Bound bound_at(int rank) const {
        const unsigned long long found = list[rank];
        return {from_sortable(unsigned(found >> 32)), int(~unsigned(found))};
    }

    // A draw from the list rounds sums differently from a draw with passes over the row. Therefore the choice between
    // the two must not depend on the cluster size.
    __device__ __forceinline__ bool uses_list(int k) const {
        return k <= MAX_LIST_K && 2 * k <= layout.tiles * layout.segments_per_tile;
    }

    // --- slots ----------------------------------------------------------------------------------------

    // All lanes pass the tile's result `found`. Lane b stores it to block b of the cluster.
    __device__ __forceinline__ void publish(int tile, uint4 found) {
        if (lane < CLUSTER) dsmem_store<CLUSTER>(lane, &slots[parity * layout.tiles + tile], found);
    }

    // The next pass writes the other half of the slots, because a slow block may still read this half.
    __device__ __forceinline__ const uint4* slots_of_pass() {
        cluster_sync<CLUSTER>();
        const uint4* read = slots + parity * layout.tiles;
        parity ^= 1;
        return read;
    }

    // Return the maximum of this lane's group, or +inf if the maximum is not stored.
    __device__ __forceinline__ float group_max_at(int local_tile) const {
        return local_tile < layout.group_max_tiles ? group_max[local_tile * 32 + lane] : CUDART_INF_F;
    }
};
