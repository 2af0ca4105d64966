// Route each token to its top-k experts with one warp per token, for few tokens.
//
// The header of moe_gate.cu has the formulas, and the results are bit-identical. Lane l holds VALUES = EXPERTS / 32
// consecutive experts, starting at `l * VALUES`, and sorts their biased scores. Then the warp fills the topk slots, one
// per iteration: redux finds the largest remaining biased score of all lanes, a vote finds the lowest lane that holds
// it (the winner), and the winner removes it. At the end the warp looks up the expert ids of all slots.
//
// The chain of dependent instructions has about ten instructions per slot. With many slots the chain of moe_gate.cu is
// shorter.
//
// SCORING == ANY: the scoring is an argument. BIASED: there is a bias, of type float or BiasType. topk is at most 32.
//
// Grid: one warp per token, blockDim.x / 32 <= WARPS tokens per block.
//
// Speed of light: latency. On an H200, with 256 experts without groups and topk 8, 1 bfloat16 token takes 2.5 us and 64
// take 2.7 us; an empty kernel takes 0.54 us.
#include "common/overlap.cuh"
#include "moe_gate/scores.cuh"
#include "moe_gate/selection.cuh"
#include "moe_gate/sort.cuh"

constexpr int WARPS = 2;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else BiasType; null: no bias
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64, replaces `valid`; may be null
    long long row_stride;
    int tokens;
    int valid; // index of the first padding token
    int topk_group;
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    float shared_scale; // weight of a shared expert / sum of the routed weights
    float output_scale;
};

// Use the widest stores that COUNT allows, because stores of single values would cause bank conflicts.
template <typename T, int COUNT> __device__ __forceinline__ void store_values(T* to, const T (&from)[COUNT]) {
    constexpr int PER_STORE = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
    struct alignas(PER_STORE * sizeof(T)) Pack {
        T item[PER_STORE];
    };
#pragma unroll
    for (int i = 0; i < COUNT / PER_STORE; ++i) {
        Pack pack;
#pragma unroll
        for (int j = 0; j < PER_STORE; ++j) pack.item[j] = from[i * PER_STORE + j];
        reinterpret_cast<Pack*>(to)[i] = pack;
    }
}

// Compute the same bits as Scores::sum_exponentials, but with redux instructions.
template <typename Scores, int VALUES>
__device__ __forceinline__ void sum_exponentials(Scores& scores, const float (&logit)[VALUES], float largest) {
    scores.largest = scores.softmax_argument(largest);
    unsigned long long lane_sum = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (logit[i] > -CUDART_INF_F)
            lane_sum +=
                __float2uint_rn(fast_exp2((scores.softmax_argument(logit[i]) - scores.largest) * LOG2_E) * 0x1p31f);
    // A lane's sum is at most 2^36, so neither the low nor the high part overflows when summed over the warp.
    const unsigned low = __reduce_add_sync(FULL_WARP, unsigned(lane_sum) & 0xffffff);
    const unsigned high = __reduce_add_sync(FULL_WARP, unsigned(lane_sum >> 24));
    scores.inverse_sum = __fdividef(0x1p31f, float(((unsigned long long)high << 24) + low));
}

// Lane k holds result slot k, for the expert with the k-th largest biased score of the token, counted from 0.
struct Slot {
    unsigned key = 0; // the biased score as a sortable integer; 0 in lanes from topk on
    int winner = 0;   // the lane that holds the expert
    int skip = 0;     // earlier slots with the same key and the same winner
};

// Fill the topk slots with the largest keys of all lanes. Each lane's keys are in descending order.
template <int VALUES> __device__ __forceinline__ Slot select_slots(unsigned (&sorted)[VALUES], int topk, int lane) {
    Slot slot;
    unsigned last = 0;
    int last_winner = 0, skip = 0;
#pragma unroll 1
    for (int k = 0; k < topk; ++k) {
        const unsigned top = __reduce_max_sync(FULL_WARP, sorted[0]);
        const int winner = __ffs(__ballot_sync(FULL_WARP, sorted[0] == top)) - 1;
        if (lane == winner) {
#pragma unroll
            for (int i = 0; i + 1 < VALUES; ++i) sorted[i] = sorted[i + 1];
            sorted[VALUES - 1] = 0;
        }
        skip = top == last && winner == last_winner ? skip + 1 : 0;
        last = top, last_winner = winner;
        if (lane == k) slot.key = top, slot.winner = winner, slot.skip = skip;
    }
    return slot;
}

// Return the index of the slot's key among the keys of the winner. Skip the equal keys that earlier slots have taken.
template <int VALUES> __device__ __forceinline__ int index_of_key(const unsigned* keys, const Slot& slot) {
    unsigned equal = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) equal |= unsigned(keys[i] == slot.key) << i;
