// The arguments of plan_parts, and the number of token blocks of a sequence. Both planning chains use them.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr int FIXED = 5; // fixed cost of a sequence in a part (load queries, store results), in token blocks
constexpr int LOADS = 2 * FIXED + 1; // number of candidates for the cost limit of a part (see plan.cu)

struct PlanParams {
    const int* lengths; // [sequences]; null: every length is `length`
    int* metadata;      // [parts, 8]: a row per part, see Part; an unused part has the row (sequences, 0, 0, ...)
    int* splits;        // [sequences + 1]: splits[i] is the number of visits to sequences 0 ... i - 1
    int sequences, parts, length;
    // The members below are used only with EXTRA, where each query token is a sequence. Sequence i belongs to batch
    // entry `i / query_tokens`.
    int query_tokens, extra_topk;
    const int* topk_lengths;       // [batch], clamped to the range 0 to `length`; null: all are `length`
    const int* extra_topk_lengths; // [batch], clamped to the range 0 to `extra_topk`; null: all are `extra_topk`
    int table_bytes;               // size of the table of plan_by_parts
};

template <bool EXTRA> __device__ __forceinline__ int blocks_of(const PlanParams& p, int sequence) {
    int length;
    if constexpr (EXTRA) {
        const int batch = sequence / p.query_tokens;
        length = counted(p.topk_lengths, batch, p.length) + counted(p.extra_topk_lengths, batch, p.extra_topk);
    } else {
        length = max(p.lengths ? p.lengths[sequence] : p.length, 0);
    }
    return length / BLOCK_TOKENS + (length % BLOCK_TOKENS > 0);
}
