// Arguments of a grouped GEMM, shared by all kernels of moe_gemm.
//
// A group is the rows of one expert: rows offsets[e] to offsets[e + 1] - 1 belong to expert e. In a batched call expert
// e has max_tokens rows, starting at row `e * max_tokens`, and its group is the first offsets[e] of these rows. The
// host does not know the offsets, only the number of groups and the total number of rows. So the thread blocks compute
// their tiles from the offsets. Rows outside all groups are not written.
#pragma once
#include "common/hopper.cuh"

struct GemmParams {
    const void* a; // [tokens, k]; batched: [experts, max_tokens, k]
    // [experts, n, k]; TRANSPOSED: [experts, k, n]. 4-bit weights: [experts, n, k / 2] bytes; the elements with an even
    // index are in the low nibbles.
    const void* b;
    void* out; // [rows, n]; gated: [rows, n / 2]
    // FP8 with block scales (one per 1 x 128 elements of `a` and per 128 x 128 elements of `b`): a_scale is [tokens,
    // ceil(k / 128)], b_scale is [experts, ceil(n / 128), ceil(k / 128)]. FP8 with row scales: a_scale has one scale
    // per token or a single scale, b_scale has one scale per row of weights or one per expert. 4-bit weights: b_scale
    // is E8M0 bytes [experts, n, k / 32] or e4m3 bytes [experts, n, k / 16].
    const float* a_scale;
    const void* b_scale;
    const int* offsets;              // [experts + 1]; batched: [experts], the rows of each group. int32 or int64
    const int* row_token;            // [rows], the row of a for each row of out; null: the same row
    const float* b_global_scale;     // [experts], or null
    int rows, tokens, experts, n, k; // rows: of out; tokens: rows of a
    int offset_words;                // 1: offsets are int32. 2: offsets are int64; the low words are read
    int max_tokens;                  // batched: rows reserved for each expert; else 0
    int a_scale_step;                // 1: a_scale has a scale per token. 0: one scale
    int b_scale_step;                // 1: b_scale has a scale per row of weights. 0: one per expert
    int together;                    // consecutive token tiles that use the same weight tile (WgmmaTiles)
    // The kernels read the bias only with the flag BIASED, and alpha and limit only with BOUNDED
    // (moe_gemm/epilogue.cuh).
    const void* bias;   // [experts, n], float32 or T
    float alpha, limit; // constants of swigluoai
    int bias_is_float;
};

// GemmParams with tensor maps for TMA. A box is the rectangle that one TMA copy transfers. The kernels' producer warps
// choose the boxes; the comments there describe them.
struct MappedGemmParams : GemmParams {
    TensorMap b_map, a_map;
};

// Formats of the weights. PLAIN: tokens and weights are T. FP8: tokens and weights are e4m3. MXFP4: tokens are T,
// weights are e2m1, two per byte, with an E8M0 scale for every 32 elements of a row. NVFP4: the same with an e4m3 scale
// for every 16 elements. TRANSPOSED: tokens and weights are T, and a row of weights is a column of `b`.
enum Format { PLAIN, FP8, MXFP4, NVFP4, TRANSPOSED };
