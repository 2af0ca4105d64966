// Attention over packed sequences or a paged cache, for 16-bit elements, with Hopper's wgmma and TMA.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j in the window of query i
//                 with a softcap: softcap * tanh(score / softcap)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// sequences.cuh defines the window, and the tiles of queries. With sinks the softmax has one more score, sinks[head],
// whose value is 0. The result of a query that sees no key is 0. Weights are rounded to T before their MMA with the
// values. All sums are in float32, including the sum of the weights.
//
//   T            __half or __nv_bfloat16
//   DIM, DIM_V   padded size of a head of q and k, and of v, at least p.dim and p.dim_v; TMA fills the padding with 0
//   WARPGROUPS   consumer warpgroups of a block, with 64 rows of the tile of queries each
//   KEYS         keys of a tile
//   Q_STAGES     tiles of queries in shared memory
//
// Grid: one persistent block per multiprocessor. The scheduler warp describes the next tiles of queries in shared
// memory. The producer warp loads the queries and, tile by tile, the keys and values (wgmma_tiles.cuh). The consumer
// warpgroups compute for tile n of the keys
//
//   S = Q K[n]'    P = exp2(S - largest), in registers: fragments of S become fragments of P (FlashAttention-2)
//   O = O * exp2(previous largest - largest) + P V[n]
//
// The MMAs S of tile n + 1 and P V of tile n are in flight together, and the exponentials of tile n + 1 overlap P V of
// tile n. Consumer warpgroups issue their MMAs in turn, so that the exponentials of one overlap the MMAs of the others.
// Both are from FlashAttention-3 (Shah et al., 2024).
//
// Keys outside a query's window get a score of -inf. Values after the end of the sequence, and before the first loaded
// page, are cleared in shared memory, because 0 * NaN is NaN. If a last tile has at most NARROW keys, the MMAs process
// only NARROW keys. Tiles of keys begin at multiples of KEYS, so a row has the same bits in any batch and any chunk.
//
// Speed of light: the tensor cores, with 2 * (dim + dim_v) flops for each pair of a query and a key that it sees. With
// DIM 64 the exponentials take as long as the MMAs: a tile of 64 queries and 128 keys takes 512 cycles of a
// multiprocessor's tensor cores, and 512 cycles of its exp2 units, which compute 16 per cycle. For few queries per
// sequence memory bandwidth is the limit: keys and values are read once per tile of queries.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/wgmma_tiles.cuh"

constexpr int NARROW = 64;
constexpr int NO_TOKEN = 1 << 20; // of a row without a query; larger than any token of a tile

