// The arguments of a grouped product, by all its kernels.
#pragma once
#include "common/hopper.cuh"

struct GemmParams {
    const void* a; // [tokens, k]; batched: [experts, max_tokens, k]
    const void* b; // [experts, n, k]; of 4 bits: [experts, n, k / 2] bytes, the low half first
    void* out;     // [rows, n] or, with an activation, [rows, n / 2]
    // FP8. By blocks: [tokens, ceil(k / 128)] and [experts, ceil(n / 128), ceil(k / 128)]. Else of each token or one, and of
    // each row of weights or each expert. Of 4 bits: b_scale are bytes, [experts, n, k / 32] of E8M0 or [experts, n, k / 16]
    // of e4m3.
    const float* a_scale;
    const void* b_scale;
    const int* offsets;              // [experts + 1] times `offset_words`; batched: [experts], numbers of rows
    const int* row_token;            // [rows], or null
    const float* b_global_scale;     // [experts], or null
    int rows, tokens, experts, n, k; // rows of out and of a; n of b
    int offset_words;                // 1: offsets are int32; 2: int64, of which the low words count
    int max_tokens;                  // batched; else 0
    int a_scale_step;                // 1: a_scale is of each token, 0: one
    int b_scale_step;                // 1: b_scale is of each row of weights, 0: of each expert
    int together;                    // gemm_wgmma: so many tiles of tokens share a tile of weights before the next
};

// For TMA: what the boxes are is said where they are used.
struct MappedGemmParams : GemmParams {
    TensorMap b_map, a_map;
};

// PLAIN: of one type with the tokens; else FP8, and tokens too; or numbers of 4 bits (e2m1), two in a byte, the low half
// first, with a scale 2^(byte - 127) for every 32 of a row, or one of e4m3 for every 16.
enum Format { PLAIN, FP8, MXFP4, NVFP4 };
