// The loading warpgroup of attend_pair for a 16-bit cache with `indices`, whose tokens lie anywhere.
#pragma once
#include "mla_decode/pair_shared.cuh"

// Start copying 32 tokens, which the lanes have found, to rows `first` ... of half of the value columns.
__device__ __forceinline__ void copy_half_of_pair(const Found& found, unsigned queries, int buffer, int half, int first,
                                                  int lane) {
    const unsigned tile = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + first * COLUMNS * 2;
#pragma unroll 4
    for (int i = 0; i < 32; ++i)
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + half * 4 * COLUMNS * 2 + lane * 16, found.there >> i & 1);
}

// The same for their rotary part.
__device__ __forceinline__ void copy_rotary_of_pair(const Found& found, unsigned queries, int buffer, int first,
                                                    int lane) {
    const unsigned tile = key_tile(queries, buffer, ROTARY_TILE) + first * COLUMNS * 2;
#pragma unroll 2
    for (int start = 0; start < 32; start += 4) {
        const int i = start + lane / 8;
        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                           found.of(i) + ROTARY_TILE * COLUMNS * 2 + lane % 8 * 16, found.there >> i & 1);
    }
}

// A warp gathers 32 tokens of a half of a buffer, and fills it again as soon as it is free. In a pair (CLUSTER == 2) these are
// all that its block brings, and of the other block's tokens it only finds out which are there; alone, a block has two such
// warps for each half. FETCH: tokens are brought to the L2 cache a turn of the warp ahead.
template <typename T, int CLUSTER, bool FETCH>
__device__ __forceinline__ void gather_tiles_of_pair(const Params& p, WgmmaShared& shared, unsigned queries,
                                                     unsigned rank) {
    constexpr int OWN = BLOCK_TOKENS / 2, EACH = 2 / CLUSTER, WARPS = 4 * EACH;
    const int warp = loading_warp(), lane = threadIdx.x % 32;
    const int buffer = warp / EACH / 2, half = warp / EACH % 2;
    const int side = CLUSTER == 2 ? int(rank) : warp % 2, first_token = side * OWN;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   rotary_full = shared_address(&shared.full[buffer][ROTARY_FULL]),
                   empty = shared_address(&shared.empty[buffer][half]);
    TileCursor<true, false, CLUSTER == 1> cursor(p, part);
    Entry entry, other_entry; // of the tile after the one that is found: of the warp's tokens, and of the other block's
    Found own;
    unsigned others = 0; // tokens of the other block that are there
    bool bad;
    auto look_up = [&] {
        entry = cursor.entry(first_token + lane);
        if constexpr (CLUSTER == 2) other_entry = cursor.entry((first_token ^ OWN) + lane);
        cursor.advance(), cursor.advance();
    };
    auto find = [&] {
        own.template find<false, true>(p, entry);
        bad = own.bad;
        if constexpr (CLUSTER == 2) {
            Found other;
            other.template find<false, true>(p, other_entry);
            others = other.there, bad = bad || other.bad;
        }
    };
    if (buffer == 1) cursor.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0; // tiles, and visits with tiles
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part_again<CLUSTER == 1>(p, part), sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPS, TILES, CLUSTER>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            mbarrier_wait(empty, used / 2 + 1);
            // The warps of the half that comes first say which of the buffer's tokens are there.
            if (half == buffer && lane == 0) {
                unsigned* const valid = reinterpret_cast<unsigned*>(&shared.valid[buffer]);
                valid[side] = own.there;
                if (CLUSTER == 2) valid[side ^ 1] = others;
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
            publish_to_pair<CLUSTER, 4, OWN * COLUMNS * 2>(
                rank, key_tile(queries, buffer, half * 4) + first_token * COLUMNS * 2, full);
            if (half != buffer) {
                cp_async_wait_group<0>();
                publish_to_pair<CLUSTER, 1, OWN * COLUMNS * 2>(
                    rank, key_tile(queries, buffer, ROTARY_TILE) + first_token * COLUMNS * 2, rotary_full);
            }
            if (FETCH && half == buffer) own.template prefetch<32, TILES * COLUMNS * 2>();
        }
        if (first) publish_queries<0>(shared); // the only tile is in the other buffer
    }
}
