// The consumer warpgroups of attend_wgmma and attend_two_loaders. attend_wgmma.cu describes their schedule.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"
#include "mla_decode/wgmma_shared.cuh"

// A consumer warpgroup. It computes columns SIDE * 256 ... SIDE * 256 + 255 of the output, and the probabilities of the
// tiles in buffer SIDE.
//
// ROTARY_APART is nonzero if there are two producer warpgroups (attend_two_loaders). The rotary part then has its own
// full barrier, full[SIDE][ROTARY_APART]. The MMA with 256 columns of values is split into two MMAs with 128 columns:
// ptxas accepts N = 256 only if the thread has at least 158 registers at kernel entry, and with two producers it has
// 128.
template <typename T, bool FP8, bool GATHER, int SIDE, int KEY_TILES, int ROTARY_APART = 0> struct Seesaw {
    // With TMA each tile of 64 columns has a full barrier, and the values after the last token must be cleared. Without
    // TMA each half of a buffer has a full barrier, and the producer writes zeros after the last token.
    static constexpr bool BY_TILE = !FP8 && !GATHER;
    // VALUES_FIRST: the producers gather tokens, and their copies take longer than the MMAs. A consumer therefore
    // completes P V of the other consumer's tile before it computes the scores of its own tile. This frees half of the
    // other buffer even if the keys of its own tile have not arrived yet.
    static constexpr bool VALUES_FIRST = ROTARY_APART && !FP8;
    // CONVERTED: the producers convert tokens, and their tiles arrive early enough, so the consumers wait for each
    // other's probabilities. A consumer therefore publishes its probabilities before it waits for P V of the other
    // consumer's tile. The consumer also executes the proxy fence between the producers' stores and its wgmma reads,
    // because in a producer the fence would wait for the producer's loads.
    static constexpr bool CONVERTED = ROTARY_APART && FP8;
    const Params& p;
    WgmmaShared& shared;
    const unsigned queries;
    const int warp, lane;
    float output[128], sum[2], base[2];

    __device__ __forceinline__ int row(int i) const { return warp * 16 + lane / 4 + 8 * i; }

    __device__ __forceinline__ void begin_visit() {
#pragma unroll
        for (int j = 0; j < 128; ++j) output[j] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = 0.f, base[i] = -CUDART_INF_F;
    }

    // Rescale the output and the sums of the thread's two rows from their bases `base` to the new bases `higher`, which
    // are equal or larger. The exponentials of a row are 2^(score - base).
    __device__ __forceinline__ void rescale(const float (&higher)[2]) {
        if (!__any_sync(FULL_WARP, higher[0] != base[0] || higher[1] != base[1])) return;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = higher[i] == base[i] ? 1.f : fast_exp2(base[i] - higher[i]);
            sum[i] *= factor[i], base[i] = higher[i];
        }
#pragma unroll
        for (int j = 0; j < 128; ++j) output[j] *= factor[j / 2 % 2];
    }

    // Return the descriptor of the wgmma operand `offset` bytes after the queries. Descriptors differ only in their
    // lower half, by a constant, so each one takes a single addition.
    __device__ __forceinline__ unsigned long long k_major(int offset) const {
        return k_major_descriptor_of((queries >> 4) + ((offset >> 4) + (1 << 16)));
    }
    __device__ __forceinline__ unsigned long long mn_major(int offset) const {
        return k_major_descriptor_of((queries >> 4) + ((offset >> 4) + (TILE_BYTES >> 4 << 16)));
    }
    static constexpr int key_offset(int buffer, int tile) { return ((buffer + 1) * TILES + tile) * TILE_BYTES; }

    // Wait at full barrier `part` of this consumer's key buffer. The barrier covers a tile, a half or the rotary part.
    __device__ __forceinline__ void wait_for_keys(int part, int phase) {
        mbarrier_wait(shared_address(&shared.full[SIDE][part]), phase);
        if constexpr (CONVERTED) fence_proxy_async();
    }

    // Issue the MMAs of S = Q K' for the keys in this consumer's buffer, tile by tile as the keys arrive.
    __device__ __forceinline__ void start_scores(float (&scores)[32], int phase) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) {
            const int tile = i == ROTARY_TILE ? ROTARY_TILE : (i + SIDE * 4) % VALUE_TILES; // in the order of loading
            if constexpr (BY_TILE)
                wait_for_keys(tile, phase);
            else if (i == 0 || i == 4)
                wait_for_keys(i == 0 ? SIDE : 1 - SIDE, phase);
            else if (ROTARY_APART && i == ROTARY_TILE)
                wait_for_keys(ROTARY_APART, phase);
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; ++k)
                wgmma_k_major<T>(scores, k_major(tile * TILE_BYTES + k * 32), k_major(key_offset(SIDE, tile) + k * 32),
                                 i + k > 0);
        }
        wgmma_commit_group();
    }

    // Set the scores of the tokens whose `valid` bit is 0 to -inf.
    __device__ __forceinline__ void skip(float (&scores)[32]) {
        const unsigned long long valid = shared.valid[SIDE];
        if (valid == ~0ull) return;
        const unsigned low = unsigned(valid) >> lane % 4 * 2, high = unsigned(valid >> 32) >> lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            if (!((j < 16 ? low : high) >> (j / 4 % 4 * 8 + j % 2) & 1)) scores[j] = -CUDART_INF_F;
    }

    // Compute P as A fragments, and store it in float32 in `scores`. Row i attends to the first limits[i] tokens of the
    // tile, or to all tokens if `all` is true. `higher` holds the bases of the two rows; a base is raised to the row's
    // maximum if the maximum exceeds it by more than BASE_LAG.
    __device__ __forceinline__ void exponentiate(unsigned (&probabilities)[4][4], float (&scores)[32],
                                                 const int (&limits)[2], bool all, float (&higher)[2]) {
        if (!all) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= limits[j / 2 % 2]) scores[j] = -CUDART_INF_F;
        }
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = -CUDART_INF_F;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                highest = fmaxf(highest, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            highest = lanes_max<4>(highest) * p.scale_log2;
            if (highest > higher[i] + BASE_LAG) higher[i] = highest;
            offset[i] = higher[i] == -CUDART_INF_F ? 0.f : higher[i];
            if (lane % 4 == 0) shared.base[SIDE][row(i)] = higher[i];
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) scores[j] = fast_exp2(fmaf(scores[j], p.scale_log2, -offset[j / 2 % 2]));
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) probabilities[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }

    // Set the values of the tokens from `token` on to 0. Slots that a sequence has not filled may hold NaN, and 0 * NaN
    // is NaN.
    __device__ __forceinline__ void clear_from(int token) {
        for (int i = token * 8 + threadIdx.x % WARPGROUP; i < BLOCK_TOKENS * 8; i += WARPGROUP)
#pragma unroll
            for (int tile = 0; tile < VALUE_TILES; ++tile)
                store_shared(key_tile(queries, SIDE, tile) + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }

    // Store the probabilities for the other consumer. The probabilities overwrite the rotary part of the keys of the
    // same tile.
    __device__ __forceinline__ void store_probabilities(const unsigned (&probabilities)[4][4]) {
        const unsigned to = key_tile(queries, SIDE, ROTARY_TILE) + (warp * 16 + lane % 16) * COLUMNS * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) stmatrix(to + ((2 * k + lane / 16) ^ lane % 8) * 16, probabilities[k]);
        fence_proxy_async();
    }

    __device__ __forceinline__ void add_sums(const float (&scores)[32]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float part_sum[2] = {};
#pragma unroll
            for (int j = 0; j < 8; ++j) part_sum[0] += scores[4 * j + 2 * i], part_sum[1] += scores[4 * j + 2 * i + 1];
            sum[i] += part_sum[0] + part_sum[1];
        }
    }

    // Issue the MMA of 16 columns of P with 16 rows of V. `probabilities` contains the fragments or the descriptor of
    // P. The rows of V begin `offset` bytes after the queries in shared memory.
    template <typename P> __device__ __forceinline__ void add_values(const P& probabilities, int offset) {
        if constexpr (ROTARY_APART == 0) {
            wgmma_mn_major<T>(output, probabilities, mn_major(offset), true);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                wgmma_mn_major<T>(reinterpret_cast<float (*)[64]>(output)[i], probabilities,
                                  mn_major(offset + i * 2 * TILE_BYTES), true);
        }
    }

    __device__ __forceinline__ void start_own_values(const unsigned (&probabilities)[4][4]) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) add_values(probabilities[k], key_offset(SIDE, SIDE * 4) + k * 16 * COLUMNS * 2);
        wgmma_commit_group();
    }

    // Wait for the probabilities of the tile in the other buffer, rescale to the other consumer's base, and issue P V
    // of that tile.
    __device__ __forceinline__ void start_other_values() {
        named_barrier_sync<SIDE == 0 ? PROBABILITIES_1 : PROBABILITIES_0, 2 * WARPGROUP>();
        const float higher[2] = {shared.base[1 - SIDE][row(0)], shared.base[1 - SIDE][row(1)]};
        rescale(higher);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            add_values(k_major(key_offset(1 - SIDE, ROTARY_TILE) + k * 32),
                       key_offset(1 - SIDE, SIDE * 4) + k * 16 * COLUMNS * 2);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void finish_values() {
        wgmma_wait_group<0>();
        wgmma_fence_operand(output);
    }

    // Arrive at the empty barrier of this consumer's half of a buffer.
    __device__ __forceinline__ void release(int buffer) {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[buffer][SIDE]));
    }

    __device__ __forceinline__ void release_queries() {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.queries_empty));
    }

    // Publish the row sums, and wait for the sums of the other consumer. `visit` is the index of the sequence in the
    // part (the work of this block).
    __device__ __forceinline__ void exchange_sums(int visit) {
        float (&sums)[WGMMA_ROWS] = shared.sums[visit & 1][SIDE];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = lanes_sum<4>(sum[i]);
            if (lane % 4 == 0) sums[row(i)] = sum[i];
        }
        mbarrier_arrive(shared_address(&shared.summed));
        mbarrier_wait(shared_address(&shared.summed), visit);
    }

    // Return the sum of row i over the tiles of both consumers.
    __device__ __forceinline__ float total(int visit, int i) const {
        return sum[i] + shared.sums[visit & 1][1 - SIDE][row(i)];
    }

    // The mainloop body for one tile of this consumer: S, P V of the tile in the other buffer, P, and P V of this tile.
    // With causal masking, row i attends to the tokens before `visit.length + ends[i]`, and the block's first row to
    // the tokens before `visit.length + first_end`.
    __device__ __forceinline__ void own_tile(const Visit& visit, int tile, int tiles, int phase, int first_end,
                                             const int (&ends)[2]) {
        float scores[32];
        if (VALUES_FIRST && tile > 0) {
            start_other_values();
            finish_values();
            release(1 - SIDE);
        }
        start_scores(scores, phase);
        if (!VALUES_FIRST && tile > 0) {
            start_other_values();
            wgmma_wait_group<1>();
        } else {
            wgmma_wait_group<0>();
        }
        wgmma_fence_operand(scores);
        if (tile + 2 >= tiles) release_queries();

        const int start = visit.begin + tile * BLOCK_TOKENS, present = visit.end - start;
        int limits[2] = {present, present};
        bool all = GATHER || present >= BLOCK_TOKENS;
        if constexpr (GATHER) skip(scores);
        if (!GATHER && p.causal) {
            all = all && visit.length + first_end >= start + BLOCK_TOKENS;
#pragma unroll
            for (int i = 0; i < 2; ++i) limits[i] = min(present, visit.length + ends[i] - start);
        }
        float higher[2] = {base[0], base[1]};
        unsigned probabilities[4][4];
        exponentiate(probabilities, scores, limits, all, higher);
        if constexpr (!VALUES_FIRST && !CONVERTED) {
            finish_values();
            if (tile > 0) release(1 - SIDE);
        }
        if (BY_TILE && present < BLOCK_TOKENS) clear_from(present);
        // When this barrier completes, the rotary part of the keys has been read, and the cleared values are visible.
        named_barrier_sync<SIDE == 0 ? WARPGROUP_0 : WARPGROUP_1, WARPGROUP>();
        store_probabilities(probabilities);
        named_barrier_arrive<SIDE == 0 ? PROBABILITIES_0 : PROBABILITIES_1, 2 * WARPGROUP>();
        if constexpr (CONVERTED) {
            finish_values();
            if (tile > 0) release(1 - SIDE);
        }
        rescale(higher);
        add_sums(scores);
        start_own_values(probabilities);
        finish_values();
        release(SIDE);
    }
};

