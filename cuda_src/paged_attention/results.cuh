// Merge and store the results of pieces. The teams (groups of warps) of a block merge their results first. The block
// then stores the merged result, or merges it with the results of the other pieces of the work item.
//
// The result of a row over a set of tokens is a triple: the maximum of the scores (times log2(e)), the sum of the
// weights exp(score - maximum), and the weighted sum of the values. To merge the triples over two sets of tokens, both
// are rescaled to the larger maximum and added.
#pragma once
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "paged_attention/pieces.cuh"

constexpr float LN_2 = 0.693147180559945309f;

// Add a row's sink to its maximum and sum. The caller must multiply the row's values by `weight`.
__device__ __forceinline__ void add_sink(const Params& p, int head, float& maximum, float& sum, float& weight) {
    weight = 1.f;
    if (!p.sinks) return;
    const float sink = p.sinks[head] * LOG2_E;
    const float larger = fmaxf(maximum, sink);
    if (larger == -CUDART_INF_F) return;
    weight = fast_exp2(maximum - larger);
    sum = sum * weight + fast_exp2(sink - larger);
    maximum = larger;
}

__device__ __forceinline__ float log_sum(float maximum, float sum) {
    return sum == 0.f ? -CUDART_INF_F : (maximum + log2f(sum)) * LN_2;
}

template <typename T> __device__ __forceinline__ void store_four(T* to, const float (&values)[4]) {
    if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]));
    }
}

// The triple (maximum, sum, values) of a row for four neighbouring dimensions. `values` are not yet divided by `sum`.
struct Quad {
    float maximum, sum, values[4];

    // Add another triple: `other` (maximum), `other_sum` and `part` (values). `larger` is the maximum over all triples.
    // A triple over no tokens has maximum -inf and zeros; its sum is NaN after a bad block id.
    __device__ __forceinline__ void add(float other, float other_sum, const float4& part, float larger) {
        const float weight = other == -CUDART_INF_F ? 1.f : fast_exp2(other - larger);
        sum += other_sum * weight;
        values[0] += part.x * weight, values[1] += part.y * weight;
        values[2] += part.z * weight, values[3] += part.w * weight;
    }
};

// The results of a block's teams in shared memory.
template <int TEAMS, int ROWS, int STRIDE_> struct TeamResults {
    static constexpr int STRIDE = STRIDE_;
    float *maxima, *sums; // [TEAMS, ROWS]
    float* outputs;       // [TEAMS, p.rows, STRIDE]

    // Merge the teams' triples of row r for dimensions dim ... dim + 3.
    __device__ __forceinline__ Quad merge(const Params& p, int r, int dim) const {
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) quad.maximum = fmaxf(quad.maximum, maxima[team * ROWS + r]);
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            const int at = team * ROWS + r;
            const float* const output = &outputs[(team * p.rows + r) * STRIDE + dim];
            quad.add(maxima[at], sums[at], *reinterpret_cast<const float4*>(output), quad.maximum);
        }
        return quad;
    }
};

// The slots of a row's partial results, where a slot is a row index in `Params::partial`. `first` is the slot for the
// item's first piece, and `step` is the distance from one piece's slot to the next piece's slot.
struct Slots {
    long long first, step;

    __device__ __forceinline__ Slots(const Params& p, const Segment& segment, const Row& row, int r) {
        if (p.vllm_workspace) {
            first = row.index(p, segment) * p.max_splits, step = 1;
        } else {
            step = p.kv_heads * p.row_blocks * p.rows;
            first = (long long)segment.index * p.rows + r - segment.piece * step;
        }
    }
};

__device__ __forceinline__ float value_scale(const Params& p) {
    return p.value_scale ? *p.value_scale * p.out_scale : p.out_scale;
}

