// Compute attention over a paged cache without tensor cores, for calls that attend.cu does not support: float32, block
// sizes that are not a multiple of 16 tokens, heads larger than 256, and heads or arrays that are not a multiple of 16
// bytes. The formulas are in attend.cu.
//
// Grid: as many blocks as are resident at once. They take KV splits (a range of tokens for ROWS rows of a kv head) from
// a queue. A warp takes every WARPS-th tile of 32 tokens. A lane computes the scores of one token, and then DIMS / 32
// dimensions of the output.
//
// DIMS: the largest head_dim. WIDE: one aligned load reads four elements.
//
// Speed of light: memory bandwidth should be the limit, at one fused multiply-add per element and row on the CUDA
// cores. No benchmark case runs this kernel.
#include "common/fp8.cuh"
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "paged_attention/pieces.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/scores.cuh"

constexpr int WARPS = 4, ROWS = 4, USUAL_DIM = 256, MAX_DIM = 512;

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

// Layout VLLM. Four neighbouring elements are four dimensions of a key, or one dimension of four tokens' values.
template <typename CACHE, bool WIDE> struct VllmCache {
    static constexpr int ITEM = sizeof(CACHE), X = 16 / ITEM;

    static __device__ __forceinline__ void load(float (&to)[4], const char* from) { load_four<CACHE, WIDE>(to, from); }

    // Return the dimension of a lane's i-th output.
    static __device__ __forceinline__ int dim_of(int i) { return i * 32 + threadIdx.x % 32; }

    // key_of: byte offset of a slot's key from the first key of its block and kv head. key_dim: byte offset of a
    // dimension in a key.
    static __device__ __forceinline__ long long key_of(const Params& p, int slot) { return slot * 16ll; }

    static __device__ __forceinline__ int key_dim(const Params& p, int dim) {
        return dim / X * p.block_size * 16 + dim % X * ITEM;
    }

    // Add the weighted values of the tile at token `start`. `id`: block id of the lane's token, or -1. Eight tokens
    // that begin at a multiple of 8 are in one cache block.
    template <int LANE_DIMS>
    static __device__ __forceinline__ void add_values(const Params& p, const KvSplit& kv_split, int start, int id,
                                                      const float (&weights)[ROWS][32], float (&out)[ROWS][LANE_DIMS]) {
        int group_id = id;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) group_id = max(group_id, __shfl_xor_sync(FULL_WARP, group_id, step));
        for (int group = 0; group < 32; group += 8) {
            const long long block = __shfl_sync(FULL_WARP, group_id, group);
            if (block < 0) continue;
            const unsigned held = __ballot_sync(FULL_WARP, id >= 0) >> group;
            const char* const values = p.values + block * p.value_block + kv_split.kv_head * p.value_head +
                                       (start + group) % p.block_size * ITEM;
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) {
                if (dim_of(i) >= p.head_dim) continue;
#pragma unroll
                for (int half = 0; half < 8; half += 4) {
                    float value[4];
                    load(value, values + (dim_of(i) * p.block_size + half) * ITEM);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        // A slot without a token may hold NaN, and 0 * NaN is NaN.
                        if (!(held >> (half + j) & 1)) value[j] = 0.f;
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) out[r][i] += weights[r][group + half + j] * value[j];
                    }
                }
            }
        }
    }
};

// Layout FLASH. Four neighbouring elements are four dimensions of one token.
template <typename CACHE, bool WIDE> struct FlashCache {
    static constexpr int ITEM = sizeof(CACHE);

    static __device__ __forceinline__ void load(float (&to)[4], const char* from) { load_four<CACHE, WIDE>(to, from); }

    static __device__ __forceinline__ int dim_of(int i) { return i / 4 * 128 + threadIdx.x % 32 * 4 + i % 4; }

    static __device__ __forceinline__ long long key_of(const Params& p, int slot) { return slot * p.key_token; }

    static __device__ __forceinline__ int key_dim(const Params& p, int dim) { return dim * ITEM; }

    template <int LANE_DIMS>
    static __device__ __forceinline__ void add_values(const Params& p, const KvSplit& kv_split, int start, int id,
                                                      const float (&weights)[ROWS][32], float (&out)[ROWS][LANE_DIMS]) {
#pragma unroll 4
        for (int token = 0; token < 32; ++token) {
            const long long block = __shfl_sync(FULL_WARP, id, token);
            if (block < 0) continue;
            const char* const values = p.values + block * p.value_block + kv_split.kv_head * p.value_head +
                                       (start + token) % p.block_size * p.value_token;
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i += 4) {
                if (dim_of(i) >= p.head_dim) continue;
                float value[4];
                load(value, values + dim_of(i) * ITEM);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int j = 0; j < 4; ++j) out[r][i + j] += weights[r][token] * value[j];
            }
        }
    }
};

template <typename CACHE, Layout LAYOUT, bool WIDE> struct CacheOf {
    using type = VllmCache<CACHE, WIDE>;
};
template <typename CACHE, bool WIDE> struct CacheOf<CACHE, FLASH, WIDE> {
    using type = FlashCache<CACHE, WIDE>;
};

