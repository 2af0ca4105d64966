// The query of a warp's 16 rows, as fragments A of the product with the keys.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "paged_attention/team.cuh"

// Fragments that stay in registers.
template <int STEPS> struct QueryInRegisters {
    unsigned fragments[STEPS][4];

    __device__ __forceinline__ void keep(uint4*) {}

    __device__ __forceinline__ void load(int step, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = fragments[step][i];
    }
};

// Fragments that each thread keeps in shared memory, and loads again for every tile: large heads leave no registers for
// them beside the output.
template <int STEPS, int THREADS> struct QueryInShared {
    unsigned fragments[STEPS][4]; // until they are kept
    uint4* kept;                  // [STEPS, THREADS]

    __device__ __forceinline__ void keep(uint4* in_shared) {
        kept = in_shared;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            kept[step * THREADS + threadIdx.x] =
                make_uint4(fragments[step][0], fragments[step][1], fragments[step][2], fragments[step][3]);
    }

    __device__ __forceinline__ void load(int step, unsigned (&a)[4]) const {
        const uint4 all = kept[step * THREADS + threadIdx.x];
        a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
    }
};

// Round row j of a bfloat16 query to float16, divided by the power of two that is returned. It brings the row's largest
// number to between 1 and 2: into the range of float16, which has more digits than bfloat16 there.
template <int STEPS> __device__ __forceinline__ float rescale_row(unsigned (&query)[STEPS][4], int j) {
    unsigned largest = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            largest =
                max(largest, max(query[step][half * 2 + j] << 16 & 0x7fffffff, query[step][half * 2 + j] & 0x7fff0000));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    const unsigned exponent = min(max(largest >> 23, 1u), 253u);
    const float down = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned& both = query[step][half * 2 + j];
            both = pack<__half>(__uint_as_float(both << 16) * down, __uint_as_float(both & 0xffff0000) * down);
        }
    return __uint_as_float(exponent << 23);
}

// Load the query of row j of a thread's two.
template <typename F>
__device__ __forceinline__ void load_row(const Params& p, const Team<F>& team, const Segment& segment, const Row& row,
                                         int j, unsigned (&query)[F::KEY_STEPS][4]) {
    using T = typename F::T;
    const T* from = static_cast<const T*>(p.query) + segment.seq * p.query_seq + row.token * p.query_token +
                    row.head * p.query_head;
#pragma unroll
    for (int step = 0; step < F::KEY_STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int dim = F::Products::query_dim(step, half, team.pair);
            query[step][half * 2 + j] =
                row.valid && dim < team.head_dim ? *reinterpret_cast<const unsigned*>(from + dim) : 0;
        }
}

// The factor of the scores of row j: `scale`, times what the row is divided by.
template <typename F>
__device__ __forceinline__ float factor_of_row(float scale, int j, unsigned (&query)[F::KEY_STEPS][4]) {
    if constexpr (F::Products::RESCALED) scale *= rescale_row(query, j);
    return scale;
}

// Load the query of a thread's two rows, of which no factor is known yet.
template <typename F>
__device__ __forceinline__ void load_rows(const Params& p, const Team<F>& team, const Segment& segment,
                                          unsigned (&query)[F::KEY_STEPS][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) load_row<F>(p, team, segment, team.row_of(p, segment, j), j, query);
}
