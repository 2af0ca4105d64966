// Define the arguments of plan_parts.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr int FIXED_COST = 5;              // cost of a split's queries and results, in token blocks
constexpr int LIMITS = 2 * FIXED_COST + 1; // candidates for the cost limit of a part (plan.cu)

struct PlanParams {
    const int* lengths; // [sequences]; null: every length is `length`
    int* metadata;      // [parts, 8], see SmPart; an unused part has the row (sequences, 0, 0, ...)
    int* splits;        // [sequences + 1]: number of splits of all earlier sequences
    int sequences, parts, length;
    // Only EXTRA uses these arguments. With EXTRA each query token counts as a sequence.
    int query_tokens, extra_topk;
    const int* topk_lengths;       // [batch], clamped to [0, length]; null: all are `length`
    const int* extra_topk_lengths; // [batch], clamped to [0, extra_topk]; null: all are `extra_topk`
    int table_bytes;               // of plan_by_parts
};

template <bool EXTRA> __device__ __forceinline__ int blocks_of(const PlanParams& p, int sequence) {
    int length;
    if constexpr (EXTRA) {
        const int batch = sequence / p.query_tokens;
        length =
            clamped_topk(p.topk_lengths, batch, p.length) + clamped_topk(p.extra_topk_lengths, batch, p.extra_topk);
    } else {
        length = max(p.lengths ? p.lengths[sequence] : p.length, 0);
    }
    return length / BLOCK_TOKENS + (length % BLOCK_TOKENS > 0);
}
