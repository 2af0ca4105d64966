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
// EXPERTS > 0 fixes experts and groups: lane l holds the VALUES = EXPERTS / LANES experts from l * VALUES on, so
// that a group is a few whole neighbouring lanes. EXPERTS == 0 takes them from the arguments: lane l holds
// experts l, l + LANES, ..., at most VALUES of them. SCORING == ANY takes the scoring from the arguments. Nothing
// that is summed depends on who holds what, so all return the same bits.
#include "common/numeric.cuh"
#include "common/warp.cuh"

constexpr int WARPS = 2;
constexpr int CAPACITY = 28;     // entries in a token's candidate list, unless dynamic
constexpr int STAGED_LANES = 16; // up to so many lanes per token, rows go through shared memory

enum Scoring { ANY, SIGMOID, SOFTMAX, SQRTSOFTPLUS };

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else T; null: unbiased
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64 that replaces `valid`, may be null
    long long row_stride;
    int tokens;
    int valid; // tokens from this one on are padding
    int experts;
    int groups;
    int topk_group;
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int group_by_two; // dynamic only: a group's score is the sum of its two best choices, as it is with
                      // a bias when not dynamic; else it is its best
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    int capacity;             // dynamic only: entries in a token's candidate list, a multiple of 4
    int group_size;           // dynamic only, like the next two
    int log2_lanes_per_group; // 2 to it divides group_size
    unsigned group_magic;     // e / group_size == e * group_magic >> 20
    float shared_scale;       // a shared expert's weight is the routed sum times this
    float output_scale;
    float softcap; // dynamic only: logits become softcap * tanh(logits / softcap) in a softmax; 0: off
};

// One 64-bit word orders the candidates: larger choice first, then lower id.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate make_candidate(float choice, int id) {
    return (Candidate(sortable(choice)) << 32) | unsigned(~id);
}
__device__ __forceinline__ int candidate_id(Candidate candidate) { return ~int(unsigned(candidate)); }

// How many of the list's `count` entries come before each of `own`. Beyond them the list holds three zeros, for it is
// read four at a time.
template <int COUNT>
__device__ __forceinline__ void rank_in(const Candidate* list, int count, const Candidate (&own)[COUNT],
                                        int (&rank)[COUNT]) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(list);
    int minus_rank[COUNT] = {};
#pragma unroll 1
    for (int i = 0; i < count; i += 4, pairs += 2) {
        const ulonglong2 a = pairs[0], b = pairs[1];
        const Candidate others[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
        for (Candidate other : others)
#pragma unroll
            for (int k = 0; k < COUNT; ++k) minus_rank[k] = minus_if_greater(minus_rank[k], other, own[k]);
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) rank[k] = -minus_rank[k];
}

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
    struct alignas(WIDTH) Pack {
        T item[PER_LOAD];
    };
#pragma unroll
    for (int i = 0; i < COUNT / PER_LOAD; ++i) {
        const Pack pack = reinterpret_cast<const Pack*>(from)[i];
#pragma unroll
        for (int j = 0; j < PER_LOAD; ++j) to[i * PER_LOAD + j] = to_float(pack.item[j]);
    }
}

// A row on its way from global memory to the lanes. If each lane read its own COUNT values from global memory,
// every load of a warp would touch a cache line per lane or two. So the lanes copy the row in whole lines to
// shared memory, and there each reads its part. Parts of an even number of 16-byte chunks are kept one chunk
// apart, which puts the reads of 8 neighbouring lanes in different banks.
// Not so the dynamic variant, whose lanes do not hold neighbouring experts.
template <typename T, int COUNT, int LANES> struct Staging {
    static constexpr int CHUNKS = COUNT * sizeof(T) / 16;
    static constexpr bool USED = LANES <= STAGED_LANES && COUNT > 1 && COUNT * sizeof(T) % 16 == 0;
    static constexpr int PITCH = CHUNKS % 2 ? CHUNKS : CHUNKS + 1;
    static constexpr int UNITS = USED ? LANES * PITCH : 0;

    static __device__ __forceinline__ void start(const T* row, uint4* staged, int lane) {
        const uint4* from = reinterpret_cast<const uint4*>(row) + lane;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int chunk = i * LANES + lane;
            // Where a round covers whole parts, the next one lies at a constant distance.
            const uint4* to = LANES % CHUNKS
                                  ? staged + chunk / CHUNKS * PITCH + chunk % CHUNKS
                                  : staged + lane / CHUNKS * PITCH + lane % CHUNKS + i * (LANES / CHUNKS * PITCH);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                         "l"(from + i * LANES)
                         : "memory");
        }
    }
    // The whole row has arrived.
    static __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    // Where in the staged row the values of a lane begin.
    static __device__ __forceinline__ T* part(uint4* staged, int lane) {
        return reinterpret_cast<T*>(staged + lane * PITCH);
    }
};

