// The arguments of latent attention, and its work as the plan cuts it: into parts, and these into visits.
//
// The query rows of a (sequence, kv head) are its query tokens times the heads of a group, so that the cache is read once
// for all of them. With `indices` every query token is a sequence of its own. Sequences are cut into blocks of 64 tokens,
// which `plan_parts` deals out to parts; the blocks of threads with blockIdx.z == i do part i. A part visits one sequence
// after the other: the first from some block on, the last up to some block. What several parts found of a sequence is
// put together by `combine_parts`.
//
// Token t of a sequence is slot t % page_size of page block_table[sequence, t / page_size], or the slot `indices` names,
// counted over all pages.
#pragma once

constexpr int BLOCK_TOKENS = 64; // what the plan counts in

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Params {
    const void* q;          // [batch, query_tokens, heads, head_dim]  T
    const void* cache;      // [pages, page_size, kv_heads, head_dim]  T, or [..., 656] bytes
    const int* block_table; // [batch, max_pages]
    const int* lengths;     // [batch]
    const int* indices;     // [batch, query_tokens, topk]; null: all tokens of the block table
    const float* sinks;     // [heads], may be null
    const int* metadata;    // [parts, 8], see Part
    const int* splits;      // [sequences + 1]: visits to the sequences before
    void* out;              // [batch, query_tokens, heads, head_dim_v]  T
    float* lse;             // [batch, heads, query_tokens]
    // Results of the visits to a sequence that has several; visit i to it is in slot 2 (splits[sequence] - sequence) + i.
    float* partial_out;         // [2 parts, kv_heads, rows, head_dim_v], divided by the row's sum
    float* partial_lse;         // [2 parts, kv_heads, rows], log2; -inf for no token, NaN for a row that is NaN
    long long q_strides[3];     // batch, token, head; elements
    long long cache_strides[3]; // page, token, head; elements, bytes if 8 bits
    long long table_stride;
    long long indices_strides[2]; // batch, token
    int batch, query_tokens, heads, kv_heads, head_dim, head_dim_v;
    int pages, page_size, max_pages, topk, causal, parts;
    float scale_log2; // scale * log2(e): scores are in powers of 2 until lse is stored

    // Heads that share a kv head.
    __device__ __forceinline__ int group() const { return heads / kv_heads; }
    __device__ __forceinline__ int sequences() const { return indices ? batch * query_tokens : batch; }
    // Query rows that share a kv head of a sequence.
    __device__ __forceinline__ int rows() const { return indices ? group() : query_tokens * group(); }
};

// A row of the metadata. It may be the caller's own, so every number is brought into its range.
struct Part {
    int first, first_block; // the first sequence, and the first block of it
    int last, last_block;   // the last sequence, and the end of its blocks
    int split;              // visits of other parts to the first sequence before

    __device__ __forceinline__ Part(const Params& p, int part) {
        const int* const row = p.metadata + part * 8ll;
        constexpr int MOST = 1 << 24;
        const int4 visits = *reinterpret_cast<const int4*>(row);
        first = max(visits.x, 0), first_block = min(max(visits.y, 0), MOST);
        last = min(visits.z, p.sequences() - 1), last_block = min(max(visits.w, 0), MOST);
        split = row[4];
        if (visits.x < 0 || first >= p.sequences()) last = first - 1;
    }
};

// A visit of a part to a sequence.
struct Visit {
    int sequence;
    int batch, token;       // the sequence's query token; without `indices` its first one
    int length, begin, end; // tokens of the sequence, and those of the visit
    int before, splits;     // visits to the sequences before, and to this one
    bool whole;             // the block table has room for every token

    // Only the queries.
    __device__ __forceinline__ Visit(const Params& p, int sequence) : sequence(sequence) {
        batch = p.indices ? sequence / p.query_tokens : sequence;
        token = p.indices ? sequence - batch * p.query_tokens : 0;
    }

    __device__ __forceinline__ Visit(const Params& p, const Part& part, int sequence) : Visit(p, sequence) {
        before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        const int wanted = p.indices ? p.topk : max(p.lengths[sequence], 0);
        // At most 2^30 tokens, which are counted in 32 bits.
        const int capacity = int(min(p.indices ? p.topk : (long long)p.max_pages * p.page_size, 1ll << 30));
        whole = wanted <= capacity, length = min(wanted, capacity);
        begin = sequence == part.first ? part.first_block * BLOCK_TOKENS : 0;
        end = sequence == part.last ? min(part.last_block * BLOCK_TOKENS, length) : length;
    }
};
