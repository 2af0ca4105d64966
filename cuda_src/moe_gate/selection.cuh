// Select a token's experts from choices in registers: find the kept groups, list the choices that reach a threshold,
// and rank them. The choice of an expert is a number; the experts with the largest choices are selected (moe_gate.cu
// defines it). LANES lanes hold the choices of a token, VALUES choices each. `row` maps a lane's values to experts (Row
// in moe_gate.cu). A mask has one bit per value of a lane.
#pragma once
#include "common/numeric.cuh"
#include "common/warp.cuh"

// A 64-bit key that orders candidates: the larger choice first, then the lower id.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate make_candidate(float choice, int id) {
    return (Candidate(sortable(choice)) << 32) | unsigned(~id);
}
__device__ __forceinline__ int candidate_id(Candidate candidate) { return ~int(unsigned(candidate)); }

// Candidates that a lane ranks in one iteration.
template <int LANES> constexpr int AT_ONCE = LANES == 8 ? 2 : 1;

// Set rank[k] to the number of list entries greater than own[k]. The list is read four entries at a time, so three
// zeros must follow the `count` entries.
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

// Entries of a block. A block is the part of a list that a token's lanes rank at once, BLOCK / LANES entries per lane.
// A list in order of the ids has at most two blocks.
constexpr int BLOCK = 16;

// Return the next float below x, which must not be NaN, -inf or -0.
__device__ __forceinline__ float next_below(float x) {
    const unsigned bits = __float_as_uint(x), sign_and_one = unsigned(int(bits) >> 31) | 1;
    return __uint_as_float(bits ? bits - sign_and_one : 0x80000001);
}

// Add to `rank` the number of entries j with four[j] > mine[j]. The comparison is the sign bit of `mine[j] - four[j]`,
// and one instruction adds it to `rank`. The subtraction runs on the float pipe, in parallel with the integer
// instructions that limit these kernels.
__device__ __forceinline__ void add_greater(int& rank, const float (&mine)[4], const float4& four) {
    rank += __float_as_uint(__fsub_rn(mine[0], four.x)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[1], four.y)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[2], four.z)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[3], four.w)) >> 31;
}

// Set rank[k] to the rank of list entry `first + lane + k * LANES`, which is own[k]. The list has choices in order of
// the ids. The rank of an entry is the number of entries that beat it: greater entries, and equal entries before it. An
// entry before own[k] is compared with the next float below own[k], so that it counts if it is equal. Only the padding
// of the last block is -inf.
//
// A quad is four entries of a block. In iteration `distance` a lane compares with the quad whose index is its own
// quad's index XOR `distance`. That quad is before the lane's own quad if the highest set bit of `distance` is also set
// in the own quad's index. So one test per quad decides whether equal entries count. If the lanes read the quads in
// list order, every comparison would need its own test.
template <int LANES>
__device__ __forceinline__ void rank_in_order(const float* list, int count, int first, int lane,
                                              const float (&own)[BLOCK / LANES], int (&rank)[BLOCK / LANES]) {
    constexpr int OWN = BLOCK / LANES, QUADS = LANES / 4;
    const float4* quads = reinterpret_cast<const float4*>(list);
    const int own_quad = lane / 4, place = lane % 4;
    float below[OWN];
#pragma unroll
    for (int k = 0; k < OWN; ++k) below[k] = next_below(own[k]), rank[k] = 0;
#pragma unroll
    for (int distance = 0; distance < QUADS; ++distance) {
        const bool is_before = distance && own_quad >> (31 - __clz(distance | 1)) & 1;
#pragma unroll
        for (int part = 0; part < OWN; ++part) {
            const float4 four = quads[first / 4 + part * QUADS + (own_quad ^ distance)];
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                float mine[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const bool beats_if_equal = part != k ? part < k : distance ? is_before : j < place;
                    mine[j] = beats_if_equal ? below[k] : own[k];
                }
                add_greater(rank[k], mine, four);
            }
        }
    }
    // Compare with the entries of the other block. Few lists have two blocks.
    const int end = first ? first : count;
#pragma unroll 1
    for (int i = first ? 0 : BLOCK; i < end; i += 4) {
        const float4 four = quads[i / 4];
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const float mine = first ? below[k] : own[k], all[4] = {mine, mine, mine, mine};
            add_greater(rank[k], all, four);
        }
    }
}

// --- groups ---------------------------------------------------------------------------------------------

// The two largest values seen so far.
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
    // fmaxf turns the NaN of -inf + inf into -inf.
    __device__ __forceinline__ float group_score(bool by_two) const {
        return by_two ? fmaxf(best + second, -CUDART_INF_F) : best;
    }
};

