// Route each token to its top-k experts (DeepSeek-V3's biased grouped top-k, and the plainer gates).
//
//   score[e]  = sigmoid | softmax | sqrt(softplus) of logits[t, e], in float32
//   choice[e] = score[e] + bias[e]; without a bias, the logit itself (it has the same order as the score)
//   kept      = the topk_group best groups; a group's score is the sum of its two best choices, or its best choice
//   ids       = the topk experts of the kept groups with the largest choice, best first
//   weights   = score[ids] * output_scale; with renormalize, divided by the sum of score[ids]
//
// The choice of an expert is a number; the experts with the largest choices are selected. Among equal groups or equal
// choices the lower index wins. Experts with a NaN or -inf logit or choice rank last, by id, with weight 0.
//
// A kernel that selects the largest remaining choice topk times would scan the row topk times. Instead:
//   1. One pass over the row finds a threshold. At least topk choices reach it, and usually only a few more.
//   2. The choices that reach the threshold (about 12 of 256) go to a candidate list in shared memory.
//   3. Each lane takes a few list entries. The rank of an entry is the number of entries that beat it.
//
// Template parameters. All instances return bit-identical results, because no sum depends on the lane that holds an
// expert:
//   - EXPERTS > 0: the numbers of experts and groups are compile-time constants. Lane l holds VALUES = EXPERTS / LANES
//     consecutive experts, starting at `l * VALUES`. So a group consists of one or more whole neighbouring lanes.
//   - EXPERTS == 0 (dynamic): the sizes are arguments. Lane l holds experts l, l + LANES, ..., at most VALUES of them.
//   - GROUPS == WHOLE_LANES: dynamic, with exactly LANES * VALUES experts. The lanes exchange choices (hand_on). Then
//     each lane holds consecutive experts, a group is whole lanes, and the rest runs as with compile-time sizes.
//   - SCORING == ANY: the scoring is an argument.
//   - BIASED: there is a bias. Dynamic instances ignore it and test p.bias.
//   - OTHER: the element type of a bias that is not float.
//
// Grid: LANES lanes per token, 32 / LANES tokens per warp, WARPS_PER_BLOCK warps per block.
//
// Speed of light: with many tokens the time to read the logits and to write topk weights and ids. The kernel does not
// reach this bound, because each token has a chain of dependent steps: shuffles, shared memory accesses, and the
// exponentials of all its experts. On an H200 (4.8 TB/s), with 256 experts in 8 groups and topk 8, 65536 float32 tokens
// take 22.8 us (65% of the bandwidth) and 65536 bfloat16 tokens take 20.9 us (38%). 1 token takes 1.9 us, 1024 take 2.7
// us and 8192 take 6.0 us; an empty kernel takes 0.54 us. The dynamic instance takes 38.5 us for 65536 float32 tokens
// (39%).
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gate/scores.cuh"
#include "moe_gate/selection.cuh"

constexpr int WARPS_PER_BLOCK = 2;
constexpr int CAPACITY = 28; // entries in a token's candidate list, except in dynamic instances without WHOLE_LANES
static_assert(CAPACITY + 4 <= 2 * BLOCK, "a list has at most two blocks");
constexpr int WHOLE_LANES = -1;
constexpr int STAGED_LANES = 16; // rows are staged in shared memory if a token has at most STAGED_LANES lanes
constexpr int KEPT_SCORES = 16;  // with more 16-bit logits per lane, registers are too few to keep scores
// In grids of at most MANY_BLOCKS blocks, each block triggers programmatic dependent launch at its start. In larger
// grids, all waiting blocks of the next grid would begin at the same moment, so all would load at the same time and
// then compute at the same time. Instances with groups and up to STAGED_LANES lanes process many tokens, which fill the
// GPU. They trigger the launch just before they write their results.
constexpr int MANY_BLOCKS = 4096;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else OTHER; null: no bias
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64, replaces `valid`; may be null
    long long row_stride;
    int tokens;
    int valid; // tokens with this index or a higher one are padding
    int experts;
    int groups;
    int topk_group;
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int group_by_two; // dynamic only: a group's score is the sum of its two best choices instead of its best choice;
                      // other instances use the sum if BIASED
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    int capacity;             // dynamic only, except WHOLE_LANES: entries in a token's candidate list, a multiple of 4
    int group_size;           // experts per group; same instances as capacity
    int log2_lanes_per_group; // dynamic only; log2 of the lanes that scan a group
    unsigned group_magic;     // same instances as capacity; `e * group_magic >> 20` is `e / group_size`
    float shared_scale;       // a shared expert's weight is this times the sum of the routed weights
    float output_scale;
    float softcap; // dynamic only: a softmax uses softcap * tanh(logit / softcap); 0: off
};

