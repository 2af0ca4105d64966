// Draw from the list of candidates with one block; thread i holds the i-th best token. The random numbers are the same
// as for a draw over the whole row (sample.cu), so both draw the same token, unless their sums round differently.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/random.cuh"

__device__ __forceinline__ int group_of(int id) { return id / TILE * 32 + id / 4 % 32; }

// Sum the weights of the group's ids up to `id`, and return whether this sum exceeds a random share of group_sum. The
// lowest id that passes is drawn.
template <typename Row>
__device__ __forceinline__ bool passes_threshold(const Row& x, const Listed& listed, int rank, int id, int group,
                                                 unsigned bits, float group_sum, int eligible) {
    float prefix_sum = listed.weight[rank];
    if (prefix_sum < group_sum) {
        prefix_sum = 0;
        for (int other = 0; other < eligible; ++other)
            if (listed.group[other] == group && x.bound_at(other).id <= id) prefix_sum += listed.weight[other];
    }
    // If the product is subnormal, it may round up to group_sum, which no prefix sum exceeds.
    const bool passed = prefix_sum > uniform(bits) * group_sum || prefix_sum == group_sum;
    return passed && listed.weight[rank] > 0;
}

// A round has two votes: for a group, and for an id. Each warp votes; after a barrier all threads read the votes.

// Vote for the group that arrives first in the race; ties to the lowest group.
template <typename Row>
__device__ __forceinline__ void vote_group(const Row& x, Listed& listed, const unsigned& key, const int& group) {
    const int i = threadIdx.x;
    if (i < MAX_LIST_K) {
        const unsigned first = __reduce_max_sync(FULL_WARP, key);
        const unsigned lowest = __reduce_max_sync(FULL_WARP, key == first ? ~unsigned(group) : 0);
        if (x.lane == 0) listed.group_vote[x.warp] = (unsigned long long)first << 32 | lowest;
    }
}

__device__ __forceinline__ int winning_group(const Listed& listed) {
    unsigned long long winner = 0;
#pragma unroll
    for (int n = 0; n < MAX_LIST_K / 32; ++n) winner = max(winner, listed.group_vote[n]);
    return int(~unsigned(winner));
}

template <typename Row> __device__ __forceinline__ void vote_id(const Row& x, Listed& listed, int found) {
    const int i = threadIdx.x;
    if (i < MAX_LIST_K) {
        found = __reduce_min_sync(FULL_WARP, unsigned(found));
        if (x.lane == 0) listed.id_vote[x.warp] = found;
    }
}

__device__ __forceinline__ int smallest_found(const Listed& listed) {
    int found = NO_ID;
#pragma unroll
    for (int n = 0; n < MAX_LIST_K / 32; ++n) found = min(found, listed.id_vote[n]);
    return found;
}

// `top_p` is a fraction of `row_sum`. If `row_sum` is 0, `top_p` is a fraction of the sum of the k best tokens'
// weights.
template <typename Row>
__device__ __forceinline__ Bound draw_listed(int size, int k, float min_p_value, float top_p, float row_sum,
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
    int eligible = __syncthreads_count(i < best && mine.value >= min_p_value);
    int chosen = 0;
    for (unsigned round = 0;; ++round) {
        const int group = group_of(mine.id);
        uint4 bits;
        float group_sum = 0;
        unsigned key = 0;
        if (i < best) {
            if (i < eligible) bits = stream.at(group, round);
            float sum_above = 0;
#pragma unroll 4
            for (int other = 0; other < best; ++other) {
                const float weight = listed.weight[other];
                if (other < i) sum_above += weight;
                if (other < eligible && listed.group[other] == group) group_sum += weight;
            }
            // Only round 0 writes. A later round would write the same value while a slow thread may still read it.
            if (round == 0) listed.sum_above[i] = sum_above;
            if (i < eligible && group_sum > 0) key = sortable(x.log2_of(group_sum) + earliness(bits.x));
        }
        vote_group(x, listed, key, group);
        __syncthreads();
        const float denominator = row_sum > 0 ? row_sum : listed.sum_above[best - 1] + listed.weight[best - 1];
        // If the best token alone reaches top_p, it is drawn.
        if (top_p < 1 && top_p * denominator <= listed.weight[0]) break;
        const int winner = winning_group(listed);
        // `found` packs an id with its rank in the low 7 bits.
        int found = NO_ID;
        if (i < eligible && group == winner &&
            passes_threshold(x, listed, i, mine.id, group, bits.y, group_sum, eligible))
            found = mine.id * 128 + i;
        vote_id(x, listed, found);
        __syncthreads();
        chosen = smallest_found(listed) % 128;
        if (!(top_p < 1) || listed.sum_above[chosen] < top_p * denominator) break;
        eligible = chosen;
    }
    return x.bound_at(chosen);
}
