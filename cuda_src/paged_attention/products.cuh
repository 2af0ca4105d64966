// The two products of attention for N tiles, by the width of the cache's numbers: scores = query keys^T for a warp's 16
// rows and each tile's 16 tokens, and out += weights values. `keys_at` and `values_at` are shared addresses. The sums of
// several tiles' scores do not wait for each other.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "paged_attention/tile.cuh"

// Products with a cache of the query's type T: fragments are as ldmatrix loads them.
template <typename T, typename CACHE, typename Tile> struct Products16 {
    using Math = T;                         // type of the factors
    static constexpr bool RESCALED = false; // whether the query is, for the range of Math

    // The first of the two dimensions that a lane of column pair `pair` has in half `half` of fragment A of a step.
    static __device__ __forceinline__ int query_dim(int step, int half, int pair) {
        return step * 16 + pair * 2 + half * 8;
    }

    template <int STEPS, int N, typename Query>
    static __device__ __forceinline__ void multiply_keys(float (&scores)[N][2][4], const Query& query,
                                                         const unsigned (&keys_at)[N], int lane) {
        const int t = lane % 8 + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[4], b[4];
            query.load(step, a);
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                ldmatrix(b, keys_at[tile] + Tile::key_chunk(step * 2 + lane / 8 % 2, t) * 16);
                mma_m16n8k16<Math>(scores[tile][0], a, b[0], b[1]);
                mma_m16n8k16<Math>(scores[tile][1], a, b[2], b[3]);
            }
        }
    }

    template <int FRAGMENTS, int N>
    static __device__ __forceinline__ void multiply_values(float (&out)[FRAGMENTS][4], const unsigned (&weights)[N][4],
                                                           const unsigned (&values_at)[N], int lane) {
#pragma unroll
        for (int n = 0; n < FRAGMENTS; n += 2)
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                unsigned b[4];
                Tile::load_values(b, values_at[tile], n, lane);
                mma_m16n8k16<Math>(out[n], weights[tile], b[0], b[1]);
                mma_m16n8k16<Math>(out[n + 1], weights[tile], b[2], b[3]);
            }
    }
};

// Products with a cache of 8-bit numbers: each is a float16 exactly, so all factors are in float16.
template <typename T, typename CACHE, typename Tile> struct Products8 {
    using Math = __half;                             // type of the factors
    static constexpr bool RESCALED = IS_BFLOAT16<T>; // whether the query is, for the range of Math

    // The first of the two dimensions that a lane of column pair `pair` has in half `half` of fragment A of a step.
    static __device__ __forceinline__ int query_dim(int step, int half, int pair) {
        return step * 16 + pair * 4 + half * 2;
    }

    template <int STEPS, int N, typename Query>
    static __device__ __forceinline__ void multiply_keys(float (&scores)[N][2][4], const Query& query,
                                                         const unsigned (&keys_at)[N], int lane) {
        const int t = Tile::token(lane / 8 % 2, lane % 8);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned a[4], bytes[2];
            query.load(step, a);
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                ldmatrix(bytes, keys_at[tile] + Tile::key_chunk(step, t) * 16);
#pragma unroll
                for (int n = 0; n < 2; ++n) multiply_bytes(scores[tile][n], a, bytes[n]);
            }
        }
    }

    template <int FRAGMENTS, int N>
    static __device__ __forceinline__ void multiply_values(float (&out)[FRAGMENTS][4], const unsigned (&weights)[N][4],
                                                           const unsigned (&values_at)[N], int lane) {
#pragma unroll
        for (int n = 0; n < FRAGMENTS; n += 2)
#pragma unroll
            for (int tile = 0; tile < N; ++tile) {
                unsigned bytes[2];
                Tile::load_values(bytes, values_at[tile], n, lane);
#pragma unroll
                for (int i = 0; i < 2; ++i) multiply_bytes(out[n + i], weights[tile], bytes[i]);
            }
    }

    // to += a b, of which `bytes` has four neighbours.
    static __device__ __forceinline__ void multiply_bytes(float (&to)[4], const unsigned (&a)[4], unsigned bytes) {
        unsigned b[2];
        to_halves<CACHE>(b, bytes);
        mma_m16n8k16<Math>(to, a, b[0], b[1]);
    }
};
