// The arguments of latent attention, and the parts and visits that its work is divided into.
//
// Each pair of a sequence and a kv head has one query row per query token and head of the group. All of these rows
// attend to the same tokens, so the tokens are read once for all of them. With `indices` every query token counts as a
// sequence of its own, because it has its own list of tokens.
//
// Sequences are cut into token blocks of 64 tokens, and `plan_parts` assigns the token blocks to parts. A part is the
// work of the thread blocks with the same blockIdx.z. It covers consecutive sequences, and may begin and end in the
// middle of a sequence. A visit is the work of one part on one sequence. If several parts visit a sequence, each stores
// a partial result, and `combine_parts` merges the partial results.
//
// Token t of a sequence is in slot t % page_size of page block_table[sequence, t / page_size]. With `indices` it is in
// slot indices[..., t], where slots are numbered over all pages. The template flag EXTRA adds two features.
// `topk_lengths` may limit the number of indices that are used, and the tokens of a second cache (`extra_cache`) may
// follow the tokens of the first.
#pragma once

constexpr int BLOCK_TOKENS = 64; // tokens of a token block, the unit of the plan

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The arguments of the attention kernels and of combine_parts. T is the element type of the queries and the results.
struct Params {
    const void* q;          // [batch, query_tokens, heads, head_dim]  T
    const void* cache;      // [pages, page_size, kv_heads, head_dim]  T, or [..., 656] bytes
    const int* block_table; // [batch, max_pages]
    const int* lengths;     // [batch]
    const int* indices;     // [batch, query_tokens, topk]; null: all tokens of the block table
    const float* sinks;     // [heads], may be null
    const int* metadata;    // [parts, 8], see Part
    const int* splits;      // [sequences + 1]: splits[i] is the number of visits to sequences 0 ... i - 1
    void* out;              // [batch, query_tokens, heads, head_dim_v]  T
    float* lse;             // [batch, heads, query_tokens]
    // Partial results of the sequences that several parts visit. The i-th visit to a sequence stores its result in row
    // `2 * (splits[sequence] - sequence) + i`.
    float* partial_out;         // [2 parts, kv_heads, rows, head_dim_v], divided by the row's sum of weights
    float* partial_lse;         // [2 parts, kv_heads, rows], base 2; -inf: no tokens, NaN: an invalid page or slot
    long long q_strides[3];     // batch, token, head; in elements
    long long cache_strides[3]; // page, token, head; in elements (8-bit cache: in bytes)
    long long table_stride;
    long long indices_strides[2]; // batch, token
    int batch, query_tokens, heads, kv_heads, head_dim, head_dim_v;
    int pages, page_size, max_pages, topk, causal, parts;
    float scale_log2; // scale * log2(e): scores are exponents of 2 until lse is stored
    // The members below are used only with EXTRA. An absent array is null, and extra_topk is 0 if there is no second
    // cache.
    const int* topk_lengths;  // [batch], of `indices`
    const void* extra_cache;  // [extra_pages, extra_page_size, kv_heads, ...], like `cache`
    const int* extra_indices; // [batch, query_tokens, extra_topk]
    const int* extra_topk_lengths;
    long long extra_strides[3];         // like cache_strides
    long long extra_indices_strides[2]; // batch, token
    int extra_pages, extra_page_size, extra_topk;

    // Return the number of heads that share a kv head.
    __device__ __forceinline__ int group() const { return heads / kv_heads; }
    __device__ __forceinline__ int sequences() const { return indices ? batch * query_tokens : batch; }
    // Return the number of query rows that share a kv head of a sequence.
    __device__ __forceinline__ int rows() const { return indices ? group() : query_tokens * group(); }
};

// One row of the metadata, which describes the token blocks of a part. The metadata may come from the caller, so every
// entry is clamped to its valid range.
struct Part {
    int first, first_block; // first sequence, and the first token block in it
    int last, last_block;   // last sequence, and the end (exclusive) of the token blocks in it
    int split;              // number of earlier parts that visit the first sequence

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

// Return the number of indices of a batch entry that are used, clamped to 0 ... topk.
__device__ __forceinline__ int counted(const int* lengths, int batch, int topk) {
    return lengths ? min(max(lengths[batch], 0), topk) : topk;
}

// A visit: the work of one part on one sequence.
struct Visit {
    int sequence;
    int batch, token;       // batch entry, and query token (0 without `indices`)
    int length, begin, end; // tokens of the sequence; first token and end (exclusive) of the visit
    int before, splits;     // number of visits to all earlier sequences; number of visits to this sequence
    bool whole;             // whether the block table covers every token

