// Limit logits smoothly to [-cap, cap].
//
//   out[r, c] = cap * tanh(logits[r, c] / cap)                                            in float32
//
// With y = logit / cap, float32 uses CUDA's tanhf. 16-bit types use |tanh(y)| = (1 - e) / (1 + e) with e = exp(-2 |y|).
// Near y = 0, 1 - e loses digits and y may underflow, so the result is the series x - x y^2 / 3 of the logit x. The
// limit for 16-bit types is |y| = 1 / 16, where both formulas have a relative error of at most 2^-18.
//
// BYTES: bytes of a vector. ITEMS: vectors per thread.
//
// Grid: x: tiles of rows; y: chunks of long rows. `row_threads` = tile_columns / ITEMS neighbouring threads share a row
// of a tile. A thread loads its ITEMS vectors before it computes.
//
// Speed of light: memory bandwidth.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"

struct Params {
    const char* logits;      // [rows, vocab]
    char* out;               // [rows, vocab], may be `logits`
    long long logits_stride; // bytes between rows
    long long out_stride;
    float cap, reciprocal; // reciprocal = 1 / cap, because a division takes more instructions
    int rows;
    int columns;      // vectors per row
    int tile_rows;    // tile_rows * row_threads <= blockDim.x
    int tile_columns; // in vectors
    Divisor by_threads;
};

template <typename T> __device__ __forceinline__ float softcapped(float x, float cap, float reciprocal) {
    constexpr float SMALL = sizeof(T) == 4 ? .0078125f : .0625f;
    const float y = x * reciprocal, series = fmaf(x * y, y * -.333333333f, x);
    float tanh;
    if constexpr (sizeof(T) == 4) {
        tanh = tanhf(y);
    } else {
        const float e = fast_exp2(-2.885390082f * fabsf(y)); // 2 / ln(2)
        tanh = copysignf((1.f - e) * fast_reciprocal(1.f + e), y);
    }
    // For NaN the comparison is false, and the result is NaN.
    return fabsf(y) < SMALL ? series : cap * tanh;
}

template <typename T, int BYTES, int ITEMS>
__global__ void __launch_bounds__(256) softcap(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    const int tile_row = p.by_threads.quotient(threadIdx.x), row_threads = p.tile_columns / ITEMS;
    const int row = blockIdx.x * p.tile_rows + tile_row;
    const int column = blockIdx.y * p.tile_columns + threadIdx.x - tile_row * row_threads;
    if (tile_row >= p.tile_rows || row >= p.rows) return;
    const char* from = p.logits + row * p.logits_stride;
    char* to = p.out + row * p.out_stride;
    Vector<BYTES> vector[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        // Bypass the read-only cache, because `out` may be `logits`.
        if (column + i * row_threads < p.columns)
            vector[i] = __ldcs(reinterpret_cast<const Vector<BYTES>*>(from) + column + i * row_threads);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column + i * row_threads >= p.columns) return;
        T* elements = reinterpret_cast<T*>(&vector[i]);
#pragma unroll
        for (int j = 0; j < BYTES / int(sizeof(T)); ++j)
            elements[j] = from_float<T>(softcapped<T>(to_float(elements[j]), p.cap, p.reciprocal));
        reinterpret_cast<Vector<BYTES>*>(to)[column + i * row_threads] = vector[i];
    }
}