// The consumer loop over all sequences of the part (the work of one thread block).
template <typename T, bool FP8, bool GATHER, int SIDE, bool EXTRA, int KEY_TILES, int ROTARY_APART = 0>
__device__ __forceinline__ void compute(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int lane = threadIdx.x % 32, first_row = blockIdx.x * WGMMA_ROWS;
    Seesaw<T, FP8, GATHER, SIDE, KEY_TILES, ROTARY_APART> w{p, shared, queries, int(threadIdx.x / 32 % 4), lane};
    const Part part(p, blockIdx.z);
    // Causal limits for `own_tile`. They are the same for all visits and need divisions, so they are computed once.
    const int first_end = causal_end(p, 0, first_row);
    const int ends[2] = {causal_end(p, 0, first_row + w.row(0)), causal_end(p, 0, first_row + w.row(1))};
    int used = 0, visited = 0; // tiles so far; sequences with tiles so far
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const VisitOf<EXTRA> visit(p, part, sequence);
        const int tiles = ceil_div(max(visit.end - visit.begin, 0), BLOCK_TOKENS);
        w.begin_visit();
        if (tiles) mbarrier_wait(shared_address(&shared.queries_full), visited++);
        for (int tile = (used ^ SIDE) & 1; tile < tiles; tile += 2)
            w.own_tile(visit, tile, tiles, (used + tile) / 2, first_end, ends);
        if (tiles && ((used + tiles - 1) & 1) != SIDE) { // the last tile belongs to the other consumer
            if (tiles == 1) w.release_queries();
            w.start_other_values();
            w.finish_values();
            w.release(1 - SIDE);
        }
        used += tiles;

        w.exchange_sums(sequence - part.first);
        const bool bad = !visit.whole || (tiles && shared.bad[visited % VISITS] == visited);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Destination<T> to(p, part, visit, blockIdx.y, first_row + w.row(i), w.base[i],
                                    w.total(sequence - part.first, i), bad, SIDE == 0 && lane % 4 == 0);
            to.template store<32, 512>(p, reinterpret_cast<const float (*)[4]>(w.output), i, SIDE * 256);
        }
    }
}
