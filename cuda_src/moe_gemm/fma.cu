// Grouped GEMM (moe_gemm/params.cuh) with scalar loads and without tensor cores, on every GPU. It handles calls that do
// not allow 16-byte loads: n or k is not a multiple of 16 bytes, an array is not aligned, or the rows of weights have
// an arbitrary stride.
//
// Grid: ceil(n / FMA_WEIGHTS) blocks for each of the possible tiles of TOKENS rows in all groups; blocks without a tile
// exit. A block multiplies a tile by FMA_WEIGHTS rows of weights (gated: half are gates), FMA_STEP elements along k at
// a time. Warp w loads rows `w`, `w + 8`, ... of tokens and weights to shared memory as float32, one element per lane.
// If the weights are TRANSPOSED, FMA_WEIGHTS threads load neighbouring elements along n. Thread (x, y) of 16 x 16
// multiplies rows `x`, `x + 16`, ... of the weights by rows `y`, `y + 16`, ... of the tokens.
//
// Speed of light: the time of 2 * rows * n * k operations at the float32 rate of the CUDA cores.
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/groups.cuh"

constexpr int FMA_THREADS = 256, FMA_WEIGHTS = 64, FMA_STEP = 32;

struct FmaParams : GemmParams {
    // `b_row`: stride between rows (TRANSPOSED: between indices along k). `b_expert`: stride between experts. Both are
    // in elements (4-bit weights: in bytes).
    long long b_row, b_expert;
};

__device__ __forceinline__ float e2m1_of(unsigned code) {
    const unsigned magnitude = code & 7;
    // Magnitude codes 0 and 1 are 0 and 0.5. The others have two exponent bits and one mantissa bit.
    const float x = magnitude < 2 ? magnitude * .5f : __uint_as_float((magnitude << 22) + (126u << 23));
    return code & 8 ? -x : x;
}

// Return 2^(byte - 127), or NaN if the byte is 255.
__device__ __forceinline__ float e8m0_of(unsigned byte) {
    return __uint_as_float(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 0x00400000u);
}

// Return element i of row `row` of `a`, times its block scale if BLOCK_SCALES.
template <typename T, int FORMAT, bool BLOCK_SCALES>
__device__ __forceinline__ float token_number(const FmaParams& p, int row, int i) {
    const long long at = (long long)row * p.k + i;
    if constexpr (FORMAT != FP8) return to_float(static_cast<const T*>(p.a)[at]);
    const float x = to_float(static_cast<const __nv_fp8_e4m3*>(p.a)[at]);
    return BLOCK_SCALES ? x * p.a_scale[(long long)row * ((p.k + 127) / 128) + i / 128] : x;
}

// Return element i of row `row` of an expert's weights, times its block or group scale.
template <typename T, int FORMAT, bool BLOCK_SCALES>
__device__ __forceinline__ float weight_number(const FmaParams& p, int expert, int row, int i) {
    if constexpr (FORMAT == TRANSPOSED)
        return to_float(static_cast<const T*>(p.b)[expert * p.b_expert + i * p.b_row + row]);
    const long long first = expert * p.b_expert + row * p.b_row;
    if constexpr (FORMAT == PLAIN) return to_float(static_cast<const T*>(p.b)[first + i]);
    if constexpr (FORMAT == FP8) {
        const float x = to_float(static_cast<const __nv_fp8_e4m3*>(p.b)[first + i]);
        if constexpr (!BLOCK_SCALES) return x;
        const long long strip = (long long)expert * ((p.n + 127) / 128) + row / 128;
        return x * static_cast<const float*>(p.b_scale)[strip * ((p.k + 127) / 128) + i / 128];
    }
    if constexpr (FORMAT == MXFP4 || FORMAT == NVFP4) {
        constexpr int GROUP = FORMAT == MXFP4 ? 32 : 16;
        const unsigned both = static_cast<const unsigned char*>(p.b)[first + i / 2];
        const long long scale_at = ((long long)expert * p.n + row) * (p.k / GROUP) + i / GROUP;
        const float x = e2m1_of(both >> i % 2 * 4);
        if constexpr (FORMAT == MXFP4) return x * e8m0_of(static_cast<const unsigned char*>(p.b_scale)[scale_at]);
        return x * to_float(static_cast<const __nv_fp8_e4m3*>(p.b_scale)[scale_at]);
    }
}

// Return the product of the scales that are constant along k.
template <int FORMAT, bool BLOCK_SCALES, int ACTIVATION>
__device__ __forceinline__ float scale_of_sum(const FmaParams& p, int expert, int token, int row) {
    if constexpr (FORMAT == NVFP4) return p.b_global_scale[expert];
    if constexpr (FORMAT != FP8 || BLOCK_SCALES) return 1.f;
    const float of_a = p.a_scale[ACTIVATION & EXPERT_SCALE ? expert : (long long)token * p.a_scale_stride];
    return of_a * static_cast<const float*>(p.b_scale)[p.b_scale_stride ? (long long)expert * p.n + row : expert];
}

