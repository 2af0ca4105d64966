// What both forms of the attention share: the parameters, the tile of a sequence that a block has, and the online
// softmax of a row.
//
// Tiles of TILE queries are counted as if each sequence began a new one: of sequence s the first tile is
// cu_seqlens_q[s] / TILE + s. As a sequence of n rows has at most ceil(n / TILE) tiles among these numbers, and at most one
// is left over, tokens / TILE + sequences + 1 blocks are enough whatever the lengths are. So the grid is known without
// reading them on the host, and a graph serves all lengths. Rows after the last sequence are as one more sequence
// that has no keys: they become 0.
//
// Tiles of queries and of keys begin with their sequence, so the bits of a result depend on its own sequence alone.
#pragma once
#include "common/warp.cuh"

struct Params {
    const char* q;           // T [tokens, heads, dim]
    const char* k;           // T [memory_tokens, heads / group, dim]
    const char* v;           // T [memory_tokens, heads / group, dim]
    char* out;               // T [tokens, heads, dim], contiguous
    const int* cu_seqlens_q; // [sequences + 1]
    const int* cu_seqlens_k; // [sequences + 1]
    long long q_strides[2];  // bytes between tokens, and between heads
    long long k_strides[2];
    long long v_strides[2];
    int tokens;
    int memory_tokens;
    int sequences;
    int heads;
    int group; // heads that share a head of keys and values
    int dim;
    int causal;
    float scale; // times log2(e)
};

// The first row of sequence s. Whatever the array holds, it is a row or the end; the first sequence begins at 0.
__device__ __forceinline__ int begin_of(const int* cu_seqlens, int s, int rows) {
    return s == 0 ? 0 : min(max(__ldg(cu_seqlens + s), 0), rows);
}

// The sequence that has a block's tile: the last one whose first tile is not after it, `sequences` for what is left.
// All 32 lanes of a warp look at once, each at one of 32 places that are equally far apart.
template <int TILE> __device__ __forceinline__ int sequence_of(const Params& p, int tile) {
    int first = 0, count = p.sequences + 1; // it is one of the `count` from `first` on
    while (count > 1) {
        const int step = (count + 31) / 32, place = threadIdx.x % 32 * step;
        const bool before =
            place < count && begin_of(p.cu_seqlens_q, first + place, p.tokens) / TILE + first + place <= tile;
        const int last = max(__popc(__ballot_sync(FULL_WARP, before)) - 1, 0) * step;
        first += last, count = min(step, count - last);
    }
    return first;
}

// The queries of a block, and the keys that they attend to.
template <int TILE> struct Part {
    int first, rows; // of q; none: the block has nothing to do
    int keys_begin;  // the first row of k and v
    int keys;        // of the sequence; causal: those that the last query of the tile sees
    int seen;        // causal: query i of the tile sees `seen` + i keys; else at least all

    __device__ __forceinline__ explicit Part(const Params& p) {
        const int tile = blockIdx.x, s = sequence_of<TILE>(p, tile);
        const int begin = begin_of(p.cu_seqlens_q, s, p.tokens);
        const int end = s < p.sequences ? begin_of(p.cu_seqlens_q, s + 1, p.tokens) : p.tokens;
        const int position = (tile - (begin / TILE + s)) * TILE;
        first = begin + position, rows = position < 0 ? 0 : min(end - first, TILE);
        keys_begin = 0, keys = 0;
        if (s < p.sequences) {
            keys_begin = begin_of(p.cu_seqlens_k, s, p.memory_tokens);
            keys = max(begin_of(p.cu_seqlens_k, s + 1, p.memory_tokens) - keys_begin, 0);
        }
        // The last query of a sequence sees all of its keys.
        seen = p.causal ? keys - (end - begin) + position + 1 : keys;
        if (p.causal) keys = min(keys, max(seen + rows - 1, 0));
    }

    // Whether query `row` of the tile sees a key of the sequence.
    __device__ __forceinline__ bool sees(const Params& p, int row, int key) const {
        return key < keys && (!p.causal || key < seen + row);
    }
};

// The online softmax of a row (Milakov and Gimelshein, 2018): the largest score so far, in powers of two, and the sum
// of the weights relative to it. Where nothing has been seen the largest score is -inf, and the weights are 0.
struct Softmax {
    float largest = -CUDART_INF_F, total = 0.f;

    // What scores are relative to: the largest, but for -inf, since -inf - -inf would be NaN.
    __device__ __forceinline__ float base() const { return largest == -CUDART_INF_F ? 0.f : largest; }

    // Take up scores of which `most` is the largest. Returns what earlier weights and sums are multiplied by.
    __device__ __forceinline__ float raise_to(float most) {
        const float before = largest;
        largest = fmaxf(largest, most);
        const float factor = fast_exp2(before - base()); // 0 at first
        total *= factor;
        return factor;
    }

    // The weight of a score, which is added to the total.
    __device__ __forceinline__ float weigh(float score) {
        const float weight = fast_exp2(score - base());
        total += weight;
        return weight;
    }
};

// What the sums of a row are multiplied by in the end; a row without weights is 0.
__device__ __forceinline__ float inverse_of(float total) { return total == 0.f ? 0.f : 1.f / total; }