// Named barriers, for up to four warpgroups. TURN + i: warpgroup i may issue its MMAs. CLEARED + i: all warps of
// warpgroup i have cleared their values.
enum { TURN = 1, CLEARED = 5 };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A consumer warpgroup. A lane has two rows of the tile of queries: lane / 4 of its warp's 16 rows, and that row + 8.
template <typename T, class L> struct Consumer {
    const MappedParams& params;
    Shared<L>& shared;
    const unsigned base;         // shared address of the tiles
    const int index;             // of the warpgroup
    const int warp, lane;        // warp of the warpgroup, and lane of the warp
    int token[2], head[2];       // of the lane's rows: token and head of the tile
    int first_token, last_token; // of the warp's rows
    int stages_read = 0, q_read = 0;
    Tile tile;
    int active; // warpgroups with queries
    float sums[L::DIM_V / 2];
    float largest[2], total[2]; // largest product (or capped score) and sum of this lane's weights, by row
    unsigned weights[L::KEYS / 16][4];

    __device__ __forceinline__ void init() {
        const int rows = params.warpgroup_tokens * params.p.pack, before = index * params.warpgroup_tokens;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = warp * 16 + lane / 4 + 8 * i;
            token[i] = row < rows ? before + row / params.p.pack : NO_TOKEN;
            head[i] = row % params.p.pack;
        }
        first_token = before + warp * 16 / params.p.pack;
        last_token = before + (warp * 16 + 15) / params.p.pack;
    }

    // Arrive at an empty barrier. All lanes of the warp have finished reading.
    __device__ __forceinline__ void release(unsigned long long& empty) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&empty));
    }

    __device__ __forceinline__ int stage(int n) const { return (stages_read + n) % L::STAGES; }
    __device__ __forceinline__ void wait_k_full(int n) const {
        mbarrier_wait(shared_address(&shared.k_full[stage(n)]), (stages_read + n) / L::STAGES);
    }
    __device__ __forceinline__ void wait_v_full(int n) const {
        mbarrier_wait(shared_address(&shared.v_full[stage(n)]), (stages_read + n) / L::STAGES);
    }

    // Wait until this warpgroup may issue its MMAs. Warpgroup 0 takes the first turn of a tile of queries without a wait.
    __device__ __forceinline__ void take_turn(bool is_first) const {
        if (L::WARPGROUPS > 1 && active > 1 && !(is_first && index == 0)) barrier_sync(TURN + index, 2 * WARPGROUP);
    }
    // Let the next warpgroup issue its MMAs. Only warpgroup i - 1 passes a turn to warpgroup i, and only the last active
    // one to warpgroup 0. A warpgroup that skips this tile and is ahead therefore passes no turn too early.
    __device__ __forceinline__ void pass_turn(bool is_last) const {
        if (L::WARPGROUPS > 1 && active > 1 && !(is_last && index == active - 1))
            barrier_arrive(TURN + (index + 1 == active ? 0 : index + 1), 2 * WARPGROUP);
    }

    // Issue the MMAs of the queries with the first `2 * SCORES` keys of tile n.
    template <int SCORES> __device__ __forceinline__ void issue_qk(int n, float (&scores)[SCORES]) const {
        const unsigned long long a = k_major_descriptor(base + q_read % L::Q_STAGES * L::Q_TILE + index * 64 * LINE);
        const unsigned long long b = k_major_descriptor(base + L::K_BEGIN + stage(n) * L::K_TILE);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < L::DIM / 16; ++d) {
            const int split = d / 4, within = d % 4 * 32;
            wgmma_k_major<T>(scores, a + ((split * L::Q_SPLIT + within) >> 4), b + ((split * L::SPLIT + within) >> 4),
                             d > 0);
        }
        wgmma_commit_group();
    }

    // Issue the MMAs of the weights with the first WIDTH values of tile n.
    template <int WIDTH> __device__ __forceinline__ void issue_pv(int n) {
        const unsigned long long b = mn_major_descriptor<L::SPLIT>(base + L::V_BEGIN + stage(n) * L::V_TILE);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) wgmma_mn_major<T>(sums, weights[k], b + (k * 16 * LINE >> 4), true);
        wgmma_commit_group();
    }

    // Replace the scores of keys outside the windows by -inf.
    template <int WIDTH> __device__ __forceinline__ void mask(int key, float (&scores)[WIDTH / 2]) const {
        const int end = min(tile.keys, tile.high + first_token);
        if (key + WIDTH <= end && key >= tile.low + last_token) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = key + lane % 4 * 2;
            const int high = min(tile.keys, tile.high + token[i]) - column, low = tile.low + token[i] - column;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (n * 8 + j >= high || n * 8 + j < low) scores[4 * n + 2 * i + j] = -CUDART_INF_F;
        }
    }

    // Replace the scores of tile n by weights, and return the factors that rescale the earlier sums of the two rows.
    template <int WIDTH> __device__ __forceinline__ void weigh(int n, float (&scores)[WIDTH / 2], float (&factors)[2]) {
        const float scale = params.p.scale;
        if (params.p.cap != 0.f)
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) scores[i] = capped(params.p, scores[i]);
        mask<WIDTH>((tile.begin / L::KEYS + n) * L::KEYS, scores);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most[2] = {largest[i], largest[i]};
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j)
                most[j % 2] = fmaxf(most[j % 2], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            const float highest = lanes_max<4>(fmaxf(most[0], most[1]));
            // If all scores so far are -inf, use 0: any finite reference gives weights of 0. The factor is exactly 1 if
            // the largest score stays, so a tile of keys that a row does not see leaves its bits as they are.
            const float reference = highest == -CUDART_INF_F ? 0.f : highest, offset = reference * scale;
            factors[i] = fast_exp2((largest[i] - reference) * scale); // 0 for the first tile
            largest[i] = highest;
            float sum[2] = {total[i] * factors[i], 0.f};
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
                for (int c = 4 * j + 2 * i; c < 4 * j + 2 * i + 2; ++c) {
                    scores[c] = fast_exp2(fmaf(scores[c], scale, -offset));
                    sum[c % 2] += scores[c];
                }
            total[i] = sum[0] + sum[1];
        }
    }

    template <int WIDTH> __device__ __forceinline__ void pack_weights(const float (&scores)[WIDTH / 2]) {
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }

    // Clear the values of tile n that the producer did not load or that follow the sequence, because they may be NaN.
    template <int WIDTH> __device__ __forceinline__ void clear_values(int n) const {
        const int key = (tile.begin / L::KEYS + n) * L::KEYS;
        const int first = params.first_row(tile, key), end = tile.keys - key;
        if (first == 0 && end >= WIDTH) return;
        const unsigned values = base + L::V_BEGIN + stage(n) * L::V_TILE;
        for (int i = threadIdx.x % WARPGROUP; i < WIDTH * 8; i += WARPGROUP)
            if (i / 8 < first || i / 8 >= end)
#pragma unroll
                for (int split = 0; split < L::V_SPLITS; ++split)
                    store_shared(values + split * L::SPLIT + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        barrier_sync(CLEARED + index, WARPGROUP);
    }

    // The prologue: compute the weights of the first tile.
    template <int WIDTH> __device__ __forceinline__ void begin(int tiles) {
        float scores[WIDTH / 2], factors[2];
        wait_k_full(0);
        issue_qk(0, scores);
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release(shared.k_empty[stage(0)]);
        if (tiles == 1) release(shared.q_empty[q_read % L::Q_STAGES]);
        weigh<WIDTH>(0, scores, factors);
        pack_weights<WIDTH>(scores);
    }

    // The mainloop body: issue the MMAs S of tile n + 1, which has NEXT keys, and P V of tile n, and compute the weights
    // of tile n + 1.
    template <int WIDTH, int NEXT> __device__ __forceinline__ void add(int n, int tiles) {
        float scores[NEXT / 2], factors[2];
        wait_k_full(n + 1);
        take_turn(n == 0);
        issue_qk(n + 1, scores);
        wait_v_full(n);
        clear_values<WIDTH>(n);
        issue_pv<WIDTH>(n);
        pass_turn(n + 2 == tiles);
        wgmma_wait_group<1>();
        wgmma_fence_operand(scores);
        release(shared.k_empty[stage(n + 1)]);
        if (n + 2 == tiles) release(shared.q_empty[q_read % L::Q_STAGES]);
        weigh<NEXT>(n + 1, scores, factors);
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        release(shared.v_empty[stage(n)]);
#pragma unroll
        for (int j = 0; j < L::DIM_V / 2; ++j) sums[j] *= factors[j / 2 % 2];
        pack_weights<NEXT>(scores);
    }

    // The epilogue of the mainloop: P V of the last tile.
    template <int WIDTH> __device__ __forceinline__ void end(int n) {
        wait_v_full(n);
        clear_values<WIDTH>(n);
        issue_pv<WIDTH>(n);
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        release(shared.v_empty[stage(n)]);
    }

    __device__ __forceinline__ void attend(int tiles) {
        mbarrier_wait(shared_address(&shared.q_full[q_read % L::Q_STAGES]), q_read / L::Q_STAGES);
        if constexpr (NARROW < L::KEYS) {
            if ((tile.end - 1) % L::KEYS < NARROW) {
                if (tiles == 1) {
                    begin<NARROW>(tiles);
                } else {
                    begin<L::KEYS>(tiles);
#pragma unroll 1
                    for (int n = 0; n < tiles - 2; ++n) add<L::KEYS, L::KEYS>(n, tiles);
                    add<L::KEYS, NARROW>(tiles - 2, tiles);
                }
                end<NARROW>(tiles - 1);
                return;
            }
        }
        begin<L::KEYS>(tiles);
#pragma unroll 1
        for (int n = 0; n < tiles - 1; ++n) add<L::KEYS, L::KEYS>(n, tiles);
        end<L::KEYS>(tiles - 1);
    }

    // Without queries: release all stages of the tile as soon as they are full.
    __device__ __forceinline__ void skip(int tiles) const {
        mbarrier_wait(shared_address(&shared.q_full[q_read % L::Q_STAGES]), q_read / L::Q_STAGES);
        release(shared.q_empty[q_read % L::Q_STAGES]);
        for (int n = 0; n < tiles; ++n) {
            wait_k_full(n);
            release(shared.k_empty[stage(n)]);
            wait_v_full(n);
            release(shared.v_empty[stage(n)]);
        }
    }

    // Transpose a 4 x 4 matrix of words in the four lanes of a row: lane i gets column i. Before, word j of lane i is
    // element (i, j).
    __device__ __forceinline__ void transpose(unsigned (&words)[4]) const {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            const bool upper = lane & step;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (j & step) continue;
                const unsigned received = __shfl_xor_sync(FULL_WARP, upper ? words[j] : words[j + step], step);
                (upper ? words[j] : words[j + step]) = received;
            }
        }
    }

    // Normalize and store the results. A lane has 2 of every 8 columns of a row. The four lanes of a row exchange their
    // columns, so that each lane stores 8 neighbouring columns.
    __device__ __forceinline__ void store(bool is_invalid) {
        const Params& p = params.p;
        float factors[2];
        char* to[2]; // null for no query
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool is_query = token[i] < tile.tokens;
            const int of_head = tile.first_head + head[i];
            const bool has_sink = p.sinks && is_query;
            const Normal normal(largest[i] * p.scale, lanes_sum<4>(total[i]), has_sink,
                                has_sink ? sink_of(p, of_head) : 0.f);
            factors[i] = is_invalid ? CUDART_NAN_F : normal.factor;
            const long long row = tile.first + token[i];
            if (p.lse && is_query && lane % 4 == 0)
                p.lse[of_head * (long long)p.tokens + row] = is_invalid ? CUDART_NAN_F : normal.lse;
            to[i] = is_query ? p.out + ((row * p.heads + of_head) * p.dim_v + lane % 4 * 8) * 2 : nullptr;
        }
