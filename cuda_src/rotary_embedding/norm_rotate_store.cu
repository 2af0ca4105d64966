// Apply RMS norm and rotary embedding to the heads of queries and keys, and store keys and values in a paged cache.
//
//   z      = x * rsqrt(sum of x^2 / head_dim + epsilon) * (weight + offset), rounded to T    if NORM, else x
//   query  = z with its first rotary_dim elements rotated as in rotary_embedding/rotate.cu; written in place
//   key_cache[slot_mapping[t]]   = key[t], normalized and rotated in the same way
//   value_cache[slot_mapping[t]] = value[t]
//
// Each product and each sum is rounded to float32 (no fused multiply-add), and squares are summed in the same order as
// in norm/rms_norm.cu. The results therefore have the same bits as three separate calls of rms_norm, rotary_embedding
// and reshape_and_cache_flash. A token whose slot is outside of the cache, such as -1, is not stored.
//
// Grid: LANES neighbouring threads of a warp process one head of `query`, `key` or `value`. Only the first
// `head_dim / 16` of these threads have work. A thread has two units of 8 elements. With HALVES, a thread that rotates
// has the two units whose elements form rotated pairs, one in each half of the rotated elements. All other threads have
// two neighbouring units. A block processes THREADS / LANES heads.
//
// W: type of the weights, T or float. C: type of cos and sin. LOADED, STORED: layout of the input and of the output,
// HALVES or PAIRS. NORM: apply RMS norm to query and key.
//
// Speed of light: for many tokens, memory bandwidth; each element is read once and written once. The kernel is meant
// for decoding with one token, where one launch replaces four. The limit is then the latency of a launch, two dependent
// loads, a sum over a head and a store.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "rotary_embedding/layout.cuh"

constexpr int THREADS = 128;
constexpr int EACH = 8;

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
    const char* query_weight;      // [head_dim]  W, null: 1
    const char* key_weight;
    const char* cos; // [tokens, rotary_dim or rotary_dim / 2]  C
    const char* sin;
    long long cos_stride, sin_stride; // between tokens, in bytes
    Divisor by_heads;                 // heads of `query`, `key` and `value` together
    Divisor by_block_size;
    int rows; // heads of all tokens, of query, key and value
    int all_heads;
    int query_heads;
    int kv_heads;
    int slots; // slots in the cache
    int block_size;
    int units;       // units of 8 elements per head
    int pairs;       // pairs of rotated units: rotary_dim / 16
    int second_half; // column of cos and sin for a pair's second element; 0: same as for the first
    float per_width; // 1 / head_dim
    float epsilon;
    float offset;
};

// Return the index in the head of a thread's first (side 0) or second (side 1) unit. With HALVES, a thread that rotates
// has one unit in each half of the rotated elements.
template <int LAYOUT> __device__ __forceinline__ int unit_of(int lane, int side, int pairs) {
    return LAYOUT == HALVES && lane < pairs ? lane + side * pairs : 2 * lane + side;
}

// Add the sums of all units of a head in the order of norm/row.cuh: the number of units is rounded up to a power of
// two, and the second half of the sums is added to the first half until one sum is left. All threads of the warp must
// call this function.
template <int LANES, int LAYOUT>
__device__ __forceinline__ float folded_over_head(const float (&sums)[2], int lane, const Params& p) {
    float both[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int unit = lane + side * LANES;
        const bool halved = LAYOUT == HALVES && unit < 2 * p.pairs;
        const int from = halved ? (unit >= p.pairs ? unit - p.pairs : unit) : unit / 2;
        const bool second = halved ? unit >= p.pairs : unit % 2;
        const float first_sum = __shfl_sync(FULL_WARP, sums[0], from, LANES);
        const float second_sum = __shfl_sync(FULL_WARP, sums[1], from, LANES);
        both[side] = second ? second_sum : first_sum;
    }
    float sum = __fadd_rn(both[0], both[1]);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, step));
    return sum;
}

template <typename T> __device__ __forceinline__ float sum_of_squares(const Some<T, EACH>& x) {
    float sum = __fmul_rn(x.get(0), x.get(0));
#pragma unroll
    for (int i = 1; i < EACH; ++i) sum = __fadd_rn(sum, __fmul_rn(x.get(i), x.get(i)));
    return sum;
}

// Multiply a thread's two units by `inverse` (1 / RMS) and by their weights. Each result is rounded to T.
template <typename T, typename W, int LAYOUT>
__device__ __forceinline__ void normalize(Some<T, EACH> (&x)[2], const char* weight, float inverse, int lane,
                                          const Params& p) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        Some<W, EACH> factor;
        if (weight) factor.load_shared(weight + unit_of<LAYOUT>(lane, side, p.pairs) * EACH * int(sizeof(W)));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float y = __fmul_rn(x[side].get(i), inverse);
            if (weight) y = __fmul_rn(y, __fadd_rn(factor.get(i), p.offset));
            x[side].set(i, y);
        }
    }
}

