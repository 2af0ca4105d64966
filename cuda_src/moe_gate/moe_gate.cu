// Route each token to its top-k experts (DeepSeek-V3's biased grouped top-k, and the plainer gates).
//
//   score[e]        = sigmoid | softmax | sqrt(softplus) of logits[t, e], in float32
//   biased_score[e] = score[e] + bias[e]; without a bias the logit, which has the same order as the score
//   groups          = the topk_group groups with the largest group scores. A group score is the sum of the group's two
//                     largest biased scores, or its largest biased score.
//   ids             = the topk experts of these groups with the largest biased scores, best first
//   weights         = score[ids] * output_scale; with renormalize, divided by the sum of score[ids]
//
// Ties go to the lower index. Experts with a NaN or -inf logit or bias rank last, by id, with weight 0.
//
// One pass over the row finds a threshold that at least topk biased scores reach. The experts that reach it (about 12
// of 256) go to a candidate list in shared memory, which the lanes rank.
//
// All instances return bit-identical results, because no sum depends on the lane that holds an expert. The instances:
//   - EXPERTS > 0: EXPERTS and GROUPS are the sizes. Lane l holds VALUES = EXPERTS / LANES consecutive experts, from
//     `l * VALUES` on, so a group is one or more complete lanes.
//   - EXPERTS == 0 (dynamic): the sizes are arguments. Lane l holds experts l, l + LANES, ..., at most VALUES of them.
//   - GROUPS == LANE_ALIGNED: dynamic, with exactly LANES * VALUES experts, which striped_to_blocked rearranges so that
//     a group is one or more complete lanes.
//   - SCORING == ANY: the scoring is an argument.
//   - BIASED: the bias is not null. Dynamic instances test p.bias instead.
//   - BiasType: the element type of a bias that is not float.
//
// Grid: LANES lanes per token, 32 / LANES tokens per warp, WARPS_PER_BLOCK warps per block.
//
// Speed of light: with many tokens the bound is the memory bandwidth for logits, weights and ids. The kernel does not
// reach this bound, because each token takes a chain of dependent shuffles, shared memory accesses and exponentials. On
// an H200 (4.8 TB/s), with 256 experts in 8 groups and topk 8, 65536 float32 tokens take 22.8 us (65% of the bandwidth)
// and 65536 bfloat16 tokens take 20.9 us (38%). 1 token takes 1.9 us, 1024 take 2.7 us and 8192 take 6.0 us; an empty
// kernel takes 0.54 us. The dynamic instance takes 38.5 us for 65536 float32 tokens (39%).
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gate/scores.cuh"
#include "moe_gate/selection.cuh"

constexpr int WARPS_PER_BLOCK = 2;
constexpr int CAPACITY = 28; // entries in a token's candidate list, except in dynamic instances without LANE_ALIGNED
static_assert(CAPACITY + 4 <= 2 * BLOCK, "a list has at most two blocks");
constexpr int LANE_ALIGNED = -1;
constexpr int STAGED_LANES = 16;      // rows are staged in shared memory if a token has at most STAGED_LANES lanes
constexpr int MAX_CACHED_SCORES = 16; // per lane, with 16-bit logits; more scores would not fit in registers
// Grids of at most MANY_BLOCKS blocks trigger programmatic dependent launch at their start. In larger grids, all
// waiting blocks of the next grid would begin together, and their loads would not overlap with computation.
constexpr int MANY_BLOCKS = 4096;

