// Define the arguments of latent attention, and divide its work into SM parts and splits.
//
// The query rows of a kv head (one per query token and head of the group) attend to the same tokens. With `indices`
// every query token has its own list of tokens, and counts as a sequence.
//
// An SM part is the work of the thread blocks with the same blockIdx.z: consecutive blocks of 64 tokens, which may
// continue from one sequence into the next (`plan_parts`). A split is the range of a sequence's tokens in one SM part.
// If a sequence has several splits, each stores a partial result, and `combine_parts` merges them.
//
// Token t of a sequence is in slot t % page_size of page block_table[sequence, t / page_size], or with `indices` in
// slot indices[..., t], where slots are numbered over all pages. EXTRA: `topk_lengths` may limit the indices, and the
// tokens of a second cache may follow.
#pragma once

constexpr int BLOCK_TOKENS = 64;

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// T: type of the queries and results.
struct Params {
    const void* q;          // [batch, query_tokens, heads, head_dim]  T
    const void* cache;      // [pages, page_size, kv_heads, head_dim]  T, or [..., 656] bytes
    const int* block_table; // [batch, max_pages]
    const int* lengths;     // [batch]
    const int* indices;     // [batch, query_tokens, topk]; null: all tokens of the block table
    const float* sinks;     // [heads], may be null
    const int* metadata;    // [parts, 8], see SmPart
    const int* splits;      // [sequences + 1]: number of splits of all earlier sequences
    void* out;              // [batch, query_tokens, heads, head_dim_v]  T
    float* lse;             // [batch, heads, query_tokens]
    // The i-th split of a sequence stores its partial result in row `2 * (splits[sequence] - sequence) + i`.
    float* partial_out;         // [2 parts, kv_heads, rows, head_dim_v], divided by the row's sum
    float* partial_lse;         // [2 parts, kv_heads, rows], base 2; -inf: no tokens, NaN: an invalid page or slot
    long long q_strides[3];     // batch, token, head; in elements
    long long cache_strides[3]; // page, token, head; in elements (8-bit cache: in bytes)
    long long table_stride;
    long long indices_strides[2]; // batch, token
    int batch, query_tokens, heads, kv_heads, head_dim, head_dim_v;
    int pages, page_size, max_pages, topk, causal, parts;
    float scale_log2; // scale * log2(e)
    // Only EXTRA uses these arguments. Without a second cache, extra_topk is 0.
    const int* topk_lengths;  // [batch], number of valid `indices`
    const void* extra_cache;  // [extra_pages, extra_page_size, kv_heads, ...], like `cache`
    const int* extra_indices; // [batch, query_tokens, extra_topk]
    const int* extra_topk_lengths;
    long long extra_strides[3];         // like cache_strides
    long long extra_indices_strides[2]; // batch, token
    int extra_pages, extra_page_size, extra_topk;

    __device__ __forceinline__ int group() const { return heads / kv_heads; }
    __device__ __forceinline__ int sequences() const { return indices ? batch * query_tokens : batch; }
    // Return the number of query rows of a sequence, per kv head.
    __device__ __forceinline__ int rows() const { return indices ? group() : query_tokens * group(); }
};

// A block's range of the work, from a row of the metadata. Every entry is clamped to its valid range, because the
// metadata may come from the caller.
struct SmPart {
    int first_sequence, first_block;
    int last_sequence, end_block; // `end_block` is exclusive
    int first_split;              // earlier SM parts with tokens of the first sequence

    __device__ __forceinline__ SmPart(const Params& p, int sm_part) {
        const int* const row = p.metadata + sm_part * 8ll;
        constexpr int MAX_BLOCKS = 1 << 24;
        const int4 range = *reinterpret_cast<const int4*>(row);
        first_sequence = max(range.x, 0), first_block = min(max(range.y, 0), MAX_BLOCKS);
        last_sequence = min(range.z, p.sequences() - 1), end_block = min(max(range.w, 0), MAX_BLOCKS);
        first_split = row[4];
        if (range.x < 0 || first_sequence >= p.sequences()) last_sequence = first_sequence - 1;
    }
};

__device__ __forceinline__ int clamped_topk(const int* lengths, int batch, int topk) {
    return lengths ? min(max(lengths[batch], 0), topk) : topk;
}

// The tokens of a sequence in one SM part (a block's range of the work).
struct Split {
    int sequence;
    int batch, token;           // `token`: query token, 0 without `indices`
    int length, begin, end;     // tokens of the sequence; tokens [begin, end) of the split
    int earlier_splits, splits; // number of splits of all earlier sequences, and of this sequence
    bool covered;               // whether the block table covers every token

    // Set only the members that locate the queries.
    __device__ __forceinline__ Split(const Params& p, int sequence) : sequence(sequence) {
        batch = p.indices ? sequence / p.query_tokens : sequence;
        token = p.indices ? sequence - batch * p.query_tokens : 0;
    }

