// Functions of gemm_wgmma for weights that are [experts, k, n] in memory.
//
// wgmma reads the weights as an MN-major operand. Its M rows are neighbours in memory, so TMA cannot alternate 8 gate
// rows and 8 up rows. A stage has two tiles of 64 rows of weights and 64 elements along k:
//
//   not gated    one tile per warpgroup
//   INTERLEAVED  one tile per warpgroup. Gates and ups alternate by rows; `deinterleave_gates` brings
//                their sums into one thread.
//   halves       64 gates, and their 64 ups. Each warpgroup multiplies both tiles by its share of the tokens, so one
//                thread has the sums of a gate and of its up.
#pragma once
#include "common/warp.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// Start the copies of a stage's two tiles of weights, from row `first` and index `x` along k on.
template <unsigned long long POLICY, int ACTIVATION>
__device__ __forceinline__ void load_transposed(const MappedGemmParams& p, unsigned to, int x, int first, int expert,
                                                unsigned barrier) {
#pragma unroll
    for (int i = 0; i < WARPGROUPS; ++i) {
        const int column = has_halves(ACTIVATION) ? first / 2 + i * (p.n / 2) : first + i * 64;
        tma_load<POLICY>(to + i * 64 * ROW_BYTES, p.b_map, column, x, expert, 0, barrier);
    }
}

struct MMajorPair {
    MMajor gates, ups;
};
template <typename A> constexpr bool IS_PAIR = false;
template <> constexpr bool IS_PAIR<MMajorPair> = true;

// Return the descriptor of a warpgroup's weights in stage 0.
template <bool B_TRANSPOSED, int ACTIVATION>
__device__ __forceinline__ auto weights_at(unsigned stages, int warpgroup) {
    constexpr int TILE = 64 * ROW_BYTES;
    if constexpr (!B_TRANSPOSED)
        return k_major_descriptor(stages + warpgroup * TILE);
    else if constexpr (has_halves(ACTIVATION))
        return MMajorPair{mn_major_descriptor<TILE>(stages), mn_major_descriptor<TILE>(stages + TILE)};
    else
        return MMajor{mn_major_descriptor<TILE>(stages + warpgroup * TILE)};
}

// Compute `c += a * b`, or `c = a * b` if `add` is false, for 16 elements along k from `16 * i` on. `at`: the stage's
// offset in descriptor units.
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

// Set all sums to 0 before a tile. Otherwise the compiler would assume that MMAs add to the sums that the epilogue
// modified in place, and would insert a wait after each MMA.
template <int REGISTERS> __device__ __forceinline__ void clear(float (&c)[REGISTERS]) {
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) c[i] = 0.f;
}

// Return a warpgroup's share of a tile: about half of the tokens.
__device__ __forceinline__ WgmmaTile share_of(WgmmaTile tile, int warpgroup) {
    const int share_tokens = (tile.tokens + 15) / 16 * 8;
    // The shuffle tells the compiler that the value is warp-uniform.
    const int first = __shfl_sync(FULL_WARP, warpgroup * share_tokens, 0);
    tile.row += first;
    tile.tokens = min(max(tile.tokens - first, 0), share_tokens);
    return tile;
}

// Write 64 result columns for a warpgroup's share of the tokens. `c`: sums of the gates, then of their ups.
template <typename T, int ACTIVATION, int TOKENS>
__device__ __forceinline__ void store_share(const MappedGemmParams& p, float (&c)[TOKENS / 2], WgmmaTile tile,
                                            int warpgroup, unsigned staging, int& round) {
    constexpr int UPS = TOKENS / 4;
    const int first = tile.column + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4, columns = p.n / 2;
    float biases[2][2]; // [gate, up][row]
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
    tile.column -= warpgroup * 64; // store_tile adds this offset
    store_tile<T, NO_ACTIVATION, TOKENS>(of_result, c, tile, warpgroup, staging, round);
}

// Bring the sums of a gate row and of its up row into one thread, for the first `tokens` tokens. A pair is the sums of
// one row for two tokens. Before the call a thread has one pair of row `lane / 4` and one of row `lane / 4 + 8` of its
// warp's 16 rows, where even rows are gates and odd rows their ups. After the call it has a pair of gate `lane / 4` (0
// to 7) and a pair of the up of this gate. In each of two shuffles a thread provides one of its pairs.
template <int REGISTERS> __device__ __forceinline__ void deinterleave_gates(float (&c)[REGISTERS], int tokens) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const bool has_ups = column & 1, is_high = column & 4;
    // Lane `first` has the gate if the gate is one of the first 8 rows. Otherwise it has the up.
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
