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
//   STAGES       tiles of keys, and tiles of values, in shared memory
//
// Grid: one persistent block per multiprocessor. Producer warps take tiles of queries, and load the queries and, tile
// by tile, the keys and the values (wgmma_tiles.cuh). The consumer warpgroups compute for tile n of the keys
//
//   S = Q K[n]'    P = exp2(S - reference), in registers: fragments of S become fragments of P (FlashAttention-2)
//   O = O * exp2(previous reference - reference) + P V[n]
//
// A row raises its reference to its largest score only if the difference is more than MARGIN. Therefore tiles rarely
// rescale O (FlashAttention-4). A weight is at most 2^MARGIN.
//
// The MMAs S of tile n + 1 and P V of tile n are in flight together, and the exponentials of tile n + 1 overlap P V of
// tile n. In the mainloop consumer warpgroups issue their MMAs in turn, so that the exponentials of one overlap the
// MMAs of the others. Both are from FlashAttention-3 (Shah et al., 2024).
//
// Keys outside a query's window get a score of -inf. Values after the end of the sequence, and before the first loaded
// box, are cleared in shared memory, because 0 * NaN is NaN. If the queries see only the first NARROW keys of a last
// tile, the MMAs process only these keys. If they see only the last NARROW keys of a first tile, the other keys get a
// weight of 0 without an exponential. Tiles of keys begin at multiples of KEYS, so a row has the same bits in any batch
// and any chunk.
//
// Speed of light: the tensor cores, with 2 * (dim + dim_v) flops for each pair of a query and a key that it sees. With
// DIM 64 the exponentials take as long as the MMAs: a tile of 64 queries and 128 keys takes 512 cycles of a
// multiprocessor's tensor cores, and 512 cycles of its exp2 units, which compute 16 per cycle. For few queries per
// sequence memory bandwidth is the limit: keys and values are read once per tile of queries.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/wgmma_tiles.cuh"

constexpr int NARROW = 64;
constexpr float MARGIN = 8.f;
constexpr int NO_TOKEN = 1 << 20; // of a row without a query; larger than any token of a tile

// Named barriers, for up to three warpgroups. TURN + i and TURN + 3 + i: warpgroup i may issue its MMAs, for a tile of
// queries in stage 0 and in stage 1. A warpgroup may be one tile of queries ahead of another. CLEARED + i: all warps of
// warpgroup i have cleared their values.
enum { TURN = 1, CLEARED = 7 };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Compute `sum` before the wait that follows. ptxas otherwise moves the wait for P V above the exponentials, because no
// register connects them, and the two no longer overlap. The sum of weights is never negative, so the trap is not
// taken. The vote tells ptxas that the branch is the same in all lanes.
__device__ __forceinline__ void compute_before_wait(float2 sum) {
    asm volatile("{ .reg .pred negative;\n"
                 "  setp.lt.f32 negative, %0, 0f00000000;\n"
                 "  vote.sync.any.pred negative, negative, 0xffffffff;\n"
                 "  @negative trap; }" ::"f"(sum.x + sum.y)
                 : "memory");
}

