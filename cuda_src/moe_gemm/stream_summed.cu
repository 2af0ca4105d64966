// Second GEMM of an MoE layer with 16-bit weights, for one or a few tokens, on every GPU. It also computes the weighted
// sum of each token's rows.
//
//   x[t, s, j] = sum over i of a[t * topk + s, i] * b[e, j, i]
//   out[t, j]  = sum over s of topk_weights[t, s] * x[t, s, j]
//
// `e` is the expert of slot s of token t; the GEMM's result x is rounded to T. The result is bit-identical to
// moe_gemm/stream.cu followed by moe_permute/unpermute_rows.cu: the slots are added from the first to the last, and
// each product and each sum is rounded to float32. A slot whose expert is not in these weights adds nothing.
//
// Grid: blockIdx.x selects pairs of rows of weights, blockIdx.y the token. SLOTS warps of a block have the same PAIRS
// pairs, and each of these warps computes them for every SLOTS-th present slot of the token. A slot is present if its
// expert is in these weights. One warp then adds the results of the slots, which are in shared memory.
//
// Speed of light: the time to read the weights of the tokens' experts, n * k elements per expert.
#include "common/overlap.cuh"
#include "moe_gemm/stream_routed.cuh"

constexpr int MOST_SLOTS = 32; // one lane per slot

template <typename T, int ACTIVATION, int PAIRS> struct SummedStrips {
    const RoutedParams& p;
    const RoutedRows slots;
    float (&found)[2 * PAIRS][MOST_SLOTS];
    const int token, pair, lane;

    __device__ __forceinline__ Strip at(int i) const {
        const int slot = slots.row_of(i, lane);
        return {slot, slots.expert_of_row(slot), pair};
    }

    __device__ __forceinline__ int source_of(int slot) const { return token * p.topk + slot; }

    __device__ __forceinline__ void finish(const Strip& strip, const float (&sums)[PAIRS][4]) const {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            float sum = trace_of(sums[j / 2], j % 2, lane);
            if constexpr (ACTIVATION & BIASED) sum += bias_of<T>(p, strip.expert, min(2 * pair + j, p.n - 1));
            if (lane == 0) found[j][strip.row] = to_float(from_float<T>(::finish<ACTIVATION>(p, sum)));
        }
    }
};

// T, PAIRS, LOADS, WARPS, BLOCKS: see moe_gemm/stream_routed.cu. ACTIVATION: 0 or BIASED. SLOTS: warps that share a
// token.
template <typename T, int ACTIVATION, int PAIRS, int LOADS, int WARPS, int SLOTS, int BLOCKS>
__global__ __launch_bounds__(WARPS * 32, BLOCKS) void gemm_stream_summed(const __grid_constant__ RoutedParams p) {
    begin_behind_earlier_kernels();
    constexpr int GROUPS = WARPS / SLOTS;
    __shared__ float found[GROUPS][2 * PAIRS][MOST_SLOTS];
    const int lane = threadIdx.x % 32, group = threadIdx.x / (32 * SLOTS), part = threadIdx.x / 32 % SLOTS;
    const int token = blockIdx.y, pair = (blockIdx.x * GROUPS + group) * PAIRS;
    const RoutedRows slots(lane < p.topk ? expert_of(p, token * p.topk + lane) : -1);
    const SummedStrips<T, ACTIVATION, PAIRS> strips{p, slots, found[group], token, pair, lane};
    if (2 * pair < p.n) stream_strips<T, ACTIVATION, PAIRS, LOADS>(p, strips, part, __popc(slots.here), SLOTS);
    __syncthreads();
    if (part != 0) return;
    float weight = 1.f;
    if (p.topk_weights && lane < p.topk) weight = p.topk_weights[token * p.topk + lane];
    float sum = 0.f;
    for (int slot = 0; slot < p.topk; ++slot) {
        const float of_slot = __shfl_sync(FULL_WARP, weight, slot);
        if (lane < 2 * PAIRS && slots.here >> slot & 1)
            // No fma, as in unpermute_rows.
            sum = __fadd_rn(sum, __fmul_rn(of_slot, found[group][lane][slot]));
    }
    const int column = 2 * pair + lane;
    if (lane < 2 * PAIRS && column < p.n) static_cast<T*>(p.out)[(long long)token * p.n + column] = from_float<T>(sum);
}
