// Load the query of a warp's rows as an MMA operand. Register `half * QUERY_ROWS + j` of a step of 16 dimensions holds
// two dimensions of the lane's row j.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "paged_attention/team.cuh"

template <int STEPS, int OPERAND> struct QueryInRegisters {
    unsigned fragments[STEPS][OPERAND];

    __device__ __forceinline__ void keep(uint4*) {}

    __device__ __forceinline__ void load(int step, unsigned (&rows)[OPERAND]) const {
#pragma unroll
        for (int i = 0; i < OPERAND; ++i) rows[i] = fragments[step][i];
    }
};

// Keeps the query fragments in shared memory, because the output fragments of large heads leave no registers for them.
template <int STEPS, int THREADS> struct QueryInShared {
    unsigned fragments[STEPS][4]; // valid only until `keep` is called
    uint4* kept;                  // [STEPS, THREADS]

    __device__ __forceinline__ void keep(uint4* in_shared) {
        kept = in_shared;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            kept[step * THREADS + threadIdx.x] =
                make_uint4(fragments[step][0], fragments[step][1], fragments[step][2], fragments[step][3]);
    }

    __device__ __forceinline__ void load(int step, unsigned (&rows)[4]) const {
        const uint4 all = kept[step * THREADS + threadIdx.x];
        rows[0] = all.x, rows[1] = all.y, rows[2] = all.z, rows[3] = all.w;
    }
};

// Divide row j of a bfloat16 query by a power of two, and round it to float16. Return the power of two. The row's
// largest magnitude is then in [1, 2), where float16 has enough range and more mantissa bits than bfloat16.
template <int STEPS, int OPERAND>
__device__ __forceinline__ float rescale_row(unsigned (&query)[STEPS][OPERAND], int j) {
    constexpr int QUERY_ROWS = OPERAND / 2;
    unsigned largest = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            largest = max(largest, max(query[step][half * QUERY_ROWS + j] << 16 & 0x7fffffff,
                                       query[step][half * QUERY_ROWS + j] & 0x7fff0000));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    const unsigned exponent = min(max(largest >> 23, 1u), 253u);
    const float down = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned& both = query[step][half * QUERY_ROWS + j];
            both = pack<__half>(__uint_as_float(both << 16) * down, __uint_as_float(both & 0xffff0000) * down);
        }
    return __uint_as_float(exponent << 23);
}

// Load the query fragments. Groups of four consecutive lanes share a row.
template <typename F>
__device__ __forceinline__ void load_query(const Params& p, const Team<F>& team, const KvSplit& kv_split,
                                           unsigned (&query)[F::KEY_STEPS][F::Rows::OPERAND]) {
    using T = typename F::T;
#pragma unroll
    for (int j = 0; j < F::Rows::QUERY_ROWS; ++j) {
        const Row row = team.query_row_of(p, kv_split, j);
        const T* from = static_cast<const T*>(p.query) + kv_split.seq * p.query_seq + row.token * p.query_token +
                        row.head * p.query_head;
#pragma unroll
        for (int step = 0; step < F::KEY_STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int dim = F::Products::query_dim(step, half, team.pair);
                query[step][half * F::Rows::QUERY_ROWS + j] =
                    row.valid && dim < team.head_dim ? *reinterpret_cast<const unsigned*>(from + dim) : 0;
            }
    }
}

// Set the factor of each row to `scale`. If the query is rescaled, multiply the factor by the row's divisor.
template <typename F>
__device__ __forceinline__ void find_factors(float scale, int lane, unsigned (&query)[F::KEY_STEPS][F::Rows::OPERAND],
                                             float (&factors)[2]) {
    if constexpr (F::Products::RESCALED) {
        float of_query[F::Rows::QUERY_ROWS];
#pragma unroll
        for (int j = 0; j < F::Rows::QUERY_ROWS; ++j) of_query[j] = scale * rescale_row(query, j);
#pragma unroll
        for (int j = 0; j < 2; ++j) factors[j] = F::Rows::of_result(of_query, lane, j);
    } else {
        factors[0] = factors[1] = scale;
    }
}
