// Select the k largest of n keys with one block. The method needs neither a sort of all keys nor k passes over them.
//
// A key is a 64-bit integer. Its high half is the value, mapped to an unsigned integer so that the integers have the
// same order as the floats. Its low half is the complement of the id. All keys are therefore distinct. The larger of
// two keys has the larger value, or the lower id if the values are equal.
//
//   1. Bound: find the largest value of each group of threads. The k-th largest of these maxima is a lower bound on the
//      k-th largest value, and a close one: with n values spread over G groups, about k + k * k / (2 * G) values reach
//      the bound.
//   2. List: threads whose largest value reaches the bound read all their values again, and append the keys of the
//      values that reach the bound to a list in shared memory.
//   3. Rank: rank each key of the list by counting the larger keys.
//
// In a masked or sorted row, more keys may reach the bound than the list can hold. In that case a bisection raises the
// bound until the keys fit.
//
// GROUPS == 32 is for up to 16 results; each warp then finds the bound without the other warps. GROUPS == THREADS is
// for more results.
#pragma once
#include "common/warp.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int CAPACITY = 1024; // keys in a block's list
constexpr int SLACK = 64;      // up to this many surplus keys are ranked; a longer list is shortened first
constexpr int MAX_K = 128;

using Key = unsigned long long;

__device__ __forceinline__ Key make_key(unsigned value, int id) { return (Key(value) << 32) | unsigned(~id); }
__device__ __forceinline__ unsigned key_value(Key key) { return unsigned(key >> 32); }
__device__ __forceinline__ int key_id(Key key) { return ~int(unsigned(key)); }

// Shared memory of a block for a selection.
template <int GROUPS> struct Selection {
    alignas(16) unsigned maxima[GROUPS];
    Key list[CAPACITY];
    int sums[WARPS];
    int count; // number of appended keys; may exceed CAPACITY
    unsigned bound;

    // Initialize. A barrier must follow before the first use.
    __device__ __forceinline__ void start() {
        if (threadIdx.x == 0) count = 0, bound = ~0u;
    }

    __device__ __forceinline__ void append(Key key) {
        const int at = atomicAdd(&count, 1);
        if (at < CAPACITY) list[at] = key;
    }

    __device__ __forceinline__ void restart() {
        __syncthreads();
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
    }
};

// Return the rank-th largest of the maxima of the groups: a lower bound on the rank-th largest value of the block.
// `mine` is the largest value of this thread. A group is THREADS / GROUPS neighbouring threads.
template <int GROUPS> __device__ __forceinline__ unsigned lower_bound(Selection<GROUPS>& s, unsigned mine, int rank) {
    constexpr int MEMBERS = THREADS / GROUPS;
#pragma unroll
    for (int step = 1; step < MEMBERS; step *= 2) mine = max(mine, __shfl_xor_sync(FULL_WARP, mine, step));
    if (threadIdx.x % MEMBERS == 0) s.maxima[threadIdx.x / MEMBERS] = mine;
    __syncthreads();
    const unsigned own = s.maxima[threadIdx.x % GROUPS];
    const uint4* maxima = reinterpret_cast<const uint4*>(s.maxima);
    int minus_larger = 0;
#pragma unroll 8
    for (int i = 0; i < GROUPS / 4; ++i) {
        const uint4 others = maxima[i];
        minus_larger = minus_if_greater(minus_larger, others.x, own);
        minus_larger = minus_if_greater(minus_larger, others.y, own);
        minus_larger = minus_if_greater(minus_larger, others.z, own);
        minus_larger = minus_if_greater(minus_larger, others.w, own);
    }
    const unsigned smallest = __reduce_min_sync(FULL_WARP, -minus_larger < rank ? own : ~0u);
    if constexpr (GROUPS == 32) return smallest;
    if (threadIdx.x % 32 == 0) atomicMin(&s.bound, smallest);
    __syncthreads();
    return s.bound;
}

__device__ __forceinline__ int block_sum(int* sums, int own) {
    own = __reduce_add_sync(FULL_WARP, own);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;
}

// Raise `low` by bisection until at least k and at most `limit` keys are `>= low`, and return their number. On entry,
// `count` keys are `>= low` and fewer than k keys are `>= high`. `probe` is the first key that the bisection tests.
// count_own(key) counts this thread's keys that are `>= key`. The loop ends because all keys are distinct.
template <typename Count>
__device__ __forceinline__ int raise(int* sums, Key& low, Key& high, Key probe, int count, int k, int limit,
                                     Count count_own) {
    while (count > limit) {
        const int reached = block_sum(sums, count_own(probe));
        if (reached >= k)
            low = probe, count = reached;
        else
            high = probe;
        probe = low + (high - low) / 2;
    }
    return count;
}

// Raise the bound `low` after the list has overflowed, and fill the list again. Return the length of the list.
template <int GROUPS, typename Visit>
__device__ __forceinline__ int fill_again(Selection<GROUPS>& s, Key& low, Key& high, Key highest, int k, Visit visit) {
    // The most frequent cause of an overflow is a large number of values equal to the bound. The first probe excludes
    // all of them.
    raise(s.sums, low, high, highest + 1, s.count, k, CAPACITY, [&](Key key) {
        int own = 0;
        visit(key, [&](Key) { ++own; });
        return own;
    });
    s.restart();
    visit(low, [&](Key key) { s.append(key); });
    __syncthreads();
    return s.count;
}

// Shorten the list to at most k + SLACK keys; the largest k keys stay. Return the length of the list.
template <int GROUPS>
__device__ __forceinline__ int shorten(Selection<GROUPS>& s, Key low, Key high, int k, int count) {
    Key own[CAPACITY / THREADS];
#pragma unroll
    for (int i = 0; i < CAPACITY / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        own[i] = at < count ? s.list[at] : 0;
    }
    raise(s.sums, low, high, low + (high - low) / 2, count, k, k + SLACK, [&](Key key) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < CAPACITY / THREADS; ++i) reached += own[i] >= key;
        return reached;
    });
    s.restart();
#pragma unroll
    for (int i = 0; i < CAPACITY / THREADS; ++i)
        if (own[i] >= low) s.append(own[i]);
    __syncthreads();
    return s.count;
}

// Call place(rank, key) for each of the k largest keys, and possibly for a few more keys. Return the number of these
// keys. `visit(low, f)` must call f for each key of this thread that is `>= low`. `lowest` is a lower bound: at least k
// keys must be `>= lowest`, or all keys if there are fewer than k. No key with the same value as `lowest` may exceed
// `highest`.
template <int GROUPS, typename Visit, typename Place>
__device__ __forceinline__ int select(Selection<GROUPS>& s, Key lowest, Key highest, int k, Visit visit, Place place) {
    Key low = lowest, high = ~Key(0);
    visit(low, [&](Key key) { s.append(key); });
    __syncthreads();
    int count = s.count;
    if (count > CAPACITY) count = fill_again(s, low, high, highest, k, visit);
    if (count > k + SLACK) count = shorten(s, low, high, k, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const Key own = s.list[i];
        int minus_rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; ++other) minus_rank = minus_if_greater(minus_rank, s.list[other], own);
        place(-minus_rank, own);
    }
    return count;
}
