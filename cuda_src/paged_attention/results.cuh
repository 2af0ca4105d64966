// What is made of the scores and values that the warps of a block have seen: partial results, and results.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "paged_attention/pieces.cuh"

constexpr float LN_2 = 0.693147180559945309f;

// One row of an item.
struct Row {
    int token, head; // of the query
    bool valid;

    __device__ Row(const Params& p, const Segment& segment, int row) {
        token = p.query_tokens == 1 && row < p.group ? 0 : row / p.group;
        head = segment.kv_head * p.group + row - token * p.group;
        valid = token < p.query_tokens;
        if (!valid) token = 0, head = segment.kv_head * p.group;
    }

    __device__ long long index(const Params& p, const Segment& segment) const {
        return ((long long)segment.seq * p.query_tokens + token) * p.heads + head;
    }

    // The last token of the cache that it sees.
    __device__ int position(const Params& p, const Segment& segment) const {
        return valid ? segment.length - p.query_tokens + token : -1;
    }
};

// Let a row's sink join its maximum and sum (in powers of 2); `weight` is what its values then count.
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

// What is known of four neighbouring dimensions of a row: not yet divided by the sum.
struct Quad {
    float maximum, sum, values[4];

    // Of a part that saw no token the maximum is -inf, all else 0; a bad block id shows in the sum.
    __device__ __forceinline__ void add(float other, float other_sum, const float4& part, float larger) {
        const float weight = other == -CUDART_INF_F ? 1.f : fast_exp2(other - larger);
        sum += other_sum * weight;
        values[0] += part.x * weight, values[1] += part.y * weight;
        values[2] += part.z * weight, values[3] += part.w * weight;
    }
};

// What the TEAMS found for row r. In shared memory: maxima (in powers of 2) and sums [TEAMS, ROWS], outputs [TEAMS,
// p.rows, stride].
template <int TEAMS, int ROWS>
__device__ __forceinline__ Quad merge_teams(const Params& p, const float* maxima, const float* sums,
                                            const float* outputs, int stride, int r, int dim) {
    Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) quad.maximum = fmaxf(quad.maximum, maxima[team * ROWS + r]);
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
        const int at = team * ROWS + r;
        const float* const output = &outputs[(team * p.rows + r) * stride + dim];
        quad.add(maxima[at], sums[at], *reinterpret_cast<const float4*>(output), quad.maximum);
    }
    return quad;
}

// Where the partial results of a row are: that of the item's first piece, and how much further each next one is.
struct Slots {
    long long first, step;

    __device__ __forceinline__ Slots(const Params& p, const Segment& segment, const Row& row, int r) {
        if (p.narrow) {
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

// Store four dimensions of a row: its result, once all is known, or a partial one.
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

template <typename T>
__device__ __forceinline__ void store_partial(const Params& p, const Segment& segment, const Row& row, int r, int dim,
                                              Quad quad) {
    const Slots slots(p, segment, row, r);
    const long long slot = slots.first + segment.piece * slots.step;
    if (dim == 0) p.maxima[slot] = p.narrow ? quad.maximum * LN_2 : quad.maximum, p.sums[slot] = quad.sum;
    if (!p.narrow) {
        store_four(&static_cast<float*>(p.partial)[slot * p.head_dim + dim], quad.values);
        return;
    }
    // As vLLM leaves it: the attention of a partition by itself.
    const float factor = quad.sum == 0.f ? 0.f : value_scale(p) / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.partial)[slot * p.head_dim + dim], quad.values);
}

template <typename T> __device__ __forceinline__ float4 load_partial(const Params& p, long long at) {
    // Past the first-level cache, which does not see what other multiprocessors wrote.
    if (!p.narrow) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.partial) + at));
    if constexpr (sizeof(T) == 4) {
        return __ldcg(reinterpret_cast<const float4*>(static_cast<const T*>(p.partial) + at));
    } else {
        const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(p.partial) + at));
        const T* four = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
    }
}

// Merge the partial results of all pieces of an item, in their order, whoever does it.
template <int ROWS, typename T> __device__ void join(const Params& p, const Segment& segment) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Slots slots(p, segment, row, r);
        const float unit = p.narrow ? LOG2_E : 1.f;
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
            if (p.narrow) part = make_float4(part.x * sum, part.y * sum, part.z * sum, part.w * sum);
            quad.add(maximum, sum, part, quad.maximum);
        }
        // vLLM's partial results are scaled already.
        store_result<T>(p, segment, row, dim, quad, p.narrow ? 1.f : value_scale(p));
    }
}

// Merge what the teams found for the ROWS rows of a piece, and store it.
template <int TEAMS, int ROWS, typename T>
__device__ void store_segment(const Params& p, const Segment& segment, const float* maxima, const float* sums,
                              const float* outputs, int stride) {
    const int quads = p.head_dim / 4;
    const bool partial = segment.partial(p);
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Quad quad = merge_teams<TEAMS, ROWS>(p, maxima, sums, outputs, stride, r, dim);
        if (partial)
            store_partial<T>(p, segment, row, r, dim, quad);
        else
            store_result<T>(p, segment, row, dim, quad, value_scale(p));
    }
}

// One thread, after a barrier: the block has stored a piece. Which of its item it was, in time.
__device__ __forceinline__ int arrive(const Params& p, const Segment& segment) {
    __threadfence();
    return atomicAdd(&p.arrived[(segment.seq * p.kv_heads + segment.kv_head) * p.row_blocks + segment.row_block], 1);
}

// `store_segment` for an item whose tokens a cluster has shared, by way of `merged` [ROWS, stride] and `statistics` [ROWS] in
// the shared memory of each of its blocks.
template <int CLUSTER, int TEAMS, int ROWS, typename T>
__device__ void store_shared_segment(const Params& p, const Segment& segment, const float* maxima, const float* sums,
                                     const float* outputs, float* merged, float2* statistics, int stride) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        if (!Row(p, segment, segment.row_block * ROWS + r).valid) break;
        const Quad quad = merge_teams<TEAMS, ROWS>(p, maxima, sums, outputs, stride, r, dim);
        *reinterpret_cast<float4*>(&merged[r * stride + dim]) =
            make_float4(quad.values[0], quad.values[1], quad.values[2], quad.values[3]);
        if (dim == 0) statistics[r] = make_float2(quad.maximum, quad.sum);
    }
    cluster_barrier<CLUSTER>();
    for (int i = threadIdx.x * CLUSTER + cluster_rank<CLUSTER>(); i < ROWS * quads; i += blockDim.x * CLUSTER) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        float2 of_rank[CLUSTER];
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            of_rank[rank] = load_from<CLUSTER>(rank, &statistics[r]);
            quad.maximum = fmaxf(quad.maximum, of_rank[rank].x);
        }
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            const float4 part = load_from<CLUSTER>(rank, reinterpret_cast<const float4*>(&merged[r * stride + dim]));
            quad.add(of_rank[rank].x, of_rank[rank].y, part, quad.maximum);
        }
        store_result<T>(p, segment, row, dim, quad, value_scale(p));
    }
    // A block's memory must outlive the others' reading.
    cluster_barrier<CLUSTER>();
}
