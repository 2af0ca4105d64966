// The arguments of a grouped product, which all kernels of moe_gemm share.
//
// The group of expert e is rows [offsets[e], offsets[e + 1]) or, batched, the first offsets[e] of the max_tokens rows
// from e * max_tokens on. The host knows how many groups there are and how many rows they have together: blocks find
// out which tiles there are. Rows of no group are not written.
#pragma once
#include "common/hopper.cuh"

struct GemmParams {
    const void* a; // [tokens, k]; batched: [experts, max_tokens, k]
    // [experts, n, k]; TRANSPOSED: [experts, k, n]; of 4 bits: [experts, n, k / 2] bytes, the lower half first.
    const void* b;
    void* out; // [rows, n]; with an activation: [rows, n / 2]
    // Scales of FP8 by blocks: [tokens, ceil(k / 128)], [experts, ceil(n / 128), ceil(k / 128)]. Else of each token or
    // one; of each row of weights or each expert. Of 4 bits b_scale has bytes: [experts, n, k / 32] of E8M0 or
    // [experts, n, k / 16] of e4m3.
    const float* a_scale;
    const void* b_scale;
    const int* offsets;              // [experts + 1] times `offset_words`; batched: [experts], rows of each group
    const int* row_token;            // [rows], the row of a for each row of out; null: the same row
    const float* b_global_scale;     // [experts], or null
    int rows, tokens, experts, n, k; // rows of out; tokens: rows of a
    int offset_words;                // 1: offsets are int32. 2: they are int64, whose low words are read
    int max_tokens;                  // rows that each expert has room for, batched; else 0
    int a_scale_step;                // 1: a_scale is of each token. 0: there is one
    int b_scale_step;                // 1: b_scale is of each row of weights. 0: of each expert
    int together;                    // gemm_wgmma: tiles of tokens that share a tile of weights before the next
    // Read only where moe_gemm/epilogue.cuh says so.
    const void* bias;   // [experts, n], float32 or T
    float alpha, limit; // of swigluoai
    int bias_is_float;
};

// The same with tensor maps for TMA, whose boxes are described where they are copied.
struct MappedGemmParams : GemmParams {
    TensorMap b_map, a_map;
};

// Formats of the weights. PLAIN: T, as the tokens. FP8: e4m3, as the tokens. MXFP4, NVFP4: e2m1, two to a byte, with an
// E8M0 scale for every 32 of a row or one of e4m3 for every 16; the tokens are T. TRANSPOSED: T, as the tokens, and a
// row of weights is a column of `b`.
enum Format { PLAIN, FP8, MXFP4, NVFP4, TRANSPOSED };
