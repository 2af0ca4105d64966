// The shared memory of attention_wgmma, its scheduler warp and its producer warp.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int COLUMNS = 64, LINE = 128; // elements and bytes of a row of a tile in shared memory
constexpr int TILE_SLOTS = 4;           // tiles of queries that the scheduler warp may describe ahead

struct alignas(64) MappedParams {
    TensorMap q_map; // [tokens, heads, dim], in boxes of warpgroup_tokens x pack heads x COLUMNS elements
    TensorMap k_map; // [pages, page_size, kv_heads, dim], in boxes of box_tokens tokens x COLUMNS elements
    TensorMap v_map; // [pages, page_size, kv_heads, dim_v]; without a block table one page has all rows
    Params p;
    const int* starts; // [sequences + 2], from plan_tiles
    int* counter;      // number of tiles taken beyond the first one of each block
    int warpgroup_tokens;
    int box_tokens; // a power of two from 8 to KEYS, which divides page_size

    // Return the first row of a tile of keys, or values, that the producer loads. The pages of earlier rows may be
    // invalid, because no query of the tile sees them.
    __device__ __forceinline__ int first_row(const Tile& tile, int key) const {
        return p.block_table ? max(tile.begin - key, 0) / box_tokens * box_tokens : 0;
    }
};

// A tile of more than 64 columns is stored as tiles of 64 columns, called splits of the tile.
template <int DIM_, int DIM_V_, int WARPGROUPS_, int KEYS_, int Q_STAGES_> struct Layout {
    static constexpr int DIM = DIM_, DIM_V = DIM_V_, WARPGROUPS = WARPGROUPS_, KEYS = KEYS_, Q_STAGES = Q_STAGES_;
    static constexpr int STAGES = 2;
    static constexpr int ROWS = 64 * WARPGROUPS, K_SPLITS = DIM / COLUMNS, V_SPLITS = DIM_V / COLUMNS;
    static constexpr int Q_SPLIT = ROWS * LINE, SPLIT = KEYS * LINE; // bytes
    static constexpr int Q_TILE = K_SPLITS * Q_SPLIT, K_TILE = K_SPLITS * SPLIT, V_TILE = V_SPLITS * SPLIT;
    static constexpr int K_BEGIN = Q_STAGES * Q_TILE, V_BEGIN = K_BEGIN + STAGES * K_TILE;
    static constexpr int BARRIERS = V_BEGIN + STAGES * V_TILE; // offset of Shared
};

template <class L> struct alignas(16) Shared {
    unsigned long long q_full[L::Q_STAGES], q_empty[L::Q_STAGES];
    unsigned long long k_full[L::STAGES], k_empty[L::STAGES];
    unsigned long long v_full[L::STAGES], v_empty[L::STAGES];
    unsigned long long tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
    Tile tiles[TILE_SLOTS];  // a negative sequence: there are no more tiles
    int invalid[TILE_SLOTS]; // the tile has a page that is not in the cache; valid after the tile's last v_full

    // A full barrier has one arrival. An empty barrier has an arrival of each warp that reads: the consumer warps, and
    // for the descriptions of tiles also the producer warp.
    __device__ __forceinline__ void init() {
        constexpr int CONSUMERS = L::WARPGROUPS * (WARPGROUP / 32);
        const auto init_pair = [](unsigned long long& full, unsigned long long& empty, int readers) {
            mbarrier_init(shared_address(&full), 1);
            mbarrier_init(shared_address(&empty), readers);
        };
        for (int i = 0; i < L::Q_STAGES; ++i) init_pair(q_full[i], q_empty[i], CONSUMERS);
        for (int i = 0; i < L::STAGES; ++i) {
            init_pair(k_full[i], k_empty[i], CONSUMERS);
            init_pair(v_full[i], v_empty[i], CONSUMERS);
        }
        for (int i = 0; i < TILE_SLOTS; ++i) init_pair(tile_full[i], tile_empty[i], CONSUMERS + 1);
        fence_mbarrier_init();
        fence_proxy_async();
    }
};

// Return the index of the last element of `starts` that is at most `tile`, in 0 ... count - 1. starts[0] is 0. In each
// iteration the 32 lanes of a warp test 32 equally spaced candidates.
__device__ __forceinline__ int last_start(const int* starts, int count, int tile) {
    int first = 0;
    while (count > 1) {
        const int step = (count + 31) / 32, place = int(threadIdx.x % 32) * step;
        const bool before = place < count && starts[first + place] <= tile;
        const int last = max(__popc(__ballot_sync(FULL_WARP, before)) - 1, 0) * step;
        first += last, count = min(step, count - last);
    }
    return first;
}

// The scheduler warp takes tiles of queries by an atomic counter, and describes them in shared memory.
template <class L> struct Scheduler {
    const MappedParams& params;
    Shared<L>& shared;
    const int lane = threadIdx.x % 32;

    // Describe the tile with index `index`. Tiles are in the order of heads, then sequences. Within a sequence the last
    // tile is first, because causal attention takes longest for it. All blocks work on few heads at a time, whose keys
    // stay in L2.
    __device__ __forceinline__ Tile describe(int index) const {
        const Params& p = params.p;
        const int tiles = params.starts[p.sequences + 1];
        Tile tile;
        tile.sequence = -1;
        if (index >= (long long)tiles * (p.heads / p.pack)) return tile;
        const int of_head = index % tiles;
        const int s = last_start(params.starts, p.sequences + 1, of_head);
        const int tile_tokens = params.warpgroup_tokens * L::WARPGROUPS;
        const int begin = begin_of(p.cu_seqlens_q, s, p.tokens);
        const int end = s < p.sequences ? begin_of(p.cu_seqlens_q, s + 1, p.tokens) : p.tokens;
        const int position = (params.starts[s + 1] - 1 - of_head) * tile_tokens;
        tile.set(p, s, index / tiles * p.pack, begin, end, position, tile_tokens);
        return tile;
    }

    __device__ __forceinline__ void run() const {
        int index = blockIdx.x;
        for (int n = 0;; ++n) {
            int following = 0;
            if (lane == 0) following = gridDim.x + atomicAdd(params.counter, 1);
            const Tile tile = describe(index);
            const int slot = n % TILE_SLOTS;
            mbarrier_wait(shared_address(&shared.tile_empty[slot]), n / TILE_SLOTS - 1);
            if (lane == 0) {
                shared.tiles[slot] = tile, shared.invalid[slot] = tile.invalid;
                mbarrier_arrive(shared_address(&shared.tile_full[slot]));
            }
            if (tile.sequence < 0) return;
            index = __shfl_sync(FULL_WARP, following, 0);
        }
    }
};