// --- loads ----------------------------------------------------------------------------------------------

// Copy a token's row from global memory to the lanes through shared memory. If each lane loaded its own COUNT values
// from global memory, a load of a warp would touch one cache line for every one or two lanes. Instead, the lanes copy
// whole lines to shared memory with cp.async. Then each lane reads its part of the row: the values of its experts. If a
// part has an even number of 16-byte chunks, one unused chunk follows the part, so that 8 neighbouring lanes read from
// different banks. Dynamic instances need no staging, because their neighbouring lanes load neighbouring experts. ROOM:
// bytes reserved per value; if more than sizeof(T), wider values may overwrite the staged ones.
template <typename T, int COUNT, int LANES, int ROOM = sizeof(T)> struct Staging {
    static constexpr int CHUNKS = COUNT * sizeof(T) / 16;
    static constexpr int ROOMS = COUNT * ROOM / 16; // chunks per part, with ROOM bytes per value
    static constexpr bool USED = LANES <= STAGED_LANES && COUNT > 1 && COUNT * sizeof(T) % 16 == 0;
    static constexpr int PITCH = ROOMS % 2 ? ROOMS : ROOMS + 1;
    static constexpr int UNITS = USED ? LANES * PITCH : 0;

    static __device__ __forceinline__ void start(const T* row, uint4* staged, int lane) {
        const uint4* from = reinterpret_cast<const uint4*>(row) + lane;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int chunk = i * LANES + lane;
            // If the LANES chunks of an iteration are whole parts, the addresses of successive iterations differ by a
            // constant.
            const uint4* to = LANES % CHUNKS
                                  ? staged + chunk / CHUNKS * PITCH + chunk % CHUNKS
                                  : staged + lane / CHUNKS * PITCH + lane % CHUNKS + i * (LANES / CHUNKS * PITCH);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                         "l"(from + i * LANES)
                         : "memory");
        }
    }
    static __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    // Return the address of the lane's first value in the staged row.
    static __device__ __forceinline__ T* part(uint4* staged, int lane) {
        return reinterpret_cast<T*>(staged + lane * PITCH);
    }
    static __device__ __forceinline__ T* value(uint4* staged, unsigned e) {
        constexpr unsigned GAP = PITCH * 16 / sizeof(T) - COUNT;
        return reinterpret_cast<T*>(staged) + (e + e / COUNT * GAP);
    }
};