// How many blocks a multiprocessor should hold at once, which bounds the registers.
constexpr int resident_blocks(int lanes, int values) {
    // Of 32 values, 14 blocks would spill registers there.
    return lanes > STAGED_LANES ? 1 : values <= 16 ? 16 : __CUDA_ARCH__ >= 1000 ? 12 : 14;
}

template <typename T, int EXPERTS, int GROUPS, int SCORING, int LANES, int VALUES, bool BIASED>
__global__ void __launch_bounds__(WARPS * 32, resident_blocks(EXPERTS ? LANES : 32, VALUES))
    moe_gate(const __grid_constant__ Params p) {
    constexpr bool DYNAMIC = EXPERTS == 0;
    constexpr int TOKENS = WARPS * 32 / LANES;
    static_assert(DYNAMIC || EXPERTS == LANES * VALUES, "a lane holds a whole number of experts");
    static_assert(DYNAMIC || LANES % GROUPS == 0, "a group is whole lanes");
    constexpr int AT_ONCE = LANES == 8 ? 2 : 1; // candidates a lane works on at once
    static_assert(VALUES <= 32, "a lane keeps a bit for each of its values");

    int experts = p.experts, groups = p.groups, scoring = p.scoring, capacity = p.capacity;
    bool biased = p.bias != nullptr;
    if constexpr (!DYNAMIC) experts = EXPERTS, groups = GROUPS, capacity = CAPACITY, biased = BIASED;
    if constexpr (SCORING != ANY) scoring = SCORING;
    const int topk = p.topk, columns = topk + p.shared;
    const int lane = threadIdx.x % LANES;
    const int slot = threadIdx.x / LANES;

    // Shared memory, in 16-byte units. Of the block: the bias, when rows are staged. Of each token: the list
    // (candidates, and the scores and ids of its entries); when staged the row; when dynamic the groups, the kept
    // flags and the row of choices, each group of them followed by lanes_per_group unused words.
    extern __shared__ uint4 shared[];
    using Stage = Staging<T, DYNAMIC ? 1 : VALUES, LANES>;
    using BiasStage = Staging<float, VALUES, LANES>;
    constexpr int BIAS_UNITS = Stage::USED && BIASED ? BiasStage::UNITS : 0;
    const int list_units = capacity + capacity / 4 + 2;
    // A dynamic lane's last values may lie past the last expert; they get places in shared memory all the same.
    const int padded_groups = DYNAMIC ? int((LANES * VALUES - 1) * p.group_magic >> 20) + 1 : 0;
    const int row_words = padded_groups + LANES * VALUES + (padded_groups << p.log2_lanes_per_group);
    const int row_units = DYNAMIC ? (groups + 5) / 2 + (row_words + 3) / 4 : Stage::UNITS;
    uint4* own_shared = shared + BIAS_UNITS + slot * (list_units + row_units);
    Candidate* candidates = reinterpret_cast<Candidate*>(own_shared);    // [capacity + 4]
    float* scores = reinterpret_cast<float*>(candidates + capacity + 4); // [capacity]
    int* listed = reinterpret_cast<int*>(scores + capacity);             // [capacity]
    uint2* sorted = reinterpret_cast<uint2*>(listed);                    // [capacity] scores and ids, after that
    uint4* staged = own_shared + list_units;

    const auto expert_of = [&](int i) { return DYNAMIC ? i * LANES + lane : lane * VALUES + i; };
    // Past the last expert a lane repeats it, and its bit in `alive` is 0.
    const auto load_expert_of = [&](int i) { return DYNAMIC ? min(expert_of(i), experts - 1) : expert_of(i); };
    // Without that, the addresses of a lane's loads differ by constants, which makes them one instruction each.
    const auto load_column = [&](auto load, float (&to)[VALUES]) {
        if (experts == LANES * VALUES) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(expert_of(i));
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(load_expert_of(i));
        }
    };
    unsigned existing = VALUES < 32 ? (1u << (VALUES % 32)) - 1 : ~0u;
    if constexpr (DYNAMIC) {
        const int own = (experts - lane + LANES - 1) / LANES;
        if (own < VALUES) existing = (1u << max(own, 0)) - 1;
    }

    // A lane past the last token does the last one again, for a warp's shuffles need all lanes, and writes nothing.
    const int token = blockIdx.x * TOKENS + slot;
    const bool live = token < p.tokens;
    const T* logits = static_cast<const T*>(p.logits) + min(token, p.tokens - 1) * p.row_stride;
    if constexpr (Stage::USED) Stage::start(logits, staged, lane);

    const auto bias_in_memory = [&](int e) {
        // fmax turns a NaN into -inf.
        const float b =
            p.bias_is_float ? static_cast<const float*>(p.bias)[e] : to_float(static_cast<const T*>(p.bias)[e]);
        return fmaxf(b, -CUDART_INF_F);
    };
    const auto bias_of = [&](unsigned e) {
        if constexpr (BIAS_UNITS > 0)
            return BiasStage::part(shared, e / VALUES)[e % VALUES];
        else
            return bias_in_memory(e);
    };
    float bias[VALUES];
    if constexpr (BIAS_UNITS > 0) {
        for (int e = threadIdx.x; e < EXPERTS; e += WARPS * 32)
            BiasStage::part(shared, e / VALUES)[e % VALUES] = bias_in_memory(e);
        __syncthreads();
    } else if (DYNAMIC && biased) {
        if (p.bias_is_float)
            load_column([&](int e) { return static_cast<const float*>(p.bias)[e]; }, bias);
        else
            load_column([&](int e) { return to_float(static_cast<const T*>(p.bias)[e]); }, bias);
    } else if (biased) {
        if (p.bias_is_float)
            load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
        else
            load_floats(static_cast<const T*>(p.bias) + lane * VALUES, bias);
    }
    int valid = p.valid;
    if (p.valid_on_device)
        valid = p.valid_is_int64 ? int(min(*static_cast<const long long*>(p.valid_on_device), (long long)p.tokens))
                                 : *static_cast<const int*>(p.valid_on_device);

    // --- logits, scores and choices -------------------------------------------------------------------
    float choice[VALUES];
    if constexpr (Stage::USED) {
        Stage::wait();
        load_floats<T, VALUES>(Stage::part(staged, lane), choice);
    } else if constexpr (DYNAMIC) {
        load_column([&](int e) { return to_float(logits[e]); }, choice);
    } else {
        load_floats(logits + lane * VALUES, choice);
    }
    if constexpr (BIAS_UNITS > 0) load_floats(BiasStage::part(shared, lane), bias);
    const auto logit_of = [&](unsigned e) {
        if constexpr (Stage::USED)
            return to_float(Stage::part(staged, e / VALUES)[e % VALUES]);
        else
            return to_float(logits[e]);
    };

    // A logit as the softmax takes it. The cap is monotonic, so the order of the raw logits stands.
    const auto softmax_argument = [&](float x) {
        if constexpr (DYNAMIC)
            if (p.softcap != 0.f) return p.softcap * tanhf(x / p.softcap);
        return fmaxf(fminf(x, LARGEST_FLOAT), -LARGEST_FLOAT);
    };
    float largest = 0.f, inverse_sum = 1.f;
    if (scoring == SOFTMAX && (biased || !p.renormalize)) {
        largest = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) largest = fmaxf(largest, choice[i]);
        largest = softmax_argument(lanes_max<LANES>(largest));
        // Summed in fixed point, where the order of the terms cannot change the result.
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (existing >> i & 1 && choice[i] > -CUDART_INF_F)
                sum += __float2uint_rn(fast_exp2((softmax_argument(choice[i]) - largest) * LOG2_E) * 0x1p31f);
        inverse_sum = __fdividef(0x1p31f, float(lanes_sum<LANES>(sum)));
    }
    const auto sigmoid = [](float x) { return fast_reciprocal(__fadd_rn(1.f, fast_exp2(__fmul_rn(x, -LOG2_E)))); };
    const auto softmax = [&](float x) {
        return __fmul_rn(fast_exp2(__fmul_rn(__fsub_rn(softmax_argument(x), largest), LOG2_E)), inverse_sum);
    };
    const auto sqrtsoftplus = [](float x) { return sqrtf(softplus(fminf(x, LARGEST_FLOAT))); };

    // x * 0 is NaN for a NaN or an infinity: one multiply-add per value finds the rows with one. The bias has no NaN.
    float irregular = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) irregular = __fmaf_rn(choice[i], 0.f, irregular);
    // No choice is -0, which the sign of a difference would tell from the +0 it is equal to.
    const auto choose = [&](auto score_of) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            // Not before, so that the loads of the bias and of the logits are on their way together.
            const float regular_bias = BIAS_UNITS > 0 ? bias[i] : fmaxf(bias[i], -CUDART_INF_F);
            choice[i] = __fadd_rn(score_of(choice[i]), regular_bias);
        }
    };
    if (biased) {
        if (scoring == SIGMOID)
            choose(sigmoid);
        else if (scoring == SOFTMAX)
            choose(softmax);
        else
            choose(sqrtsoftplus);
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) choice[i] = __fadd_rn(choice[i], 0.f);
    }
    const bool any_irregular = __any_sync(FULL_WARP, irregular != 0.f);
    if (any_irregular) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (!(logit_of(load_expert_of(i)) > -CUDART_INF_F)) choice[i] = -CUDART_INF_F;
    }

    // --- groups: which of this lane's values may be chosen, one bit each -------------------------------
    unsigned alive = existing;
    // Each kept group has two choices that reach its second best, which gives a threshold for free.
    const bool threshold_from_groups = !DYNAMIC && GROUPS > 1 && EXPERTS > GROUPS && topk <= 2 * p.topk_group;
    float threshold = -CUDART_INF_F;
    if (DYNAMIC && groups > 1) {
        const int log2_split = p.log2_lanes_per_group, split = 1 << log2_split;
        Candidate* group_list = reinterpret_cast<Candidate*>(staged);                  // [groups + 3]
        unsigned* group_kept = reinterpret_cast<unsigned*>(staged + (groups + 5) / 2); // [padded_groups]
        float* choice_row = reinterpret_cast<float*>(group_kept + padded_groups);
        const auto group_of = [&](int e) { return int(e * p.group_magic >> 20); };
#pragma unroll
        for (int i = 0; i < VALUES; ++i) choice_row[expert_of(i) + (group_of(expert_of(i)) << log2_split)] = choice[i];
        __syncwarp();
        // The unused words put the lanes that scan neighbouring groups in different banks.
        const int part = lane & (split - 1), groups_at_once = LANES >> log2_split;
#pragma unroll 1
        for (int first = 0; first < groups; first += groups_at_once) {
            const int group = first + (lane >> log2_split);
            TopTwo top;
            if (group < groups) {
                const float* member = choice_row + group * (p.group_size + split) + part;
                const float* end = member + p.group_size;
#pragma unroll 4
                for (; member < end; member += split) top.add(*member);
            }
#pragma unroll 1
            for (int flip = split / 2; flip > 0; flip /= 2) top.merge_with_lane(flip);
            if (group < groups && part == 0)
                group_list[group] = make_candidate(top.group_score(p.group_by_two && p.group_size > 1), group);
        }
        for (int i = lane; i < 3; i += LANES) group_list[groups + i] = 0;
        __syncwarp();
#pragma unroll 1
        for (int group = lane; group < groups; group += LANES) {
            const Candidate own[1] = {group_list[group]};
            int rank[1];
            rank_in(group_list, groups, own, rank);
            group_kept[group] = rank[0] < p.topk_group ? ~0u : 0;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < VALUES; ++i) alive &= group_kept[group_of(expert_of(i))] | ~(1u << i);
    } else if constexpr (!DYNAMIC && GROUPS > 1) {
        constexpr int LANES_PER_GROUP = LANES / GROUPS;
        TopTwo top;
        top.best = choice[0];
#pragma unroll
        for (int i = 1; i < VALUES; ++i) top.add(choice[i]);
#pragma unroll
        for (int step = LANES_PER_GROUP / 2; step > 0; step /= 2) top.merge_with_lane(step);
        const unsigned score = sortable(top.group_score(BIASED && EXPERTS > GROUPS));
        const int group = lane / LANES_PER_GROUP;
        int minus_rank = 0;
#pragma unroll
        for (int flip = 1; flip < GROUPS; ++flip) {
            const unsigned theirs = __shfl_xor_sync(FULL_WARP, score, flip * LANES_PER_GROUP);
            // The highest bit that differs tells which group is lower; an equal score then beats ours.
            const unsigned lower = group >> (31 - __clz(flip)) & 1;
            minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
        }
        if (-minus_rank >= p.topk_group) alive = 0;
        if (threshold_from_groups) threshold = lanes_min<LANES>(alive ? top.second : CUDART_INF_F);
    }

    // --- threshold: the topk-th largest of the lanes' best choices -------------------------------------
    if (!threshold_from_groups && topk <= LANES) {
        float best = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (alive >> i & 1) best = fmaxf(best, choice[i]);
        threshold = from_sortable(lanes_kth_largest<LANES>(sortable(best), topk));
    }

    // --- candidates: the choices that reach the threshold ----------------------------------------------
    // The sign of choice - threshold tells; a funnel shift collects it in one instruction.
    unsigned below = 0;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i)
        below = __funnelshift_l(__float_as_uint(__fsub_rn(choice[i], threshold)), below, 1);
    unsigned reached = alive & ~below;
    const int own_count = __popc(reached);
    const int up_to_own = lanes_inclusive_sum<LANES>(own_count);
    int count = __shfl_sync(FULL_WARP, up_to_own, LANES - 1, LANES);
    // Only many equal choices, or a row sorted against us, overflow the list.
    if (__any_sync(FULL_WARP, count > capacity)) {
        // Strike out the best, topk times.
        for (int k = 0; k < topk; ++k) {
            float largest_left = -CUDART_INF_F;
            int at = -1;
#pragma unroll
            for (int i = 0; i < VALUES; ++i)
                if ((reached >> i & 1) && (at < 0 || choice[i] > largest_left)) largest_left = choice[i], at = i;
            Candidate best = at < 0 ? 0 : make_candidate(largest_left, expert_of(at));
#pragma unroll
            for (int flip = LANES / 2; flip > 0; flip /= 2) best = max(best, __shfl_xor_sync(FULL_WARP, best, flip));
            const int id = candidate_id(best);
            if (lane == 0) listed[k] = id;
            if (at >= 0 && id == expert_of(at)) reached &= ~(1u << at);
        }
        count = topk;
    } else {
        for (int* at = listed + up_to_own - own_count; reached; reached &= reached - 1)
            *at++ = expert_of(__ffs(reached) - 1);
    }
    __syncwarp();

    // --- rank the candidates ---------------------------------------------------------------------------
    // Nearly always each lane has one entry: loops, but not worth unrolling.
    if (scoring == SOFTMAX && !biased && p.renormalize) {
        // Any common factor cancels in the normalization; the largest logit keeps exp in range.
        float best = -CUDART_INF_F;
#pragma unroll 1
        for (int i = lane; i < count; i += LANES) best = fmaxf(best, logit_of(listed[i]));
        largest = softmax_argument(lanes_max<LANES>(best));
    }
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * AT_ONCE) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int i = first + k * LANES, id = listed[min(i, count - 1)];
            const float x = logit_of(id);
            float score = scoring == SIGMOID ? sigmoid(x) : scoring == SOFTMAX ? softmax(x) : sqrtsoftplus(x);
            float value = __fadd_rn(biased ? score : x, biased ? bias_of(id) : 0.f);
            if (any_irregular && !(x > -CUDART_INF_F)) value = -CUDART_INF_F;
            if (value == -CUDART_INF_F) score = 0.f;
            if (i < count) {
                candidates[i] = make_candidate(value, id);
                scores[i] = score;
            }
        }
    }
    for (int i = lane; i < 3; i += LANES) candidates[count + i] = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * AT_ONCE) {
        Candidate own[AT_ONCE];
        int rank[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) own[k] = candidates[min(first + k * LANES, count)];
        rank_in(candidates, count, own, rank);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (rank[k] < topk)
                sorted[rank[k]] = make_uint2(__float_as_uint(scores[first + k * LANES]), candidate_id(own[k]));
    }
    __syncwarp();

    // --- weights ---------------------------------------------------------------------------------------
    // lanes_sum adds neighbours first and blocks of LANES last, so the order does not depend on LANES.
    float sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < topk; first += LANES)
        sum += lanes_sum<LANES>(first + lane < topk ? __uint_as_float(sorted[first + lane].x) : 0.f);
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    if (live) {
        const long long out = (long long)token * columns;
        const bool padding = token >= valid;
#pragma unroll 1
        for (int k = lane; k < columns; k += LANES) {
            uint2 chosen = make_uint2(__float_as_uint(sum * p.shared_scale), experts + k - topk);
            if (k < topk) chosen = sorted[k];
            p.weights[out + k] = padding ? 0.f : __uint_as_float(chosen.x) * scale;
            p.ids[out + k] = padding ? -1 : int(chosen.y);
        }
    }
}
