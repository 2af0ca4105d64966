// Code that the kernels of varlen_attention share: the parameters, the keys of a sequence, the tiles of queries, and
// the online softmax.
//
// A tile has the queries of consecutive tokens of one sequence, for `pack` heads that share a kv head. Row
// `token * pack + head` of a tile is one query. A tile therefore loads a key once for its `pack` heads.
//
// Query i of a sequence with n queries and m keys has the position m - n + i. It sees (attends to) the keys of its
// window: the positions from `position - left` to `position + right`. Causal attention has right = 0.
#pragma once
#include "common/warp.cuh"

constexpr int UNLIMITED = 1 << 30; // of `left` and `right`: no limit

struct Params {
    const char* q;           // T [tokens, heads, dim]
    const char* k;           // T [rows, kv_heads, dim], or with a block table [pages, page_size, kv_heads, dim]
    const char* v;           // T like k, with dim_v
    char* out;               // T [tokens, heads, dim_v], contiguous
    float* lse;              // [heads, tokens], or null
    const void* sinks;       // [heads], or null
    const int* cu_seqlens_q; // [sequences + 1]
    const int* cu_seqlens_k; // [sequences + 1], or null
    const int* seqused_k;    // [sequences], or null
    const int* block_table;  // [sequences, max_pages], or null
    long long table_stride;  // elements between the rows of block_table
    long long q_strides[2];  // bytes between tokens, and between heads
    long long k_strides[3];  // bytes between tokens, between heads, and between pages
    long long v_strides[3];
    int tokens;
    int rows;      // rows of k and v, or pages
    int page_size; // tokens of a page
    int max_pages;
    int sequences;
    int heads;
    int group; // heads that share a kv head
    int pack;  // heads of a tile, a divisor of `group`
    int dim, dim_v;
    int left, right;
    int sink_type; // 0 float32, 1 bfloat16, 2 float16
    // A weight of the softmax is 2^score. A product of q and k times this is its score: softmax scale * log2(e), or 1
    // with a softcap, because `capped` returns a score.
    float scale;
    float cap;        // softcap * log2(e), or 0
    float cap_factor; // softmax scale / softcap * 2 * log2(e)
};

// Return the first row of sequence s. The array may contain invalid values, so the row is clamped to the range 0 to
// `rows`. Sequence 0 always begins at row 0.
__device__ __forceinline__ int begin_of(const int* cu_seqlens, int s, int rows) {
    return s == 0 ? 0 : min(max(__ldg(cu_seqlens + s), 0), rows);
}

// The keys of a sequence.
struct Keys {
    int begin = 0; // first row of k and v; 0 with a block table
    int count = 0;
    bool is_invalid = false; // the block table has no room for the length

    // Rows after the last sequence have no keys.
    __device__ __forceinline__ Keys(const Params& p, int s) {
        if (s >= p.sequences) return;
        if (p.block_table) {
            count = p.seqused_k ? __ldg(p.seqused_k + s) : __ldg(p.cu_seqlens_k + s + 1) - __ldg(p.cu_seqlens_k + s);
            const int room = int(min((long long)p.max_pages * p.page_size, (long long)UNLIMITED));
            is_invalid = count > room;
            count = min(max(count, 0), room);
        } else {
            begin = begin_of(p.cu_seqlens_k, s, p.rows);
            count = max(begin_of(p.cu_seqlens_k, s + 1, p.rows) - begin, 0);
            if (p.seqused_k) count = min(count, max(__ldg(p.seqused_k + s), 0));
        }
    }
};

// A tile of queries, and the keys that its queries see.
struct Tile {
    int sequence, first_head;
    int first, tokens; // first row of q, and number of tokens
    int keys_begin;    // first row of k and v; 0 with a block table
    int keys;          // keys of the sequence
    int low, high;     // token i of the tile sees the keys low + i ... min(high + i, keys) - 1
    int begin, end;    // the keys that at least one token of the tile sees
    int invalid;       // the sequence does not fit in its block table

    // `position`: index of the tile's first token in sequence s, which has the rows first_row ... end_row - 1 of q.
    __device__ __forceinline__ void set(const Params& p, int s, int head, int first_row, int end_row, int position,
                                        int tile_tokens) {
        const Keys of_sequence(p, s);
        sequence = s, first_head = head;
        first = first_row + position, tokens = min(end_row - first, tile_tokens);
        keys_begin = of_sequence.begin, keys = of_sequence.count, invalid = of_sequence.is_invalid;
        // A query further than UNLIMITED before the first key sees no key.
        const int place = max(keys - (end_row - first_row) + position, -UNLIMITED);
        low = p.left >= UNLIMITED ? -UNLIMITED : place - p.left;
        high = p.right >= UNLIMITED ? keys : place + p.right + 1;
        begin = max(low, 0), end = min(keys, max(high + tokens - 1, 0));
        if (end <= begin) begin = end = 0;
    }

    // Return whether token `token` of the tile sees a key of the sequence.
    __device__ __forceinline__ bool sees(int token, int key) const {
        return key < min(keys, high + token) && key >= low + token;
    }
};

