// The scheduler of gemm_wgmma: which tiles a cluster has, in which order.
#pragma once
#include "moe_gemm/groups.cuh"

constexpr int MAX_SORTED = 256; // experts: with more, tiles are taken in the order of experts

// The tiles of a cluster among those of all: one of each round of as many tiles as there are clusters. SORTED: rounds
// go through the clusters back and forth, so that clusters take turns in having the largest tile of a round.
template <bool SORTED, int CLUSTER> struct Turns {
    int tile = blockIdx.x / CLUSTER;
    int step = 2 * (gridDim.x / CLUSTER - tile) - 1; // SORTED: from this tile to the next

    __device__ __forceinline__ void advance() {
        tile += SORTED ? step : int(gridDim.x / CLUSTER);
        if constexpr (SORTED) step = 2 * int(gridDim.x / CLUSTER) - step;
    }
};

// All tiles, through which a warp goes in order. Lane i has the group of expert `first` + i.
//
// SORTED: the group of order[first + i]. Tiles are taken from the largest to the smallest: else those that happen to be
// large may be the last ones, which others wait for. And groups have tails: the last of several tiles has up to TAIL
// tokens more, where a group would have one tile more otherwise.
template <int TOKENS, bool SORTED = false> struct WgmmaTiles {
    static constexpr int EACH = TOKENS < 256 ? TOKENS : 256; // tokens of each tile, where a group has several
    static constexpr int TAIL = SORTED ? TOKENS - EACH : 0;
    static constexpr int UNIT = TOKENS < 16 ? TOKENS : 16; // of whose multiples all tiles of a group are, but the last

    const MappedGemmParams& p;
    int weight_tiles;
    const unsigned char* order = nullptr; // SORTED: in shared memory; null: the order of experts
    int first = 0, before = 0;            // before: tiles of all groups before `first`
    int begin, count, tiles, through; // the group's first row, its rows, its tiles; tiles of all groups up to this one
    int mine;                         // SORTED: the group's expert

    // SORTED: `room` is MAX_SORTED bytes of shared memory for this warp.
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

    // Write the experts to `to`, from those with large tiles to those with small ones, as their products take time:
    // by the widths that hold them. No more than the order follows from the sizes of tiles, which are approximate here.
    __device__ __forceinline__ void sort_groups(unsigned char* to) {
        constexpr int LARGEST[] = {TOKENS, 272, 256, 240, 224, 192}, KINDS = 6, CHUNKS = MAX_SORTED / 32;
        constexpr int BITS = 10;                             // of a kind's count, of six in a word
        constexpr unsigned long long SUMS = 0x4010040100401; // times a word: the counts of each kind and those before
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
        unsigned long long next = all - mine + (__shfl_sync(FULL_WARP, all, 31) * SUMS << BITS); // places, by kind
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * 32 + lane < p.experts) {
                to[next >> shifts[i] & ((1 << BITS) - 1)] = i * 32 + lane;
                next += 1ull << shifts[i];
            }
        __syncwarp();
    }

    // Tiles of tokens of a group. Tokens past 256 take a second product at every step, which pays only where all tokens
    // of a group then are one tile.
    static __device__ __forceinline__ int tiles_of(int count) {
        return count <= TOKENS ? count > 0 : (count - TAIL + EACH - 1) / EACH;
    }

    // Tokens of each of `tiles` tiles of a group, at most TOKENS; the last one has those that are left.
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