// The producer warp loads the queries of each tile, and, tile by tile, the keys and values that they see.
template <class L> struct Producer {
    const MappedParams& params;
    Shared<L>& shared;
    const unsigned base; // shared address of the tiles
    const int lane = threadIdx.x % 32;
    int stages_filled = 0, q_filled = 0;

    __device__ __forceinline__ void load_q(const Tile& tile) {
        const int stage = q_filled % L::Q_STAGES;
        mbarrier_wait(shared_address(&shared.q_empty[stage]), q_filled / L::Q_STAGES - 1);
        ++q_filled;
        const unsigned full = shared_address(&shared.q_full[stage]);
        const int warpgroups = (tile.tokens + params.warpgroup_tokens - 1) / params.warpgroup_tokens;
        const int boxes = warpgroups * L::K_SPLITS;
        if (lane == 0) mbarrier_arrive_expect_tx(full, boxes * params.warpgroup_tokens * params.p.pack * LINE);
        __syncwarp();
        for (int i = lane; i < boxes; i += 32) {
            const int warpgroup = i / L::K_SPLITS, split = i % L::K_SPLITS;
            tma_load<EVICT_FIRST>(base + stage * L::Q_TILE + split * L::Q_SPLIT + warpgroup * 64 * LINE, params.q_map,
                                  split * COLUMNS, tile.first_head, tile.first + warpgroup * params.warpgroup_tokens, 0,
                                  full);
        }
    }

    // Load a tile of keys or values, which begins at key `key`, into stage `filled % STAGES`. Boxes after the last key of
    // the sequence are not loaded. `slot`: the slot of the tile of queries.
    template <bool VALUES> __device__ __forceinline__ void load(const Tile& tile, int key, int filled, int slot) {
        constexpr int SPLITS = VALUES ? L::V_SPLITS : L::K_SPLITS;
        const Params& p = params.p;
        const int stage = filled % L::STAGES, box_tokens = params.box_tokens;
        const unsigned full = shared_address(VALUES ? &shared.v_full[stage] : &shared.k_full[stage]);
        const unsigned empty = shared_address(VALUES ? &shared.v_empty[stage] : &shared.k_empty[stage]);
        const unsigned to = base + (VALUES ? L::V_BEGIN + stage * L::V_TILE : L::K_BEGIN + stage * L::K_TILE);
        mbarrier_wait(empty, filled / L::STAGES - 1);
        const int first = params.first_row(tile, key) / box_tokens;
        const int end = (min(tile.keys - key, L::KEYS) + box_tokens - 1) / box_tokens;
        const int* const table = p.block_table + tile.sequence * p.table_stride;
        const int kv_head = tile.first_head / p.group;
        // A lane first reads the pages of all its boxes, and marks the tile if one of them is not in the cache. The
        // barrier's arrival publishes the mark. TMA fills the boxes of such a page with zeros.
        constexpr int LOADS = (L::KEYS / 8 * SPLITS + 31) / 32;
        int pages[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int box = first + (lane + 32 * i) / SPLITS;
            pages[i] = 0;
            if (p.block_table && box < end) {
                pages[i] = __ldg(table + (key + box * box_tokens) / p.page_size);
                if (unsigned(pages[i]) >= unsigned(p.rows)) pages[i] = p.rows, shared.invalid[slot] = 1;
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive_expect_tx(full, (end - first) * SPLITS * box_tokens * LINE);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int box = first + (lane + 32 * i) / SPLITS, split = (lane + 32 * i) % SPLITS;
            if (box >= end) break;
            const int row = key + box * box_tokens;
            tma_load<EVICT_NORMAL>(to + split * L::SPLIT + box * box_tokens * LINE,
                                   VALUES ? params.v_map : params.k_map, split * COLUMNS, kv_head,
                                   p.block_table ? row % p.page_size : tile.keys_begin + row, pages[i], full);
        }
    }

    __device__ __forceinline__ void run() {
        for (int n = 0;; ++n) {
            const int slot = n % TILE_SLOTS;
            mbarrier_wait(shared_address(&shared.tile_full[slot]), n / TILE_SLOTS);
            const Tile& tile = shared.tiles[slot]; // registers are scarce
            if (tile.sequence < 0) return;
            if (tile.end > 0) {
                // A consumer needs the keys of a tile before the values of the tile before it.
                int key = tile.begin / L::KEYS * L::KEYS;
                load<false>(tile, key, stages_filled, slot);
                load_q(tile);
                for (; key + L::KEYS < tile.end; key += L::KEYS) {
                    load<false>(tile, key + L::KEYS, stages_filled + 1, slot);
                    load<true>(tile, key, stages_filled++, slot);
                }
                load<true>(tile, key, stages_filled++, slot);
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(shared_address(&shared.tile_empty[slot]));
        }
    }
};