#pragma unroll 1
    for (int skip = slot.skip; skip > 0; --skip) equal &= equal - 1;
    return __ffs(equal) - 1;
}

__device__ __forceinline__ void write_slots(const Params& p, int lane, int token, int valid, int experts, float weight,
                                            int id) {
    // Add in the same order as moe_gate.cu. The lanes from topk on hold 0.
    float sum = weight;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    sum += __shfl_xor_sync(FULL_WARP, sum, 4);
    if (p.topk > 8) {
        sum += __shfl_xor_sync(FULL_WARP, sum, 8);
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
    }
    if (p.shared) sum = __shfl_sync(FULL_WARP, sum, 0);
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    const int columns = p.topk + p.shared;
    const long long out = (long long)token * columns;
    const bool padding = token >= valid;
#pragma unroll 1
    for (int k = lane; k < columns; k += 32) {
        if (k >= p.topk) id = experts + k - p.topk, weight = sum * p.shared_scale;
        p.weights[out + k] = padding ? 0.f : weight * scale;
        p.ids[out + k] = padding ? -1 : id;
    }
}

template <typename T, int EXPERTS, int GROUPS, int SCORING, bool BIASED, typename BiasType = T>
__global__ void __launch_bounds__(WARPS * 32) gate_by_warp(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int VALUES = EXPERTS / 32;
    static_assert(EXPERTS % 32 == 0 && 32 % GROUPS == 0, "a lane holds a whole number of experts, a group whole lanes");
    __shared__ __align__(16) unsigned staged_keys[WARPS][EXPERTS];
    __shared__ __align__(16) float staged_scores[WARPS][BIASED ? EXPERTS : 4];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int token = blockIdx.x * (blockDim.x / 32) + warp;
    if (token >= p.tokens) return;
    unsigned* keys = staged_keys[warp];
    float* cached_scores = staged_scores[warp];

    float logit[VALUES], bias[VALUES], biased_score[VALUES];
    load_floats(static_cast<const T*>(p.logits) + token * p.row_stride + lane * VALUES, logit);
    if constexpr (BIASED) {
        if (p.bias_is_float)
            load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
        else
            load_floats(static_cast<const BiasType*>(p.bias) + lane * VALUES, bias);
    }
    const int valid = load_valid(p), topk = p.topk;

    Scores<false> scores{0.f, SCORING == ANY ? p.scoring : SCORING};
    if constexpr (BIASED && SCORING == SOFTMAX) {
        float largest = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) largest = fmaxf(largest, logit[i]);
        sum_exponentials(scores, logit, from_sortable(__reduce_max_sync(FULL_WARP, sortable(largest))));
    }
    unsigned sorted[VALUES];
    float score[VALUES] = {};
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        // fmaxf turns a NaN into -inf. `sortable` puts -0 below 0, so adding 0 turns -0 into 0.
        if constexpr (BIASED) {
            score[i] = scores.of(logit[i]);
            biased_score[i] = __fadd_rn(score[i], fmaxf(bias[i], -CUDART_INF_F));
        } else {
            biased_score[i] = __fadd_rn(logit[i], 0.f);
        }
        if (!(logit[i] > -CUDART_INF_F)) biased_score[i] = -CUDART_INF_F;
        sorted[i] = sortable(biased_score[i]);
    }
    store_values(keys + lane * VALUES, sorted);
    if constexpr (BIASED) store_values(cached_scores + lane * VALUES, score);
    sort_descending(sorted);
    if constexpr (GROUPS > 1) {
        float group_second;
        if (!group_is_selected<32, GROUPS, (BIASED && EXPERTS > GROUPS)>(top_two(biased_score), lane, p.topk_group,
                                                                         group_second)) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sorted[i] = 0;
        }
    }
    if (!BIASED && scores.scoring == SOFTMAX) {
        // Renormalization cancels a common factor, so renormalized weights need no sum of exponentials.
        const float largest = from_sortable(__reduce_max_sync(FULL_WARP, sorted[0]));
        if (p.renormalize)
            scores.largest = scores.softmax_argument(largest);
        else
            sum_exponentials(scores, logit, largest);
    }
    const Slot slot = select_slots(sorted, topk, lane);
    __syncwarp();
    int id = 0;
    float weight = 0.f;
    if (lane < topk) {
        id = slot.winner * VALUES + index_of_key<VALUES>(keys + slot.winner * VALUES, slot);
        if (slot.key != sortable(-CUDART_INF_F))
            weight = BIASED ? cached_scores[id] : scores.of(from_sortable(slot.key));
    }
    write_slots(p, lane, token, valid, EXPERTS, weight, id);
}
