// GEMV with the weights of the experts that the router chose.
#pragma once
#include "moe_gemm/stream_rows.cuh"

// `rows` is tokens * topk; row t * topk + s is slot s of token t.
struct RoutedParams : GemmParams {
    const void* topk_ids;      // [tokens, topk]
    const int* expert_map;     // [global_experts], index in the weights; null: identity
    const float* topk_weights; // [tokens, topk], for gemm_stream_summed; null: 1
    int id_stride;             // 1: int32. 2: int64, whose low words are read
    int topk, global_experts;
};

// Return a row's expert, or -1 if the id is invalid or the expert is not in these weights.
__device__ __forceinline__ int expert_of(const RoutedParams& p, int row) {
    const int* const words = static_cast<const int*>(p.topk_ids) + row * p.id_stride;
    int expert = words[0];
    if (p.id_stride == 2 && words[1] != 0) return -1;
    if (unsigned(expert) >= unsigned(p.global_experts)) return -1;
    if (p.expert_map) expert = p.expert_map[expert];
    return unsigned(expert) < unsigned(p.experts) ? expert : -1;
}

// A lane has one row. The row is present if its expert is in these weights.
struct RoutedRows {
    const int expert;       // of the lane's row
    const unsigned present; // bit mask

    __device__ __forceinline__ RoutedRows(int expert)
        : expert(expert), present(__ballot_sync(FULL_WARP, expert >= 0)) {}

    // Return the present row with index `index` among the present rows.
    __device__ __forceinline__ int row_of(int index, int lane) const {
        const bool is_it = present >> lane & 1 && __popc(present & ((1u << lane) - 1)) == index;
        return __ffs(__ballot_sync(FULL_WARP, is_it)) - 1;
    }
    __device__ __forceinline__ int expert_of_row(int row) const { return __shfl_sync(FULL_WARP, expert, row); }
};

// The work of a warp for result row `row`: PAIRS pairs of an expert's weight rows, beginning with pair `pair`.
struct WorkTile {
    int row, expert, pair;
};

// Compute work tiles `first`, `first + step`, ... below `end`. Functions of `work_tiles`:
//   at(i)                   returns work tile i
//   source_of(row)          returns the row of `a` for a result row
//   finish(work_tile, sums) stores the sums
// A lane that has multiplied a vector (16 bytes) of weights loads a later vector, of this or the next work tile, to the
// same registers, so that loads are always in flight. LANE_VECTORS: vectors of a row that a lane loads at once.
template <typename T, int ACTIVATION, int PAIRS, int LANE_VECTORS, class WorkTiles>
__device__ __forceinline__ void stream_work_tiles(const GemmParams& p, const WorkTiles& work_tiles, int first, int end,
                                                  int step) {
    if (first >= end) return;
    // Vectors of a token that a lane holds in registers. If the weights take 64 registers, only one vector fits.
    constexpr int BATCH = PAIRS * LANE_VECTORS < 8 ? 2 : 1;
    const int lane = threadIdx.x % 32, row_vectors = p.k / VECTOR_ELEMENTS, pairs = p.n / 2;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;

    uint4 w[2 * PAIRS][LANE_VECTORS];
    auto load = [&](int i, const WorkTile& work_tile, int at, bool wanted) {
        const uint4* const weights =
            static_cast<const uint4*>(p.b) + (long long)work_tile.expert * p.n * row_vectors + (at + 32 * i + lane);
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
            const unsigned row = row_of_pair<ACTIVATION>(min(work_tile.pair + j / 2, pairs - 1), j % 2, pairs);
            w[j][i] = load_or_zero(weights + row * unsigned(row_vectors), wanted && at + 32 * i + lane < row_vectors);
        }
    };

    WorkTile now = work_tiles.at(first);
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i) load(i, now, 0, true);
    float sums[PAIRS][4] = {};
    for (int at = 0;;) {
        WorkTile next = now;
        int next_at = at + 32 * LANE_VECTORS;
        const bool ends = next_at >= row_vectors;
        if (ends) {
            next_at = 0, first += step;
            if (first < end) next = work_tiles.at(first);
        }
        const bool has_next = !ends || first < end;
        const uint4* const token = tokens + unsigned(work_tiles.source_of(now.row)) * row_vectors + at;
#pragma unroll
        for (int i = 0; i < LANE_VECTORS; i += BATCH) {
            uint4 x[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                x[u] = make_uint4(0, 0, 0, 0);
                if (i + u < LANE_VECTORS && at + 32 * (i + u) + lane < row_vectors) x[u] = __ldg(token + 32 * (i + u));
            }
#pragma unroll
            for (int u = 0; u < BATCH && i + u < LANE_VECTORS; ++u) {
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
                    multiply_vectors<T>(sums[j], w[2 * j][i + u], w[2 * j + 1][i + u], x[u]);
                load(i + u, next, next_at, has_next);
            }
        }
        if (ends) {
            work_tiles.finish(now, sums);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[j][i] = 0.f;
        }
        if (!has_next) break;
        now = next, at = next_at;
    }
}
