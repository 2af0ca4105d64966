// Store new tokens in FlashMLA's FP8 cache (kv_cache/latents.cuh), with one scale per GROUP latents.
//
//   scale  = smallest power of two that is at least max(max(|latent|) / 448, 1e-4), ignoring NaN
//   stored = E4M3(latent / scale), rounded to the nearest, ties to even, and saturated
//
// A power of two makes this division and the later multiplication exact. Without rotary elements, zeros are stored.
//
// Grid: one warp per token. Lane l stores latents from `16 * l` on, and rotary elements `2 * l` and `2 * l + 1`; 8
// lanes share a scale.
//
// Speed of light: memory bandwidth. At 8192 tokens of bfloat16, an H200 reaches 61% of the bandwidth of a copy. 64
// tokens take 1.8 us; an empty kernel takes 0.5 us.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "kv_cache/latents.cuh"

struct StoreLatentsParams {
    const char* latents;           // T [tokens, LATENTS]
    const char* rotary;            // T [tokens, 64], or null
    char* cache;                   // [blocks, block_size, 656]
    const long long* slot_mapping; // [tokens]; a slot outside of the cache, such as -1, is skipped
    long long latents_stride;      // between tokens
    long long rotary_stride;
    long long block_stride;
    long long token_stride;
    int tokens;
    int slots; // of the cache
    int block_size;
    Divisor by_block_size;
};

// Return the smallest power of two that is at least x, for a normal x or infinity.
__device__ __forceinline__ float power_of_two_from(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0x7F800000u);
}

template <typename T, bool ALIGNED, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) store_latents(const __grid_constant__ StoreLatentsParams p) {
    begin_behind_earlier_kernels();
    constexpr int PER_LANE = LATENTS / 32, LOADS = PER_LANE * int(sizeof(T)) / 16;
    using Pair = Vector<2 * sizeof(T)>;
    const int lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const long long slot = __ldg(p.slot_mapping + token);
    const char* latents = p.latents + token * p.latents_stride + lane * (PER_LANE * int(sizeof(T)));
    const char* rotary = p.rotary + token * p.rotary_stride + lane * int(sizeof(Pair));
    uint4 vector[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) vector[i] = load_vector<uint4, ALIGNED>(latents + i * 16);
    Pair pair = {};
    if (p.rotary) pair = load_vector<Pair, ALIGNED>(rotary);

    float latent[PER_LANE], largest = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        latent[i] = to_float(reinterpret_cast<const T*>(vector)[i]);
        largest = fmaxf(largest, fabsf(latent[i])); // ignores NaN
    }
    const float min_scale = fmaxf(__fdiv_rn(lanes_max<GROUP / PER_LANE>(largest), LARGEST_E4M3), SMALLEST_SCALE);
    const float scale = power_of_two_from(min_scale), reciprocal = __frcp_rn(scale);
    if ((unsigned long long)slot >= (unsigned long long)p.slots) return;

    uint4 stored;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
        const float x = __fmul_rn(latent[i], reciprocal), y = __fmul_rn(latent[i + 1], reciprocal);
        reinterpret_cast<unsigned short*>(&stored)[i / 2] = to_fp8<__NV_E4M3>(x, y);
    }
    unsigned rounded;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        reinterpret_cast<__nv_bfloat16*>(&rounded)[i] = to_bfloat16(reinterpret_cast<const T*>(&pair)[i]);

    const unsigned block = p.by_block_size.quotient(unsigned(slot)),
                   block_offset = unsigned(slot) - block * p.block_size;
    char* to = p.cache + block * p.block_stride + block_offset * p.token_stride;
    store_vector<ALIGNED>(to + lane * PER_LANE, stored);
    if (lane % (GROUP / PER_LANE) == 0) store_vector<ALIGNED>(to + SCALES_AT + lane / (GROUP / PER_LANE) * 4, scale);
    store_vector<ALIGNED>(to + ROTARY_AT + lane * 4, rounded);
}
