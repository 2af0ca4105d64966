// Shared by the norms: rows in memory, units of a row in registers, and sums over a row.
//
// The order of a sum does not depend on the number of threads. First the EACH values of a unit are added one after the
// other, then the sums of units that are COLUMNS units apart, one after the other. Finally the sums are folded: the
// second half is added to the first half until one is left. Each sum is rounded as IEEE says, so all instances give the
// same bits.
#pragma once
#include "common/quantize.cuh"
#include "common/warp.cuh"

constexpr int EACH = 8;
constexpr int COLUMNS = 1024;
constexpr int EARLY_BYTES = 64; // largest weight, in bytes, that a thread holds during a reduction

// Rows [outer, inner, width] with strides for the first two dimensions.
struct Rows {
    char* first;
    long long outer_stride; // bytes
    long long inner_stride;
    __device__ __forceinline__ char* at(int outer, int inner) const {
        return first + outer * outer_stride + inner * inner_stride;
    }
};

// EACH consecutive elements of a row, in loads of BYTES bytes.
template <typename T, int BYTES> struct Eight {
    static constexpr int LOADS = EACH * int(sizeof(T)) / BYTES, IN_LOAD = BYTES / int(sizeof(T));
    alignas(16) Unit<BYTES> unit[LOADS];

    // Load the first `count` elements; the others become 0. The read-only cache is not used, because the kernel may
    // write to `from`.
    __device__ __forceinline__ void load(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = i * IN_LOAD < count ? __ldcs(reinterpret_cast<const Unit<BYTES>*>(from) + i) : Unit<BYTES>{};
    }
    // As `load`, for data that all rows share, through the read-only cache.
    __device__ __forceinline__ void load_shared(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = i * IN_LOAD < count ? __ldg(reinterpret_cast<const Unit<BYTES>*>(from) + i) : Unit<BYTES>{};
    }
    __device__ __forceinline__ void store(char* to, int count) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i * IN_LOAD < count) reinterpret_cast<Unit<BYTES>*>(to)[i] = unit[i];
    }
    __device__ __forceinline__ void get(float (&value)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if constexpr (IS_BFLOAT16<T> && BYTES > 2) {
                // A bfloat16 is the high half of its float, so a mask or a shift of the word converts it.
                const unsigned pair = reinterpret_cast<const unsigned*>(unit)[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(unit)[i]);
            }
        }
    }
    __device__ __forceinline__ void set(const float (&value)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) reinterpret_cast<T*>(unit)[i] = from_float<T>(value[i]);
    }
};

// Return the folded sum: the second half is added to the first half until one is left.
template <int COUNT> __device__ __forceinline__ float folded(float (&sums)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    return sums[0];
}

// Fold COUNT sums over the THREADS threads of a row; every thread gets the results. A kernel calls this once per COUNT:
// a second call would write the shared memory of the first call while other threads still read it.
template <int THREADS, int COUNT> __device__ __forceinline__ void row_sums(float (&sums)[COUNT]) {
    if constexpr (THREADS > 32) {
        // Folding combines warps before lanes. Each thread folds its lane's sums of all warps, so one exchange through
        // shared memory is enough.
        __shared__ float of_thread[COUNT][THREADS];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) of_thread[k][threadIdx.x] = sums[k];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            float of_warp[THREADS / 32];
#pragma unroll
            for (int i = 0; i < THREADS / 32; ++i) of_warp[i] = of_thread[k][i * 32 + threadIdx.x % 32];
            sums[k] = folded(of_warp);
        }
    }
#pragma unroll
    for (int step = (THREADS > 32 ? 32 : THREADS) / 2; step > 0; step /= 2)
#pragma unroll
        for (int k = 0; k < COUNT; ++k) sums[k] = __fadd_rn(sums[k], __shfl_xor_sync(FULL_WARP, sums[k], step));
}

constexpr int power_of_two_from(int count) { return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2); }

// The units of a row that a thread has: t, t + THREADS, ... for thread t. The first ITEMS units stay in registers;
// further units, which exist only if THREADS == COLUMNS, are loaded again.
//
// WIDTH: width of a row, 0: dynamic. THREADS: threads per row, a power of two: a block of BLOCK threads, or at most a
// warp.
template <int WIDTH, int THREADS, int ITEMS, int BLOCK> struct Dealt {
    static constexpr int SLOTS = COLUMNS / THREADS; // separate sums of a thread
    static constexpr int SUMS = ITEMS < SLOTS ? power_of_two_from(ITEMS) : SLOTS;
    static constexpr bool FITS = WIDTH ? WIDTH <= THREADS * ITEMS * EACH : THREADS < COLUMNS;
    static_assert(FITS || SLOTS == 1, "a thread that loads units twice has one sum");
    static_assert(THREADS <= 32 || THREADS == BLOCK, "a row has lanes of a warp, or a block");

    int thread, row, width, outer, inner, end;

    // `p` has the sizes of the launch: rows, inner, by_inner and width.
    template <typename P> __device__ __forceinline__ explicit Dealt(const P& p) {
        thread = threadIdx.x % THREADS, row = blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
        width = WIDTH ? WIDTH : p.width;
        outer = p.by_inner.quotient(row), inner = row - outer * p.inner;
        end = row < p.rows ? width - thread * EACH : 0; // threads past the last row take part in shuffles
    }

    // count: how many elements of unit i are in the row (none if not positive). column: the column of the unit's first
    // element.
    __device__ __forceinline__ int count(int i) const { return end - i * (THREADS * EACH); }
    __device__ __forceinline__ int column(int i) const { return (thread + i * THREADS) * EACH; }
};