// Return the two largest of a lane's choices, which must not be NaN. Two values per iteration halve the chain of
// dependent instructions.
template <int VALUES> __device__ __forceinline__ TopTwo top_two(const float (&choice)[VALUES]) {
    constexpr int FIRST = VALUES % 2 ? 1 : 2;
    TopTwo top;
    top.best = FIRST == 1 ? choice[0] : fmaxf(choice[0], choice[FIRST - 1]);
    if constexpr (FIRST == 2) top.second = fminf(choice[0], choice[1]);
#pragma unroll
    for (int i = FIRST; i < VALUES; i += 2) {
        const float larger = fmaxf(choice[i], choice[i + 1]), smaller = fminf(choice[i], choice[i + 1]);
        top.second = fmaxf(fminf(top.best, larger), fmaxf(top.second, smaller));
        top.best = fmaxf(top.best, larger);
    }
    return top;
}

// Return whether this lane's group is one of the topk_group groups with the largest scores. A group is LANES / GROUPS
// neighbouring lanes. `top` has the lane's own two best choices. A group's score is the sum of its two best choices if
// BY_TWO, else its best choice. Set `second` to the second best choice of the lane's group. The rank of a group is the
// number of groups that beat it. One shuffle per other group fetches that group's score.
template <int LANES, int GROUPS, bool BY_TWO>
__device__ __forceinline__ bool own_group_is_kept(TopTwo top, int lane, int topk_group, float& second) {
    constexpr int LANES_PER_GROUP = LANES / GROUPS;
#pragma unroll
    for (int step = LANES_PER_GROUP / 2; step > 0; step /= 2) top.merge_with_lane(step);
    const unsigned score = sortable(top.group_score(BY_TWO));
    const int group = lane / LANES_PER_GROUP;
    int minus_rank = 0;
#pragma unroll
    for (int flip = 1; flip < GROUPS; ++flip) {
        const unsigned theirs = __shfl_xor_sync(FULL_WARP, score, flip * LANES_PER_GROUP);
        // If our group has the highest bit of `flip`, the other group has the lower index and wins a tie.
        const unsigned lower = group >> (31 - __clz(flip)) & 1;
        minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
    }
    second = top.second;
    return -minus_rank < topk_group;
}

// Do the same as own_group_is_kept, but take the number of lanes per group as an argument: 2^log2_lanes_per_group.
template <int LANES>
__device__ __forceinline__ bool own_dynamic_group_is_kept(TopTwo top, int lane, int log2_lanes_per_group, bool by_two,
                                                          int topk_group, float& second) {
#pragma unroll 1
    for (int step = (1 << log2_lanes_per_group) / 2; step > 0; step /= 2) top.merge_with_lane(step);
    const unsigned score = sortable(top.group_score(by_two));
    const int own = lane >> log2_lanes_per_group;
    int minus_rank = 0;
#pragma unroll 4
    for (int flip = 1; flip < LANES >> log2_lanes_per_group; ++flip) {
        const unsigned theirs = __shfl_xor_sync(FULL_WARP, score, flip << log2_lanes_per_group);
        const unsigned lower = (own ^ flip) < own;
        minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
    }
    second = top.second;
    return -minus_rank < topk_group;
}

// Return the minimum of `value` over the groups. All lanes of a group have the same value.
template <int LANES, int LANES_PER_GROUP> __device__ __forceinline__ float groups_min(float value) {
#pragma unroll
    for (int step = LANES / 2; step >= LANES_PER_GROUP; step /= 2)
        value = fminf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

// Return `alive` without the values whose group is not kept. Dynamic instances need this function, because their lanes
// hold experts of many groups.
//
// The choices go to shared memory, where `split` lanes scan each group. After each group `split` words stay unused, so
// that the lanes that scan neighbouring groups read from different banks.
template <int LANES, typename Params, typename Row, int VALUES>
__device__ __forceinline__ unsigned mask_of_kept_groups(const Params& p, const Row& row, const float (&choice)[VALUES],
                                                        unsigned alive, int groups, int padded_groups, uint4* shared) {
    const int lane = row.lane, log2_split = p.log2_lanes_per_group, split = 1 << log2_split;
    Candidate* group_list = reinterpret_cast<Candidate*>(shared);                  // [groups + 3]
    unsigned* group_kept = reinterpret_cast<unsigned*>(shared + (groups + 5) / 2); // [padded_groups] ~0 if kept, else 0
    float* choice_row = reinterpret_cast<float*>(group_kept + padded_groups);
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        choice_row[row.expert_of(i) + (row.group_of(row.expert_of(i)) << log2_split)] = choice[i];
    __syncwarp();
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
    for (int i = 0; i < VALUES; ++i) alive &= group_kept[row.group_of(row.expert_of(i))] | ~(1u << i);
    return alive;
}

// --- candidates -----------------------------------------------------------------------------------------

// Return the largest of a lane's choices that are `alive`.
template <int VALUES> __device__ __forceinline__ float best_of(const float (&choice)[VALUES], unsigned alive) {
    float best = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (alive >> i & 1) best = fmaxf(best, choice[i]);
    return best;
}

// Return a threshold that at least topk choices reach: the topk-th largest `best` of the lanes, where `best` is a
// lane's best choice. topk must be at most LANES.
template <int LANES> __device__ __forceinline__ float lane_threshold(float best, int topk) {
    return from_sortable(lanes_kth_largest<LANES>(sortable(best), topk));
}

// Slow path: write to `listed` the ids of the topk experts with the largest choices, best first. Only values whose bit
// is set in the lane's mask `reached` take part.
template <int LANES, typename Row, int VALUES>
__device__ __forceinline__ void list_topk(const Row& row, const float (&choice)[VALUES], unsigned reached, int topk,
                                          int* listed) {
    for (int k = 0; k < topk; ++k) {
        float largest_left = -CUDART_INF_F;
        int at = -1;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if ((reached >> i & 1) && (at < 0 || choice[i] > largest_left)) largest_left = choice[i], at = i;
        Candidate best = at < 0 ? 0 : make_candidate(largest_left, row.expert_of(at));
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) best = max(best, __shfl_xor_sync(FULL_WARP, best, flip));
        const int id = candidate_id(best);
        if (row.lane == 0) listed[k] = id;
        if (at >= 0 && id == row.expert_of(at)) {
            reached &= ~(1u << at);
            if (largest_left == -CUDART_INF_F) row.drop_score(at);
        }
    }
}

