// Second GEMM of an MoE layer with 16-bit weights, for one or a few tokens, on every GPU, and the weighted sum of each
// token's rows.
//
//   x[t, s, j] = sum over i of a[t * topk + s, i] * b[e, j, i]
//   out[t, j]  = sum over s of topk_weights[t, s] * x[t, s, j]
//
// e is the expert of slot s of token t; x is rounded to T. A slot is present if its expert is in these weights; other
// slots add nothing. The result is bit-identical to moe_gemm/stream.cu followed by moe_permute/unpermute_rows.cu: slots
// are added in order, and each product and each sum is rounded to float32.
//
// Grid: blockIdx.x selects pairs of rows of weights, blockIdx.y the token. SLOTS warps share PAIRS pairs; each warp
// multiplies them for every SLOTS-th present slot. They write the results to shared memory, and one warp adds them.
//
// Speed of light: the time to read the weights of the tokens' experts.
#include "common/overlap.cuh"
#include "moe_gemm/stream_routed.cuh"

constexpr int MAX_SLOTS = 32; // one lane per slot

template <typename T, int ACTIVATION, int PAIRS> struct SummedWorkTiles {
    const RoutedParams& p;
    const RoutedRows slots;
    float (&slot_results)[2 * PAIRS][MAX_SLOTS];
    const int token, pair, lane;

    __device__ __forceinline__ WorkTile at(int i) const {
        const int slot = slots.row_of(i, lane);
        return {slot, slots.expert_of_row(slot), pair};
    }

    __device__ __forceinline__ int source_of(int slot) const { return token * p.topk + slot; }

    __device__ __forceinline__ void finish(const WorkTile& work_tile, const float (&sums)[PAIRS][4]) const {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            float sum = trace_of(sums[j / 2], j % 2, lane);
            if constexpr (ACTIVATION & BIASED) sum += bias_of<T>(p, work_tile.expert, min(2 * pair + j, p.n - 1));
            if (lane == 0) slot_results[j][work_tile.row] = to_float(from_float<T>(::finish<ACTIVATION>(p, sum)));
        }
    }
};

// ACTIVATION: 0 or BIASED. SLOTS: warps that share a token.
template <typename T, int ACTIVATION, int PAIRS, int LANE_VECTORS, int WARPS, int SLOTS, int BLOCKS_PER_SM>
__global__ __launch_bounds__(WARPS * 32,
                             BLOCKS_PER_SM) void gemm_stream_summed(const __grid_constant__ RoutedParams p) {
    begin_behind_earlier_kernels();
    constexpr int GROUPS = WARPS / SLOTS;
    __shared__ float slot_results[GROUPS][2 * PAIRS][MAX_SLOTS];
    const int lane = threadIdx.x % 32, group = threadIdx.x / (32 * SLOTS), slot_warp = threadIdx.x / 32 % SLOTS;
    const int token = blockIdx.y, pair = (blockIdx.x * GROUPS + group) * PAIRS;
    const RoutedRows slots(lane < p.topk ? expert_of(p, token * p.topk + lane) : -1);
    const SummedWorkTiles<T, ACTIVATION, PAIRS> work_tiles{p, slots, slot_results[group], token, pair, lane};
    if (2 * pair < p.n)
        stream_work_tiles<T, ACTIVATION, PAIRS, LANE_VECTORS>(p, work_tiles, slot_warp, __popc(slots.present), SLOTS);
    __syncthreads();
    if (slot_warp != 0) return;
    float weight = 1.f;
    if (p.topk_weights && lane < p.topk) weight = p.topk_weights[token * p.topk + lane];
    float sum = 0.f;
    for (int slot = 0; slot < p.topk; ++slot) {
        const float of_slot = __shfl_sync(FULL_WARP, weight, slot);
        if (lane < 2 * PAIRS && slots.present >> slot & 1)
            // No fma, as in unpermute_rows.
            sum = __fadd_rn(sum, __fmul_rn(of_slot, slot_results[group][lane][slot]));
    }
    const int column = 2 * pair + lane;
    if (lane < 2 * PAIRS && column < p.n) static_cast<T*>(p.out)[(long long)token * p.n + column] = from_float<T>(sum);
}