// A consumer warpgroup. A lane has two rows of the tile of queries: lane / 4 of its warp's 16 rows, and that row + 8.
template <typename T, class L> struct Consumer {
    using Fragments = unsigned[L::KEYS / 16][4];
    const MappedParams& params;
    Shared<L>& shared;
    const unsigned base;         // shared address of the tiles
    const int index;             // of the warpgroup
    const int warp, lane;        // warp of the warpgroup, and lane of the warp
    int token[2], head[2];       // of the lane's rows: token and head of the tile
    int first_token, last_token; // of the warp's rows
    Place<L::Q_STAGES> q;
    Place<L::STAGES> kv; // of the first tile of keys
    Tile tile;
    int first_row; // of the first tile of keys: earlier rows are not loaded
    int active;    // warpgroups with queries
    float sums[L::DIM_V / 2];
    // By row: the score (base 2) whose weight is 1, and the sum of this lane's weights.
    float reference[2], total[2];
    float sink[2];     // base 2
    Fragments weights; // of the tile before

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

    __device__ __forceinline__ void wait_k_full(int n) const {
        mbarrier_wait(shared_address(&shared.k_full[kv.stage(n)]), kv.parity(n));
    }
    __device__ __forceinline__ void wait_v_full(int n) const {
        mbarrier_wait(shared_address(&shared.v_full[kv.stage(n)]), kv.parity(n));
    }
    __device__ __forceinline__ void release_k(int n) const { release(shared.k_empty[kv.stage(n)]); }
    __device__ __forceinline__ void release_v(int n) const { release(shared.v_empty[kv.stage(n)]); }
    __device__ __forceinline__ void release_q() {
        release(shared.q_empty[q.stage()]);
        ++q.count;
    }

    // Wait until this warpgroup may issue its MMAs. Warpgroup 0 takes the first turn of a tile of queries without a
    // wait.
    __device__ __forceinline__ void take_turn(bool is_first) const {
        if (active > 1 && !(is_first && index == 0)) barrier_sync(TURN + 3 * q.stage() + index, 2 * WARPGROUP);
    }
    // Let the next warpgroup issue its MMAs. Only warpgroup i - 1 passes a turn to warpgroup i, and only the last
    // active one to warpgroup 0. A warpgroup without queries in this tile passes no turn, although it may already be in
    // the next tile, because the active warpgroups pass theirs among themselves.
    __device__ __forceinline__ void pass_turn(bool is_last) const {
        if (active > 1 && !(is_last && index == active - 1))
            barrier_arrive(TURN + 3 * q.stage() + (index + 1 == active ? 0 : index + 1), 2 * WARPGROUP);
    }

    // Issue the MMAs of the queries with the first `2 * SCORES` keys of tile n.
    template <int SCORES> __device__ __forceinline__ void issue_qk(int n, float (&scores)[SCORES]) const {
        const unsigned a = unsigned(k_major_descriptor(base + q.stage() * L::Q_TILE + index * 64 * LINE));
        const unsigned b = unsigned(k_major_descriptor(base + L::K_BEGIN + kv.stage(n) * L::K_TILE));
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < L::DIM / 16; ++d) {
            const int split = d / 4, within = d % 4 * 32;
            wgmma_k_major<T>(scores, k_major_descriptor_of(a + ((split * L::Q_SPLIT + within) >> 4)),
                             k_major_descriptor_of(b + ((split * L::SPLIT + within) >> 4)), d > 0);
        }
        wgmma_commit_group();
    }

    // Issue the MMAs of the weights with the first WIDTH values of tile n.
    template <int WIDTH> __device__ __forceinline__ void issue_pv(int n, const Fragments& weights) {
        const unsigned b = unsigned(mn_major_descriptor<L::SPLIT>(base + L::V_BEGIN + kv.stage(n) * L::V_TILE));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k)
            wgmma_mn_major<T>(sums, weights[k], k_major_descriptor_of(b + (k * 16 * LINE >> 4)), true);
        wgmma_commit_group();
    }

    // The functions with FROM and WIDTH process the scores of the keys FROM ... WIDTH - 1 of a tile.

    // Replace the scores of keys outside the windows by -inf.
    template <int WIDTH, int FROM = 0> __device__ __forceinline__ void mask(int key, float (&scores)[WIDTH / 2]) const {
        const int end = min(tile.keys, tile.high + first_token);
        if (key + WIDTH <= end && key >= tile.low + last_token) return;
        // A lane has WIDTH / 4 columns of a row: 2 of every 8. Bit 2 * n + j of a word stands for column 8 * n + j
        // after the lane's first one. ptxas moves the bits of a word to predicates, which takes fewer instructions than
        // comparisons.
        const auto before = [&](int end) {
            const unsigned columns = min(max(end - (key + lane % 4 * 2), 0), WIDTH);
            return unsigned((1ull << (columns / 8 * 2 + min(columns % 8, 2u))) - 1);
        };
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned visible = before(min(tile.keys, tile.high + token[i])) & ~before(tile.low + token[i]);
#pragma unroll
            for (int n = FROM / 8; n < WIDTH / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (!(visible & 1u << (2 * n + j))) scores[4 * n + 2 * i + j] = -CUDART_INF_F;
        }
    }

    // Return the number that is subtracted from the scores of row i (base 2). A row that sees no key so far has scores
    // of -inf, and any finite number gives weights of 0.
    __device__ __forceinline__ float offset(int i) const { return reference[i] == -CUDART_INF_F ? 0.f : reference[i]; }

    // Return the largest score (base 2) of this lane's columns of row i.
    template <int WIDTH, int FROM = 0>
    __device__ __forceinline__ float largest(int i, const float (&scores)[WIDTH / 2]) const {
        float most[2] = {scores[FROM / 2 + 2 * i], scores[FROM / 2 + 2 * i + 1]};
#pragma unroll
        for (int j = FROM / 8 + 1; j < WIDTH / 8; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], scores[4 * j + 2 * i + c]);
        return fmaxf(most[0], most[1]) * params.p.scale;
    }

    // Raise the reference of row i to its largest score, if that is more than MARGIN above it. `most`: the largest
    // score of this lane's columns. Return the factor that rescales earlier sums. The factor is exactly 1 if the
    // reference stays. A tile of keys that a row does not see therefore does not change the row's bits.
    __device__ __forceinline__ float raise(int i, float most) {
        const float highest = lanes_max<4>(most), before = reference[i];
        if (highest - before > MARGIN) reference[i] = highest;
        return reference[i] == before ? 1.f : fast_exp2(before - reference[i]);
    }

    // Compute the weights of a tile. `weights` may be `scores`. Return the sums of this lane's weights by row.
    template <int WIDTH, int FROM = 0>
    __device__ __forceinline__ float2 weigh(const float (&scores)[WIDTH / 2], float (&weights)[WIDTH / 2]) const {
        float parts[2][2] = {};
        const float scale = params.p.scale, offsets[2] = {offset(0), offset(1)};
#pragma unroll
        for (int c = FROM / 2; c < WIDTH / 2; ++c) {
            weights[c] = fast_exp2(fmaf(scores[c], scale, -offsets[c / 2 % 2]));
            parts[c / 2 % 2][c % 2] += weights[c];
        }
        return {parts[0][0] + parts[0][1], parts[1][0] + parts[1][1]};
    }

    // Pack weights as fragments of P.
    template <int WIDTH>
    __device__ __forceinline__ void pack_weights(const float (&weights)[WIDTH / 2], Fragments& to) const {
#pragma unroll
        for (int c = 0; c < WIDTH / 4; ++c) to[c / 4][c % 4] = pack<T>(weights[2 * c], weights[2 * c + 1]);
    }

    // Apply the softcap and the windows to the scores of tile n.
    template <int WIDTH, int FROM = 0>
    __device__ __forceinline__ void restrict(int n, float (&scores)[WIDTH / 2]) const {
        if (params.p.cap != 0.f)
#pragma unroll
            for (int i = FROM / 2; i < WIDTH / 2; ++i) scores[i] = capped(params.p, scores[i]);
        mask<WIDTH, FROM>((tile.begin / L::KEYS + n) * L::KEYS, scores);
    }

    __device__ __forceinline__ void rescale(const float (&factors)[2]) {
#pragma unroll
        for (int j = 0; j < L::DIM_V / 2; ++j) sums[j] *= factors[j / 2 % 2];
    }

    // Clear the values outside the rows first ... end - 1 of tile n, because they may be NaN: the producer did not
    // load them, or they follow the sequence.
    template <int WIDTH> __device__ __forceinline__ void clear_values(int n, int first, int end) const {
        if (first == 0 && end >= WIDTH) return;
        const unsigned values = base + L::V_BEGIN + kv.stage(n) * L::V_TILE;
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
        float scores[WIDTH / 2];
        wait_k_full(0);
        issue_qk(0, scores);
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release_k(0);
        if (tiles == 1) release_q();
        if (WIDTH > NARROW && tile.begin % L::KEYS >= NARROW) { // the queries see only the last NARROW keys
#pragma unroll
            for (int c = 0; c < NARROW / 2; ++c) scores[c] = 0.f;
            weigh_first<WIDTH, WIDTH - NARROW>(scores);
        } else {
            weigh_first<WIDTH, 0>(scores);
        }
        pack_weights<WIDTH>(scores, weights);
    }

    // Replace the scores of the first tile by its weights.
    template <int WIDTH, int FROM> __device__ __forceinline__ void weigh_first(float (&scores)[WIDTH / 2]) {
        restrict<WIDTH, FROM>(0, scores);
#pragma unroll
        for (int i = 0; i < 2; ++i) raise(i, largest<WIDTH, FROM>(i, scores));
        const float2 sum = weigh<WIDTH, FROM>(scores, scores);
        total[0] = sum.x, total[1] = sum.y;
    }

    // Issue the MMAs S of tile n, which has WIDTH keys, and P V of tile n - 1, and wait for S.
    template <int WIDTH>
    __device__ __forceinline__ void multiply(int n, int tiles, float (&scores)[WIDTH / 2], const Fragments& of_before) {
        const bool is_last = n + 1 == tiles;
        wait_k_full(n);
        take_turn(n == 1);
        issue_qk(n, scores);
        wait_v_full(n - 1);
        if (n == 1) clear_values<L::KEYS>(0, first_row, L::KEYS);
        issue_pv<L::KEYS>(n - 1, of_before);
        pass_turn(is_last);
        wgmma_wait_group<1>();
        wgmma_fence_operand(scores);
        release_k(n);
        if (is_last) release_q();
    }

    // Wait for P V of tile n - 1.
    __device__ __forceinline__ void wait_pv(int n) {
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        release_v(n - 1);
    }

    // The mainloop body for any tile n. The registers of its scores hold its weights until P V of tile n - 1 is
    // complete.
    template <int WIDTH> __device__ __forceinline__ void add(int n, int tiles) {
        float scores[WIDTH / 2], factors[2];
        multiply<WIDTH>(n, tiles, scores, weights);
        restrict<WIDTH>(n, scores);
#pragma unroll
        for (int i = 0; i < 2; ++i) factors[i] = raise(i, largest<WIDTH>(i, scores));
        const float2 sum = weigh<WIDTH>(scores, scores);
        total[0] = fmaf(total[0], factors[0], sum.x), total[1] = fmaf(total[1], factors[1], sum.y);
        compute_before_wait(sum);
        wait_pv(n);
        if (__any_sync(FULL_WARP, factors[0] != 1.f || factors[1] != 1.f)) rescale(factors);
        pack_weights<WIDTH>(scores, weights);
    }

    // The mainloop body for a plain tile n: there is no softcap, and all rows of the warpgroup see all its keys. The
    // exponentials take the references of earlier tiles, and do not wait for the largest scores. If a row exceeds its
    // reference by more than MARGIN, which is rare, the warp computes them again.
    __device__ __forceinline__ void add_plain(int n, int tiles, const Fragments& of_before, Fragments& to) {
        float scores[L::KEYS / 2], factors[2] = {1.f, 1.f};
        multiply<L::KEYS>(n, tiles, scores, of_before);
        float made[L::KEYS / 2];
        float2 sum = weigh<L::KEYS>(scores, made);
        pack_weights<L::KEYS>(made, to);
        const float most[2] = {largest<L::KEYS>(0, scores), largest<L::KEYS>(1, scores)};
        const bool is_raised =
            __any_sync(FULL_WARP, most[0] - reference[0] > MARGIN || most[1] - reference[1] > MARGIN);
        if (is_raised) {
#pragma unroll
            for (int i = 0; i < 2; ++i) factors[i] = raise(i, most[i]);
            sum = weigh<L::KEYS>(scores, made);
            pack_weights<L::KEYS>(made, to);
        }
        compute_before_wait(sum);
        total[0] = fmaf(total[0], factors[0], sum.x), total[1] = fmaf(total[1], factors[1], sum.y);
        wait_pv(n);
        if (is_raised) rescale(factors);
    }

    // The epilogue of the mainloop: P V of the last tile.
    template <int WIDTH> __device__ __forceinline__ void end(int tiles) {
        const int last = tiles - 1, key = (tile.begin / L::KEYS + last) * L::KEYS;
        wait_v_full(last);
        clear_values<WIDTH>(last, last == 0 ? first_row : 0, tile.keys - key);
        issue_pv<WIDTH>(last, weights);
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        release_v(last);
    }

    __device__ __forceinline__ void attend(int tiles) {
        mbarrier_wait(shared_address(&shared.q_full[q.stage()]), q.parity());
        const bool is_narrow = NARROW < L::KEYS && (tile.end - 1) % L::KEYS < NARROW; // the last tile
        if (is_narrow && tiles == 1) {
            begin<NARROW>(tiles);
            end<NARROW>(tiles);
            return;
        }
        begin<L::KEYS>(tiles);
        // All rows of the warpgroup see all keys of the tiles plain_begin ... plain_end - 1.
        const int first = tile.begin / L::KEYS * L::KEYS, before = index * params.warpgroup_tokens;
        const int plain_begin =
            (max(tile.low + before + params.warpgroup_tokens - 1 - first, 0) + L::KEYS - 1) / L::KEYS;
        const int plain_end = params.p.cap != 0.f ? 0 : (min(tile.keys, tile.high + before) - first) / L::KEYS;
#pragma unroll 1
        for (int n = 1; n < tiles - is_narrow;) {
            if (L::PAIRS && n >= plain_begin && n + 1 < plain_end) {
                Fragments others;
                add_plain(n, tiles, weights, others);
                add_plain(n + 1, tiles, others, weights);
                n += 2;
            } else {
                add<L::KEYS>(n++, tiles);
            }
        }
        if (is_narrow) {
            add<NARROW>(tiles - 1, tiles);
            end<NARROW>(tiles);
        } else {
            end<L::KEYS>(tiles);
        }
    }

    // Without queries: wait for all stages of the tile, and release them.
    __device__ __forceinline__ void skip(int tiles) {
        mbarrier_wait(shared_address(&shared.q_full[q.stage()]), q.parity());
        release_q();
        for (int n = 0; n < tiles; ++n) {
            wait_k_full(n);
            release_k(n);
            wait_v_full(n);
            release_v(n);
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
            const Normal normal(reference[i], lanes_sum<4>(total[i]), p.sinks, sink[i]);
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
            // The shuffles tell the compiler that the loops below are the same in all lanes.
            active = __shfl_sync(FULL_WARP, (tile.tokens + params.warpgroup_tokens - 1) / params.warpgroup_tokens, 0);
            active = min(active, L::WARPGROUPS);
            const int tiles = __shfl_sync(FULL_WARP, (tile.end + L::KEYS - 1) / L::KEYS - tile.begin / L::KEYS, 0);
            first_row = params.template first_row<L::KEYS>(tile);
            if (index < active) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    reference[i] = -CUDART_INF_F, total[i] = 0.f;
                    sink[i] = params.p.sinks ? sink_of(params.p, tile.first_head + head[i]) : 0.f;
                }
#pragma unroll
                for (int j = 0; j < L::DIM_V / 2; ++j) sums[j] = 0.f;
                if (tiles > 0) attend(tiles);
                store(shared.invalid[slot]);
            } else if (tiles > 0) {
                skip(tiles);
            }
            kv.count += tiles;
            release(shared.tile_empty[slot]);
        }
    }
};

template <typename, int DIM, int DIM_V, int WARPGROUPS, int KEYS, int Q_STAGES, int STAGES>
constexpr Launch attention_wgmma_launch() {
    using L = Layout<DIM, DIM_V, WARPGROUPS, KEYS, Q_STAGES, STAGES>;
    return {(WARPGROUPS + 1) * WARPGROUP, 1024 + L::BARRIERS + int(sizeof(Shared<L>))};
}

template <typename T, int DIM, int DIM_V, int WARPGROUPS, int KEYS, int Q_STAGES, int STAGES>
__global__ void __launch_bounds__(((WARPGROUPS + 1) * WARPGROUP), 1)
    attention_wgmma(const __grid_constant__ MappedParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using L = Layout<DIM, DIM_V, WARPGROUPS, KEYS, Q_STAGES, STAGES>;
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
        const int role = warp - 4 * WARPGROUPS;
        Producer<L>{params, shared, base, role % 2 == 1, role / 2}.run();
    } else {
        setmaxnreg_inc<COMPUTING>();
        Consumer<T, L>{params, shared, base, warp / 4, warp % 4, int(threadIdx.x % 32)}.run();
    }
#endif
}