// A lane's access to its token's row of logits. It maps the lane's values to experts, and loads their logits and
// biases.
template <typename T, int EXPERTS, int LANES, int VALUES, bool BIASED, typename OTHER> struct Row {
    static constexpr bool DYNAMIC = EXPERTS == 0;
    static constexpr bool SCORES_FIT = BIASED && (VALUES <= KEPT_SCORES || sizeof(T) == sizeof(float));
    using Stage = Staging<T, DYNAMIC ? 1 : VALUES, LANES, SCORES_FIT ? sizeof(float) : sizeof(T)>;
    using BiasStage = Staging<float, VALUES, LANES>; // the layout of the bias and of kept scores
    // With a bias, the score of every expert is computed. The scores then overwrite the logits of a staged row, so that
    // candidates read their scores instead of computing them again. Exponentials are expensive: a multiprocessor
    // computes 16 exponentials or reciprocals per cycle, but 128 additions.
    static constexpr bool KEEPS_SCORES = Stage::USED && SCORES_FIT;
    static constexpr int BIAS_UNITS = Stage::USED && BIASED ? BiasStage::UNITS : 0;

    const Params& p;
    uint4* bias_staged; // the block's bias, if BIAS_UNITS
    uint4* staged;      // the token's row, if Stage::USED
    const T* logits;
    int experts, lane;

    __device__ __forceinline__ int expert_of(int i) const { return DYNAMIC ? i * LANES + lane : lane * VALUES + i; }
    __device__ __forceinline__ int group_of(int e) const { return int(e * p.group_magic >> 20); }

    // Return the expert whose logit the lane loads as value `i`. For a value past the last expert, return the last
    // expert.
    __device__ __forceinline__ int load_expert_of(int i) const {
        return DYNAMIC ? min(expert_of(i), experts - 1) : expert_of(i);
    }
    // Set `to[i]` to `load(e)`, where e is the expert of value i. If no value is past the last expert, the addresses
    // differ by constants, so each load is one instruction.
    template <typename Load> __device__ __forceinline__ void load_each(Load load, float (&to)[VALUES]) const {
        if (experts == LANES * VALUES) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(expert_of(i));
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(load_expert_of(i));
        }
    }

    // Load one expert's bias from global memory. fmaxf turns a NaN into -inf.
    __device__ __forceinline__ float load_bias_of(int e) const {
        const float b =
            p.bias_is_float ? static_cast<const float*>(p.bias)[e] : to_float(static_cast<const OTHER*>(p.bias)[e]);
        return fmaxf(b, -CUDART_INF_F);
    }
    __device__ __forceinline__ float bias_of(unsigned e) const {
        if constexpr (BIAS_UNITS > 0)
            return *BiasStage::value(bias_staged, e);
        else
            return load_bias_of(e);
    }
    // Load the bias of each value; NaN is not replaced. If rows are staged, store the block's biases to shared memory
    // instead, with NaN replaced by -inf.
    __device__ __forceinline__ void load_bias(float (&bias)[VALUES], bool biased) const {
        if constexpr (BIAS_UNITS > 0) {
#pragma unroll
            for (unsigned first = 0; first < EXPERTS / 4; first += WARPS_PER_BLOCK * 32) {
                const unsigned chunk = first + threadIdx.x;
                if (EXPERTS / 4 % (WARPS_PER_BLOCK * 32) && chunk >= EXPERTS / 4) break;
                float four[4];
                if (p.bias_is_float)
                    load_floats(static_cast<const float*>(p.bias) + chunk * 4, four);
                else
                    load_floats(static_cast<const OTHER*>(p.bias) + chunk * 4, four);
#pragma unroll
                for (float& b : four) b = fmaxf(b, -CUDART_INF_F);
                *reinterpret_cast<float4*>(BiasStage::value(bias_staged, chunk * 4)) =
                    make_float4(four[0], four[1], four[2], four[3]);
            }
            __syncthreads();
        } else if (DYNAMIC && biased) {
            if (p.bias_is_float)
                load_each([&](int e) { return static_cast<const float*>(p.bias)[e]; }, bias);
            else
                load_each([&](int e) { return to_float(static_cast<const OTHER*>(p.bias)[e]); }, bias);
        } else if (biased) {
            if (p.bias_is_float)
                load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
            else
                load_floats(static_cast<const OTHER*>(p.bias) + lane * VALUES, bias);
        }
    }
    // Load the logit of each value; load its bias too if the bias is staged.
    __device__ __forceinline__ void load(float (&logit)[VALUES], float (&bias)[VALUES]) const {
        if constexpr (Stage::USED) {
            Stage::wait();
            load_floats<T, VALUES>(Stage::part(staged, lane), logit);
        } else if constexpr (DYNAMIC) {
            load_each([&](int e) { return to_float(logits[e]); }, logit);
        } else {
            load_floats(logits + lane * VALUES, logit);
        }
        if constexpr (BIAS_UNITS > 0) load_floats(BiasStage::part(bias_staged, lane), bias);
    }
    // Overwrite the staged logits with the scores. Each lane already has its logits in registers.
    __device__ __forceinline__ void keep_scores(const float (&score)[VALUES]) const {
#pragma unroll
        for (int i = 0; i < VALUES; i += 4)
            reinterpret_cast<float4*>(BiasStage::part(staged, lane))[i / 4] =
                make_float4(score[i], score[i + 1], score[i + 2], score[i + 3]);
    }
    // Set the kept score of value `i` to 0. The caller uses this for an expert that is listed although its choice is
    // -inf.
    __device__ __forceinline__ void drop_score(int i) const {
        if constexpr (KEEPS_SCORES) BiasStage::part(staged, lane)[i] = 0.f;
    }
    // Load the lane's logits again, from global memory if scores have overwritten the staged logits.
    __device__ __forceinline__ void load_again(float (&logit)[VALUES]) const {
        if constexpr (KEEPS_SCORES) {
            load_floats(logits + lane * VALUES, logit);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) logit[i] = logit_of(load_expert_of(i));
        }
    }
    __device__ __forceinline__ float& kept_score_of(unsigned e) const { return *BiasStage::value(staged, e); }
    __device__ __forceinline__ float logit_of(unsigned e) const {
        if constexpr (Stage::USED && !KEEPS_SCORES)
            return to_float(*Stage::value(staged, e));
        else
            return to_float(logits[e]);
    }
};

