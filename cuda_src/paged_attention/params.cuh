// Define the parameters of `attend` and `attend_scalar`. T: type of the query and the output. CACHE: type of the cache.
#pragma once

constexpr int UNIT_TOKENS = 64; // KV splits are multiples of a unit

enum Layout {
    // Keys [blocks, kv_heads, head_dim / x, block_size, x], where x elements are 16 bytes; values [blocks, kv_heads,
    // head_dim, block_size].
    VLLM,
    // Keys and values [blocks, block_size, kv_heads, head_dim].
    FLASH,
};

// The assignment of work items (a sequence, a kv head and a block of rows) to thread blocks.
enum Scheduling {
    QUEUE,    // blocks take KV splits from a queue
    CLUSTERS, // each item has a cluster of blocks, or one block
    EITHER,   // CLUSTERS or QUEUE, chosen on the device from the lengths
};

struct Params {
    const void* query;        // [seqs, query_tokens, heads, head_dim]  T
    const char* keys;         // in its layout  CACHE
    const char* values;       // in its layout  CACHE
    const int* tables;        // [seqs, max_blocks]
    const int* lengths;       // [seqs]
    const float* slopes;      // [heads], ALiBi, may be null
    const float* sinks;       // [heads], may be null
    const float* key_scale;   // [1], may be null
    const float* value_scale; // [1], may be null
    void* out;                // [seqs, query_tokens, heads, head_dim]  T
    float* lse;               // [seqs, query_tokens, heads], may be null
    void* partial;            // [slots, head_dim]: in float32, or in T if `vllm_workspace`
    float* maxima;            // [slots]: times log2(e) unless `vllm_workspace`
    float* sums;              // [slots]: sum of exp(score - maximum)
    int* taken;               // [1]: splits taken from the queue after the first split of each block; 0 at the start
    int* arrived;             // [items]: finished splits; 0 at the start
    long long query_seq, query_token, query_head; // in elements
    long long key_block, key_token, key_head;     // in bytes; layout VLLM has no key_token, value_token
    long long value_block, value_token, value_head;
    long long table_row; // in elements
    int seqs, query_tokens, heads, kv_heads, head_dim;
    int group;      // heads / kv_heads
    int row_blocks; // per kv head
    int blocks;     // of the cache
    int block_size, max_blocks;
    int window;         // 0: no window
    int split;          // tokens of a split, a multiple of UNIT_TOKENS; 0: `SplitScheduler::plan` decides
    int min_units;      // of a split
    int rows;           // of a partial result
    int max_splits;     // partial results of a row, if `vllm_workspace`
    int vllm_workspace; // partial results are [seqs, heads, max_splits] in T, even for items with one split
    // vLLM's block-sparse pattern; sparse_stride == 0: dense attention
    int sparse_local, sparse_stride, sparse_size, sparse_head_step, sparse_rank;
    float scale;     // includes a key scale that is a number
    float softcap;   // 0: no softcap
    float out_scale; // a value scale that is a number, else 1
    int shares;      // blocks of the queue, each with an equal share of the tokens
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
