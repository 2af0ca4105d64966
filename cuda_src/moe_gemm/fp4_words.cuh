// Indices for prepare.cu and restore.cu, where a thread handles one 32-bit word of a unit's elements.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"

constexpr int PREPARE_THREADS = 256, UNIT_WORDS = UNIT_ELEMENT_BYTES / 4;

// b [experts, n, k / 2]. b_scale [experts, n, k / 32] (MXFP4) or [experts, n, k / 16] (NVFP4). prepared [experts, n /
// 8, ceil(k / 64), UNIT_BYTES].
struct PrepareParams {
    unsigned char *b, *b_scale, *prepared;
    long long units;
    int k;
};

// `lane`: lane of gemm_fp4_wgmma that reads the word. `half`: 0 or 1, the first or last 32 elements along k of the
// unit.
struct WordPlace {
    long long unit, row;   // of all experts
    int half, lane, first; // `first`: index along k

    __device__ __forceinline__ WordPlace(int k) {
        const long long word = (long long)blockIdx.x * PREPARE_THREADS + threadIdx.x;
        const int along_k = (k + UNIT_K - 1) / UNIT_K, unit_word = int(word % UNIT_WORDS);
        unit = word / UNIT_WORDS;
        lane = unit_word / 2, half = unit_word % 2;
        row = unit / along_k * UNIT_ROWS + lane / 4;
        first = int(unit % along_k) * UNIT_K + half * 32;
    }
};
