// Route each token to its top-k experts (DeepSeek-V3's biased grouped top-k, and the plainer gates).
//
//   score[e]  = sigmoid | softmax | sqrt(softplus) of logits[t, e], in float32
//   choice[e] = score[e] + bias[e]; without a bias the logit itself, which orders as the score does
//   kept      = the topk_group groups with the largest sum of their two best choices (or best choice)
//   ids       = the topk experts of the kept groups with the largest choice, best first
//   weights   = score[ids] (/ their sum if renormalize) * output_scale
//
// Ties go to the lower group and the lower expert. An expert whose logit is NaN or -inf, or whose choice
// is, ranks last (by id) and weighs 0.
//
// Grid: LANES lanes per token, 32 / LANES tokens per warp, WARPS warps per block.
//
// Repeating "find the best, strike it out" topk times would scan the row topk times. Instead:
//   1. one pass finds a threshold that at least topk choices reach, and few more;
//   2. the choices that reach it (a dozen of 256) go to a list in shared memory;
//   3. each lane ranks its entry of the list by counting the entries that beat it.
//
// EXPERTS > 0 fixes experts and groups: lane l holds the VALUES experts from l * VALUES on in registers, so
// that a group is a few whole neighbouring lanes. EXPERTS == 0 takes them from the arguments: lane l holds
// experts l, l + LANES, ... in shared memory. SCORING == ANY takes the scoring from the arguments. Nothing
// that is summed depends on who holds what, so all return the same bits.
#include "common/numeric.cuh"
#include "common/warp.cuh"

constexpr int WARPS = 4;
constexpr int CAPACITY = 64;     // entries in a token's candidate list, unless dynamic

enum Scoring { ANY, SIGMOID, SOFTMAX, SQRTSOFTPLUS };

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else T; null: unbiased
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64 that replaces `valid`, may be null
    long long row_stride;
    long long tokens;
    long long valid;              // tokens from this one on are padding
    int experts;
    int groups;
    int topk_group;
    int topk;                    // routed experts per token
    int shared;                  // fused shared experts, in the last columns
    int scoring;
    int group_by_two;            // a group's score is the sum of its two best choices, not its best
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    int capacity;                // dynamic only: entries in a token's candidate list
    int lanes_per_group;         // dynamic only: a power of two that divides a group's size
    float shared_scale;          // a shared expert's weight is the routed sum times this
    float output_scale;
    float softcap;               // dynamic only: logits become softcap * tanh(logits / softcap) in a softmax; 0: off
};

// One 64-bit word orders the candidates: larger choice first, then lower id.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate make_candidate(float choice, int id) {
    // Adding 0 makes -0 the +0 it is equal to.
    return (Candidate(sortable(__fadd_rn(choice, 0.f))) << 32) | unsigned(~id);
}
__device__ __forceinline__ int candidate_id(Candidate candidate) { return ~int(unsigned(candidate)); }

// What a lane knows of its own VALUES choices: registers, or a column of a row in shared memory.
template <int VALUES, int LANES> struct Choices {
    float value[VALUES];
    __device__ __forceinline__ Choices(float*, int) {}
    __device__ __forceinline__ float& operator[](int i) { return value[i]; }
};
template <int LANES> struct Choices<0, LANES> {
    float* column;
    __device__ __forceinline__ Choices(float* row, int lane) : column(row + lane) {}
    __device__ __forceinline__ float& operator[](int i) { return column[i * LANES]; }
};

// The two largest of the values seen so far.
struct TopTwo {
    float best = -CUDART_INF_F, second = -CUDART_INF_F;
    __device__ __forceinline__ void add(float x) {
        second = fmaxf(second, fminf(best, x));
        best = fmaxf(best, x);
    }
    __device__ __forceinline__ void merge_with_lane(int step) {
        const float other_best = __shfl_xor_sync(FULL_WARP, best, step);
        const float other_second = __shfl_xor_sync(FULL_WARP, second, step);
        second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
        best = fmaxf(best, other_best);
    }
    // fmax turns the NaN of -inf + inf into -inf.
    __device__ __forceinline__ float group_score(bool by_two) const {
        return by_two ? fmaxf(best + second, -CUDART_INF_F) : best;
    }
};

