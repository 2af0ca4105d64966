// Load the query and probability fragments (operand A) of attend_mma.
#pragma once
#include "mla_decode/mma_form.cuh"
#include "mla_decode/rows.cuh"

// A thread's query rows in global memory; null for rows that do not exist.
template <typename F> struct QueryRows {
    using T = typename F::T;
    const T* from[F::M][2];

    __device__ __forceinline__ QueryRows(const Params& p, const Split& split, const Thread<F>& thread) {
#pragma unroll
        for (int m = 0; m < F::M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const Row row(p, split, thread.kv_head, thread.first_row() + thread.row_of(m, j));
                from[m][j] = row.valid ? static_cast<const T*>(p.q) + split.batch * p.q_strides[0] +
                                             row.token * p.q_strides[1] + row.head * p.q_strides[2]
                                       : nullptr;
            }
    }

    __device__ __forceinline__ void load(const Params& p, const Thread<F>& thread, int step, int m,
                                         unsigned (&a)[4]) const {
        const int dim = F::chunk_of_step(thread.dim_range, step) * 8 + thread.pair * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = from[m][i % 2] && (F::DIM || dim < p.head_dim)
                       ? *reinterpret_cast<const unsigned*>(from[m][i % 2] + dim + i / 2 * 8)
                       : 0;
    }
};

template <typename F> struct QueryFragments {
    static constexpr int M = F::M, SHARED_STEPS = F::STEPS - F::REGISTER_STEPS;
    uint4* const in_shared;
    unsigned in_registers[F::REGISTER_STEPS ? F::REGISTER_STEPS : 1][M][4];

    __device__ __forceinline__ QueryFragments(const Thread<F>& thread, char* shared)
        : in_shared(reinterpret_cast<uint4*>(shared + F::QUERIES) +
                    (thread.group * M * F::DIM_RANGES + thread.dim_range) * SHARED_STEPS * 32 + thread.lane) {}

    __device__ __forceinline__ uint4& shared_fragment(int step, int m) const {
        return in_shared[m * F::DIM_RANGES * SHARED_STEPS * 32 + (step - F::REGISTER_STEPS) * 32];
    }

    // `load_step(step, m, a)` loads fragment m of MMA step `step` into `a`.
    template <typename LOAD> __device__ __forceinline__ void fill(const Thread<F>& thread, const LOAD& load_step) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int step = 0; step < F::REGISTER_STEPS; ++step) load_step(step, m, in_registers[step][m]);
            // With TOKEN_RANGES == 2, two warps need the same queries. Each warp stores the fragments of every second
            // MMA step.
#pragma unroll 2
            for (int step = F::REGISTER_STEPS + thread.token_range; step < F::STEPS; step += F::TOKEN_RANGES) {
                unsigned a[4];
                load_step(step, m, a);
                shared_fragment(step, m) = make_uint4(a[0], a[1], a[2], a[3]);
            }
        }
    }

    __device__ __forceinline__ void load(int step, unsigned (&a)[M][4]) const {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (step < F::REGISTER_STEPS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = in_registers[max(min(step, F::REGISTER_STEPS - 1), 0)][m][i];
            } else {
                const uint4 four = shared_fragment(step, m);
                a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
            }
        }
    }
};

template <typename F>
__device__ __forceinline__ void load_probabilities(unsigned (&a)[F::M][4], const char* probabilities, int step) {
#pragma unroll
    for (int m = 0; m < F::M; ++m) {
        const uint4 four = *reinterpret_cast<const uint4*>(probabilities + (m * (F::TILE / 16) + step) * 512);
        a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
    }
}
