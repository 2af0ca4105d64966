// Store tiles of 16 tokens in shared memory, for each cache layout.
//
// A chunk is 16 contiguous bytes of the cache. It belongs to one token, or for values of layout VLLM to one dimension.
// Chunks whose indices agree modulo 8 share banks. The swizzles of `key_chunk` and `value_chunk` put eight chunks that
// ldmatrix loads together, or that lanes copy together, into different banks.
//
// ldmatrix gives a lane 32 bits: one register of a fragment, or with an 8-bit cache four neighbouring elements, which
// are converted to two registers. The fragment columns of an 8-bit cache therefore stand for tokens or dimensions in
// another order, given by `token` and `dim`. Both operands of an MMA use the same order.
#pragma once
#include "common/mma.cuh"
#include "paged_attention/team.cuh"

template <typename CACHE, int DIMS> struct TileSizes {
    static constexpr bool FP8 = sizeof(CACHE) == 1;
    static constexpr int CHUNK = 16 / sizeof(CACHE); // elements
    static constexpr int CHUNKS = DIMS / CHUNK;      // per token
};

// Layout VLLM. The keys are stored chunk by chunk: chunk c of all tokens, then chunk c + 1. The values are stored
// dimension by dimension: two chunks of 8 tokens with a 16-bit cache, or one chunk of 16 tokens with an 8-bit cache.
template <typename CACHE, int DIMS> struct VllmTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr int BYTES = TILE * 16 * CHUNKS; // of the keys, and of the values

    // Return the token that a column of score fragment `half` stands for. With an 8-bit cache a lane holds four
    // neighbouring tokens.
    static __device__ __forceinline__ int token(int half, int column) {
        return FP8 ? column / 2 * 4 + half * 2 + column % 2 : half * 8 + column;
    }

    static __device__ __forceinline__ int dim(int n, int column) { return n * 8 + column; }

    // Return the index of a key chunk. With 8-bit keys ldmatrix loads tokens 0, 1, 4, 5, 8, 9, 12, 13 together.
    // Rotating tokens 8 to 15 by two puts these eight chunks in different banks.
    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return chunk * TILE + (FP8 ? (token & 8) | ((token + token / 8 * 2) & 7) : token);
    }

    // Return the index of a value chunk. With 16-bit values, a dimension has two chunks, and ldmatrix loads one of them
    // for each of eight dimensions. Half of the dimensions swap their two chunks, which puts the eight loaded chunks in
    // different banks.
    static __device__ __forceinline__ int value_chunk(int dim, int half) {
        return FP8 ? dim : dim * 2 + (half ^ (dim >> 2 & 1));
    }

    // Return the index of one value, in elements.
    static __device__ __forceinline__ int value_at(int dim, int token) {
        return value_chunk(dim, token / CHUNK) * CHUNK + token % CHUNK;
    }

    // The address offsets that depend on the lane are added before the loops.
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

    // Load the values for output fragments n and n + 1.
    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int half = lane / 8 % 2;
        ldmatrix(to, values_at + value_chunk((n + lane / 16) * 8 + lane % 8, half) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        ldmatrix(to, values_at + value_chunk(n * 8 + lane % 16, 0) * 16);
    }
};

// Layout FLASH. The keys and the values are stored token by token. If a token fills whole lines of 128 bytes, its
// chunks are permuted only within these lines, because copies are much slower if a line of the cache is scattered over
// shared memory. Otherwise tokens are an odd number of chunks apart. In both cases the chunks with the same index of
// eight consecutive tokens are in different banks.
template <typename CACHE, int DIMS> struct FlashTile : TileSizes<CACHE, DIMS> {
    using Sizes = TileSizes<CACHE, DIMS>;
    using Sizes::CHUNK, Sizes::CHUNKS, Sizes::FP8;
    static constexpr bool LINES = CHUNKS % 8 == 0;
    static constexpr int PITCH = LINES ? CHUNKS : CHUNKS | 1; // chunks per token, with padding
    static constexpr int BYTES = TILE * 16 * PITCH;           // of the keys, and of the values

    static __device__ __forceinline__ int token(int half, int column) { return half * 8 + column; }

    // Return the dimension that a column of output fragment n stands for. With an 8-bit cache a lane holds two
    // neighbouring dimensions.
    static __device__ __forceinline__ int dim(int n, int column) {
        return FP8 ? n / 2 * 16 + column * 2 + n % 2 : n * 8 + column;
    }

    static __device__ __forceinline__ int key_chunk(int chunk, int token) {
        return token * PITCH + (LINES ? chunk ^ (token & 7) : chunk);
    }

    static __device__ __forceinline__ int value_at(int dim, int token) {
        return key_chunk(dim / CHUNK, token) * CHUNK + dim % CHUNK;
    }

    template <typename F>
    static __device__ __forceinline__ void start_copies(const Params& p, const Team<F>& team, long long id, int kv_head,
                                                        int token, int k) {
        const int slot = token % team.block_size;
        const unsigned keys_to = shared_address(team.stage(k)), values_to = keys_to + BYTES;
        const char* keys = p.keys + id * p.key_block + kv_head * p.key_head;
        const char* values = p.values + id * p.value_block + kv_head * p.value_head;
        // A power of two, so that no division is needed.
        constexpr int LANES_PER_TOKEN = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
        const int chunk = team.lane_of_team % LANES_PER_TOKEN;
        keys += slot * p.key_token + chunk * 16;
        values += slot * p.value_token + chunk * 16;
#pragma unroll
        for (int i = 0; i < TILE; i += Team<F>::LANES / LANES_PER_TOKEN) {
            const int t = i + team.lane_of_team / LANES_PER_TOKEN;
            if (chunk < team.chunks && t < TILE) {
                cp_async(keys_to + key_chunk(chunk, t) * 16, keys + t * p.key_token);
                cp_async(values_to + key_chunk(chunk, t) * 16, values + t * p.value_token);
            }
        }
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[4], unsigned values_at, int n, int lane) {
        const int t = lane % 8 + lane / 8 % 2 * 8;
        ldmatrix_trans(to, values_at + key_chunk(n + lane / 16, t) * 16);
    }

    static __device__ __forceinline__ void load_values(unsigned (&to)[2], unsigned values_at, int n, int lane) {
        // A register of `both` holds two dimensions of two tokens, and a register of `to` holds one dimension of four
        // tokens.
        unsigned both[2];
        ldmatrix_trans(both, values_at + key_chunk(n / 2, lane % 16) * 16);
        to[0] = __byte_perm(both[0], both[1], 0x6420);
        to[1] = __byte_perm(both[0], both[1], 0x7531);
    }
};
