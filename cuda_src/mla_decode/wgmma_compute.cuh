// Compute the MMAs and the softmax in the consumer warpgroups of attend_wgmma and attend_two_loaders. attend_wgmma.cu
// describes the schedule.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"
#include "mla_decode/wgmma_shared.cuh"

// A consumer. It computes columns SIDE * 256 ... SIDE * 256 + 255 of the output, and the probabilities P of the tiles
// in buffer SIDE.
//
// ROTARY_BARRIER is the index of the rotary part's `full` barrier; it is nonzero only in attend_two_loaders. There the
// MMA with 256 columns of values is split into two, because ptxas accepts N = 256 only if a thread has at least 158
// registers at kernel entry. With two producer warpgroups a thread has 128.
template <typename T, bool FP8, bool GATHER, int SIDE, int KEY_TILES, int ROTARY_BARRIER = 0> struct Consumer {
    // If TMA loads the keys (`!FP8 && !GATHER`), each tile has a `full` barrier, and the consumers clear the values
    // after the last token. Otherwise each half of a buffer has a `full` barrier, and the producer writes zeros after
    // the last token.
    static constexpr bool BY_TILE = !FP8 && !GATHER;
    // Gathering takes longer than the MMAs. Therefore a consumer computes P V of the other consumer's tile first. This
    // frees half of the other buffer even if the consumer's own keys have not arrived.
    static constexpr bool VALUES_FIRST = ROTARY_BARRIER && !FP8;
    // Converted tiles arrive early, so each consumer waits for P of the other. Therefore a consumer publishes P before
    // it waits for its MMAs of P V. The consumers also execute the proxy fence, because in a producer it would wait for
    // the producer's loads.
    static constexpr bool CONVERTED = ROTARY_BARRIER && FP8;
    const Params& p;
    WgmmaShared& shared;
    const unsigned queries;
    const int warp, lane;
    float output[128], sum[2], row_max[2];

    __device__ __forceinline__ int row(int i) const { return warp * 16 + lane / 4 + 8 * i; }

    __device__ __forceinline__ void begin_split() {
#pragma unroll
        for (int j = 0; j < 128; ++j) output[j] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] = 0.f, row_max[i] = -CUDART_INF_F;
    }

    __device__ __forceinline__ void rescale(const float (&new_max)[2]) {
        if (!__any_sync(FULL_WARP, new_max[0] != row_max[0] || new_max[1] != row_max[1])) return;
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = new_max[i] == row_max[i] ? 1.f : fast_exp2(row_max[i] - new_max[i]);
            sum[i] *= factor[i], row_max[i] = new_max[i];
        }
