// Merge attention over two sets of tokens into attention over both: each weighs exp(lse).
//
// Grid: a thread per VECTOR elements of `out`.
#include "common/numeric.cuh"

struct MergeParams {
    const void* out_a;  // [rows, head_dim]  T
    const float* lse_a; // [rows], natural
    const void* out_b;
    const float* lse_b;
    void* out;
    float* lse;
    long long rows;
    int head_dim;
};

template <typename T, int VECTOR>
__global__ __launch_bounds__(128) void merge_states(const __grid_constant__ MergeParams p) {
    struct alignas(sizeof(T) * VECTOR) Vector {
        T items[VECTOR];
    };
    const int vectors = p.head_dim / VECTOR;
    const long long i = blockIdx.x * 128ll + threadIdx.x, row = i / vectors;
    if (row >= p.rows) return;
    const float a = p.lse_a[row], b = p.lse_b[row];
    const float larger = a == a && b == b ? fmaxf(a, b) : CUDART_NAN_F;
    const Vector from_a = static_cast<const Vector*>(p.out_a)[i], from_b = static_cast<const Vector*>(p.out_b)[i];
    const bool some = larger != -CUDART_INF_F;
    const float share_a = some ? expf(a - larger) : 0.f, share_b = some ? expf(b - larger) : 0.f;
    const float sum = share_a + share_b;
    Vector merged;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        // What saw no token may hold anything.
        const float value_a = a == -CUDART_INF_F ? 0.f : to_float(from_a.items[j]);
        const float value_b = b == -CUDART_INF_F ? 0.f : to_float(from_b.items[j]);
        merged.items[j] = from_float<T>(some ? (value_a * share_a + value_b * share_b) / sum : 0.f);
    }
    static_cast<Vector*>(p.out)[i] = merged;
    if (i % vectors == 0) p.lse[row] = some ? larger + logf(sum) : -CUDART_INF_F;
}
