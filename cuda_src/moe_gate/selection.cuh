// The choice of experts from a row of choice values that lies in the registers of LANES lanes, VALUES in each: which
// groups are kept, which choices reach a threshold, and in what order these are.
//
// `row` tells which experts a lane holds (Row of moe_gate.cu). A mask has a bit for each value of a lane.
#pragma once
#include "common/numeric.cuh"
#include "common/warp.cuh"

// One 64-bit word that orders candidates: the larger choice first, then the lower id.
using Candidate = unsigned long long;

__device__ __forceinline__ Candidate make_candidate(float choice, int id) {
    return (Candidate(sortable(choice)) << 32) | unsigned(~id);
}
__device__ __forceinline__ int candidate_id(Candidate candidate) { return ~int(unsigned(candidate)); }

// Candidates that a lane ranks at once.
template <int LANES> constexpr int AT_ONCE = LANES == 8 ? 2 : 1;

// The rank of each of `own`: how many of the list's `count` entries are greater. Three zeros must follow the entries,
// for the list is read four at a time.
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

// Entries whose ranks the lanes of a token find at once, of a list in the order of the ids. It has at most two blocks.
constexpr int BLOCK = 16;

// The next float below one that is neither NaN, -inf nor -0.
__device__ __forceinline__ float next_below(float x) {
    const unsigned bits = __float_as_uint(x), sign_and_one = unsigned(int(bits) >> 31) | 1;
    return __uint_as_float(bits ? bits - sign_and_one : 0x80000001);
}

// Add to the rank of `mine` how many of four entries are greater. The sign of a difference tells, and one instruction
// adds it: the subtraction runs beside the instructions on integers, which bound these kernels.
__device__ __forceinline__ void add_greater(int& rank, const float (&mine)[4], const float4& four) {
    rank += __float_as_uint(__fsub_rn(mine[0], four.x)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[1], four.y)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[2], four.z)) >> 31;
    rank += __float_as_uint(__fsub_rn(mine[3], four.w)) >> 31;
}

// The rank of a lane's entries first + lane + k * LANES of a list of choices in the order of their ids: how many
// entries beat it, the greater ones, and of equal ones those before it. These are the entries greater than the next
// float below. No choice is -inf but those that fill the last block of the list.
//
// Which of two entries is before the other must not depend on the lane, or each comparison would take a selection. So
// each lane goes through the quads of the block by their distance (exclusive or) from its own: another quad is before
// it if the lane's has the highest bit of the distance.
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
    // The other block, which few lists have.
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

// The two largest of a lane's choices, of which none is NaN. A pair at a time: the chain of steps is half as long.
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

// Whether this lane's group is kept, where a group is LANES / GROUPS neighbouring lanes. `top` has the lane's own two
// best choices. BY_TWO: a group's score is the sum of its two best choices, else its best. `second` becomes the second
// best choice of the lane's group.
//
// A group's rank is the number of groups that beat it, from one shuffle per other group.
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
        // The other group is the lower one if ours has the highest bit of `flip`: then it wins a tie as well.
        const unsigned lower = group >> (31 - __clz(flip)) & 1;
        minus_rank = minus_if_greater(minus_rank, theirs, score - lower);
    }
    second = top.second;
    return -minus_rank < topk_group;
}

// The same of groups of 2 ^ log2_lanes_per_group lanes.
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

// The smallest of a value that all lanes of a group have alike.
template <int LANES, int LANES_PER_GROUP> __device__ __forceinline__ float groups_min(float value) {
#pragma unroll
    for (int step = LANES / 2; step >= LANES_PER_GROUP; step /= 2)
        value = fminf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

// `alive` without the values whose group is not kept, where each lane holds experts of many groups: dynamic.
//
// The choices go to shared memory, where `split` lanes scan a group. Behind each group `split` words stay unused, which
// puts the lanes that scan neighbouring groups in different banks.
template <int LANES, typename Params, typename Row, int VALUES>
__device__ __forceinline__ unsigned mask_of_kept_groups(const Params& p, const Row& row, const float (&choice)[VALUES],
                                                        unsigned alive, int groups, int padded_groups, uint4* shared) {
    const int lane = row.lane, log2_split = p.log2_lanes_per_group, split = 1 << log2_split;
    Candidate* group_list = reinterpret_cast<Candidate*>(shared);                  // [groups + 3]
    unsigned* group_kept = reinterpret_cast<unsigned*>(shared + (groups + 5) / 2); // [padded_groups] all bits or none
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

// The largest of a lane's choices that are `alive`.
template <int VALUES> __device__ __forceinline__ float best_of(const float (&choice)[VALUES], unsigned alive) {
    float best = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (alive >> i & 1) best = fmaxf(best, choice[i]);
    return best;
}

// A threshold that at least topk choices reach: the topk-th largest of the lanes' best choices. For topk <= LANES.
template <int LANES> __device__ __forceinline__ float lane_threshold(float best, int topk) {
    return from_sortable(lanes_kth_largest<LANES>(sortable(best), topk));
}

// The slow way to the list: take the best of `reached` topk times.
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

// A store to shared memory without a branch around it.
__device__ __forceinline__ void store_if(bool condition, unsigned to, int value) {
    asm volatile("{ .reg .pred stores;\n"
                 "  setp.ne.s32 stores, %0, 0;\n"
                 "  @stores st.shared.s32 [%1], %2; }" ::"r"(int(condition)),
                 "r"(to), "r"(value)
                 : "memory");
}

// List the experts whose choices reach the threshold; returns how many there are. Many equal choices or a row in the
// worst order overflow the list: then it gets the best topk, best first, and `best_first` says so. FINITE: the same
// where the threshold is -inf, so that no choice of another list is.
template <int LANES, bool FINITE, typename Row, int VALUES>
__device__ __forceinline__ int list_candidates(const Row& row, const float (&choice)[VALUES], unsigned alive,
                                               float threshold, int topk, int capacity, int* listed, bool& best_first) {
    // The sign of choice - threshold says which is larger. A funnel shift collects it in one instruction.
    unsigned below = 0;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; --i)
        below = __funnelshift_l(__float_as_uint(__fsub_rn(choice[i], threshold)), below, 1);
    unsigned reached = alive & ~below;
    const int own_count = __popc(reached);
    const int up_to_own = lanes_inclusive_sum<LANES>(own_count);
    int count = __shfl_sync(FULL_WARP, up_to_own, LANES - 1, LANES);
    // The sum of a token's last lane is its count, which the others need not have for this.
    best_first = __any_sync(FULL_WARP, up_to_own > capacity || (FINITE && threshold == -CUDART_INF_F));
    if (best_first) {
        list_topk<LANES>(row, choice, reached, topk, listed);
        count = topk;
    } else {
        // Few lanes have more than these, whose steps overlap.
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

// Move each candidate of rank below topk, and its score, to its place: `sorted` has scores and ids, best first.
template <int LANES>
__device__ __forceinline__ void sort_candidates(const Candidate* candidates, const float* scores, int count, int lane,
                                                int topk, uint2* sorted) {
    constexpr int OWN = AT_ONCE<LANES>;
    // Nearly always a lane has OWN entries or fewer: loops, but not worth unrolling.
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
