// Merge sorted lists of keys (selection.cuh): the second stage of a top-k.
#pragma once
#include "beam_search/selection.cuh"

// Merge `lists` sorted lists of k keys each. Write the k largest keys to `sorted`, largest first; fill with 0 if there
// are fewer than k keys.
//
// The merge first finds a lower bound of the k-th largest key from one entry of each list: the entry at position
// `depth`, counted from 1. At least `m * depth` keys are greater than or equal to the m-th largest of these entries.
// With depth 1 (the maximum of each list) the bound is poor if there are fewer lists than results, or if a few lists
// contain nearly all results. In the first step of a search, the lists of one beam contain all results. In these cases
// a larger depth gives a better bound. The merge computes the bound for two depths and takes the larger: `depth` suits
// results that are spread over all lists, and `beam_depth` suits results that are all in the lists of one beam.
template <int GROUPS>
__device__ __forceinline__ void merge(Selection<GROUPS>& s, const Key* from, int lists, int k, int depth,
                                      int beam_depth, Key* sorted) {
    // Neighbouring lists go to different groups of threads (see lower_bound), so the threads of one group read lists
    // that are far apart. There are at least 32 groups.
    const int first = threadIdx.x / 8 + threadIdx.x % 8 * 32;
    const auto bound_by = [&](int depth) {
        unsigned mine = 0;
        for (int list = first; list < lists; list += THREADS)
            mine = max(mine, key_value(from[(long long)list * k + depth - 1]));
        return lower_bound(s, mine, (k + depth - 1) / depth);
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
    const auto visit = [&](Key low, auto f) {
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
    select(s, make_key(bound, 0x7fffffff), make_key(bound, 0), k, visit, [&](int rank, Key key) {
        if (rank < k) sorted[rank] = key;
    });
    __syncthreads();
}
