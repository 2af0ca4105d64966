// Apply a soft cap to logits: limit them smoothly to the range from -cap to cap.
//
//   out[r, c] = cap * tanh(logits[r, c] / cap)                                            in float32
//
// Let y = x / cap for a logit x. float32 uses CUDA's tanhf. 16-bit types compute |tanh(y)| = (1 - e) / (1 + e) with e =
// exp(-2 |y|), and then set the sign. For y near 0 the subtraction 1 - e loses most digits, and y itself may underflow.
// There the result is the series x - x y^2 / 3. For 16-bit types the switch is at |y| = 1 / 16, where both forms have a
// relative error of at most 2^-18.
//
// BYTES: width of a load; a unit is BYTES bytes. ITEMS: units per thread.
//
// Grid: x: tiles of rows; y: parts of long rows. In a tile, `row_threads` = tile_columns / ITEMS neighbouring threads
// process a row. A thread has ITEMS units of the row, which are row_threads units apart. It loads all of them before it
// computes the first result.
//
// Speed of light: memory bandwidth. Each result takes one element to read, one to write and about fifteen flops.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"

struct Params {
    const char* logits;      // [rows, vocab]
    char* out;               // [rows, vocab], may be `logits`
    long long logits_stride; // bytes between rows
    long long out_stride;    // bytes between rows
    float cap, reciprocal;   // reciprocal = 1 / cap; a division would take more instructions than the rest
    int rows;
    int columns;      // units per row
    int tile_rows;    // tile_rows * row_threads <= blockDim.x
    int tile_columns; // in units
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
    // If y is NaN, the comparison is false, so the result is cap * NaN = NaN.
    return fabsf(y) < SMALL ? series : cap * tanh;
}

template <typename T, int BYTES, int ITEMS>
__global__ void __launch_bounds__(256) softcap(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using Unit = typename VectorOf<BYTES>::Type;
    const int tile_row = p.by_threads.quotient(threadIdx.x), row_threads = p.tile_columns / ITEMS;
    const int row = blockIdx.x * p.tile_rows + tile_row;
    const int column = blockIdx.y * p.tile_columns + threadIdx.x - tile_row * row_threads;
    if (tile_row >= p.tile_rows || row >= p.rows) return;
    const char* from = p.logits + row * p.logits_stride;
    char* to = p.out + row * p.out_stride;
    Unit unit[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        // The read-only cache is not used, because `out` may be `logits`.
        if (column + i * row_threads < p.columns)
            unit[i] = __ldcs(reinterpret_cast<const Unit*>(from) + column + i * row_threads);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column + i * row_threads >= p.columns) return;
        T* each = reinterpret_cast<T*>(&unit[i]);
#pragma unroll
        for (int j = 0; j < BYTES / int(sizeof(T)); ++j)
            each[j] = from_float<T>(softcapped<T>(to_float(each[j]), p.cap, p.reciprocal));
        reinterpret_cast<Unit*>(to)[column + i * row_threads] = unit[i];
    }
}
