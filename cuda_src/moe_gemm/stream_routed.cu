// The first product of a layer for one token or a few, on every GPU, by the router's ids.
//
//   x[r, j]   = sum over i of a[r / topk, i] * b[e, j, i],  e the expert of topk_ids[r], for r of tokens * topk rows
//   out[r, j] = activate(x[r, j], x[r, n / 2 + j]); moe_gemm/epilogue.cuh has all forms
//
// in 16 bits; the sums have the bits of moe_gemm/stream.cu. Rows whose expert is not here are not written. An expert
// that two tokens chose is read twice, the second time from L2.
//
// Grid: as many blocks as fit the GPU, of WARPS warps. The strips, PAIRS pairs of rows of weights for a row of the
// result, are dealt to the warps in turn.
//
// Speed of light: the bytes of the weights of the rows' experts, n * k numbers each. A warp reads the ids once, then
// streams. On an H200, a layer of one token (this and stream_summed.cu) of Qwen3-30B-A3B takes 23.7 us, where a
// sort, gemm_stream and unpermute_rows took 26.5 and the bytes of eight experts take 15.7 at 4.8 TB/s; Mixtral-8x7B's
// takes 163.9 us, whose bytes take 147.
#include "common/overlap.cuh"
#include "moe_gemm/stream_routed.cuh"

template <typename T, int ACTIVATION, int PAIRS> struct RoutedStrips {
    const RoutedParams& p;
    const RoutedRows rows;
    const int of_row, lane; // strips of a row

    __device__ __forceinline__ Strip at(int i) const {
        const int index = i / of_row, row = rows.row_of(index, lane);
        return {row, rows.expert_of_row(row), (i - index * of_row) * PAIRS};
    }

    __device__ __forceinline__ int source_of(int row) const { return row / p.topk; }

    __device__ __forceinline__ void finish(const Strip& strip, const float (&sums)[PAIRS][4]) const {
        const int pairs = p.n / 2;
        const long long row = strip.row;
        T* const out = static_cast<T*>(p.out);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            float both[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                both[side] = trace_of(sums[j], side, lane);
                const int weights = row_of_pair<ACTIVATION>(min(strip.pair + j, pairs - 1), side, pairs);
                if constexpr (ACTIVATION & BIASED) both[side] += bias_of<T>(p, strip.expert, weights);
            }
            if (lane != 0 || strip.pair + j >= pairs) continue;
            if constexpr (is_gated(ACTIVATION))
                out[row * pairs + strip.pair + j] = from_float<T>(::finish<ACTIVATION>(p, both[0], both[1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (strip.pair + j)) =
                    pack<T>(::finish<ACTIVATION>(p, both[0]), ::finish<ACTIVATION>(p, both[1]));
        }
    }
};

// T: __nv_bfloat16 or __half. ACTIVATION: as moe_gemm/epilogue.cuh has it. PAIRS of rows of a strip. LOADS: units of
// each row that a lane has under way. BLOCKS: blocks that fit a multiprocessor.
template <typename T, int ACTIVATION, int PAIRS, int LOADS, int WARPS, int BLOCKS>
__global__ __launch_bounds__(WARPS * 32, BLOCKS) void gemm_stream_routed(const __grid_constant__ RoutedParams p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const RoutedRows rows(lane < p.rows ? expert_of(p, lane) : -1);
    const int of_row = (p.n / 2 + PAIRS - 1) / PAIRS;
    const RoutedStrips<T, ACTIVATION, PAIRS> strips{p, rows, of_row, lane};
    stream_strips<T, ACTIVATION, PAIRS, LOADS>(p, strips, blockIdx.x * WARPS + warp, __popc(rows.here) * of_row,
                                               gridDim.x * WARPS);
}
