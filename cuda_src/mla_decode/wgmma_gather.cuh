// Gather the tokens that `indices` select from a 16-bit cache, in the producer warpgroup of attend_wgmma.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

// Copy half of the value columns. Lane i has the addresses of tokens i and i + 32.
__device__ __forceinline__ void copy_half(const TokenAddresses (&addresses)[2], unsigned queries, int buffer, int half,
                                          int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + k * 32 * COLUMNS * 2;
#pragma unroll 8
        for (int i = 0; i < 32; ++i)
            copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                               addresses[k].of(i) + half * 4 * COLUMNS * 2 + lane * 16,
                               addresses[k].valid_lanes >> i & 1);
    }
}

// Copy the rotary parts. Lane i has the addresses of tokens i and i + 32.
__device__ __forceinline__ void copy_rotary(const TokenAddresses (&addresses)[2], unsigned queries, int buffer,
                                            int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + k * 32 * COLUMNS * 2;
#pragma unroll 4
        for (int start = 0; start < 32; start += 4) {
            const int i = start + lane / 8;
            copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                               addresses[k].of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16,
                               addresses[k].valid_lanes >> i & 1);
        }
    }
}

// Each of the four warps fills one half of one buffer as soon as the half's empty barrier completes. The two warps of a
// buffer also prefetch the buffer's next tile into L2; each warp prefetches 32 tokens.
template <typename T, bool EXTRA>
__device__ __forceinline__ void gather_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int buffer = warp / 2, half = warp % 2;
    const SmPart sm_part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, EXTRA> cursor(p, sm_part);
    Entry entries[2];            // entries one tile after `addresses`
    TokenAddresses addresses[2]; // of tokens lane and lane + 32
    auto look_up = [&] {
        entries[0] = cursor.entry(lane), entries[1] = cursor.entry(lane + 32);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if constexpr (EXTRA)
                addresses[k].template find_extra<false, 0>(p, entries[k]);
            else
                addresses[k].template find<false, true>(p, entries[k]);
        }
    };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int tile_count = 0, split_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const SplitOf<EXTRA> split(p, sm_part, sequence);
        if (split.begin >= split.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++split_count);
        load_queries<T, WARPGROUP / 32, TILES>(p, split, queries, warp);
        bool first = true;
        for (int start = split.begin; start < split.end; start += BLOCK_TOKENS, ++tile_count) {
            if ((tile_count & 1) != buffer) continue;
            mbarrier_wait(empty, tile_count / 2 + 1);
            if (half == buffer && lane == 0) {
                shared.valid[buffer] = addresses[0].valid_lanes | (unsigned long long)addresses[1].valid_lanes << 32;
                if (addresses[0].bad || addresses[1].bad) shared.bad[split_count % BAD_FLAGS] = split_count;
            }
            copy_half(addresses, queries, buffer, half, lane);
            if (half != buffer) copy_rotary(addresses, queries, buffer, lane);
            cp_async_commit_group();
            find(), look_up();
            if (first) {
                publish_queries<1>(shared);
                first = false;
            }
            cp_async_wait_group<0>();
            publish_keys(full);
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (k == half) addresses[k].prefetch<32, TILES * COLUMNS * 2>();
        }
        if (first) publish_queries<0>(shared); // the sequence's only tile is in the other buffer
    }
}
