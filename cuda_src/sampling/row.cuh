// Distribute a row of logits or probabilities over a cluster of blocks. This file defines which values a thread reads,
// whether it reads them from global or shared memory, and how the blocks exchange results.
//
// The vocabulary is cut into tiles of TILE ids. Tiles are distributed over the blocks of the cluster, and within a
// block over the warps. Lane l of a warp reads one group of 32 ids in tile t: the ids `1024 * t + 128 * j + 4 * l + c`
// for j < 8 and c < 4. No other thread reads this group. The first pass over the row reads global memory. Later passes
// read shared memory if the tile is cached there, else global memory.
//
// A pass computes one result per tile, such as a sum. The tile's warp writes the result into the tile's slot (a uint4)
// in the shared memory of every block of the cluster. After a barrier each warp reduces all slots of its own block in
// the same order, so all warps get the same bits without a broadcast.
//
// Top-k with a small k searches a list of candidates instead of the row. To find candidates, each tile is divided into
// `tops_per_tile` equal parts. The first pass stores the largest value of each part in `tops`.
#pragma once
#include "common/cluster.cuh"
#include "common/warp.cuh"
#include "sampling/order.cuh"

constexpr int TILE = 1024;
constexpr int MIN_WARPS = 6, MAX_WARPS = 16;
constexpr int MAX_TOPS = 256;  // maximum entries of `tops` per row, which one warp compares
constexpr int CAPACITY = 192;  // maximum candidates in the list; each thread ranks one candidate
constexpr int MAX_LISTED = 96; // the largest k that uses the list of candidates

// Sizes that the host chooses; they determine the layout of shared memory.
struct Layout {
    int tiles; // of the row
    int tiles_per_block;
    int cached_tiles;  // tiles per block in shared memory; later passes read other tiles from global memory
    int tops_per_tile; // a power of two
    int topped_tiles;  // the first tiles of a block, whose group maxima are in `lane_tops`
};

template <typename T> struct VectorOf {
    using type = uint2;
};
template <> struct VectorOf<float> {
    using type = uint4;
};

template <bool PROBS> __device__ __forceinline__ float combine(float x, float y) { return PROBS ? x - y : x + y; }

// Return the values of ids `id` to `id + 3`, loaded one by one, and combined with the row `second` unless it is null.
// Ids past the end of the row get a value of weight 0. The function is not inlined, because it is called at dozens of
// places.
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

