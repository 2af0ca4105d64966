// The two products of attention for N tiles, by the width of the cache's numbers: scores = query keys^T for a warp's
// rows and each tile's 16 tokens, and out += weights values. `keys_at` and `values_at` are shared addresses. The sums of
// several tiles' scores do not wait for each other, nor do the CHAINS sums that those of one tile consist of.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "paged_attention/rows.cuh"
#include "paged_attention/tile.cuh"

// Products with a cache of the query's type T: fragments are as ldmatrix loads them.
template <typename T, typename CACHE, typename Tile, typename Rows> struct Products16 {
    using Math = T;                         // type of the factors
    static constexpr bool RESCALED = false; // whether the query is, for the range of Math

    // The first of the two dimensions that a lane of column pair `pair` has in half `half` of the query's fragment of a
    // step.
    static __device__ __forceinline__ int query_dim(int step, int half, int pair) {
        return step * 16 + pair * 2 + half * 8;
    }

    template <int STEPS, int CHAINS, int N, typename Query>
    static __device__ __forceinline__ void multiply_keys(float (&scores)[CHAINS][N][Rows::FRAGMENTS][4],
                                                         const Query& query, const unsigned (&keys_at)[N], int lane) {
        const int t = lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned rows[Rows::OPERAND], keys[4];
            query.load(step, rows);
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                ldmatrix(keys, keys_at[tile] + Tile::key_chunk(step * 2 + lane / 8 % 2, t) * 16);
                Rows::template multiply<Math>(scores[step % CHAINS][tile], 0, rows, keys);
            }
        }
    }

    template <int FRAGMENTS, int N>
    static __device__ __forceinline__ void multiply_values(float (&out)[FRAGMENTS][4],
                                                           const unsigned (&weights)[N][Rows::OPERAND],
                                                           const unsigned (&values_at)[N], int lane) {
#pragma unroll
        for (int k = 0; k < FRAGMENTS / Rows::FRAGMENTS; ++k)
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                unsigned values[4];
                Tile::load_values(values, values_at[tile], 2 * k, lane);
                Rows::template multiply<Math>(out, k, weights[tile], values);
            }
    }
};

// Products with a cache of 8-bit numbers: each is a float16 exactly, so all factors are in float16.
template <typename T, typename CACHE, typename Tile, typename Rows> struct Products8 {
    using Math = __half;                             // type of the factors
    static constexpr bool RESCALED = IS_BFLOAT16<T>; // whether the query is, for the range of Math

    // The first of the two dimensions that a lane of column pair `pair` has in half `half` of the query's fragment of a
    // step.
    static __device__ __forceinline__ int query_dim(int step, int half, int pair) {
        return step * 16 + pair * 4 + half * 2;
    }

    template <int STEPS, int CHAINS, int N, typename Query>
    static __device__ __forceinline__ void multiply_keys(float (&scores)[CHAINS][N][Rows::FRAGMENTS][4],
                                                         const Query& query, const unsigned (&keys_at)[N], int lane) {
        const int t = Tile::token(lane / 8 % 2, lane % 8);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned rows[Rows::OPERAND], bytes[2];
            query.load(step, rows);
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                ldmatrix(bytes, keys_at[tile] + Tile::key_chunk(step, t) * 16);
                multiply_bytes(scores[step % CHAINS][tile], 0, rows, bytes);
            }
        }
    }

    template <int FRAGMENTS, int N>
    static __device__ __forceinline__ void multiply_values(float (&out)[FRAGMENTS][4],
                                                           const unsigned (&weights)[N][Rows::OPERAND],
                                                           const unsigned (&values_at)[N], int lane) {
#pragma unroll
        for (int k = 0; k < FRAGMENTS / Rows::FRAGMENTS; ++k)
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                unsigned bytes[2];
                Tile::load_values(bytes, values_at[tile], 2 * k, lane);
                multiply_bytes(out, k, weights[tile], bytes);
            }
    }

    // Add the product with a tile to its fragments, of which it is the k-th. A register of `bytes` has four neighbours.
    template <int FRAGMENTS>
    static __device__ __forceinline__ void multiply_bytes(float (&to)[FRAGMENTS][4], int k,
                                                          const unsigned (&rows)[Rows::OPERAND],
                                                          const unsigned (&bytes)[2]) {
        unsigned tile[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) to_halves<CACHE>(tile[i], bytes[i]);
        Rows::template multiply<Math>(to, k, rows, {tile[0][0], tile[0][1], tile[1][0], tile[1][1]});
    }
};
