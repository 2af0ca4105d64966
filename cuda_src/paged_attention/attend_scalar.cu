// Attention over a paged cache without tensor cores. The formulas are in attend.cu. This kernel handles the calls that
// attend.cu does not support: float32, block sizes that are not a multiple of 16 tokens (8, 24, ...), heads larger than
// 256, and heads or arrays that are not a multiple of 16 bytes.
//
// Grid: as many blocks as are resident at once. A work item is one block of ROWS rows of a sequence and a kv head, and
// a piece is a range of tokens of an item. Blocks take pieces from a queue. A warp takes every WARPS-th tile of 32
// tokens of a piece. A lane computes the scores of one token of the tile, and then DIMS / 32 dimensions of the output.
//
// DIMS: the largest head_dim that fits, either USUAL_DIM or MAX_DIM.
//
// WIDE: the query, the cache and their strides are multiples of 16 bytes, so that one load reads four elements.
//
// Speed of light: the cache is read once for every ROWS rows that share a kv head, and each element takes one fused
// multiply-add per row on the CUDA cores. The limit should be memory bandwidth. The kernel exists for completeness; no
// benchmark case runs it.
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

// The cache in layout VLLM. Four neighbouring key elements are four dimensions of one token. Four neighbouring value
// elements are one dimension of four tokens.
template <typename CACHE, bool WIDE> struct VllmCache {
    static constexpr int ITEM = sizeof(CACHE), X = 16 / ITEM;

    static __device__ __forceinline__ void load(float (&to)[4], const char* from) { load_four<CACHE, WIDE>(to, from); }

    // Return the dimension of a lane's i-th output.
    static __device__ __forceinline__ int dim_of(int i) { return i * 32 + threadIdx.x % 32; }

    // key_of: return the byte offset of a slot's key within its block and kv head. key_dim: return the byte offset of a
    // dimension within a key.
    static __device__ __forceinline__ long long key_of(const Params& p, int slot) { return slot * 16ll; }

    static __device__ __forceinline__ int key_dim(const Params& p, int dim) {
        return dim / X * p.block_size * 16 + dim % X * ITEM;
    }

    // Add the weighted values of the tile that begins at token `start` to `out`. `id` is the block id of the lane's
    // token, or -1 if the lane has no token. Eight tokens that begin at a multiple of 8 are in one block.
    template <int EACH>
    static __device__ __forceinline__ void add_values(const Params& p, const Segment& segment, int start, int id,
                                                      const float (&weights)[ROWS][32], float (&out)[ROWS][EACH]) {
        int group_id = id;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) group_id = max(group_id, __shfl_xor_sync(FULL_WARP, group_id, step));
        for (int group = 0; group < 32; group += 8) {
            const long long block = __shfl_sync(FULL_WARP, group_id, group);
            if (block < 0) continue;
            const unsigned held = __ballot_sync(FULL_WARP, id >= 0) >> group;
            const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                       (start + group) % p.block_size * ITEM;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
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

// The cache in layout FLASH. Four neighbouring elements of a key or a value are four dimensions of one token.
template <typename CACHE, bool WIDE> struct FlashCache {
    static constexpr int ITEM = sizeof(CACHE);

    static __device__ __forceinline__ void load(float (&to)[4], const char* from) { load_four<CACHE, WIDE>(to, from); }

    static __device__ __forceinline__ int dim_of(int i) { return i / 4 * 128 + threadIdx.x % 32 * 4 + i % 4; }

    static __device__ __forceinline__ long long key_of(const Params& p, int slot) { return slot * p.key_token; }

    static __device__ __forceinline__ int key_dim(const Params& p, int dim) { return dim * ITEM; }

    template <int EACH>
    static __device__ __forceinline__ void add_values(const Params& p, const Segment& segment, int start, int id,
                                                      const float (&weights)[ROWS][32], float (&out)[ROWS][EACH]) {
#pragma unroll 4
        for (int token = 0; token < 32; ++token) {
            const long long block = __shfl_sync(FULL_WARP, id, token);
            if (block < 0) continue;
            const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                       (start + token) % p.block_size * p.value_token;
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
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

// Add the dot products of the rows' queries and the key of the lane's token to `scores`. The token is in `slot` of
// block `id`.
template <typename Cache, int DIMS>
__device__ __forceinline__ void multiply_key(const Params& p, const Segment& segment, int id, int slot,
                                             const float (&query)[ROWS][DIMS], float (&scores)[ROWS]) {
    const char* const keys = p.keys + id * p.key_block + segment.kv_head * p.key_head + Cache::key_of(p, slot);
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

// Add a tile's scores to the online softmax of a row. `score` is the score of the lane's token. Return the weight of
// this token.
template <int EACH>
__device__ __forceinline__ float add_score(float score, float& maximum, float& sum, float (&out)[EACH]) {
    const float largest = fmaxf(maximum, lanes_max<32>(score));
    const float base = largest == -CUDART_INF_F ? 0.f : largest;
    const float correction = fast_exp2(maximum - base), weight = fast_exp2(score - base);
    maximum = largest;
    sum = sum * correction + weight;
#pragma unroll
    for (int i = 0; i < EACH; ++i) out[i] *= correction;
    return weight;
}

// Write the warp's results for its rows to shared memory.
template <typename Cache, typename Results, int EACH>
__device__ __forceinline__ void leave_results(const Params& p, const float (&maximum)[ROWS], const float (&sum)[ROWS],
                                              const float (&out)[ROWS][EACH], bool bad, const Results& found) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float total = lanes_sum<32>(sum[r]);
        if (bad) total = CUDART_NAN_F;
        if (lane == 0) found.maxima[warp * ROWS + r] = maximum[r], found.sums[warp * ROWS + r] = total;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (r < p.rows && Cache::dim_of(i) < p.head_dim)
                found.outputs[(warp * p.rows + r) * Results::STRIDE + Cache::dim_of(i)] = out[r][i];
    }
}

template <typename T, typename CACHE, Layout LAYOUT, bool WIDE, int DIMS = USUAL_DIM>
__global__ __launch_bounds__(32 * WARPS) void attend_scalar(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using Cache = typename CacheOf<CACHE, LAYOUT, WIDE>::type;
    __shared__ float query[ROWS][DIMS], weights[WARPS][ROWS][32];
    __shared__ float maxima[WARPS * ROWS], sums[WARPS * ROWS];
    __shared__ __align__(16) float outputs[WARPS * ROWS * DIMS];
    const TeamResults<WARPS, ROWS, DIMS> found = {maxima, sums, outputs};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    __shared__ int next;
    __shared__ bool last;
    Pieces pieces(p);
    pieces.look();
    pieces.plan(gridDim.x);
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
        float maximum[ROWS], sum[ROWS] = {}, out[ROWS][DIMS / 32] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) maximum[r] = -CUDART_INF_F;

        for (int start = segment.begin + warp * 32; start < segment.end; start += WARPS * 32) {
            // Look up the block of the lane's token.
            const int t = start + lane;
            int id = -1;
            if (t >= segment.low && t < segment.end) {
                id = table[t / p.block_size];
                if (unsigned(id) >= unsigned(p.blocks)) bad = true, id = -1;
            }
            // Compute the scores and their softmax.
            const int slot = t % p.block_size;
            float scores[ROWS] = {};
            if (id >= 0) multiply_key<Cache>(p, segment, id, slot, query, scores);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Row row(p, segment, first_row + r);
                const int position = row.position(p, segment);
                float score = modify(p, scores[r] * scale, p.slopes ? p.slopes[row.head] * LOG2_E : 0.f, t - position);
                if (id < 0 || t > position || (p.window && t <= position - p.window) ||
                    (p.sparse_stride && !in_pattern(p, segment, row.head, t)))
                    score = -CUDART_INF_F;
                weights[warp][r][lane] = add_score(score, maximum[r], sum[r], out[r]);
            }
            __syncwarp();
            Cache::add_values(p, segment, start, id, weights[warp], out);
            __syncwarp();
        }

        bad = __any_sync(FULL_WARP, bad);
        leave_results<Cache>(p, maximum, sum, out, bad, found);
        __syncthreads();
        store_piece<T>(p, segment, found);
        __syncthreads();
        if (threadIdx.x == 0) {
            next = gridDim.x + atomicAdd(p.taken, 1);
            last = segment.partial(p) && arrive(p, segment) == segment.pieces - 1;
            __threadfence();
        }
        __syncthreads();
        if (last) merge_pieces<ROWS, T>(p, segment);
    }
}
