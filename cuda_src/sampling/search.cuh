// Search for the bound of a top-k or top-p filter, the last token that the filter keeps (order.cuh).
//
// Each pass narrows an interval of values: it counts and weighs the tokens above two probes. The passes end when the
// tokens in the interval fit in the candidate list.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/passes.cuh"

struct Search {
    Bound bound;
    int passes_done;
};

// Find the bound by bisecting the ids. `ties` tokens have the value of the bound, more than the candidate list can
// hold. `high_count` tokens have a larger value, and their weights sum to `high_sum`.
template <typename Row, bool BY_COUNT>
__device__ __forceinline__ Search bound_of_ties(const Row& x, float value, int ties, int high_count, float high_sum,
                                                int passes_done, float target) {
    const float tie_weight = x.weight(value);
    int wanted = BY_COUNT ? int(target) - high_count : ties;
    if (!BY_COUNT && tie_weight > 0) wanted = int(fminf(float(ties), ceilf((target - high_sum) / tie_weight)));
    wanted = max(1, min(ties, wanted));
    int first = 0, last = x.vocab - 1;
    while (first < last) {
        const int middle = first + (last - first) / 2;
        if (tally<Row>(passes_done++, Bound{value, middle}, Bound{value, middle}).count[0] - high_count >= wanted)
            last = middle;
        else
            first = middle + 1;
    }
    return {{value, first}, passes_done};
}

// List the tokens with values in [low, high) as candidates, and find the bound in the list. `high_count` tokens have
// values of at least `high`, and their weights sum to `high_sum`.
template <typename Row, bool BY_COUNT>
__device__ __forceinline__ Search bound_of_list(Row& x, float low, float high, int high_count, float high_sum,
                                                int passes_done, float target) {
    x.clear_list();
    cluster_sync<Row::BLOCKS>();
    const int size = gather<Row>(passes_done++, Row::BLOCKS, low, high);
    sort_list(x, size);
    if (BY_COUNT) return {x.bound_at(max(0, min(size, int(target) - high_count) - 1)), passes_done};
    float sum_before = high_sum;
    for (int start = 0; start < size; start += 32) {
        const int i = start + x.lane;
        const float up_to = lanes_inclusive_sum<32>(i < size ? x.weight(x.bound_at(min(i, size - 1)).value) : 0.f);
        const unsigned reached = __ballot_sync(FULL_WARP, i < size && sum_before + up_to >= target);
        if (reached) return {x.bound_at(start + __ffs(reached) - 1), passes_done};
        sum_before += __shfl_sync(FULL_WARP, up_to, 31);
    }
    return {x.bound_at(size - 1), passes_done};
}

// Find the shortest prefix of the ordered tokens whose count or weight reaches `target`.
template <typename Row, bool BY_COUNT> __device__ __noinline__ Search bound_by_search(int passes_done, float target) {
    Row x = recall<Row>(0);
    // Invariant: the tokens with keys of at least `low` reach the target, and the tokens with keys of at least `high`
    // do not.
    unsigned low = sortable(Row::LEAST), high = sortable(x.row_max) + 1;
    const Bound all = {from_sortable(low), NO_ID};
    const Tally below = tally<Row>(passes_done++, all, all);
    int low_count = below.count[0], high_count = 0;
    float high_sum = 0;
    if (!(BY_COUNT ? low_count >= target : below.sum[0] >= target)) return {{from_sortable(low), NO_ID}, passes_done};
    while (low_count - high_count > CAPACITY / 2 && high - low > 1) {
        const unsigned step = max(1u, (high - low) / 3);
        const unsigned key_p = low + step, key_q = max(low + step, high - step);
        const Tally found =
            tally<Row>(passes_done++, Bound{from_sortable(key_p), NO_ID}, Bound{from_sortable(key_q), NO_ID});
        const bool above_q = BY_COUNT ? found.count[1] >= target : found.sum[1] >= target;
        const bool above_p = BY_COUNT ? found.count[0] >= target : found.sum[0] >= target;
        if (above_q)
            low = key_q, low_count = found.count[1];
        else {
            high = key_q, high_count = found.count[1], high_sum = found.sum[1];
            if (above_p)
                low = key_p, low_count = found.count[0];
            else
                high = key_p, high_count = found.count[0], high_sum = found.sum[0];
        }
    }
    const float value = from_sortable(low);
    if (low_count - high_count > CAPACITY / 2) {
        return bound_of_ties<Row, BY_COUNT>(x, value, low_count - high_count, high_count, high_sum, passes_done,
                                            target);
    }
    return bound_of_list<Row, BY_COUNT>(x, value, from_sortable(high), high_count, high_sum, passes_done, target);
}

template <typename Row> __device__ __forceinline__ Search top_k_bound(int passes_done, int k) {
    if (stored<Row>().uses_list(k)) {
        const float low = list_threshold(recall<Row>(0), k);
        const int size = gather<Row>(passes_done++, Row::BLOCKS, low, CUDART_INF_F);
        if (size <= CAPACITY) {
            Row x = recall<Row>(0);
            sort_list(x, size);
            // A conditional expression here crashes NVRTC 13.0.
            Bound bound = {low, NO_ID};
            if (k <= size) bound = x.bound_at(k - 1);
            return {bound, passes_done};
        }
    }
    return bound_by_search<Row, true>(passes_done, k);
}
