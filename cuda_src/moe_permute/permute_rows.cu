// Copy each token's row to the rows of all its slots (its `topk` experts).
//
//   out[inverse[t, s]]       = src[t]           where 0 <= inverse[t, s] < rows
//   out_scale[inverse[t, s]] = scale[t]
//
// A gather would read each row once per slot; this kernel reads it once.
//
// BYTES: size of a vector, one load or store. ITEMS: vectors of a row per thread.
//
// Grid: a block handles blockDim.y tokens and one tile of their columns (Tiling). Thread (x, y) copies vectors x, x +
// blockDim.x, ... of the tile for token y.
//
// Speed of light: memory traffic. On an H200, with 8 slots of 7168 bfloat16 and 1024 or more tokens, the kernel reaches
// 86% to 87% of the bandwidth of a copy (284 us for 8192 tokens). 64 tokens take 3.7 us (53%).
#include "common/overlap.cuh"
#include "moe_permute/rows.cuh"

struct Params {
    const void* src;    // [tokens, columns], rows `row_stride` vectors apart
    const int* inverse; // [tokens, topk]
    void* out;          // [rows, columns]
    const float* scale; // [tokens, scale_columns], rows `scale_stride` apart; null: none
    float* out_scale;   // [rows, scale_columns]
    long long row_stride, scale_stride;
    int topk;
    int rows;
    int scale_columns;
    Tiling tiling;
};

template <int BYTES, int ITEMS>
__global__ void __launch_bounds__(ROW_THREADS, 4) permute_rows(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int SLOTS = 8;
    const int tile = p.tiling.tile(), token = p.tiling.token();
    if (token >= p.tiling.tokens) return;
    const int first = tile * p.tiling.tile_columns + int(threadIdx.x);
    const int end = min((tile + 1) * p.tiling.tile_columns, p.tiling.columns);
    const Vector<BYTES>* src = static_cast<const Vector<BYTES>*>(p.src) + token * p.row_stride;
    const int* inverse = p.inverse + (long long)token * p.topk;

    Vector<BYTES> vector[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = first + i * int(blockDim.x);
        if (column < end) vector[i] = src[column];
    }
    const bool all_inside = first + (ITEMS - 1) * int(blockDim.x) < end;
    for (int slot = 0; slot < p.topk; slot += SLOTS) {
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) row[s] = slot + s < p.topk ? inverse[slot + s] : -1;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (unsigned(row[s]) >= unsigned(p.rows)) continue;
            Vector<BYTES>* out = static_cast<Vector<BYTES>*>(p.out) + (long long)row[s] * p.tiling.columns + first;
            // Nearly every thread has all its vectors inside the row, so one test replaces a test per vector.
            if (all_inside) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) out[i * int(blockDim.x)] = vector[i];
            } else {
#pragma unroll
                for (int i = 0; i < ITEMS - 1; ++i)
                    if (first + i * int(blockDim.x) < end) out[i * int(blockDim.x)] = vector[i];
            }
        }
    }
    if (p.scale && tile == 0)
        for (int column = threadIdx.x; column < p.scale_columns; column += int(blockDim.x)) {
            const float scale = p.scale[token * p.scale_stride + column];
            for (int slot = 0; slot < p.topk; ++slot) {
                const int row = inverse[slot];
                if (unsigned(row) < unsigned(p.rows)) p.out_scale[(long long)row * p.scale_columns + column] = scale;
            }
        }
}
