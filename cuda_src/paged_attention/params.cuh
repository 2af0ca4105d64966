// The parameters of the attention kernels.
#pragma once

constexpr int UNIT_TOKENS = 64; // of the plan

enum Layout {
    // Keys [blocks, kv_heads, head_dim / x, block_size, x] with x elements in 16 bytes, values [blocks, kv_heads,
    // head_dim, block_size].
    VLLM,
    // Both [blocks, block_size, kv_heads, head_dim].
    FLASH,
};

struct Params {
    const void* query;        // [seqs, query_tokens, heads, head_dim]  T
    const char* keys;         // CACHE
    const char* values;       // CACHE
    const int* tables;        // [seqs, max_blocks]
    const int* lengths;       // [seqs]
    const float* slopes;      // [heads], may be null
    const float* sinks;       // [heads], may be null
    const float* key_scale;   // [1], may be null
    const float* value_scale; // [1], may be null
    void* out;                // [seqs, query_tokens, heads, head_dim]  T
    float* lse;               // [seqs, query_tokens, heads], may be null
    void* partial;            // [slots, head_dim]: outputs of a part of the tokens, float32, or T if `narrow`
    float* maxima;            // [slots], in powers of 2, or natural if `narrow`
    float* sums;              // [slots]: sum of exp(score - maximum)
    int* taken;               // [1]: pieces taken beyond the first of each block; 0 at the start
    int* arrived;             // [items]: pieces done; 0 at the start
    long long query_seq, query_token, query_head; // strides in elements
    long long key_block, key_token, key_head;     // strides in bytes; VLLM has none between tokens
    long long value_block, value_token, value_head;
    long long table_row;
    int seqs, query_tokens, heads, kv_heads, head_dim;
    int group, row_blocks; // heads / kv_heads, and blocks of ROWS rows of a kv head: divisions take their time
    int blocks, block_size, max_blocks;
    int window;     // 0: none
    int split;      // tokens of a piece, a multiple of UNIT_TOKENS; 0: plan
    int least;      // units of a piece, at least
    int rows;       // of a partial result: of those that share a kv head at most ROWS
    int max_splits; // of `partial`, if `narrow`
    int narrow;     // vLLM's workspace: partial results [seqs, heads, max_splits] in T, also of items in one piece
    int sparse_local, sparse_stride, sparse_size, sparse_head_step, sparse_rank; // sparse_stride 0: dense
    float scale;   // with the key scale, if that is a number
    float softcap; // 0: none
    float out_scale;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
