// Epilogue of gemm_fp8_wgmma.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/fp8_layout.cuh"
#include "moe_gemm/params.cuh"
#include "moe_gemm/shared_memory.cuh"

// This is inline assembly, because the compiler would split some 16-byte stores into stores of 4 bytes.
__device__ __forceinline__ void store_global(void* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Applies no scales, because the mainloop has already applied the block scales.
struct Fp8NoScales {
    __device__ __forceinline__ Fp8NoScales(const MappedGemmParams&, const Fp8Tile&, long long, int, int) {}
    __device__ __forceinline__ float of_column(int, int, int) const { return 1.f; }
    __device__ __forceinline__ float apply(float sum, int, float) const { return sum; }
};

// PER_EXPERT: a_scale has one scale per expert.
template <bool PER_EXPERT> struct Fp8RowScales {
    const MappedGemmParams& p;
    const int lane, last_column;
    float row_scales[2] = {1.f, 1.f};
    const float* column_scales;

    // `left`: rows from the warp's `first` row to the end of the tile.
    __device__ __forceinline__ Fp8RowScales(const MappedGemmParams& p, const Fp8Tile& tile, long long first, int left,
                                            int out_columns)
        : p(p), lane(threadIdx.x % 32), last_column(out_columns - 1 - tile.w),
          column_scales(static_cast<const float*>(p.b_scale)) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row_scales[i] =
                p.a_scale[PER_EXPERT ? tile.x : (first + min(lane / 4 + i * 8, left - 1)) * p.a_scale_stride];
        column_scales += p.b_scale_stride ? (long long)tile.x * p.n + tile.w : tile.x;
    }

    // Return the weight scale of the lane's column `i` (0 or 1) among the 8 columns from `8 * block` on. `side`: 0
    // gate, 1 up. There is no branch, because a branch would keep the compiler from unrolling the caller's loop.
    __device__ __forceinline__ float of_column(int block, int i, int side) const {
        const int column = min(block * 8 + lane % 4 * 2 + i, last_column) + side * (p.n / 2);
        return column_scales[column * p.b_scale_stride];
    }

    __device__ __forceinline__ float apply(float sum, int i, float scale) const { return sum * row_scales[i] * scale; }
};

template <bool BLOCK_SCALED, bool PER_EXPERT> struct Fp8ScalesOf {
    using Type = Fp8NoScales;
};
template <bool PER_EXPERT> struct Fp8ScalesOf<false, PER_EXPERT> {
    using Type = Fp8RowScales<PER_EXPERT>;
};

// Compute results[row][column] for the lane's two rows and two columns. Its columns are among the 8 columns from
// `8 * block` on.
template <typename T, int ACTIVATION, class Scales>
__device__ __forceinline__ void finish_fp8_sums(float (&results)[2][2], const float (&sums)[64], int block,
                                                const MappedGemmParams& p, const Fp8Tile& tile, const Scales& scales) {
    constexpr bool GATED = is_gated(ACTIVATION);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const float scale = scales.of_column(block, c, 0);
        const float up_scale = GATED ? scales.of_column(block, c, 1) : scale;
        float biases[2] = {};
        if constexpr (ACTIVATION & BIASED) {
            const int last = (GATED ? p.n / 2 : p.n) - 1;
            const int column = min(tile.w + block * 8 + int(threadIdx.x % 4) * 2 + c, last);
#pragma unroll
            for (int side = 0; side < (GATED ? 2 : 1); ++side)
                biases[side] = bias_of<T>(p, tile.x, weight_row<ACTIVATION>(p, column, side));
        }
        auto biased = [&](float sum, int side) {
            if constexpr (ACTIVATION & BIASED) return sum + biases[side];
            return sum;
        };
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = block * 4 + i * 2 + c;
            results[i][c] = biased(scales.apply(sums[at], i, scale), 0);
            if constexpr (GATED)
                results[i][c] =
                    finish<ACTIVATION>(p, results[i][c], biased(scales.apply(sums[at + 32], i, up_scale), 1));
            else
                results[i][c] = finish<ACTIVATION>(p, results[i][c]);
        }
    }
}

