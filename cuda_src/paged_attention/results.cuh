// Merge and store the results of KV splits. The teams of a block merge their results first.
//
// The result of a row over a set of tokens is a triple: the maximum of the scores (times log2(e)), the sum of the
// weights exp(score - maximum), and the weighted sum of the values. To merge triples, rescale them to the largest
// maximum and add.
#pragma once
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "paged_attention/pieces.cuh"

constexpr float LN_2 = 0.693147180559945309f;

// Add a head's attention sink to a row's maximum and sum. The caller must multiply the row's values by `weight`.
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

// A row's triple (maximum, sum, weighted values) for four neighbouring dimensions.
struct Quad {
    float maximum, sum, values[4];

    // `larger`: the maximum over all triples. A triple (maximum, sum, values) over no tokens has maximum -inf, and its
    // other numbers are 0. If a block id was invalid, the sum is NaN.
    __device__ __forceinline__ void add(float other_max, float other_sum, const float4& other_values, float larger) {
        const float weight = other_max == -CUDART_INF_F ? 1.f : fast_exp2(other_max - larger);
        sum += other_sum * weight;
        values[0] += other_values.x * weight, values[1] += other_values.y * weight;
        values[2] += other_values.z * weight, values[3] += other_values.w * weight;
    }
};

template <int TEAMS, int ROWS, int STRIDE_> struct TeamResults {
    static constexpr int STRIDE = STRIDE_;
    float *maxima, *sums; // [TEAMS, ROWS]
    float* outputs;       // [TEAMS, p.rows, STRIDE]

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

// Indices of a row's partial results: `first` for the item's first split, then `step` apart.
struct Slots {
    long long first, step;

    __device__ __forceinline__ Slots(const Params& p, const KvSplit& kv_split, const Row& row, int r) {
        if (p.vllm_workspace) {
            first = row.index(p, kv_split) * p.max_splits, step = 1;
        } else {
            step = p.kv_heads * p.row_blocks * p.rows;
            first = (long long)kv_split.batch_index * p.rows + r - kv_split.split_index * step;
        }
    }
};

__device__ __forceinline__ float value_scale(const Params& p) {
    return p.value_scale ? *p.value_scale * p.out_scale : p.out_scale;
}

template <typename T>
__device__ __forceinline__ void store_result(const Params& p, const KvSplit& kv_split, const Row& row, int dim,
                                             Quad quad, float out_scale) {
    const long long index = row.index(p, kv_split);
    float weight;
    add_sink(p, row.head, quad.maximum, quad.sum, weight);
    const float factor = quad.sum == 0.f ? 0.f : weight * out_scale / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.out)[index * p.head_dim + dim], quad.values);
    if (p.lse && dim == 0) p.lse[index] = log_sum(quad.maximum, quad.sum);
}

// vLLM's workspace holds the finished attention over the tokens of the split: divided by the sum, and multiplied by the
// value scale.
template <typename T>
__device__ __forceinline__ void store_partial(const Params& p, const KvSplit& kv_split, const Row& row, int r, int dim,
                                              Quad quad) {
    const Slots slots(p, kv_split, row, r);
    const long long slot = slots.first + kv_split.split_index * slots.step;
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

// Load from L2, because L1 may not contain the stores of other multiprocessors.
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

// Merge in a fixed order, so that the result does not depend on which block finishes last.
template <int ROWS, typename T> __device__ void merge_splits(const Params& p, const KvSplit& kv_split) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, kv_split, kv_split.row_block * ROWS + r);
        if (!row.valid) break;
        const Slots slots(p, kv_split, row, r);
        const float unit = p.vllm_workspace ? LOG2_E : 1.f;
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll 8
        for (int split_index = 0; split_index < kv_split.num_splits; ++split_index)
            quad.maximum = fmaxf(quad.maximum, __ldcg(&p.maxima[slots.first + split_index * slots.step]));
        quad.maximum *= unit;
#pragma unroll 8
        for (int split_index = 0; split_index < kv_split.num_splits; ++split_index) {
            const long long slot = slots.first + split_index * slots.step;
            const float maximum = __ldcg(&p.maxima[slot]) * unit, sum = __ldcg(&p.sums[slot]);
            float4 other_values = load_partial<T>(p, slot * p.head_dim + dim);
            if (p.vllm_workspace)
                other_values =
                    make_float4(other_values.x * sum, other_values.y * sum, other_values.z * sum, other_values.w * sum);
            quad.add(maximum, sum, other_values, quad.maximum);
        }
        // Partial results in vLLM's workspace include the value scale already.
        store_result<T>(p, kv_split, row, dim, quad, p.vllm_workspace ? 1.f : value_scale(p));
    }
}

template <typename T, int TEAMS, int ROWS, int STRIDE>
__device__ void store_split(const Params& p, const KvSplit& kv_split, const TeamResults<TEAMS, ROWS, STRIDE>& results) {
    const int quads = p.head_dim / 4;
    const bool partial = kv_split.partial(p);
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, kv_split, kv_split.row_block * ROWS + r);
        if (!row.valid) break;
        const Quad quad = results.merge(p, r, dim);
        if (partial)
            store_partial<T>(p, kv_split, row, r, dim, quad);
        else
            store_result<T>(p, kv_split, row, dim, quad, value_scale(p));
    }
}

// Return the number of the item's splits that finished earlier. One thread calls this after the block has stored the
// split and synchronized.
__device__ __forceinline__ int arrive(const Params& p, const KvSplit& kv_split) {
    __threadfence();
    return atomicAdd(&p.arrived[(kv_split.seq * p.kv_heads + kv_split.kv_head) * p.row_blocks + kv_split.row_block], 1);
}
