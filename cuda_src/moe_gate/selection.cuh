// Select a token's groups and experts. LANES lanes hold the biased scores of a token, VALUES scores each. `row` maps a
// lane's values to experts (Row in moe_gate.cu). A mask has one bit per value of a lane.
#pragma once
#include "common/numeric.cuh"
#include "common/warp.cuh"

// A 64-bit key that orders candidates: the larger biased score first, then the lower id.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate make_candidate(float biased_score, int id) {
    return (Candidate(sortable(biased_score)) << 32) | unsigned(~id);
}
__device__ __forceinline__ int candidate_id(Candidate candidate) { return ~int(unsigned(candidate)); }

// Candidates that a lane ranks in one iteration.
template <int LANES> constexpr int CANDIDATES_PER_LANE = LANES == 8 ? 2 : 1;

// Set rank[k] to the number of list entries greater than entry[k]. Loads take four entries, so three zeros must follow
// the `count` entries.
template <int COUNT>
__device__ __forceinline__ void rank_in(const Candidate* list, int count, const Candidate (&entry)[COUNT],
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
            for (int k = 0; k < COUNT; ++k) minus_rank[k] = minus_if_greater(minus_rank[k], other, entry[k]);
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) rank[k] = -minus_rank[k];
}

// A token's lanes rank one block of BLOCK list entries at once. A list in order of the ids has at most two blocks.
constexpr int BLOCK = 16;

// Return the largest float below x. x must not be NaN, -inf or -0.
__device__ __forceinline__ float next_below(float x) {
    const unsigned bits = __float_as_uint(x), sign_and_one = unsigned(int(bits) >> 31) | 1;
    return __uint_as_float(bits ? bits - sign_and_one : 0x80000001);
}

// Add to `rank` the number of j with four[j] > mine[j]. The sign bit of `mine[j] - four[j]` is the comparison. The
// subtraction runs on the float pipe, in parallel with the integer instructions that limit these kernels.
__device__ __forceinline__ void add_greater(int& rank, const float (&mine)[4], const float4& four) {
    rank += __float_as_uint(__fsub_rn(mine[0], four.x)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[1], four.y)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[2], four.z)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[3], four.w)) >> 31;
}

// entry[k] is entry `first + lane + k * LANES` of a list of biased scores in order of the ids. Set rank[k] to the
// number of list entries that beat entry[k]: greater entries, and equal entries before it. The entries before it are
// compared with the next float below entry[k], so that equal entries count. Only the padding of the last block is -inf.
//
// In iteration `distance` a lane reads quad (four entries) `lane_quad ^ distance`, which is before its own quad if
// `lane_quad` has the highest set bit of `distance`. So one test per quad, not per entry, decides whether equal entries
// count.
template <int LANES>
__device__ __forceinline__ void rank_in_order(const float* list, int count, int first, int lane,
                                              const float (&entry)[BLOCK / LANES], int (&rank)[BLOCK / LANES]) {
    constexpr int PER_LANE = BLOCK / LANES, QUADS = LANES / 4;
    const float4* quads = reinterpret_cast<const float4*>(list);
    const int lane_quad = lane / 4, index_in_quad = lane % 4;
    float below[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) below[k] = next_below(entry[k]), rank[k] = 0;
#pragma unroll
    for (int distance = 0; distance < QUADS; ++distance) {
        const bool is_before = distance && lane_quad >> (31 - __clz(distance | 1)) & 1;
#pragma unroll
        for (int segment = 0; segment < PER_LANE; ++segment) {
            const float4 four = quads[first / 4 + segment * QUADS + (lane_quad ^ distance)];
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k) {
                float mine[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const bool beats_if_equal = segment != k ? segment < k : distance ? is_before : j < index_in_quad;
                    mine[j] = beats_if_equal ? below[k] : entry[k];
                }
                add_greater(rank[k], mine, four);
            }
        }
    }
    // If the list has a second block of entries, compare with the block that does not contain entry[k]. Few lists have
    // a second block.
    const int end = first ? first : count;
#pragma unroll 1
    for (int i = first ? 0 : BLOCK; i < end; i += 4) {
        const float4 four = quads[i / 4];
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            const float mine = first ? below[k] : entry[k], all[4] = {mine, mine, mine, mine};
            add_greater(rank[k], all, four);
        }
    }
}

// --- groups ---------------------------------------------------------------------------------------------

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

// The values must not be NaN. Two values per iteration halve the chain of dependent instructions.
template <int VALUES> __device__ __forceinline__ TopTwo top_two(const float (&biased_score)[VALUES]) {
    constexpr int FIRST = VALUES % 2 ? 1 : 2;
    TopTwo top;
    top.best = FIRST == 1 ? biased_score[0] : fmaxf(biased_score[0], biased_score[FIRST - 1]);
    if constexpr (FIRST == 2) top.second = fminf(biased_score[0], biased_score[1]);
#pragma unroll
    for (int i = FIRST; i < VALUES; i += 2) {
        const float larger = fmaxf(biased_score[i], biased_score[i + 1]),
                    smaller = fminf(biased_score[i], biased_score[i + 1]);
        top.second = fmaxf(fminf(top.best, larger), fmaxf(top.second, smaller));
        top.best = fmaxf(top.best, larger);
    }
    return top;
}

