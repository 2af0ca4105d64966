// The method of stream.cu for the 16-bit weights of one expert or of a dense layer.
//
// A warp need not search for its tile, so it loads the offsets and its weights at the same time. SPLIT > 1 warps divide
// long rows of weights, and add their sums in shared memory.
//
// Grid: blockIdx.x selects PAIRS * ONE_WARPS / SPLIT pairs of rows of weights, blockIdx.y a tile of TOKENS rows.
//
// Speed of light: the time to read the weights. If all blocks are resident at once (for example with 20 MB of weights),
// all loads are in flight together, and the memory latency adds to this time only once.
#include "common/overlap.cuh"
#include "moe_gemm/groups.cuh"
#include "moe_gemm/stream_rows.cuh"

constexpr int ONE_WARPS = 4;

// PAIRS: pairs of weight rows per warp. LANE_VECTORS: vectors of a row that a lane loads at once. SPLIT: warps that
// share a row.
template <typename T, int TOKENS, int ACTIVATION, int PAIRS, int LANE_VECTORS, int SPLIT, int BLOCKS_PER_SM>
__global__ __launch_bounds__(ONE_WARPS * 32, BLOCKS_PER_SM) void gemm_stream_one(const __grid_constant__ GemmParams p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split_index = warp % SPLIT;
    const GroupRows group = rows_of(p, 0);
    const int row_vectors = p.k / VECTOR_ELEMENTS, pairs = p.n / 2;
    const int pair = (blockIdx.x * (ONE_WARPS / SPLIT) + warp / SPLIT) * PAIRS;
    const uint4* const weights = static_cast<const uint4*>(p.b) + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;

    float sums[TOKENS][PAIRS][4] = {};
    int first = 0, count = 0;
    for (int at = split_index * 32 * LANE_VECTORS; at < row_vectors; at += SPLIT * 32 * LANE_VECTORS) {
        uint4 w[2 * PAIRS][LANE_VECTORS];
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) {
                const unsigned row = row_of_pair<ACTIVATION>(min(pair + j / 2, pairs - 1), j % 2, pairs);
                w[j][i] = load_or_zero(weights + (row * row_vectors + at + 32 * i), at + 32 * i + lane < row_vectors);
            }
        // The first use of the offsets waits for their load, so it follows the weight loads.
        first = group.first + blockIdx.y * TOKENS, count = min(group.first + group.count - first, TOKENS);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (t >= count) break;
            const uint4* const token = tokens + unsigned(first + t) * row_vectors + at;
#pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (at + 32 * i + lane < row_vectors) x = __ldg(token + 32 * i);
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) multiply_vectors<T>(sums[t][j], w[2 * j][i], w[2 * j + 1][i], x);
            }
        }
    }

    __shared__ float warp_sums[ONE_WARPS][TOKENS][PAIRS][2];
    float both[TOKENS][PAIRS][2];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                both[t][j][side] = trace_of(sums[t][j], side, lane);
                if (SPLIT > 1 && lane == 0) warp_sums[warp][t][j][side] = both[t][j][side];
            }
    if constexpr (SPLIT > 1) __syncthreads();
    if (split_index != 0 || lane != 0) return;
    first = group.first + blockIdx.y * TOKENS, count = min(group.first + group.count - first, TOKENS);
    T* const out = static_cast<T*>(p.out);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (t >= count) break;
        const long long row = first + t;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            if (pair + j >= pairs) break;
#pragma unroll
            for (int side = 0; side < 2; ++side) {
#pragma unroll
                for (int i = 1; i < SPLIT; ++i) both[t][j][side] += warp_sums[warp + i][t][j][side];
                if constexpr (ACTIVATION & BIASED)
                    both[t][j][side] += bias_of<T>(p, 0, row_of_pair<ACTIVATION>(pair + j, side, pairs));
            }
            if constexpr (is_gated(ACTIVATION))
                out[row * pairs + pair + j] = from_float<T>(finish<ACTIVATION>(p, both[t][j][0], both[t][j][1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (pair + j)) =
                    pack<T>(finish<ACTIVATION>(p, both[t][j][0]), finish<ACTIVATION>(p, both[t][j][1]));
        }
    }
}