    // Set only `sequence`, `batch` and `token`, which suffice to find the queries.
    __device__ __forceinline__ Visit(const Params& p, int sequence) : sequence(sequence) {
        batch = p.indices ? sequence / p.query_tokens : sequence;
        token = p.indices ? sequence - batch * p.query_tokens : 0;
    }

    __device__ __forceinline__ Visit(const Params& p, const Part& part, int sequence) : Visit(p, sequence) {
        before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        const int wanted = p.indices ? p.topk : max(p.lengths[sequence], 0);
        // The capacity is limited to 2^30 tokens, because token indices are 32-bit integers.
        const int capacity = int(min(p.indices ? p.topk : (long long)p.max_pages * p.page_size, 1ll << 30));
        whole = wanted <= capacity, length = min(wanted, capacity);
        begin = sequence == part.first ? part.first_block * BLOCK_TOKENS : 0;
        end = sequence == part.last ? min(part.last_block * BLOCK_TOKENS, length) : length;
    }
};

// A Visit. With EXTRA its `length` is the number of tokens in both caches together.
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

// Bytes per token of an 8-bit cache.
//
// With heads of 576 dimensions a token has 656 bytes: 512 e4m3 elements, a float32 scale per 128 of them, and 64 rotary
// elements in bfloat16. The rotary elements are not part of the value.
//
// With heads of 512 dimensions a token has 584 bytes, and all dimensions are part of the value. A page has two areas.
// The first area stores 448 e4m3 elements and 64 rotary elements in bfloat16 per token. The second area stores 8 bytes
// per token: 7 scales and an unused byte. A scale is a power of two (E8M0) for 64 elements.
constexpr int BYTES_OF_576 = 656, BYTES_OF_512 = 584;
constexpr int PAGED_BYTES = 576, PAGED_SCALES = 8; // bytes per token in the first and the second area
constexpr int PAGED_LATENT = 448;                  // byte offset of a token's rotary elements in the first area

// Decode an E8M0 scale, 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float of_e8m0(unsigned byte) {
    return __uint_as_float(byte == 0 ? 0x400000 : byte == 255 ? 0x7fc00000 : byte << 23);
}

// The address and layout of the first or the second cache. Slots are numbered over all pages, as in `indices`.
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

    // Return the address of a valid slot. ITEM is the size of a cache element in bytes.
    template <int ITEM> __device__ __forceinline__ const char* at(int slot, int kv_head) const {
        const int page = unsigned(slot) / unsigned(page_size), place = slot - page * page_size;
        return cache + (page * strides[0] + place * strides[1] + kv_head * strides[2]) * ITEM;
    }

    // Return the address of a valid slot in a cache whose pages have two areas (584 bytes per token). Set `scales` to
    // the address of the token's scales.
    __device__ __forceinline__ const char* in_two_parts(int slot, const char*& scales) const {
        const int page = unsigned(slot) / unsigned(page_size), place = slot - page * page_size;
        const char* const from = cache + page * strides[0];
        scales = from + page_size * (long long)PAGED_BYTES + place * (long long)PAGED_SCALES;
        return from + place * (long long)PAGED_BYTES;
    }
};

// The slot of the i-th token of a sequence, from `indices` or `extra_indices`. The number of tokens in the first cache
// is computed at each use, because storing it would occupy a register in the mainloop.
struct Index {
    int slot;
    bool second; // whether the slot is in the second cache

    __device__ __forceinline__ Index(const Params& p, int sequence, int i) {
        const Visit which(p, sequence);
        const int own = counted(p.topk_lengths, which.batch, p.topk);
        second = i >= own;
        const long long* const strides = second ? p.extra_indices_strides : p.indices_strides;
        const int* const indices = second ? p.extra_indices : p.indices;
        slot = indices[which.batch * strides[0] + which.token * strides[1] + (second ? i - own : i)];
    }
};