// Write a warp's 16 rows of a tile, through shared memory, so that neighbouring lanes write 128 contiguous bytes of a
// row (STAGED_COLUMNS = 32: 64 bytes). Chunk c of row r is stored at chunk `c ^ (r % 8)`, or `c ^ (r / 2 % 4)` with 32
// columns, against bank conflicts.
template <typename T, class Layout>
__device__ __forceinline__ void store_fp8_rows(const MappedGemmParams& p, const Fp8Tile& tile, int first_row,
                                               const float (&sums)[64], unsigned staged) {
    constexpr int CHUNKS = Layout::STAGED_COLUMNS / 8, PITCH = Layout::STAGED_COLUMNS * 2; // CHUNKS: of 16 bytes
    constexpr int ROWS = 8 / CHUNKS;                                                       // rows in 128 bytes
    const int lane = threadIdx.x % 32, left = tile.z - first_row;
    if (left <= 0) return;
    const int out_columns = Layout::GATED ? p.n / 2 : p.n;
    const long long first = (long long)tile.y + first_row;
    constexpr bool PER_EXPERT = Layout::ACTIVATION & EXPERT_SCALE;
    const typename Fp8ScalesOf<Layout::BLOCK_SCALED, PER_EXPERT>::Type scales(p, tile, first, left, out_columns);
    T* const out = static_cast<T*>(p.out) + first * out_columns + tile.w;
#pragma unroll
    for (int from = 0; from < Layout::OUT_COLUMNS / 8; from += CHUNKS) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                float results[2][2];
                finish_fp8_sums<T, Layout::ACTIVATION>(results, sums, from + j + chunk, p, tile, scales);
#pragma unroll
                for (int i = 0; i < 2; ++i) pairs[chunk * 2 + i] = pack<T>(results[i][0], results[i][1]);
            }
            stmatrix(staged + lane % 16 * PITCH + ((j + lane / 16) ^ lane / ROWS % CHUNKS) * 16, pairs);
        }
        __syncwarp();
#pragma unroll
        for (int start = 0; start < 16; start += 32 / CHUNKS) {
            const int row = start + lane / CHUNKS, chunk = lane % CHUNKS;
            const uint4 vector = load_shared(staged + row * PITCH + (chunk ^ row / ROWS % CHUNKS) * 16);
            const int column = (from + chunk) * 8;
            if (row < left && tile.w + column < out_columns)
                store_global(out + (long long)row * out_columns + column, vector);
        }
        __syncwarp();
    }
}

// Write the tail of a tile. Its sums are transposed, because weights are the M side; stmatrix transposes them back.
// `sums[4 * j]` and `sums[4 * j + 1]` are for weight row `lane / 4` of the warp's 16 weight rows, and the next two sums
// for weight row `lane / 4 + 8`. In both cases the first sum is for tail row `8 * j + lane % 4 * 2`, and the second sum
// for the next tail row. `column`: the warp's first result column.
template <typename T, class Layout>
__device__ __forceinline__ void store_fp8_tail(const MappedGemmParams& p, const Fp8Tile& tile, int column,
                                               const float (&sums)[FP8_TAIL / 2], unsigned staged) {
    constexpr int ROWS_BEFORE_TAIL = 2 * FP8_BOX * Layout::ROW_BLOCKS, PITCH = 32;
    const int lane = threadIdx.x % 32, left = tile.z - ROWS_BEFORE_TAIL;
    T* const out = static_cast<T*>(p.out) + ((long long)tile.y + ROWS_BEFORE_TAIL) * p.n + column;
#pragma unroll
    for (int j = 0; j < FP8_TAIL / 8; j += 2) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = pack<T>(sums[j * 4 + i * 2], sums[j * 4 + i * 2 + 1]);
        store_transposed(staged + (j * 8 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16, pairs);
    }
    __syncwarp();
#pragma unroll
    for (int start = 0; start < FP8_TAIL; start += 16) {
        const int row = start + lane / 2, chunk = lane % 2;
        const uint4 vector = load_shared(staged + row * PITCH + chunk * 16);
        if (row < left && column + chunk * 8 < p.n) store_global(out + (long long)row * p.n + chunk * 8, vector);
    }
    __syncwarp();
}