// A row of probabilities (PROBS) or logits, read as float32. The passes over a row are in the files that include this
// file.
template <typename T, bool PROBS, int CLUSTER> struct Row {
    using Vector = typename VectorOf<T>::type;
    static constexpr bool IS_PROBS = PROBS;
    static constexpr int BLOCKS = CLUSTER;
    static constexpr float LEAST = PROBS ? 0.f : -LARGEST_FLOAT; // the smallest finite value

    const T* values;
    const T* second; // added to logits, subtracted from probabilities; or null
    int vocab;
    Layout layout;
    float scale; // 2 log2(e) / temperature
    int lane, warp, warps;
    int first_tile, local_tiles; // tiles of this block
    int turn;                    // which half of `slots` the next pass writes: 0 or 1
    float4* cache;               // [cached_tiles, 8, 32]
    uint4* slots;                // [2, tiles]
    unsigned long long* list;    // [CAPACITY]
    float* lane_tops;            // [topped_tiles, 32], the maximum of each group
    float* tops;                 // [tiles, tops_per_tile], the maximum of each part of each tile
    int* list_size;
    float top; // the largest value, after `find_top`

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

    // Return the size of a row's shared memory in bytes.
    static constexpr int bytes(int tiles, int cached_tiles, int topped_tiles, int tops_per_tile) {
        return cached_tiles * TILE * 4 + 2 * tiles * 16 + CAPACITY * 8 +
               (topped_tiles * 32 + tiles * tops_per_tile) * 4;
    }

    // --- reading --------------------------------------------------------------------------------------

    // Return the e-th id (0 to 31) of a lane's group.
    __device__ __forceinline__ int id_of(int tile, int in_lane, int e) const {
        return tile * TILE + 128 * (e / 4) + 4 * in_lane + e % 4;
    }

    // Return whether all values of a tile can be loaded as vectors.
    __device__ __forceinline__ bool whole(const T* from, int tile) const {
        return reinterpret_cast<unsigned long long>(from) % sizeof(Vector) == 0 && (tile + 1) * TILE <= vocab;
    }

    __device__ __forceinline__ float4 unpack(Vector bits) const {
        const T* x = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
    }

    // Clamp logits to the largest float, because inf - inf would be NaN. Clamp negative probabilities to 0.
    __device__ __forceinline__ float limit(float x) const {
        return PROBS ? max_or_nan(x, 0.f) : min_or_nan(x, LARGEST_FLOAT);
    }

    __device__ __forceinline__ float4 limit(float4 x) const {
        return make_float4(limit(x.x), limit(x.y), limit(x.z), limit(x.w));
    }

    __device__ __forceinline__ float largest(float4 x) const {
        return max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w));
    }

    // Load the value of an id from global memory and return it unmodified.
    __device__ __forceinline__ float at_memory(int id) const { return to_float(values[id]); }

    // Return the value of an id as the passes use it: combined with `second`, and clamped.
    __device__ __forceinline__ float at(int id) const {
        const float x = at_memory(id);
        return limit(second ? combine<PROBS>(x, to_float(second[id])) : x);
    }

    __device__ __forceinline__ float4 combined_at(int id) const {
        return limit(slow_four<T, PROBS>(values, second, vocab, id));
    }

    // Call take(id, value, c) for each value of this lane's group in a tile. `c` is the index of the value in its
    // vector of four.
    template <typename Take> __device__ __forceinline__ void for_each(int local, Take take) const {
        const int tile = first_tile + local;
        const int first = id_of(tile, lane, 0);
        const bool fast = whole(values, tile) && !second;
        // Process the group in two halves, because 32 values at once would use too many registers.
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

    // --- weights --------------------------------------------------------------------------------------

    // Return `log2(weight(x) / weight(reference))` for logits. `reference` must be finite. Both values are halved
    // first, because the difference of two finite logits may overflow; `scale` includes a factor of 2 for this. Halving
    // is exact.
    __device__ __forceinline__ float distance(float x, float reference) const {
        return fmaf(x, 0.5f, -0.5f * reference) * scale;
    }

    // Return the weight of x divided by the weight of `reference`. For probabilities, return x, because the weight of a
    // probability is the probability itself.
    __device__ __forceinline__ float relative(float x, float reference) const {
        return PROBS ? x : fast_exp2(distance(x, reference));
    }

    __device__ __forceinline__ float weight(float x) const { return relative(x, top); }

    // fast_log2 flushes subnormal probabilities to 0, so use __log2f for probabilities.
    __device__ __forceinline__ float log2_of(float x) const { return PROBS ? __log2f(x) : fast_log2(x); }

    // Return log2 of the factor that rescales a weight from the reference `from` to the reference `to`.
    __device__ __forceinline__ float shift(float from, float to) const { return PROBS ? 0.f : distance(from, to); }

    // Return whether the row has a token to draw and no NaN. `top` must be set.
    __device__ __forceinline__ bool valid() const {
        return PROBS ? top > 0 && top <= LARGEST_FLOAT : top >= -LARGEST_FLOAT;
    }

    // --- candidates -----------------------------------------------------------------------------------

    // Empty the list. Done by thread 0.
    __device__ __forceinline__ void clear_list() {
        if (threadIdx.x == 0) *list_size = 0;
    }

    __device__ __forceinline__ Bound bound_at(int rank) const {
        const unsigned long long found = list[rank];
        return {from_sortable(unsigned(found >> 32)), int(~unsigned(found))};
    }

    // Return whether top-k uses the list of candidates instead of passes over the row. The two paths round their sums
    // differently. Therefore the decision must be the same for all cluster sizes.
    __device__ __forceinline__ bool lists(int k) const {
        return k <= MAX_LISTED && 2 * k <= layout.tiles * layout.tops_per_tile;
    }

    // --- slots ----------------------------------------------------------------------------------------

    // Store a tile's result in the tile's slot in every block. All lanes must hold the result.
    __device__ __forceinline__ void leave(int tile, uint4 found) {
        if (lane < CLUSTER) dsmem_store<CLUSTER>(lane, &slots[turn * layout.tiles + tile], found);
    }

    // Wait until all slots of this pass are written, and return them. The next pass writes the other half of the slots,
    // because a slow block may still read this half.
    __device__ __forceinline__ const uint4* slots_of_pass() {
        cluster_sync<CLUSTER>();
        const uint4* read = slots + turn * layout.tiles;
        turn ^= 1;
        return read;
    }

    // Return the maximum of this lane's group in a tile, or +inf if it is not stored.
    __device__ __forceinline__ float lane_top(int local) const {
        return local < layout.topped_tiles ? lane_tops[local * 32 + lane] : CUDART_INF_F;
    }
};