// T: type of the result, and of 16-bit `a` and `b`. BLOCK_SCALES: FP8 has block scales, otherwise row scales. TOKENS: a
// multiple of 16.
template <typename T, int FORMAT, bool BLOCK_SCALES, int ACTIVATION, int TOKENS>
__global__ __launch_bounds__(FMA_THREADS) void gemm_fma(const __grid_constant__ FmaParams p) {
    wait_for_earlier_kernels();
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int SIDES = GATED ? 2 : 1, COLUMNS = FMA_WEIGHTS / SIDES, WARPS = FMA_THREADS / 32;
    constexpr int M = TOKENS / 16, N = FMA_WEIGHTS / 16;
    __shared__ float tokens[FMA_STEP][TOKENS + 1], weights[FMA_STEP][FMA_WEIGHTS + 1];
    __shared__ GroupTile group;
    const int columns = p.n / SIDES, strips = (columns + COLUMNS - 1) / COLUMNS;
    const int tile = blockIdx.x / strips;
    if (!find_tile<TOKENS, FMA_THREADS>(p, tile, group)) return;
    const int first_row = group.begin + (tile - group.before) * TOKENS, first_column = blockIdx.x % strips * COLUMNS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x = threadIdx.x % 16, y = threadIdx.x / 16;
    // Row `r` of the tile's weights is row `row_of(r)` of the expert's weights. It contributes to result column
    // `column_of(r)`.
    auto column_of = [&](int r) { return first_column + r % COLUMNS; };
    auto row_of = [&](int r) { return weight_row<ACTIVATION>(p, min(column_of(r), columns - 1), r / COLUMNS); };

    int sources[TOKENS / WARPS];
#pragma unroll
    for (int i = 0; i < TOKENS / WARPS; ++i)
        sources[i] = source_of(p, min(first_row + warp + i * WARPS, group.end - 1));
    float sums[M][N] = {};
    for (int k = 0; k < p.k; k += FMA_STEP) {
        const int at = k + lane;
#pragma unroll
        for (int i = 0; i < TOKENS / WARPS; ++i)
            tokens[lane][warp + i * WARPS] = at < p.k ? token_number<T, FORMAT, BLOCK_SCALES>(p, sources[i], at) : 0.f;
#pragma unroll
        for (int i = 0; i < FMA_WEIGHTS / WARPS; ++i) {
            if constexpr (FORMAT == TRANSPOSED) {
                const int r = threadIdx.x % FMA_WEIGHTS;
                const int step = i * (FMA_THREADS / FMA_WEIGHTS) + threadIdx.x / FMA_WEIGHTS;
                weights[step][r] =
                    k + step < p.k ? weight_number<T, FORMAT, false>(p, group.expert, row_of(r), k + step) : 0.f;
            } else {
                const int r = warp + i * WARPS;
                weights[lane][r] =
                    at < p.k ? weight_number<T, FORMAT, BLOCK_SCALES>(p, group.expert, row_of(r), at) : 0.f;
            }
        }
        __syncthreads();
#pragma unroll 8
        for (int step = 0; step < FMA_STEP; ++step) {
            float a[M], b[N];
#pragma unroll
            for (int m = 0; m < M; ++m) a[m] = tokens[step][y + m * 16];
#pragma unroll
            for (int n = 0; n < N; ++n) b[n] = weights[step][x + n * 16];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n) sums[m][n] = fmaf(a[m], b[n], sums[m][n]);
        }
        __syncthreads();
    }

#pragma unroll
    for (int m = 0; m < M; ++m) {
        const int row = first_row + y + m * 16;
        if (row >= group.end) return;
        const int token = source_of(p, row);
        // If gated, row `r + COLUMNS` of the tile's weights is the up row of gate row `r`.
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int weight = row_of(x + n * 16);
            sums[m][n] *= scale_of_sum<FORMAT, BLOCK_SCALES, ACTIVATION>(p, group.expert, token, weight);
            if constexpr (ACTIVATION & BIASED) sums[m][n] += bias_of<T>(p, group.expert, weight);
        }
#pragma unroll
        for (int n = 0; n < N / SIDES; ++n) {
            const int column = column_of(x + n * 16);
            if (column >= columns) continue;
            T* const to = static_cast<T*>(p.out) + (long long)row * columns + column;
            if constexpr (GATED)
                *to = from_float<T>(finish<ACTIVATION>(p, sums[m][n], sums[m][n + N / 2]));
            else
                *to = from_float<T>(finish<ACTIVATION>(p, sums[m][n]));
        }
    }
}
