// Select the k largest of n keys with one block, without a sort of all keys.
//
// A key is a 64-bit integer. Its upper half is the value, mapped to an unsigned integer of the same order. Its lower
// half is the complement of the id. Therefore all keys are distinct, and the larger of two keys has the larger value,
// or the lower id.
//
//   1. Bound: find the maximum of each group of threads. The k-th largest maximum is a close lower bound on the k-th
//      largest value: with n values spread over G groups, about k + k * k / (2 * G) values reach the bound.
//   2. List: threads whose maximum reaches the bound read their values again, and append the keys that reach the bound
//      to a list in shared memory.
//   3. Rank: rank each key of the list by counting the larger keys.
//
// If more keys reach the bound than the list can hold, as in a masked or sorted row, a bisection raises the bound.
//
// GROUPS == 32 is for up to 16 results; each warp then finds the bound alone. GROUPS == THREADS is for more results.
#pragma once
#include "common/warp.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int CAPACITY = 1024; // keys in a block's list
constexpr int SLACK = 64;      // surplus keys that are ranked; a longer list is shortened first
constexpr int MAX_K = 128;

using Key = unsigned long long;

__device__ __forceinline__ Key make_key(unsigned value, int id) { return (Key(value) << 32) | unsigned(~id); }
__device__ __forceinline__ unsigned key_value(Key key) { return unsigned(key >> 32); }
__device__ __forceinline__ int key_id(Key key) { return ~int(unsigned(key)); }

template <int GROUPS> struct Selection {
    alignas(16) unsigned maxima[GROUPS];
    Key list[CAPACITY];
    int sums[WARPS];
    int count; // of appended keys; may exceed CAPACITY
    unsigned bound;

    // A barrier must follow.
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

// Return the rank-th largest of the groups' maxima. It is a lower bound on the rank-th largest value.
template <int GROUPS>
__device__ __forceinline__ unsigned lower_bound(Selection<GROUPS>& s, unsigned thread_max, int rank) {
    constexpr int GROUP_THREADS = THREADS / GROUPS;
#pragma unroll
    for (int step = 1; step < GROUP_THREADS; step *= 2)
        thread_max = max(thread_max, __shfl_xor_sync(FULL_WARP, thread_max, step));
    if (threadIdx.x % GROUP_THREADS == 0) s.maxima[threadIdx.x / GROUP_THREADS] = thread_max;
    __syncthreads();
    const unsigned group_max = s.maxima[threadIdx.x % GROUPS];
    const uint4* maxima = reinterpret_cast<const uint4*>(s.maxima);
    int minus_larger = 0;
#pragma unroll 8
    for (int i = 0; i < GROUPS / 4; ++i) {
        const uint4 others = maxima[i];
        minus_larger = minus_if_greater(minus_larger, others.x, group_max);
        minus_larger = minus_if_greater(minus_larger, others.y, group_max);
        minus_larger = minus_if_greater(minus_larger, others.z, group_max);
        minus_larger = minus_if_greater(minus_larger, others.w, group_max);
    }
    const unsigned smallest = __reduce_min_sync(FULL_WARP, -minus_larger < rank ? group_max : ~0u);
    if constexpr (GROUPS == 32) return smallest;
    if (threadIdx.x % 32 == 0) atomicMin(&s.bound, smallest);
    __syncthreads();
    return s.bound;
}

__device__ __forceinline__ int block_sum(int* sums, int value) {
    value = __reduce_add_sync(FULL_WARP, value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;
}

// Raise `low` by bisection, starting at `probe`, until at least k and at most `limit` keys are `>= low`. Return the
// number of these keys. On entry, `count` keys are `>= low` and fewer than k are `>= high`. The loop ends because all
// keys are distinct.
template <typename Count>
__device__ __forceinline__ int raise_bound(int* sums, Key& low, Key& high, Key probe, int count, int k, int limit,
                                           Count count_at_least) {
    while (count > limit) {
        const int reached = block_sum(sums, count_at_least(probe));
        if (reached >= k)
            low = probe, count = reached;
        else
            high = probe;
        probe = low + (high - low) / 2;
    }
    return count;
}

// Raise `low` after the list has overflowed. Return the length of the new list.
template <int GROUPS, typename ForEachKey>
__device__ __forceinline__ int refill_list(Selection<GROUPS>& s, Key& low, Key& high, Key highest, int k,
                                           ForEachKey for_each_key) {
    // Most lists overflow because many values equal the bound. The first probe, `highest + 1`, excludes these values.
    raise_bound(s.sums, low, high, highest + 1, s.count, k, CAPACITY, [&](Key key) {
        int reached = 0;
        for_each_key(key, [&](Key) { ++reached; });
        return reached;
    });
    s.restart();
    for_each_key(low, [&](Key key) { s.append(key); });
    __syncthreads();
    return s.count;
}

// Shorten the list to its largest keys: at least k, at most k + SLACK. Return the new length.
template <int GROUPS>
__device__ __forceinline__ int shorten_list(Selection<GROUPS>& s, Key low, Key high, int k, int count) {
    Key keys[CAPACITY / THREADS];
#pragma unroll
    for (int i = 0; i < CAPACITY / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        keys[i] = at < count ? s.list[at] : 0;
    }
    raise_bound(s.sums, low, high, low + (high - low) / 2, count, k, k + SLACK, [&](Key key) {
        int reached = 0;
#pragma unroll
        for (int i = 0; i < CAPACITY / THREADS; ++i) reached += keys[i] >= key;
        return reached;
    });
    s.restart();
#pragma unroll
    for (int i = 0; i < CAPACITY / THREADS; ++i)
        if (keys[i] >= low) s.append(keys[i]);
    __syncthreads();
    return s.count;
}

// Call emit(rank, key) for each of the k largest keys and possibly a few more; return the number of calls.
// `for_each_key(low, f)` calls f for each key of this thread that is `>= low`. At least k keys (or all) are
// `>= lowest`. `highest` is the largest key with the value of `lowest`.
template <int GROUPS, typename ForEachKey, typename Emit>
__device__ __forceinline__ int select(Selection<GROUPS>& s, Key lowest, Key highest, int k, ForEachKey for_each_key,
                                      Emit emit) {
    Key low = lowest, high = ~Key(0);
    for_each_key(low, [&](Key key) { s.append(key); });
    __syncthreads();
    int count = s.count;
    if (count > CAPACITY) count = refill_list(s, low, high, highest, k, for_each_key);
    if (count > k + SLACK) count = shorten_list(s, low, high, k, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const Key key = s.list[i];
        int minus_rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; ++other) minus_rank = minus_if_greater(minus_rank, s.list[other], key);
        emit(-minus_rank, key);
    }
    return count;
}