// A group is LANES / GROUPS neighbouring lanes. Its score is the sum of its two largest biased scores if BY_TWO, else
// its largest biased score. Return whether this lane's group has one of the topk_group largest group scores. `top`
// holds the lane's two largest biased scores. Set `second` to the group's second largest biased score.
template <int LANES, int GROUPS, bool BY_TWO>
__device__ __forceinline__ bool group_is_selected(TopTwo top, int lane, int topk_group, float& second) {
    constexpr int LANES_PER_GROUP = LANES / GROUPS;
#pragma unroll
    for (int step = LANES_PER_GROUP / 2; step > 0; step /= 2) top.merge_with_lane(step);
    const unsigned score = sortable(top.group_score(BY_TWO));
    const int group = lane / LANES_PER_GROUP;
    int minus_rank = 0;
#pragma unroll
    for (int flip = 1; flip < GROUPS; ++flip) {
        const unsigned theirs = __shfl_xor_sync(FULL_WARP, score, flip * LANES_PER_GROUP);
        // If the highest set bit of `flip` is set in `group`, the other group has the lower index and wins a tie.
        const unsigned lower = group >> (31 - __clz(flip)) & 1;
        minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
    }
    second = top.second;
    return -minus_rank < topk_group;
}

// The same as group_is_selected, for groups of 2^log2_lanes_per_group lanes.
template <int LANES>
__device__ __forceinline__ bool dynamic_group_is_selected(TopTwo top, int lane, int log2_lanes_per_group, bool by_two,
                                                          int topk_group, float& second) {
#pragma unroll 1
    for (int step = (1 << log2_lanes_per_group) / 2; step > 0; step /= 2) top.merge_with_lane(step);
    const unsigned score = sortable(top.group_score(by_two));
    const int group = lane >> log2_lanes_per_group;
    int minus_rank = 0;
#pragma unroll 4
    for (int flip = 1; flip < LANES >> log2_lanes_per_group; ++flip) {
        const unsigned theirs = __shfl_xor_sync(FULL_WARP, score, flip << log2_lanes_per_group);
        const unsigned lower = (group ^ flip) < group;
        minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
    }
    second = top.second;
    return -minus_rank < topk_group;
}

