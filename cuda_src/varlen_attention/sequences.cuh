// This file has the code that all kernels of varlen_attention share: the parameters, the mapping from thread blocks to
// queries, and the online softmax.
//
// Each sequence begins a new tile of TILE queries. The first tile of sequence s has index cu_seqlens_q[s] / TILE + s. A
// sequence of n rows thus gets at least the ceil(n / TILE) tile indices that it needs, and at most one more. The block
// with the extra index exits at once. A grid of `tokens / TILE + sequences + 1` blocks is enough for any lengths. The
// host therefore does not read the lengths, and a captured CUDA graph is valid for all lengths. Rows after the last
// sequence are treated as one more sequence without keys, so their results are 0.
//
// The first tile of queries and the first tile of keys begin where the sequence begins. The bits of a result therefore
// do not depend on the other sequences.
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
    float scale; // softmax scale * log2(e)
};

// Return the first row of sequence s. The array may contain invalid values, so the row is clamped to the range 0 to
// `rows`. Sequence 0 always begins at row 0.
__device__ __forceinline__ int begin_of(const int* cu_seqlens, int s, int rows) {
    return s == 0 ? 0 : min(max(__ldg(cu_seqlens + s), 0), rows);
}

// Return the sequence that a tile belongs to: the last sequence whose first tile is not after `tile`. The result is
// `sequences` for rows after the last sequence. In each iteration the 32 lanes of a warp test 32 equally spaced
// candidates.
template <int TILE> __device__ __forceinline__ int sequence_of(const Params& p, int tile) {
    int first = 0, count = p.sequences + 1; // the result is in first ... first + count - 1
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
    int first, rows; // first row and number of rows in q; with 0 rows the block exits
    int keys_begin;  // the first row of k and v
    int keys;        // keys of the sequence; causal: keys that the tile's last query sees
    int seen;        // causal: query i of the tile sees `seen + i` keys; else `keys`

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

    // Return whether query `row` of the tile sees a key of the sequence.
    __device__ __forceinline__ bool sees(const Params& p, int row, int key) const {
        return key < keys && (!p.causal || key < seen + row);
    }
};

// The online softmax of a row (Milakov and Gimelshein, 2018). `largest` is the largest score so far, and a weight is
// 2^(score - largest). `total` is the sum of the weights. Before the first visible key the largest score is -inf, and
// the weights are 0.
struct Softmax {
    float largest = -CUDART_INF_F, total = 0.f;

    // Return the offset that is subtracted from the scores: the largest score, or 0 if that is -inf, because
    // subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ float base() const { return largest == -CUDART_INF_F ? 0.f : largest; }

    // Raise `largest` to `most`, the maximum of the new scores, if `most` is larger. Return the factor that rescales
    // the earlier weights and sums.
    __device__ __forceinline__ float raise_to(float most) {
        const float before = largest;
        largest = fmaxf(largest, most);
        const float factor = fast_exp2(before - base()); // 0 for the first scores
        total *= factor;
        return factor;
    }

    // Return the weight of a score, and add it to the total.
    __device__ __forceinline__ float weigh(float score) {
        const float weight = fast_exp2(score - base());
        total += weight;
        return weight;
    }
};

// Return the factor that normalizes the sums of a row, or 0 for a row without weights.
__device__ __forceinline__ float inverse_of(float total) { return total == 0.f ? 0.f : 1.f / total; }