struct Params {
    const void* logits;          // [tokens, experts]  T, rows `row_stride` apart
    const void* bias;            // [experts]  float if bias_is_float, else BiasType; null: no bias
    float* weights;              // [tokens, topk + shared]
    int* ids;                    // [tokens, topk + shared]
    const void* valid_on_device; // one int32 or int64, replaces `valid`; may be null
    long long row_stride;
    int tokens;
    int valid; // index of the first padding token
    int experts;
    int groups;
    int topk_group;
    int topk;   // routed experts per token
    int shared; // fused shared experts, in the last columns
    int scoring;
    int group_by_two; // dynamic only, else BIASED: a group score is the sum of the two largest biased scores
    int renormalize;
    int bias_is_float;
    int valid_is_int64;
    int capacity;             // dynamic only, except LANE_ALIGNED: entries in a token's candidate list, a multiple of 4
    int group_size;           // experts per group; same instances as capacity
    int log2_lanes_per_group; // dynamic only
    unsigned group_magic;     // same instances as capacity; `e * group_magic >> 20` is `e / group_size`
    float shared_scale;       // weight of a shared expert / sum of the routed weights
    float output_scale;
    float softcap; // dynamic only: a softmax uses softcap * tanh(logit / softcap); 0: off
};

// --- loads ----------------------------------------------------------------------------------------------

// Copy a token's row to shared memory with coalesced cp.async. Each lane then reads its COUNT consecutive values from
// there. Direct loads from global memory would touch one cache line for every one or two lanes. If a lane's values take
// an even number of 16-byte chunks, one unused chunk follows them, so that 8 neighbouring lanes read from different
// banks. RESERVED_BYTES: bytes per value in shared memory; more than sizeof(T) if wider values may overwrite the
// logits.
template <typename T, int COUNT, int LANES, int RESERVED_BYTES = sizeof(T)> struct Staging {
    static constexpr int CHUNKS = COUNT * sizeof(T) / 16;
    static constexpr int RESERVED_CHUNKS = COUNT * RESERVED_BYTES / 16; // per lane
    static constexpr bool USED = LANES <= STAGED_LANES && COUNT > 1 && COUNT * sizeof(T) % 16 == 0;
    static constexpr int PITCH = RESERVED_CHUNKS % 2 ? RESERVED_CHUNKS : RESERVED_CHUNKS + 1;
    static constexpr int ROW_CHUNKS = USED ? LANES * PITCH : 0;

    static __device__ __forceinline__ void start(const T* row, uint4* staged_row, int lane) {
        const uint4* from = reinterpret_cast<const uint4*>(row) + lane;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int chunk = i * LANES + lane;
            const uint4* to = LANES % CHUNKS
                                  ? staged_row + chunk / CHUNKS * PITCH + chunk % CHUNKS
                                  : staged_row + lane / CHUNKS * PITCH + lane % CHUNKS + i * (LANES / CHUNKS * PITCH);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                         "l"(from + i * LANES)
                         : "memory");
        }
    }
    static __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
    static __device__ __forceinline__ T* lane_values(uint4* staged_row, int lane) {
        return reinterpret_cast<T*>(staged_row + lane * PITCH);
    }
    static __device__ __forceinline__ T* value(uint4* staged_row, unsigned e) {
        constexpr unsigned GAP = PITCH * 16 / sizeof(T) - COUNT;
        return reinterpret_cast<T*>(staged_row) + (e + e / COUNT * GAP);
    }
};

