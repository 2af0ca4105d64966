// The producer warpgroup of attend_wgmma for a 16-bit cache with `indices`, whose tokens are anywhere in the cache.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

// Issue the copies of one half of the value columns of 64 tokens. Lane i has the addresses of tokens i and i + 32.
__device__ __forceinline__ void copy_half(const Found (&found)[2], unsigned queries, int buffer, int half, int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + k * 32 * COLUMNS * 2;
#pragma unroll 8
        for (int i = 0; i < 32; ++i)
            copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                               found[k].of(i) + half * 4 * COLUMNS * 2 + lane * 16, found[k].there >> i & 1);
    }
}

// Issue the copies of the rotary part of 64 tokens. Lane i has the addresses of tokens i and i + 32.
__device__ __forceinline__ void copy_rotary(const Found (&found)[2], unsigned queries, int buffer, int lane) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + k * 32 * COLUMNS * 2;
#pragma unroll 4
        for (int start = 0; start < 32; start += 4) {
            const int i = start + lane / 8;
            copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                               found[k].of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16, found[k].there >> i & 1);
        }
    }
}

// The producer loop. Each of the four warps fills one half of one buffer as soon as the empty barrier of that half
// completes, so that no half waits for another. The two warps of a buffer also prefetch the next tile of the buffer
// into L2, 32 tokens each.
template <typename T, bool EXTRA>
__device__ __forceinline__ void gather_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int buffer = warp / 2, half = warp % 2;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, EXTRA> cursor(p, part);
    Entry entries[2]; // entries of the tile after the one in `found`
    Found found[2];   // lane i has tokens i and i + 32
    auto look_up = [&] {
        entries[0] = cursor.entry(lane), entries[1] = cursor.entry(lane + 32);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if constexpr (EXTRA)
                found[k].template find_extra<false, 0>(p, entries[k]);
            else
                found[k].template find<false, true>(p, entries[k]);
        }
    };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0; // tiles so far; sequences with tiles so far
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const VisitOf<EXTRA> visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPGROUP / 32, TILES>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            mbarrier_wait(empty, used / 2 + 1);
            // One of the two warps of a buffer publishes which tokens of the tile exist.
            if (half == buffer && lane == 0) {
                shared.valid[buffer] = found[0].there | (unsigned long long)found[1].there << 32;
                if (found[0].bad || found[1].bad) shared.bad[visited % VISITS] = visited;
            }
            copy_half(found, queries, buffer, half, lane);
            if (half != buffer) copy_rotary(found, queries, buffer, lane);
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
                if (k == half) found[k].prefetch<32, TILES * COLUMNS * 2>();
        }
        if (first) publish_queries<0>(shared); // the sequence's only tile is in the other buffer
    }
}
