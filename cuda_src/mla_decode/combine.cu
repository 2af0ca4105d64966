// TEAM == 8: a block has EACH times 128 columns of one row, and each warp takes every 8th split; the first warp adds up what
// the others have, in their order. For few rows, which are spread over the GPU. TEAM == 1: a warp has one row after the
// other, of the sequence of which this part made the second visit, if it did: most blocks end at once where there are many
// sequences.
#include "common/warp.cuh"
#include "mla_decode/rows.cuh"

template <typename T, int DIM_V, int TEAM, int EACH>
__global__ __launch_bounds__(256, 2) void combine_parts(const __grid_constant__ Params p) {
    constexpr int WARPS = 8, BATCH = EACH == 1 ? 9 : TEAM == 1 ? 2 : 3; // splits on their way at once
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
    const long long step = (long long)p.kv_heads * rows; // rows between splits
    for (; r < end; r += gridDim.x * WARPS) {
        const long long at = first * step + (long long)kv_head * rows + r;
        const float* const lses = p.partial_lse + at;
        const float4* const outs = reinterpret_cast<const float4*>(p.partial_out + at * (fours * 4));

        // A batch of results comes at once, the first while the weights are found.
        float4 values[BATCH][EACH];
        auto load = [&](int split) {
#pragma unroll
            for (int a = 0; a < BATCH; ++a)
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const int four = first_four + i * 32;
                    if (split + a * TEAM < count)
                        values[a][i] = DIM_V && DIM_V % 128 == 0 || four < fours
                                           ? outs[(split + a * TEAM) * step * fours + four]
                                           : make_float4(0.f, 0.f, 0.f, 0.f);
                }
        };
        load(member);
        float largest = -CUDART_INF_F, sum = 0.f;
        auto each_own = [&](const auto& use) {
            // Where a warp has a whole row, registers would spill from sm_100 on with several at once.
            if constexpr (TEAM == 1 && __CUDA_ARCH__ >= 1000) {
#pragma unroll 1
                for (int split = lane; split < count; split += 32) use(lses[split * step]);
            } else {
                for (int split = lane; split < count; split += 32) use(lses[split * step]);
            }
        };
        each_own([&](float lse) { largest = fmaxf(largest, lse); });
        largest = lanes_max<32>(largest);
        each_own([&](float lse) { sum += lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest); });
        sum = lanes_sum<32>(sum);

        float4 total[EACH] = {};
        for (int split = member; split < count; split += BATCH * TEAM) {
            if (split != member) load(split);
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                if (split + a * TEAM >= count) continue;
                const float lse = lses[(split + a * TEAM) * step];
                const float weight = lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    total[i].x += weight * values[a][i].x, total[i].y += weight * values[a][i].y;
                    total[i].z += weight * values[a][i].z, total[i].w += weight * values[a][i].w;
                }
            }
        }
        if constexpr (TEAM > 1) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) found[warp][i * 32 + lane] = total[i];
            __syncthreads();
            if (warp > 0) return;
#pragma unroll
            for (int other = 1; other < TEAM; ++other)
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const float4 one = found[other][i * 32 + lane];
                    total[i].x += one.x, total[i].y += one.y, total[i].z += one.z, total[i].w += one.w;
                }
        }
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
                *reinterpret_cast<uint2*>(out + four * 4) =
                    make_uint2(pack<T>(total[i].x * factor, total[i].y * factor),
                               pack<T>(total[i].z * factor, total[i].w * factor));
        }
    }
}