    __device__ __forceinline__ Split(const Params& p, const SmPart& sm_part, int sequence) : Split(p, sequence) {
        earlier_splits = p.splits[sequence], splits = p.splits[sequence + 1] - earlier_splits;
        const int wanted = p.indices ? p.topk : max(p.lengths[sequence], 0);
        // Token indices are 32-bit integers, so the capacity is limited to 2^30 tokens.
        const int capacity = int(min(p.indices ? p.topk : (long long)p.max_pages * p.page_size, 1ll << 30));
        covered = wanted <= capacity, length = min(wanted, capacity);
        begin = sequence == sm_part.first_sequence ? sm_part.first_block * BLOCK_TOKENS : 0;
        end = sequence == sm_part.last_sequence ? min(sm_part.end_block * BLOCK_TOKENS, length) : length;
    }
};

// With EXTRA `length` counts the tokens of both caches.
template <bool EXTRA> struct SplitOf : Split {
    using Split::Split;
};
template <> struct SplitOf<true> : Split {
    __device__ __forceinline__ SplitOf(const Params& p, const SmPart& sm_part, int sequence) : Split(p, sequence) {
        earlier_splits = p.splits[sequence], splits = p.splits[sequence + 1] - earlier_splits;
        const int wanted =
            clamped_topk(p.topk_lengths, batch, p.topk) + clamped_topk(p.extra_topk_lengths, batch, p.extra_topk);
        covered = wanted <= 1 << 30, length = min(wanted, 1 << 30);
        begin = sequence == sm_part.first_sequence ? sm_part.first_block * BLOCK_TOKENS : 0;
        end = sequence == sm_part.last_sequence ? min(sm_part.end_block * BLOCK_TOKENS, length) : length;
    }
};

// Layouts of an 8-bit cache.
//
// Heads of 576 dimensions: 656 bytes per token, with 512 e4m3 elements (the value), a float32 scale per 128 elements,
// and 64 rotary elements in bfloat16.
//
// Heads of 512 dimensions, all part of the value: 584 bytes per token, in two areas of a page. The first area has 448
// e4m3 and 64 bfloat16 rotary elements per token. The second area has 8 bytes per token: 7 scales and an unused byte. A
// scale is a power of two (E8M0) for 64 elements.
constexpr int BYTES_OF_576 = 656, BYTES_OF_512 = 584;
constexpr int PAGED_BYTES = 576, PAGED_SCALES = 8; // per token in the first and the second area
constexpr int PAGED_LATENT = 448;                  // byte offset of a token's rotary elements

// Decode 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float of_e8m0(unsigned byte) {
    return __uint_as_float(byte == 0 ? 0x400000 : byte == 255 ? 0x7fc00000 : byte << 23);
}

// The first or the second cache. Slots are numbered over all pages.
struct CacheView {
    const char* cache;
    long long strides[3];
    int pages, page_size;

    __device__ __forceinline__ CacheView(const Params& p, bool second)
        : cache(static_cast<const char*>(second ? p.extra_cache : p.cache)), pages(second ? p.extra_pages : p.pages),
          page_size(second ? p.extra_page_size : p.page_size) {
#pragma unroll
        for (int i = 0; i < 3; ++i) strides[i] = second ? p.extra_strides[i] : p.cache_strides[i];
    }
    __device__ __forceinline__ bool has(int slot) const { return slot >= 0 && slot < (long long)pages * page_size; }

    // ITEM: bytes per cache element.
    template <int ITEM> __device__ __forceinline__ const char* at(int slot, int kv_head) const {
        const int page = unsigned(slot) / unsigned(page_size), slot_in_page = slot - page * page_size;
        return cache + (page * strides[0] + slot_in_page * strides[1] + kv_head * strides[2]) * ITEM;
    }

    // Return the address of a slot of 584 bytes, and set `scales` to the address of its scales.
    __device__ __forceinline__ const char* at_paged(int slot, const char*& scales) const {
        const int page = unsigned(slot) / unsigned(page_size), slot_in_page = slot - page * page_size;
        const char* const from = cache + page * strides[0];
        scales = from + page_size * (long long)PAGED_BYTES + slot_in_page * (long long)PAGED_SCALES;
        return from + slot_in_page * (long long)PAGED_BYTES;
    }
};

// The slot of the i-th token of a sequence, from `indices` or `extra_indices`.
struct Index {
    int slot;
    bool second;

    __device__ __forceinline__ Index(const Params& p, int sequence, int i) {
        const Split query(p, sequence);
        const int first_topk = clamped_topk(p.topk_lengths, query.batch, p.topk);
        second = i >= first_topk;
        const long long* const strides = second ? p.extra_indices_strides : p.indices_strides;
        const int* const indices = second ? p.extra_indices : p.indices;
        slot = indices[query.batch * strides[0] + query.token * strides[1] + (second ? i - first_topk : i)];
    }
};
