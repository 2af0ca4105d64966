// Copy and multiply the tiles of an 8-bit cache in attend_mma.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/mma_queries.cuh"
#include "mla_decode/mma_ring.cuh"
#include "mla_decode/rows.cuh"

// Return the binary exponent of the largest scale. It is at least -80, so that 2^-exponent does not overflow.
__device__ __forceinline__ float exponent_of(float4 scales) {
    const float largest = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    return float(max(int(__float_as_uint(largest) >> 23) - 127, -80));
}

__device__ __forceinline__ float component(float4 four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// A lane's ldmatrix addresses, as byte offsets in a tile.
template <typename F> struct Tile8 {
    using T = typename F::T;
    static constexpr int M = F::M, N = F::N, V = F::V;
    int of_tokens[N]; // per token fragment; those that the warp owns come first
    int of_columns;   // for 16 tokens and 32 columns
    // Distances in bytes from `of_tokens` to the scale and to the rotary part. The scale belongs to the first of a
    // lane's two tokens in a C fragment.
    int to_scale, to_rotary;

    __device__ __forceinline__ explicit Tile8(const Thread<F>& thread) {
        const int lane = thread.lane, dim_range = thread.dim_range;
#pragma unroll
        for (int j = 0; j < N; ++j)
            of_tokens[j] = ((j + dim_range * F::OWNED_FRAGMENTS) % N * 8 + lane % 8) * F::PITCH +
                           dim_range * F::SCALE_DIMS + lane / 8 * 16;
        of_columns = lane % 16 * F::PITCH + thread.group_warp * F::SCALE_DIMS + lane / 16 * 16;
        to_scale =
            (thread.pair * 2 - lane % 8) * F::PITCH + F::LATENT_DIMS + dim_range * (4 - F::SCALE_DIMS) - lane / 8 * 16;
        to_rotary = F::ROTARY_OFFSET + dim_range * (32 - F::SCALE_DIMS) - lane / 16 * 32;
    }

    static __device__ __forceinline__ void copy(const Params& p, const Thread<F>& thread,
                                                const TokenAddresses& addresses, int copy_warp, unsigned tile_at,
                                                unsigned full) {
        if constexpr (F::ROW_COPIES)
            copy_rows(p, thread, addresses, tile_at + (copy_warp * F::COPIED_TOKENS + thread.lane) * F::PITCH, full);
        else
            copy_chunks(thread, addresses, tile_at + copy_warp * F::COPIED_TOKENS * F::PITCH + thread.lane * 16);
    }

    static __device__ __forceinline__ void copy_rows(const Params& p, const Thread<F>& thread,
                                                     const TokenAddresses& addresses, unsigned to, unsigned full) {
        constexpr unsigned ALL = (1u << F::COPIED_TOKENS) - 1;
        if (!p.indices && p.cache_strides[1] == F::PITCH && (addresses.valid_lanes & ALL) == ALL) {
            // The tokens are contiguous in one page, because page sizes are multiples of 16.
            if (thread.lane == 0) copy_row(to, addresses.from, F::COPIED_TOKENS * F::PITCH, full);
        } else if (thread.lane < F::COPIED_TOKENS && addresses.valid) {
            copy_row(to, addresses.from, F::PITCH, full);
        } else if (thread.lane < F::COPIED_TOKENS) {
            for (int i = 0; i < F::PITCH; i += 16) store_shared(to + i, make_uint4(0, 0, 0, 0));
            fence_proxy_async();
        }
    }

    // Consecutive lanes copy consecutive chunks, because copies are much slower if 128 contiguous bytes of the cache
    // are scattered over shared memory.
    static __device__ __forceinline__ void copy_chunks(const Thread<F>& thread, const TokenAddresses& addresses,
                                                       unsigned to) {
        constexpr int CHUNKS = F::PITCH / 16, ALL = F::COPIED_TOKENS * CHUNKS;
#pragma unroll 4
        for (int start = 0; start < ALL; start += 32) {
            const int chunk = start + thread.lane, t = min(chunk / CHUNKS, F::COPIED_TOKENS - 1);
            const char* const source = addresses.of(t);
            if (start + 32 <= ALL || chunk < ALL)
                copy_async_or_zero(to + start * 16, source + (chunk - t * CHUNKS) * 16, addresses.valid_lanes >> t & 1);
        }
    }

    // The queries in float16. To fit the range of float16, a row of bfloat16 is divided by a power of two. This brings
    // the row's largest magnitude into [1, 2). float16 then represents every number down to 2^-17 exactly, and rounds
    // smaller numbers by at most 2^-25. A lane holds four neighbouring dimensions of each MMA step, because ldmatrix
    // gives it four neighbouring bytes of a token.
    struct Queries : QueryFragments<F> {
        static constexpr bool RESCALED = IS_BFLOAT16<T>;
        float factor[M][2]; // the divisors, if RESCALED

        using QueryFragments<F>::QueryFragments;

        __device__ __forceinline__ void load_split(const Params& p, const Split& split, const Thread<F>& thread) {
            const QueryRows<F> rows(p, split, thread);
            if constexpr (RESCALED) find_factors(thread, rows);
            this->fill(thread, [&](int step, int m, unsigned (&a)[4]) {
                if (step < F::LINE_STEPS)
                    load_latent(thread, rows, step, m, a);
                else
                    rows.load(p, thread, step, m, a);
            });
        }

        static __device__ __forceinline__ uint2 four_of(const Thread<F>& thread, const QueryRows<F>& rows, int step,
                                                        int m, int j) {
            const int dim = thread.dim_range * F::SCALE_DIMS + step * 16 + thread.pair * 4;
            return rows.from[m][j] ? *reinterpret_cast<const uint2*>(rows.from[m][j] + dim) : make_uint2(0, 0);
        }

        __device__ __forceinline__ void find_factors(const Thread<F>& thread, const QueryRows<F>& rows) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    unsigned largest = 0;
#pragma unroll 4
                    for (int step = 0; step < F::LINE_STEPS; ++step) {
                        const uint2 four = four_of(thread, rows, step, m, j);
                        largest = max(largest, max(four.x << 16 & 0x7fffffff, four.x & 0x7fff0000));
                        largest = max(largest, max(four.y << 16 & 0x7fffffff, four.y & 0x7fff0000));
                    }
                    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                    factor[m][j] = __uint_as_float(min(max(largest >> 23, 1u), 253u) << 23);
                }
        }

        __device__ __forceinline__ void load_latent(const Thread<F>& thread, const QueryRows<F>& rows, int step, int m,
                                                    unsigned (&a)[4]) const {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint2 four = four_of(thread, rows, step, m, j);
                if constexpr (RESCALED) {
                    const float down = __uint_as_float((254u << 23) - __float_as_uint(factor[m][j]));
                    four.x =
                        pack<__half>(__uint_as_float(four.x << 16) * down, __uint_as_float(four.x & 0xffff0000) * down);
                    four.y =
                        pack<__half>(__uint_as_float(four.y << 16) * down, __uint_as_float(four.y & 0xffff0000) * down);
                }
                a[j] = four.x, a[2 + j] = four.y;
            }
        }
    };

    __device__ __forceinline__ void add_scores(const Params&, const Thread<F>& thread, float (&scores)[N][M][4],
                                               const Queries& queries, const char* tile, unsigned tile_at) const {
        add_latent(scores, queries, tile_at);
        scale_scores(scores, queries, tile);
        add_rotary(thread, scores, queries, tile_at);
    }

    __device__ __forceinline__ void add_latent(float (&scores)[N][M][4], const Queries& queries,
                                               unsigned tile_at) const {
        // INTERLEAVED: token fragments that a warp processes at once. QUADS: unrolled groups of four MMA steps. With 64
        // rows, higher numbers would spill registers.
        constexpr int INTERLEAVED = M > 1 && __CUDA_ARCH__ < 900 ? 1 : N < 4 || M > 1 ? 2 : 4;
        constexpr int QUADS = M > 1 && __CUDA_ARCH__ >= 1000 ? 1 : F::LINE_STEPS / 4;
#pragma unroll QUADS
        for (int quad = 0; quad < F::LINE_STEPS; quad += 4)
#pragma unroll
            for (int first = 0; first < N; first += INTERLEAVED) {
                unsigned packed[INTERLEAVED][4];
#pragma unroll
                for (int n = 0; n < INTERLEAVED; ++n) ldmatrix(packed[n], tile_at + of_tokens[first + n] + quad * 16);
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    unsigned a[M][4];
                    queries.load(quad + step, a);
#pragma unroll
                    for (int n = 0; n < INTERLEAVED; ++n) {
                        unsigned b[2];
                        to_halves<__nv_fp8_e4m3>(b, packed[n][step]);
#pragma unroll
                        for (int m = 0; m < M; ++m) mma_m16n8k16<__half>(scores[first + n][m], a[m], b[0], b[1]);
                    }
                }
            }
    }

    __device__ __forceinline__ void scale_scores(float (&scores)[N][M][4], const Queries& queries,
                                                 const char* tile) const {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float scale = *reinterpret_cast<const float*>(tile + of_tokens[n] + to_scale + i * F::PITCH);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        if constexpr (Queries::RESCALED) scores[n][m][2 * j + i] *= queries.factor[m][j];
                        scores[n][m][2 * j + i] *= scale;
                    }
            }
    }

    __device__ __forceinline__ void add_rotary(const Thread<F>& thread, float (&scores)[N][M][4],
                                               const Queries& queries, unsigned tile_at) const {
        unsigned a[M][4];
        queries.load(F::LINE_STEPS, a);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned b[4];
            ldmatrix(b,
                     tile_at + of_tokens[n + 1] + (thread.lane & 16 ? 0 : of_tokens[n] - of_tokens[n + 1]) + to_rotary);
            if constexpr (!IS_BFLOAT16<T>) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    b[i] = pack<T>(__uint_as_float(b[i] << 16), __uint_as_float(b[i] & 0xffff0000u));
            }
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16<T>(scores[n][m], a[m], b[0], b[1]);
                mma_m16n8k16<T>(scores[n + 1][m], a[m], b[2], b[3]);
            }
        }
    }

    // The scales of the warp's own tokens multiply the probabilities before these are rounded to float16. To keep the
    // products in the range of float16, tile_max is the maximum of the sums `score + exponent`, with the exponent of
    // the token's largest scale.
    struct Scales {
        float4 scales[F::OWNED_FRAGMENTS][2];
        float exponents[F::OWNED_FRAGMENTS][2]; // of a token's largest scale

        __device__ __forceinline__ void load(const Thread<F>& thread, const char* tile) {
#pragma unroll
            for (int n = 0; n < F::OWNED_FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int t = (thread.dim_range * F::OWNED_FRAGMENTS + n) * 8 + thread.pair * 2 + i;
                    scales[n][i] = *reinterpret_cast<const float4*>(tile + t * F::PITCH + F::LATENT_DIMS);
                    exponents[n][i] = exponent_of(scales[n][i]);
                }
        }

        __device__ __forceinline__ float exponent(int n, int i) const { return exponents[n][i]; }

        // Return the probabilities of two tokens, each multiplied by scale number `scale` of its token.
        __device__ __forceinline__ unsigned pack_scaled(int n, int scale, float low, float high) const {
            return pack<__half>(low * component(scales[n][0], scale), high * component(scales[n][1], scale));
        }
    };

    __device__ __forceinline__ void add_values(const Params&, const Thread<F>& thread, float (&out)[M][V][4],
                                               const char* probabilities, unsigned tile_at) const {
#pragma unroll
        for (int step = 0; step < F::TILE / 16; ++step) {
            unsigned a[M][4];
            load_probabilities<F>(a, probabilities + thread.group_warp * F::PROBABILITY_BYTES, step);
            const unsigned tokens_at = tile_at + step * 16 * F::PITCH;
#pragma unroll
            for (int n = 0; n < V; n += 4) {
                unsigned packed[4];
                ldmatrix_trans(packed, tokens_at + of_columns + n * 8);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    // A register of `packed` holds an even and an odd column of two tokens. `low` gets the first 8 of
                    // the 16 tokens, and `high` the other 8.
                    unsigned low[2], high[2];
                    to_halves<__nv_fp8_e4m3>(low, __byte_perm(packed[2 * i], 0, 0x3120));
                    to_halves<__nv_fp8_e4m3>(high, __byte_perm(packed[2 * i + 1], 0, 0x3120));
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                        for (int m = 0; m < M; ++m)
                            mma_m16n8k16<__half>(out[m][min(n + 2 * i + odd, V - 1)], a[m], low[odd], high[odd]);
                }
            }
        }
    }

    static __device__ __forceinline__ void store(const Params&, const Thread<F>& thread, const Destination<T>& to,
                                                 const float (&out)[V][4], int j) {
        to.template store_interleaved<V>(out, j, F::column_of(thread.group_warp, 0));
    }
};
