// Apply RMS norm and rotary embedding to queries and keys, and store keys and values in a paged cache. The results are
// equal, bit for bit, to the results of separate calls of rms_norm, rotary_embedding and reshape_and_cache_flash.
//
//   z      = x * rsqrt(sum of x^2 / head_dim + epsilon) * (weight + offset), rounded to T    if NORM, else x
//   query  = z, its first rotary_dim elements rotated as in rotary_embedding/rotate.cu; written in place
//   key_cache[slot_mapping[t]]   = key[t], normalized and rotated
//   value_cache[slot_mapping[t]] = value[t]
//
// Each product and sum is rounded to float32. A slot outside of the cache, such as -1, is skipped.
//
// Grid: LANES neighbouring threads process one head of `query`, `key` or `value`, each with two vectors of 8 elements.
// With HALVES, the vectors of a thread that rotates hold the first and the second elements of rotated pairs. Other
// threads have two neighbouring vectors.
//
// W: type of the weights. C: type of cos and sin. LOADED, STORED: layouts of input and output.
//
// Speed of light: memory bandwidth. For decoding one token: the latency of a launch, two dependent loads, a sum over a
// head and a store; one launch replaces four.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "rotary_embedding/layout.cuh"

constexpr int THREADS = 128;
constexpr int VECTOR = 8;

// An array [tokens, heads, head_dim].
struct TokenHeads {
    char* first;
    long long token_stride; // in bytes
    long long head_stride;
};

// An array [blocks, block_size, kv_heads, head_dim].
struct CacheHeads {
    char* first;
    long long block_stride; // in bytes
    long long token_stride;
    long long head_stride;
};

struct Params {
    TokenHeads query, key, value;
    CacheHeads key_cache, value_cache;
    const long long* slot_mapping; // [tokens]
    const char* query_weight;      // [head_dim]  W, null: all 1
    const char* key_weight;
    const char* cos; // [tokens, rotary_dim or rotary_dim / 2]  C
    const char* sin;
    long long cos_stride, sin_stride; // between tokens, in bytes
    Divisor by_heads;                 // heads of `query`, `key` and `value`
    Divisor by_block_size;
    int rows; // heads of all tokens
    int all_heads;
    int query_heads;
    int kv_heads;
    int slots; // of the cache
    int block_size;
    int vectors;     // per head
    int pairs;       // pairs of rotated vectors: rotary_dim / 16
    int second_half; // column of cos and sin for a pair's element 1; 0: as for element 0
    float inverse_head_dim;
    float epsilon;
    float offset;
};

// Return the index of a thread's vector `side` (0 or 1) in the head.
template <int LAYOUT> __device__ __forceinline__ int vector_index(int lane, int side, int pairs) {
    return LAYOUT == HALVES && lane < pairs ? lane + side * pairs : 2 * lane + side;
}

// Sum over a head in the order of norm/row.cuh: pad the sums to a power of two, then add the second half to the first
// half until one sum is left. All threads of the warp call this.
template <int LANES, int LAYOUT>
__device__ __forceinline__ float sum_over_head(const float (&sums)[2], int lane, const Params& p) {
    float both[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int vector = lane + side * LANES;
        const bool halved = LAYOUT == HALVES && vector < 2 * p.pairs;
        const int from = halved ? (vector >= p.pairs ? vector - p.pairs : vector) : vector / 2;
        const bool second = halved ? vector >= p.pairs : vector % 2;
        const float first_sum = __shfl_sync(FULL_WARP, sums[0], from, LANES);
        const float second_sum = __shfl_sync(FULL_WARP, sums[1], from, LANES);
        both[side] = second ? second_sum : first_sum;
    }
    float sum = __fadd_rn(both[0], both[1]);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, step));
    return sum;
}

template <typename T> __device__ __forceinline__ float sum_of_squares(const Elements<T, VECTOR>& x) {
    float sum = __fmul_rn(x.get(0), x.get(0));
#pragma unroll
    for (int i = 1; i < VECTOR; ++i) sum = __fadd_rn(sum, __fmul_rn(x.get(i), x.get(i)));
    return sum;
}

// `inverse`: 1 / RMS.
template <typename T, typename W, int LAYOUT>
__device__ __forceinline__ void normalize(Elements<T, VECTOR> (&x)[2], const char* weight, float inverse, int lane,
                                          const Params& p) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        Elements<W, VECTOR> factor;
        if (weight) factor.load_readonly(weight + vector_index<LAYOUT>(lane, side, p.pairs) * VECTOR * int(sizeof(W)));
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            float y = __fmul_rn(x[side].get(i), inverse);
            if (weight) y = __fmul_rn(y, __fadd_rn(factor.get(i), p.offset));
            x[side].set(i, y);
        }
    }
}

