// Epilogue of gemm_wgmma, gemm_fp4_wgmma and gemm_folded_wgmma.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_layout.cuh"

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    if (warpgroup < 1) return named_barrier_sync<1, WARPGROUP>();
    named_barrier_sync<2, WARPGROUP>();
}

// Write a warpgroup's results of a tile: the activation of `sum * factor + bias`.
//
// Neighbours in a thread's registers are neighbouring tokens, but neighbours in memory are neighbouring rows of
// weights. So stmatrix transposes the results through shared memory, in rounds of ROUND tokens. Then 8 threads (gated:
// 4) write contiguous bytes of one token.
//
// Round i uses buffer `i % 2` of `staging`. Two buffers suffice, because every thread has read round i - 2 before it
// arrives at the barrier of round i - 1. `round`: number of earlier rounds. OVERLAPPED: a round is written to shared
// memory before the previous round is stored to global memory, and gated rounds have twice as many tokens.
template <typename T, int ACTIVATION, int TOKENS, bool OVERLAPPED = false>
__device__ __forceinline__ void store_tile(const GemmParams& p, const float (&c)[TOKENS / 2], const WgmmaTile& tile,
                                           int warpgroup, unsigned staging, int& round, float factor = 1.f) {
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int ROUND = round_of(TOKENS) * (OVERLAPPED && GATED ? 2 : 1);
    constexpr int CHUNKS = GATED ? 4 : 8; // 16-byte chunks of a token
    constexpr int BUFFER_BYTES = round_of(TOKENS) * ROW_BYTES;
    constexpr int WARP_CHUNKS = CHUNKS / 4;
    constexpr int MATRICES = ROUND / 8 * WARP_CHUNKS < 4 ? ROUND / 8 * WARP_CHUNKS : 4;
    constexpr int GROUPS = MATRICES / WARP_CHUNKS; // groups of 8 tokens per stmatrix
    // After the swizzle, 8 neighbouring tokens have chunk i in different banks.
    auto swizzle = [](int token) { return GATED ? token / 2 % 4 : token % 8; };
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    const int columns = GATED ? p.n / 2 : p.n;
    const unsigned lane_to = (lane / 8 / WARP_CHUNKS * 8 + lane % 8) * CHUNKS * 16 +
                             ((warp * WARP_CHUNKS + lane / 8 % WARP_CHUNKS) ^ swizzle(lane % 8)) * 16;
    const int chunk = thread % CHUNKS, column = tile.column + warpgroup * CHUNKS * 8 + chunk * 8;
    T* const out = static_cast<T*>(p.out) + (long long)tile.row * columns + column;
    float biases[2]; // of the lane's two rows of weights
    if constexpr (ACTIVATION & BIASED) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first =
                tile.column + warpgroup * CHUNKS * 8 + warp * WARP_CHUNKS * 8 + lane / 4 + (GATED ? 0 : i * 8);
            biases[i] = bias_of<T>(p, tile.expert, weight_row<ACTIVATION>(p, min(first, columns - 1), i));
        }
    }
    auto biased = [&](float sum, int i) {
        if constexpr (ACTIVATION & BIASED) return sum * factor + biases[i];
        return sum * factor;
    };
    auto stage = [&](int first, unsigned buffer) {
#pragma unroll
        for (int group = 0; group < ROUND / 8 && first / 8 + group < TOKENS / 8; group += GROUPS) {
            unsigned packed[MATRICES];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) {
                const float* const sums = c + (first / 8 + group + i / WARP_CHUNKS) * 4;
                if constexpr (GATED)
                    packed[i] = pack<T>(finish<ACTIVATION>(p, biased(sums[0], 0), biased(sums[2], 1)),
                                        finish<ACTIVATION>(p, biased(sums[1], 0), biased(sums[3], 1)));
                else
                    packed[i] = pack<T>(finish<ACTIVATION>(p, biased(sums[i % 2 * 2], i % 2)),
                                        finish<ACTIVATION>(p, biased(sums[i % 2 * 2 + 1], i % 2)));
            }
            store_transposed(buffer + lane_to + group * 8 * CHUNKS * 16, packed);
        }
    };
    constexpr int VECTORS = (ROUND * CHUNKS + WARPGROUP - 1) / WARPGROUP; // of a round per thread
    auto is_there = [&](int first, int token) {
        return token < ROUND && first + token < tile.tokens && column < columns;
    };
    auto token_of = [&](int vector) { return vector * (WARPGROUP / CHUNKS) + thread / CHUNKS; };
    auto from = [&](int token, unsigned buffer) {
        return buffer + token * CHUNKS * 16 + (chunk ^ swizzle(token)) * 16;
    };
    auto to = [&](int token) { return reinterpret_cast<uint4*>(out + (long long)token * columns); };
    if constexpr (!OVERLAPPED) {
#pragma unroll
        for (int first = 0; first < TOKENS; first += ROUND) {
            if (first >= tile.tokens) break;
            const unsigned buffer = staging + (round++ & 1) * BUFFER_BYTES;
            stage(first, buffer);
            warpgroup_sync(warpgroup);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (is_there(first, token_of(i))) *to(first + token_of(i)) = load_shared(from(token_of(i), buffer));
        }
    } else {
        stage(0, staging + (round & 1) * BUFFER_BYTES);
#pragma unroll
        for (int first = 0; first < TOKENS; first += ROUND) {
            if (first >= tile.tokens) break;
            const unsigned buffer = staging + (round++ & 1) * BUFFER_BYTES;
            warpgroup_sync(warpgroup);
            // All loads come first, so that they overlap each other and the writes of the next round.
            uint4 vectors[VECTORS];
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) vectors[i] = load_shared(from(token_of(i) % ROUND, buffer));
            if (first + ROUND < TOKENS && first + ROUND < tile.tokens)
                stage(first + ROUND, staging + (round & 1) * BUFFER_BYTES);
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                if (is_there(first, token_of(i))) *to(first + token_of(i)) = vectors[i];
        }
    }
}
