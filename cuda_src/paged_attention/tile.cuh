// Where a tile's chunks of 16 bytes lie in shared memory, and what the fragments' columns stand for.
#pragma once
#include "paged_attention/params.cuh"

constexpr int TILE = 16; // tokens that a team of warps takes at once

// A tile in shared memory is made of chunks of 16 bytes, as the cache is: of one token (keys, and FLASH's values) or of
// one dimension (VLLM's values). Eight chunks that ldmatrix reads together, or that eight lanes store, must lie in
// different banks; `Fragments` says how.
//
// Of 8-bit caches all is computed in float16, which holds them exactly. Four neighbouring bytes are then two registers
// of a fragment, so that its columns stand for tokens, or dimensions, in another order; `Fragments` says in which.
template <typename T, typename CACHE, Layout LAYOUT, int DIMS> struct Fragments {
    static constexpr bool FP8 = sizeof(CACHE) == 1;
    static constexpr int CHUNK = 16 / sizeof(CACHE); // elements
    // Bytes run along tokens in the values of VLLM's layout, along dimensions in FLASH's.
    static constexpr bool TOKENS_MOVED = FP8 && LAYOUT == VLLM;

    // In FLASH's layout a token has whole lines of 128 bytes, with their chunks permuted, or else an odd number of
    // chunks, so that eight tokens are in different banks. (Copies are much slower when the chunks of a line of the
    // cache go to different lines.)
    static constexpr bool LINES = DIMS / CHUNK % 8 == 0;
    static constexpr int PITCH = LINES ? DIMS / CHUNK : DIMS / CHUNK | 1;
    // Bytes of a tile's keys, or its values.
    static constexpr int HALF_STAGE = TILE * 16 * (LAYOUT == FLASH ? PITCH : DIMS / CHUNK);

    // The token of a tile in column `column` of the tile's half `half`.
    static __device__ __forceinline__ int token(int half, int column) {
        return TOKENS_MOVED ? column / 2 * 4 + half * 2 + column % 2 : half * 8 + column;
    }

    // The dimension in column `column` of the n-th fragment of the output.
    static __device__ __forceinline__ int dim(int n, int column) {
        return FP8 && LAYOUT == FLASH ? n / 2 * 16 + column * 2 + n % 2 : n * 8 + column;
    }

    // Where the chunk of one token lies, in chunks.
    static __device__ __forceinline__ int token_chunk(int chunk, int token) {
        if constexpr (LAYOUT == FLASH) return token * PITCH + (LINES ? chunk ^ (token & 7) : chunk);
        return chunk * TILE + (TOKENS_MOVED ? (token & 8) | ((token + token / 8 * 2) & 7) : token);
    }

    // Where the chunk of one dimension lies: there are two of 8 tokens, or one of 16.
    static __device__ __forceinline__ int dim_chunk(int dim, int half) {
        return FP8 ? dim : dim * 2 + (half ^ (dim >> 2 & 1));
    }
};

// What the products are computed in.
template <bool FP8, typename T> struct Product {
    using type = T;
};
template <typename T> struct Product<true, T> {
    using type = __half;
};

template <typename A, typename B> struct Same {
    static constexpr bool value = false;
};
template <typename A> struct Same<A, A> {
    static constexpr bool value = true;
};
