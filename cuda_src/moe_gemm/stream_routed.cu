// First GEMM of an MoE layer with 16-bit weights, for one or a few tokens, on every GPU. It reads the router's ids
// directly, so the tokens need not be sorted by expert.
//
//   x[r, j]   = sum over i of a[r / topk, i] * b[e, j, i]
//   out[r, j] = activate(x[r, j], x[r, n / 2 + j]); moe_gemm/epilogue.cuh lists all forms
//
// The result has one row for each of the `tokens * topk` slots; row r belongs to token `r / topk`. `e` is the expert
// with the id topk_ids[r]. If expert `e` is not in these weights, row r is not written. The sums are bit-identical to
// moe_gemm/stream.cu. If two tokens chose the same expert, its weights are read twice, the second time from L2.
//
// Grid: as many blocks of WARPS warps as are resident at once. The work item of a warp, called a strip, is PAIRS pairs
// of rows of weights for one row of the result. Strips are distributed to the warps round-robin.
//
// Speed of light: the time to read the weights of the rows' experts, n * k elements per expert. A warp reads the ids
// once and then only reads weights and tokens. The table shows times of a layer with one token (this kernel and
// stream_summed.cu) on an H200. The second column is the time to read the weights at 4.8 TB/s; the third is the time of
// the kernels for sorted tokens:
//
//                   these kernels   weights alone at 4.8 TB/s   sort, gemm_stream, unpermute_rows
//   Qwen3-30B-A3B   23.7 us         15.7 us (8 experts)         26.5 us
//   Mixtral-8x7B    163.9 us        147 us                      not measured
#include "common/overlap.cuh"
#include "moe_gemm/stream_routed.cuh"

template <typename T, int ACTIVATION, int PAIRS> struct RoutedStrips {
    const RoutedParams& p;
    const RoutedRows rows;
    const int of_row, lane; // of_row: strips of a row of the result

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

// T: __nv_bfloat16 or __half. ACTIVATION: see moe_gemm/epilogue.cuh. PAIRS: pairs of rows of weights per strip. LOADS:
// units of a row that a lane loads at once. BLOCKS: resident blocks per multiprocessor.
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