template <typename Cache, int DIMS>
__device__ __forceinline__ void multiply_key(const Params& p, const KvSplit& kv_split, int id, int slot,
                                             const float (&query)[ROWS][DIMS], float (&scores)[ROWS]) {
    const char* const keys = p.keys + id * p.key_block + kv_split.kv_head * p.key_head + Cache::key_of(p, slot);
#pragma unroll 4
    for (int dim = 0; dim < p.head_dim; dim += 4) {
        float key[4];
        Cache::load(key, keys + Cache::key_dim(p, dim));
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[r] += query[r][dim + i] * key[i];
    }
}

// Add the score of the lane's token to the online softmax of a row. Return the token's weight.
template <int LANE_DIMS>
__device__ __forceinline__ float add_score(float score, float& maximum, float& sum, float (&out)[LANE_DIMS]) {
    const float largest = fmaxf(maximum, lanes_max<32>(score));
    const float new_max = largest == -CUDART_INF_F ? 0.f : largest;
    const float correction = fast_exp2(maximum - new_max), weight = fast_exp2(score - new_max);
    maximum = largest;
    sum = sum * correction + weight;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) out[i] *= correction;
    return weight;
}

template <typename Cache, typename Results, int LANE_DIMS>
__device__ __forceinline__ void store_in_shared(const Params& p, const float (&maximum)[ROWS], const float (&sum)[ROWS],
                                                const float (&out)[ROWS][LANE_DIMS], bool bad, const Results& results) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float total = lanes_sum<32>(sum[r]);
        if (bad) total = CUDART_NAN_F;
        if (lane == 0) results.maxima[warp * ROWS + r] = maximum[r], results.sums[warp * ROWS + r] = total;
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i)
            if (r < p.rows && Cache::dim_of(i) < p.head_dim)
                results.outputs[(warp * p.rows + r) * Results::STRIDE + Cache::dim_of(i)] = out[r][i];
    }
}

template <typename T, typename CACHE, Layout LAYOUT, bool WIDE, int DIMS = USUAL_DIM>
__global__ __launch_bounds__(32 * WARPS) void attend_scalar(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using Cache = typename CacheOf<CACHE, LAYOUT, WIDE>::type;
    __shared__ float query[ROWS][DIMS], weights[WARPS][ROWS][32];
    __shared__ float maxima[WARPS * ROWS], sums[WARPS * ROWS];
    __shared__ __align__(16) float outputs[WARPS * ROWS * DIMS];
    const TeamResults<WARPS, ROWS, DIMS> results = {maxima, sums, outputs};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    __shared__ int next;
    __shared__ bool last;
    SplitScheduler scheduler(p);
    scheduler.read_lengths();
    scheduler.plan(gridDim.x);
    KvSplit kv_split;
    for (int index = blockIdx.x; scheduler.find(index, kv_split); index = next) {
        const int first_row = kv_split.row_block * ROWS;
        for (int i = threadIdx.x; i < ROWS * p.head_dim; i += blockDim.x) {
            const int r = i / p.head_dim, dim = i % p.head_dim;
            const Row row(p, kv_split, first_row + r);
            const T* const from = static_cast<const T*>(p.query) + kv_split.seq * p.query_seq +
                                  row.token * p.query_token + row.head * p.query_head;
            query[r][dim] = row.valid ? to_float(from[dim]) : 0.f;
        }
        __syncthreads();
        const int* const table = p.tables + kv_split.seq * p.table_row;
        bool bad = !kv_split.covered;
        float maximum[ROWS], sum[ROWS] = {}, out[ROWS][DIMS / 32] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) maximum[r] = -CUDART_INF_F;

        for (int start = kv_split.begin + warp * 32; start < kv_split.end; start += WARPS * 32) {
            const int t = start + lane;
            int id = -1;
            if (t >= kv_split.low && t < kv_split.end) {
                id = table[t / p.block_size];
                if (unsigned(id) >= unsigned(p.blocks)) bad = true, id = -1;
            }
            const int slot = t % p.block_size;
            float scores[ROWS] = {};
            if (id >= 0) multiply_key<Cache>(p, kv_split, id, slot, query, scores);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Row row(p, kv_split, first_row + r);
                const int position = row.position(p, kv_split);
                float score = modify(p, scores[r] * scale, p.slopes ? p.slopes[row.head] * LOG2_E : 0.f, t - position);
                if (id < 0 || t > position || (p.window && t <= position - p.window) ||
                    (p.sparse_stride && !in_pattern(p, kv_split, row.head, t)))
                    score = -CUDART_INF_F;
                weights[warp][r][lane] = add_score(score, maximum[r], sum[r], out[r]);
            }
            __syncwarp();
            Cache::add_values(p, kv_split, start, id, weights[warp], out);
            __syncwarp();
        }

        bad = __any_sync(FULL_WARP, bad);
        store_in_shared<Cache>(p, maximum, sum, out, bad, results);
        __syncthreads();
        store_split<T>(p, kv_split, results);
        __syncthreads();
        if (threadIdx.x == 0) {
            next = gridDim.x + atomicAdd(p.taken, 1);
            last = kv_split.partial(p) && arrive(p, kv_split) == kv_split.num_splits - 1;
            __threadfence();
        }
        __syncthreads();
        if (last) merge_splits<ROWS, T>(p, kv_split);
    }
}
