// The loading warpgroup of attend_pair for a 16-bit cache with `indices`, whose tokens lie anywhere.
#pragma once
#include "mla_decode/pair_shared.cuh"

// Start copying 32 tokens, which the lanes have found, to rows `first` ... of half of the value columns.
__device__ __forceinline__ void copy_half_of_pair(const Found& found, unsigned queries, int buffer, int half, int first,
                                                  int lane) {
    const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + first * COLUMNS * 2;
#pragma unroll 8
    for (int i = 0; i < 32; ++i)
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + half * 4 * COLUMNS * 2 + lane * 16, found.there >> i & 1);
}

// The same for their rotary part.
__device__ __forceinline__ void copy_rotary_of_pair(const Found& found, unsigned queries, int buffer, int first,
                                                    int lane) {
    const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + first * COLUMNS * 2;
#pragma unroll
    for (int start = 0; start < 32; start += 4) {
        const int i = start + lane / 8;
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16, found.there >> i & 1);
    }
}

// A warp for each half of each buffer, as in gather_tiles, for 32 tokens of each tile. Of the other block's tokens it only
// finds out which are there.
template <typename T>
__device__ __forceinline__ void gather_tiles_of_pair(const Params& p, WgmmaShared& shared, unsigned queries,
                                                     unsigned rank) {
    constexpr int OWN = BLOCK_TOKENS / 2;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int buffer = warp / 2, half = warp % 2, first_token = int(rank) * OWN;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   rotary_full = shared_address(&shared.full[buffer][ROTARY_FULL]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, false> cursor(p, part);
    Entry entries[2]; // of the tile after the one that is found: of this block's tokens, and of the other's
    Found own;
    unsigned others; // tokens of the other block that are there
    bool bad;
    auto look_up = [&] {
        entries[0] = cursor.entry(first_token + lane), entries[1] = cursor.entry((first_token ^ OWN) + lane);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] {
        Found other;
        other.template find<false, true>(p, entries[1]);
        others = other.there, bad = other.bad;
        own.template find<false, true>(p, entries[0]);
        bad = bad || own.bad;
    };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0; // tiles, and visits with tiles
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPGROUP / 32, TILES>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            mbarrier_wait(empty, used / 2 + 1);
            // One of a buffer's two warps says which of its tokens are there.
            if (half == buffer && lane == 0) {
                const unsigned low = rank == 0 ? own.there : others, high = rank == 0 ? others : own.there;
                shared.valid[buffer] = low | (unsigned long long)high << 32;
                if (bad) shared.bad[visited % VISITS] = visited;
            }
            copy_half_of_pair(own, queries, buffer, half, first_token, lane);
            cp_async_commit_group();
            if (half != buffer) copy_rotary_of_pair(own, queries, buffer, first_token, lane);
            cp_async_commit_group();
            find(), look_up();
            if (first) {
                publish_queries<2>(shared);
                first = false;
            }
            cp_async_wait_group<1>();
            publish_to_pair<2, 4, OWN * COLUMNS * 2>(
                rank, key_tile(queries, buffer, half * 4) + first_token * COLUMNS * 2, full);
            if (half != buffer) {
                cp_async_wait_group<0>();
                publish_to_pair<2, 1, OWN * COLUMNS * 2>(
                    rank, key_tile(queries, buffer, ROTARY_TILE) + first_token * COLUMNS * 2, rotary_full);
            }
            if (half == buffer) own.template prefetch<32, TILES * COLUMNS * 2>();
        }
        if (first) publish_queries<0>(shared); // the only tile is in the other buffer
    }
}