template <typename T, int EXPERTS, int LANES, int VALUES, bool BIASED, typename BiasType> struct Row {
    static constexpr bool DYNAMIC = EXPERTS == 0;
    static constexpr bool SCORES_FIT = BIASED && (VALUES <= MAX_CACHED_SCORES || sizeof(T) == sizeof(float));
    using Stage = Staging<T, DYNAMIC ? 1 : VALUES, LANES, SCORES_FIT ? sizeof(float) : sizeof(T)>;
    using BiasStage = Staging<float, VALUES, LANES>; // the layout of the bias and of cached scores
    // The scores overwrite the staged logits, so that the scores of candidates need not be computed again: a
    // multiprocessor computes only 16 exponentials or reciprocals per cycle.
    static constexpr bool CACHES_SCORES = Stage::USED && SCORES_FIT;
    static constexpr int BIAS_CHUNKS = Stage::USED && BIASED ? BiasStage::ROW_CHUNKS : 0;

    const Params& p;
    uint4* staged_bias; // the block's bias, if BIAS_CHUNKS > 0
    uint4* staged_row;  // the token's row, if Stage::USED
    const T* logits;
    int experts, lane;

    __device__ __forceinline__ int expert_of(int i) const { return DYNAMIC ? i * LANES + lane : lane * VALUES + i; }
    __device__ __forceinline__ int group_of(int e) const { return int(e * p.group_magic >> 20); }

    __device__ __forceinline__ int load_expert_of(int i) const {
        return DYNAMIC ? min(expert_of(i), experts - 1) : expert_of(i);
    }
    // If no value is past the last expert, each load is one instruction, because the addresses differ by constants.
    template <typename Load> __device__ __forceinline__ void load_values(Load load, float (&to)[VALUES]) const {
        if (experts == LANES * VALUES) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(expert_of(i));
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) to[i] = load(load_expert_of(i));
        }
    }

    // fmaxf turns a NaN into -inf.
    __device__ __forceinline__ float load_bias_of(int e) const {
        const float b =
            p.bias_is_float ? static_cast<const float*>(p.bias)[e] : to_float(static_cast<const BiasType*>(p.bias)[e]);
        return fmaxf(b, -CUDART_INF_F);
    }
    __device__ __forceinline__ float bias_of(unsigned e) const {
        if constexpr (BIAS_CHUNKS > 0)
            return *BiasStage::value(staged_bias, e);
        else
            return load_bias_of(e);
    }
    // Load the lane's biases, or stage the block's biases with NaN replaced by -inf.
    __device__ __forceinline__ void load_bias(float (&bias)[VALUES], bool biased) const {
        if constexpr (BIAS_CHUNKS > 0) {
#pragma unroll
            for (unsigned first = 0; first < EXPERTS / 4; first += WARPS_PER_BLOCK * 32) {
                const unsigned chunk = first + threadIdx.x;
                if (EXPERTS / 4 % (WARPS_PER_BLOCK * 32) && chunk >= EXPERTS / 4) break;
                float four[4];
                if (p.bias_is_float)
                    load_floats(static_cast<const float*>(p.bias) + chunk * 4, four);
                else
                    load_floats(static_cast<const BiasType*>(p.bias) + chunk * 4, four);
#pragma unroll
                for (float& b : four) b = fmaxf(b, -CUDART_INF_F);
                *reinterpret_cast<float4*>(BiasStage::value(staged_bias, chunk * 4)) =
                    make_float4(four[0], four[1], four[2], four[3]);
            }
            __syncthreads();
        } else if (DYNAMIC && biased) {
            if (p.bias_is_float)
                load_values([&](int e) { return static_cast<const float*>(p.bias)[e]; }, bias);
            else
                load_values([&](int e) { return to_float(static_cast<const BiasType*>(p.bias)[e]); }, bias);
        } else if (biased) {
            if (p.bias_is_float)
                load_floats(static_cast<const float*>(p.bias) + lane * VALUES, bias);
            else
                load_floats(static_cast<const BiasType*>(p.bias) + lane * VALUES, bias);
        }
    }
    __device__ __forceinline__ void load(float (&logit)[VALUES], float (&bias)[VALUES]) const {
        if constexpr (Stage::USED) {
            Stage::wait();
            load_floats<T, VALUES>(Stage::lane_values(staged_row, lane), logit);
        } else if constexpr (DYNAMIC) {
            load_values([&](int e) { return to_float(logits[e]); }, logit);
        } else {
            load_floats(logits + lane * VALUES, logit);
        }
        if constexpr (BIAS_CHUNKS > 0) load_floats(BiasStage::lane_values(staged_bias, lane), bias);
    }
    __device__ __forceinline__ void cache_scores(const float (&score)[VALUES]) const {
#pragma unroll
        for (int i = 0; i < VALUES; i += 4)
            reinterpret_cast<float4*>(BiasStage::lane_values(staged_row, lane))[i / 4] =
                make_float4(score[i], score[i + 1], score[i + 2], score[i + 3]);
    }
    // The caller has listed an expert with a biased score of -inf. The weight of this expert must be 0.
    __device__ __forceinline__ void clear_cached_score(int i) const {
        if constexpr (CACHES_SCORES) BiasStage::lane_values(staged_row, lane)[i] = 0.f;
    }
    __device__ __forceinline__ void load_again(float (&logit)[VALUES]) const {
        if constexpr (CACHES_SCORES) {
            load_floats(logits + lane * VALUES, logit);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) logit[i] = logit_of(load_expert_of(i));
        }
    }
    __device__ __forceinline__ float& cached_score_of(unsigned e) const { return *BiasStage::value(staged_row, e); }
    __device__ __forceinline__ float logit_of(unsigned e) const {
        if constexpr (Stage::USED && !CACHES_SCORES)
            return to_float(*Stage::value(staged_row, e));
        else
            return to_float(logits[e]);
    }
};

