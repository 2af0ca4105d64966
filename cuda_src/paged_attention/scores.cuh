// Apply the softcap, the ALiBi slope and the block-sparse pattern.
#pragma once
#include "common/numeric.cuh"
#include "paged_attention/pieces.cuh"

// Return whether vLLM's block-sparse pattern contains `token`. The pattern is the last `sparse_local` blocks and every
// `sparse_stride`-th block, counted from an offset that depends on the head.
__device__ __forceinline__ bool in_pattern(const Params& p, const KvSplit& kv_split, int head, int token) {
    const int block = token / p.sparse_size;
    const long long shift = p.sparse_head_step >= 0
                                ? (p.sparse_rank * (long long)p.heads + head) * p.sparse_head_step
                                : (p.sparse_rank * (long long)p.kv_heads + kv_split.kv_head) * -p.sparse_head_step;
    return (block + shift + 1) % p.sparse_stride == 0 || block > (kv_split.length - 1) / p.sparse_size - p.sparse_local;
}

// Apply the softcap and the ALiBi slope. The score, the slope and the result include the factor log2(e).
__device__ __forceinline__ float modify(const Params& p, float score, float slope, int distance) {
    if (p.softcap) {
        const float cap = p.softcap * LOG2_E;
        score = cap * tanhf(score / cap);
    }
    return score + slope * distance;
}