#pragma unroll
        for (int j = 0; j < 128; ++j) output[j] *= factor[j / 2 % 2];
    }

    // Return the descriptor of a tile that is `offset` bytes after the queries. Descriptors differ only in their lower
    // 32 bits, so each takes a single addition of a constant.
    __device__ __forceinline__ unsigned long long k_major(int offset) const {
        return k_major_descriptor_of((queries >> 4) + ((offset >> 4) + (1 << 16)));
    }
    __device__ __forceinline__ unsigned long long mn_major(int offset) const {
        return k_major_descriptor_of((queries >> 4) + ((offset >> 4) + (TILE_BYTES >> 4 << 16)));
    }
    static constexpr int key_offset(int buffer, int tile) { return ((buffer + 1) * TILES + tile) * TILE_BYTES; }

    __device__ __forceinline__ void wait_for_keys(int barrier_index, int phase) {
        mbarrier_wait(shared_address(&shared.full[SIDE][barrier_index]), phase);
        if constexpr (CONVERTED) fence_proxy_async();
    }

    // Issue S = Q K' for the keys in this consumer's buffer, as they arrive.
    __device__ __forceinline__ void issue_qk(float (&scores)[32], int phase) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_TILES; ++i) {
            const int tile = i == ROTARY_TILE ? ROTARY_TILE : (i + SIDE * 4) % VALUE_TILES; // in the order of loading
            if constexpr (BY_TILE)
                wait_for_keys(tile, phase);
            else if (i == 0 || i == 4)
                wait_for_keys(i == 0 ? SIDE : 1 - SIDE, phase);
            else if (ROTARY_BARRIER && i == ROTARY_TILE)
                wait_for_keys(ROTARY_BARRIER, phase);
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; ++k)
                wgmma_k_major<T>(scores, k_major(tile * TILE_BYTES + k * 32), k_major(key_offset(SIDE, tile) + k * 32),
                                 i + k > 0);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void mask_missing_tokens(float (&scores)[32]) {
        const unsigned long long valid = shared.valid[SIDE];
        if (valid == ~0ull) return;
        const unsigned low = unsigned(valid) >> lane % 4 * 2, high = unsigned(valid >> 32) >> lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            if (!((j < 16 ? low : high) >> (j / 4 % 4 * 8 + j % 2) & 1)) scores[j] = -CUDART_INF_F;
    }

    // Compute P as A fragments, and in float32 in `scores`. Row i attends to the first limits[i] tokens of the tile, or
    // to all tokens if `all`. Raise new_max if the tile's maximum exceeds it by more than RESCALE_THRESHOLD.
    __device__ __forceinline__ void exponentiate(unsigned (&probabilities)[4][4], float (&scores)[32],
                                                 const int (&limits)[2], bool all, float (&new_max)[2]) {
        if (!all) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= limits[j / 2 % 2]) scores[j] = -CUDART_INF_F;
        }
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float tile_max = -CUDART_INF_F;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                tile_max = fmaxf(tile_max, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            tile_max = lanes_max<4>(tile_max) * p.scale_log2;
            if (tile_max > new_max[i] + RESCALE_THRESHOLD) new_max[i] = tile_max;
            offset[i] = new_max[i] == -CUDART_INF_F ? 0.f : new_max[i];
            if (lane % 4 == 0) shared.row_max[SIDE][row(i)] = new_max[i];
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) scores[j] = fast_exp2(fmaf(scores[j], p.scale_log2, -offset[j / 2 % 2]));
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) probabilities[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }

    // Clear the values from row `token` on: unfilled slots may hold NaN, and 0 * NaN is NaN.
    __device__ __forceinline__ void zero_values_from(int token) {
        for (int i = token * 8 + threadIdx.x % WARPGROUP; i < BLOCK_TOKENS * 8; i += WARPGROUP)
#pragma unroll
            for (int tile = 0; tile < VALUE_TILES; ++tile)
                store_shared(key_tile(queries, SIDE, tile) + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }

    // Store P for the other consumer. P overwrites the rotary part of the keys.
    __device__ __forceinline__ void store_probabilities(const unsigned (&probabilities)[4][4]) {
        const unsigned to = key_tile(queries, SIDE, ROTARY_TILE) + (warp * 16 + lane % 16) * COLUMNS * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) stmatrix(to + ((2 * k + lane / 16) ^ lane % 8) * 16, probabilities[k]);
        fence_proxy_async();
    }

    __device__ __forceinline__ void add_sums(const float (&scores)[32]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float partial_sum[2] = {};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                partial_sum[0] += scores[4 * j + 2 * i], partial_sum[1] += scores[4 * j + 2 * i + 1];
            sum[i] += partial_sum[0] + partial_sum[1];
        }
    }

    // Issue the MMA of 16 columns of P (fragments or a descriptor) with 16 rows of V. These rows are `offset` bytes
    // after the queries.
    template <typename P> __device__ __forceinline__ void add_values(const P& probabilities, int offset) {
        if constexpr (ROTARY_BARRIER == 0) {
            wgmma_mn_major<T>(output, probabilities, mn_major(offset), true);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                wgmma_mn_major<T>(reinterpret_cast<float (*)[64]>(output)[i], probabilities,
                                  mn_major(offset + i * 2 * TILE_BYTES), true);
        }
    }

    __device__ __forceinline__ void issue_pv_own(const unsigned (&probabilities)[4][4]) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) add_values(probabilities[k], key_offset(SIDE, SIDE * 4) + k * 16 * COLUMNS * 2);
        wgmma_commit_group();
    }

    // Wait for P of the other consumer's tile, rescale to its row_max, and issue P V.
    __device__ __forceinline__ void issue_pv_other() {
        named_barrier_sync<SIDE == 0 ? PROBABILITIES_1 : PROBABILITIES_0, 2 * WARPGROUP>();
        const float new_max[2] = {shared.row_max[1 - SIDE][row(0)], shared.row_max[1 - SIDE][row(1)]};
        rescale(new_max);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            add_values(k_major(key_offset(1 - SIDE, ROTARY_TILE) + k * 32),
                       key_offset(1 - SIDE, SIDE * 4) + k * 16 * COLUMNS * 2);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void wait_pv() {
        wgmma_wait_group<0>();
        wgmma_fence_operand(output);
    }

    __device__ __forceinline__ void release(int buffer) {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[buffer][SIDE]));
    }

    __device__ __forceinline__ void release_queries() {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.queries_empty));
    }

    // Publish the row sums, and wait for the other consumer's sums. `sequence_index`: index of the sequence in the SM
    // part (the block's range of the work).
    __device__ __forceinline__ void exchange_sums(int sequence_index) {
        float (&sums)[WGMMA_ROWS] = shared.sums[sequence_index & 1][SIDE];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = lanes_sum<4>(sum[i]);
            if (lane % 4 == 0) sums[row(i)] = sum[i];
        }
        mbarrier_arrive(shared_address(&shared.summed));
        mbarrier_wait(shared_address(&shared.summed), sequence_index);
    }

    __device__ __forceinline__ float total(int sequence_index, int i) const {
        return sum[i] + shared.sums[sequence_index & 1][1 - SIDE][row(i)];
    }

    // Process a tile. With causal masking, row i attends to the tokens before `split.length + ends[i]`, and the thread
    // block's first row attends to the tokens before `split.length + first_end`.
    __device__ __forceinline__ void process_tile(const Split& split, int tile, int tiles, int phase, int first_end,
                                                 const int (&ends)[2]) {
        float scores[32];
        if (VALUES_FIRST && tile > 0) {
            issue_pv_other();
            wait_pv();
            release(1 - SIDE);
        }
        issue_qk(scores, phase);
        if (!VALUES_FIRST && tile > 0) {
            issue_pv_other();
            wgmma_wait_group<1>();
        } else {
            wgmma_wait_group<0>();
        }
        wgmma_fence_operand(scores);
        if (tile + 2 >= tiles) release_queries();

        const int start = split.begin + tile * BLOCK_TOKENS, present = split.end - start;
        int limits[2] = {present, present};
        bool all = GATHER || present >= BLOCK_TOKENS;
        if constexpr (GATHER) mask_missing_tokens(scores);
        if (!GATHER && p.causal) {
            all = all && split.length + first_end >= start + BLOCK_TOKENS;
#pragma unroll
            for (int i = 0; i < 2; ++i) limits[i] = min(present, split.length + ends[i] - start);
        }
        float new_max[2] = {row_max[0], row_max[1]};
        unsigned probabilities[4][4];
        exponentiate(probabilities, scores, limits, all, new_max);
        if constexpr (!VALUES_FIRST && !CONVERTED) {
            wait_pv();
            if (tile > 0) release(1 - SIDE);
        }
        if (BY_TILE && present < BLOCK_TOKENS) zero_values_from(present);
        // After this barrier the rotary part of the keys has been read, and the cleared values are visible.
        named_barrier_sync<SIDE == 0 ? WARPGROUP_0 : WARPGROUP_1, WARPGROUP>();
        store_probabilities(probabilities);
        named_barrier_arrive<SIDE == 0 ? PROBABILITIES_0 : PROBABILITIES_1, 2 * WARPGROUP>();
        if constexpr (CONVERTED) {
            wait_pv();
            if (tile > 0) release(1 - SIDE);
        }
        rescale(new_max);
        add_sums(scores);
        issue_pv_own(probabilities);
        wait_pv();
        release(SIDE);
    }
};