// Return a mask of the lane's values that are experts. Dynamic lanes can have values past the last expert.
template <bool DYNAMIC, int LANES, int VALUES>
__device__ __forceinline__ unsigned existing_values(int experts, int lane) {
    unsigned existing = VALUES < 32 ? (1u << (VALUES % 32)) - 1 : ~0u;
    if constexpr (DYNAMIC) {
        const int own = (experts - lane + LANES - 1) / LANES;
        if (own < VALUES) existing = (1u << max(own, 0)) - 1;
    }
    return existing;
}

// --- phases ---------------------------------------------------------------------------------------------

// Turn the lane's logits into choices, and set `top` to its two best choices. Return whether any row of the warp is
// irregular. A row is irregular if it has a logit that is NaN or infinite.
template <typename Row, typename Scores, int VALUES>
__device__ __forceinline__ bool choose(const Row& row, const Scores& scores, bool biased, const float (&bias)[VALUES],
                                       float (&choice)[VALUES], TopTwo& top) {
    // If a factor is NaN or infinite, a sum of products is not finite. So one multiply-add per two values detects
    // irregular rows. A regular row whose products exceed 2^128 is treated as irregular too, with the same result.
    float irregular = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; i += 2)
        irregular = __fmaf_rn(choice[i], i + 1 < VALUES ? choice[i + 1 < VALUES ? i + 1 : i] : 0.f, irregular);
    irregular = __fmul_rn(irregular, 0.f);
    float score[VALUES];
    // A choice of -0 would count as below a threshold of 0, because the sign bit of `-0 - 0` is set. So 0 is added even
    // without a bias, which turns -0 into 0.
    const auto add_bias = [&](auto score_of) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            // Turn a NaN bias into -inf here and not earlier, so that the logit loads do not wait for the bias.
            const float regular_bias = Row::BIAS_UNITS > 0 ? bias[i] : fmaxf(bias[i], -CUDART_INF_F);
            score[i] = score_of(choice[i]);
            choice[i] = __fadd_rn(score[i], regular_bias);
        }
    };
    if (biased) {
        if (scores.scoring == SIGMOID)
            add_bias([&](float x) { return scores.sigmoid(x); });
        else if (scores.scoring == SOFTMAX)
            add_bias([&](float x) { return scores.softmax(x); });
        else
            add_bias([&](float x) { return scores.sqrtsoftplus(x); });
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) choice[i] = __fadd_rn(choice[i], 0.f);
    }
    if constexpr (Row::KEEPS_SCORES) row.keep_scores(score);
    // The comparisons of top_two overlap with the exponentials. The rare irregular rows call top_two again.
    top = top_two(choice);
    const bool any_irregular = __any_sync(FULL_WARP, irregular != 0.f);
    if (any_irregular) {
        float logit[VALUES];
        row.load_again(logit);
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (!(logit[i] > -CUDART_INF_F)) choice[i] = -CUDART_INF_F;
        top = top_two(choice);
    }
    return any_irregular;
}

// The experts that a lane holds after `hand_on`. A Part is passed to list_candidates instead of a Row.
struct Part {
    int first, lane;
    __device__ __forceinline__ int expert_of(int value) const { return first + value; }
    __device__ __forceinline__ void drop_score(int) const {}
};

// Redistribute the choices through shared memory: lane l holds experts `l`, `l + LANES`, ... before the call. After the
// call it holds VALUES consecutive experts, starting at `l * VALUES`. A gap of 16 bytes after each lane's values avoids
// bank conflicts.
template <int VALUES> constexpr int HANDED_ON = VALUES + 4; // words of shared memory per lane

