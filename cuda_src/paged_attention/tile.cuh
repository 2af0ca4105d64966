// Tiles of 16 tokens in shared memory, by layout: where their chunks lie, how they are copied, how they become fragments.
//
// A chunk is 16 bytes, of one token (keys, and the values of layout FLASH) or of one dimension (the values of VLLM), as in
// the cache. The eight chunks that ldmatrix reads together, and the eight that eight lanes copy together, must lie in
// different banks, which are those of different chunk numbers modulo 8: so chunks are permuted.
//
// A register of a fragment holds two neighbours of 16 bits, and ldmatrix gives a lane 32 bits. Of an 8-bit cache these are
// four neighbours, which become two registers. So the columns of two fragments stand for tokens, or dimensions, in another
// order, the same one for both factors of a product: `token` and `dim` say which.
#pragma once
#include "common/mma.cuh"
#include "paged_attention/team.cuh"

// What both layouts have in common.
template <typename CACHE, int DIMS> struct TileSizes {
    static constexpr bool FP8 = sizeof(CACHE) == 1;
    static constexpr int CHUNK = 16 / sizeof(CACHE); // elements
    static constexpr int CHUNKS = DIMS / CHUNK;      // of a token
};

// Chunk c of the keys of tokens 0 ... 15 side by side; values by dimension, in two chunks of 8 tokens or in one of 16.
template <typename CACHE, int DIMS> struct VllmTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr int BYTES = TILE * 16 * CHUNKS; // of the keys, or the values

    // The token in column `column` of the scores' fragment `half`. Four neighbouring bytes of the values are four tokens.
    static __device__ __forceinline__ int token(int half, int column) {
        return FP8 ? column / 2 * 4 + half * 2 + column % 2 : half * 8 + column;
    }

    // The dimension in column `column` of the output's fragment n.
    static __device__ __forceinline__ int dim(int n, int column) { return n * 8 + column; }

    // Where a chunk of a token's key lies. Of 8-bit keys ldmatrix takes tokens 0, 1, 4, 5, 8, 9, 12, 13: the second eight
    // tokens are rotated by two.
    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return chunk * TILE + (FP8 ? (token & 8) | ((token + token / 8 * 2) & 7) : token);
    }

    // Where a chunk of a dimension's values lies. Of 16-bit values ldmatrix takes every second chunk: half of the
    // dimensions have their two exchanged.
    static __device__ __forceinline__ int value_chunk(int dim, int half) {
        return FP8 ? dim : dim * 2 + (half ^ (dim >> 2 & 1));
    }

    // Where one value lies, in elements.
    static __device__ __forceinline__ int value_at(int dim, int token) {
        return value_chunk(dim, token / CHUNK) * CHUNK + token % CHUNK;
    }

    // Start to copy the tile from `slot` on of a block, of which this kv head's keys and values begin at `keys`, `values`.
    // All that depends on the lane comes first, so that the rest are constants of the instructions.
    template <typename F>
    static __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, long long id, int kv_head,
                                                        int token, int k) {
        const int slot = token % team.block_size;
        const unsigned keys_to = shared_address(team.stage(k)), values_to = keys_to + BYTES;
        const char* keys = p.keys + id * p.key_block + kv_head * p.key_head;
        const char* values = p.values + id * p.value_block + kv_head * p.value_head;
        constexpr int ITEM = sizeof(CACHE);
        const int t = team.lane_of_team % TILE, chunk = team.lane_of_team / TILE;
        keys += (slot + t + chunk * team.block_size) * 16;
        const unsigned key_to = keys_to + key_chunk(chunk, t) * 16;
#pragma unroll
        for (int i = 0; i < CHUNKS; i += Team<F>::LANES / TILE)
            if (chunk + i < team.chunks) cp_async(key_to + i * TILE * 16, keys + i * team.block_size * 16);
        constexpr int HALVES = FP8 ? 1 : 2;
        const int half = team.lane_of_team % HALVES, dim = team.lane_of_team / HALVES;
        values += (slot + dim * team.block_size) * ITEM + half * 16;
        const unsigned value_to = values_to + value_chunk(dim, half) * 16;
#pragma unroll
        for (int i = 0; i < DIMS; i += Team<F>::LANES / HALVES)
            if (dim + i < team.head_dim) cp_async(value_to + i * HALVES * 16, values + i * team.block_size * ITEM);
    }

    // The values of the output's fragments n and n + 1: two registers of each, or one of each with four bytes.
    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int half = lane / 8 % 2;
        ldmatrix(to, values_at + value_chunk((n + lane / 16) * 8 + lane % 8, half) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        ldmatrix(to, values_at + value_chunk(n * 8 + lane % 16, 0) * 16);
    }
};

