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

extern __shared__ float4 shared[];

struct RenormalizeParams {
    const void* values;       // [rows, vocab] T
    void* out;                // [rows, vocab] T; float32 for SOFTMAX
    const float* temperature; // [rows], or null for the scalar; so are top_k and top_p
    const float* top_p;
    const void* top_k; // int64 where wide
    long long row_stride;
    int vocab, scalar_top_k;
    Layout layout;
    int wide;
    int single; // the array holds one number for all
    float scalar_temperature, scalar_top_p;
};

// Whole rows instead of tokens:
//
//   SOFTMAX       weight / sum of the weights
//   TOP_K_RENORM  the k largest probabilities / their sum, 0 elsewhere; TOP_P_RENORM likewise
//   TOP_K_MASK    the k largest logits, -inf elsewhere
//
// Rows with nothing to normalize become 0; rows with NaN become NaN. With a mask both stay as they are.
template <typename T, Mode MODE, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_WARPS, 2)
    renormalize(const __grid_constant__ RenormalizeParams params) {
    constexpr bool PROBS = MODE == TOP_K_RENORM || MODE == TOP_P_RENORM;
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        using RowOfT = Row<T, PROBS, CLUSTER>;
        const int i = blockIdx.x / CLUSTER;
        const float temperature =
            params.temperature ? params.temperature[params.single ? 0 : i] : params.scalar_temperature;
        const float top_p = params.top_p ? params.top_p[params.single ? 0 : i] : params.scalar_top_p;
        // The limit of a low temperature: all on the best.
        float scale = LOG2_E / temperature;
        if (!(scale > 0 && scale < 1e30f)) scale = 1e30f;
        long long top_k =
            params.top_k ? integer_at(params.top_k, params.wide, params.single ? 0 : i) : params.scalar_top_k;
        if (top_k < 1 || top_k > params.vocab) top_k = params.vocab;

        RowOfT x(static_cast<const T*>(params.values) + i * params.row_stride, nullptr, params.vocab, params.layout,
                 scale, shared, &common<RowOfT>().list_size);
        load<false>(x, {});
        x.top = find_top(x);
        if (threadIdx.x == 0) store(x);
        __syncthreads();
        const bool valid = x.valid();
        Bound bound = {-CUDART_INF_F, NO_ID};
        float inverse = 0, factor = 1;
        if (valid) {
            float sum;
            int winner;
            digest(x, sum, winner);
            Search found = {bound, 1};
            if (MODE == SOFTMAX && x.scale == 1e30f) found.bound = {x.top, best<RowOfT>(found.passes++)};
            if ((MODE == TOP_K_RENORM || MODE == TOP_K_MASK) && top_k < params.vocab)
                found = top_k_bound<RowOfT>(found.passes, top_k);
            if (MODE == TOP_P_RENORM && top_p < 1) found = bound_by_search<RowOfT, false>(found.passes, top_p * sum);
            bound = found.bound;
            if (bound.value > -CUDART_INF_F && MODE != TOP_K_MASK) sum = mass<RowOfT>(found.passes, bound);
            // The reciprocal of the smallest sums is no float.
            if (PROBS && sum < 0x1p-100f) factor = 0x1p100f;
            inverse = 1 / (sum * factor);
        } else if (MODE != TOP_K_MASK) {
            inverse = x.top != x.top ? CUDART_NAN_F : 0.f;
        }
        using Out = typename OutOf<T, MODE>::type;
        Out* out = static_cast<Out*>(params.out) + (long long)i * params.vocab;
        const bool vectors =
            params.vocab % 4 == 0 && reinterpret_cast<unsigned long long>(out) % (4 * sizeof(Out)) == 0;
        for (int local = x.warp; local < x.local_tiles; local += x.warps) {
            float y[4];
            x.for_each(local, [&](int id, float value, int c) {
                const bool kept = keeps(bound, value, id);
                if (MODE == TOP_K_MASK)
                    // The row has no infinity any more, the result shall.
                    y[c] = !(kept || !valid) ? -CUDART_INF_F : value == LARGEST_FLOAT ? x.at_memory(id) : value;
                else if (valid)
                    y[c] = kept ? x.weight(value) * factor * inverse : 0.f;
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