template <int LANES, int VALUES>
__device__ __forceinline__ void hand_on(float (&choice)[VALUES], float* all, int lane) {
    static_assert(VALUES % LANES == 0 && VALUES % 8 == 0, "a round lies in one part, of an even number of chunks");
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        all[i * LANES / VALUES * HANDED_ON<VALUES> + i * LANES % VALUES + lane] = choice[i];
    __syncwarp();
    load_floats(all + lane * HANDED_ON<VALUES>, choice);
}

// Return the choice and the score of a listed expert.
template <typename Row, typename Scores>
__device__ __forceinline__ float2 score_listed(const Row& row, const Scores& scores, int id, bool biased,
                                               bool any_irregular) {
    float own, choice;
    if constexpr (Row::KEEPS_SCORES) {
        own = row.kept_score_of(id);
        choice = __fadd_rn(own, row.bias_of(id));
    } else {
        const float x = row.logit_of(id);
        own = scores.of(x);
        choice = __fadd_rn(biased ? own : x, biased ? row.bias_of(id) : 0.f);
        if (any_irregular && !(x > -CUDART_INF_F)) choice = -CUDART_INF_F;
        if (choice == -CUDART_INF_F) own = 0.f;
    }
    return make_float2(choice, own);
}

// Write the scores and ids of the topk best listed experts to `sorted`, best first, and their scores to
// `ranked_scores`. The list is in order of the ids, or best first if `best_first`. Only with `best_first` may the list
// contain experts whose choice is -inf.
template <int LANES, typename Row, typename Scores>
__device__ __forceinline__ void sort_listed(const Row& row, const Scores& scores, const int* listed, int count,
                                            bool biased, bool any_irregular, bool best_first, int topk, float* choices,
                                            uint2* sorted, float* ranked_scores) {
    constexpr int OWN = BLOCK / LANES;
    const int lane = row.lane;
    int id[OWN];
    float choice[OWN], score[OWN];
    const auto score_block = [&](int first) {
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int i = first + k * LANES + lane;
            id[k] = listed[min(i, count - 1)];
            const float2 scored = score_listed(row, scores, id[k], biased, any_irregular);
            choice[k] = i < count ? scored.x : -CUDART_INF_F, score[k] = scored.y;
        }
    };
    const auto list_choices = [&](int first) {
#pragma unroll
        for (int k = 0; k < OWN; ++k) choices[first + k * LANES + lane] = choice[k];
    };
    const auto sort_block = [&](int first) {
        int rank[OWN];
        rank_in_order<LANES>(choices, count, first, lane, choice, rank);
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int i = first + k * LANES + lane;
            if (best_first) rank[k] = i;
            if (i < count && rank[k] < topk) {
                sorted[rank[k]] = make_uint2(__float_as_uint(score[k]), id[k]);
                ranked_scores[rank[k]] = score[k];
            }
        }
    };
    // This loop rarely runs, because few lists are longer than one block of BLOCK entries.
#pragma unroll 1
    for (int first = BLOCK; first < count; first += BLOCK) score_block(first), list_choices(first);
    score_block(0);
    list_choices(0);
    __syncwarp();
    sort_block(0);
#pragma unroll 1
    for (int first = BLOCK; first < count; first += BLOCK) score_block(first), sort_block(first);
    __syncwarp();
}

// Write the Candidate and the score of each listed expert. Three zeros follow the candidates, as rank_in requires.
template <int LANES, typename Row, typename Scores>
__device__ __forceinline__ void score_candidates(const Row& row, const Scores& scores, const int* listed, int count,
                                                 bool biased, bool any_irregular, Candidate* candidates, float* score) {
    const int lane = row.lane;
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * AT_ONCE<LANES>) {
#pragma unroll
        for (int k = 0; k < AT_ONCE<LANES>; ++k) {
            const int i = first + k * LANES, id = listed[min(i, count - 1)];
            const float2 scored = score_listed(row, scores, id, biased, any_irregular);
            if (i < count) {
                candidates[i] = make_candidate(scored.x, id);
                score[i] = scored.y;
            }
        }
    }
    for (int i = lane; i < 3; i += LANES) candidates[count + i] = 0;
    __syncwarp();
}

