// Tile scheduler of gemm_wgmma, gemm_fp4_wgmma and gemm_folded_wgmma: selects a cluster's tiles and their order.
#pragma once
#include "moe_gemm/groups.cuh"

constexpr int MAX_SORTED = 256; // maximum experts for sorting; with more experts, tiles are in expert order

// Iterates over the indices of a cluster's tiles. Tiles are distributed in rounds of one tile per cluster. SORTED:
// every second round goes through the clusters in reverse order, so that no cluster gets the largest tile of every
// round.
template <bool SORTED, int CLUSTER> struct Turns {
    int tile = blockIdx.x / CLUSTER;
    int step = 2 * (gridDim.x / CLUSTER - tile) - 1; // SORTED: distance to the next tile

    __device__ __forceinline__ void advance() {
        tile += SORTED ? step : int(gridDim.x / CLUSTER);
        if constexpr (SORTED) step = 2 * int(gridDim.x / CLUSTER) - step;
    }
};

// Finds tiles by their index in scheduling order. The lanes of a warp hold 32 groups at a time: lane i has the group of
// expert `first + i`.
//
// SORTED: lane i has the group of expert `order[first + i]` instead. Tiles are scheduled from the largest to the
// smallest, because a large tile at the end would delay the end of the kernel. The last tile of a group may have up to
// TAIL tokens more than EACH, if this saves a tile.
template <int TOKENS, bool SORTED = false> struct WgmmaTiles {
    static constexpr int EACH = TOKENS < 256 ? TOKENS : 256; // maximum tokens per tile in a group of several tiles
    static constexpr int TAIL = SORTED ? TOKENS - EACH : 0;
    static constexpr int UNIT = TOKENS < 16 ? TOKENS : 16; // all tiles of a group except the last are multiples of UNIT

    const MappedGemmParams& p;
    int weight_tiles;
    const unsigned char* order = nullptr; // SORTED: in shared memory; null: expert order
    int first = 0, before = 0;            // before: tiles of all groups before group `first`
    int begin, count, tiles, through;     // of the lane's group; through: inclusive prefix sum of `tiles`
    int mine;                             // SORTED: the group's expert

    // `room`: MAX_SORTED bytes of shared memory for this warp; unused if not SORTED.
    __device__ __forceinline__ WgmmaTiles(const MappedGemmParams& p, int weight_tiles, unsigned char* room = nullptr)
        : p(p), weight_tiles(weight_tiles) {
        if constexpr (SORTED) {
            if (p.experts <= MAX_SORTED) {
                sort_groups(room);
                order = room;
            }
        }
        read_groups();
    }

    // Write the experts to `to`, sorted by the width of their tiles, largest first (a counting sort). The width is the
    // N of the tile's wgmma and determines the time of the tile. The widths are approximate here; this affects only the
    // order.
    __device__ __forceinline__ void sort_groups(unsigned char* to) {
        constexpr int LARGEST[] = {TOKENS, 272, 256, 240, 224, 192}, KINDS = 6, CHUNKS = MAX_SORTED / 32;
        constexpr int BITS = 10;                             // bits of a width's counter; a 64-bit word has 6 counters
        constexpr unsigned long long SUMS = 0x4010040100401; // word * SUMS: prefix sums of the counters
        const int lane = threadIdx.x % 32, end = p.max_tokens ? 0 : p.offset_words;
        int counts[CHUNKS], shifts[CHUNKS];
        unsigned long long all = 0, others;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int at = min(i * 32 + lane, p.experts - 1) * p.offset_words;
            const int begin = p.offsets[at], word = p.offsets[at + end];
            counts[i] = end ? word - begin : word;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float each = counts[i];
            if (counts[i] > TOKENS) each = __fdividef(each, tiles_of(counts[i]));
            shifts[i] = 0;
#pragma unroll
            for (int kind = 1; kind < KINDS; ++kind)
                if (each <= LARGEST[kind]) shifts[i] = kind * BITS;
            if (i * 32 + lane < p.experts) all += 1ull << shifts[i];
        }
        const unsigned long long mine = all;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            others = __shfl_up_sync(FULL_WARP, all, distance);
            if (lane >= distance) all += others;
        }
        unsigned long long next = all - mine + (__shfl_sync(FULL_WARP, all, 31) * SUMS << BITS); // next index per width
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * 32 + lane < p.experts) {
                to[next >> shifts[i] & ((1 << BITS) - 1)] = i * 32 + lane;
                next += 1ull << shifts[i];
            }
        __syncwarp();
    }

    // Return the number of token tiles of a group of `count` rows. Tokens past 256 need a second wgmma in every step,
    // so a tile has more than EACH tokens only if this saves a tile.
    static __device__ __forceinline__ int tiles_of(int count) {
        return count <= TOKENS ? count > 0 : (count - TAIL + EACH - 1) / EACH;
    }

    // Return the tokens per tile of a group of `tiles` tiles, at most TOKENS. The last tile has the remaining tokens.
    static __device__ __forceinline__ int tokens_each(int count, unsigned tiles) {
        const int even = (count + tiles * UNIT - 1) / (tiles * UNIT) * UNIT;
        return TAIL && tiles > 1 ? min(even, EACH) : even;
    }

    __device__ __forceinline__ void read_groups() {
        int expert = first + int(threadIdx.x % 32);
        begin = count = 0;
        if (expert < p.experts) {
            if (SORTED && order) expert = order[expert];
            mine = expert;
            const GroupRows group = rows_of(p, expert);
            begin = group.first, count = group.count;
        }
        tiles = tiles_of(count) * weight_tiles;
        through = before + lanes_inclusive_sum<32>(tiles);
    }

    // `tile` is an index over the tiles of all groups. Set the other arguments to this tile's expert, first row, number
    // of tokens and tile of weights. Return false if `tile` is past the last tile. Successive calls must not decrease
    // `tile`.
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
        const int each = tokens_each(all, token_tiles);
        const unsigned sets = in / set;
        in -= sets * set;
        const unsigned beside = min(token_tiles - sets * p.together, unsigned(p.together));
        const unsigned token_tile = sets * p.together + in % beside;
        const int token = token_tile * each;
        expert = SORTED ? __shfl_sync(FULL_WARP, mine, lane) : first + lane;
        row = __shfl_sync(FULL_WARP, begin, lane) + token;
        tokens = TAIL && token_tile == token_tiles - 1 ? all - token : min(all - token, each);
        weight_tile = in / beside;
        return true;
    }
};
