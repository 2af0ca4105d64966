// Merge the attention outputs over two sets of tokens into the output over both sets.
//
//   larger = max(lse_a, lse_b)
//   lse    = larger + log(exp(lse_a - larger) + exp(lse_b - larger))
//   out    = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b
//
// An input (a or b) whose lse is -inf or +inf covers no tokens. Its weight is 0, even if its output is NaN.
//
// HEADS_FIRST: the log-sum-exps have the shape [..., heads, tokens], and the outputs [..., tokens, heads, head_dim].
//
// Grid: blocks of 128 threads. A vector has VECTOR elements of `out`, and EACH is the number of vectors per thread. A
// thread issues the loads of all its vectors before it uses the first one. POWER: the number of vectors per row is a
// power of two, so a shift instead of a division finds the row of a vector.
//
// Speed of light: memory bandwidth, because the kernel moves 3 * head_dim * sizeof(T) bytes per row with less than one
// flop per byte. On an H200, 8192 tokens with 32 heads of 128 in bfloat16 take 48.7 us; a copy of the same bytes takes
// 48.1 us (99%). With HEADS_FIRST the same 8192 tokens take 53.5 us (90%). 2048 tokens take 14.2 us.
#include "common/numeric.cuh"
#include "common/overlap.cuh"

struct MergeParams {
    const void* out_a;  // [rows, head_dim]  T
    const float* lse_a; // [rows], natural base
    const void* out_b;  // like out_a
    const float* lse_b; // like lse_a
    void* out;          // like out_a; may be the same array as out_a or out_b
    float* lse;         // like lse_a; must be another array, because other threads still read lse_a and lse_b
    long long rows;
    int head_dim;
    long long heads;  // `heads` and `tokens` are used only with HEADS_FIRST
    long long tokens; // an output is a stack of [tokens, heads, head_dim] arrays
    int shift;        // if POWER: log2 of the vectors per row
};

// Load the log-sum-exp of an input. -inf and +inf both mean that the input covers no tokens; return -inf in both cases.
__device__ __forceinline__ float load_lse(const float* from) {
    const float lse = *from;
    return lse == CUDART_INF_F ? -CUDART_INF_F : lse;
}

// Return the index of a row's log-sum-exp.
template <bool HEADS_FIRST> __device__ __forceinline__ long long place_of(const MergeParams& p, long long row) {
    if constexpr (!HEADS_FIRST) return row;
    if (p.rows > 0x7fffffff || p.heads * p.tokens != p.rows) {
        const long long token = row / p.heads, block = token / p.tokens;
        return (block * p.heads + (row - token * p.heads)) * p.tokens + (token - block * p.tokens);
    }
    // Divide in 32 bits: 64-bit divisions would take longer than all other arithmetic of the thread.
    const unsigned heads = p.heads, token = static_cast<unsigned>(row) / heads;
    return (static_cast<unsigned>(row) - token * heads) * p.tokens + token;
}

// VECTOR elements of a row, loaded and stored together.
template <typename T, int VECTOR> struct alignas(sizeof(T) * VECTOR) Items {
    T items[VECTOR];
};

// Return whether `divide_plain` gives exactly the result of operator / for this value and a divisor in [1, 2]. The
// result differs for 0, because the sign is lost, and for magnitudes at which an intermediate result overflows or is
// subnormal.
__device__ __forceinline__ bool is_plain(float value) {
    return fabsf(value) > 1e-20f && fabsf(value) < 1e30f; // false for NaN
}

// Return 1 / divisor for `divide_plain`, with an error of at most one unit in the last place.
__device__ __forceinline__ float reciprocal_of(float divisor) {
    float approximate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(divisor));
    return fmaf(approximate, fmaf(-divisor, approximate, 1.f), approximate);
}

// Return value / divisor, rounded as by operator /. The approximate quotient is corrected by its remainder (Markstein,
// 1990). Operator / would also compute the reciprocal again for every value, and check the range of its operands.
__device__ __forceinline__ float divide_plain(float value, float divisor, float reciprocal) {
    const float quotient = value * reciprocal;
    return fmaf(reciprocal, fmaf(-divisor, quotient, value), quotient);
}

constexpr int MERGE_THREADS = 128;

template <typename T, int VECTOR, bool HEADS_FIRST, int EACH = 1, bool POWER = false>
__global__ __launch_bounds__(MERGE_THREADS) void merge_states(const __grid_constant__ MergeParams p) {
    begin_behind_earlier_kernels();
    using Vector = Items<T, VECTOR>;
    const int vectors = POWER ? 1 << p.shift : p.head_dim / VECTOR;
    const long long first = (long long)blockIdx.x * (MERGE_THREADS * EACH) + threadIdx.x;
    Vector from_a[EACH], from_b[EACH];
    float a[EACH], b[EACH];
    long long rows[EACH], places[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const long long i = first + e * MERGE_THREADS;
        rows[e] = POWER ? i >> p.shift : i / vectors;
        if (rows[e] >= p.rows) continue;
        places[e] = place_of<HEADS_FIRST>(p, rows[e]);
        from_a[e] = static_cast<const Vector*>(p.out_a)[i];
        from_b[e] = static_cast<const Vector*>(p.out_b)[i];
        a[e] = load_lse(p.lse_a + places[e]), b[e] = load_lse(p.lse_b + places[e]);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
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
                // The output of an input without tokens may be NaN, so it is replaced by 0.
                const float value_a = a[e] == -CUDART_INF_F ? 0.f : to_float(from_a[e].items[j]);
                const float value_b = b[e] == -CUDART_INF_F ? 0.f : to_float(from_b[e].items[j]);
                merged.items[j] = from_float<T>(some ? fmaf(value_a, share_a, value_b * share_b) / sum : 0.f);
            }
        }
        static_cast<Vector*>(p.out)[i] = merged;
        if (i == rows[e] * vectors) p.lse[places[e]] = some ? larger + logf(sum) : -CUDART_INF_F;
    }
}
