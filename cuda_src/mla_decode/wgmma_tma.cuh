// Load the tokens of a 16-bit cache in pages with TMA, in the producer warpgroup of attend_wgmma.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

template <typename T>
__device__ __forceinline__ void load_queries_of_splits(const Params& p, const SmPart& sm_part, WgmmaShared& shared,
                                                       unsigned queries, int warp) {
    int split_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const Split split(p, sm_part, sequence);
        if (split.begin >= split.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++split_count);
        load_queries<T, WARPGROUP / 32 - 1, TILES>(p, split, queries, warp - 1);
        publish_queries<0>(shared);
    }
}

// Warp 0 issues the TMA copies of the keys, and the other warps load the queries.
template <typename T>
__device__ __forceinline__ void load_tiles(const WgmmaParams& params, WgmmaShared& shared, unsigned queries) {
    const Params& p = params.p;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    const SmPart sm_part(p, blockIdx.z);
    if (warp > 0) {
        load_queries_of_splits<T>(p, sm_part, shared, queries, warp);
        return;
    }
    const int box = params.box_tokens, boxes = BLOCK_TOKENS / box;
    int split_count = 0, tile_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const Split split(p, sm_part, sequence);
        if (split.begin < split.end) ++split_count;
        const int* table = p.block_table + sequence * p.table_stride;
        // Find the page and the slot of the lane's TMA box in the tile that begins at token `start`.
        auto find = [&](int start, int& page, int& slot) {
            const int token = start + lane * box;
            page = -1, slot = 0;
            if (lane < boxes && token < split.end) {
                const int index = token / p.page_size;
                page = table[index], slot = token - index * p.page_size;
            }
        };
        int page, slot;
        find(split.begin, page, slot);
        for (int start = split.begin; start < split.end; start += BLOCK_TOKENS, ++tile_count) {
            const int buffer = tile_count & 1, phase = tile_count / 2 + 1;
            const int present = (min(split.end - start, BLOCK_TOKENS) + box - 1) / box; // boxes in the tile
            const bool mine = lane < present, bad = mine && unsigned(page) >= unsigned(p.pages);
            if (bad) page = p.pages; // out of bounds: TMA writes zeros
            int next_page, next_slot;
            find(start + BLOCK_TOKENS, next_page, next_slot);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // The second half to load is the half that the other consumer reads as values. It is freed last,
                // together with the rotary tile, which holds the probabilities.
                const int half = i ^ buffer;
                mbarrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                // Set the flag after this wait: until then the consumers may read it for an earlier sequence.
                if (i == 1 && bad) shared.bad[split_count % BAD_FLAGS] = split_count;
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
