// Merge the partial results of each row of `decoder_attention`. A row has one partial result per split. A split is a
// range of cache entries.
//
//   largest = max over splits of statistics[split, row].x
//   weight  = 2^(statistics[split, row].x - largest)
//   out     = sum over splits of partial[split, row] * weight / sum over splits of statistics[split, row].y * weight
//
// Grid: one block per row. A thread computes one element of the row. The splits are processed in chunks of 32, and lane
// l of each warp holds the statistics of the l-th split of the current chunk.
//
// Speed of light: latency of the launch and of two dependent loads. `partial` has at most 256 KB per row. It is read
// once, from L2, because `decoder_attention` has just written it. The time for one sequence in decoder_attention.cu
// (68% of a copy) includes this kernel.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "decoder_attention/softmax.cuh"

struct CombineParams {
    const float* partial;     // [splits, rows, dim]: weighted sums of values
    const float2* statistics; // [splits, rows]: the largest score and the sum of the weights
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
    float largest = -CUDART_INF_F, total = 0.f, sum = 0.f;
    for (int first = 0; first < p.splits; first += 32) {
        float2 theirs = make_float2(-CUDART_INF_F, 0.f);
        if (first + lane < p.splits) theirs = p.statistics[(long long)(first + lane) * p.rows + row];
        const float new_largest = fmaxf(largest, lanes_max<32>(theirs.x));
        const float correction = fast_exp2(largest - reference(new_largest));
        const float weight = fast_exp2(theirs.x - reference(new_largest));
        largest = new_largest;
        total = total * correction + lanes_sum<32>(theirs.y * weight);
        sum *= correction;
        const int count = min(32, p.splits - first);
#pragma unroll 8
        for (int s = 0; s < count; ++s)
            sum = fmaf(__shfl_sync(FULL_WARP, weight, s), partial[(first + s) * split_stride], sum);
    }
    if (element < p.dim) static_cast<T*>(p.out)[(long long)row * p.dim + element] = from_float<T>(quotient(sum, total));
}
