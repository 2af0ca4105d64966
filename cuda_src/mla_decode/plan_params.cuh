// What both ways of planning share: the arguments, and the blocks of a sequence.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr int FIXED = 5; // cost of a visit besides its blocks, in blocks
constexpr int LOADS = 2 * FIXED + 1;

struct PlanParams {
    const int* lengths; // [sequences]; null: all are `length`
    int* metadata;      // [parts, 8], as Part reads it; of an unused part: sequences, 0, ...
    int* splits;        // [sequences + 1]: visits to the sequences before
    int sequences, parts, length;
    // With EXTRA: sequence i is a query token of sequence i / query_tokens of the batch.
    int query_tokens, extra_topk;
    const int* topk_lengths;       // [batch], at most `length`; null: all are `length`
    const int* extra_topk_lengths; // [batch], at most `extra_topk`; null: all are that
    int table_bytes;               // of the table of plan_by_parts
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