// Return the tile of block (blockIdx.x, blockIdx.y) of a grid of (tokens / tile_tokens + sequences + 1, heads / pack)
// blocks. Its `tokens` is at most 0 if the block has nothing to do.
//
// Each sequence begins a new tile of `tile_tokens` tokens. The first tile of sequence s has index cu_seqlens_q[s] /
// tile_tokens + s. A sequence of n tokens thus gets at least the ceil(n / tile_tokens) indices that it needs, and at
// most one more. The host therefore does not read the lengths, and a captured CUDA graph is valid for all lengths. Rows
// after the last sequence are one more sequence without keys, so their results are 0.
__device__ __forceinline__ Tile tile_of_block(const Params& p, int tile_tokens) {
    // The sequence is the last one whose first tile is not after this block's. In each iteration the 32 lanes of a warp
    // test 32 equally spaced candidates.
    const int index = blockIdx.x;
    int s = 0, count = p.sequences + 1; // the result is in s ... s + count - 1
    while (count > 1) {
        const int step = (count + 31) / 32, place = int(threadIdx.x % 32) * step;
        const bool before =
            place < count && begin_of(p.cu_seqlens_q, s + place, p.tokens) / tile_tokens + s + place <= index;
        const int last = max(__popc(__ballot_sync(FULL_WARP, before)) - 1, 0) * step;
        s += last, count = min(step, count - last);
    }
    const int begin = begin_of(p.cu_seqlens_q, s, p.tokens);
    const int end = s < p.sequences ? begin_of(p.cu_seqlens_q, s + 1, p.tokens) : p.tokens;
    const int position = (index - (begin / tile_tokens + s)) * tile_tokens;
    Tile tile;
    tile.set(p, s, blockIdx.y * p.pack, begin, end, position, tile_tokens);
    if (position < 0) tile.tokens = 0; // cu_seqlens_q decreases
    return tile;
}

// The rows of keys, or of values, of a kv head of a sequence.
struct Rows {
    const char* const base;
    const long long (&strides)[3];
    const int* const table; // of the sequence, or null
    const int page_size, pages;

    __device__ __forceinline__ Rows(const Params& p, const Tile& tile, const char* array, const long long (&strides)[3])
        : base(array + tile.first_head / p.group * strides[1] + tile.keys_begin * strides[0]), strides(strides),
          table(p.block_table ? p.block_table + tile.sequence * p.table_stride : nullptr), page_size(p.page_size),
          pages(p.rows) {}

    // Return the address of a key, or null if its page is not in the cache.
    __device__ __forceinline__ const char* at(int key) const {
        if (!table) return base + key * strides[0];
        const int page = __ldg(table + key / page_size);
        if (unsigned(page) >= unsigned(pages)) return nullptr;
        return base + page * strides[2] + key % page_size * strides[0];
    }
};

// Return a head's sink times log2(e).
__device__ __forceinline__ float sink_of(const Params& p, int head) {
    const float sink = p.sink_type == 0   ? static_cast<const float*>(p.sinks)[head]
                       : p.sink_type == 1 ? to_float(static_cast<const __nv_bfloat16*>(p.sinks)[head])
                                          : to_float(static_cast<const __half*>(p.sinks)[head]);
    return sink * LOG2_E;
}

// Apply softcap to a product of q and k, as cap * tanh(x) = cap - 2 cap / (exp(2 x) + 1).
__device__ __forceinline__ float capped(const Params& p, float product) {
    return fmaf(-2.f * p.cap, fast_reciprocal(fast_exp2(product * p.cap_factor) + 1.f), p.cap);
}

// Return the score with base 2 of a product of q and k.
__device__ __forceinline__ float score_of(const Params& p, float product) {
    return p.cap != 0.f ? capped(p, product) : product * p.scale;
}

// The end of a row's softmax: the factor that normalizes the sums, and the lse.
struct Normal {
    float factor, lse;

    // `largest`: the largest score, or the reference of attention_wgmma, which is at most MARGIN below it. `total`: the
    // sum of 2^(score - largest). Scores and `sink` have base 2.
    __device__ __forceinline__ Normal(float largest, float total, bool has_sink, float sink) {
        constexpr float LN_2 = 0.693147180559945309f;
        const bool is_empty = total == 0.f && largest == -CUDART_INF_F;
        const float highest = has_sink ? fmaxf(largest, sink) : largest;
        if (has_sink && highest > -CUDART_INF_F) {
            const float weight = is_empty ? 0.f : fast_exp2(largest - highest);
            const float sum = fmaf(total, weight, fast_exp2(sink - highest));
            factor = weight * fast_reciprocal(sum);
            lse = (highest + fast_log2(sum)) * LN_2;
        } else {
            factor = is_empty ? 0.f : fast_reciprocal(total);
            lse = is_empty ? -CUDART_INF_F : (largest + fast_log2(total)) * LN_2;
        }
    }
};

// The online softmax of a row (Milakov and Gimelshein, 2018). `largest` is the largest score so far, and a weight is
// 2^(score - largest). `total` is the sum of the weights. Before the first visible key the largest score is -inf, and
// the weights are 0.
struct Softmax {
    float largest = -CUDART_INF_F, total = 0.f;

    // Return the offset that is subtracted from the scores: the largest score, or 0 if that is -inf, because
    // subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ float offset() const { return largest == -CUDART_INF_F ? 0.f : largest; }

    // Raise `largest` to `most`, the maximum of the new scores, if `most` is larger. Return the factor that rescales
    // the earlier weights and sums.
    __device__ __forceinline__ float raise_to(float most) {
        const float before = largest;
        largest = fmaxf(largest, most);
        const float factor = fast_exp2(before - offset()); // 0 for the first scores
        total *= factor;
        return factor;
    }

    // Return the weight of a score, and add it to the total.
    __device__ __forceinline__ float weigh(float score) {
        const float weight = fast_exp2(score - offset());
        total += weight;
        return weight;
    }
};
