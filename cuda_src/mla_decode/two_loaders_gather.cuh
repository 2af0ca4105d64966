// Gather the tokens that `indices` select from a 16-bit cache, in the producer warpgroups of attend_two_loaders.
#pragma once
#include "mla_decode/two_loaders_shared.cuh"

// Copy half of the value columns of 32 tokens. Lane i has the address of token i.
__device__ __forceinline__ void copy_32_halves(const TokenAddresses& addresses, unsigned queries, int buffer, int half,
                                               int first, int lane) {
    const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + first * COLUMNS * 2;
#pragma unroll 4
    for (int i = 0; i < 32; ++i)
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           addresses.of(i) + half * 4 * COLUMNS * 2 + lane * 16, addresses.valid_lanes >> i & 1);
}

// Copy the rotary parts of 32 tokens. Lane i has the address of token i.
__device__ __forceinline__ void copy_32_rotaries(const TokenAddresses& addresses, unsigned queries, int buffer,
                                                 int first, int lane) {
    const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + first * COLUMNS * 2;
#pragma unroll 2
    for (int start = 0; start < 32; start += 4) {
        const int i = start + lane / 8;
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           addresses.of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16, addresses.valid_lanes >> i & 1);
    }
}

// Each half of each buffer belongs to two warps. When the empty barrier of a half completes, each of its two warps
// refills 32 tokens.
template <typename T>
__device__ __forceinline__ void gather_by_two(const Params& p, WgmmaShared& shared, unsigned queries) {
    constexpr int WARP_TOKENS = BLOCK_TOKENS / 2;
    const int warp = producer_warp(), lane = threadIdx.x % 32;
    const int buffer = warp / 4, half = warp / 2 % 2, side = warp % 2, first_token = side * WARP_TOKENS;
    const SmPart sm_part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   rotary_full = shared_address(&shared.full[buffer][ROTARY_FULL]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, false, true> cursor(p, sm_part);
    Entry entry; // the entry one tile after `addresses`
    TokenAddresses addresses;
    auto look_up = [&] {
        entry = cursor.entry(first_token + lane);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] { addresses.template find<false, true>(p, entry); };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int tile_count = 0, split_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const Split split(p, reload_sm_part<true>(p, sm_part), sequence);
        if (split.begin >= split.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++split_count);
        load_queries<T, PRODUCER_WARPS, TILES, 1>(p, split, queries, warp);
        bool first = true;
        for (int start = split.begin; start < split.end; start += BLOCK_TOKENS, ++tile_count) {
            if ((tile_count & 1) != buffer) continue;
            mbarrier_wait(empty, tile_count / 2 + 1);
            if (half == buffer && lane == 0) {
                reinterpret_cast<unsigned*>(&shared.valid[buffer])[side] = addresses.valid_lanes;
                if (addresses.bad) shared.bad[split_count % BAD_FLAGS] = split_count;
            }
            copy_32_halves(addresses, queries, buffer, half, first_token, lane);
            cp_async_commit_group();
            if (half != buffer) copy_32_rotaries(addresses, queries, buffer, first_token, lane);
            cp_async_commit_group();
            find(), look_up();
            if (first) {
                publish_queries<2>(shared);
                first = false;
            }
            cp_async_wait_group<1>();
            publish_keys(full);
            if (half != buffer) {
                cp_async_wait_group<0>();
                publish_keys(rotary_full);
            }
        }
        if (first) publish_queries<0>(shared); // the sequence's only tile is in the other buffer
    }
}