// Token after token, keys and values alike. Where a token fills lines of 128 bytes, it stays in its own, with their chunks
// permuted: copies are much slower when the chunks of a line of the cache go to different lines. Else its chunks are
// an odd number, which puts the same chunk of eight tokens in different banks.
template <typename CACHE, int DIMS> struct FlashTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr bool LINES = CHUNKS % 8 == 0;
    static constexpr int PITCH = LINES ? CHUNKS : CHUNKS | 1; // chunks from a token to the next
    static constexpr int BYTES = TILE * 16 * PITCH;           // of the keys, or the values

    // The token in column `column` of the scores' fragment `half`.
    static __device__ __forceinline__ int token(int half, int column) { return half * 8 + column; }

    // The dimension in column `column` of the output's fragment n. Neighbouring bytes of the values are two dimensions.
    static __device__ __forceinline__ int dim(int n, int column) {
        return FP8 ? n / 2 * 16 + column * 2 + n % 2 : n * 8 + column;
    }

    // Where a chunk of a token lies.
    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return token * PITCH + (LINES ? chunk ^ (token & 7) : chunk);
    }

    // Where one value lies, in elements.
    static __device__ __forceinline__ int value_at(int dim, int token) {
        return key_chunk(dim / CHUNK, token) * CHUNK + dim % CHUNK;
    }

    // Start to copy the tile from `slot` on of a block, of which this kv head's keys and values begin at `keys`, `values`.
    template <typename F>
    static __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, long long id, int kv_head,
                                                        int token, int k) {
        const int slot = token % team.block_size;
        const unsigned keys_to = shared_address(team.stage(k)), values_to = keys_to + BYTES;
        const char* keys = p.keys + id * p.key_block + kv_head * p.key_head;
        const char* values = p.values + id * p.value_block + kv_head * p.value_head;
        // Lanes that share a token: a power of two, so that no division is needed.
        constexpr int ACROSS = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
        const int chunk = team.lane_of_team % ACROSS;
        keys += slot * p.key_token + chunk * 16;
        values += slot * p.value_token + chunk * 16;
#pragma unroll
        for (int i = 0; i < TILE; i += Team<F>::LANES / ACROSS) {
            const int t = i + team.lane_of_team / ACROSS;
            if (chunk < team.chunks && t < TILE) {
                cp_async(keys_to + key_chunk(chunk, t) * 16, keys + t * p.key_token);
                cp_async(values_to + key_chunk(chunk, t) * 16, values + t * p.value_token);
            }
        }
    }

    // The values of the output's fragments n and n + 1: two registers of each, or one of each with four bytes.
    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int t = lane % 8 + lane / 8 % 2 * 8;
        ldmatrix_trans(to, values_at + key_chunk(n + lane / 16, t) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        // Two tokens by two dimensions in a register; then four tokens of one.
        unsigned both[2];
        ldmatrix_trans(both, values_at + key_chunk(n / 2, lane % 16) * 16);
        to[0] = __byte_perm(both[0], both[1], 0x6420);
        to[1] = __byte_perm(both[0], both[1], 0x7531);
    }
};
