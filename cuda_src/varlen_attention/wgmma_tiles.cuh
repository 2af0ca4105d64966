// The shared memory of attention_wgmma, and its producer warps.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int COLUMNS = 64, LINE = 128; // elements and bytes of a row of a tile in shared memory
constexpr int TILE_SLOTS = 2;           // descriptions of tiles of queries: the current one and the next one

struct alignas(64) MappedParams {
    TensorMap q_map; // [tokens, heads, dim], in boxes of warpgroup_tokens x pack heads x COLUMNS elements
    TensorMap k_map; // [pages, page_size, kv_heads, dim], in boxes of box_tokens tokens x COLUMNS elements
    TensorMap v_map; // [pages, page_size, kv_heads, dim_v]; without a block table one page has all rows
    Params p;
    const int* starts; // [sequences + 2], from plan_tiles
    int* counter;      // number of tiles taken beyond the first one of each block
    int warpgroup_tokens;
    int box_tokens; // a power of two from 8 to 64, which divides page_size with a block table

    // Return the first row of the first tile of keys, and of values, that the producer loads. The pages of earlier rows
    // may be invalid, because no query of the tile sees them.
    template <int KEYS> __device__ __forceinline__ int first_row(const Tile& tile) const {
        return p.block_table ? tile.begin % KEYS & -box_tokens : 0;
    }
};

// A tile of more than 64 columns is stored as tiles of 64 columns, called splits of the tile.
template <int DIM_, int DIM_V_, int WARPGROUPS_, int KEYS_, int Q_STAGES_, int STAGES_> struct Layout {
    static constexpr int DIM = DIM_, DIM_V = DIM_V_, WARPGROUPS = WARPGROUPS_, KEYS = KEYS_;
    static constexpr int Q_STAGES = Q_STAGES_, STAGES = STAGES_;
    // Whether a consumer has registers for two tiles of weights. With DIM 256 NVRTC 13.5 spills.
    static constexpr bool PAIRS = WARPGROUPS == 2 && DIM < 256;
    static constexpr int ROWS = 64 * WARPGROUPS, K_SPLITS = DIM / COLUMNS, V_SPLITS = DIM_V / COLUMNS;
    static constexpr int Q_SPLIT = ROWS * LINE, SPLIT = KEYS * LINE; // bytes
    static constexpr int Q_TILE = K_SPLITS * Q_SPLIT, K_TILE = K_SPLITS * SPLIT, V_TILE = V_SPLITS * SPLIT;
    static constexpr int K_BEGIN = Q_STAGES * Q_TILE, V_BEGIN = K_BEGIN + STAGES * K_TILE;
    static constexpr int BARRIERS = V_BEGIN + STAGES * V_TILE; // offset of Shared
};

// A place in a circular buffer of STAGES stages.
template <int STAGES> struct Place {
    unsigned count = 0; // of stages before this place

    // Return the stage, and the parity of the phase of its barriers, `n` stages after this place.
    __device__ __forceinline__ int stage(int n = 0) const { return (count + n) % STAGES; }
    __device__ __forceinline__ int parity(int n = 0) const { return (count + n) / STAGES & 1; }
};