// Consecutive values of type T as floats, in loads as wide as their count allows.
template <typename T, int COUNT>
__device__ __forceinline__ void load_floats(const T* __restrict__ from, float (&to)[COUNT]) {
    constexpr int BYTES = COUNT * sizeof(T);
    constexpr int WIDTH = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : sizeof(T);
    constexpr int PER_LOAD = WIDTH / sizeof(T);
    struct alignas(WIDTH) Pack { T item[PER_LOAD]; };
#pragma unroll
    for (int i = 0; i < COUNT / PER_LOAD; ++i) {
        const Pack pack = reinterpret_cast<const Pack*>(from)[i];
#pragma unroll
        for (int j = 0; j < PER_LOAD; ++j) to[i * PER_LOAD + j] = to_float(pack.item[j]);
    }
}

template <typename T, int EXPERTS, int GROUPS, int SCORING, int LANES, bool BIASED>
__global__ void __launch_bounds__(WARPS * 32) moe_gate(const __grid_constant__ Params p) {
    constexpr bool DYNAMIC = EXPERTS == 0;
    constexpr int VALUES = EXPERTS / LANES;
    constexpr int TOKENS_PER_WARP = 32 / LANES;
    static_assert(DYNAMIC || EXPERTS % LANES == 0, "a lane holds a whole number of experts");
    static_assert(DYNAMIC || LANES % GROUPS == 0, "a group is whole lanes");

    int experts = p.experts, groups = p.groups, scoring = p.scoring, capacity = p.capacity;
    int values = (experts + LANES - 1) / LANES;
    bool biased = p.bias != nullptr;
    if constexpr (!DYNAMIC) experts = EXPERTS, groups = GROUPS, capacity = CAPACITY, values = VALUES, biased = BIASED;
    if constexpr (SCORING != ANY) scoring = SCORING;
    const int topk = p.topk;

    const int lane = threadIdx.x % LANES;
    const int slot = threadIdx.x / LANES;
    const long long token = (long long)blockIdx.x * (WARPS * TOKENS_PER_WARP) + slot;
    // Lanes past the last token repeat it, so that a warp's shuffles are always complete.
    const long long row = min(token, p.tokens - 1);
    const T* logits = static_cast<const T*>(p.logits) + row * p.row_stride;

    // Shared memory of a token: candidates[capacity], then sorted scores[topk], then when dynamic the row
    // of choices[values * LANES], group scores[groups] and kept flags[groups].
    extern __shared__ Candidate shared[];
    const int words = capacity + (topk + 1) / 2 + (DYNAMIC ? (values * LANES + 2 * groups + 1) / 2 : 0);
    Candidate* candidates = shared + slot * words;
    float* sorted = reinterpret_cast<float*>(candidates + capacity);
    float* choice_row = sorted + topk;
    float* group_scores = choice_row + values * LANES;
    int* group_kept = reinterpret_cast<int*>(group_scores + groups);

    const auto expert_of = [&](int i) { return DYNAMIC ? i * LANES + lane : lane * VALUES + i; };
    const auto bias_of = [&](int e) {
        // fmax turns a NaN into -inf.
        const float b = p.bias_is_float ? static_cast<const float*>(p.bias)[e]
                                        : to_float(static_cast<const T*>(p.bias)[e]);
        return fmaxf(b, -CUDART_INF_F);
    };
    const auto logit_of = [&](int e) { return to_float(logits[e]); };
    // A logit as the softmax takes it. The cap is monotonic, so the order of the raw logits stands.
    const auto softmax_argument = [&](float x) {
        if constexpr (DYNAMIC)
            if (p.softcap != 0.f) return p.softcap * tanhf(x / p.softcap);
        return fmaxf(fminf(x, LARGEST_FLOAT), -LARGEST_FLOAT);
    };

    // --- scores and choices ---------------------------------------------------------------------------
    Choices<VALUES, LANES> choice(choice_row, lane);
    if constexpr (DYNAMIC) {
        for (int i = 0; i < values; ++i)
            choice[i] = expert_of(i) < experts ? logit_of(expert_of(i)) : -CUDART_INF_F;
    } else {
        load_floats(logits + lane * VALUES, choice.value);
    }

    float largest = 0.f, inverse_sum = 1.f;
    if (scoring == SOFTMAX && (biased || !p.renormalize)) {
        largest = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < values; ++i) largest = fmaxf(largest, choice[i]);
        largest = softmax_argument(lanes_max<LANES>(largest));
        // Summed in fixed point, where the order of the terms cannot change the result.
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < values; ++i)
            if (choice[i] > -CUDART_INF_F)
                sum += __float2uint_rn(fast_exp2((softmax_argument(choice[i]) - largest) * LOG2_E) * 0x1p31f);
        inverse_sum = __fdividef(0x1p31f, float(lanes_sum<LANES>(sum)));
    }
    const auto score_of = [&](float x) {
        if (scoring == SIGMOID) return fast_reciprocal(__fadd_rn(1.f, fast_exp2(__fmul_rn(x, -LOG2_E))));
        if (scoring == SOFTMAX)
            return __fmul_rn(fast_exp2(__fmul_rn(__fsub_rn(softmax_argument(x), largest), LOG2_E)), inverse_sum);
        return sqrtf(__fadd_rn(fmaxf(x, 0.f), log1pf(__expf(-fabsf(x)))));
    };

    // x * 0 is NaN for a NaN or an infinity: one fused multiply-add per value finds the rows with one.
    float irregular = 0.f;
    if constexpr (DYNAMIC) {
        for (int i = 0; i < values; ++i) {
            const float x = choice[i];
            if (!(x > -CUDART_INF_F)) choice[i] = -CUDART_INF_F;
            else if (biased) choice[i] = __fadd_rn(score_of(x), bias_of(expert_of(i)));
        }
    } else {
        float bias[VALUES];
        if constexpr (BIASED) {
            if (p.bias_is_float) load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
            else load_floats(static_cast<const T*>(p.bias) + lane * VALUES, bias);
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            irregular = __fmaf_rn(choice[i], 0.f, irregular);
            if constexpr (BIASED) {
                choice[i] = __fadd_rn(score_of(choice[i]), bias[i]);
                irregular = __fmaf_rn(choice[i], 0.f, irregular);
            }
        }
        if (__any_sync(FULL_WARP, irregular != 0.f)) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const float x = logit_of(expert_of(i));
                if (!(x > -CUDART_INF_F)) choice[i] = -CUDART_INF_F;
                choice[i] = fmaxf(choice[i], -CUDART_INF_F);
            }
        }
    }

    // --- groups: which of this lane's values may be chosen, one bit each -------------------------------
    unsigned alive = values < 32 ? (1u << values) - 1 : FULL_WARP;
    float threshold = -CUDART_INF_F;
    bool threshold_known = topk > LANES;
    if constexpr (DYNAMIC) {
        // The column's last value may lie past the last expert.
        if (expert_of(values - 1) >= experts) alive >>= 1;
        if (groups > 1) {
            const int group_size = experts / groups, split = p.lanes_per_group, at_once = LANES / split;
            __syncwarp();
            for (int first = 0; first < groups; first += at_once) {
                const int group = first + lane / split;
                TopTwo top;
                if (group < groups) {
                    // Neighbouring groups start at different places, so that their lanes meet in few banks.
                    int e = (group % (group_size / split)) * split + lane % split;
                    for (int i = 0; i < group_size; i += split) {
                        top.add(choice_row[group * group_size + e]);
                        e += split;
                        if (e >= group_size) e -= group_size;
                    }
                }
                for (int step = split / 2; step > 0; step /= 2) top.merge_with_lane(step);
                if (group < groups && lane % split == 0)
                    group_scores[group] = top.group_score(p.group_by_two && group_size > 1);
            }
            __syncwarp();
            for (int group = lane; group < groups; group += LANES) {
                const float mine = group_scores[group];
                int rank = 0;
                for (int other = 0; other < groups; ++other) {
                    const float theirs = group_scores[other];
                    rank += theirs > mine || (theirs == mine && other < group);
                }
                group_kept[group] = rank < p.topk_group;
            }
            __syncwarp();
            for (int i = 0; i < values; ++i)
                if (alive >> i & 1)
                    if (!group_kept[expert_of(i) / group_size]) alive &= ~(1u << i);
        }
    } else if constexpr (GROUPS > 1) {
        constexpr int LANES_PER_GROUP = LANES / GROUPS;
        TopTwo top;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) top.add(choice[i]);