// Return the sum of the topk best scores. lanes_sum adds neighbours first, and the loop adds blocks of LANES last, so
// the order of the additions does not depend on LANES.
template <int LANES> __device__ __forceinline__ float sum_of_sorted(const uint2* sorted, int lane, int topk) {
    float sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < topk; first += LANES)
        sum += lanes_sum<LANES>(first + lane < topk ? __uint_as_float(sorted[first + lane].x) : 0.f);
    return sum;
}

// Return the sum of up to 8 scores, padded with zeros, in the order of sum_of_sorted but without shuffles.
__device__ __forceinline__ float sum_of_eight(const float* scores) {
    const float4 a = reinterpret_cast<const float4*>(scores)[0], b = reinterpret_cast<const float4*>(scores)[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// Write the token's weights and ids: the routed experts from `sorted`, then the shared experts.
template <int LANES>
__device__ __forceinline__ void write_results(const Params& p, const uint2* sorted, uint2 own, float sum, int lane,
                                              int token, bool live, int valid, int topk, int columns, int experts) {
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    if (live) {
        const long long out = (long long)token * columns;
        const bool padding = token >= valid;
        if (lane < topk) {
            p.weights[out + lane] = padding ? 0.f : __uint_as_float(own.x) * scale;
            p.ids[out + lane] = padding ? -1 : int(own.y);
        }
#pragma unroll 1
        for (int k = lane < topk ? lane + LANES : lane; k < columns; k += LANES) {
            int id = experts + k - topk;
            float weight = sum * p.shared_scale;
            if (k < topk) {
                const uint2 routed = sorted[k];
                id = routed.y, weight = __uint_as_float(routed.x);
            }
            p.weights[out + k] = padding ? 0.f : weight * scale;
            p.ids[out + k] = padding ? -1 : id;
        }
    }
}

// Return the resident blocks per multiprocessor for __launch_bounds__. They limit the registers per thread.
constexpr int resident_blocks(int lanes, int values, bool dynamic) {
    // With more resident blocks, instances with more than 16 values per lane would spill registers from sm_100 on, and
    // instances with 16 values from sm_120 on.
    const int fewer_from = values > 16 ? 1000 : values == 16 ? 1200 : 9999;
    const int resident_warps = dynamic ? 24 : (values <= 16 ? 32 : 28) - (__CUDA_ARCH__ >= fewer_from ? 4 : 0);
    return lanes > STAGED_LANES ? 1 : resident_warps / WARPS_PER_BLOCK;
}

// Return the size of a token's list in shared memory, in units of 16 bytes. The token's row follows the list.
constexpr int list_units_of(int capacity) { return capacity + capacity / 4 + 2; }

// Return the number of groups that LANES * VALUES experts would fill: the lanes' values past the last expert count too.
template <int LANES, int VALUES> constexpr int padded_groups_of(unsigned group_magic) {
    return int((LANES * VALUES - 1) * group_magic >> 20) + 1;
}

template <int EXPERTS, int GROUPS, int LANES, int VALUES, class Stage>
constexpr int row_units_of(int groups, int padded_groups, int log2_lanes_per_group) {
    const int row_words = padded_groups + LANES * VALUES + (padded_groups << log2_lanes_per_group);
    return GROUPS == WHOLE_LANES ? LANES * HANDED_ON<VALUES> / 4
           : EXPERTS == 0        ? (groups + 5) / 2 + (row_words + 3) / 4
                                 : Stage::UNITS;
}

// Return the threads and the shared memory of a block. Only dynamic instances depend on the arguments.
template <typename T, int EXPERTS, int GROUPS, int, int LANES, int VALUES, bool BIASED, typename OTHER = T>
constexpr Launch moe_gate_launch(int capacity = CAPACITY, int groups = 1, unsigned group_magic = 0,
                                 int log2_lanes_per_group = 0) {
    using OwnRow = Row<T, EXPERTS, LANES, VALUES, BIASED, OTHER>;
    const int padded_groups = padded_groups_of<LANES, VALUES>(group_magic);
    const int of_row = row_units_of<EXPERTS, GROUPS, LANES, VALUES, typename OwnRow::Stage>(groups, padded_groups,
                                                                                            log2_lanes_per_group);
    constexpr int THREADS = WARPS_PER_BLOCK * 32;
    return {THREADS, 16 * (OwnRow::BIAS_UNITS + THREADS / LANES * (list_units_of(capacity) + of_row))};
}

template <typename T, int EXPERTS, int GROUPS, int SCORING, int LANES, int VALUES, bool BIASED, typename OTHER = T>
__global__ void __launch_bounds__(WARPS_PER_BLOCK * 32,
                                  resident_blocks(EXPERTS || GROUPS ? LANES : 32, VALUES, EXPERTS == 0))
    moe_gate(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    constexpr bool LATE = GROUPS > 1 && LANES <= STAGED_LANES;
    if (!LATE && gridDim.x <= MANY_BLOCKS) let_later_kernels_begin();
    constexpr bool DYNAMIC = EXPERTS == 0, HANDS_ON = GROUPS == WHOLE_LANES;
    static_assert(DYNAMIC ? HANDS_ON || GROUPS == 0 : GROUPS > 0, "dynamic sizes have dynamic groups");
    static_assert(DYNAMIC || EXPERTS == LANES * VALUES, "a lane holds a whole number of experts");
    static_assert(DYNAMIC || LANES % GROUPS == 0, "a group is whole lanes");
    static_assert(VALUES <= 32, "a lane keeps a bit for each of its values");
    using OwnRow = Row<T, EXPERTS, LANES, VALUES, BIASED, OTHER>;
    using Stage = typename OwnRow::Stage;

    int experts = p.experts, groups = p.groups, scoring = p.scoring, capacity = p.capacity;
    bool biased = p.bias != nullptr;
    if constexpr (!DYNAMIC) experts = EXPERTS, groups = GROUPS, biased = BIASED;
    if constexpr (!DYNAMIC || HANDS_ON) capacity = CAPACITY;
    if constexpr (SCORING != ANY) scoring = SCORING;
    const int topk = p.topk, columns = topk + p.shared;
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;

    // Shared memory, in 16-byte units. Per block: the bias, if rows are staged. Per token: the list (candidates,
    // scores, ids), then the staged row, or in a dynamic instance the buffer of hand_on or mask_of_kept_groups.
    extern __shared__ uint4 shared[];
    const int list_units = capacity + capacity / 4 + 2; // list_units_of: a call spills 8 bytes on sm_100a
    // In a dynamic instance, shared memory also has space for the lanes' values past the last expert.
    const int padded_groups = DYNAMIC ? padded_groups_of<LANES, VALUES>(p.group_magic) : 0;
    const int row_units =
        row_units_of<EXPERTS, GROUPS, LANES, VALUES, Stage>(groups, padded_groups, p.log2_lanes_per_group);
    uint4* own_shared = shared + OwnRow::BIAS_UNITS + slot * (list_units + row_units);
    Candidate* candidates = reinterpret_cast<Candidate*>(own_shared);   // [capacity + 4]
    float* score = reinterpret_cast<float*>(candidates + capacity + 4); // [capacity]
    int* listed = reinterpret_cast<int*>(score + capacity);             // [capacity]
    uint2* sorted = reinterpret_cast<uint2*>(listed);                   // [capacity] scores and ids
    uint4* staged = own_shared + list_units;
    float* ranked_scores = reinterpret_cast<float*>(listed + capacity); // [capacity] if IN_ORDER
    // If each lane holds consecutive experts, the list is in order of the ids.
    constexpr bool IN_ORDER = (!DYNAMIC || HANDS_ON) && LANES <= STAGED_LANES;
    if constexpr (IN_ORDER) {
#pragma unroll
        for (int i = 0; i < 8; i += LANES) ranked_scores[i + lane] = 0.f;
    }

    const unsigned existing = existing_values<DYNAMIC, LANES, VALUES>(experts, lane);
    // The warp's shuffles need all lanes, so lanes without a token repeat the last token and write nothing.
    const int token = blockIdx.x * (WARPS_PER_BLOCK * 32 / LANES) + slot;
    const bool live = token < p.tokens;
    const T* logits = static_cast<const T*>(p.logits) + min(token, p.tokens - 1) * p.row_stride;
    const OwnRow row{p, shared, staged, logits, experts, lane};
    if constexpr (Stage::USED) Stage::start(logits, staged, lane);
    float bias[VALUES], choice[VALUES];
    row.load_bias(bias, biased);
    const int valid = load_valid(p);
    row.load(choice, bias);

    Scores<DYNAMIC> scores{p.softcap, scoring};
    if (scoring == SOFTMAX && (biased || !p.renormalize)) scores.template sum_exponentials<LANES>(choice, existing);
    TopTwo top;
    const bool any_irregular = choose(row, scores, biased, bias, choice, top);

    unsigned alive = existing; // mask of the values that may be selected
    // Each kept group has two choices that are at least its second best choice. So if topk <= 2 * topk_group, the
    // smallest second best choice of all kept groups is a threshold that at least topk choices reach.
    const bool threshold_from_groups = (HANDS_ON || (GROUPS > 1 && EXPERTS > GROUPS)) && topk <= 2 * p.topk_group;
    float second = CUDART_INF_F;
    if constexpr (HANDS_ON) {
        hand_on<LANES>(choice, reinterpret_cast<float*>(staged), lane);
        top = top_two(choice);
        if (!own_dynamic_group_is_kept<LANES>(top, lane, p.log2_lanes_per_group, p.group_by_two, p.topk_group, second))
            alive = 0;
    } else if (DYNAMIC && groups > 1) {
        alive = mask_of_kept_groups<LANES>(p, row, choice, alive, groups, padded_groups, staged);
    } else if constexpr (!DYNAMIC && GROUPS > 1) {
        if (!own_group_is_kept<LANES, GROUPS, (BIASED && EXPERTS > GROUPS)>(top, lane, p.topk_group, second)) alive = 0;
    }
    float threshold = -CUDART_INF_F;
    if (threshold_from_groups) {
        constexpr int LANES_PER_GROUP = DYNAMIC ? 1 : GROUPS > 1 ? LANES / GROUPS : LANES;
        threshold = groups_min<LANES, LANES_PER_GROUP>(alive ? second : CUDART_INF_F);
    } else if (topk <= LANES) {
        // If groups are whole lanes, either all values of a lane may be selected or none of them.
        const float best = DYNAMIC && !HANDS_ON ? best_of(choice, alive) : alive ? top.best : -CUDART_INF_F;
        threshold = lane_threshold<LANES>(best, topk);
    }

    bool best_first;
    int count;
    if constexpr (HANDS_ON)
        count = list_candidates<LANES, IN_ORDER>(Part{lane * VALUES, lane}, choice, alive, threshold, topk, capacity,
                                                 listed, best_first);
    else
        count = list_candidates<LANES, IN_ORDER>(row, choice, alive, threshold, topk, capacity, listed, best_first);
    if (scoring == SOFTMAX && !biased && p.renormalize) {
        // The normalization cancels a common factor, so the largest logit is subtracted only to keep the exponentials
        // in range.
        float best = -CUDART_INF_F;
#pragma unroll 1
        for (int i = lane; i < count; i += LANES) best = fmaxf(best, row.logit_of(listed[i]));
        scores.largest = scores.softmax_argument(lanes_max<LANES>(best));
    }
    float sum;
    uint2 own;
    if constexpr (IN_ORDER) {
        float* choices = reinterpret_cast<float*>(candidates); // [capacity + 4], followed by `sorted`
        sorted = reinterpret_cast<uint2*>(choices + capacity + 4);
        sort_listed<LANES>(row, scores, listed, count, biased, any_irregular, best_first, topk, choices, sorted,
                           ranked_scores);
        own = lane < topk ? sorted[lane] : make_uint2(0, 0);
        sum = topk <= 8 ? sum_of_eight(ranked_scores) : sum_of_sorted<LANES>(sorted, lane, topk);
    } else {
        score_candidates<LANES>(row, scores, listed, count, biased, any_irregular, candidates, score);
        sort_candidates<LANES>(candidates, score, count, lane, topk, sorted);
        own = lane < topk ? sorted[lane] : make_uint2(0, 0);
        sum = sum_of_sorted<LANES>(sorted, lane, topk);
    }
    if constexpr (LATE) let_later_kernels_begin();
    write_results<LANES>(p, sorted, own, sum, lane, token, live, valid, topk, columns, experts);
}
