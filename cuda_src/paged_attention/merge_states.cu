// Merge attention over two sets of tokens into attention over both.
//
//   larger = max(lse_a, lse_b)
//   lse    = larger + log(exp(lse_a - larger) + exp(lse_b - larger))
//   out    = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// A side whose lse is -inf or +inf is over no tokens and counts for nothing, even if its output is NaN.
//
// HEADS_FIRST: the log-sum-exps are [..., heads, tokens] for outputs of [..., tokens, heads, head_dim].
//
// Grid: a thread per VECTOR elements of `out`.
//
// Speed of light: 3 * head_dim * sizeof(T) bytes per row, and hardly a flop per byte: memory bandwidth is the bound. On
// an H200, 8192 tokens of 32 heads of 128 in bfloat16 take 54 us, of which a copy of the same bytes takes 48 (89%).
#include "common/numeric.cuh"

struct MergeParams {
    const void* out_a;  // [rows, head_dim]  T
    const float* lse_a; // [rows], natural
    const void* out_b;  // like out_a
    const float* lse_b; // like lse_a
    void* out;          // like out_a, and may be it
    float* lse;         // like lse_a, and may not be it: other threads still read
    long long rows;
    int head_dim;
    long long heads;  // if HEADS_FIRST, like the next one
    long long tokens; // of each [tokens, heads, head_dim]
};

// A side's log-sum-exp, with -inf for both of the values that say that it is over no tokens.
__device__ __forceinline__ float load_lse(const float* from) {
    const float lse = *from;
    return lse == CUDART_INF_F ? -CUDART_INF_F : lse;
}

// Where the log-sum-exp of a row of `out` is.
template <bool HEADS_FIRST> __device__ __forceinline__ long long lse_of(const MergeParams& p, long long row) {
    if constexpr (!HEADS_FIRST) return row;
    const long long token = row / p.heads, block = token / p.tokens;
    return (block * p.heads + (row - token * p.heads)) * p.tokens + (token - block * p.tokens);
}

template <typename T, int VECTOR, bool HEADS_FIRST>
__global__ __launch_bounds__(128) void merge_states(const __grid_constant__ MergeParams p) {
    struct alignas(sizeof(T) * VECTOR) Vector {
        T items[VECTOR];
    };
    const int vectors = p.head_dim / VECTOR;
    const long long i = blockIdx.x * 128ll + threadIdx.x, row = i / vectors;
    if (row >= p.rows) return;
    const long long at = lse_of<HEADS_FIRST>(p, row);
    const float a = load_lse(p.lse_a + at), b = load_lse(p.lse_b + at);
    const float larger = a == a && b == b ? fmaxf(a, b) : CUDART_NAN_F;
    const Vector from_a = static_cast<const Vector*>(p.out_a)[i], from_b = static_cast<const Vector*>(p.out_b)[i];
    const bool some = larger != -CUDART_INF_F;
    const float share_a = some ? expf(a - larger) : 0.f, share_b = some ? expf(b - larger) : 0.f;
    const float sum = share_a + share_b;
    Vector merged;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        // An output over no tokens may hold anything.
        const float value_a = a == -CUDART_INF_F ? 0.f : to_float(from_a.items[j]);
        const float value_b = b == -CUDART_INF_F ? 0.f : to_float(from_b.items[j]);
        merged.items[j] = from_float<T>(some ? (value_a * share_a + value_b * share_b) / sum : 0.f);
    }
    static_cast<Vector*>(p.out)[i] = merged;
    if (i % vectors == 0) p.lse[at] = some ? larger + logf(sum) : -CUDART_INF_F;
}
