// Define rows in memory, vectors of a row in registers, and sums over a row. The order of a sum does not depend on the
// number of threads:
//   1. Add the VECTOR elements of a vector, from the first to the last.
//   2. Add the sums of vectors whose indices differ by multiples of COLUMNS, in order. At most COLUMNS sums are left.
//   3. Fold these sums: add the second half to the first half, and repeat until one sum is left.
// Each addition is rounded to float32.
#pragma once
#include "common/quantize.cuh"
#include "common/warp.cuh"

constexpr int VECTOR = 8; // elements
constexpr int COLUMNS = 1024;
constexpr int PREFETCH_BYTES = 64; // maximum bytes of the weight that a thread holds during a reduction

// Rows [outer, inner, width].
struct Rows {
    char* first;
    long long outer_stride; // bytes
    long long inner_stride;
    __device__ __forceinline__ char* at(int outer, int inner) const {
        return first + outer * outer_stride + inner * inner_stride;
    }
};

// VECTOR consecutive elements of a row, loaded and stored BYTES bytes at a time.
template <typename T, int BYTES> struct RowVector {
    static constexpr int LOADS = VECTOR * int(sizeof(T)) / BYTES, PER_LOAD = BYTES / int(sizeof(T));
    alignas(16) Vector<BYTES> loads[LOADS];

    // Set elements from `count` on to 0. The loads bypass the read-only cache, because the kernel may write to the row.
    __device__ __forceinline__ void load(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            loads[i] =
                i * PER_LOAD < count ? __ldcs(reinterpret_cast<const Vector<BYTES>*>(from) + i) : Vector<BYTES>{};
    }
    // Load data that all rows share, through the read-only cache.
    __device__ __forceinline__ void load_shared(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            loads[i] = i * PER_LOAD < count ? __ldg(reinterpret_cast<const Vector<BYTES>*>(from) + i) : Vector<BYTES>{};
    }
    __device__ __forceinline__ void store(char* to, int count) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i * PER_LOAD < count) reinterpret_cast<Vector<BYTES>*>(to)[i] = loads[i];
    }
    __device__ __forceinline__ void get(float (&value)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            if constexpr (IS_BFLOAT16<T> && BYTES > 2) {
                // A bfloat16 is the high half of the float with the same value.
                const unsigned pair = reinterpret_cast<const unsigned*>(loads)[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(loads)[i]);
            }
        }
    }
    __device__ __forceinline__ void set(const float (&value)[VECTOR]) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) reinterpret_cast<T*>(loads)[i] = from_float<T>(value[i]);
    }
};

template <int COUNT> __device__ __forceinline__ float folded(float (&sums)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    return sums[0];
}

// Fold COUNT separate sums over the threads of a row. A kernel may call this only once for each COUNT: a second call
// would overwrite shared memory that other threads still read.
template <int THREADS, int COUNT> __device__ __forceinline__ void row_sums(float (&sums)[COUNT]) {
    if constexpr (THREADS > 32) {
        // The first folds add sums of threads in different warps. Therefore each thread first folds the sums that the
        // threads with its lane number have in all warps. Then the shuffles fold the sums of the lanes.
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

// Thread t of a row handles vectors `t`, `t + THREADS`, `t + 2 * THREADS` and so on. Its first ITEMS vectors stay in
// registers. It has more vectors only if THREADS == COLUMNS.
//
// WIDTH: elements of a row; 0 if known only at run time. THREADS: threads per row, a power of two; it is BLOCK, or at
// most 32. BYTES: bytes per load, 16 or one element.
template <int WIDTH, int THREADS, int ITEMS, int BLOCK> struct RowPartition {
    static constexpr int MAX_SUMS = COLUMNS / THREADS; // separate sums of a thread in step 2
    static constexpr int SUMS = ITEMS < MAX_SUMS ? power_of_two_from(ITEMS) : MAX_SUMS;
    static constexpr bool IN_REGISTERS = WIDTH ? WIDTH <= THREADS * ITEMS * VECTOR : THREADS < COLUMNS;
    static_assert(IN_REGISTERS || MAX_SUMS == 1, "a thread that loads vectors twice has one sum");
    static_assert(THREADS <= 32 || THREADS == BLOCK, "a row has lanes of a warp, or a block");

    int thread, row, width, outer, inner, end;

    template <typename P> __device__ __forceinline__ explicit RowPartition(const P& p) {
        thread = threadIdx.x % THREADS, row = blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
        width = WIDTH ? WIDTH : p.width;
        outer = p.by_inner.quotient(row), inner = row - outer * p.inner;
        end = row < p.rows ? width - thread * VECTOR : 0; // threads after the last row take part in shuffles only
    }

    // count(i): elements of the row from vector i on; 0 or less if there is no vector i.
    __device__ __forceinline__ int count(int i) const { return end - i * (THREADS * VECTOR); }
    __device__ __forceinline__ int column(int i) const { return (thread + i * THREADS) * VECTOR; }
};
