// Compute `scores = query * keys^T` and `out += weights * values`, for N tiles of 16 tokens and a warp's rows. Each
// tile, and each of the CHAINS partial sums of a tile, has its own accumulators, so that their MMAs do not wait for
// each other.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "paged_attention/rows.cuh"
#include "paged_attention/tile.cuh"

// Products with a cache in the query's type T.
template <typename T, typename CACHE, typename Tile, typename Rows> struct Products16 {
    using Math = T;                         // of the MMA operands
    static constexpr bool RESCALED = false; // whether the query is rescaled to the range of Math

    // Return the first of the lane's two dimensions in a half of a query fragment. `pair`: the lane's column pair.
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

// Products with an 8-bit cache. The MMA operands are float16, which represents every 8-bit value exactly.
template <typename T, typename CACHE, typename Tile, typename Rows> struct Products8 {
    using Math = __half;
    static constexpr bool RESCALED = IS_BFLOAT16<T>;

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

    // Convert a tile to float16, and multiply it by `rows`. A register of `bytes` has four neighbouring elements.
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
