// The arguments of latent attention, and its work as the plan cuts it: into parts, and these into visits.
#pragma once

constexpr int BLOCK_TOKENS = 64; // of the plan

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Params {
    const void* q;          // [batch, query_tokens, heads, head_dim]  T
    const void* cache;      // [pages, page_size, kv_heads, head_dim]  T, or [..., 656] bytes
    const int* block_table; // [batch, max_pages]
    const int* lengths;     // [batch]
    const int* indices;     // [batch, query_tokens, topk], may be null
    const float* sinks;     // [heads], may be null
    const int* metadata;    // [parts, 8]
    const int* splits;      // [sequences + 1]
    void* out;              // [batch, query_tokens, heads, head_dim_v]  T
    float* lse;             // [batch, heads, query_tokens]
    // What the visits to a sequence found, where there are several: slot 2 (splits[sequence] - sequence) + split.
    float* partial_out;     // [2 parts, kv_heads, rows, head_dim_v], divided by the row's sum
    float* partial_lse;     // [2 parts, kv_heads, rows], in powers of 2; -inf for no token, NaN for a row that is NaN
    long long q_strides[3]; // batch, token, head; elements
    long long cache_strides[3]; // page, token, head; elements, bytes if 8 bits
    long long table_stride;
    long long indices_strides[2]; // batch, token
    int batch, query_tokens, heads, kv_heads, head_dim, head_dim_v;
    int pages, page_size, max_pages, topk, causal, parts;
    float scale_log2;

    __device__ __forceinline__ int group() const { return heads / kv_heads; }
    __device__ __forceinline__ int sequences() const { return indices ? batch * query_tokens : batch; }
    // That share a kv head of a sequence.
    __device__ __forceinline__ int rows() const { return indices ? group() : query_tokens * group(); }
};

// A row of the metadata, with every number in its range whatever the plan holds.
struct Part {
    int first, first_block, last, last_block, split;

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

// The tokens [begin, end) of a sequence, as one part sees them.
struct Visit {
    int sequence, batch, token; // of the query: the only one if sparse, else the first
    int length, begin, end;
    int before, splits; // visits to the sequences before, and to this one
    bool whole;         // there is room for every token

    // Which queries.
    __device__ __forceinline__ Visit(const Params& p, int sequence) : sequence(sequence) {
        batch = p.indices ? sequence / p.query_tokens : sequence;
        token = p.indices ? sequence - batch * p.query_tokens : 0;
    }

    __device__ __forceinline__ Visit(const Params& p, const Part& part, int sequence) : Visit(p, sequence) {
        before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        const int wanted = p.indices ? p.topk : max(p.lengths[sequence], 0);
        // Tokens are counted in 32 bits.
        const int capacity = int(min(p.indices ? p.topk : (long long)p.max_pages * p.page_size, 1ll << 30));
        whole = wanted <= capacity, length = min(wanted, capacity);
        begin = sequence == part.first ? part.first_block * BLOCK_TOKENS : 0;
        end = sequence == part.last ? min(part.last_block * BLOCK_TOKENS, length) : length;
    }
};
