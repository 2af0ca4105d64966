// The loading warpgroup of attend_wgmma for an 8-bit cache, which it converts to 16 bits.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/wgmma_tokens.cuh"

// Of an 8-bit cache, by page or by index: a warp converts 16 tokens of each tile, half after half. A lane has 16 numbers
// of every second token: four lanes the 64 columns of a tile in shared memory, the next four those of the next token,
// whose chunks are in other banks. Registers hold the bytes of the next half while its place is in use; the tokens two
// tiles on are on their way to the L2 cache.
template <typename T, bool GATHER>
__device__ __forceinline__ void convert_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    constexpr int WARPS = WARPGROUP / 32, TOKENS = BLOCK_TOKENS / WARPS, HELD = TOKENS / 2, ROTARIES = TOKENS / 4;
    constexpr int LATENT = 512, SCALES = 4, SLOT = 656;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int odd = lane / 4 % 2, quarter = lane / 8;
    const Part part(p, blockIdx.z);
    Ahead<GATHER> ahead(p, part);
    // Lanes i and i + 16 look after the warp's i-th token.
    const int first = warp * TOKENS, own = first + lane % TOKENS;
    constexpr unsigned long long MISSING = 0, OUTSIDE = 1;
    auto place_of = [&](int tile, int token) -> unsigned long long& { return shared.tokens[tile & 3][token]; };
    Entry entry; // of the tile after those that are found
    auto look_up = [&] {
        entry = ahead.entry(own);
        ahead.advance();
    };
    auto find = [&](int tile) {
        Found found;
        found.template find<true, GATHER>(p, entry);
        if (lane < TOKENS) {
            unsigned long long place = found.bad ? OUTSIDE : MISSING;
            if (found.there >> lane & 1) place = reinterpret_cast<unsigned long long>(found.from);
            place_of(tile, own) = place;
        }
        __syncwarp();
        found.bring<TOKENS, SLOT>();
        look_up();
    };

    uint4 raw[HELD];
    float scale, next_scale; // of lane % 16's token, for columns 128 (lane / 16) ... of the half
    const unsigned latent_from = quarter * 64 + lane % 4 * 16, rotary_from = LATENT + SCALES * 4 + lane % 8 * 16;
    auto load = [&](unsigned long long place, unsigned offset) {
        return load_or_zero(reinterpret_cast<const char*>(place + offset), place > OUTSIDE);
    };
    auto load_latent = [&](int tile, unsigned half, int i) {
        raw[i] = load(place_of(tile, first + 2 * i + odd), latent_from + half * 256);
    };
    auto load_rotary = [&](int tile, int i) { raw[i] = load(place_of(tile, first + 4 * i + lane / 8), rotary_from); };
    auto load_scale = [&](int tile, int half) {
        const unsigned long long place = place_of(tile, own);
        next_scale = 0.f;
        if (place > OUTSIDE) next_scale = __ldg(reinterpret_cast<const float*>(place + LATENT) + half * 2 + lane / 16);
    };
    const unsigned latent_at = quarter * TILE_BYTES + (first + odd) * COLUMNS * 2 + ((lane % 4 * 2) ^ odd) * 16;
    auto store_latent = [&](int buffer, int half, int i) {
        const float its = __shfl_sync(FULL_WARP, scale, 2 * i + odd + (lane & 16));
        const unsigned fours[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        unsigned scaled[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unsigned halves[2];
            to_halves<__nv_fp8_e4m3>(halves, fours[k]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves[h]));
                scaled[k * 2 + h] = pack<T>(both.x * its, both.y * its);
            }
        }
        const unsigned to =
            ((key_tile(queries, buffer, half * 4) + latent_at) ^ (2 * i % 8 * 16)) + 2 * i * COLUMNS * 2;
        store_shared(to, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
        store_shared(to ^ 16, make_uint4(scaled[4], scaled[5], scaled[6], scaled[7]));
    };
    auto store_rotary = [&](int buffer, int i) {
        const int t = 4 * i + lane / 8;
        uint4 eight = raw[i];
        if constexpr (!IS_BFLOAT16<T>) {
            auto half_of = [](unsigned pair) {
                return pack<T>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
            };
            eight = make_uint4(half_of(eight.x), half_of(eight.y), half_of(eight.z), half_of(eight.w));
        }
        store_shared(key_tile(queries, buffer, ROTARY) + (first + t) * COLUMNS * 2 + ((lane ^ t) & 7) * 16, eight);
    };

    look_up();
    find(0);
    load_scale(0, 0);
    scale = next_scale;
#pragma unroll
    for (int i = 0; i < HELD; ++i) load_latent(0, 0, i);
    find(1);
    int used = 0, visited = 0;
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        barrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPS>(p, visit, queries, warp);
        const int before = used, tiles = ceil_div(visit.end - visit.begin, BLOCK_TOKENS);
        for (; used < before + tiles; ++used) {
            // First the half that the warpgroup of this buffer has.
            const int buffer = used & 1, phase = used / 2 + 1;
            find(used + 2);
            barrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
            const unsigned long long its = place_of(used, own);
            if constexpr (GATHER) {
                const unsigned there = __ballot_sync(FULL_WARP, its > OUTSIDE);
                if (lane == 0) reinterpret_cast<unsigned short*>(&shared.valid[buffer])[warp] = there;
            }
            if (its == OUTSIDE) shared.bad[visited % VISITS] = visited;
            load_scale(used, 1 - buffer);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                store_latent(buffer, buffer, i);
                load_latent(used, 1 - buffer, i);
            }
            scale = next_scale;
            if (used == before) {
                copies_wait<0>();
                publish_shared();
                barrier_arrive(shared_address(&shared.queries_full));
            }
            arrive_published(shared_address(&shared.full[buffer][buffer]));

            barrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
            load_scale(used + 1, 1 - buffer);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                store_latent(buffer, 1 - buffer, i);
                if (i < ROTARIES)
                    load_rotary(used, i);
                else
                    load_latent(used + 1, 1 - buffer, i);
            }
            scale = next_scale;
#pragma unroll
            for (int i = 0; i < ROTARIES; ++i) {
                store_rotary(buffer, i);
                load_latent(used + 1, 1 - buffer, i);
            }
            arrive_published(shared_address(&shared.full[buffer][1 - buffer]));
        }
    }
}