template <typename T, typename C, int LOADED, int STORED>
__device__ __forceinline__ void rotate(Elements<T, VECTOR> (&x)[2], int token, int lane, const Params& p) {
    const int first = lane * VECTOR * int(sizeof(C)), second = first + p.second_half * int(sizeof(C));
    const char* const cos = p.cos + token * p.cos_stride;
    const char* const sin = p.sin + token * p.sin_stride;
    Elements<C, VECTOR> cos_of[2], sin_of[2];
    cos_of[0].load_readonly(cos + first), sin_of[0].load_readonly(sin + first);
    cos_of[1].load_readonly(cos + second), sin_of[1].load_readonly(sin + second);
    Elements<T, VECTOR> y[2];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const int a = pair_element<VECTOR, LOADED>(i, 0), b = pair_element<VECTOR, LOADED>(i, 1);
        const float one = x[a / VECTOR].get(a % VECTOR), two = x[b / VECTOR].get(b % VECTOR);
        const float left = __fsub_rn(__fmul_rn(one, cos_of[0].get(i)), __fmul_rn(two, sin_of[0].get(i)));
        const float right = __fadd_rn(__fmul_rn(two, cos_of[1].get(i)), __fmul_rn(one, sin_of[1].get(i)));
        const int c = pair_element<VECTOR, STORED>(i, 0), d = pair_element<VECTOR, STORED>(i, 1);
        y[c / VECTOR].set(c % VECTOR, left), y[d / VECTOR].set(d % VECTOR, right);
    }
    x[0] = y[0], x[1] = y[1];
}

// Return null if the token is not stored.
__device__ __forceinline__ char* cache_address(const CacheHeads& cache, long long slot, int head, const Params& p) {
    if ((unsigned long long)slot >= (unsigned long long)p.slots) return nullptr;
    const unsigned block = p.by_block_size.quotient(unsigned(slot));
    const unsigned block_offset = unsigned(slot) - block * p.block_size;
    return cache.first + block * cache.block_stride + block_offset * cache.token_stride + head * cache.head_stride;
}

template <typename T, typename W, typename C, int LANES, int LOADED, int STORED, bool NORM>
__global__ void __launch_bounds__(THREADS) norm_rotate_store(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % LANES, row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool active = row < p.rows && 2 * lane < p.vectors;
    const int token = p.by_heads.quotient(min(row, p.rows - 1)), token_head = row - token * p.all_heads;
    // 0: query, 1: key, 2: value
    const int kind = (token_head >= p.query_heads) + (token_head >= p.query_heads + p.kv_heads);
    const int head = kind == 0 ? token_head : token_head - p.query_heads - (kind - 1) * p.kv_heads;
    const TokenHeads from = kind == 0 ? p.query : kind == 1 ? p.key : p.value;
    char* to = from.first + token * from.token_stride + head * from.head_stride;
    Elements<T, VECTOR> x[2] = {};
    if (active) {
#pragma unroll
        for (int side = 0; side < 2; ++side)
            x[side].load(to + vector_index<LOADED>(lane, side, p.pairs) * VECTOR * int(sizeof(T)));
        if (kind > 0) to = cache_address(kind == 1 ? p.key_cache : p.value_cache, p.slot_mapping[token], head, p);
    }
    if constexpr (NORM) {
        const float sums[2] = {sum_of_squares(x[0]), sum_of_squares(x[1])};
        const float mean = __fmul_rn(sum_over_head<LANES, LOADED>(sums, lane, p), p.inverse_head_dim);
        const float inverse = __frsqrt_rn(__fadd_rn(mean, p.epsilon));
        if (active && kind < 2) normalize<T, W, LOADED>(x, kind == 0 ? p.query_weight : p.key_weight, inverse, lane, p);
    }
    const bool rotated = active && kind < 2 && lane < p.pairs;
    if (rotated) rotate<T, C, LOADED, STORED>(x, token, lane, p);
    // If the layouts differ, a thread writes to addresses that other threads of the warp read.
    if constexpr (LOADED != STORED) __syncwarp();
    if (!active || to == nullptr) return;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int vector =
            rotated ? vector_index<STORED>(lane, side, p.pairs) : vector_index<LOADED>(lane, side, p.pairs);
        x[side].store(to + vector * VECTOR * int(sizeof(T)));
    }
}
