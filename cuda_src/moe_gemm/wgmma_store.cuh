// What becomes of the sums of gemm_wgmma.
#pragma once
#include "common/activation.cuh"
#include "common/mma.cuh"
#include "moe_gemm/params.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_layout.cuh"

// Store 8 x 8 matrices of 16 bits, transposed: what lane l holds of the i-th goes to rows 2 (l % 4) and + 1, column l / 4.
// Lanes 8 i ... 8 i + 7 name its rows.
template <int MATRICES>
__device__ __forceinline__ void store_transposed(unsigned to, const unsigned (&from)[MATRICES]) {
    if constexpr (MATRICES == 4)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                     "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    else if constexpr (MATRICES == 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(from[0]),
                     "r"(from[1])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(from[0]) : "memory");
}

// Wait for all threads of warpgroup `warpgroup`.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    if (warpgroup < 1) return named_sync<1, WARPGROUP>();
    named_sync<2, WARPGROUP>();
}

// Write what a warpgroup has of a tile. `round` counts how often it has used its two places in `staging`: a round's readers
// are done when all have come to the barrier of the next, so that the round after that may write to their place.
template <typename T, int ACTIVATION, int TOKENS>
__device__ __forceinline__ void gemm_store(const MappedGemmParams& p, const float (&c)[TOKENS / 2],
                                           const GemmVisit& visit, int warpgroup, unsigned staging, int& round) {
    constexpr bool GATED = ACTIVATION != NO_ACTIVATION;
    constexpr int ROUND = round_of(TOKENS);
    constexpr int CHUNKS = GATED ? 4 : 8; // of 16 bytes, that a token gets
    constexpr int EACH = CHUNKS / 4;      // of them by a warp
    constexpr int MATRICES = ROUND / 8 * EACH < 4 ? ROUND / 8 * EACH : 4;
    constexpr int GROUPS = MATRICES / EACH; // of 8 tokens, that are stored at once
    // The chunks of 8 neighbouring tokens are in different banks, if chunk i is where chunk i ^ swizzle(token) would be.
    auto swizzle = [](int token) { return GATED ? token / 2 % 4 : token % 8; };
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    const int columns = GATED ? p.n / 2 : p.n;
    const unsigned lane_to =
        (lane / 8 / EACH * 8 + lane % 8) * CHUNKS * 16 + ((warp * EACH + lane / 8 % EACH) ^ swizzle(lane % 8)) * 16;
    const int chunk = thread % CHUNKS, column = visit.column + warpgroup * CHUNKS * 8 + chunk * 8;
    T* const out = static_cast<T*>(p.out) + (long long)visit.row * columns + column;
#pragma unroll
    for (int first = 0; first < TOKENS; first += ROUND) {
        if (first >= visit.tokens) break;
        const unsigned place = staging + (round++ & 1) * ROUND * ROW_BYTES;
#pragma unroll
        for (int group = 0; group < ROUND / 8; group += GROUPS) {
            unsigned packed[MATRICES];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) {
                const float* const sums = c + (first / 8 + group + i / EACH) * 4;
                if constexpr (GATED)
                    packed[i] = pack<T>(activate<ACTIVATION>(sums[0], sums[2]), activate<ACTIVATION>(sums[1], sums[3]));
                else
                    packed[i] = pack<T>(sums[i % 2 * 2], sums[i % 2 * 2 + 1]);
            }
            store_transposed(place + lane_to + group * 8 * CHUNKS * 16, packed);
        }
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int i = 0; i < (ROUND * CHUNKS + WARPGROUP - 1) / WARPGROUP; ++i) {
            const int token = i * (WARPGROUP / CHUNKS) + thread / CHUNKS;
            if (token < ROUND && first + token < visit.tokens && column < columns)
                *reinterpret_cast<uint4*>(out + (long long)(first + token) * columns) =
                    load_shared(place + token * CHUNKS * 16 + (chunk ^ swizzle(token)) * 16);
        }
    }
}
