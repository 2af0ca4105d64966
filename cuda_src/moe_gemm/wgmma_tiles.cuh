// The scheduler of gemm_wgmma: which tiles a cluster has, in which order.
#pragma once
#include "moe_gemm/groups.cuh"

// All tiles, through which a warp goes in order. Lane i has the group of expert `first` + i.
template <int TOKENS> struct WgmmaTiles {
    static constexpr int UNIT = TOKENS < 16 ? TOKENS : 16; // of whose multiples all tiles of a group are, but the last

    const MappedGemmParams& p;
    int weight_tiles;
    int first = 0, before = 0;        // before: tiles of all groups before `first`
    int begin, count, tiles, through; // the group's first row, its rows, its tiles; tiles of all groups up to this one

    __device__ __forceinline__ WgmmaTiles(const MappedGemmParams& p, int weight_tiles)
        : p(p), weight_tiles(weight_tiles) {
        read_groups();
    }

    // Tiles of tokens of a group. Tokens past 256 take a second product at every step, which pays only where all tokens
    // of a group then are one tile.
    static __device__ __forceinline__ int tiles_of(int count) {
        constexpr int EACH = TOKENS < 256 ? TOKENS : 256;
        return count <= TOKENS ? count > 0 : (count + EACH - 1) / EACH;
    }

    __device__ __forceinline__ void read_groups() {
        const int expert = first + int(threadIdx.x % 32);
        begin = count = 0;
        if (expert < p.experts) {
            const GroupRows group = rows_of(p, expert);
            begin = group.first, count = group.count;
        }
        tiles = tiles_of(count) * weight_tiles;
        through = before + lanes_inclusive_sum<32>(tiles);
    }

    // Find tile `tile`, which is no earlier than the last one asked for; false if there are not so many.
    __device__ __forceinline__ bool find(int tile, int& expert, int& row, int& tokens, int& weight_tile) {
        int last;
        while (tile >= (last = __shfl_sync(FULL_WARP, through, 31))) {
            if (first + 32 >= p.experts) return false;
            first += 32, before = last;
            read_groups();
        }
        const int lane = __ffs(__ballot_sync(FULL_WARP, tile < through)) - 1;
        const int all = __shfl_sync(FULL_WARP, count, lane);
        unsigned in = tile - __shfl_sync(FULL_WARP, through - tiles, lane);
        const unsigned token_tiles = tiles_of(all), set = p.together * weight_tiles;
        const int tokens_each = (all + token_tiles * UNIT - 1) / (token_tiles * UNIT) * UNIT; // at most TOKENS
        const unsigned sets = in / set;
        in -= sets * set;
        const unsigned beside = min(token_tiles - sets * p.together, unsigned(p.together));
        const int token = (sets * p.together + in % beside) * tokens_each;
        expert = first + lane;
        row = __shfl_sync(FULL_WARP, begin, lane) + token;
        tokens = min(all - token, tokens_each);
        weight_tile = in / beside;
        return true;
    }
};
