// First GEMM of an MoE layer with 16-bit weights, for one or a few tokens, on every GPU. It reads the router's ids, so
// the tokens need not be sorted by expert.
//
//   x[r, j]   = sum over i of a[r / topk, i] * b[e, j, i]
//   out[r, j] = activate(x[r, j], x[r, n / 2 + j]), or x[r, j] (moe_gemm/epilogue.cuh)
//
// Row r is slot `r % topk` of token `r / topk`, with expert id topk_ids[r]; e is the index of this expert in these
// weights. If the expert is not in these weights, row r is not written. The sums are bit-identical to
// moe_gemm/stream.cu.
//
// Grid: the blocks that are resident at once. A work tile is PAIRS pairs of rows of weights for one row of the result;
// warps take work tiles round-robin.
//
// Speed of light: the time to read the weights of the rows' experts. Times of a layer with one token (this kernel and
// stream_summed.cu) on an H200:
//
//                   these kernels   weights alone at 4.8 TB/s   sort, gemm_stream, unpermute_rows
//   Qwen3-30B-A3B   23.7 us         15.7 us (8 experts)         26.5 us
//   Mixtral-8x7B    163.9 us        147 us                      not measured
#include "common/overlap.cuh"
#include "moe_gemm/stream_routed.cuh"

template <typename T, int ACTIVATION, int PAIRS> struct RoutedWorkTiles {
    const RoutedParams& p;
    const RoutedRows rows;
    const int row_tiles, lane; // row_tiles: work tiles of a row

    __device__ __forceinline__ WorkTile at(int i) const {
        const int index = i / row_tiles, row = rows.row_of(index, lane);
        return {row, rows.expert_of_row(row), (i - index * row_tiles) * PAIRS};
    }

    __device__ __forceinline__ int source_of(int row) const { return row / p.topk; }

    __device__ __forceinline__ void finish(const WorkTile& work_tile, const float (&sums)[PAIRS][4]) const {
        const int pairs = p.n / 2;
        const long long row = work_tile.row;
        T* const out = static_cast<T*>(p.out);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            float both[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                both[side] = trace_of(sums[j], side, lane);
                const int weights = row_of_pair<ACTIVATION>(min(work_tile.pair + j, pairs - 1), side, pairs);
                if constexpr (ACTIVATION & BIASED) both[side] += bias_of<T>(p, work_tile.expert, weights);
            }
            if (lane != 0 || work_tile.pair + j >= pairs) continue;
            if constexpr (is_gated(ACTIVATION))
                out[row * pairs + work_tile.pair + j] = from_float<T>(::finish<ACTIVATION>(p, both[0], both[1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (work_tile.pair + j)) =
                    pack<T>(::finish<ACTIVATION>(p, both[0]), ::finish<ACTIVATION>(p, both[1]));
        }
    }
};

template <typename T, int ACTIVATION, int PAIRS, int LANE_VECTORS, int WARPS, int BLOCKS_PER_SM>
__global__ __launch_bounds__(WARPS * 32,
                             BLOCKS_PER_SM) void gemm_stream_routed(const __grid_constant__ RoutedParams p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const RoutedRows rows(lane < p.rows ? expert_of(p, lane) : -1);
    const int row_tiles = (p.n / 2 + PAIRS - 1) / PAIRS;
    const RoutedWorkTiles<T, ACTIVATION, PAIRS> work_tiles{p, rows, row_tiles, lane};
    stream_work_tiles<T, ACTIVATION, PAIRS, LANE_VECTORS>(p, work_tiles, blockIdx.x * WARPS + warp,
                                                          __popc(rows.present) * row_tiles, gridDim.x * WARPS);
}
