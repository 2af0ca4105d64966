// What gemm_wgmma does otherwise with weights that lie as [experts, k, n].
//
// A tile of shared memory then has a step along k as a row, of 64 weights, and wgmma takes it as an MN-major operand; a
// stage has two of 64 steps. A product's rows are neighbours in memory, so gates and ups cannot be told to alternate by
// 8:
//
//   no gates     a tile for each warpgroup, as with weights [experts, n, k]
//   INTERLEAVED  the same. Gates and ups alternate by one: one thread has the sum of a gate and another one that of its
//                up, and `part_pairs` brings them together.
//   halves       64 gates, and their 64 ups. Each warpgroup multiplies both by its share of the tokens, and so has the
//                sums of a gate and its up in one thread.
#pragma once
#include "common/warp.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// Start the copies of a stage's weights, from row `first` of a tile's and step `x` along k on.
template <unsigned long long POLICY, int ACTIVATION>
__device__ __forceinline__ void load_transposed(const MappedGemmParams& p, unsigned to, int x, int first, int expert,
                                                unsigned barrier) {
#pragma unroll
    for (int i = 0; i < WARPGROUPS; ++i) {
        const int column = has_halves(ACTIVATION) ? first / 2 + i * (p.n / 2) : first + i * 64;
        tma_load<POLICY>(to + i * 64 * ROW_BYTES, p.b_map, column, x, expert, 0, barrier);
    }
}

// The weights of halves: 64 gates, and their ups.
struct MMajorPair {
    MMajor gates, ups;
};
template <typename A> constexpr bool IS_PAIR = false;
template <> constexpr bool IS_PAIR<MMajorPair> = true;

// The weights of a warpgroup in stage 0, where `stages` is.
template <bool TURNED, int ACTIVATION> __device__ __forceinline__ auto weights_at(unsigned stages, int warpgroup) {
    constexpr int TILE = 64 * ROW_BYTES;
    if constexpr (!TURNED)
        return k_major_descriptor(stages + warpgroup * TILE);
    else if constexpr (has_halves(ACTIVATION))
        return MMajorPair{mn_major_descriptor<TILE>(stages), mn_major_descriptor<TILE>(stages + TILE)};
    else
        return MMajor{mn_major_descriptor<TILE>(stages + warpgroup * TILE)};
}

// c += a b, or = a b without `add`, of numbers 16 i ... along k of the stage that lies `at` units of 16 bytes behind
// the first one.
template <typename T, int WIDTH, int REGISTERS>
__device__ __forceinline__ void multiply_weights(float (&c)[REGISTERS], unsigned long long a, unsigned long long b,
                                                 unsigned long long at, int i, bool add) {
    multiply_step<T, WIDTH>(c, a + at + (i * 32 >> 4), b + at + (i * 32 >> 4), add);
}
template <typename T, int WIDTH, int REGISTERS>
__device__ __forceinline__ void multiply_weights(float (&c)[REGISTERS], MMajor a, unsigned long long b,
                                                 unsigned long long at, int i, bool add) {
    multiply_step<T, WIDTH>(c, MMajor{a.descriptor + at + (i * 16 * ROW_BYTES >> 4)}, b + at + (i * 32 >> 4), add);
}
template <typename T, int WIDTH, int REGISTERS>
__device__ __forceinline__ void multiply_weights(float (&c)[REGISTERS], MMajorPair a, unsigned long long b,
                                                 unsigned long long at, int i, bool add) {
    using Half = float (&)[REGISTERS / 2];
    multiply_weights<T, WIDTH>(reinterpret_cast<Half>(c), a.gates, b, at, i, add);
    multiply_weights<T, WIDTH>(reinterpret_cast<Half>(c[REGISTERS / 2]), a.ups, b, at, i, add);
}

// Sums of which nothing is left, as `part_pairs` and `store_share` change them: the compiler would else take what they
// write for what the next tile's products add to, and wait for each product.
template <int REGISTERS> __device__ __forceinline__ void clear(float (&c)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) c[i] = 0.f;
}

// A warpgroup's share of the tokens of a tile, from a multiple of 8 on.
__device__ __forceinline__ WgmmaTile share_of(WgmmaTile tile, int warpgroup) {
    const int each = (tile.tokens + 15) / 16 * 8;
    // By a shuffle, so that the compiler knows that it is the same in all lanes.
    const int first = __shfl_sync(FULL_WARP, warpgroup * each, 0);
    tile.row += first;
    tile.tokens = min(max(tile.tokens - first, 0), each);
    return tile;
}

// Write a warpgroup's share of a tile: 64 columns of the result, of sums of gates in the first half of `c`, and of
// their ups in the second.
template <typename T, int ACTIVATION, int TOKENS>
__device__ __forceinline__ void store_share(const MappedGemmParams& p, float (&c)[TOKENS / 2], WgmmaTile tile,
                                            int warpgroup, unsigned staging, int& round) {
    constexpr int UPS = TOKENS / 4;
    const int first = tile.column + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4, columns = p.n / 2;
    float biases[2][2]; // of a thread's two gates, and of their ups
    if constexpr (ACTIVATION & BIASED) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            biases[i / 2][i % 2] =
                bias_of<T>(p, tile.expert, weight_row<ACTIVATION>(p, min(first + i % 2 * 8, columns - 1), i / 2));
    }
    auto biased = [&](float sum, int side, int i) {
        if constexpr (ACTIVATION & BIASED) return sum + biases[side][i];
        return sum;
    };
#pragma unroll
    for (int i = 0; i < UPS; ++i) {
        if (i % 4 == 0 && i * 2 >= tile.tokens) break;
        c[i] = finish<ACTIVATION>(p, biased(c[i], 0, i / 2 % 2), biased(c[UPS + i], 1, i / 2 % 2));
    }
    GemmParams of_result = p;
    of_result.n = columns;
    tile.column -= warpgroup * 64; // which store_tile adds
    store_tile<T, NO_ACTIVATION, TOKENS>(of_result, c, tile, warpgroup, staging, round);
}

// Bring the sums of gates and of their ups together, of at most `tokens` tokens. Of a warp's 16 weights a thread has
// weight lane / 4 and 8 more in a pair of sums each: an even one is a gate, the next its up. It gets gate lane / 4 of
// the warp's 8 in the first pair, and its up in the second. In each of two exchanges a thread gives one of its pairs.
template <int REGISTERS> __device__ __forceinline__ void part_pairs(float (&c)[REGISTERS], int tokens) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const bool has_ups = column & 1, is_high = column & 4;
    // The thread of the column's gate in the first exchange, if its weights are among the first 8, else of its up.
    const int first = column % 4 * 8 + lane % 4 + (is_high ? 4 : 0), second = first ^ 4;
#pragma unroll
    for (int i = 0; i < REGISTERS; i += 4) {
        if (i * 2 >= tokens) break;
        float a[2], b[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float low = c[i + j], high = c[i + 2 + j];
            a[j] = __shfl_sync(FULL_WARP, has_ups ? high : low, first);
            b[j] = __shfl_sync(FULL_WARP, has_ups ? low : high, second);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) c[i + j] = is_high ? b[j] : a[j], c[i + 2 + j] = is_high ? a[j] : b[j];
    }
}
