// Route each token to its top-k of few experts: the gates of moe_gate.cu without groups and bias, a thread per token.
//
// Results, formulas and ties are those of moe_gate.cu, and so are the bits. A row of 8 logits is one load of 16 bytes,
// or two, and all else stays in the registers of one thread: no lane waits for another.
//
// EXPERTS: at most 16.
//
// Grid: one thread per token, at most THREADS per block.
//
// Speed of light: for few tokens latency, the launch and one round trip to memory; for very many memory, a row of
// logits in and topk weights and ids out.
#include "moe_gate/scores.cuh"

constexpr int THREADS = 128;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64 that replaces `valid`, may be null
    long long row_stride;
    int tokens;
    int valid;  // tokens from this one on are padding
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int renormalize;
    int valid_is_int64;
    float shared_scale; // a shared expert's weight is the routed sum times this
    float output_scale;
};

// The weights before their normalization, of choices that are -inf where an expert has weight 0. `choice` are the
// logits but for those.
template <int EXPERTS>
__device__ __forceinline__ void weigh(const Params& p, const float (&choice)[EXPERTS], float (&score)[EXPERTS]) {
    Scores<false> scores{0.f, p.scoring};
    if (p.scoring == SOFTMAX) {
        float largest = choice[0];
#pragma unroll
        for (int e = 1; e < EXPERTS; ++e) largest = fmaxf(largest, choice[e]);
        scores.largest = scores.softmax_argument(largest);
        // If the weights are normalized, any common factor cancels.
        unsigned long long sum = 0;
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) {
            score[e] = scores.softmax(choice[e]);
            if (choice[e] == -CUDART_INF_F) score[e] = 0.f;
            sum += __float2uint_rn(score[e] * 0x1p31f);
        }
        if (!p.renormalize) {
            const float inverse_sum = sum ? __fdividef(0x1p31f, float(sum)) : 0.f;
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) score[e] = __fmul_rn(score[e], inverse_sum);
        }
    } else {
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) {
            score[e] = p.scoring == SIGMOID ? scores.sigmoid(choice[e]) : scores.sqrtsoftplus(choice[e]);
            if (choice[e] == -CUDART_INF_F) score[e] = 0.f;
        }
    }
}

struct Ranked {
    unsigned key; // orders as the choice does, and is never 0
    int id;
    float score;
};

// The one with the largest key, of equal ones the first.
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

// Sum in moe_gate.cu's order: neighbours first.
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

template <typename T, int EXPERTS>
__global__ void __launch_bounds__(THREADS) gate_by_thread(const __grid_constant__ Params p) {
    static_assert(EXPERTS <= 16, "the choices stay in registers");
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= p.tokens) return;
    float choice[EXPERTS], score[EXPERTS];
    load_floats(static_cast<const T*>(p.logits) + token * p.row_stride, choice);
    const int valid = load_valid(p), topk = p.topk;
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) choice[e] = choice[e] > -CUDART_INF_F ? __fadd_rn(choice[e], 0.f) : -CUDART_INF_F;
    weigh(p, choice, score);

    Ranked ranked[EXPERTS];
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) ranked[e] = {sortable(choice[e]), e, score[e]};
    float weight[EXPERTS] = {};
    int id[EXPERTS];
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        if (k >= topk) break;
        const Ranked best = best_of(ranked);
        weight[k] = best.score, id[k] = best.id;
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e)
            if (e == best.id) ranked[e].key = 0; // struck out
    }
    const float sum = sum_in_pairs(weight);
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    const bool padding = token >= valid;
    const long long out = (long long)token * (topk + p.shared);
#pragma unroll
    for (int k = 0; k < EXPERTS; ++k) {
        if (k >= topk) break;
        p.weights[out + k] = padding ? 0.f : weight[k] * scale;
        p.ids[out + k] = padding ? -1 : id[k];
    }
    for (int k = topk; k < topk + p.shared; ++k) {
        p.weights[out + k] = padding ? 0.f : sum * p.shared_scale * scale;
        p.ids[out + k] = padding ? -1 : EXPERTS + k - topk;
    }
}