#pragma unroll
        for (int step = LANES_PER_GROUP / 2; step > 0; step /= 2) top.merge_with_lane(step);
        const float mine = top.group_score(p.group_by_two && EXPERTS > GROUPS);
        const int group = lane / LANES_PER_GROUP;
        int rank = 0;
#pragma unroll
        for (int flip = 1; flip < GROUPS; ++flip) {
            const float theirs = __shfl_xor_sync(FULL_WARP, mine, flip * LANES_PER_GROUP);
            rank += theirs > mine || (theirs == mine && (group ^ flip) < group);
        }
        if (rank >= p.topk_group) alive = 0;
        // Each kept group has two choices that reach its second best.
        if (EXPERTS > GROUPS && topk <= 2 * p.topk_group) {
            threshold = lanes_min<LANES>(alive ? top.second : CUDART_INF_F);
            threshold_known = true;
        }
    }

    // --- threshold: the topk-th largest of the lanes' best choices -------------------------------------
    if (!threshold_known) {
        float best = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < values; ++i)
            if (alive >> i & 1) best = fmaxf(best, choice[i]);
        int better = 0;
#pragma unroll
        for (int flip = 1; flip < LANES; ++flip) better += __shfl_xor_sync(FULL_WARP, best, flip) > best;
        threshold = lanes_min<LANES>(better < topk ? best : CUDART_INF_F);
    }

    // --- candidates: the choices that reach the threshold ----------------------------------------------
    // The sign of choice - threshold tells; a funnel shift collects it in one instruction.
    unsigned below = 0;