template <bool DYNAMIC, int LANES, int VALUES>
__device__ __forceinline__ unsigned existing_values(int experts, int lane) {
    unsigned existing = VALUES < 32 ? (1u << (VALUES % 32)) - 1 : ~0u;
    if constexpr (DYNAMIC) {
        const int lane_count = (experts - lane + LANES - 1) / LANES;
        if (lane_count < VALUES) existing = (1u << max(lane_count, 0)) - 1;
    }
    return existing;
}

// --- phases ---------------------------------------------------------------------------------------------

// Turn the lane's logits into biased scores, and set `top` to the two largest. Return whether any row of the warp has
// an irregular logit: NaN or infinite.
template <typename Row, typename Scores, int VALUES>
__device__ __forceinline__ bool compute_biased_scores(const Row& row, const Scores& scores, bool biased,
                                                      const float (&bias)[VALUES], float (&biased_score)[VALUES],
                                                      TopTwo& top) {
    // A sum of products with an irregular factor is not finite, so one multiply-add per two values detects irregular
    // rows. A row whose products exceed 2^128 also counts as irregular, with the same result.
    float irregular = 0.f;
#pragma unroll
    for (int i = 0; i < VALUES; i += 2)
        irregular =
            __fmaf_rn(biased_score[i], i + 1 < VALUES ? biased_score[i + 1 < VALUES ? i + 1 : i] : 0.f, irregular);
    irregular = __fmul_rn(irregular, 0.f);
    float score[VALUES];
    // The sign bit of `-0 - 0` is set, so -0 would count as below a threshold of 0. Adding 0, even without a bias,
    // turns -0 into 0.
    const auto add_bias = [&](auto score_of) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            // A NaN bias is replaced here and not right after its load, so that the loads of the logits need not wait
            // for it.
            const float regular_bias = Row::BIAS_CHUNKS > 0 ? bias[i] : fmaxf(bias[i], -CUDART_INF_F);
            score[i] = score_of(biased_score[i]);
            biased_score[i] = __fadd_rn(score[i], regular_bias);
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
        for (int i = 0; i < VALUES; ++i) biased_score[i] = __fadd_rn(biased_score[i], 0.f);
    }
    if constexpr (Row::CACHES_SCORES) row.cache_scores(score);
    // The comparisons of top_two overlap with the exponentials. For the rare irregular rows, top_two is called again.
    top = top_two(biased_score);
    const bool any_irregular = __any_sync(FULL_WARP, irregular != 0.f);
    if (any_irregular) {
        float logit[VALUES];
        row.load_again(logit);
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (!(logit[i] > -CUDART_INF_F)) biased_score[i] = -CUDART_INF_F;
        top = top_two(biased_score);
    }
    return any_irregular;
}

// Map a lane's values to experts after striped_to_blocked.
struct BlockedRow {
    int first, lane;
    __device__ __forceinline__ int expert_of(int value) const { return first + value; }
    __device__ __forceinline__ void clear_cached_score(int) const {}
};

// Before the call, lane l holds experts `l`, `l + LANES`, ... (striped). After the call, it holds VALUES consecutive
// experts, starting at `l * VALUES` (blocked). A gap of 16 bytes after each lane's values avoids bank conflicts.
template <int VALUES> constexpr int EXCHANGE_PITCH = VALUES + 4; // floats per lane

