// Index computation of prepare.cu and restore.cu: each thread handles one 32-bit word of the prepared weights.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"

constexpr int PREPARE_THREADS = 256, UNIT_WORDS = UNIT_NUMBERS / 4;

// Arguments of prepare_weights and restore_weights: b [experts, n, k / 2], b_scale [experts, n, k / 32] (MXFP4) or
// [experts, n, k / 16] (NVFP4), prepared [experts, n / 8, ceil(k / 64), UNIT_BYTES].
struct PrepareParams {
    unsigned char *b, *b_scale, *prepared;
    long long units;
    int k;
};

// Position of the 32-bit word that a thread handles. `lane`: the lane of gemm_fp4_wgmma that reads the word. `half`: 0
// if the word is in the first 32 elements of the unit along k, else 1.
struct WordPlace {
    long long unit, row;   // row: index over the rows of all experts
    int half, lane, first; // first: index along k of the half's first element

    __device__ __forceinline__ WordPlace(int k) {
        const long long word = (long long)blockIdx.x * PREPARE_THREADS + threadIdx.x;
        const int along_k = (k + UNIT_K - 1) / UNIT_K, in = int(word % UNIT_WORDS);
        unit = word / UNIT_WORDS;
        lane = in / 2, half = in % 2;
        row = unit / along_k * UNIT_ROWS + lane / 4;
        first = int(unit % along_k) * UNIT_K + half * 32;
    }
};
