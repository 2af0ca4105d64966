// Merge sorted lists of keys: the second stage of a top-k.
#pragma once
#include "beam_search/selection.cuh"

// The k largest keys of `lists` sorted lists of k, into `sorted`, largest first; 0 where there are no more.
//
// For the bound, a list of the first stage is a group whose maximum is known. Where there are fewer lists than results,
// or where few lists have nearly all of them (those of one beam, in the first step), the entries at place `depth` of
// the lists (from 1 on) say more: m * depth keys reach the m-th largest of them. Two depths are tried: `depth` suits
// results spread over all lists, `beam_depth` results in the lists of one beam.
template <int GROUPS>
__device__ __forceinline__ void merge(Selection<GROUPS>& s, const Key* from, int lists, int k, int depth,
                                      int beam_depth, Key* sorted) {
    // Neighbouring lists go to different groups, of which there are at least 32.
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
