// The loading warpgroup of attend_wgmma for a 16-bit cache by pages, which TMA copies.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

// By TMA: warp 0 brings the keys, the others the queries.
template <typename T>
__device__ __forceinline__ void load_tiles(const WgmmaParams& params, WgmmaShared& shared, unsigned queries) {
    const Params& p = params.p;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    const Part part(p, blockIdx.z);
    if (warp == 0) {
        const int box = params.box_tokens, boxes = BLOCK_TOKENS / box;
        int count = 0, used = 0;
        for (int sequence = part.first; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            if (visit.begin < visit.end) ++count;
            const int* table = p.block_table + sequence * p.table_stride;
            // Lane i brings the i-th box of tokens.
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
                const int brought = (min(visit.end - start, BLOCK_TOKENS) + box - 1) / box;
                const bool mine = lane < brought, bad = mine && unsigned(page) >= unsigned(p.pages);
                if (bad) page = p.pages; // outside: zeros come, nothing is read
                int next_page, next_slot;
                find(start + BLOCK_TOKENS, next_page, next_slot);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    // The half that the other warpgroup reads has the weights beside it, and is free last.
                    const int half = i ^ buffer;
                    barrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                    // Not before: the result of the visit VISITS ago might not be known yet.
                    if (i == 1 && bad) shared.bad[count % VISITS] = count;
                    __syncwarp();
                    for (int j = 0; j < 4 + i; ++j) {
                        const int tile = j == 4 ? ROTARY : half * 4 + j;
                        const unsigned full = shared_address(&shared.full[buffer][tile]);
                        if (lane == 0) barrier_expect(full, brought * box * COLUMNS * 2);
                        __syncwarp();
                        if (mine)
                            copy_tile(key_tile(queries, buffer, tile) + lane * box * COLUMNS * 2, params.map,
                                      tile * COLUMNS, kv_head, slot, page, full);
                    }
                }
                page = next_page, slot = next_slot;
            }
        }
    } else {
        int visited = 0;
        for (int sequence = part.first; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            if (visit.begin >= visit.end) continue;
            barrier_wait(shared_address(&shared.queries_empty), ++visited);
            load_queries<T, WARPGROUP / 32 - 1>(p, visit, queries, warp - 1);
            copies_wait<0>();
            publish_shared();
            barrier_arrive(shared_address(&shared.queries_full));
        }
    }
}
