// Tile scheduler of gemm_wgmma, gemm_fp4_wgmma and gemm_folded_wgmma.
#pragma once
#include "moe_gemm/groups.cuh"

constexpr int MAX_SORTED = 256; // with more experts, tiles are in expert order

// Tile indices of a cluster. SORTED: every second round visits the clusters in reverse order, so that no cluster gets
// the largest tile of every round.
template <bool SORTED, int CLUSTER> struct TileSequence {
    int tile = blockIdx.x / CLUSTER;
    int step = 2 * (gridDim.x / CLUSTER - tile) - 1; // SORTED: distance to the next tile

    __device__ __forceinline__ void advance() {
        tile += SORTED ? step : int(gridDim.x / CLUSTER);
        if constexpr (SORTED) step = 2 * int(gridDim.x / CLUSTER) - step;
    }
};

// Finds tiles by their index in scheduling order. Lane i of a warp holds the group of expert `first + i`; SORTED: of
// expert `order[first + i]`. A band is `p.band_tiles` token tiles of a group times all weight tiles. Consecutive tiles
// of a band have the same weights.
//
// SORTED: the largest tiles come first, because a large last tile would delay the end of the kernel. The last tile of a
// group may have up to TAIL tokens more than FULL_TOKENS, if this saves a tile.
template <int TOKENS, bool SORTED = false> struct WgmmaTiles {
    static constexpr int FULL_TOKENS =
        TOKENS < 256 ? TOKENS : 256; // maximum tokens per tile in a group of several tiles
    static constexpr int TAIL = SORTED ? TOKENS - FULL_TOKENS : 0;
    static constexpr int ALIGNMENT = TOKENS < 16 ? TOKENS : 16; // divides the tokens of all tiles but a group's last

    const MappedGemmParams& p;
    int weight_tiles;
    const unsigned char* order = nullptr; // SORTED: in shared memory; null: expert order
    int first = 0, tiles_before = 0;      // tiles_before: tiles of all groups before group `first`
    int begin, count, tiles, prefix_sum;  // of the lane's group; prefix_sum: inclusive, of `tiles`
    int sorted_expert;                    // SORTED: expert of the lane's group

    // `sort_buffer`: MAX_SORTED bytes of shared memory per warp, if SORTED.
    __device__ __forceinline__ WgmmaTiles(const MappedGemmParams& p, int weight_tiles,
                                          unsigned char* sort_buffer = nullptr)
        : p(p), weight_tiles(weight_tiles) {
        if constexpr (SORTED) {
            if (p.experts <= MAX_SORTED) {
                sort_groups(sort_buffer);
                order = sort_buffer;
            }
        }
        read_groups();
    }

    // Write the experts to `to`, largest tile width first (a counting sort). The width, N of the tile's wgmma,
    // determines the tile's time; six buckets approximate the order.
    __device__ __forceinline__ void sort_groups(unsigned char* to) {
        constexpr int LARGEST[] = {TOKENS, 272, 256, 240, 224, 192}, BUCKETS = 6, CHUNKS = MAX_SORTED / 32;
        constexpr int BITS = 10;                             // of a bucket's counter
        constexpr unsigned long long SUMS = 0x4010040100401; // counters * SUMS: prefix sums of the counters
        const int lane = threadIdx.x % 32, end = p.max_tokens ? 0 : p.offset_stride;
        int counts[CHUNKS], shifts[CHUNKS];
        unsigned long long all = 0, others;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int at = min(i * 32 + lane, p.experts - 1) * p.offset_stride;
            const int begin = p.offsets[at], word = p.offsets[at + end];
            counts[i] = end ? word - begin : word;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float tile_tokens = counts[i];
            if (counts[i] > TOKENS) tile_tokens = __fdividef(tile_tokens, tiles_of(counts[i]));
            shifts[i] = 0;
#pragma unroll
            for (int bucket = 1; bucket < BUCKETS; ++bucket)
                if (tile_tokens <= LARGEST[bucket]) shifts[i] = bucket * BITS;
            if (i * 32 + lane < p.experts) all += 1ull << shifts[i];
        }
        const unsigned long long lane_counts = all;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            others = __shfl_up_sync(FULL_WARP, all, distance);
            if (lane >= distance) all += others;
        }
        unsigned long long next =
            all - lane_counts + (__shfl_sync(FULL_WARP, all, 31) * SUMS << BITS); // next index per bucket
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * 32 + lane < p.experts) {
                to[next >> shifts[i] & ((1 << BITS) - 1)] = i * 32 + lane;
                next += 1ull << shifts[i];
            }
        __syncwarp();
    }

    // Return the number of token tiles of a group. Tokens past 256 need a second wgmma in every step, so a tile has
    // more than FULL_TOKENS tokens only if this saves a tile.
    static __device__ __forceinline__ int tiles_of(int count) {
        return count <= TOKENS ? count > 0 : (count - TAIL + FULL_TOKENS - 1) / FULL_TOKENS;
    }

    // Return the number of tokens in each tile of a group except the last.
    static __device__ __forceinline__ int tokens_per_tile(int count, unsigned tiles) {
        const int even = (count + tiles * ALIGNMENT - 1) / (tiles * ALIGNMENT) * ALIGNMENT;
        return TAIL && tiles > 1 ? min(even, FULL_TOKENS) : even;
    }

    __device__ __forceinline__ void read_groups() {
        int expert = first + int(threadIdx.x % 32);
        begin = count = 0;
        if (expert < p.experts) {
            if (SORTED && order) expert = order[expert];
            sorted_expert = expert;
            const GroupRows group = rows_of(p, expert);
            begin = group.first, count = group.count;
        }
        tiles = tiles_of(count) * weight_tiles;
        prefix_sum = tiles_before + lanes_inclusive_sum<32>(tiles);
    }

    // Set the arguments to the expert, first row, tokens and weight tile of tile `tile`. Return false if `tile` is past
    // the last tile. `tile` must not decrease from call to call.
    __device__ __forceinline__ bool find(int tile, int& expert, int& row, int& tokens, int& weight_tile) {
        int last;
        while (tile >= (last = __shfl_sync(FULL_WARP, prefix_sum, 31))) {
            if (first + 32 >= p.experts) return false;
            first += 32, tiles_before = last;
            read_groups();
        }
        const int lane = __ffs(__ballot_sync(FULL_WARP, tile < prefix_sum)) - 1;
        const int all = __shfl_sync(FULL_WARP, count, lane);
        unsigned index = tile - __shfl_sync(FULL_WARP, prefix_sum - tiles, lane);
        const unsigned token_tiles = tiles_of(all), band_size = p.band_tiles * weight_tiles;
        const int tile_tokens = tokens_per_tile(all, token_tiles);
        const unsigned band = index / band_size;
        index -= band * band_size;
        const unsigned height = min(token_tiles - band * p.band_tiles, unsigned(p.band_tiles));
        const unsigned token_tile = band * p.band_tiles + index % height;
        const int token = token_tile * tile_tokens;
        expert = SORTED ? __shfl_sync(FULL_WARP, sorted_expert, lane) : first + lane;
        row = __shfl_sync(FULL_WARP, begin, lane) + token;
        tokens = TAIL && token_tile == token_tiles - 1 ? all - token : min(all - token, tile_tokens);
        weight_tile = index / height;
        return true;
    }
};