template <typename T, bool FP8, bool GATHER, int SIDE, bool EXTRA, int KEY_TILES, int ROTARY_BARRIER = 0>
__device__ __forceinline__ void compute(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int lane = threadIdx.x % 32, first_row = blockIdx.x * WGMMA_ROWS;
    Consumer<T, FP8, GATHER, SIDE, KEY_TILES, ROTARY_BARRIER> w{p, shared, queries, int(threadIdx.x / 32 % 4), lane};
    const SmPart sm_part(p, blockIdx.z);
    // The causal limits need divisions, so they are computed once for all splits.
    const int first_end = causal_end(p, 0, first_row);
    const int ends[2] = {causal_end(p, 0, first_row + w.row(0)), causal_end(p, 0, first_row + w.row(1))};
    int tile_count = 0, split_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const SplitOf<EXTRA> split(p, sm_part, sequence);
        const int tiles = ceil_div(max(split.end - split.begin, 0), BLOCK_TOKENS);
        w.begin_split();
        if (tiles) mbarrier_wait(shared_address(&shared.queries_full), split_count++);
        for (int tile = (tile_count ^ SIDE) & 1; tile < tiles; tile += 2)
            w.process_tile(split, tile, tiles, (tile_count + tile) / 2, first_end, ends);
        if (tiles && ((tile_count + tiles - 1) & 1) != SIDE) { // the last tile belongs to the other consumer
            if (tiles == 1) w.release_queries();
            w.issue_pv_other();
            w.wait_pv();
            w.release(1 - SIDE);
        }
        tile_count += tiles;

        w.exchange_sums(sequence - sm_part.first_sequence);
        const bool bad = !split.covered || (tiles && shared.bad[split_count % BAD_FLAGS] == split_count);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Destination<T> to(p, sm_part, split, blockIdx.y, first_row + w.row(i), w.row_max[i],
                                    w.total(sequence - sm_part.first_sequence, i), bad, SIDE == 0 && lane % 4 == 0);
            to.template store<32, 512>(p, reinterpret_cast<const float (*)[4]>(w.output), i, SIDE * 256);
        }
    }
}
