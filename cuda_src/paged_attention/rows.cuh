// Use a warp's query rows as an MMA operand, in `scores = query * keys^T` and `out += weights * values`. The other
// operand is a tile of 16 tokens and 16 dimensions. common/mma.cuh defines the fragments A, B and C.
//
// A lane loads a tile as four registers: `tile[0]` and `tile[1]` are fragment B for the first eight tokens (keys) or
// dimensions (values), `tile[2]` and `tile[3]` for the other eight. In another order, the four registers are fragment A
// for all sixteen tokens or dimensions, and the MMA computes the transposed result.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"

// Transpose an 8 x 8 matrix of 16-bit elements. Lane l holds columns `2 * (l % 4)` and `2 * (l % 4) + 1` of row
// `l / 4`.
__device__ __forceinline__ unsigned transpose_matrix(unsigned two) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(two));
    return transposed;
}

// 16 rows as operand A (M side). A lane holds rows `lane / 4` and `lane / 4 + 8` of an accumulator fragment.
struct RowsAsA {
    static constexpr int ROWS = 16;
    static constexpr int QUERY_ROWS = 2; // per lane, in the query fragments
    static constexpr int FRAGMENTS = 2;  // accumulator fragments per tile
    static constexpr int OPERAND = 4;    // registers of the query operand

    // `row` returns a lane's j-th row in the accumulators, `query_row` its j-th row in the query fragments.
    static __device__ __forceinline__ int row(int lane, int j) { return lane / 4 + 8 * j; }
    static __device__ __forceinline__ int query_row(int lane, int j) { return row(lane, j); }

    // Locate element i of accumulator fragment n: the index j of its row, its group of eight tokens or dimensions, and
    // its position in the group.
    static __device__ __forceinline__ constexpr int row_index(int i) { return i / 2; }
    static __device__ __forceinline__ constexpr int eight(int n, int) { return n; }
    static __device__ __forceinline__ int column(int lane, int i) { return lane % 4 * 2 + i % 2; }

    // Multiply the rows by a tile, and add the product to the k-th group of FRAGMENTS accumulator fragments.
    template <typename Math, int N>
    static __device__ __forceinline__ void multiply(float (&to)[N][4], int k, const unsigned (&rows)[OPERAND],
                                                    const unsigned (&tile)[4]) {
        mma_m16n8k16<Math>(to[2 * k], rows, tile[0], tile[1]);
        mma_m16n8k16<Math>(to[2 * k + 1], rows, tile[2], tile[3]);
    }

    // `operand` packs two neighbouring accumulator elements into a register of the rows' operand. `add` adds two such
    // elements to the sums of their rows.
    template <typename Math> static __device__ __forceinline__ unsigned operand(float low, float high) {
        return pack<Math>(low, high);
    }
    static __device__ __forceinline__ void add(float (&sums)[2], int k, float low, float high) {
        sums[k] += low + high;
    }

    static __device__ __forceinline__ float max_score(const float (&scores)[FRAGMENTS][4], int j) {
        return fmaxf(fmaxf(scores[0][2 * j], scores[0][2 * j + 1]), fmaxf(scores[1][2 * j], scores[1][2 * j + 1]));
    }
    static __device__ __forceinline__ float max_of_lanes(float value) { return lanes_max<4>(value); }
    static __device__ __forceinline__ float sum_of_lanes(float value) { return lanes_sum<4>(value); }

    // `of_query` has a value for each of the lane's rows in the query fragments. Return the value for the lane's j-th
    // row in the accumulators.
    static __device__ __forceinline__ float of_result(const float (&of_query)[QUERY_ROWS], int, int j) {
        return of_query[j];
    }
};

// Up to 8 rows as operand B (N side), with half the MMAs, accumulators and exponentials of 16 rows. A lane holds
// accumulators of rows `2 * (lane % 4)` and `2 * (lane % 4) + 1`, but the query and the weights of row `lane / 4`.
struct RowsAsB {
    static constexpr int ROWS = 8, QUERY_ROWS = 1, FRAGMENTS = 1, OPERAND = 2;

    static __device__ __forceinline__ int row(int lane, int j) { return lane % 4 * 2 + j; }
    static __device__ __forceinline__ int query_row(int lane, int) { return lane / 4; }

    static __device__ __forceinline__ constexpr int row_index(int i) { return i % 2; }
    static __device__ __forceinline__ constexpr int eight(int n, int i) { return n * 2 + i / 2; }
    static __device__ __forceinline__ int column(int lane, int) { return lane / 4; }

    template <typename Math, int N>
    static __device__ __forceinline__ void multiply(float (&to)[N][4], int k, const unsigned (&rows)[OPERAND],
                                                    const unsigned (&tile)[4]) {
        const unsigned a[4] = {tile[0], tile[2], tile[1], tile[3]};
        mma_m16n8k16<Math>(to[k], a, rows[0], rows[1]);
    }

    template <typename Math> static __device__ __forceinline__ unsigned operand(float low, float high) {
        return transpose_matrix(pack<Math>(low, high));
    }
    static __device__ __forceinline__ void add(float (&sums)[2], int, float low, float high) {
        sums[0] += low, sums[1] += high;
    }

    static __device__ __forceinline__ float max_score(const float (&scores)[FRAGMENTS][4], int j) {
        return fmaxf(scores[0][j], scores[0][2 + j]);
    }
    static __device__ __forceinline__ float max_of_lanes(float value) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
        return value;
    }
    static __device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
        return value;
    }

    static __device__ __forceinline__ float of_result(const float (&of_query)[QUERY_ROWS], int lane, int j) {
        return __shfl_sync(FULL_WARP, of_query[0], row(lane, j) * 4);
    }
};