#pragma unroll
        for (int j = 0; j < L::DIM_V / 32; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int at = 16 * j + 4 * k + 2 * i;
                    words[k] = pack<T>(sums[at] * factors[i], sums[at + 1] * factors[i]);
                }
                transpose(words);
                if (to[i] && 32 * j + lane % 4 * 8 < p.dim_v)
                    *reinterpret_cast<uint4*>(to[i] + 64 * j) = make_uint4(words[0], words[1], words[2], words[3]);
            }
    }

    __device__ __forceinline__ void run() {
        init();
        for (int n = 0;; ++n) {
            const int slot = n % TILE_SLOTS;
            mbarrier_wait(shared_address(&shared.tile_full[slot]), n / TILE_SLOTS);
            tile = shared.tiles[slot];
            if (tile.sequence < 0) return;
            active = min((tile.tokens + params.warpgroup_tokens - 1) / params.warpgroup_tokens, L::WARPGROUPS);
            const int tiles = (tile.end + L::KEYS - 1) / L::KEYS - tile.begin / L::KEYS;
            if (index < active) {
#pragma unroll
                for (int i = 0; i < 2; ++i) largest[i] = -CUDART_INF_F, total[i] = 0.f;
#pragma unroll
                for (int j = 0; j < L::DIM_V / 2; ++j) sums[j] = 0.f;
                if (tiles > 0) attend(tiles);
                store(shared.invalid[slot]);
            } else if (tiles > 0) {
                skip(tiles);
            }
            if (tiles > 0) ++q_read;
            stages_read += tiles;
            release(shared.tile_empty[slot]);
        }
    }
};

