// Merge the partial results of the sequences that are split over several parts (see parts.cuh). The weight of a partial
// result is its sum of exponentials.
//
//   lse = log2 sum_i 2^lse[i],   out = sum_i 2^(lse[i] - lse) * out[i], over the partial results i of the sequence
//
// TEAM == 8, for few rows. The grid is (sequences * rows, kv_heads, ceil(head_dim_v / (EACH * 128))) blocks of 256
// threads. A lane merges EACH vectors of four columns, and a block merges EACH * 128 columns of one row. Even a few
// rows therefore occupy many multiprocessors. Each warp adds up every 8th partial result, and the first warp adds up
// the sums of the warps in order.
//
// TEAM == 1, for many rows. The grid is (n, kv_heads, parts) blocks of 256 threads, with any n. A warp merges whole
// rows, so EACH * 128 is at least head_dim_v. At most one sequence has part i as its second part. The blocks with
// blockIdx.z == i merge this sequence, or exit at once if there is none.
//
// DIM_V == 0: the number of columns is p.head_dim_v.
//
// Speed of light: latency, because the kernel makes three dependent loads in sequence: the plan, the lse of the partial
// results, and the partial results. A second launch of this kernel in the same call adds 6.7 us on an H200 for one
// sequence of 8192 tokens with 128 heads, 5.1 us for one sequence of 16384 tokens with 16 heads, and 8.6 us for 128
// sequences of mixed lengths with 128 heads.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

// The partial results of a row.
struct Partials {
    const float* lses;  // [count]: the lse of each partial result; `step` floats apart
    const float4* outs; // [count, fours]: the columns of each partial result; `step` rows apart
    long long step;
    int count, fours;
};

// Call `use` with the lse of each partial result of a row whose index is `lane`, `lane + 32`, and so on.
template <int TEAM, typename USE>
__device__ __forceinline__ void each_lse(const Partials& row, int lane, const USE& use) {
    // From sm_100 on, unrolling this loop spills registers if a warp holds a whole row (TEAM == 1).
    if constexpr (TEAM == 1 && __CUDA_ARCH__ >= 1000) {
#pragma unroll 1
        for (int split = lane; split < row.count; split += 32) use(row.lses[split * row.step]);
    } else {
        for (int split = lane; split < row.count; split += 32) use(row.lses[split * row.step]);
    }
}

// Issue the loads of BATCH partial results of a row: those with the indices `split`, `split + TEAM`, and so on.
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

// Add a batch of weighted partial results to `total`. `largest` is the largest lse of all partial results of the row.
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

// Add the sums of the other warps of a block to the sums of the first warp.
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

// Store a merged row, divided by `sum`, the sum of the weights of its partial results.
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

constexpr int COMBINE_WARPS = 8;

template <typename T, int DIM_V, int TEAM, int EACH>
__global__ __launch_bounds__(32 * COMBINE_WARPS, 2) void combine_parts(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int WARPS = COMBINE_WARPS, BATCH = EACH == 1 ? 9 : TEAM == 1 ? 2 : 3; // in flight per warp
    static_assert(TEAM == 1 || TEAM == WARPS, "");
    __shared__ float4 found[TEAM == 1 ? 1 : WARPS][EACH * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = TEAM == 1 ? 0 : warp;
    const int rows = p.rows(), kv_head = blockIdx.y, fours = DIM_V ? DIM_V / 4 : p.head_dim_v / 4;
    const int first_four = TEAM == 1 ? lane : blockIdx.z * (EACH * 32) + lane;
    int sequence, r, end;
    if constexpr (TEAM == 1) {
        const int* const part = p.metadata + blockIdx.z * 8ll;
        sequence = part[0], r = blockIdx.x * WARPS + warp, end = rows;
        if (part[4] != 1 || unsigned(sequence) >= unsigned(p.sequences())) return;
    } else {
        sequence = blockIdx.x / rows, r = blockIdx.x - sequence * rows, end = r + 1;
    }
    const Visit visit(p, sequence);
    const int before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
    if (splits <= 1) return;
    const long long first = min(max(2 * ((long long)before - sequence), 0ll), 2ll * p.parts - 1);
    const int count = int(min((long long)splits, 2ll * p.parts - first));
    const long long step = (long long)p.kv_heads * rows; // rows from one partial result to the next
    for (; r < end; r += gridDim.x * WARPS) {
        const long long at = first * step + (long long)kv_head * rows + r;
        const Partials row{p.partial_lse + at, reinterpret_cast<const float4*>(p.partial_out + at * (fours * 4)), step,
                           count, fours};
        // The first batch is in flight while the weights are computed.
        float4 values[BATCH][EACH];
        load_batch<DIM_V, TEAM>(values, row, member, first_four);
        float largest = -CUDART_INF_F, sum = 0.f;
        each_lse<TEAM>(row, lane, [&](float lse) { largest = fmaxf(largest, lse); });
        largest = lanes_max<32>(largest);
        each_lse<TEAM>(row, lane, [&](float lse) { sum += lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest); });
        sum = lanes_sum<32>(sum);

        float4 total[EACH] = {};
        for (int split = member; split < count; split += BATCH * TEAM) {
            if (split != member) load_batch<DIM_V, TEAM>(values, row, split, first_four);
            add_batch<TEAM>(total, values, row, split, largest);
        }
        if constexpr (TEAM > 1) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) found[warp][i * 32 + lane] = total[i];
            __syncthreads(); // all warps' sums are in shared memory
            if (warp > 0) return;
            add_others<TEAM>(total, found, lane);
        }
        write_row<T>(p, visit, kv_head, r, total, largest, sum, first_four, fours);
    }
}
