// Tiles of 16 tokens in shared memory, by layout: where their chunks lie, how they are copied, and how they become
// fragments.
//
// A chunk is 16 bytes, as in the cache: of one token (keys, and values of layout FLASH) or of one dimension (values of
// VLLM). Shared memory has 8 groups of banks of 16 bytes, so chunks are in the same banks if their numbers agree modulo
// 8. Eight chunks that ldmatrix loads together, and eight that lanes copy together, must be in different banks: this is
// what the permutations of `key_chunk` and `value_chunk` are for.
//
// ldmatrix gives a lane 32 bits: two neighbours of a 16-bit cache, which are a register of a fragment, or four of an
// 8-bit cache, which are converted to two registers. So the columns of an 8-bit cache's fragments stand for tokens, or
// dimensions, in another order, which `token` and `dim` say. It is the same order in both factors of a product.
#pragma once
#include "common/mma.cuh"
#include "paged_attention/team.cuh"

// What both layouts have in common.
template <typename CACHE, int DIMS> struct TileSizes {
    static constexpr bool FP8 = sizeof(CACHE) == 1;
    static constexpr int CHUNK = 16 / sizeof(CACHE); // elements
    static constexpr int CHUNKS = DIMS / CHUNK;      // of a token
};

// Layout VLLM. Keys: chunk c of all 16 tokens, then chunk c + 1. Values: the chunks of a dimension, two of 8 tokens or
// one of 16, then those of the next.
template <typename CACHE, int DIMS> struct VllmTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr int BYTES = TILE * 16 * CHUNKS; // of a tile's keys, and of its values

    // The token in column `column` of fragment `half` of the scores. Of 8-bit values a lane has four neighbouring
    // tokens.
    static __device__ __forceinline__ int token(int half, int column) {
        return FP8 ? column / 2 * 4 + half * 2 + column % 2 : half * 8 + column;
    }

    // The dimension in column `column` of fragment n of the output.
    static __device__ __forceinline__ int dim(int n, int column) { return n * 8 + column; }

    // Where a chunk of a key lies. Of 8-bit keys ldmatrix loads tokens 0, 1, 4, 5, 8, 9, 12, 13 together: rotating
    // tokens 8 ... 15 by two puts them in different banks.
    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return chunk * TILE + (FP8 ? (token & 8) | ((token + token / 8 * 2) & 7) : token);
    }

    // Where a chunk of values lies: 8 tokens of a dimension, or 16 of 8 bits. Of 16-bit values ldmatrix loads every
    // second chunk: exchanging the two chunks of half of the dimensions puts them in different banks.
    static __device__ __forceinline__ int value_chunk(int dim, int half) {
        return FP8 ? dim : dim * 2 + (half ^ (dim >> 2 & 1));
    }

    // Where one value lies, in elements.
    static __device__ __forceinline__ int value_at(int dim, int token) {
        return value_chunk(dim, token / CHUNK) * CHUNK + token % CHUNK;
    }

    // Start to copy the team's k-th tile, which begins with `token`, from block `id`. All that depends on the lane is
    // added first, so that the rest are constants of the instructions.
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
            if (chunk + i < team.chunks) copy_async(key_to + i * TILE * 16, keys + i * team.block_size * 16);
        constexpr int HALVES = FP8 ? 1 : 2;
        const int half = team.lane_of_team % HALVES, dim = team.lane_of_team / HALVES;
        values += (slot + dim * team.block_size) * ITEM + half * 16;
        const unsigned value_to = values_to + value_chunk(dim, half) * 16;
#pragma unroll
        for (int i = 0; i < DIMS; i += Team<F>::LANES / HALVES)
            if (dim + i < team.head_dim) copy_async(value_to + i * HALVES * 16, values + i * team.block_size * ITEM);
    }

    // Load the values of fragments n and n + 1 of the output: two registers for each, or one for each of four 8-bit
    // values.
    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int half = lane / 8 % 2;
        load_matrices(to, values_at + value_chunk((n + lane / 16) * 8 + lane % 8, half) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        load_matrices(to, values_at + value_chunk(n * 8 + lane % 16, 0) * 16);
    }
};

// Layout FLASH: token after token. Where a token fills lines of 128 bytes, its chunks are permuted within its lines:
// copies are much slower when the chunks of a line of the cache go to different lines. Where it does not, the distance
// between tokens is an odd number of chunks. Either puts the same chunk of eight tokens in different banks.
template <typename CACHE, int DIMS> struct FlashTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr bool LINES = CHUNKS % 8 == 0;
    static constexpr int PITCH = LINES ? CHUNKS : CHUNKS | 1; // chunks from a token to the next
    static constexpr int BYTES = TILE * 16 * PITCH;           // of a tile's keys, and of its values

    // The token in column `column` of fragment `half` of the scores.
    static __device__ __forceinline__ int token(int half, int column) { return half * 8 + column; }

    // The dimension in column `column` of fragment n of the output. Of 8-bit values a lane has two neighbouring
    // dimensions.
    static __device__ __forceinline__ int dim(int n, int column) {
        return FP8 ? n / 2 * 16 + column * 2 + n % 2 : n * 8 + column;
    }

    // Where a chunk of a token lies, of its key or value.
    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return token * PITCH + (LINES ? chunk ^ (token & 7) : chunk);
    }

    // Where one value lies, in elements.
    static __device__ __forceinline__ int value_at(int dim, int token) {
        return key_chunk(dim / CHUNK, token) * CHUNK + dim % CHUNK;
    }

    // Start to copy the team's k-th tile, which begins with `token`, from block `id`.
    template <typename F>
    static __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, long long id, int kv_head,
                                                        int token, int k) {
        const int slot = token % team.block_size;
        const unsigned keys_to = shared_address(team.stage(k)), values_to = keys_to + BYTES;
        const char* keys = p.keys + id * p.key_block + kv_head * p.key_head;
        const char* values = p.values + id * p.value_block + kv_head * p.value_head;
        // As many lanes share a token: a power of two, so that no division is needed.
        constexpr int ACROSS = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
        const int chunk = team.lane_of_team % ACROSS;
        keys += slot * p.key_token + chunk * 16;
        values += slot * p.value_token + chunk * 16;
#pragma unroll
        for (int i = 0; i < TILE; i += Team<F>::LANES / ACROSS) {
            const int t = i + team.lane_of_team / ACROSS;
            if (chunk < team.chunks && t < TILE) {
                copy_async(keys_to + key_chunk(chunk, t) * 16, keys + t * p.key_token);
                copy_async(values_to + key_chunk(chunk, t) * 16, values + t * p.value_token);
            }
        }
    }

    // Load the values of fragments n and n + 1 of the output: two registers for each, or one for each of four 8-bit
    // values.
    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int t = lane % 8 + lane / 8 % 2 * 8;
        load_transposed(to, values_at + key_chunk(n + lane / 16, t) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        // A register has two tokens of two dimensions; `to` has four tokens of one dimension.
        unsigned both[2];
        load_transposed(both, values_at + key_chunk(n / 2, lane % 16) * 16);
        to[0] = __byte_perm(both[0], both[1], 0x6420);
        to[1] = __byte_perm(both[0], both[1], 0x7531);
    }
};
