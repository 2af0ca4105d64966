// Store new tokens in FlashMLA's FP8 cache (kv_cache/latents.cuh), with one scale per GROUP latents.
//
//   scale  = smallest power of two that is at least max(max(|latent|) / 448, 1e-4); max over the group, NaN ignored
//   stored = E4M3(latent / scale), rounded to the nearest, ties to even, and saturated
//
// Because the scale is a power of two, the division here and the multiplication when the cache is read are exact. Only
// the conversion to 8 bits rounds. If the caller does not pass rotary elements, zeros are stored.
//
// slot_mapping has the slot of each new token. Slot s is place `s % block_size` of block `s / block_size`. A token
// whose slot is outside of the cache, such as -1, is not stored.
//
// Grid: one warp per token. Lane l stores the 16 latents that start at index `16 * l`, so 8 lanes share a group of 128
// latents. Lane l also stores rotary elements `2 * l` and `2 * l + 1`.
//
// Speed of light: memory bandwidth; for bfloat16, 1152 bytes are read and 656 written per token. An H200 reaches 61% of
// the bandwidth of a copy at 8192 tokens. 64 tokens take 1.8 us; an empty kernel takes 0.5 us.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "kv_cache/latents.cuh"

struct StoreLatentsParams {
    const char* latents;           // T [tokens, LATENTS]
    const char* rotary;            // T [tokens, 64]; null: zeros are stored
    char* cache;                   // [blocks, block_size, 656]
    const long long* slot_mapping; // [tokens]
    long long latents_stride;      // between tokens
    long long rotary_stride;
    long long block_stride;
    long long token_stride;
    int tokens;
    int slots; // slots in the cache
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
    constexpr int EACH = LATENTS / 32, LOADS = EACH * int(sizeof(T)) / 16;
    using Pair = Unit<2 * sizeof(T)>;
    const int lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const long long slot = __ldg(p.slot_mapping + token);
    const char* latents = p.latents + token * p.latents_stride + lane * (EACH * int(sizeof(T)));
    const char* rotary = p.rotary + token * p.rotary_stride + lane * int(sizeof(Pair));
    uint4 vector[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) vector[i] = load_unit<uint4, ALIGNED>(latents + i * 16);
    Pair pair = {};
    if (p.rotary) pair = load_unit<Pair, ALIGNED>(rotary);

    float latent[EACH], largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        latent[i] = to_float(reinterpret_cast<const T*>(vector)[i]);
        largest = fmaxf(largest, fabsf(latent[i])); // fmaxf ignores NaN
    }
    const float least = fmaxf(__fdiv_rn(lanes_max<GROUP / EACH>(largest), LARGEST_E4M3), SMALLEST_SCALE);
    const float scale = power_of_two_from(least), reciprocal = __frcp_rn(scale);
    if ((unsigned long long)slot >= (unsigned long long)p.slots) return;

    uint4 stored;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        const float x = __fmul_rn(latent[i], reciprocal), y = __fmul_rn(latent[i + 1], reciprocal);
        reinterpret_cast<unsigned short*>(&stored)[i / 2] = to_fp8<__NV_E4M3>(x, y);
    }
    unsigned rounded;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        reinterpret_cast<__nv_bfloat16*>(&rounded)[i] = to_bfloat16(reinterpret_cast<const T*>(&pair)[i]);

    const unsigned block = p.by_block_size.quotient(unsigned(slot)), place = unsigned(slot) - block * p.block_size;
    char* to = p.cache + block * p.block_stride + place * p.token_stride;
    store_unit<ALIGNED>(to + lane * EACH, stored);
    if (lane % (GROUP / EACH) == 0) store_unit<ALIGNED>(to + SCALES_AT + lane / (GROUP / EACH) * 4, scale);
    store_unit<ALIGNED>(to + ROTARY_AT + lane * 4, rounded);
}
