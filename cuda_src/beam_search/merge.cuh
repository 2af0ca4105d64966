// Merge sorted lists of keys.
#pragma once
#include "beam_search/selection.cuh"

// Merge `lists` sorted lists of k keys (selection.cuh): write the k largest keys to `sorted`, largest first. If there
// are fewer keys, zeros follow.
//
// Consider the `depth`-th key of each list. At least `m * depth` keys reach the m-th largest of these keys. If
// `m * depth >= k`, this m-th largest key is a lower bound on the k-th largest key of all lists. Depth 1 gives a poor
// bound if there are fewer lists than results, or if few lists contain nearly all results, as in the first step of a
// search. The merge takes the larger of two bounds: `depth` suits results that are spread over all lists, and
// `beam_depth` suits results that are in the lists of one beam.
template <int GROUPS>
__device__ __forceinline__ void merge(Selection<GROUPS>& s, const Key* from, int lists, int k, int depth,
                                      int beam_depth, Key* sorted) {
    // Neighbouring lists may be of the same beam. Therefore the threads of a group (at most 8, see lower_bound) read
    // lists that are 32 apart.
    const int first = threadIdx.x / 8 + threadIdx.x % 8 * 32;
    const auto bound_by = [&](int depth) {
        unsigned thread_max = 0;
        for (int list = first; list < lists; list += THREADS)
            thread_max = max(thread_max, key_value(from[(long long)list * k + depth - 1]));
        return lower_bound(s, thread_max, (k + depth - 1) / depth);
    };
    s.start();
    for (int i = threadIdx.x; i < k; i += THREADS) sorted[i] = 0;
    unsigned bound = bound_by(depth);
    if (beam_depth != depth) {
        __syncthreads();
        if (threadIdx.x == 0) s.bound = ~0u;
        __syncthreads();
        bound = max(bound, bound_by(beam_depth));
    }
    const auto for_each_key = [&](Key low, auto f) {
        for (int list = first; list < lists; list += THREADS) {
            const Key* keys = from + (long long)list * k;
#pragma unroll 1
            for (int i = 0; i < k; ++i) {
                const Key key = keys[i];
                if (key < low) break;
                f(key);
            }
        }
    };
    select(s, make_key(bound, 0x7fffffff), make_key(bound, 0), k, for_each_key, [&](int rank, Key key) {
        if (rank < k) sorted[rank] = key;
    });
    __syncthreads();
}