// Return the minimum of `value` over all groups. All lanes of a group must have the same value.
template <int LANES, int LANES_PER_GROUP> __device__ __forceinline__ float groups_min(float value) {
#pragma unroll
    for (int step = LANES / 2; step >= LANES_PER_GROUP; step /= 2)
        value = fminf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

// Clear the bits of `eligible` whose values belong to groups that are not selected, and return the mask. A lane may
// hold experts of many groups. `lanes_per_group` lanes scan each group in shared memory. After each group
// `lanes_per_group` floats stay unused, so that the lanes of neighbouring groups read from different banks.
template <int LANES, typename Params, typename Row, int VALUES>
__device__ __forceinline__ unsigned mask_of_selected_groups(const Params& p, const Row& row,
                                                            const float (&biased_score)[VALUES], unsigned eligible,
                                                            int groups, int padded_groups, uint4* shared) {
    const int lane = row.lane, log2_lanes_per_group = p.log2_lanes_per_group,
              lanes_per_group = 1 << log2_lanes_per_group;
    Candidate* group_list = reinterpret_cast<Candidate*>(shared); // [groups + 3]
    unsigned* group_selected =
        reinterpret_cast<unsigned*>(shared + (groups + 5) / 2); // [padded_groups] ~0 if selected, else 0
    float* biased_score_row = reinterpret_cast<float*>(group_selected + padded_groups);
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        biased_score_row[row.expert_of(i) + (row.group_of(row.expert_of(i)) << log2_lanes_per_group)] = biased_score[i];
    __syncwarp();
    const int lane_in_group = lane & (lanes_per_group - 1), groups_at_once = LANES >> log2_lanes_per_group;
#pragma unroll 1
    for (int first = 0; first < groups; first += groups_at_once) {
        const int group = first + (lane >> log2_lanes_per_group);
        TopTwo top;
        if (group < groups) {
            const float* member = biased_score_row + group * (p.group_size + lanes_per_group) + lane_in_group;
            const float* end = member + p.group_size;
#pragma unroll 4
            for (; member < end; member += lanes_per_group) top.add(*member);
        }
#pragma unroll 1
        for (int flip = lanes_per_group / 2; flip > 0; flip /= 2) top.merge_with_lane(flip);
        if (group < groups && lane_in_group == 0)
            group_list[group] = make_candidate(top.group_score(p.group_by_two && p.group_size > 1), group);
    }
    for (int i = lane; i < 3; i += LANES) group_list[groups + i] = 0;
    __syncwarp();
#pragma unroll 1
    for (int group = lane; group < groups; group += LANES) {
        const Candidate entry[1] = {group_list[group]};
        int rank[1];
        rank_in(group_list, groups, entry, rank);
        group_selected[group] = rank[0] < p.topk_group ? ~0u : 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) eligible &= group_selected[row.group_of(row.expert_of(i))] | ~(1u << i);
    return eligible;
}

// --- candidates -----------------------------------------------------------------------------------------

template <int VALUES> __device__ __forceinline__ float best_of(const float (&biased_score)[VALUES], unsigned eligible) {
    float best = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (eligible >> i & 1) best = fmaxf(best, biased_score[i]);
    return best;
}

// `best` is the lane's largest biased score. Return the topk-th largest `best` of all lanes: a threshold that at least
// topk biased scores reach.
template <int LANES> __device__ __forceinline__ float lane_threshold(float best, int topk) {
    return from_sortable(lanes_kth_largest<LANES>(sortable(best), topk));
}

// Slow path: of the experts in the mask `reached`, list the topk experts with the largest biased scores, best first.
template <int LANES, typename Row, int VALUES>
__device__ __forceinline__ void list_topk(const Row& row, const float (&biased_score)[VALUES], unsigned reached,
                                          int topk, int* listed) {
    for (int k = 0; k < topk; ++k) {
        float largest_left = -CUDART_INF_F;
        int at = -1;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if ((reached >> i & 1) && (at < 0 || biased_score[i] > largest_left))
                largest_left = biased_score[i], at = i;
        Candidate best = at < 0 ? 0 : make_candidate(largest_left, row.expert_of(at));
#pragma unroll
        for (int flip = LANES / 2; flip > 0; flip /= 2) best = max(best, __shfl_xor_sync(FULL_WARP, best, flip));
        const int id = candidate_id(best);
        if (row.lane == 0) listed[k] = id;
        if (at >= 0 && id == row.expert_of(at)) {
            reached &= ~(1u << at);
            if (largest_left == -CUDART_INF_F) row.clear_cached_score(at);
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

// List the ids of the experts whose biased scores reach the threshold, and return their number. If more than `capacity`
// experts reach it (many equal scores, or a row in an unfavourable order), list only the topk best experts, best first,
// and set `best_first`. If FINITE, do the same for a threshold of -inf, so that a list in order of the ids contains no
// -inf.
template <int LANES, bool FINITE, typename Row, int VALUES>
__device__ __forceinline__ int list_candidates(const Row& row, const float (&biased_score)[VALUES], unsigned eligible,
                                               float threshold, int topk, int capacity, int* listed, bool& best_first) {
    // The sign bit of `biased_score - threshold` is set if the score is below the threshold. One funnel shift appends
    // this bit to the mask.
    unsigned below = 0;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i)
        below = __funnelshift_l(__float_as_uint(__fsub_rn(biased_score[i], threshold)), below, 1);
    unsigned reached = eligible & ~below;
    const int lane_count = __popc(reached);
    const int inclusive_count = lanes_inclusive_sum<LANES>(lane_count);
    int count = __shfl_sync(FULL_WARP, inclusive_count, LANES - 1, LANES);
    // In a token's last lane, `inclusive_count` equals `count`. The vote on `inclusive_count` need not wait for the
    // shuffle that yields `count`.
    best_first = __any_sync(FULL_WARP, inclusive_count > capacity || (FINITE && threshold == -CUDART_INF_F));
    if (best_first) {
        list_topk<LANES>(row, biased_score, reached, topk, listed);
        count = topk;
    } else {
        // Few lanes list more than three values, so one iteration is usual, and its stores overlap.
        constexpr int STORES_PER_ITERATION = 3;
        unsigned at = unsigned(__cvta_generic_to_shared(listed + inclusive_count - lane_count));
        do {
#pragma unroll
            for (int k = 0; k < STORES_PER_ITERATION; ++k) {
                const unsigned others = reached & (reached - 1);
                store_if(reached, at + 4 * k, row.expert_of(31 - __clz(reached ^ others)));
                reached = others;
            }
            at += 4 * STORES_PER_ITERATION;
        } while (reached);
    }
    __syncwarp();
    return count;
}

template <int LANES>
__device__ __forceinline__ void sort_candidates(const Candidate* candidates, const float* scores, int count, int lane,
                                                int topk, uint2* sorted) {
    constexpr int PER_LANE = CANDIDATES_PER_LANE<LANES>;
    // A lane nearly always has at most PER_LANE entries, so one iteration is usual.
#pragma unroll 1
    for (int first = lane; first < count; first += LANES * PER_LANE) {
        Candidate entry[PER_LANE];
        int rank[PER_LANE];
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) entry[k] = candidates[min(first + k * LANES, count)];
        rank_in(candidates, count, entry, rank);
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k)
            if (rank[k] < topk)
                sorted[rank[k]] = make_uint2(__float_as_uint(scores[first + k * LANES]), candidate_id(entry[k]));
    }
    __syncwarp();
}
