// Grouped GEMM: arguments that all kernels of moe_gemm share.
//
//   x[r, j]   = sum over i of a[r, i] * b[e, j, i], in float32, rounded once (with row_token: a[row_token[r], i])
//   out[r, j] = x[r, j] or, if gated, activate(x[r, j], x[r, n / 2 + j]) (moe_gemm/epilogue.cuh)
//
// The rows r of an expert e are its group: rows offsets[e] to offsets[e + 1] - 1. In a batched call the group of e is
// the first offsets[e] of the max_tokens rows from row `e * max_tokens` on. The host does not know the offsets, so
// thread blocks find their tiles themselves. Rows outside all groups are not written.
#pragma once
#include "common/hopper.cuh"

struct GemmParams {
    const void* a; // [tokens, k]; batched: [experts, max_tokens, k]
    // [experts, n, k]; TRANSPOSED: [experts, k, n]; 4-bit: [experts, n, k / 2] bytes, even elements in the low nibbles
    const void* b;
    void* out; // [rows, n]; gated: [rows, n / 2]
    // FP8, block scales (one per 1 x 128 elements of `a`, one per 128 x 128 of `b`): a_scale [tokens, ceil(k / 128)],
    // b_scale [experts, ceil(n / 128), ceil(k / 128)]. FP8, row scales: a_scale [tokens] or [1], b_scale [experts, n]
    // or [experts]. MXFP4: b_scale [experts, n, k / 32], E8M0. NVFP4: b_scale [experts, n, k / 16], e4m3.
    const float* a_scale;
    const void* b_scale;
    const int* offsets;              // [experts + 1]; batched: [experts], rows. int32 or int64
    const int* row_token;            // [rows], the row of a for each row of out; null: the same row
    const float* b_global_scale;     // [experts], or null
    int rows, tokens, experts, n, k; // `rows`: of out; `tokens`: rows of a
    int offset_stride;               // 1: int32. 2: int64, whose low words are read
    int max_tokens;                  // batched: rows reserved for each expert; else 0
    int a_scale_stride;              // 1: per token. 0: one scale
    int b_scale_stride;              // 1: per row of weights. 0: per expert
    int band_tiles;                  // token tiles of a band (WgmmaTiles)
    const void* bias;                // [experts, n], float32 or T, with the flag BIASED
    float alpha, limit;              // of swigluoai, with the flag BOUNDED
    int bias_is_float;
};

// A TMA box is the rectangle that one TMA copy moves.
struct MappedGemmParams : GemmParams {
    TensorMap b_map, a_map;
};

// PLAIN, TRANSPOSED: tokens and weights are T; TRANSPOSED: `b` is [experts, k, n]. FP8: both are e4m3. MXFP4: tokens
// are T, weights are e2m1 with an E8M0 scale per 32 elements of a row. NVFP4: as MXFP4, but with an e4m3 scale per 16
// elements.
enum Format { PLAIN, FP8, MXFP4, NVFP4, TRANSPOSED };
