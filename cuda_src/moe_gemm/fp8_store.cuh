// What becomes of the sums of gemm_fp8_wgmma.
#pragma once
#include "common/activation.cuh"
#include "common/mma.cuh"
#include "moe_gemm/fp8_layout.cuh"
#include "moe_gemm/params.cuh"
#include "moe_gemm/shared_memory.cuh"

// The rows of a warp's product, to the output by way of shared memory, for whole 16-byte pieces.
template <typename T, bool BLOCK_SCALED, int ACTIVATION>
__device__ __forceinline__ void store_fp8_rows(const MappedGemmParams& p, const Fp8Tile& tile, int first_row,
                                               const float (&sums)[64], unsigned staged) {
    constexpr int OUT_COLUMNS = ACTIVATION ? FP8_COLUMNS / 2 : FP8_COLUMNS;
    constexpr int CHUNKS = FP8_STAGED_COLUMNS / 8, PITCH = FP8_STAGED_COLUMNS * 2; // of 16 bytes
    const int lane = threadIdx.x % 32, left = tile.z - first_row;
    if (left <= 0) return;
    const int out_columns = ACTIVATION ? p.n / 2 : p.n;
    const long long first = (long long)tile.y + first_row;

    // What a sum is multiplied with, where that is not done yet.
    float row_scales[2] = {1.f, 1.f};
    const float* column_scales = static_cast<const float*>(p.b_scale);
    if constexpr (!BLOCK_SCALED) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row_scales[i] = p.a_scale[(first + min(lane / 4 + i * 8, left - 1)) * p.a_scale_step];
        column_scales += p.b_scale_step ? (long long)tile.x * p.n + tile.w : tile.x;
    }
    // Without branches, or the loop below would be split in two and unrolled no more.
    const int last_column = out_columns - 1 - tile.w;
    auto scale_of = [&](int j, int i, int side) {
        if constexpr (BLOCK_SCALED) return 1.f;
        const int column = min(j * 8 + lane % 4 * 2 + i, last_column) + side * (p.n / 2);
        return column_scales[column * p.b_scale_step];
    };
    auto scaled = [&](float sum, int i, float scale) { return BLOCK_SCALED ? sum : sum * row_scales[i] * scale; };

    T* const out = static_cast<T*>(p.out) + first * out_columns + tile.w;
#pragma unroll
    for (int from = 0; from < OUT_COLUMNS / 8; from += CHUNKS) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                const int place = from + j + chunk;
                float results[2][2]; // [row][column]
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float scale = scale_of(place, c, 0), up_scale = ACTIVATION ? scale_of(place, c, 1) : scale;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int at = place * 4 + i * 2 + c;
                        results[i][c] = scaled(sums[at], i, scale);
                        if constexpr (ACTIVATION != 0)
                            results[i][c] = activate<ACTIVATION>(results[i][c], scaled(sums[at + 32], i, up_scale));
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) pairs[chunk * 2 + i] = pack<T>(results[i][0], results[i][1]);
            }
            store_matrices(staged + lane % 16 * PITCH + ((j + lane / 16) ^ lane % 8) * 16, pairs);
        }
        __syncwarp();
#pragma unroll
        for (int start = 0; start < 16; start += 32 / CHUNKS) {
            const int row = start + lane / CHUNKS, chunk = lane % CHUNKS;
            const uint4 eight = load_shared(staged + row * PITCH + (chunk ^ row % 8) * 16);
            const int column = (from + chunk) * 8;
            if (row < left && tile.w + column < out_columns)
                *reinterpret_cast<uint4*>(out + (long long)row * out_columns + column) = eight;
        }
        __syncwarp();
    }
}
