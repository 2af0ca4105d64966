// Stream the weights of the experts that the router chose. The kernels read the router's ids directly, so no sort of
// the tokens precedes them.
#pragma once
#include "moe_gemm/stream_rows.cuh"

// `rows` is tokens * topk; row t * topk + s is slot s of token t.
struct RoutedParams : GemmParams {
    const void* topk_ids;      // [tokens, topk], int32 or int64
    const int* expert_map;     // [global_experts], index of each expert in the weights; null: identity
    const float* topk_weights; // [tokens, topk]; null: 1. Only for gemm_stream_summed
    int id_words;              // 1: ids are int32. 2: ids are int64
    int topk, global_experts;
};

// Return the index of a row's expert in the weights. Return -1 if the id is invalid or the expert is not in these
// weights.
__device__ __forceinline__ int expert_of(const RoutedParams& p, int row) {
    const int* const words = static_cast<const int*>(p.topk_ids) + row * p.id_words;
    int expert = words[0];
    if (p.id_words == 2 && words[1] != 0) return -1;
    if (unsigned(expert) >= unsigned(p.global_experts)) return -1;
    if (p.expert_map) expert = p.expert_map[expert];
    return unsigned(expert) < unsigned(p.experts) ? expert : -1;
}

// The experts of up to 32 rows, one row per lane. A row is present if its expert is in these weights. Present rows are
// numbered from 0, in row order.
struct RoutedRows {
    const int expert;    // expert of the lane's row
    const unsigned here; // bit mask of the present rows

    __device__ __forceinline__ RoutedRows(int expert) : expert(expert), here(__ballot_sync(FULL_WARP, expert >= 0)) {}

    // Return the present row whose number among the present rows is `index`.
    __device__ __forceinline__ int row_of(int index, int lane) const {
        const bool is_it = here >> lane & 1 && __popc(here & ((1u << lane) - 1)) == index;
        return __ffs(__ballot_sync(FULL_WARP, is_it)) - 1;
    }
    __device__ __forceinline__ int expert_of_row(int row) const { return __shfl_sync(FULL_WARP, expert, row); }
};

// Work item of a warp: multiply PAIRS pairs of rows of an expert's weights, starting at pair `pair`, for row `row` of
// the result.
struct Strip {
    int row, expert, pair;
};

// Compute the work items (strips) `first`, `first + step`, ... below `end`. `strips` has these functions:
//   at(i)                returns strip i
//   source_of(row)       returns the row of `a` for a strip's row
//   finish(strip, sums)  stores the sums of a strip
// As soon as a lane has multiplied a unit (16 bytes of weights), it loads a later unit to the same registers, if
// necessary from the next strip. So loads are always in flight. LOADS: units of a row that a lane loads at once.
template <typename T, int ACTIVATION, int PAIRS, int LOADS, class Strips>
__device__ __forceinline__ void stream_strips(const GemmParams& p, const Strips& strips, int first, int end, int step) {
    if (first >= end) return;
    // Number of units of a token that a lane loads at once. If the weights take 64 registers, only one unit fits.
    constexpr int BATCH = PAIRS * LOADS < 8 ? 2 : 1;
    const int lane = threadIdx.x % 32, loads = p.k / STREAM_UNIT, pairs = p.n / 2;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;

    uint4 w[2 * PAIRS][LOADS];
    auto load = [&](int i, const Strip& strip, int at, bool wanted) {
        const uint4* const weights =
            static_cast<const uint4*>(p.b) + (long long)strip.expert * p.n * loads + (at + 32 * i + lane);
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            const unsigned row = row_of_pair<ACTIVATION>(min(strip.pair + j / 2, pairs - 1), j % 2, pairs);
            w[j][i] = load_or_zero(weights + row * unsigned(loads), wanted && at + 32 * i + lane < loads);
        }
    };

    Strip now = strips.at(first);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) load(i, now, 0, true);
    float sums[PAIRS][4] = {};
    for (int at = 0;;) {
        Strip next = now;
        int next_at = at + 32 * LOADS;
        const bool ends = next_at >= loads;
        if (ends) {
            next_at = 0, first += step;
            if (first < end) next = strips.at(first);
        }
        const bool goes_on = !ends || first < end;
        const uint4* const token = tokens + unsigned(strips.source_of(now.row)) * loads + at;
#pragma unroll
        for (int i = 0; i < LOADS; i += BATCH) {
            uint4 x[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                x[u] = make_uint4(0, 0, 0, 0);
                if (i + u < LOADS && at + 32 * (i + u) + lane < loads) x[u] = __ldg(token + 32 * (i + u));
            }
#pragma unroll
            for (int u = 0; u < BATCH && i + u < LOADS; ++u) {
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) multiply_units<T>(sums[j], w[2 * j][i + u], w[2 * j + 1][i + u], x[u]);
                load(i + u, next, next_at, goes_on);
            }
        }
        if (ends) {
            strips.finish(now, sums);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[j][i] = 0.f;
        }
        if (!goes_on) break;
        now = next, at = next_at;
    }
}
