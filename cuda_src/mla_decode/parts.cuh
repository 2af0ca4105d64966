// The arguments of latent attention, and its work as the plan cuts it: into parts, and these into visits.
//
// The query rows of a (sequence, kv head) are its query tokens times the heads of a group, so that the cache is read once
// for all of them. With `indices` every query token is a sequence of its own. Sequences are cut into blocks of 64 tokens,
// which `plan_parts` deals out to parts; the blocks of threads with blockIdx.z == i do part i. A part visits one sequence
// after the other: the first from some block on, the last up to some block. What several parts found of a sequence is
// put together by `combine_parts`.
//
// Token t of a sequence is slot t % page_size of page block_table[sequence, t / page_size], or the slot `indices` names,
// counted over all pages. Where a flag EXTRA holds, only the first `topk_lengths` of the indices count, and tokens of a
// second cache come after them; else nothing looks at either.
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
    // With EXTRA. Null where there is no such array; without a second cache extra_topk is 0.
    const int* topk_lengths;  // [batch], of `indices`
    const void* extra_cache;  // [extra_pages, extra_page_size, kv_heads, ...], like `cache`
    const int* extra_indices; // [batch, query_tokens, extra_topk]
    const int* extra_topk_lengths;
    long long extra_strides[3];         // like cache_strides
    long long extra_indices_strides[2]; // batch, token
    int extra_pages, extra_page_size, extra_topk;

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

// How many of the `topk` indices of a sequence of `batch` count.
__device__ __forceinline__ int counted(const int* lengths, int batch, int topk) {
    return lengths ? min(max(lengths[batch], 0), topk) : topk;
}

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

// The same with EXTRA.
template <bool EXTRA> struct VisitOf : Visit {
    using Visit::Visit;
};
template <> struct VisitOf<true> : Visit {
    __device__ __forceinline__ VisitOf(const Params& p, const Part& part, int sequence) : Visit(p, sequence) {
        before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        const int wanted = counted(p.topk_lengths, batch, p.topk) + counted(p.extra_topk_lengths, batch, p.extra_topk);
        whole = wanted <= 1 << 30, length = min(wanted, 1 << 30);
        begin = sequence == part.first ? part.first_block * BLOCK_TOKENS : 0;
        end = sequence == part.last ? min(part.last_block * BLOCK_TOKENS, length) : length;
    }
};

// The bytes of a token of an 8-bit cache by the dimensions of its heads.
//
// 656, for 576 dimensions: 512 numbers of a byte, a float32 scale for each 128 of them, 64 rotary numbers in bfloat16, which
// belong to no value. 584, for 512 dimensions, all of which are value: a page has first all tokens, each of 448 numbers of
// a byte and 64 rotary ones in bfloat16; then for each token 7 scales of a byte, powers of two (E8M0) for 64 numbers each,
// and a byte of no meaning.
constexpr int BYTES_OF_576 = 656, BYTES_OF_512 = 584;
constexpr int PAGED_BYTES = 576, PAGED_SCALES = 8; // of a token in the two parts of a page of the latter
constexpr int PAGED_LATENT = 448;                  // where the rotary part begins

// A power of two of 8 bits.
__device__ __forceinline__ float of_e8m0(unsigned byte) {
    return __uint_as_float(byte == 0 ? 0x400000 : byte == 255 ? 0x7fc00000 : byte << 23);
}

// A token that `indices` name in the first cache or the second, and what must be known of that cache.
struct Place {
    const char* cache;
    long long strides[3];
    int pages, page_size;

    __device__ __forceinline__ Place(const Params& p, bool second)
        : cache(static_cast<const char*>(second ? p.extra_cache : p.cache)), pages(second ? p.extra_pages : p.pages),
          page_size(second ? p.extra_page_size : p.page_size) {
#pragma unroll
        for (int i = 0; i < 3; ++i) strides[i] = second ? p.extra_strides[i] : p.cache_strides[i];
    }
    __device__ __forceinline__ bool has(int slot) const { return slot >= 0 && slot < (long long)pages * page_size; }

    // The address of a slot that is there, in a cache with numbers of ITEM bytes.
    template <int ITEM> __device__ __forceinline__ const char* at(int slot, int kv_head) const {
        const int page = unsigned(slot) / unsigned(page_size), place = slot - page * page_size;
        return cache + (page * strides[0] + place * strides[1] + kv_head * strides[2]) * ITEM;
    }

    // The same in pages of two parts, and the address of the scales.
    __device__ __forceinline__ const char* in_two_parts(int slot, const char*& scales) const {
        const int page = unsigned(slot) / unsigned(page_size), place = slot - page * page_size;
        const char* const from = cache + page * strides[0];
        scales = from + page_size * (long long)PAGED_BYTES + place * (long long)PAGED_SCALES;
        return from + place * (long long)PAGED_BYTES;
    }
};

// What `indices` or `extra_indices` say of the i-th token of a sequence. The tokens of the first cache are counted anew each
// time: their number would take a register while tiles are computed.
struct Index {
    int slot;
    bool second; // of the second cache

    __device__ __forceinline__ Index(const Params& p, int sequence, int i) {
        const Visit which(p, sequence);
        const int own = counted(p.topk_lengths, which.batch, p.topk);
        second = i >= own;
        const long long* const strides = second ? p.extra_indices_strides : p.indices_strides;
        const int* const indices = second ? p.extra_indices : p.indices;
        slot = indices[which.batch * strides[0] + which.token * strides[1] + (second ? i - own : i)];
    }
};