template <typename, int DIM, int DIM_V, int WARPGROUPS, int KEYS, int Q_STAGES>
constexpr Launch attention_wgmma_launch() {
    using L = Layout<DIM, DIM_V, WARPGROUPS, KEYS, Q_STAGES>;
    return {(WARPGROUPS + 1) * WARPGROUP, 1024 + L::BARRIERS + int(sizeof(Shared<L>))};
}

template <typename T, int DIM, int DIM_V, int WARPGROUPS, int KEYS, int Q_STAGES>
__global__ void __launch_bounds__(((WARPGROUPS + 1) * WARPGROUP), 1)
    attention_wgmma(const __grid_constant__ MappedParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using L = Layout<DIM, DIM_V, WARPGROUPS, KEYS, Q_STAGES>;
    // Registers per thread of the producer and of the consumers; together 2^16 at most.
    constexpr int LOADING = WARPGROUPS == 2 ? 40 : 32, COMPUTING = WARPGROUPS == 2 ? 232 : 160;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned base = shared_address(memory) + misplaced;
    Shared<L>& shared = *reinterpret_cast<Shared<L>*>(memory + misplaced + L::BARRIERS);
    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q_map);
        prefetch_tensormap(params.k_map);
        prefetch_tensormap(params.v_map);
        shared.init();
    }
    __syncthreads(); // the barriers are initialized
    // The shuffle tells the compiler that the warp index is the same in all lanes.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0);
    if (warp >= 4 * WARPGROUPS) {
        setmaxnreg_dec<LOADING>();
        if (warp == 4 * WARPGROUPS) Producer<L>{params, shared, base}.run();
        if (warp == 4 * WARPGROUPS + 1) Scheduler<L>{params, shared}.run();
    } else {
        setmaxnreg_inc<COMPUTING>();
        Consumer<T, L>{params, shared, base, warp / 4, warp % 4, int(threadIdx.x % 32)}.run();
    }
#endif
}
