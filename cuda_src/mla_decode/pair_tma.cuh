// The loading warpgroup of attend_pair for a 16-bit cache by pages: each block of the pair has TMA copy every second tile of
// 64 columns to both.
#pragma once
#include "mla_decode/pair_shared.cuh"
#include "mla_decode/wgmma_tma.cuh"

// Warp 0 has the keys copied, the others load the queries.
template <typename T, int CLUSTER>
__device__ __forceinline__ void load_tiles_of_pair(const WgmmaParams& params, WgmmaShared& shared, unsigned queries,
                                                   unsigned rank) {
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
                // As in load_tiles: the half of the other warpgroup and the rotary part come second.
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
                    // The rotary part is the fifth: the blocks take it in turn.
                    const bool own = ((j == 4 ? used : j) & (CLUSTER - 1)) == rank;
                    if (mine && own)
                        tma_load_multicast<EVICT_FIRST>((1 << CLUSTER) - 1,
                                                        key_tile(queries, buffer, tile) + lane * box * COLUMNS * 2,
                                                        params.map, tile * COLUMNS, kv_head, slot, page, full);
                }
            }
            page = next_page, slot = next_slot;
        }
    }
}
