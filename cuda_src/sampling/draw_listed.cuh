// Draw from a list of candidates with one block. The draw uses the same random numbers as a draw over the whole row, so
// it draws the same token, except for the rounding of sums. Thread i holds the i-th best token. As in sample.cu, a
// random race first chooses a group of 32 ids. Then one id of that group is drawn. Ids that are not in the list do not
// take part.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/random.cuh"

__device__ __forceinline__ int group_of(int id) { return id / TILE * 32 + id / 4 % 32; }

// Sum the weights of the group's ids up to and including this token. Return whether the sum exceeds a random threshold,
// uniform(bits) * group_sum. The lowest id of the group for which this holds is the drawn id.
template <typename Row>
__device__ __forceinline__ bool reaches_share(const Row& x, const Listed& listed, int rank, int id, int group,
                                              unsigned bits, float group_sum, int kept) {
    float up_to = listed.weight[rank];
    if (up_to < group_sum) {
        up_to = 0;
        for (int other = 0; other < kept; ++other)
            if (listed.group[other] == group && x.bound_at(other).id <= id) up_to += listed.weight[other];
    }
    // If group_sum is subnormal, the threshold may round up to group_sum. Therefore the last prefix, which equals
    // group_sum, always passes.
    const bool passed = up_to > uniform(bits) * group_sum || up_to == group_sum;
    return passed && listed.weight[rank] > 0;
}

// --- the two votes of a round: one for a group, one for an id. Each warp stores its vote, and after a barrier all
// threads read the votes ---

// Store the warp's vote for a group: the group with the largest key, which arrives first in the race. If keys are
// equal, the lowest group gets the vote.
template <typename Row>
__device__ __forceinline__ void leave_group(const Row& x, Listed& listed, const unsigned& key, const int& group) {
    const int i = threadIdx.x;
    if (i < MAX_LISTED) {
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        const unsigned lowest = __reduce_max_sync(FULL_WARP, key == first ? ~unsigned(group) : 0);
        if (x.lane == 0) listed.best[x.warp] = (unsigned long long)first << 32 | lowest;
    }
}

__device__ __forceinline__ int winning_group(const Listed& listed) {
    unsigned long long winner = 0;
#pragma unroll
    for (int n = 0; n < MAX_LISTED / 32; ++n) winner = max(winner, listed.best[n]);
    return int(~unsigned(winner));
}

// Store the warp's vote for an id: the smallest `found` of its threads.
template <typename Row> __device__ __forceinline__ void leave_found(const Row& x, Listed& listed, int found) {
    const int i = threadIdx.x;
    if (i < MAX_LISTED) {
        found = __reduce_min_sync(FULL_WARP, unsigned(found));
        if (x.lane == 0) listed.chosen[x.warp] = found;
    }
}

__device__ __forceinline__ int smallest_found(const Listed& listed) {
    int found = NO_ID;
#pragma unroll
    for (int n = 0; n < MAX_LISTED / 32; ++n) found = min(found, listed.chosen[n]);
    return found;
}

// --- the draw ---

// Draw one of the k best tokens of the list. Tokens below `min_p_value` are never drawn, but the sum for top-p includes
// them. That sum is `all_sum`. If `all_sum` is 0, it is the sum of the weights of the k best tokens.
template <typename Row>
__device__ __forceinline__ Bound draw_listed(int size, int k, float min_p_value, float top_p, float all_sum,
                                             Stream stream) {
    const Row x = recall<Row>(0);
    Listed& listed = common<Row>().listed;
    sort_list(x, size);
    const int i = threadIdx.x, best = min(k, size);
    Bound mine = {-CUDART_INF_F, NO_ID};
    if (i < best) {
        mine = x.bound_at(i);
        listed.weight[i] = x.weight(mine.value);
        listed.group[i] = group_of(mine.id);
    }
    int kept = __syncthreads_count(i < best && mine.value >= min_p_value);
    int chosen = 0;
    for (unsigned round = 0;; ++round) {
        const int group = group_of(mine.id);
        uint4 bits;
        float group_sum = 0;
        unsigned key = 0;
        if (i < best) {
            if (i < kept) bits = stream.at(group, round);
            float before = 0;
#pragma unroll 4
            for (int other = 0; other < best; ++other) {
                const float weight = listed.weight[other];
                if (other < i) before += weight;
                if (other < kept && listed.group[other] == group) group_sum += weight;
            }
            // `before` does not change between rounds. It is written only in the first round, because in later rounds a
            // slow thread may still be reading it.
            if (round == 0) listed.before[i] = before;
            if (i < kept && group_sum > 0) key = sortable(x.log2_of(group_sum) + earliness(bits.x));
        }
        leave_group(x, listed, key, group);
        __syncthreads();
        const float of_sum = all_sum > 0 ? all_sum : listed.before[best - 1] + listed.weight[best - 1];
        // If the best token alone reaches top_p, return it.
        if (top_p < 1 && top_p * of_sum <= listed.weight[0]) break;
        const int winner = winning_group(listed);
        // `found` holds an id that may be the drawn id, with its rank in the low 7 bits.
        int found = NO_ID;
        if (i < kept && group == winner && reaches_share(x, listed, i, mine.id, group, bits.y, group_sum, kept))
            found = mine.id * 128 + i;
        leave_found(x, listed, found);
        __syncthreads();
        chosen = smallest_found(listed) % 128;
        if (!(top_p < 1) || listed.before[chosen] < top_p * of_sum) break;
        kept = chosen;
    }
    return x.bound_at(chosen);
}
