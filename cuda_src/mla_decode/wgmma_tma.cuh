// The producer warpgroup of attend_wgmma for a 16-bit cache in pages, which TMA copies.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

// Load the queries of each sequence of the part (the work of this thread block) with three warps.
template <typename T>
__device__ __forceinline__ void load_queries_of_visits(const Params& p, const Part& part, WgmmaShared& shared,
                                                       unsigned queries, int warp) {
    int visited = 0;
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPGROUP / 32 - 1, TILES>(p, visit, queries, warp - 1);
        publish_queries<0>(shared);
    }
}

// The producer loop. Warp 0 issues the TMA copies of the keys, and the other warps load the queries.
template <typename T>
__device__ __forceinline__ void load_tiles(const WgmmaParams& params, WgmmaShared& shared, unsigned queries) {
    const Params& p = params.p;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    const Part part(p, blockIdx.z);
    if (warp > 0) {
        load_queries_of_visits<T>(p, part, shared, queries, warp);
        return;
    }
    const int box = params.box_tokens, boxes = BLOCK_TOKENS / box;
    int visited = 0, used = 0; // sequences with tiles so far; tiles so far
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin < visit.end) ++visited;
        const int* table = p.block_table + sequence * p.table_stride;
        // Find the page and the slot of a TMA box of tokens. Lane i takes the i-th box from token `start` on.
        auto find = [&](int start, int& page, int& slot) {
            const int token = start + lane * box;
            page = -1, slot = 0;
            if (lane < boxes && token < visit.end) {
                const int index = token / p.page_size;
                page = table[index], slot = token - index * p.page_size;
            }
        };
        int page, slot;
        find(visit.begin, page, slot);
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            const int buffer = used & 1, phase = used / 2 + 1;
            const int present = (min(visit.end - start, BLOCK_TOKENS) + box - 1) / box; // number of boxes in the tile
            const bool mine = lane < present, bad = mine && unsigned(page) >= unsigned(p.pages);
            if (bad) page = p.pages; // out of bounds: TMA reads nothing and writes zeros
            int next_page, next_slot;
            find(start + BLOCK_TOKENS, next_page, next_slot);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Each consumer reads one half of the buffer as values. The other consumer's half is loaded second,
                // because this half is freed last. The rotary tile is freed together with this half, because the other
                // consumer reads the probabilities from the rotary tile.
                const int half = i ^ buffer;
                mbarrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                // Set the flag only after this wait: until then the consumers may still read the same entry of `bad`
                // for an earlier sequence.
                if (i == 1 && bad) shared.bad[visited % VISITS] = visited;
                __syncwarp();
                for (int j = 0; j < 4 + i; ++j) {
                    const int tile = j == 4 ? ROTARY_TILE : half * 4 + j;
                    const unsigned full = shared_address(&shared.full[buffer][tile]);
                    if (lane == 0) mbarrier_arrive_expect_tx(full, present * box * COLUMNS * 2);
                    __syncwarp();
                    if (mine)
                        tma_load(key_tile(queries, buffer, tile) + lane * box * COLUMNS * 2, params.map, tile * COLUMNS,
                                 kv_head, slot, page, full);
                }
            }
            page = next_page, slot = next_slot;
        }
    }
}
