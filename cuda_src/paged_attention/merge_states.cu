// Merge the attention outputs over two sets of tokens into the output over both sets.
//
//   larger = max(lse_a, lse_b)
//   lse    = larger + log(exp(lse_a - larger) + exp(lse_b - larger))
//   out    = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// An input (a or b) whose lse is -inf or +inf covers no tokens: its weight is 0, even if its output is NaN.
//
// Grid: blocks of 128 threads. A thread merges VECTORS vectors of VECTOR elements, and loads all of them first. POWER:
// the number of vectors in a row is a power of two, so a shift finds the row of a vector. HEADS_FIRST: lse has the
// shape [..., heads, tokens], and out [..., tokens, heads, head_dim].
//
// Speed of light: memory bandwidth, for 3 * head_dim * sizeof(T) bytes per row. On an H200, 8192 tokens with 32 heads
// of 128 in bfloat16 take 48.7 us, and a copy of the same bytes 48.1 us (99%). With HEADS_FIRST they take 53.5 us
// (90%). 2048 tokens take 14.2 us.
#include "common/numeric.cuh"
#include "common/overlap.cuh"

struct MergeParams {
    const void* out_a;  // [rows, head_dim]  T
    const float* lse_a; // [rows], natural base
    const void* out_b;  // like out_a
    const float* lse_b; // like lse_a
    void* out;          // may be the same array as out_a or out_b
    float* lse;         // another array, because other threads still read lse_a and lse_b
    long long rows;
    int head_dim;
    long long heads;  // only with HEADS_FIRST
    long long tokens; // an output is a stack of [tokens, heads, head_dim] arrays
    int shift;        // if POWER: log2 of the vectors per row
};

// Return -inf for an input without tokens.
__device__ __forceinline__ float load_lse(const float* from) {
    const float lse = *from;
    return lse == CUDART_INF_F ? -CUDART_INF_F : lse;
}

template <bool HEADS_FIRST> __device__ __forceinline__ long long lse_index(const MergeParams& p, long long row) {
    if constexpr (!HEADS_FIRST) return row;
    if (p.rows > 0x7fffffff || p.heads * p.tokens != p.rows) {
        const long long token = row / p.heads, block = token / p.tokens;
        return (block * p.heads + (row - token * p.heads)) * p.tokens + (token - block * p.tokens);
    }
    // Divide 32-bit numbers: a 64-bit division would take longer than all other arithmetic of the thread.
    const unsigned heads = p.heads, token = static_cast<unsigned>(row) / heads;
    return (static_cast<unsigned>(row) - token * heads) * p.tokens + token;
}

template <typename T, int VECTOR> struct alignas(sizeof(T) * VECTOR) Items {
    T items[VECTOR];
};

// Return whether `divide_plain` equals operator / for `value` and a divisor in [1, 2]. `divide_plain` loses the sign of
// 0, and fails at magnitudes at which an intermediate result overflows or is subnormal.
__device__ __forceinline__ bool is_plain(float value) {
    return fabsf(value) > 1e-20f && fabsf(value) < 1e30f; // false for NaN
}

// Return 1 / divisor, with an error of at most one unit in the last place.
__device__ __forceinline__ float reciprocal_of(float divisor) {
    float approximate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(divisor));
    return fmaf(approximate, fmaf(-divisor, approximate, 1.f), approximate);
}

// Return value / divisor with the rounding of operator /: the remainder corrects the quotient (Markstein, 1990).
// Operator / would compute the reciprocal for every value.
__device__ __forceinline__ float divide_plain(float value, float divisor, float reciprocal) {
    const float quotient = value * reciprocal;
    return fmaf(reciprocal, fmaf(-divisor, quotient, value), quotient);
}

constexpr int MERGE_THREADS = 128;

template <typename T, int VECTOR, bool HEADS_FIRST, int VECTORS = 1, bool POWER = false>
__global__ __launch_bounds__(MERGE_THREADS) void merge_states(const __grid_constant__ MergeParams p) {
    begin_behind_earlier_kernels();
    using Vector = Items<T, VECTOR>;
    const int vectors = POWER ? 1 << p.shift : p.head_dim / VECTOR;
    const long long first = (long long)blockIdx.x * (MERGE_THREADS * VECTORS) + threadIdx.x;
    Vector from_a[VECTORS], from_b[VECTORS];
    float a[VECTORS], b[VECTORS];
    long long rows[VECTORS], lse_indices[VECTORS];
#pragma unroll
    for (int e = 0; e < VECTORS; ++e) {
        const long long i = first + e * MERGE_THREADS;
        rows[e] = POWER ? i >> p.shift : i / vectors;
        if (rows[e] >= p.rows) continue;
        lse_indices[e] = lse_index<HEADS_FIRST>(p, rows[e]);
        from_a[e] = static_cast<const Vector*>(p.out_a)[i];
        from_b[e] = static_cast<const Vector*>(p.out_b)[i];
        a[e] = load_lse(p.lse_a + lse_indices[e]), b[e] = load_lse(p.lse_b + lse_indices[e]);
    }
#pragma unroll
    for (int e = 0; e < VECTORS; ++e) {
        const long long i = first + e * MERGE_THREADS;
        if (rows[e] >= p.rows) continue;
        const float larger = a[e] == a[e] && b[e] == b[e] ? fmaxf(a[e], b[e]) : CUDART_NAN_F;
        const bool some = larger != -CUDART_INF_F;
        const float share_a = some ? expf(a[e] - larger) : 0.f, share_b = some ? expf(b[e] - larger) : 0.f;
        const float sum = share_a + share_b;
        Vector merged;
        float sums[VECTOR];
        bool plain = POWER && a[e] != -CUDART_INF_F && b[e] != -CUDART_INF_F;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            sums[j] = fmaf(to_float(from_a[e].items[j]), share_a, to_float(from_b[e].items[j]) * share_b);
            plain = plain && is_plain(sums[j]);
        }
        if (plain) {
            const float reciprocal = reciprocal_of(sum);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) merged.items[j] = from_float<T>(divide_plain(sums[j], sum, reciprocal));
        } else {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                // Replace the output of an input without tokens by 0, because it may be NaN.
                const float value_a = a[e] == -CUDART_INF_F ? 0.f : to_float(from_a[e].items[j]);
                const float value_b = b[e] == -CUDART_INF_F ? 0.f : to_float(from_b[e].items[j]);
                merged.items[j] = from_float<T>(some ? fmaf(value_a, share_a, value_b * share_b) / sum : 0.f);
            }
        }
        static_cast<Vector*>(p.out)[i] = merged;
        if (i == rows[e] * vectors) p.lse[lse_indices[e]] = some ? larger + logf(sum) : -CUDART_INF_F;
    }
}
