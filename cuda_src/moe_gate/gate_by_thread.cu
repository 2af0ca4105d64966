// Route each token to its top-k of at most 16 experts, without groups and bias, with one thread per token.
//
// The header of moe_gate.cu has the formulas, and the results are bit-identical. A row of 8 logits takes one or two
// 16-byte loads. Everything else stays in the registers of one thread, so no lane waits for another.
//
// SCORING: SOFTMAX, or ANY if the argument `scoring` selects another scoring function.
//
// Grid: one thread per token, at most THREADS per block.
//
// Speed of light: with few tokens the time is the latency of the launch and of one memory access; with very many tokens
// it is the time to read the logits and to write topk weights and ids. On an H200, with 8 bfloat16 experts and topk 2,
// 1 token takes 1.79 us, 1024 take 1.97 us and 8192 take 2.12 us; an empty kernel takes 0.54 us.
#include "common/overlap.cuh"
#include "moe_gate/scores.cuh"
#include "moe_gate/sort.cuh"

constexpr int THREADS = 128;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64, replaces `valid`; may be null
    long long row_stride;
    int tokens;
    int valid;  // index of the first padding token
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int renormalize;
    int valid_is_int64;
    float shared_scale; // weight of a shared expert / sum of the routed weights
    float output_scale;
};

// Return the weight of an expert before normalization; 0 for a logit of -inf.
template <int SCORING> __device__ __forceinline__ float weigh(const Scores<false>& scores, float logit) {
    if constexpr (SCORING == SOFTMAX)
        // This is Scores::softmax without the factor inverse_sum. A logit of -inf is not clamped, so its weight is 0.
        return fast_exp2(__fmul_rn(__fsub_rn(fminf(logit, LARGEST_FLOAT), scores.largest), LOG2_E));
    const float score = scores.scoring == SIGMOID ? scores.sigmoid(logit) : scores.sqrtsoftplus(logit);
    return logit == -CUDART_INF_F ? 0.f : score;
}

// Return 1 / (the sum of the exponentials). Softmax weights are multiplied by this result if they are not renormalized.
template <int SCORING, int EXPERTS>
__device__ __forceinline__ float inverse_sum(const Scores<false>& scores, const float (&logit)[EXPERTS]) {
    unsigned long long sum = 0;
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) sum += __float2uint_rn(weigh<SCORING>(scores, logit[e]) * 0x1p31f);
    // The sum is not subnormal, so this product equals `0x1p31f / sum`. Unlike a division it has no branch.
    const float factor = __fmul_rn(fast_reciprocal(float(sum)), 0x1p31f);
    return sum ? factor : 0.f;
}

struct Ranked {
    unsigned key; // the logit as a sortable integer above 0; 0 after removal
    int id;
};

// Return the entry with the largest key; among equal keys, the first.
template <int COUNT> __device__ __forceinline__ Ranked best_of(const Ranked (&ranked)[COUNT]) {
    Ranked best[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) best[i] = ranked[i];
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i + step < COUNT; i += 2 * step)
            if (best[i + step].key > best[i].key) best[i] = best[i + step];
    return best[0];
}

// Fill the topk result slots, best first.
template <int EXPERTS>
__device__ __forceinline__ void select(const float (&logit)[EXPERTS], int topk, float (&slot)[EXPERTS],
                                       int (&id)[EXPERTS]) {
    Ranked ranked[EXPERTS];
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) ranked[e] = {sortable(logit[e]), e};
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        if (k >= topk) break;
        const Ranked best = best_of(ranked);
        slot[k] = from_sortable(best.key), id[k] = best.id;
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e)
            if (e == best.id) ranked[e].key = 0;
    }
}

// Return 0xffffff00 if the float with these bits is negative, else 0, in one instruction.
__device__ __forceinline__ unsigned sign_mask(unsigned bits) {
    unsigned mask;
    asm("prmt.b32 %0, %1, 0, 0xBBB4;" : "=r"(mask) : "r"(bits));
    return mask;
}

// Fill all result slots, best first. The lowest byte of a float32 converted from a 16-bit logit is 0, so a key holds
// the id there. All keys then differ, so min and max instructions sort them.
template <int EXPERTS>
__device__ __forceinline__ void select_by_keys(const float (&logit)[EXPERTS], float (&slot)[EXPERTS],
                                               int (&id)[EXPERTS]) {
    unsigned key[EXPERTS];
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) {
        const unsigned bits = __float_as_uint(logit[e]);
        key[e] = bits ^ (sign_mask(bits) | 0x80000000u | (15 - e)); // `sortable` with the id in the lowest byte
    }
    sort_descending(key);
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        // The highest bit of a key is clear if the logit is negative.
        slot[k] = __uint_as_float((key[k] ^ (sign_mask(~key[k]) | 0x80000000u)) & ~255u);
        id[k] = 15 - int(key[k] & 15);
    }
}

template <int COUNT> __device__ __forceinline__ float largest_of(const float (&value)[COUNT]) {
    float largest[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) largest[i] = value[i];
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i + step < COUNT; i += 2 * step) largest[i] = fmaxf(largest[i], largest[i + step]);
    return largest[0];
}

// Add neighbours first, in the same order as moe_gate.cu.
template <int COUNT> __device__ __forceinline__ float sum_in_pairs(const float (&value)[COUNT]) {
    float sum[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = value[i];
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i + step < COUNT; i += 2 * step) sum[i] += sum[i + step];
    return sum[0];
}

template <typename T, int EXPERTS, int SCORING>
__global__ void __launch_bounds__(THREADS) gate_by_thread(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    static_assert(EXPERTS <= 16, "the choices stay in registers");
    const unsigned token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= p.tokens) return;
    float logit[EXPERTS];
    load_floats(static_cast<const T*>(p.logits) + token * p.row_stride, logit);
    const int valid = load_valid(p), topk = p.topk;
    // Compute the output addresses while the logits are in flight.
    float* weights = p.weights + token * (long long)(topk + p.shared);
    int* ids = p.ids + token * (long long)(topk + p.shared);
    asm volatile("" : "+l"(weights), "+l"(ids)); // otherwise the compiler computes them at the end
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) logit[e] = __fadd_rn(fmaxf(logit[e], -CUDART_INF_F), 0.f); // no NaN and no -0

    Scores<false> scores{0.f, SCORING == ANY ? p.scoring : SCORING};
    float slot[EXPERTS], weight[EXPERTS] = {}, factor = 1.f;
    int id[EXPERTS];
    if constexpr (SCORING == SOFTMAX) {
        scores.largest = scores.softmax_argument(largest_of(logit));
        if (!p.renormalize) factor = inverse_sum<SCORING>(scores, logit);
    }
    if constexpr (sizeof(T) == 2)
        select_by_keys(logit, slot, id);
    else
        select(logit, topk, slot, id);
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        if (k && k >= topk) break;
        weight[k] = __fmul_rn(weigh<SCORING>(scores, slot[k]), factor);
    }
    const float sum = sum_in_pairs(weight);
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    const bool padding = int(token) >= valid;
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        if (k && k >= topk) break;
        weights[k] = padding ? 0.f : weight[k] * scale;
        ids[k] = padding ? -1 : id[k];
    }
    for (int k = topk; k < topk + p.shared; ++k) {
        weights[k] = padding ? 0.f : sum * p.shared_scale * scale;
        ids[k] = padding ? -1 : EXPERTS + k - topk;
    }
}
