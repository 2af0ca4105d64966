// Epilogue of gemm_wgmma, gemm_fp4_wgmma and gemm_folded_wgmma: it adds biases, applies the activation and stores the
// results.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_layout.cuh"

// Synchronize the threads of a warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    if (warpgroup < 1) return named_barrier_sync<1, WARPGROUP>();
    named_barrier_sync<2, WARPGROUP>();
}

// Write a warpgroup's results of a tile. A result is the activation of `sum * factor + bias`.
//
// In memory, neighbouring results belong to neighbouring rows of weights; in a thread's registers they belong to
// neighbouring tokens. So stmatrix transposes the results through shared memory, in rounds of ROUND tokens. Then 8
// threads (gated: 4) write contiguous bytes of one token.
//
// Rounds alternate between two buffers in `staging`; `round` counts the rounds. A round overwrites the buffer of the
// round before the previous one. This is safe, because every thread has read that buffer before it arrives at the
// barrier of the previous round. OVERLAPPED: the next round is written to shared memory before the results of the
// current round are stored to global memory, and gated rounds have twice as many tokens.
template <typename T, int ACTIVATION, int TOKENS, bool OVERLAPPED = false>
__device__ __forceinline__ void store_tile(const GemmParams& p, const float (&c)[TOKENS / 2], const WgmmaTile& tile,
                                           int warpgroup, unsigned staging, int& round, float factor = 1.f) {
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int ROUND = round_of(TOKENS) * (OVERLAPPED && GATED ? 2 : 1);
    constexpr int CHUNKS = GATED ? 4 : 8; // 16-byte chunks of a token
    constexpr int PLACE = round_of(TOKENS) * ROW_BYTES;
    constexpr int EACH = CHUNKS / 4; // chunks per warp
    constexpr int MATRICES = ROUND / 8 * EACH < 4 ? ROUND / 8 * EACH : 4;
    constexpr int GROUPS = MATRICES / EACH; // groups of 8 tokens per stmatrix
    // Chunk i is stored at chunk i ^ swizzle(token), so the chunks i of 8 neighbouring tokens are in different banks.
    auto swizzle = [](int token) { return GATED ? token / 2 % 4 : token % 8; };
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    const int columns = GATED ? p.n / 2 : p.n;
    const unsigned lane_to =
        (lane / 8 / EACH * 8 + lane % 8) * CHUNKS * 16 + ((warp * EACH + lane / 8 % EACH) ^ swizzle(lane % 8)) * 16;
    const int chunk = thread % CHUNKS, column = tile.column + warpgroup * CHUNKS * 8 + chunk * 8;
    T* const out = static_cast<T*>(p.out) + (long long)tile.row * columns + column;
    float biases[2]; // for the lane's two rows of weights
    if constexpr (ACTIVATION & BIASED) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int first = tile.column + warpgroup * CHUNKS * 8 + warp * EACH * 8 + lane / 4 + (GATED ? 0 : i * 8);
            biases[i] = bias_of<T>(p, tile.expert, weight_row<ACTIVATION>(p, min(first, columns - 1), i));
        }
    }
    auto biased = [&](float sum, int i) {
        if constexpr (ACTIVATION & BIASED) return sum * factor + biases[i];
        return sum * factor;
    };
    // Write the results of a round to shared memory.
    auto stage = [&](int first, unsigned place) {
#pragma unroll
        for (int group = 0; group < ROUND / 8 && first / 8 + group < TOKENS / 8; group += GROUPS) {
            unsigned packed[MATRICES];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) {
                const float* const sums = c + (first / 8 + group + i / EACH) * 4;
                if constexpr (GATED)
                    packed[i] = pack<T>(finish<ACTIVATION>(p, biased(sums[0], 0), biased(sums[2], 1)),
                                        finish<ACTIVATION>(p, biased(sums[1], 0), biased(sums[3], 1)));
                else
                    packed[i] = pack<T>(finish<ACTIVATION>(p, biased(sums[i % 2 * 2], i % 2)),
                                        finish<ACTIVATION>(p, biased(sums[i % 2 * 2 + 1], i % 2)));
            }
            store_transposed(place + lane_to + group * 8 * CHUNKS * 16, packed);
        }
    };
    constexpr int UNITS = (ROUND * CHUNKS + WARPGROUP - 1) / WARPGROUP; // 16-byte units of a round per thread
    auto is_there = [&](int first, int token) {
        return token < ROUND && first + token < tile.tokens && column < columns;
    };
    auto token_of = [&](int unit) { return unit * (WARPGROUP / CHUNKS) + thread / CHUNKS; };
    auto from = [&](int token, unsigned place) { return place + token * CHUNKS * 16 + (chunk ^ swizzle(token)) * 16; };
    auto to = [&](int token) { return reinterpret_cast<uint4*>(out + (long long)token * columns); };
    if constexpr (!OVERLAPPED) {
#pragma unroll
        for (int first = 0; first < TOKENS; first += ROUND) {
            if (first >= tile.tokens) break;
            const unsigned place = staging + (round++ & 1) * PLACE;
            stage(first, place);
            warpgroup_sync(warpgroup);
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                if (is_there(first, token_of(i))) *to(first + token_of(i)) = load_shared(from(token_of(i), place));
        }
    } else {
        stage(0, staging + (round & 1) * PLACE);
#pragma unroll
        for (int first = 0; first < TOKENS; first += ROUND) {
            if (first >= tile.tokens) break;
            const unsigned place = staging + (round++ & 1) * PLACE;
            warpgroup_sync(warpgroup);
            // Load all units first: the loads overlap each other and the writes of the next round.
            uint4 units[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; ++i) units[i] = load_shared(from(token_of(i) % ROUND, place));
            if (first + ROUND < TOKENS && first + ROUND < tile.tokens)
                stage(first + ROUND, staging + (round & 1) * PLACE);
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
                if (is_there(first, token_of(i))) *to(first + token_of(i)) = units[i];
        }
    }
}
