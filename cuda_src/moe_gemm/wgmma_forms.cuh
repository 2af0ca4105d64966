// What FORM of gemm_wgmma adds for groups of many rows: a sum of these.
#pragma once
#include "common/cluster.cuh"
#include "common/hopper.cuh"

// Groups whose last tile can take up to TOKENS - 256 tokens that are left have one tile less.
constexpr int TAILED = 1;
// Tiles are taken from the largest to the smallest, and clusters take turns in being first: else those that happen to
// have large tiles are the last ones, by up to half a tile.
constexpr int SORTED = 2;
// Weights are fetched to L2 some steps before their copy starts, across tiles too: the ring alone is too short for
// memory that is nearly at its limit.
constexpr int FETCHED = 4;
// Weights of a group that has one tile of tokens, which are read once, leave L2 first. So the rows that another kernel
// wrote or will read can stay there.
constexpr int ONCE = 8;
// A warpgroup writes a round of results to shared memory while it stores the one before.
constexpr int OVERLAPPED = 16;
// The second warpgroup is two stages behind the first, in place of one.
constexpr int FAR = 32;
// Tokens are fetched to L2 as weights are.
constexpr int TOKENS_FETCHED = 64;
// Weights are fetched to L2 twice as many steps before.
constexpr int FETCHED_EARLY = 128;

// Steps from the copy of weights to those that are fetched to L2.
__host__ __device__ constexpr int fetch_steps(int form) { return form & FETCHED_EARLY ? 12 : 6; }

constexpr int MAX_SORTED = 256; // experts: with more, tiles are taken in the order of experts

// Bytes of shared memory of a warp that sorts.
__host__ __device__ constexpr int sorted_bytes(int form) { return form & SORTED ? MAX_SORTED : 0; }

// Start to fetch the box at these coordinates to L2.
__device__ __forceinline__ void tma_fetch(const TensorMap& map, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x), "r"(y),
                 "r"(z), "r"(w)
                 : "memory");
}

__device__ __forceinline__ void tma_fetch(const TensorMap& map, int x, int y, int z, int w, int v) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map), "r"(x),
                 "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}

// The tiles of a cluster among those of all: one of each round of as many tiles as there are clusters. SORTED: rounds
// go through the clusters back and forth.
template <int FORM, int CLUSTER> struct Turns {
    int tile = blockIdx.x / CLUSTER;
    int step = 2 * (gridDim.x / CLUSTER - tile) - 1; // SORTED: from this tile to the next

    __device__ __forceinline__ int next() const { return tile + (FORM & SORTED ? step : int(gridDim.x / CLUSTER)); }
    __device__ __forceinline__ void advance() {
        tile = next();
        if constexpr (FORM & SORTED) step = 2 * int(gridDim.x / CLUSTER) - step;
    }
};

// The weights of a tile, as a warp that loads copies them and fetches them to L2.
struct TileWeights {
    int first, expert; // first: the first row
    bool once;         // no other tile has the same

    // Start the copy of 64 numbers along k of all rows, from number `x` on.
    template <bool GATED, unsigned long long POLICY>
    __device__ __forceinline__ void load(const TensorMap& map, int x, unsigned to, unsigned full) const {
        if constexpr (GATED)
            tma_load<POLICY>(to, map, x, 0, 0, first / 16, expert, full);
        else
            tma_load<POLICY>(to, map, x, first, expert, 0, full);
    }
    template <int FORM, bool GATED, bool STREAMED>
    __device__ __forceinline__ void load_for(const TensorMap& map, int x, unsigned to, unsigned full) const {
        if constexpr (STREAMED)
            load<GATED, EVICT_FIRST>(map, x, to, full);
        else if (FORM & ONCE && once)
            load<GATED, EVICT_FIRST>(map, x, to, full);
        else
            load<GATED, EVICT_NORMAL>(map, x, to, full);
    }
    template <bool GATED> __device__ __forceinline__ void fetch(const TensorMap& map, int x) const {
        if constexpr (GATED)
            tma_fetch(map, x, 0, 0, first / 16, expert);
        else
            tma_fetch(map, x, first, expert, 0);
    }
};
