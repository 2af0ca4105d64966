// Normalize or filter whole rows of logits or probabilities.
//
//   SOFTMAX       weight / sum of the weights, weight = exp((x - max x) / temperature)
//   TOP_K_RENORM  x / sum of the kept x for the k largest probabilities, 0 elsewhere
//   TOP_P_RENORM  x / sum of the kept x for the fewest largest probabilities with a sum of at least top_p * (sum of the
//                 row), 0 elsewhere
//   TOP_K_MASK    the k largest logits, -inf elsewhere
//
// Ties go to the lower id. A row without a weight above 0 becomes 0, and a row with a NaN becomes NaN. TOP_K_MASK
// copies such rows.
//
// Grid: CLUSTER blocks per row (row.cuh).
//
// Speed of light: memory bandwidth. On an H200 the softmax of 256 rows of 128256 float32 takes 90 us (68% of the
// bandwidth of a copy), and top-k 125 us. One softmax row is latency-bound: 7 us. Top-p is also latency-bound, because
// each pass of its search has a cluster barrier: 51 us for 1 row and 525 us for 256 rows.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "sampling/first_pass.cuh"
#include "sampling/params.cuh"
#include "sampling/search.cuh"

enum Mode { SOFTMAX, TOP_K_RENORM, TOP_P_RENORM, TOP_K_MASK };

__device__ __forceinline__ void store_four(float* to, const float* x) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}

template <typename T> __device__ __forceinline__ void store_four(T* to, const float* x) {
    uint2 bits;
    T* values = reinterpret_cast<T*>(&bits);
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] = from_float<T>(x[c]);
    __stcs(reinterpret_cast<uint2*>(to), bits);
}

template <typename T, Mode MODE> struct OutOf {
    using type = T;
};
template <typename T> struct OutOf<T, SOFTMAX> {
    using type = float;
};

struct RenormalizeParams {
    const void* values;      // [rows, vocab] T
    void* out;               // [rows, vocab] T; float32 for SOFTMAX
    const void* temperature; // [rows]; null: scalar_temperature; top_p and top_k likewise
    const void* top_p;
    const void* top_k;
    long long row_stride;
    int vocab, scalar_top_k;
    Layout layout;
    int wide;     // the array holds int64, else int32
    int integral; // the array of temperature or top_p holds integers, else float32
    int single;   // the array has one element for all rows
    float scalar_temperature, scalar_top_p;
};

// A token that the bound keeps becomes `weight * factor * inverse`, and every other token becomes 0. In an invalid row,
// every token becomes `inverse`.
template <Mode MODE, typename Row>
__device__ __forceinline__ void find_norm(const Row& x, int vocab, long long top_k, float top_p, bool& valid,
                                          Bound& bound, float& factor, float& inverse) {
    valid = x.valid();
    bound = {-CUDART_INF_F, NO_ID};
    inverse = 0, factor = 1;
    if (valid) {
        float sum;
        int winner;
        find_sum_and_winner(x, sum, winner);
        Search found = {bound, 1};
        if (MODE == SOFTMAX && x.scale == GREEDY_SCALE) found.bound = {x.row_max, best<Row>(found.passes_done++)};
        if ((MODE == TOP_K_RENORM || MODE == TOP_K_MASK) && top_k < vocab)
            found = top_k_bound<Row>(found.passes_done, top_k);
        if (MODE == TOP_P_RENORM && top_p < 1) found = bound_by_search<Row, false>(found.passes_done, top_p * sum);
        bound = found.bound;
        if (bound.value > -CUDART_INF_F && MODE != TOP_K_MASK) sum = mass<Row>(found.passes_done, bound);
        // 1 / sum overflows for the smallest sums; 1 / (sum * factor) does not.
        if (Row::IS_PROBS && sum < 0x1p-100f) factor = 0x1p100f;
        inverse = 1 / (sum * factor);
    } else if (MODE != TOP_K_MASK) {
        inverse = x.row_max != x.row_max ? CUDART_NAN_F : 0.f;
    }
}

extern __shared__ float4 shared[];

template <typename T, Mode, int CLUSTER>
constexpr Launch renormalize_launch(int tiles, int cached_tiles, int group_max_tiles, int segments_per_tile) {
    return {32 * MAX_WARPS, Row<T, true, CLUSTER>::bytes(tiles, cached_tiles, group_max_tiles, segments_per_tile)};
}

template <typename T, Mode MODE, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_WARPS, 2)
    renormalize(const __grid_constant__ RenormalizeParams params) {
    begin_behind_earlier_kernels();
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        using RowOfT = Row<T, MODE == TOP_K_RENORM || MODE == TOP_P_RENORM, CLUSTER>;
        const int i = blockIdx.x / CLUSTER;
        const int at = params.single ? 0 : i;
        const auto number = [&](const void* array, float scalar) {
            return array ? float_at(array, params.integral, params.wide, at) : scalar;
        };
        // Parameters that MODE does not use are constants, so they take no registers.
        float scale = GREEDY_SCALE, top_p = 1;
        long long top_k = params.vocab;
        if constexpr (MODE == SOFTMAX) scale = scale_of(number(params.temperature, params.scalar_temperature));
        if constexpr (MODE == TOP_P_RENORM) top_p = number(params.top_p, params.scalar_top_p);
        if constexpr (MODE == TOP_K_RENORM || MODE == TOP_K_MASK) {
            top_k = params.top_k ? integer_at(params.top_k, params.wide, at) : params.scalar_top_k;
            if (top_k < 1 || top_k > params.vocab) top_k = params.vocab;
        }

        RowOfT x(static_cast<const T*>(params.values) + i * params.row_stride, nullptr, params.vocab, params.layout,
                 scale, shared, &common<RowOfT>().list_size);
        load<false>(x, {});
        x.row_max = find_row_max(x);
        if (threadIdx.x == 0) store(x);
        __syncthreads();
        bool valid;
        Bound bound;
        float factor, inverse;
        find_norm<MODE>(x, params.vocab, top_k, top_p, valid, bound, factor, inverse);

        using Out = typename OutOf<T, MODE>::type;
        Out* out = static_cast<Out*>(params.out) + (long long)i * params.vocab;
        const bool vectors =
            params.vocab % 4 == 0 && reinterpret_cast<unsigned long long>(out) % (4 * sizeof(Out)) == 0;
        for (int local_tile = x.warp; local_tile < x.local_tiles; local_tile += x.warps) {
            float y[4];
            x.for_each(local_tile, [&](int id, float value, int c) {
                const bool keep = keeps(bound, value, id);
                if (MODE == TOP_K_MASK)
                    // The passes replaced +inf by the largest float.
                    y[c] = !(keep || !valid) ? -CUDART_INF_F : value == LARGEST_FLOAT ? x.unclamped_at(id) : value;
                else if (valid)
                    y[c] = keep ? x.weight(value) * factor * inverse : 0.f;
                else
                    y[c] = inverse;
                if (vectors) {
                    if (c == 3 && id < params.vocab) store_four(out + id - 3, y);
                } else if (id < params.vocab) {
                    out[id] = from_float<Out>(y[c]);
                }
            });
        }
    }
}