template <int LANES, int VALUES>
__device__ __forceinline__ void striped_to_blocked(float (&biased_score)[VALUES], float* exchange, int lane) {
    static_assert(VALUES % LANES == 0 && VALUES % 8 == 0, "a round lies in one part, of an even number of chunks");
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        exchange[i * LANES / VALUES * EXCHANGE_PITCH<VALUES> + i * LANES % VALUES + lane] = biased_score[i];
    __syncwarp();
    load_floats(exchange + lane * EXCHANGE_PITCH<VALUES>, biased_score);
}

// Return the biased score and the score of a listed expert.
template <typename Row, typename Scores>
__device__ __forceinline__ float2 score_listed(const Row& row, const Scores& scores, int id, bool biased,
                                               bool any_irregular) {
    float score, biased_score;
    if constexpr (Row::CACHES_SCORES) {
        score = row.cached_score_of(id);
        biased_score = __fadd_rn(score, row.bias_of(id));
    } else {
        const float x = row.logit_of(id);
        score = scores.of(x);
        biased_score = __fadd_rn(biased ? score : x, biased ? row.bias_of(id) : 0.f);
        if (any_irregular && !(x > -CUDART_INF_F)) biased_score = -CUDART_INF_F;
        if (biased_score == -CUDART_INF_F) score = 0.f;
    }
    return make_float2(biased_score, score);
}

// Write the scores and ids of the topk best listed experts to `sorted`, best first, and the scores to `ranked_scores`.
// If `best_first`, the list is best first. Else it is in order of the ids, and no biased score is -inf.
template <int LANES, typename Row, typename Scores>
__device__ __forceinline__ void sort_listed(const Row& row, const Scores& scores, const int* listed, int count,
                                            bool biased, bool any_irregular, bool best_first, int topk,
                                            float* biased_scores, uint2* sorted, float* ranked_scores) {
    constexpr int PER_LANE = BLOCK / LANES;
    const int lane = row.lane;
    int id[PER_LANE];
    float biased_score[PER_LANE], score[PER_LANE];
    const auto score_block = [&](int first) {
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            const int i = first + k * LANES + lane;
            id[k] = listed[min(i, count - 1)];
            const float2 scored = score_listed(row, scores, id[k], biased, any_irregular);
            biased_score[k] = i < count ? scored.x : -CUDART_INF_F, score[k] = scored.y;
        }
    };
    const auto list_biased_scores = [&](int first) {
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) biased_scores[first + k * LANES + lane] = biased_score[k];
    };
    const auto sort_block = [&](int first) {
        int rank[PER_LANE];
        rank_in_order<LANES>(biased_scores, count, first, lane, biased_score, rank);
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            const int i = first + k * LANES + lane;
            if (best_first) rank[k] = i;
            if (i < count && rank[k] < topk) {
                sorted[rank[k]] = make_uint2(__float_as_uint(score[k]), id[k]);
                ranked_scores[rank[k]] = score[k];
            }
        }
    };
    // This loop rarely runs, because few lists have more than BLOCK entries.
#pragma unroll 1
    for (int first = BLOCK; first < count; first += BLOCK) score_block(first), list_biased_scores(first);
    score_block(0);
    list_biased_scores(0);
    __syncwarp();
    sort_block(0);
#pragma unroll 1
    for (int first = BLOCK; first < count; first += BLOCK) score_block(first), sort_block(first);
    __syncwarp();
}

