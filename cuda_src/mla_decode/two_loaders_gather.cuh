// The producer warpgroups of attend_two_loaders for a 16-bit cache with `indices`, whose tokens are anywhere in the
// cache.
#pragma once
#include "mla_decode/two_loaders_shared.cuh"

// Issue the copies of one half of the value columns of 32 tokens, to rows first ... first + 31. Lane i has the address
// of token i.
__device__ __forceinline__ void copy_32_halves(const Found& found, unsigned queries, int buffer, int half, int first,
                                               int lane) {
    const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + first * COLUMNS * 2;
#pragma unroll 4
    for (int i = 0; i < 32; ++i)
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + half * 4 * COLUMNS * 2 + lane * 16, found.there >> i & 1);
}

// Issue the copies of the rotary part of 32 tokens. Lane i has the address of token i.
__device__ __forceinline__ void copy_32_rotaries(const Found& found, unsigned queries, int buffer, int first,
                                                 int lane) {
    const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + first * COLUMNS * 2;
#pragma unroll 2
    for (int start = 0; start < 32; start += 4) {
        const int i = start + lane / 8;
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16, found.there >> i & 1);
    }
}

// The producer loop. Each half of each buffer belongs to two warps. As soon as the empty barrier of the half completes,
// each of the two warps refills 32 of its 64 tokens.
template <typename T>
__device__ __forceinline__ void gather_by_two(const Params& p, WgmmaShared& shared, unsigned queries) {
    constexpr int OWN = BLOCK_TOKENS / 2;
    const int warp = loading_warp(), lane = threadIdx.x % 32;
    const int buffer = warp / 4, half = warp / 2 % 2, side = warp % 2, first_token = side * OWN;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   rotary_full = shared_address(&shared.full[buffer][ROTARY_FULL]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, false, true> cursor(p, part);
    Entry entry; // entry of the token in the tile after the one in `own`
    Found own;
    auto look_up = [&] {
        entry = cursor.entry(first_token + lane);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] { own.template find<false, true>(p, entry); };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0; // tiles so far; sequences with tiles so far
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part_again<true>(p, part), sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, LOADING_WARPS, TILES, 1>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            mbarrier_wait(empty, used / 2 + 1);
            // The two warps of one half (half == buffer) publish which tokens of the tile exist.
            if (half == buffer && lane == 0) {
                reinterpret_cast<unsigned*>(&shared.valid[buffer])[side] = own.there;
                if (own.bad) shared.bad[visited % VISITS] = visited;
            }
            copy_32_halves(own, queries, buffer, half, first_token, lane);
            cp_async_commit_group();
            if (half != buffer) copy_32_rotaries(own, queries, buffer, first_token, lane);
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
