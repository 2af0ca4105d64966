// Merge the partial results of the splits of `decoder_attention`.
//
//   row_max = max over splits of statistics[split, row].x
//   weight  = 2^(statistics[split, row].x - row_max)
//   out     = sum over splits of partial[split, row] * weight / sum over splits of statistics[split, row].y * weight
//
// Grid: one block per row, one thread per element. A warp takes 32 splits at a time. Lane l holds the statistics of the
// l-th of these splits.
//
// Speed of light: latency of the launch and of two dependent loads. `partial` has at most 256 KB per row and is still
// in L2.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "decoder_attention/softmax.cuh"

struct CombineParams {
    const float* partial;     // [splits, rows, dim]: weighted sums of values
    const float2* statistics; // [splits, rows]: row_max and row_sum
    void* out;                // [rows, dim]  T
    int rows;
    int dim;
    int splits;
};

template <typename T> __global__ __launch_bounds__(256) void combine(const __grid_constant__ CombineParams p) {
    begin_behind_earlier_kernels();
    const int row = blockIdx.x, element = threadIdx.x, lane = threadIdx.x % 32;
    const long long split_stride = (long long)p.rows * p.dim;
    const float* partial = p.partial + (long long)row * p.dim + min(element, p.dim - 1);
    float row_max = -CUDART_INF_F, row_sum = 0.f, sum = 0.f;
    for (int first = 0; first < p.splits; first += 32) {
        float2 state = make_float2(-CUDART_INF_F, 0.f);
        if (first + lane < p.splits) state = p.statistics[(long long)(first + lane) * p.rows + row];
        const float new_max = fmaxf(row_max, lanes_max<32>(state.x));
        const float correction = fast_exp2(row_max - softmax_offset(new_max));
        const float weight = fast_exp2(state.x - softmax_offset(new_max));
        row_max = new_max;
        row_sum = row_sum * correction + lanes_sum<32>(state.y * weight);
        sum *= correction;
        const int count = min(32, p.splits - first);
#pragma unroll 8
        for (int s = 0; s < count; ++s)
            sum = fmaf(__shfl_sync(FULL_WARP, weight, s), partial[(first + s) * split_stride], sum);
    }
    if (element < p.dim)
        static_cast<T*>(p.out)[(long long)row * p.dim + element] = from_float<T>(normalized(sum, row_sum));
}
