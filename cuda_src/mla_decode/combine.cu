// Merge the partial results of the sequences that are split over several SM parts. An SM part is a block's range of the
// work (parts.cuh).
//
//   lse = log2 sum_i 2^lse[i],   out = sum_i 2^(lse[i] - lse) * out[i], over the partial results i of the sequence
//
// WARPS_PER_ROW == 8, for few rows: a grid of (sequences * rows, kv_heads, ceil(head_dim_v / (VECTORS * 128))) blocks
// of 256 threads. A block merges VECTORS * 128 columns of one row. Each warp adds up every 8th partial result.
//
// WARPS_PER_ROW == 1, for many rows: a grid of (n, kv_heads, SM parts) blocks of 256 threads, with any n. At most one
// sequence has SM part i as its second part. The blocks with blockIdx.z == i merge this sequence, one warp per row.
//
// Speed of light: the latency of three dependent loads: the plan, the lse of the partial results, and the partial
// results. On an H200 this launch, the second of a call, adds 6.7 us for one sequence of 8192 tokens with 128 heads,
// 5.1 us for one of 16384 tokens with 16 heads, and 8.6 us for 128 sequences of mixed lengths with 128 heads.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

struct PartialRows {
    const float* lses;  // [count], `step` floats apart
    const float4* outs; // [count, vectors of 4 columns], `step` rows apart
    long long step;
    int count, vectors;
};

template <int WARPS_PER_ROW, typename USE>
__device__ __forceinline__ void for_each_lse(const PartialRows& row, int lane, const USE& use) {
    // From sm_100 on, unrolling this loop spills registers if a warp merges a whole row.
    if constexpr (WARPS_PER_ROW == 1 && __CUDA_ARCH__ >= 1000) {
#pragma unroll 1
        for (int partial = lane; partial < row.count; partial += 32) use(row.lses[partial * row.step]);
    } else {
        for (int partial = lane; partial < row.count; partial += 32) use(row.lses[partial * row.step]);
    }
}

// Load BATCH partial results: `partial`, `partial + WARPS_PER_ROW` and so on.
template <int DIM_V, int WARPS_PER_ROW, int VECTORS, int BATCH>
__device__ __forceinline__ void load_batch(float4 (&values)[BATCH][VECTORS], const PartialRows& row, int partial,
                                           int first_vector) {
#pragma unroll
    for (int a = 0; a < BATCH; ++a)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int vector = first_vector + i * 32;
            if (partial + a * WARPS_PER_ROW < row.count)
                values[a][i] = DIM_V && DIM_V % 128 == 0 || vector < row.vectors
                                   ? row.outs[(partial + a * WARPS_PER_ROW) * row.step * row.vectors + vector]
                                   : make_float4(0.f, 0.f, 0.f, 0.f);
        }
}

// `largest`: the largest lse of the row's partial results.
template <int WARPS_PER_ROW, int VECTORS, int BATCH>
__device__ __forceinline__ void add_batch(float4 (&total)[VECTORS], const float4 (&values)[BATCH][VECTORS],
                                          const PartialRows& row, int partial, float largest) {
#pragma unroll
    for (int a = 0; a < BATCH; ++a) {
        if (partial + a * WARPS_PER_ROW >= row.count) continue;
        const float lse = row.lses[(partial + a * WARPS_PER_ROW) * row.step];
        const float weight = lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            total[i].x += weight * values[a][i].x, total[i].y += weight * values[a][i].y;
            total[i].z += weight * values[a][i].z, total[i].w += weight * values[a][i].w;
        }
    }
}

template <int WARPS_PER_ROW, int VECTORS>
__device__ __forceinline__ void add_warp_sums(float4 (&total)[VECTORS],
                                              const float4 (&warp_sums)[WARPS_PER_ROW][VECTORS * 32], int lane) {
#pragma unroll
    for (int other = 1; other < WARPS_PER_ROW; ++other)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const float4 one = warp_sums[other][i * 32 + lane];
            total[i].x += one.x, total[i].y += one.y, total[i].z += one.z, total[i].w += one.w;
        }
}

