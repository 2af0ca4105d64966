// Define rows in memory, units of a row in registers, and sums over a row, for layer_norm and rms_norm. A unit is EACH
// consecutive elements of a row.
//
// The order of a sum does not depend on the number of threads:
//   1. Add the EACH values of a unit, from the first to the last.
//   2. Add the sums of units whose indices differ by multiples of COLUMNS, in order. At most COLUMNS sums are left.
//   3. Fold these sums: add the second half to the first half, and repeat until one sum is left.
// Each addition is rounded to float32, so all template instances give the same bits.
#pragma once
#include "common/quantize.cuh"
#include "common/warp.cuh"

constexpr int EACH = 8;
constexpr int COLUMNS = 1024;
constexpr int EARLY_BYTES = 64; // maximum bytes of the weight that a thread holds during a reduction

// Rows [outer, inner, width] with strides for the first two dimensions.
struct Rows {
    char* first;
    long long outer_stride; // bytes
    long long inner_stride;
    __device__ __forceinline__ char* at(int outer, int inner) const {
        return first + outer * outer_stride + inner * inner_stride;
    }
};

// EACH (8) consecutive elements of a row in registers. They are loaded and stored BYTES bytes at a time.
template <typename T, int BYTES> struct Eight {
    static constexpr int LOADS = EACH * int(sizeof(T)) / BYTES, IN_LOAD = BYTES / int(sizeof(T));
    alignas(16) Unit<BYTES> unit[LOADS];

    // Load the first `count` elements, and set the others to 0. The loads bypass the read-only cache, because the
    // kernel may write to the same row.
    __device__ __forceinline__ void load(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = i * IN_LOAD < count ? __ldcs(reinterpret_cast<const Unit<BYTES>*>(from) + i) : Unit<BYTES>{};
    }
    // Do the same as `load`, but through the read-only cache. This is for data that all rows share.
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
                // A bfloat16 is the high half of a float with the same value, so a mask or a shift of the 32-bit word
                // converts it.
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

// Fold the sums: add the second half to the first half, and repeat until one sum is left. Return that sum.
template <int COUNT> __device__ __forceinline__ float folded(float (&sums)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    return sums[0];
}

// Add the `sums` of the THREADS threads of a row by folding: COUNT separate sums, and every thread gets all results. A
// kernel may call this only once for each value of COUNT. A second call would overwrite the shared memory of the first
// call while other threads still read it.
template <int THREADS, int COUNT> __device__ __forceinline__ void row_sums(float (&sums)[COUNT]) {
    if constexpr (THREADS > 32) {
        // Folding first adds the sums of different warps, and then of different lanes. Each thread therefore reads the
        // sums of its own lane in all warps and folds them, so one exchange through shared memory is enough.
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

// The units of a row that belong to a thread. A unit is EACH consecutive elements. Thread t has the units `t`,
// `t + THREADS`, `t + 2 * THREADS` and so on. The first ITEMS units stay in registers. A thread has more units only if
// THREADS == COLUMNS; the other units are loaded again when they are needed.
//
// WIDTH: width of a row; 0 if it is known only at run time. THREADS: threads per row, a power of two: either all BLOCK
// threads of a block, or at most a warp.
template <int WIDTH, int THREADS, int ITEMS, int BLOCK> struct Dealt {
    static constexpr int SLOTS = COLUMNS / THREADS; // sums that a thread keeps separate in step 2
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
        end = row < p.rows ? width - thread * EACH : 0; // threads after the last row only take part in the shuffles
    }

    // count(i): the number of elements of the row from the start of unit i on; 0 or less if unit i does not exist.
    // column(i): the column of the first element of unit i.
    __device__ __forceinline__ int count(int i) const { return end - i * (THREADS * EACH); }
    __device__ __forceinline__ int column(int i) const { return (thread + i * THREADS) * EACH; }
};
