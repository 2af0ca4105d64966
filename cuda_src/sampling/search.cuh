// Search for the bound of a top-k or top-p filter. The bound is the last token that the filter keeps, in the order of
// order.cuh.
//
// The search narrows an interval of values that contains the bound. Each pass probes two values inside the interval: it
// counts the tokens above each probe and sums their weights. The search ends when the tokens in the interval fit the
// candidate list. For small k, top_k_bound needs no search and finds the bound in the candidate list.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/passes.cuh"

// The bound that a search found, and the number of passes made so far.
struct Search {
    Bound bound;
    int passes;
};

// Find the bound among `ties` tokens with the same value, too many for the candidate list. A bisection over ids finds
// the last token that is kept. `high_count` tokens have a larger value than these, and the weights of the larger tokens
// sum to `high_sum`.
template <typename Row, bool BY_COUNT>
__device__ __forceinline__ Search bound_of_ties(const Row& x, float value, int ties, int high_count, float high_sum,
                                                int passes, float target) {
    const float each = x.weight(value);
    int wanted = BY_COUNT ? int(target) - high_count : ties;
    if (!BY_COUNT && each > 0) wanted = int(fminf(float(ties), ceilf((target - high_sum) / each)));
    wanted = max(1, min(ties, wanted));
    int first = 0, last = x.vocab - 1;
    while (first < last) {
        const int middle = first + (last - first) / 2;
        if (tally<Row>(passes++, Bound{value, middle}, Bound{value, middle}).count[0] - high_count >= wanted)
            last = middle;
        else
            first = middle + 1;
    }
    return {{value, first}, passes};
}

// Find the bound among the tokens with values in [low, high), which fit the candidate list. The bound is the first
// token, in order, at which the count or the sum of the weights reaches `target`. `high_count` tokens have values of at
// least `high`, and their weights sum to `high_sum`; both are included in the count and the sum.
template <typename Row, bool BY_COUNT>
__device__ __forceinline__ Search bound_of_list(Row& x, float low, float high, int high_count, float high_sum,
                                                int passes, float target) {
    x.clear_list();
    cluster_sync<Row::BLOCKS>();
    const int size = gather<Row>(passes++, Row::BLOCKS, low, high);
    sort_list(x, size);
    if (BY_COUNT) return {x.bound_at(max(0, min(size, int(target) - high_count) - 1)), passes};
    float before = high_sum;
    for (int base = 0; base < size; base += 32) {
        const int i = base + x.lane;
        const float up_to = lanes_inclusive_sum<32>(i < size ? x.weight(x.bound_at(min(i, size - 1)).value) : 0.f);
        const unsigned reached = __ballot_sync(FULL_WARP, i < size && before + up_to >= target);
        if (reached) return {x.bound_at(base + __ffs(reached) - 1), passes};
        before += __shfl_sync(FULL_WARP, up_to, 31);
    }
    return {x.bound_at(size - 1), passes};
}

// Find the bound of the shortest prefix of the ordered tokens whose count (BY_COUNT) or sum of weights reaches
// `target`.
template <typename Row, bool BY_COUNT> __device__ __noinline__ Search bound_by_search(int passes, float target) {
    Row x = recall<Row>(0);
    // Invariant: the count or sum over the tokens with keys of at least `low` reaches the target, and the count or sum
    // over those with keys of at least `high` does not.
    unsigned low = sortable(Row::LEAST), high = sortable(x.top) + 1;
    const Bound all = {from_sortable(low), NO_ID};
    const Tally below = tally<Row>(passes++, all, all);
    int low_count = below.count[0], high_count = 0;
    float high_sum = 0;
    if (!(BY_COUNT ? low_count >= target : below.sum[0] >= target)) return {{from_sortable(low), NO_ID}, passes};
    while (low_count - high_count > CAPACITY / 2 && high - low > 1) {
        const unsigned step = max(1u, (high - low) / 3);
        const unsigned key_p = low + step, key_q = max(low + step, high - step);
        const Tally found =
            tally<Row>(passes++, Bound{from_sortable(key_p), NO_ID}, Bound{from_sortable(key_q), NO_ID});
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
        return bound_of_ties<Row, BY_COUNT>(x, value, low_count - high_count, high_count, high_sum, passes, target);
    }
    return bound_of_list<Row, BY_COUNT>(x, value, from_sortable(high), high_count, high_sum, passes, target);
}

// Find the bound of the k largest tokens. Use the candidate list if k and the candidates fit it, else search.
template <typename Row> __device__ __forceinline__ Search top_k_bound(int passes, int k) {
    if (stored<Row>().lists(k)) {
        const float low = reached_by(recall<Row>(0), k);
        const int size = gather<Row>(passes++, Row::BLOCKS, low, CUDART_INF_F);
        if (size <= CAPACITY) {
            Row x = recall<Row>(0);
            sort_list(x, size);
            // A conditional expression here crashes NVRTC 13.0.
            Bound bound = {low, NO_ID};
            if (k <= size) bound = x.bound_at(k - 1);
            return {bound, passes};
        }
    }
    return bound_by_search<Row, true>(passes, k);
}
