// The parameters of `attend` and `attend_scalar`, and how work is distributed. T is the element type of the query and
// the output, and CACHE is the element type of the cache.
#pragma once

constexpr int UNIT_TOKENS = 64; // tokens of a unit; sequences are cut into pieces of whole units

enum Layout {
    // Keys [blocks, kv_heads, head_dim / x, block_size, x], where x elements are 16 bytes; values [blocks, kv_heads,
    // head_dim, block_size].
    VLLM,
    // Keys and values [blocks, block_size, kv_heads, head_dim].
    FLASH,
};

// How work items are distributed over thread blocks. A work item is one block of rows of a sequence and a kv head.
enum Dealing {
    QUEUE,    // blocks take pieces of items from a queue
    CLUSTERS, // each item has a cluster of blocks, or one block
    EITHER,   // CLUSTERS or QUEUE, chosen on the device from the lengths (ItemsOrQueue, BlockItem)
};

struct Params {
    const void* query;        // [seqs, query_tokens, heads, head_dim]  T
    const char* keys;         // the cache, in its layout  CACHE
    const char* values;       // the cache, in its layout  CACHE
    const int* tables;        // [seqs, max_blocks]: block ids
    const int* lengths;       // [seqs]: tokens in the cache
    const float* slopes;      // [heads]: ALiBi slopes, may be null
    const float* sinks;       // [heads], may be null
    const float* key_scale;   // [1], may be null
    const float* value_scale; // [1], may be null
    void* out;                // [seqs, query_tokens, heads, head_dim]  T
    float* lse;               // [seqs, query_tokens, heads], may be null
    void* partial;            // [slots, head_dim]: outputs of pieces, in float32, or in T if `vllm_workspace`
    float* maxima;            // [slots]: largest score of each piece, times log2(e) unless `vllm_workspace`
    float* sums;              // [slots]: sum of exp(score - maximum) of pieces
    int* taken;               // [1]: pieces taken from the queue after the first piece of each block; 0 at the start
    int* arrived;             // [items]: finished pieces of each item; 0 at the start
    long long query_seq, query_token, query_head; // strides in elements
    long long key_block, key_token, key_head;     // strides in bytes; layout VLLM has no key_token, value_token
    long long value_block, value_token, value_head;
    long long table_row; // stride in elements
    int seqs, query_tokens, heads, kv_heads, head_dim;
    int group;      // heads / kv_heads
    int row_blocks; // ceil(group * query_tokens / a team's rows): blocks of rows of a kv head
    int blocks;     // blocks of the cache
    int block_size, max_blocks;
    int window;         // tokens that a row attends to; 0: no window
    int split;          // tokens of a piece, a multiple of UNIT_TOKENS; 0: `Pieces::plan` decides
    int min_units;      // smallest size of a piece
    int rows;           // rows of a partial result: min(rows of a team, group * query_tokens)
    int max_splits;     // partial results of a row in `partial`, if `vllm_workspace`
    int vllm_workspace; // partial results are [seqs, heads, max_splits] in T, even for items with one piece
    // vLLM's block-sparse pattern; sparse_stride == 0 means dense attention
    int sparse_local, sparse_stride, sparse_size, sparse_head_step, sparse_rank;
    float scale;     // softmax scale; includes the key scale if the host passes that as a number
    float softcap;   // 0: no softcap
    float out_scale; // the value scale if the host passes it as a number, else 1
    int shares;      // blocks that take pieces from the queue; the tokens are divided into this many equal shares
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
