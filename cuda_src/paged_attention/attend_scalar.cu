// The attention of attend.cu without tensor cores, for what those do not take: float32, blocks of 8, 24, ... tokens, arrays at any
// address (WIDE: all of them at multiples of 16 bytes).
//
// Grid: as for `attend`. Each of the four warps takes every fourth tile of 32 tokens, one per lane for the scores; for
// the output, a lane has up to 8 dimensions.
#include "common/fp8.cuh"
#include "common/warp.cuh"
#include "paged_attention/pieces.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/scores.cuh"

template <typename CACHE, bool WIDE> __device__ __forceinline__ void load_four(float (&to)[4], const char* from) {
    CACHE values[4];
    if constexpr (WIDE) {
        if constexpr (sizeof(CACHE) == 4)
            *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (sizeof(CACHE) == 2)
            *reinterpret_cast<uint2*>(values) = *reinterpret_cast<const uint2*>(from);
        else
            *reinterpret_cast<unsigned*>(values) = *reinterpret_cast<const unsigned*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = reinterpret_cast<const CACHE*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = to_float(values[i]);
}

template <typename T, typename CACHE, Layout LAYOUT, bool WIDE>
__global__ __launch_bounds__(128) void attend_scalar(const __grid_constant__ Params p) {
    constexpr int WARPS = 4, ROWS = 4, MAX_DIM = 256, DIMS_PER_LANE = MAX_DIM / 32, X = 16 / sizeof(CACHE);
    constexpr int ITEM = sizeof(CACHE);
    __shared__ float query[ROWS][MAX_DIM], shares[WARPS][ROWS][32];
    __shared__ float maxima[WARPS * ROWS], sums[WARPS * ROWS];
    __shared__ __align__(16) float outputs[WARPS * ROWS * MAX_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    auto dim_of = [&](int i) { return LAYOUT == VLLM ? i * 32 + lane : i / 4 * 128 + lane * 4 + i % 4; };

    __shared__ int next;
    __shared__ bool last;
    Pieces pieces(p);
    pieces.plan();
    Segment segment;
    for (int index = blockIdx.x; pieces.find(index, segment); index = next) {
        const int first_row = segment.row_block * ROWS;
        for (int i = threadIdx.x; i < ROWS * p.head_dim; i += blockDim.x) {
            const int r = i / p.head_dim, dim = i % p.head_dim;
            const Row row(p, segment, first_row + r);
            const T* const from = static_cast<const T*>(p.query) + segment.seq * p.query_seq +
                                  row.token * p.query_token + row.head * p.query_head;
            query[r][dim] = row.valid ? to_float(from[dim]) : 0.f;
        }
        __syncthreads();
        const int* const table = p.tables + segment.seq * p.table_row;
        bool bad = !segment.whole;
        float maximum[ROWS], sum[ROWS] = {}, out[ROWS][DIMS_PER_LANE] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) maximum[r] = -CUDART_INF_F;

        for (int start = segment.begin + warp * 32; start < segment.end; start += WARPS * 32) {
            const int t = start + lane;
            int id = -1;
            if (t >= segment.low && t < segment.end) {
                id = table[t / p.block_size];
                if (unsigned(id) >= unsigned(p.blocks)) bad = true, id = -1;
            }
            const int slot = t % p.block_size;
            float scores[ROWS] = {};
            if (id >= 0) {
                const char* const keys = p.keys + id * p.key_block + segment.kv_head * p.key_head +
                                         (LAYOUT == VLLM ? slot * 16ll : slot * p.key_token);
#pragma unroll 4
                for (int dim = 0; dim < p.head_dim; dim += 4) {
                    float key[4];
                    load_four<CACHE, WIDE>(
                        key, keys + (LAYOUT == VLLM ? dim / X * p.block_size * 16 + dim % X * ITEM : dim * ITEM));
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int i = 0; i < 4; ++i) scores[r] += query[r][dim + i] * key[i];
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Row row(p, segment, first_row + r);
                const int position = row.position(p, segment);
                float score = modify(p, scores[r] * scale, p.slopes ? p.slopes[row.head] * LOG2_E : 0.f, t - position);
                if (id < 0 || t > position || (p.window && t <= position - p.window) ||
                    (p.sparse_stride && !in_pattern(p, segment, row.head, t)))
                    score = -CUDART_INF_F;
                const float largest = fmaxf(maximum[r], lanes_max<32>(score));
                const float base = largest == -CUDART_INF_F ? 0.f : largest;
                const float fade = fast_exp2(maximum[r] - base), share = fast_exp2(score - base);
                maximum[r] = largest;
                sum[r] = sum[r] * fade + share;
                shares[warp][r][lane] = share;
#pragma unroll
                for (int i = 0; i < DIMS_PER_LANE; ++i) out[r][i] *= fade;
            }
            __syncwarp();
            if constexpr (LAYOUT == VLLM) {
                // The 8 tokens of a group are in one block.
                int group_id = id;
#pragma unroll
                for (int step = 1; step < 8; step *= 2)
                    group_id = max(group_id, __shfl_xor_sync(FULL_WARP, group_id, step));
                for (int group = 0; group < 32; group += 8) {
                    const long long block = __shfl_sync(FULL_WARP, group_id, group);
                    if (block < 0) continue;
                    const unsigned counts = __ballot_sync(FULL_WARP, id >= 0) >> group;
                    const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                               (start + group) % p.block_size * ITEM;
#pragma unroll
                    for (int i = 0; i < DIMS_PER_LANE; ++i) {
                        if (dim_of(i) >= p.head_dim) continue;
#pragma unroll
                        for (int half = 0; half < 8; half += 4) {
                            float value[4];
                            load_four<CACHE, WIDE>(value, values + (dim_of(i) * p.block_size + half) * ITEM);
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                // What lies in a slot without a token may be anything, also what 0 times it is not 0.
                                if (!(counts >> (half + j) & 1)) value[j] = 0.f;
#pragma unroll
                                for (int r = 0; r < ROWS; ++r)
                                    out[r][i] += shares[warp][r][group + half + j] * value[j];
                            }
                        }
                    }
                }
            } else {
#pragma unroll 4
                for (int token = 0; token < 32; ++token) {
                    const long long block = __shfl_sync(FULL_WARP, id, token);
                    if (block < 0) continue;
                    const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                               (start + token) % p.block_size * p.value_token;
#pragma unroll
                    for (int i = 0; i < DIMS_PER_LANE; i += 4) {
                        if (dim_of(i) >= p.head_dim) continue;
                        float value[4];
                        load_four<CACHE, WIDE>(value, values + dim_of(i) * ITEM);
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
#pragma unroll
                            for (int j = 0; j < 4; ++j) out[r][i + j] += shares[warp][r][token] * value[j];
                    }
                }
            }
            __syncwarp();
        }

        bad = __any_sync(FULL_WARP, bad);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float total = lanes_sum<32>(sum[r]);
            if (bad) total = CUDART_NAN_F;
            if (lane == 0) maxima[warp * ROWS + r] = maximum[r], sums[warp * ROWS + r] = total;
#pragma unroll
            for (int i = 0; i < DIMS_PER_LANE; ++i)
                if (r < p.rows && dim_of(i) < p.head_dim)
                    outputs[(warp * p.rows + r) * MAX_DIM + dim_of(i)] = out[r][i];
        }
        __syncthreads();
        store_segment<WARPS, ROWS, T>(p, segment, maxima, sums, outputs, MAX_DIM);
        __syncthreads();
        if (threadIdx.x == 0) {
            next = gridDim.x + atomicAdd(p.taken, 1);
            last = segment.partial(p) && arrive(p, segment) == segment.pieces - 1;
            __threadfence();
        }
        __syncthreads();
        if (last) join<ROWS, T>(p, segment);
    }
}