template <class L> struct alignas(16) Shared {
    unsigned long long q_full[L::Q_STAGES], q_empty[L::Q_STAGES];
    unsigned long long k_full[L::STAGES], k_empty[L::STAGES];
    unsigned long long v_full[L::STAGES], v_empty[L::STAGES];
    unsigned long long tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
    Tile tiles[TILE_SLOTS];  // a negative sequence: there are no more tiles
    int invalid[TILE_SLOTS]; // the tile has a page that is not in the cache; valid after the tile's last v_full

    // A full barrier has an arrival of each warp that loads. An empty barrier has an arrival of each warp that reads:
    // the consumer warps, and for the descriptions of tiles also the producer warps that do not write them.
    __device__ __forceinline__ void init() {
        constexpr int CONSUMERS = L::WARPGROUPS * (WARPGROUP / 32);
        constexpr int K_PRODUCERS = L::K_SPLITS > 1 ? 2 : 1, V_PRODUCERS = L::V_SPLITS > 1 ? 2 : 1;
        const auto init_pair = [](unsigned long long& full, unsigned long long& empty, int writers, int readers) {
            mbarrier_init(shared_address(&full), writers);
            mbarrier_init(shared_address(&empty), readers);
        };
        for (int i = 0; i < L::Q_STAGES; ++i) init_pair(q_full[i], q_empty[i], 1, CONSUMERS);
        for (int i = 0; i < L::STAGES; ++i) {
            init_pair(k_full[i], k_empty[i], K_PRODUCERS, CONSUMERS);
            init_pair(v_full[i], v_empty[i], V_PRODUCERS, CONSUMERS);
        }
        for (int i = 0; i < TILE_SLOTS; ++i)
            init_pair(tile_full[i], tile_empty[i], 1, CONSUMERS + K_PRODUCERS + V_PRODUCERS - 1);
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

// Describe the tile of queries with index `index`. Tiles are in the order of heads, then sequences. Within a sequence
// the last tile is first, because causal attention takes longest for it. All blocks work on few heads at a time, whose
// keys stay in L2.
template <class L> __device__ __forceinline__ Tile tile_of(const MappedParams& params, int index) {
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

// A producer warp. For each tile of queries, two warps load the keys, tile by tile, and two warps load the values. Each
// of the two loads every second split; with one split, the second warp does nothing. A lane loads a box of rows.
//
// The first producer warp also schedules. When it has issued the loads of a tile of queries, it takes the next tile by
// an atomic counter, and describes it in shared memory. It issues the load of the queries after the load of the first
// tile of keys. A block holds at most one tile of queries that it has not begun, which balances the load.
template <class L> struct Producer {
    const MappedParams& params;
    Shared<L>& shared;
    const unsigned base; // shared address of the tiles
    const bool values;   // this warp loads values
    const int part;      // first split that this warp loads
    const int lane = threadIdx.x % 32;
    Place<L::Q_STAGES> q;
    Place<L::STAGES> kv;

    __device__ __forceinline__ int splits() const { return values ? L::V_SPLITS : L::K_SPLITS; }

    __device__ __forceinline__ void load_q(const Tile& tile) {
        mbarrier_wait(shared_address(&shared.q_empty[q.stage()]), q.parity() ^ 1);
        const unsigned full = shared_address(&shared.q_full[q.stage()]);
        const int warpgroups = (tile.tokens + params.warpgroup_tokens - 1) / params.warpgroup_tokens;
        const int boxes = warpgroups * L::K_SPLITS;
        if (lane == 0) mbarrier_arrive_expect_tx(full, boxes * params.warpgroup_tokens * params.p.pack * LINE);
        __syncwarp();
        if (lane < boxes) {
            const int warpgroup = lane / L::K_SPLITS, split = lane % L::K_SPLITS;
            tma_load<EVICT_FIRST>(base + q.stage() * L::Q_TILE + split * L::Q_SPLIT + warpgroup * 64 * LINE,
                                  params.q_map, split * COLUMNS, tile.first_head,
                                  tile.first + warpgroup * params.warpgroup_tokens, 0, full);
        }
        ++q.count;
    }

    // Return the page of the lane's box in the tile of keys that begins at key `key`. If the page is not in the cache,
    // mark the tile of queries. The barrier of the values publishes the mark. TMA fills the box with zeros.
    __device__ __forceinline__ int page_of(const Tile& tile, int key, int slot) const {
        const Params& p = params.p;
        const int row = key + lane * params.box_tokens;
        if (!p.block_table || row + params.box_tokens <= tile.begin || row >= min(tile.keys, key + L::KEYS)) return 0;
        const int page = __ldg(p.block_table + tile.sequence * p.table_stride + unsigned(row) / unsigned(p.page_size));
        if (unsigned(page) < unsigned(p.rows)) return page;
        if (values) shared.invalid[slot] = 1;
        return p.rows;
    }

    // Load a tile of keys or values, which begins at key `key`. Boxes before row `first`, and boxes after the last key
    // of the sequence, are not loaded.
    __device__ __forceinline__ void load(const Tile& tile, int kv_head, int key, int first, int page) {
        const int stage = kv.stage(), row = lane * params.box_tokens, rows = min(tile.keys - key, L::KEYS);
        const unsigned full = shared_address(values ? &shared.v_full[stage] : &shared.k_full[stage]);
        const unsigned empty = shared_address(values ? &shared.v_empty[stage] : &shared.k_empty[stage]);
        const unsigned to = base + (values ? L::V_BEGIN + stage * L::V_TILE : L::K_BEGIN + stage * L::K_TILE);
        mbarrier_wait(empty, kv.parity() ^ 1);
        const int loaded = (rows + params.box_tokens - 1 & -params.box_tokens) - first;
        __syncwarp(); // before the arrival, which publishes the marks of all lanes
        if (lane == 0) mbarrier_arrive_expect_tx(full, loaded * ((splits() - part + 1) / 2) * LINE);
        __syncwarp();
        if (row >= first && row < rows) {
            const Params& p = params.p;
            const int from = p.block_table ? unsigned(key + row) % unsigned(p.page_size) : tile.keys_begin + key + row;
#pragma unroll 1
            for (int split = part; split < splits(); split += 2)
                tma_load<EVICT_NORMAL>(to + split * L::SPLIT + row * LINE, values ? params.v_map : params.k_map,
                                       split * COLUMNS, kv_head, from, page, full);
        }
        ++kv.count;
    }

    __device__ __forceinline__ void run() {
        if (part >= splits()) return;
        const bool schedules = !values && part == 0;
        int index = blockIdx.x; // of the tile of queries
        for (int n = 0;; ++n) {
            const int slot = n % TILE_SLOTS;
            const unsigned full = shared_address(&shared.tile_full[slot]),
                           empty = shared_address(&shared.tile_empty[slot]);
            if (schedules) {
                const Tile next = tile_of<L>(params, index);
                mbarrier_wait(empty, n / TILE_SLOTS - 1);
                if (lane == 0) {
                    shared.tiles[slot] = next, shared.invalid[slot] = next.invalid;
                    mbarrier_arrive(full);
                }
                __syncwarp();
            } else {
                mbarrier_wait(full, n / TILE_SLOTS);
            }
            const Tile& tile = shared.tiles[slot]; // registers are scarce
            if (tile.sequence < 0) return;
            const int kv_head = tile.first_head / params.p.group;
            int key = tile.begin / L::KEYS * L::KEYS, first = params.template first_row<L::KEYS>(tile);
            int page = tile.end > 0 ? page_of(tile, key, slot) : 0;
            for (; key < tile.end; key += L::KEYS) {
                // The page of the next box is read before this tile is loaded, because the read takes long.
                const int next = key + L::KEYS < tile.end ? page_of(tile, key + L::KEYS, slot) : 0;
                load(tile, kv_head, key, first, page);
                if (schedules && key <= tile.begin) load_q(tile); // with the first tile of keys
                first = 0, page = next;
            }
            __syncwarp();
            if (schedules) {
                if (lane == 0) index = gridDim.x + atomicAdd(params.counter, 1);
                index = __shfl_sync(FULL_WARP, index, 0);
            } else if (lane == 0) {
                mbarrier_arrive(empty);
            }
        }
    }
};