// `sum`: the sum of the partial results' weights.
template <typename T, int VECTORS>
__device__ __forceinline__ void write_row(const Params& p, const Split& query, int kv_head, int r,
                                          const float4 (&total)[VECTORS], float largest, float sum, int first_vector,
                                          int vectors) {
    const Row row(p, query, kv_head, r);
    const float lse = sum == 0.f ? -CUDART_INF_F : largest + log2f(sum);
    const float factor = sum == 0.f ? 0.f : sink_factor(p, row.head, lse) / sum;
    T* const out = static_cast<T*>(p.out) +
                   (((long long)query.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
    if (first_vector == 0) store_lse(p, query, row, lse);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = first_vector + i * 32;
        if (vector < vectors)
            *reinterpret_cast<uint2*>(out + vector * 4) = make_uint2(pack<T>(total[i].x * factor, total[i].y * factor),
                                                                     pack<T>(total[i].z * factor, total[i].w * factor));
    }
}

constexpr int COMBINE_WARPS = 8;

template <typename T, int DIM_V, int WARPS_PER_ROW, int VECTORS>
__global__ __launch_bounds__(32 * COMBINE_WARPS, 2) void combine_parts(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int WARPS = COMBINE_WARPS, BATCH = VECTORS == 1 ? 9 : WARPS_PER_ROW == 1 ? 2 : 3; // in flight per warp
    static_assert(WARPS_PER_ROW == 1 || WARPS_PER_ROW == WARPS, "");
    __shared__ float4 warp_sums[WARPS_PER_ROW == 1 ? 1 : WARPS][VECTORS * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_partial = WARPS_PER_ROW == 1 ? 0 : warp;
    const int rows = p.rows(), kv_head = blockIdx.y, vectors = DIM_V ? DIM_V / 4 : p.head_dim_v / 4;
    const int first_vector = WARPS_PER_ROW == 1 ? lane : blockIdx.z * (VECTORS * 32) + lane;
    int sequence, r, end;
    if constexpr (WARPS_PER_ROW == 1) {
        const int* const part = p.metadata + blockIdx.z * 8ll;
        sequence = part[0], r = blockIdx.x * WARPS + warp, end = rows;
        if (part[4] != 1 || unsigned(sequence) >= unsigned(p.sequences())) return;
    } else {
        sequence = blockIdx.x / rows, r = blockIdx.x - sequence * rows, end = r + 1;
    }
    const Split query(p, sequence);
    const int before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
    if (splits <= 1) return;
    const long long first = min(max(2 * ((long long)before - sequence), 0ll), 2ll * p.parts - 1);
    const int count = int(min((long long)splits, 2ll * p.parts - first));
    const long long step = (long long)p.kv_heads * rows; // rows between consecutive partial results
    for (; r < end; r += gridDim.x * WARPS) {
        const long long at = first * step + (long long)kv_head * rows + r;
        const PartialRows row{p.partial_lse + at, reinterpret_cast<const float4*>(p.partial_out + at * (vectors * 4)),
                              step, count, vectors};
        // Load the first batch while the weights are computed.
        float4 values[BATCH][VECTORS];
        load_batch<DIM_V, WARPS_PER_ROW>(values, row, first_partial, first_vector);
        float largest = -CUDART_INF_F, sum = 0.f;
        for_each_lse<WARPS_PER_ROW>(row, lane, [&](float lse) { largest = fmaxf(largest, lse); });
        largest = lanes_max<32>(largest);
        for_each_lse<WARPS_PER_ROW>(row, lane,
                                    [&](float lse) { sum += lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest); });
        sum = lanes_sum<32>(sum);

        float4 total[VECTORS] = {};
        for (int partial = first_partial; partial < count; partial += BATCH * WARPS_PER_ROW) {
            if (partial != first_partial) load_batch<DIM_V, WARPS_PER_ROW>(values, row, partial, first_vector);
            add_batch<WARPS_PER_ROW>(total, values, row, partial, largest);
        }
        if constexpr (WARPS_PER_ROW > 1) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) warp_sums[warp][i * 32 + lane] = total[i];
            __syncthreads(); // all warps' sums are in shared memory
            if (warp > 0) return;
            add_warp_sums<WARPS_PER_ROW>(total, warp_sums, lane);
        }
        write_row<T>(p, query, kv_head, r, total, largest, sum, first_vector, vectors);
    }
}
