// How a row is put together from what several parts found of it, for combine_parts and for the blocks that attend and then
// merge (merge_last.cuh). The visits of a row are added up in an order that depends on TEAM alone: 1: one after the other; 8: every
// 8th by each of 8 warps, whose sums are added one after the other.
#pragma once
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

// The partial results of a row.
struct Partials {
    const float* lses;  // [count], `step` apart
    const float4* outs; // [count][fours], `step` rows apart
    long long step;
    int count, fours;
};

// Call `use` with the lse of every 32nd visit, from this lane's on.
template <int TEAM, typename USE>
__device__ __forceinline__ void each_lse(const Partials& row, int lane, const USE& use) {
    // Several at once would spill registers from sm_100 on, where a warp has a whole row.
    if constexpr (TEAM == 1 && __CUDA_ARCH__ >= 1000) {
#pragma unroll 1
        for (int split = lane; split < row.count; split += 32) use(row.lses[split * row.step]);
    } else {
        for (int split = lane; split < row.count; split += 32) use(row.lses[split * row.step]);
    }
}

// Start loading BATCH visits of those that a warp takes, from visit `split` on.
template <int DIM_V, int TEAM, int EACH, int BATCH>
__device__ __forceinline__ void load_batch(float4 (&values)[BATCH][EACH], const Partials& row, int split,
                                           int first_four) {
#pragma unroll
    for (int a = 0; a < BATCH; ++a)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int four = first_four + i * 32;
            if (split + a * TEAM < row.count)
                values[a][i] = DIM_V && DIM_V % 128 == 0 || four < row.fours
                                   ? row.outs[(split + a * TEAM) * row.step * row.fours + four]
                                   : make_float4(0.f, 0.f, 0.f, 0.f);
        }
}

// Add a batch to the sums; `largest` is the largest lse of all visits.
template <int TEAM, int EACH, int BATCH>
__device__ __forceinline__ void add_batch(float4 (&total)[EACH], const float4 (&values)[BATCH][EACH],
                                          const Partials& row, int split, float largest) {
#pragma unroll
    for (int a = 0; a < BATCH; ++a) {
        if (split + a * TEAM >= row.count) continue;
        const float lse = row.lses[(split + a * TEAM) * row.step];
        const float weight = lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            total[i].x += weight * values[a][i].x, total[i].y += weight * values[a][i].y;
            total[i].z += weight * values[a][i].z, total[i].w += weight * values[a][i].w;
        }
    }
}

// Add what the other warps of a team have to the first warp's.
template <int TEAM, int EACH>
__device__ __forceinline__ void add_others(float4 (&total)[EACH], const float4 (&found)[TEAM][EACH * 32], int lane) {
#pragma unroll
    for (int other = 1; other < TEAM; ++other)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float4 one = found[other][i * 32 + lane];
            total[i].x += one.x, total[i].y += one.y, total[i].z += one.z, total[i].w += one.w;
        }
}

// Write a row. `sum` is that of the visits' weights.
template <typename T, int EACH>
__device__ __forceinline__ void write_row(const Params& p, const Visit& visit, int kv_head, int r,
                                          const float4 (&total)[EACH], float largest, float sum, int first_four,
                                          int fours) {
    const Row row(p, visit, kv_head, r);
    const float lse = sum == 0.f ? -CUDART_INF_F : largest + log2f(sum);
    const float factor = sum == 0.f ? 0.f : sink_factor(p, row.head, lse) / sum;
    T* const out = static_cast<T*>(p.out) +
                   (((long long)visit.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
    if (first_four == 0) store_lse(p, visit, row, lse);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int four = first_four + i * 32;
        if (four < fours)
            *reinterpret_cast<uint2*>(out + four * 4) = make_uint2(pack<T>(total[i].x * factor, total[i].y * factor),
                                                                   pack<T>(total[i].z * factor, total[i].w * factor));
    }
}