// Rotate a thread's two units in place. The input has the layout LOADED, and the result the layout STORED.
template <typename T, typename C, int LOADED, int STORED>
__device__ __forceinline__ void rotate(Some<T, EACH> (&x)[2], int token, int lane, const Params& p) {
    const int first = lane * EACH * int(sizeof(C)), second = first + p.second_half * int(sizeof(C));
    const char* const cos = p.cos + token * p.cos_stride;
    const char* const sin = p.sin + token * p.sin_stride;
    Some<C, EACH> cos_of[2], sin_of[2];
    cos_of[0].load_shared(cos + first), sin_of[0].load_shared(sin + first);
    cos_of[1].load_shared(cos + second), sin_of[1].load_shared(sin + second);
    Some<T, EACH> y[2];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int a = place_of<EACH, LOADED>(i, 0), b = place_of<EACH, LOADED>(i, 1);
        const float one = x[a / EACH].get(a % EACH), two = x[b / EACH].get(b % EACH);
        const float left = __fsub_rn(__fmul_rn(one, cos_of[0].get(i)), __fmul_rn(two, sin_of[0].get(i)));
        const float right = __fadd_rn(__fmul_rn(two, cos_of[1].get(i)), __fmul_rn(one, sin_of[1].get(i)));
        const int c = place_of<EACH, STORED>(i, 0), d = place_of<EACH, STORED>(i, 1);
        y[c / EACH].set(c % EACH, left), y[d / EACH].set(d % EACH, right);
    }
    x[0] = y[0], x[1] = y[1];
}

// Return the address of a token's head in a cache, or null if the token is not stored.
__device__ __forceinline__ char* place_in(const CacheHeads& cache, long long slot, int head, const Params& p) {
    if ((unsigned long long)slot >= (unsigned long long)p.slots) return nullptr;
    const unsigned block = p.by_block_size.quotient(unsigned(slot));
    const unsigned place = unsigned(slot) - block * p.block_size;
    return cache.first + block * cache.block_stride + place * cache.token_stride + head * cache.head_stride;
}

template <typename T, typename W, typename C, int LANES, int LOADED, int STORED, bool NORM>
__global__ void __launch_bounds__(THREADS) norm_rotate_store(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    const int lane = threadIdx.x % LANES, row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const bool active = row < p.rows && 2 * lane < p.units;
    const int token = p.by_heads.quotient(min(row, p.rows - 1)), of_token = row - token * p.all_heads;
    // 0: a head of `query`; 1: of `key`; 2: of `value`
    const int kind = (of_token >= p.query_heads) + (of_token >= p.query_heads + p.kv_heads);
    const int head = kind == 0 ? of_token : of_token - p.query_heads - (kind - 1) * p.kv_heads;
    const TokenHeads from = kind == 0 ? p.query : kind == 1 ? p.key : p.value;
    char* to = from.first + token * from.token_stride + head * from.head_stride;
    Some<T, EACH> x[2] = {};
    if (active) {
#pragma unroll
        for (int side = 0; side < 2; ++side)
            x[side].load(to + unit_of<LOADED>(lane, side, p.pairs) * EACH * int(sizeof(T)));
        if (kind > 0) to = place_in(kind == 1 ? p.key_cache : p.value_cache, p.slot_mapping[token], head, p);
    }
    if constexpr (NORM) {
        const float sums[2] = {sum_of_squares(x[0]), sum_of_squares(x[1])};
        const float mean = __fmul_rn(folded_over_head<LANES, LOADED>(sums, lane, p), p.per_width);
        const float inverse = __frsqrt_rn(__fadd_rn(mean, p.epsilon));
        if (active && kind < 2) normalize<T, W, LOADED>(x, kind == 0 ? p.query_weight : p.key_weight, inverse, lane, p);
    }
    const bool rotated = active && kind < 2 && lane < p.pairs;
    if (rotated) rotate<T, C, LOADED, STORED>(x, token, lane, p);
    // If the layouts differ, a thread writes to addresses that other threads read. All threads must have loaded their
    // elements before any thread writes.
    if constexpr (LOADED != STORED) __syncwarp();
    if (!active || to == nullptr) return;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int unit = rotated ? unit_of<STORED>(lane, side, p.pairs) : unit_of<LOADED>(lane, side, p.pairs);
        x[side].store(to + unit * EACH * int(sizeof(T)));
    }
}
