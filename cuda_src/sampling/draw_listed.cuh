// The draw from a sorted list of candidates by one block: the same rounds as over the row, with the same token.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/random.cuh"

__device__ __forceinline__ int group_of(int id) { return id / TILE * 32 + id / 4 % 32; }

// A token of the k best of the list, by one block: the same rounds as over the row. `all_sum` is what top-p is a
// share of, if not of the k best.
template <typename Row>
__device__ __forceinline__ Bound draw_listed(int size, int k, float least, float top_p, float all_sum, Stream stream) {
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
    int kept = __syncthreads_count(i < best && mine.value >= least);
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
                const float its = listed.weight[other];
                if (other < i) before += its;
                if (other < kept && listed.group[other] == group) group_sum += its;
            }
            // The same in each round; a slow thread may still be reading it.
            if (round == 0) listed.before[i] = before;
            if (i < kept && group_sum > 0) key = sortable(x.log2_of(group_sum) + earliness(bits.x));
        }
        if (i < MAX_LISTED) {
            const unsigned first = __reduce_max_sync(FULL_WARP, key);
            const unsigned lowest = __reduce_max_sync(FULL_WARP, key == first ? ~unsigned(group) : 0);
            if (x.lane == 0) listed.best[x.warp] = (unsigned long long)first << 32 | lowest;
        }
        __syncthreads();
        const float of_sum = all_sum > 0 ? all_sum : listed.before[best - 1] + listed.weight[best - 1];
        // So little may be wanted that the best token is enough.
        if (top_p < 1 && top_p * of_sum <= listed.weight[0]) break;
        unsigned long long winner = 0;
#pragma unroll
        for (int n = 0; n < MAX_LISTED / 32; ++n) winner = max(winner, listed.best[n]);
        // Of the group's ids the lowest by which the sum has passed the share, and its rank.
        int found = NO_ID;
        if (i < kept && group == int(~unsigned(winner))) {
            float up_to = listed.weight[i];
            if (up_to < group_sum) {
                up_to = 0;
                for (int other = 0; other < kept; ++other)
                    if (listed.group[other] == group && x.bound_at(other).id <= mine.id) up_to += listed.weight[other];
            }
            // Where the sum is no normal number its share may round to all of it, which nothing passes.
            const bool passed = up_to > uniform(bits.y) * group_sum || up_to == group_sum;
            if (passed && listed.weight[i] > 0) found = mine.id * 128 + i;
        }
        if (i < MAX_LISTED) {
            found = __reduce_min_sync(FULL_WARP, unsigned(found));
            if (x.lane == 0) listed.chosen[x.warp] = found;
        }
        __syncthreads();
        found = NO_ID;
#pragma unroll
        for (int n = 0; n < MAX_LISTED / 32; ++n) found = min(found, listed.chosen[n]);
        chosen = found % 128;
        if (!(top_p < 1) || listed.before[chosen] < top_p * of_sum) break;
        kept = chosen;
    }
    return x.bound_at(chosen);
}