// Store to shared memory under a predicate, without a branch.
__device__ __forceinline__ void store_if(bool condition, unsigned to, int value) {
    asm volatile("{ .reg .pred stores;\n"
                 "  setp.ne.s32 stores, %0, 0;\n"
                 "  @stores st.shared.s32 [%1], %2; }" ::"r"(int(condition)),
                 "r"(to), "r"(value)
                 : "memory");
}

// Write the ids of the experts whose choices reach the threshold to `listed`, and return the number of these experts.
// If more than `capacity` choices reach it (because many choices are equal, or because the row is in an unfavourable
// order), list only the topk best experts, best first, and set `best_first`. With FINITE do the same if the threshold
// is -inf, so that a list in order of the ids contains no choice of -inf.
template <int LANES, bool FINITE, typename Row, int VALUES>
__device__ __forceinline__ int list_candidates(const Row& row, const float (&choice)[VALUES], unsigned alive,
                                               float threshold, int topk, int capacity, int* listed, bool& best_first) {
    // The sign bit of `choice - threshold` is set if the choice is below the threshold. One funnel shift appends it to
    // the mask.
    unsigned below = 0;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i)
        below = __funnelshift_l(__float_as_uint(__fsub_rn(choice[i], threshold)), below, 1);
    unsigned reached = alive & ~below;
    const int own_count = __popc(reached);
    const int up_to_own = lanes_inclusive_sum<LANES>(own_count);
    int count = __shfl_sync(FULL_WARP, up_to_own, LANES - 1, LANES);
    // In a token's last lane, `up_to_own` equals `count`. The vote uses `up_to_own`, so it need not wait for the
    // shuffle above.
    best_first = __any_sync(FULL_WARP, up_to_own > capacity || (FINITE && threshold == -CUDART_INF_F));
    if (best_first) {
        list_topk<LANES>(row, choice, reached, topk, listed);
        count = topk;
    } else {
        // Stores per iteration. Few lanes list more than three values, so nearly all lanes need one iteration, and the
        // stores of an iteration overlap.
        constexpr int AT_A_TIME = 3;
        unsigned at = unsigned(__cvta_generic_to_shared(listed + up_to_own - own_count));
        do {
#pragma unroll
            for (int k = 0; k < AT_A_TIME; ++k) {
                const unsigned others = reached & (reached - 1);
                store_if(reached, at + 4 * k, row.expert_of(31 - __clz(reached ^ others)));
                reached = others;
            }
            at += 4 * AT_A_TIME;
        } while (reached);
    }
    __syncwarp();
    return count;
}

// Write the score and id of each candidate with rank below topk to sorted[rank].
template <int LANES>
__device__ __forceinline__ void sort_candidates(const Candidate* candidates, const float* scores, int count, int lane,
                                                int topk, uint2* sorted) {
    constexpr int OWN = AT_ONCE<LANES>;
    // A lane nearly always has at most OWN entries, so the loop has one iteration, and unrolling it would not help.
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * OWN) {
        Candidate own[OWN];
        int rank[OWN];
#pragma unroll
        for (int k = 0; k < OWN; ++k) own[k] = candidates[min(first + k * LANES, count)];
        rank_in(candidates, count, own, rank);
#pragma unroll
        for (int k = 0; k < OWN; ++k)
            if (rank[k] < topk)
                sorted[rank[k]] = make_uint2(__float_as_uint(scores[first + k * LANES]), candidate_id(own[k]));
    }
    __syncwarp();
}
