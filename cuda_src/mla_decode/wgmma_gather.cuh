// The loading warpgroup of attend_wgmma for a 16-bit cache with `indices`, whose tokens lie anywhere.
#pragma once
#include "mla_decode/wgmma_tokens.cuh"

// By indices: a warp for each half of each buffer, which brings it again as soon as it is free, so that none waits for
// what another should do. Tokens are brought to the L2 cache a turn ahead.
template <typename T>
__device__ __forceinline__ void gather_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int buffer = warp / 2, half = warp % 2;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   empty = shared_address(&shared.empty[buffer][half]);
    const unsigned queries_full = shared_address(&shared.queries_full);
    Ahead<true> ahead(p, part);
    Entry entries[2]; // of the next tile
    Found found[2];   // lane i knows of tokens i and i + 32
    auto look_up = [&] {
        entries[0] = ahead.entry(lane), entries[1] = ahead.entry(lane + 32);
        ahead.advance(), ahead.advance();
    };
    auto find = [&] {
#pragma unroll
        for (int k = 0; k < 2; ++k) found[k].template find<false, true>(p, entries[k]);
    };
    if (buffer == 1) ahead.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0;
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        barrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPGROUP / 32>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            barrier_wait(empty, used / 2 + 1);
            // One of the two warps of a buffer tells those who weigh its tokens.
            if (half == buffer && lane == 0) {
                shared.valid[buffer] = found[0].there | (unsigned long long)found[1].there << 32;
                if (found[0].bad || found[1].bad) shared.bad[visited % VISITS] = visited;
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const unsigned tile =
                    key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + k * 32 * COLUMNS * 2;
#pragma unroll 8
                for (int i = 0; i < 32; ++i)
                    copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                                       found[k].of(i) + half * 4 * COLUMNS * 2 + lane * 16, found[k].there >> i & 1);
            }
            if (half != buffer) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned tile = key_tile(queries, buffer, ROTARY) + k * 32 * COLUMNS * 2;
#pragma unroll 4
                    for (int start = 0; start < 32; start += 4) {
                        const int i = start + lane / 8;
                        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                                           found[k].of(i) + ROTARY * COLUMNS * 2 + lane % 8 * 16,
                                           found[k].there >> i & 1);
                    }
                }
            }
            copies_commit();
            find(), look_up();
            if (first) {
                copies_wait<1>();
                publish_shared();
                barrier_arrive(queries_full);
                first = false;
            }
            copies_wait<0>();
            arrive_published(full);
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (k == half) found[k].bring<32, TILES * COLUMNS * 2>();
        }
        if (first) { // the only tile is in the other buffer
            copies_wait<0>();
            publish_shared();
            barrier_arrive(queries_full);
        }
    }
}
