// The loading warpgroup of attend_wgmma for a 16-bit cache by pages, which TMA copies.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

// The queries of all visits, by three warps.
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

// Warp 0 has the keys copied, the others load the queries.
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
    int visited = 0, used = 0; // visits with tiles, and tiles
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin < visit.end) ++visited;
        const int* table = p.block_table + sequence * p.table_stride;
        // Lane i has the i-th box of the tokens from `start` on.
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
            const int present = (min(visit.end - start, BLOCK_TOKENS) + box - 1) / box; // boxes
            const bool mine = lane < present, bad = mine && unsigned(page) >= unsigned(p.pages);
            if (bad) page = p.pages; // outside of the map: TMA reads nothing and writes zeros
            int next_page, next_slot;
            find(start + BLOCK_TOKENS, next_page, next_slot);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // The half that the other warpgroup reads comes second: it is free last, like the rotary tile, where the
                // probabilities are.
                const int half = i ^ buffer;
                mbarrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                // Only now: before, the visit VISITS ago may still be about to read its flag.
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
