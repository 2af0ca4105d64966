// ---- few rows of each expert ----
//
// All that counts is the speed at which weights arrive. DRAM gives its full speed only to long stretches, so a warp reads
// 512 bytes of one row of weights at a time, and not the fragments of 8 rows that a product of tensor cores wants. It
// multiplies on tensor cores all the same: the 8 rows of a fragment are then 8 stretches along k of one row of weights (4
// lanes x 16 bytes each), the 8 columns the same stretches of one token, and of the 8 x 8 sums of products the diagonal is
// wanted: its sum is one output. The other 56 are for nothing, and cost nothing, as tensor cores would be idle. Rows 8 ... 15
// of the fragment are another row of weights: with an activation gate and up of one output, else its neighbour.
//
//   lane (g, q) = (lane / 4, lane % 4) holds 16 neighbours (of 8 bits; of 16 bits, 8) of each 512 bytes, of weights and of
//   tokens alike: a product's (2 q, 2 q + 1, 2 q + 8, 2 q + 9) along k in row g of one and in column g of the other.
//
//   gemm_stream<...>   grid: x over the pairs of rows of weights, y at least over the tiles of TOKENS rows that the groups
//                      have; blocks of WARPS warps of PAIRS pairs each
//
// A tile reads the weights anew, so TOKENS is the most that a group is expected to have.

// T: of the output, and of operands of 16 bits. FORMAT: PLAIN or FP8. BLOCK_SCALES: of FP8, a scale for every 1 x 128 numbers
#include "common/activation.cuh"
#include "common/fp8.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "moe_gemm/groups.cuh"

// T: of the output, and of operands of 16 bits. FORMAT: PLAIN or FP8. BLOCK_SCALES: of FP8, a scale for every 1 x 128 numbers
// of a and 128 x 128 of b. LOADS: of 16 bytes of each row of weights, under way at once. BLOCKS: to fit a multiprocessor.
template <typename T, int FORMAT, bool BLOCK_SCALES, int TOKENS, int ACTIVATION, int PAIRS, int WARPS, int LOADS,
          int BLOCKS>
__global__ __launch_bounds__(WARPS * 32, BLOCKS) void gemm_stream(const __grid_constant__ GemmParams p) {
    constexpr int PER_LOAD = FORMAT == FP8 ? 16 : 8; // numbers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ GroupTile tile;
    if (!find_tile<TOKENS, WARPS * 32>(p, blockIdx.y, tile)) return;
    const int first = tile.begin + (int(blockIdx.y) - tile.before) * TOKENS, count = min(tile.end - first, TOKENS);
    const int pairs = p.n / 2, pair = (blockIdx.x * WARPS + warp) * PAIRS;
    if (pair >= pairs) return;
    auto weight_of = [&](int i) {
        const int mine = min(pair + i / 2, pairs - 1);
        return ACTIVATION ? mine + i % 2 * pairs : 2 * mine + i % 2;
    };
    auto token_of = [&](int t) { return source_of(p, first + min(t, count - 1)); };
    // Of a row. In 32 bits, as what lies before a row of `a` or, of an expert, of b: the host refuses 64 GiB of them.
    const int loads = p.k / PER_LOAD;
    const uint4* const weights = static_cast<const uint4*>(p.b) + (long long)tile.expert * p.n * loads + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;
    unsigned token_at[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) token_at[t] = unsigned(token_of(t)) * loads;

    // By blocks: where the expert's scales are. Else what a row's are multiplied with.
    const int blocks = (p.k + 127) / 128;
    const float* const b_scale =
        static_cast<const float*>(p.b_scale) + (long long)tile.expert * (BLOCK_SCALES     ? (p.n + 127) / 128 * blocks
                                                                         : p.b_scale_step ? p.n
                                                                                          : 1);

    float sums[TOKENS][PAIRS][4] = {};
    for (int at = 0; at < loads; at += 32 * LOADS) {
        uint4 w[2 * PAIRS][LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j)
                w[j][i] =
                    load_or_zero(weights + (unsigned(weight_of(j)) * loads + at + 32 * i), at + 32 * i + lane < loads);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (t > 0 && t >= count) break;
            uint4 x[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                x[i] = make_uint4(0, 0, 0, 0);
                if (at + 32 * i + lane < loads) x[i] = __ldg(tokens + (token_at[t] + at + 32 * i));
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    const uint4 w0 = w[2 * j][i], w1 = w[2 * j + 1][i];
                    if constexpr (FORMAT != FP8) {
                        const unsigned low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
                        multiply_add<T>(sums[t][j], low, x[i].x, x[i].y);
                        multiply_add<T>(sums[t][j], high, x[i].z, x[i].w);
                    } else {
                        float part[4] = {};
                        float (&into)[4] = BLOCK_SCALES ? part : sums[t][j];
                        const unsigned words[3][4] = {
                            {w0.x, w0.y, w0.z, w0.w}, {w1.x, w1.y, w1.z, w1.w}, {x[i].x, x[i].y, x[i].z, x[i].w}};
#pragma unroll
                        for (int word = 0; word < 4; ++word) {
                            unsigned halves[3][2];
#pragma unroll
                            for (int row = 0; row < 3; ++row) to_halves<__nv_fp8_e4m3>(halves[row], words[row][word]);
                            const unsigned both[4] = {halves[0][0], halves[1][0], halves[0][1], halves[1][1]};
                            multiply_add<__half>(into, both, halves[2][0], halves[2][1]);
                        }
                        if constexpr (BLOCK_SCALES) {
                            // The four lanes of a stretch are within one block of 128.
                            const int block = min((at + 32 * i + lane) / 8, blocks - 1);
                            const float by_token = p.a_scale[(long long)token_of(t) * blocks + block];
#pragma unroll
                            for (int row = 0; row < 2; ++row) {
                                const float scale = by_token * b_scale[weight_of(2 * j + row) / 128 * blocks + block];
                                sums[t][j][2 * row] += part[2 * row] * scale;
                                sums[t][j][2 * row + 1] += part[2 * row + 1] * scale;
                            }
                        }
                    }
                }
        }
    }

    // Has (g, g), in the even place or the odd one.
    const bool diagonal = lane % 4 == lane / 8, odd = lane / 4 % 2;
    T* const out = static_cast<T*>(p.out);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (t >= count) break;
        const long long row = first + t;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            float both[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float mine = odd ? sums[t][j][2 * i + 1] : sums[t][j][2 * i];
                both[i] = lanes_sum<32>(diagonal ? mine : 0.f);
                if constexpr (FORMAT == FP8 && !BLOCK_SCALES)
                    both[i] *= p.a_scale[(long long)token_of(t) * p.a_scale_step] *
                               b_scale[(long long)weight_of(2 * j + i) * p.b_scale_step];
            }
            if (lane != 0 || pair + j >= pairs) continue;
            if constexpr (ACTIVATION != NO_ACTIVATION)
                out[row * pairs + pair + j] = from_float<T>(activate<ACTIVATION>(both[0], both[1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (pair + j)) = pack<T>(both[0], both[1]);
        }
    }
}
