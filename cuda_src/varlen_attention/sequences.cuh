// Define attention over packed sequences of different lengths.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// j runs over the keys of the sequence of query i. If causal, the last query attends to all keys, and each earlier
// query attends to one key less than the query after it. A query without keys gets 0. With 16-bit MMAs, softmax weights
// are rounded to T. All sums are in float32.
//
// Each sequence begins a new tile of TILE queries. The first tile of sequence s has index cu_seqlens_q[s] / TILE + s,
// so a sequence of n rows gets ceil(n / TILE) tile indices, or one more. The block of the surplus index exits.
// `tokens / TILE + sequences + 1` blocks are enough for any lengths, so the host does not read the lengths, and a
// captured CUDA graph is valid for all lengths.
//
// The tiles of a sequence begin where the sequence begins, so the bits of its results do not depend on other sequences.
// Rows after the last sequence form a sequence without keys.
#pragma once
#include "common/warp.cuh"

struct Params {
    const char* q;           // T [tokens, heads, dim]
    const char* k;           // T [memory_tokens, heads / group, dim]
    const char* v;           // T [memory_tokens, heads / group, dim]
    char* out;               // T [tokens, heads, dim], contiguous
    const int* cu_seqlens_q; // [sequences + 1]
    const int* cu_seqlens_k; // [sequences + 1]
    long long q_strides[2];  // bytes between tokens and between heads
    long long k_strides[2];
    long long v_strides[2];
    int tokens;
    int memory_tokens;
    int sequences;
    int heads;
    int group; // query heads per head of k and v
    int dim;
    int causal;
    float scale; // softmax scale * log2(e)
};

// Return the first row of sequence s. cu_seqlens may hold invalid values, so the row is clamped.
__device__ __forceinline__ int begin_of(const int* cu_seqlens, int s, int rows) {
    return s == 0 ? 0 : min(max(__ldg(cu_seqlens + s), 0), rows);
}

// Return the last sequence whose first tile is not after `tile`. In each iteration a warp tests 32 equally spaced
// candidates.
template <int TILE> __device__ __forceinline__ int sequence_of(const Params& p, int tile) {
    int first = 0, count = p.sequences + 1;
    while (count > 1) {
        const int step = (count + 31) / 32, place = threadIdx.x % 32 * step;
        const bool before =
            place < count && begin_of(p.cu_seqlens_q, first + place, p.tokens) / TILE + first + place <= tile;
        const int last = max(__popc(__ballot_sync(FULL_WARP, before)) - 1, 0) * step;
        first += last, count = min(step, count - last);
    }
    return first;
}

// The queries of a block, and their keys.
template <int TILE> struct WorkTile {
    int first_row, rows; // in q; with 0 rows the block exits
    int keys_begin;      // in k and v
    int keys;            // keys of the sequence; causal: keys of the tile's last query
    int first_row_keys;  // causal: query i of the tile attends to the first `first_row_keys + i` keys; else `keys`

    __device__ __forceinline__ explicit WorkTile(const Params& p) {
        const int tile = blockIdx.x, s = sequence_of<TILE>(p, tile);
        const int begin = begin_of(p.cu_seqlens_q, s, p.tokens);
        const int end = s < p.sequences ? begin_of(p.cu_seqlens_q, s + 1, p.tokens) : p.tokens;
        const int position = (tile - (begin / TILE + s)) * TILE;
        first_row = begin + position, rows = position < 0 ? 0 : min(end - first_row, TILE);
        keys_begin = 0, keys = 0;
        if (s < p.sequences) {
            keys_begin = begin_of(p.cu_seqlens_k, s, p.memory_tokens);
            keys = max(begin_of(p.cu_seqlens_k, s + 1, p.memory_tokens) - keys_begin, 0);
        }
        first_row_keys = p.causal ? keys - (end - begin) + position + 1 : keys;
        if (p.causal) keys = min(keys, max(first_row_keys + rows - 1, 0));
    }

    __device__ __forceinline__ bool attends(const Params& p, int row, int key) const {
        return key < keys && (!p.causal || key < first_row_keys + row);
    }
};

// Online softmax of a row (Milakov and Gimelshein, 2018): `row_max` is the running maximum, and `row_sum` sums the
// weights 2^(score - row_max).
struct Softmax {
    float row_max = -CUDART_INF_F, row_sum = 0.f;

    // Return row_max, or 0 before the first visible key, because -inf - -inf is NaN.
    __device__ __forceinline__ float offset() const { return row_max == -CUDART_INF_F ? 0.f : row_max; }

    // Update the running maximum. Return the factor that rescales the earlier weights and sums.
    __device__ __forceinline__ float update_max(float tile_max) {
        const float before = row_max;
        row_max = fmaxf(row_max, tile_max);
        const float factor = fast_exp2(before - offset()); // 0 for the first scores
        row_sum *= factor;
        return factor;
    }

    // Add a score to the sum. Return its weight.
    __device__ __forceinline__ float add_score(float score) {
        const float weight = fast_exp2(score - offset());
        row_sum += weight;
        return weight;
    }
};

// Return 1 / row_sum, or 0 for a row without weights.
__device__ __forceinline__ float normalization(float row_sum) { return row_sum == 0.f ? 0.f : 1.f / row_sum; }