// Store four dimensions of a row's result.
template <typename T>
__device__ __forceinline__ void store_result(const Params& p, const Segment& segment, const Row& row, int dim,
                                             Quad quad, float out_scale) {
    const long long index = row.index(p, segment);
    float weight;
    add_sink(p, row.head, quad.maximum, quad.sum, weight);
    const float factor = quad.sum == 0.f ? 0.f : weight * out_scale / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.out)[index * p.head_dim + dim], quad.values);
    if (p.lse && dim == 0) p.lse[index] = log_sum(quad.maximum, quad.sum);
}

// Store four dimensions of a row's partial result. In vLLM's workspace a partial result is the attention over the
// tokens of the piece only: it is divided by the sum and multiplied by the value scale.
template <typename T>
__device__ __forceinline__ void store_partial(const Params& p, const Segment& segment, const Row& row, int r, int dim,
                                              Quad quad) {
    const Slots slots(p, segment, row, r);
    const long long slot = slots.first + segment.piece * slots.step;
    if (dim == 0) p.maxima[slot] = p.vllm_workspace ? quad.maximum * LN_2 : quad.maximum, p.sums[slot] = quad.sum;
    if (!p.vllm_workspace) {
        store_four(&static_cast<float*>(p.partial)[slot * p.head_dim + dim], quad.values);
        return;
    }
    const float factor = quad.sum == 0.f ? 0.f : value_scale(p) / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.partial)[slot * p.head_dim + dim], quad.values);
}

// Load four dimensions of a partial result from L2, because L1 may not contain the stores of other multiprocessors.
template <typename T> __device__ __forceinline__ float4 load_partial(const Params& p, long long at) {
    if (!p.vllm_workspace) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.partial) + at));
    if constexpr (sizeof(T) == 4) {
        return __ldcg(reinterpret_cast<const float4*>(static_cast<const T*>(p.partial) + at));
    } else {
        const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(p.partial) + at));
        const T* four = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
    }
}

// Merge the partial results of all pieces of an item and store the results. The pieces are added in a fixed order, so
// the result does not depend on which block finishes last.
template <int ROWS, typename T> __device__ void merge_pieces(const Params& p, const Segment& segment) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Slots slots(p, segment, row, r);
        const float unit = p.vllm_workspace ? LOG2_E : 1.f;
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll 8
        for (int piece = 0; piece < segment.pieces; ++piece)
            quad.maximum = fmaxf(quad.maximum, __ldcg(&p.maxima[slots.first + piece * slots.step]));
        quad.maximum *= unit;
#pragma unroll 8
        for (int piece = 0; piece < segment.pieces; ++piece) {
            const long long slot = slots.first + piece * slots.step;
            const float maximum = __ldcg(&p.maxima[slot]) * unit, sum = __ldcg(&p.sums[slot]);
            float4 part = load_partial<T>(p, slot * p.head_dim + dim);
            if (p.vllm_workspace) part = make_float4(part.x * sum, part.y * sum, part.z * sum, part.w * sum);
            quad.add(maximum, sum, part, quad.maximum);
        }
        // Partial results in vLLM's workspace include the value scale already.
        store_result<T>(p, segment, row, dim, quad, p.vllm_workspace ? 1.f : value_scale(p));
    }
}

// Merge the teams' results for the rows of a piece, and store them as final or partial results.
template <typename T, int TEAMS, int ROWS, int STRIDE>
__device__ void store_piece(const Params& p, const Segment& segment, const TeamResults<TEAMS, ROWS, STRIDE>& found) {
    const int quads = p.head_dim / 4;
    const bool partial = segment.partial(p);
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Quad quad = found.merge(p, r, dim);
        if (partial)
            store_partial<T>(p, segment, row, r, dim, quad);
        else
            store_result<T>(p, segment, row, dim, quad, value_scale(p));
    }
}

// Count a finished piece of an item, and return the number of pieces of the item that finished earlier. One thread
// calls this after the block has stored the piece and passed a barrier.
__device__ __forceinline__ int arrive(const Params& p, const Segment& segment) {
    __threadfence();
    return atomicAdd(&p.arrived[(segment.seq * p.kv_heads + segment.kv_head) * p.row_blocks + segment.row_block], 1);
}
