// The tiles of gemm_wgmma.
#pragma once
#include "moe_gemm/groups.cuh"

// Which tiles there are. A warp goes through them in order; lane i knows group `first` + i.
template <int TOKENS> struct GemmTiles {
    static constexpr int UNIT = TOKENS < 16 ? TOKENS : 16; // all tiles of a group but the last have a multiple of it

    const MappedGemmParams& p;
    int weight_tiles;
    int first = 0, before = 0;        // tiles of all groups before `first`
    int begin, count, tiles, through; // its rows; its tiles; and with those of all groups before it

    __device__ __forceinline__ GemmTiles(const MappedGemmParams& p, int weight_tiles)
        : p(p), weight_tiles(weight_tiles) {
        look();
    }

    // More than 256 tokens are a product more at every step, which pays where they are all that the group has.
    static __device__ __forceinline__ int tiles_of(int count) {
        constexpr int EACH = TOKENS < 256 ? TOKENS : 256;
        return count <= TOKENS ? count > 0 : (count + EACH - 1) / EACH;
    }

    __device__ __forceinline__ void look() {
        const int expert = first + int(threadIdx.x % 32);
        begin = count = 0;
        if (expert < p.experts) {
            const GroupRows group = rows_of(p, expert);
            begin = group.first, count = group.count;
        }
        tiles = tiles_of(count) * weight_tiles;
        through = before + lanes_inclusive_sum<32>(tiles);
    }

    // Tile `tile`, no earlier one than before; false if there are not so many.
    __device__ __forceinline__ bool find(int tile, int& expert, int& row, int& tokens, int& weight_tile) {
        int last;
        while (tile >= (last = __shfl_sync(FULL_WARP, through, 31))) {
            if (first + 32 >= p.experts) return false;
            first += 32, before = last;
            look();
        }
        const int who = __ffs(__ballot_sync(FULL_WARP, tile < through)) - 1;
        const int all = __shfl_sync(FULL_WARP, count, who);
        unsigned in = tile - __shfl_sync(FULL_WARP, through - tiles, who);
        const unsigned token_tiles = tiles_of(all), set = p.together * weight_tiles;
        const int tokens_each = (all + token_tiles * UNIT - 1) / (token_tiles * UNIT) * UNIT; // at most TOKENS
        const unsigned sets = in / set;
        in -= sets * set;
        const unsigned beside = min(token_tiles - sets * p.together, unsigned(p.together));
        const int token = (sets * p.together + in % beside) * tokens_each;
        expert = first + who;
        row = __shfl_sync(FULL_WARP, begin, who) + token;
        tokens = min(all - token, tokens_each);
        weight_tile = in / beside;
        return true;
    }
};
