// GEMM of few rows with the 16-bit weights of one expert or of a dense layer, on every GPU.
//
//   out[r, j] = sum over i of a[r, i] * b[0, j, i], or the activation of such sums as in moe_gemm/stream.cu
//
// for the rows r of the group of expert 0. The header of moe_gemm/stream.cu explains the method. With one expert a warp
// need not search for its tile, so it loads the offsets and its weights at the same time. If a row of weights is too
// long for one warp, or if there are few rows, SPLIT > 1 warps divide the row among them. The sums of these warps are
// added in shared memory.
//
// Grid: blockIdx.x selects pairs of rows of weights, blockIdx.y a tile of TOKENS rows. A block has PAIRS * ONE_WARPS /
// SPLIT pairs.
//
// Speed of light: the time to read the weights, n * k elements. If all blocks are resident at once (for example with 20
// MB of weights), all loads are in flight together, and the memory latency is added to this time only once.
#include "common/overlap.cuh"
#include "moe_gemm/groups.cuh"
#include "moe_gemm/stream_rows.cuh"

constexpr int ONE_WARPS = 4;

// T: __nv_bfloat16 or __half. ACTIVATION: see moe_gemm/epilogue.cuh. PAIRS: pairs of rows of weights per warp. LOADS:
// units (16 bytes) of a row that a lane loads at once. SPLIT: warps that share a row. BLOCKS: resident blocks per
// multiprocessor.
template <typename T, int TOKENS, int ACTIVATION, int PAIRS, int LOADS, int SPLIT, int BLOCKS>
__global__ __launch_bounds__(ONE_WARPS * 32, BLOCKS) void gemm_stream_one(const __grid_constant__ GemmParams p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SPLIT;
    const GroupRows group = rows_of(p, 0);
    const int loads = p.k / STREAM_UNIT, pairs = p.n / 2;
    const int pair = (blockIdx.x * (ONE_WARPS / SPLIT) + warp / SPLIT) * PAIRS;
    const uint4* const weights = static_cast<const uint4*>(p.b) + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;

    float sums[TOKENS][PAIRS][4] = {};
    int first = 0, count = 0;
    for (int at = part * 32 * LOADS; at < loads; at += SPLIT * 32 * LOADS) {
        uint4 w[2 * PAIRS][LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) {
                const unsigned row = row_of_pair<ACTIVATION>(min(pair + j / 2, pairs - 1), j % 2, pairs);
                w[j][i] = load_or_zero(weights + (row * loads + at + 32 * i), at + 32 * i + lane < loads);
            }
        // The first use of the offsets waits for their load. So it comes after the weight loads have been issued.
        first = group.first + blockIdx.y * TOKENS, count = min(group.first + group.count - first, TOKENS);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (t >= count) break;
            const uint4* const token = tokens + unsigned(first + t) * loads + at;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (at + 32 * i + lane < loads) x = __ldg(token + 32 * i);
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) multiply_units<T>(sums[t][j], w[2 * j][i], w[2 * j + 1][i], x);
            }
        }
    }

    __shared__ float of_warp[ONE_WARPS][TOKENS][PAIRS][2];
    float both[TOKENS][PAIRS][2];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                both[t][j][side] = trace_of(sums[t][j], side, lane);
                if (SPLIT > 1 && lane == 0) of_warp[warp][t][j][side] = both[t][j][side];
            }
    if constexpr (SPLIT > 1) __syncthreads();
    if (part != 0 || lane != 0) return;
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
                for (int i = 1; i < SPLIT; ++i) both[t][j][side] += of_warp[warp + i][t][j][side];
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