// Score the listed experts and store them in `candidates`. Three zeros follow the candidates, as rank_in requires.
template <int LANES, typename Row, typename Scores>
__device__ __forceinline__ void score_candidates(const Row& row, const Scores& scores, const int* listed, int count,
                                                 bool biased, bool any_irregular, Candidate* candidates, float* score) {
    const int lane = row.lane;
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * CANDIDATES_PER_LANE<LANES>) {
#pragma unroll
        for (int k = 0; k < CANDIDATES_PER_LANE<LANES>; ++k) {
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

// lanes_sum adds neighbours first and the loop adds blocks of LANES last, so the order of the additions does not depend
// on LANES.
template <int LANES> __device__ __forceinline__ float sum_of_sorted(const uint2* sorted, int lane, int topk) {
    float sum = 0.f;
#pragma unroll 1
    for (int first = 0; first < topk; first += LANES)
        sum += lanes_sum<LANES>(first + lane < topk ? __uint_as_float(sorted[first + lane].x) : 0.f);
    return sum;
}

// The sum of 8 scores, in the order of sum_of_sorted but without shuffles.
__device__ __forceinline__ float sum_of_eight(const float* scores) {
    const float4 a = reinterpret_cast<const float4*>(scores)[0], b = reinterpret_cast<const float4*>(scores)[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

template <int LANES>
__device__ __forceinline__ void write_results(const Params& p, const uint2* sorted, uint2 lane_result, float sum,
                                              int lane, int token, bool in_range, int valid, int topk, int columns,
                                              int experts) {
    float scale = p.output_scale;
    if (p.renormalize) scale = sum > 0.f ? scale * fast_reciprocal(sum) : 0.f;
    if (in_range) {
        const long long out = (long long)token * columns;
        const bool padding = token >= valid;
        if (lane < topk) {
            p.weights[out + lane] = padding ? 0.f : __uint_as_float(lane_result.x) * scale;
            p.ids[out + lane] = padding ? -1 : int(lane_result.y);
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

constexpr int resident_blocks(int lanes, int values, bool dynamic) {
    // From sm_100 on, more resident blocks would spill registers if a lane has more than 16 values. From sm_120 on,
    // they would also do so at 16 values.
    const int fewer_from = values > 16 ? 1000 : values == 16 ? 1200 : 9999;
    const int resident_warps = dynamic ? 24 : (values <= 16 ? 32 : 28) - (__CUDA_ARCH__ >= fewer_from ? 4 : 0);
    return lanes > STAGED_LANES ? 1 : resident_warps / WARPS_PER_BLOCK;
}

// Size of a token's candidate list in 16-byte chunks.
constexpr int list_chunks_of(int capacity) { return capacity + capacity / 4 + 2; }

// Return how many groups LANES * VALUES experts form. The number includes groups past the last expert.
template <int LANES, int VALUES> constexpr int padded_groups_of(unsigned group_magic) {
    return int((LANES * VALUES - 1) * group_magic >> 20) + 1;
}

template <int EXPERTS, int GROUPS, int LANES, int VALUES, class Stage>
constexpr int row_chunks_of(int groups, int padded_groups, int log2_lanes_per_group) {
    const int row_words = padded_groups + LANES * VALUES + (padded_groups << log2_lanes_per_group);
    return GROUPS == LANE_ALIGNED ? LANES * EXCHANGE_PITCH<VALUES> / 4
           : EXPERTS == 0         ? (groups + 5) / 2 + (row_words + 3) / 4
                                  : Stage::ROW_CHUNKS;
}

// The arguments of this function affect only dynamic instances.
template <typename T, int EXPERTS, int GROUPS, int, int LANES, int VALUES, bool BIASED, typename BiasType = T>
constexpr Launch moe_gate_launch(int capacity = CAPACITY, int groups = 1, unsigned group_magic = 0,
                                 int log2_lanes_per_group = 0) {
    using TokenRow = Row<T, EXPERTS, LANES, VALUES, BIASED, BiasType>;
    const int padded_groups = padded_groups_of<LANES, VALUES>(group_magic);
    const int row_chunks = row_chunks_of<EXPERTS, GROUPS, LANES, VALUES, typename TokenRow::Stage>(
        groups, padded_groups, log2_lanes_per_group);
    constexpr int THREADS = WARPS_PER_BLOCK * 32;
    return {THREADS, 16 * (TokenRow::BIAS_CHUNKS + THREADS / LANES * (list_chunks_of(capacity) + row_chunks))};
}

template <typename T, int EXPERTS, int GROUPS, int SCORING, int LANES, int VALUES, bool BIASED, typename BiasType = T>
__global__ void __launch_bounds__(WARPS_PER_BLOCK * 32,
                                  resident_blocks(EXPERTS || GROUPS ? LANES : 32, VALUES, EXPERTS == 0))
    moe_gate(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    constexpr bool TRIGGER_AT_END = GROUPS > 1 && LANES <= STAGED_LANES;
    if (!TRIGGER_AT_END && gridDim.x <= MANY_BLOCKS) let_later_kernels_begin();
    constexpr bool DYNAMIC = EXPERTS == 0, ALIGNED_GROUPS = GROUPS == LANE_ALIGNED;
    static_assert(DYNAMIC ? ALIGNED_GROUPS || GROUPS == 0 : GROUPS > 0, "dynamic sizes have dynamic groups");
    static_assert(DYNAMIC || EXPERTS == LANES * VALUES, "a lane holds a whole number of experts");
    static_assert(DYNAMIC || LANES % GROUPS == 0, "a group is whole lanes");
    static_assert(VALUES <= 32, "a lane keeps a bit for each of its values");
    using TokenRow = Row<T, EXPERTS, LANES, VALUES, BIASED, BiasType>;
    using Stage = typename TokenRow::Stage;
    int experts = p.experts, groups = p.groups, scoring = p.scoring, capacity = p.capacity;
    bool biased = p.bias != nullptr;
    if constexpr (!DYNAMIC) experts = EXPERTS, groups = GROUPS, biased = BIASED;
    if constexpr (!DYNAMIC || ALIGNED_GROUPS) capacity = CAPACITY;
    if constexpr (SCORING != ANY) scoring = SCORING;
    const int topk = p.topk, columns = topk + p.shared;
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;

    // Shared memory: the block's staged bias, then each token's candidate list and staged row. In a dynamic instance
    // the buffer of striped_to_blocked or mask_of_selected_groups replaces the staged row.
    extern __shared__ uint4 shared[];
    const int list_chunks = capacity + capacity / 4 + 2; // list_chunks_of: a call spills 8 bytes on sm_100a
    const int padded_groups = DYNAMIC ? padded_groups_of<LANES, VALUES>(p.group_magic) : 0;
    const int row_chunks =
        row_chunks_of<EXPERTS, GROUPS, LANES, VALUES, Stage>(groups, padded_groups, p.log2_lanes_per_group);
    uint4* token_shared = shared + TokenRow::BIAS_CHUNKS + slot * (list_chunks + row_chunks);
    Candidate* candidates = reinterpret_cast<Candidate*>(token_shared); // [capacity + 4]
    float* score = reinterpret_cast<float*>(candidates + capacity + 4); // [capacity]
    int* listed = reinterpret_cast<int*>(score + capacity);             // [capacity]
    uint2* sorted = reinterpret_cast<uint2*>(listed);                   // [capacity] scores and ids
    uint4* staged_row = token_shared + list_chunks;
    float* ranked_scores = reinterpret_cast<float*>(listed + capacity); // [capacity] if IN_ORDER
    constexpr bool IN_ORDER = (!DYNAMIC || ALIGNED_GROUPS) && LANES <= STAGED_LANES;
    if constexpr (IN_ORDER) {
#pragma unroll
        for (int i = 0; i < 8; i += LANES) ranked_scores[i + lane] = 0.f;
    }

    const unsigned existing = existing_values<DYNAMIC, LANES, VALUES>(experts, lane);
    // The warp's shuffles need all lanes, so lanes past the last token repeat it and write nothing.
    const int token = blockIdx.x * (WARPS_PER_BLOCK * 32 / LANES) + slot;
    const bool in_range = token < p.tokens;
    const T* logits = static_cast<const T*>(p.logits) + min(token, p.tokens - 1) * p.row_stride;
    const TokenRow row{p, shared, staged_row, logits, experts, lane};
    if constexpr (Stage::USED) Stage::start(logits, staged_row, lane);
    float bias[VALUES], biased_score[VALUES];
    row.load_bias(bias, biased);
    const int valid = load_valid(p);
    row.load(biased_score, bias);

    Scores<DYNAMIC> scores{p.softcap, scoring};
    if (scoring == SOFTMAX && (biased || !p.renormalize))
        scores.template sum_exponentials<LANES>(biased_score, existing);
    TopTwo top;
    const bool any_irregular = compute_biased_scores(row, scores, biased, bias, biased_score, top);

    unsigned eligible = existing; // mask of the values that may be selected
    // Each selected group has two scores of at least `group_second`, so 2 * topk_group scores reach their minimum.
    const bool threshold_from_groups = (ALIGNED_GROUPS || (GROUPS > 1 && EXPERTS > GROUPS)) && topk <= 2 * p.topk_group;
    float group_second = CUDART_INF_F;
    if constexpr (ALIGNED_GROUPS) {
        striped_to_blocked<LANES>(biased_score, reinterpret_cast<float*>(staged_row), lane);
        top = top_two(biased_score);
        if (!dynamic_group_is_selected<LANES>(top, lane, p.log2_lanes_per_group, p.group_by_two, p.topk_group,
                                              group_second))
            eligible = 0;
    } else if (DYNAMIC && groups > 1) {
        eligible = mask_of_selected_groups<LANES>(p, row, biased_score, eligible, groups, padded_groups, staged_row);
    } else if constexpr (!DYNAMIC && GROUPS > 1) {
        if (!group_is_selected<LANES, GROUPS, (BIASED && EXPERTS > GROUPS)>(top, lane, p.topk_group, group_second))
            eligible = 0;
    }
    float threshold = -CUDART_INF_F;
    if (threshold_from_groups) {
        constexpr int LANES_PER_GROUP = DYNAMIC ? 1 : GROUPS > 1 ? LANES / GROUPS : LANES;
        threshold = groups_min<LANES, LANES_PER_GROUP>(eligible ? group_second : CUDART_INF_F);
    } else if (topk <= LANES) {
        const float best = DYNAMIC && !ALIGNED_GROUPS ? best_of(biased_score, eligible)
                           : eligible                 ? top.best
                                                      : -CUDART_INF_F;
        threshold = lane_threshold<LANES>(best, topk);
    }

    bool best_first;
    int count;
    if constexpr (ALIGNED_GROUPS)
        count = list_candidates<LANES, IN_ORDER>(BlockedRow{lane * VALUES, lane}, biased_score, eligible, threshold,
                                                 topk, capacity, listed, best_first);
    else
        count = list_candidates<LANES, IN_ORDER>(row, biased_score, eligible, threshold, topk, capacity, listed,
                                                 best_first);
    if (scoring == SOFTMAX && !biased && p.renormalize) {
        // Renormalization cancels a common factor. Subtracting the largest listed logit keeps exponentials in range.
        float best = -CUDART_INF_F;
#pragma unroll 1
        for (int i = lane; i < count; i += LANES) best = fmaxf(best, row.logit_of(listed[i]));
        scores.largest = scores.softmax_argument(lanes_max<LANES>(best));
    }
    float sum;
    uint2 lane_result;
    if constexpr (IN_ORDER) {
        float* biased_scores = reinterpret_cast<float*>(candidates); // [capacity + 4], followed by `sorted`
        sorted = reinterpret_cast<uint2*>(biased_scores + capacity + 4);
        sort_listed<LANES>(row, scores, listed, count, biased, any_irregular, best_first, topk, biased_scores, sorted,
                           ranked_scores);
        lane_result = lane < topk ? sorted[lane] : make_uint2(0, 0);
        sum = topk <= 8 ? sum_of_eight(ranked_scores) : sum_of_sorted<LANES>(sorted, lane, topk);
    } else {
        score_candidates<LANES>(row, scores, listed, count, biased, any_irregular, candidates, score);
        sort_candidates<LANES>(candidates, score, count, lane, topk, sorted);
        lane_result = lane < topk ? sorted[lane] : make_uint2(0, 0);
        sum = sum_of_sorted<LANES>(sorted, lane, topk);
    }
    if constexpr (TRIGGER_AT_END) let_later_kernels_begin();
    write_results<LANES>(p, sorted, lane_result, sum, lane, token, in_range, valid, topk, columns, experts);
}
