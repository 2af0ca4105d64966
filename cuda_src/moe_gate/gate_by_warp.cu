// Route each of a few tokens to its top-k experts: the gates of moe_gate.cu, a warp per token, few steps in a row.
//
// Results, formulas and ties are those of moe_gate.cu, and so are the bits. Lane l holds the experts from l * VALUES
// on, VALUES = EXPERTS / 32, and sorts their choices. Then, topk times, the warp takes the largest of the lanes' first
// choices, by one `redux` of the floats' sortable bits; the lowest lane that has it (one vote) is the winner, and moves
// to its next choice. Which expert of the lane it was is looked up for all slots at once, at the end.
//
// With few tokens nothing but the chain of dependent steps matters. Here it is about ten instructions a slot; with many
// slots the list of moe_gate.cu has the shorter one.
//
// SCORING == ANY: the scoring is an argument. BIASED: with a bias, float or OTHER. For topk <= 32.
//
// Grid: one warp per token, blockDim.x / 32 <= WARPS tokens per block.
//
// Speed of light: latency, as in moe_gate.cu: the launch, one round trip to memory, and the chain. On an H200, with 256
// experts without groups and topk 8, 1 token of bfloat16 takes 2.5 us and 64 take 2.7 us, where an empty kernel takes
// 0.54 us.
#include "common/overlap.cuh"
#include "moe_gate/scores.cuh"
#include "moe_gate/selection.cuh"
#include "moe_gate/sort.cuh"

constexpr int WARPS = 2;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else OTHER; null: unbiased
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64 that replaces `valid`, may be null
    long long row_stride;
    int tokens;
    int valid; // tokens from this one on are padding
    int topk_group;
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    float shared_scale; // a shared expert's weight is the routed sum times this
    float output_scale;
};

// Consecutive words of a lane, in stores as wide as their count allows: single words would all go to a few banks.
template <typename T, int COUNT> __device__ __forceinline__ void store_own(T* to, const T (&from)[COUNT]) {
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

// Find `largest` and `inverse_sum` of the scores, as Scores::sum_exponentials does, by `redux`.
template <typename Scores, int VALUES>
__device__ __forceinline__ void sum_exponentials(Scores& scores, const float (&logit)[VALUES], float largest) {
    scores.largest = scores.softmax_argument(largest);
    unsigned long long own = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (logit[i] > -CUDART_INF_F)
            own += __float2uint_rn(fast_exp2((scores.softmax_argument(logit[i]) - scores.largest) * LOG2_E) * 0x1p31f);
    // A lane's sum is at most 2^36. Neither part overflows in the sum over the warp.
    const unsigned low = __reduce_add_sync(FULL_WARP, unsigned(own) & 0xffffff);
    const unsigned high = __reduce_add_sync(FULL_WARP, unsigned(own >> 24));
    scores.inverse_sum = __fdividef(0x1p31f, float(((unsigned long long)high << 24) + low));
}

// What a lane knows of the slot of its number.
struct Slot {
    unsigned key = 0; // of the choice; 0 past the last slot
    int winner = 0;   // the lane that holds the expert
    int skip = 0;     // earlier slots with the same key of the same lane
};

// Deal the largest of the lanes' sorted keys to the slots.
template <int VALUES> __device__ __forceinline__ Slot select_slots(unsigned (&sorted)[VALUES], int topk, int lane) {
    Slot own;
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
        if (lane == k) own.key = top, own.winner = winner, own.skip = skip;
    }
    return own;
}

// The place of a slot's expert among the keys of the lane that holds it.
template <int VALUES> __device__ __forceinline__ int place_of(const unsigned* keys, const Slot& slot) {
    unsigned equal = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) equal |= unsigned(keys[i] == slot.key) << i;
#pragma unroll 1
    for (int skip = slot.skip; skip > 0; --skip) equal &= equal - 1;
    return __ffs(equal) - 1;
}

// Write a token's weights and ids: those of the lanes below topk, and those of the shared experts.
__device__ __forceinline__ void write_slots(const Params& p, int lane, int token, int valid, int experts, float weight,
                                            int id) {
    // The order of moe_gate.cu's sum; the lanes from topk on have zeros.
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

template <typename T, int EXPERTS, int GROUPS, int SCORING, bool BIASED, typename OTHER = T>
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
    float* kept_scores = staged_scores[warp];

    float logit[VALUES], bias[VALUES], choice[VALUES];
    load_floats(static_cast<const T*>(p.logits) + token * p.row_stride + lane * VALUES, logit);
    if constexpr (BIASED) {
        if (p.bias_is_float)
            load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
        else
            load_floats(static_cast<const OTHER*>(p.bias) + lane * VALUES, bias);
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
        // fmax turns a NaN into -inf. No choice is -0, which would be below 0.
        if constexpr (BIASED) {
            score[i] = scores.of(logit[i]);
            choice[i] = __fadd_rn(score[i], fmaxf(bias[i], -CUDART_INF_F));
        } else {
            choice[i] = __fadd_rn(logit[i], 0.f);
        }
        if (!(logit[i] > -CUDART_INF_F)) choice[i] = -CUDART_INF_F;
        sorted[i] = sortable(choice[i]);
    }
    store_own(keys + lane * VALUES, sorted);
    if constexpr (BIASED) store_own(kept_scores + lane * VALUES, score);
    sort_descending(sorted);
    if constexpr (GROUPS > 1) {
        float second;
        if (!own_group_is_kept<32, GROUPS, (BIASED && EXPERTS > GROUPS)>(top_two(choice), lane, p.topk_group, second)) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) sorted[i] = 0;
        }
    }
    if (!BIASED && scores.scoring == SOFTMAX) {
        // The logits are the choices. If the weights are normalized, any common factor cancels.
        const float largest = from_sortable(__reduce_max_sync(FULL_WARP, sorted[0]));
        if (p.renormalize)
            scores.largest = scores.softmax_argument(largest);
        else
            sum_exponentials(scores, logit, largest);
    }
    const Slot own = select_slots(sorted, topk, lane);
    __syncwarp();
    int id = 0;
    float weight = 0.f;
    if (lane < topk) {
        id = own.winner * VALUES + place_of<VALUES>(keys + own.winner * VALUES, own);
        if (own.key != sortable(-CUDART_INF_F)) weight = BIASED ? kept_scores[id] : scores.of(from_sortable(own.key));
    }
    write_slots(p, lane, token, valid, EXPERTS, weight, id);
}