#pragma unroll
    for (int i = values - 1; i >= 0; --i)
        below = __funnelshift_l(__float_as_uint(__fsub_rn(choice[i], threshold)), below, 1);
    unsigned reached = alive & ~below;
    const int mine = __popc(reached);
    const int up_to_mine = lanes_inclusive_sum<LANES>(mine, lane);
    int count = __shfl_sync(FULL_WARP, up_to_mine, LANES - 1, LANES);
    int* listed = reinterpret_cast<int*>(candidates);
    // Only many equal choices, or a row sorted against us, overflow the list.
    if (__any_sync(FULL_WARP, count > capacity)) {
        // Strike out the best, topk times.
        for (int k = 0; k < topk; ++k) {
            Candidate best = 0;
#pragma unroll
            for (int i = 0; i < values; ++i)
                if (reached >> i & 1) best = max(best, make_candidate(choice[i], expert_of(i)));
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(FULL_WARP, best, step));
            const int id = candidate_id(best);
            if (lane == 0) listed[k] = id;
            const int owner = DYNAMIC ? id % LANES : id / (VALUES + DYNAMIC);
            if (owner == lane) reached &= ~(1u << (DYNAMIC ? id / LANES : id % (VALUES + DYNAMIC)));
        }
        count = topk;
    } else {
        for (int at = up_to_mine - mine; reached; reached &= reached - 1) listed[at++] = expert_of(__ffs(reached) - 1);
    }
    __syncwarp();

    // --- rank the candidates ---------------------------------------------------------------------------
    // The list of ids becomes a list of candidates in place, from its end: entry i covers ids 2i and 2i + 1.
    for (int first = (count - 1) / LANES * LANES; __any_sync(FULL_WARP, first >= 0); first -= LANES) {
        const int i = first + lane;
        const bool mine = first >= 0 && i < count;
        const int id = mine ? listed[i] : 0;
        __syncwarp();
        if (mine) {
            const float x = logit_of(id);
            float value = biased ? __fadd_rn(score_of(x), bias_of(id)) : x;
            if (!(x > -CUDART_INF_F)) value = -CUDART_INF_F;
            candidates[i] = make_candidate(value, id);
        }
        __syncwarp();
    }
    if (scoring == SOFTMAX && !biased && p.renormalize && count > 0) {
        // Any common factor cancels in the normalization; the largest logit keeps exp in range.
        Candidate best = 0;
        for (int i = lane; i < count; i += LANES) best = max(best, candidates[i]);
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(FULL_WARP, best, step));
        largest = softmax_argument(logit_of(candidate_id(best)));
    }
    long long valid = p.valid;
    if (p.valid_on_device)
        valid = p.valid_is_int64 ? *static_cast<const long long*>(p.valid_on_device)
                                 : *static_cast<const int*>(p.valid_on_device);
    const bool padding = token >= valid;
    const int columns = topk + p.shared;
    const long long out = token * columns;
    for (int i = lane; i < count; i += LANES) {
        const Candidate candidate = candidates[i];
        int rank = 0;
        for (int other = 0; other < count; ++other) rank += candidates[other] > candidate;
        if (rank < topk) {
            const int id = candidate_id(candidate);
            const bool last = unsigned(candidate >> 32) == sortable(-CUDART_INF_F);
            sorted[rank] = last ? 0.f : score_of(logit_of(id));
            if (token < p.tokens) p.ids[out + rank] = padding ? -1 : id;
        }
    }
    __syncwarp();

    // --- weights ---------------------------------------------------------------------------------------
    float sum = 0.f;
    for (int k = 0; k < topk; ++k) sum += sorted[k];
    const float scale = !p.renormalize ? p.output_scale : sum > 0.f ? p.output_scale / sum : 0.f;
    if (token < p.tokens) {
        for (int k = lane; k < columns; k += LANES) {
            const float score = k < topk ? sorted[k] : sum * p.shared_scale;
            p.weights[out + k] = padding ? 0.f : score * scale;
            if (k >= topk) p.ids[out + k] = padding ? -1 : experts + k - topk;
        }
    }
}
