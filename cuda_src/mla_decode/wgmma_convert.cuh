// The producer warpgroup of attend_wgmma for an 8-bit cache, addressed by block table or by `indices`. The producer
// converts the tokens to the 16-bit dtype of the queries.
//
// A warp converts 16 tokens of each tile: first one half of their value columns, then the other half. In each half a
// lane converts 16 elements of every second token. Four lanes write the 64 columns of one row of a tile in shared
// memory. The next four lanes write the row of the next token, whose chunks are in other banks. The bytes of a half are
// loaded into registers while the consumers still read the previous contents of its buffer in shared memory. The tokens
// two tiles ahead are prefetched into L2.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/wgmma_tokens.cuh"

// The shared memory of the converting warps.
struct ConvertShared : WgmmaShared {
    unsigned long long addresses[4][BLOCK_TOKENS]; // [tile % 4][token]: address, MISSING or OUTSIDE
    unsigned long long scales[4][BLOCK_TOKENS];    // [tile % 4][token]: 8 one-byte scales, if PAGED
};

// A lane's share of the conversion.
template <int BYTES> struct ConverterLane {
    static constexpr bool PAGED = BYTES == BYTES_OF_512; // tokens of 584 bytes, in pages with two areas (parts.cuh)
    static constexpr int WARPS = WARPGROUP / 32, TOKENS = BLOCK_TOKENS / WARPS;
    static constexpr int HELD = TOKENS / 2;     // registers of 16 bytes for one half of the columns of the tokens
    static constexpr int ROTARIES = TOKENS / 4; // registers of 16 bytes for the rotary part
    static constexpr int LATENT_DIMS = 512, SCALES = 4;
    static constexpr int FETCHED = PAGED ? PAGED_BYTES : BYTES;   // contiguous bytes of a token
    static constexpr unsigned long long MISSING = 0, OUTSIDE = 1; // values instead of an address

    int warp, lane, odd;    // odd: 1 if the lane converts the odd tokens
    int first, own;         // first token of the warp, and the token whose address the lane finds
    unsigned latent_offset; // offset of the lane's elements in a token
    unsigned rotary_offset; // offset of the lane's rotary elements in a token
    unsigned tile_offset;   // offset of the lane's elements in the tiles of a half, for its first token
};

__device__ __forceinline__ unsigned long long& address_of(ConvertShared& shared, int tile, int token) {
    return shared.addresses[tile & 3][token];
}

// Load 16 bytes of a token. Return zeros if the token does not exist.
__device__ __forceinline__ uint4 load_bytes(unsigned long long address, unsigned offset) {
    return load_or_zero(reinterpret_cast<const char*>(address + offset), address > ConverterLane<0>::OUTSIDE);
}

template <int BYTES>
__device__ __forceinline__ uint4 load_latent(ConvertShared& shared, const ConverterLane<BYTES>& c, int tile,
                                             unsigned half, int i) {
    return load_bytes(address_of(shared, tile, c.first + 2 * i + c.odd), c.latent_offset + half * 256);
}

template <int BYTES>
__device__ __forceinline__ uint4 load_rotary(ConvertShared& shared, const ConverterLane<BYTES>& c, int tile, int i) {
    const unsigned long long address = address_of(shared, tile, c.first + 4 * i + c.lane / 8);
    return load_bytes(address, c.PAGED ? PAGED_LATENT + c.lane % 8 * 16 : c.rotary_offset);
}

// Load a scale of the token whose address this lane finds. Lanes 0 to 15 load the scale of the first 128 columns of a
// half, lanes 16 to 31 the scale of the other 128.
template <int BYTES>
__device__ __forceinline__ float load_scale(ConvertShared& shared, const ConverterLane<BYTES>& c, int tile, int half) {
    const unsigned long long address = address_of(shared, tile, c.own);
    float scale = 0.f;
    if (address > c.OUTSIDE)
        scale = __ldg(reinterpret_cast<const float*>(address + c.LATENT_DIMS) + half * 2 + c.lane / 16);
    return scale;
}

// Convert 16 elements, multiply them by their scale, and store them.
template <typename T, int BYTES>
__device__ __forceinline__ void store_scaled(unsigned queries, const ConverterLane<BYTES>& c, int buffer, int half,
                                             int i, const uint4& raw, float scale) {
    const unsigned fours[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned scaled[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        unsigned halves[2];
        to_halves<__nv_fp8_e4m3>(halves, fours[k]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves[h]));
            scaled[k * 2 + h] = pack<T>(both.x * scale, both.y * scale);
        }
    }
    const unsigned to =
        ((key_tile(queries, buffer, half * 4) + c.tile_offset) ^ (2 * i % 8 * 16)) + 2 * i * COLUMNS * 2;
    store_shared(to, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
    store_shared(to ^ 16, make_uint4(scaled[4], scaled[5], scaled[6], scaled[7]));
}

// Convert and store 16 elements of the lane's i-th token. Each lane passes its result of `load_scale`, and a shuffle
// fetches the scale of the token.
template <typename T, int BYTES>
__device__ __forceinline__ void store_latent(unsigned queries, const ConverterLane<BYTES>& c, int buffer, int half,
                                             int i, const uint4& raw, float scale) {
    store_scaled<T>(queries, c, buffer, half, i, raw, __shfl_sync(FULL_WARP, scale, 2 * i + c.odd + (c.lane & 16)));
}

// Convert and store 16 elements of the lane's i-th token if PAGED. Each tile of 64 columns has its own scale.
template <typename T, int BYTES>
__device__ __forceinline__ void store_paged(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                                            int tile, int half, int i, const uint4& raw) {
    const unsigned long long* const scales = &shared.scales[tile & 3][c.first + 2 * i + c.odd];
    const unsigned scale = reinterpret_cast<const unsigned char*>(scales)[half * 4 + c.lane / 8];
    // In the second half the columns of the last eight lanes are the rotary part.
    if (half == 0 || c.lane < 24) store_scaled<T>(queries, c, tile & 1, half, i, raw, of_e8m0(scale));
}

template <typename T, int BYTES>
__device__ __forceinline__ void store_rotary(unsigned queries, const ConverterLane<BYTES>& c, int buffer, int i,
                                             const uint4& raw) {
    const int t = 4 * i + c.lane / 8;
    uint4 eight = raw;
    if constexpr (!IS_BFLOAT16<T>) {
        auto half_of = [](unsigned pair) {
            return pack<T>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
        };
        eight = make_uint4(half_of(eight.x), half_of(eight.y), half_of(eight.z), half_of(eight.w));
    }
    constexpr int TILE = BYTES == BYTES_OF_512 ? VALUE_TILES - 1 : ROTARY_TILE;
    store_shared(key_tile(queries, buffer, TILE) + (c.first + t) * COLUMNS * 2 + ((c.lane ^ t) & 7) * 16, eight);
}

// Convert the half of a tile that the consumer of its buffer reads as values, from `raw`. Refill `raw` with the bytes
// of the other half.
template <typename T, int BYTES>
__device__ __forceinline__ void convert_first_half(ConvertShared& shared, unsigned queries,
                                                   const ConverterLane<BYTES>& c,
                                                   uint4 (&raw)[ConverterLane<BYTES>::HELD], float& scale, int used) {
    const int buffer = used & 1;
    const float next_scale = load_scale(shared, c, used, 1 - buffer);
#pragma unroll
    for (int i = 0; i < c.HELD; ++i) {
        store_latent<T>(queries, c, buffer, buffer, i, raw[i], scale);
        raw[i] = load_latent(shared, c, used, 1 - buffer, i);
    }
    scale = next_scale;
}

// Convert the half of the tile that `convert_first_half` left, and the rotary part. Refill `raw` with the first half of
// the next tile.
template <typename T, int BYTES>
__device__ __forceinline__ void convert_second_half(ConvertShared& shared, unsigned queries,
                                                    const ConverterLane<BYTES>& c,
                                                    uint4 (&raw)[ConverterLane<BYTES>::HELD], float& scale, int used) {
    const int buffer = used & 1;
    const float next_scale = load_scale(shared, c, used + 1, 1 - buffer);
#pragma unroll
    for (int i = 0; i < c.HELD; ++i) {
        store_latent<T>(queries, c, buffer, 1 - buffer, i, raw[i], scale);
        if (i < c.ROTARIES)
            raw[i] = load_rotary(shared, c, used, i);
        else
            raw[i] = load_latent(shared, c, used + 1, 1 - buffer, i);
    }
    scale = next_scale;
#pragma unroll
    for (int i = 0; i < c.ROTARIES; ++i) {
        store_rotary<T>(queries, c, buffer, i, raw[i]);
        raw[i] = load_latent(shared, c, used + 1, 1 - buffer, i);
    }
}

// Only if PAGED: convert half `half` of tile `used`, and the rotary part if `half` is 1. Refill `raw` with half `1 -
// (used & 1)` of tile `next`.
template <typename T, int BYTES>
__device__ __forceinline__ void
convert_paged_half(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                   uint4 (&raw)[ConverterLane<BYTES>::HELD], int used, int half, int next) {
    const int buffer = used & 1;
    const bool has_rotary = half == 1;
#pragma unroll
    for (int i = 0; i < c.HELD; ++i) {
        store_paged<T>(shared, queries, c, used, half, i, raw[i]);
        if (i < c.ROTARIES && has_rotary)
            raw[i] = load_rotary(shared, c, used, i);
        else
            raw[i] = load_latent(shared, c, next, 1 - buffer, i);
    }
    if (!has_rotary) return;
#pragma unroll
    for (int i = 0; i < c.ROTARIES; ++i) {
        store_rotary<T>(queries, c, buffer, i, raw[i]);
        raw[i] = load_latent(shared, c, next, 1 - buffer, i);
    }
}

template <typename T, bool GATHER, bool EXTRA, int BYTES>
__device__ __forceinline__ void convert_tiles(const Params& p, WgmmaShared& all, unsigned queries) {
    ConvertShared& shared = static_cast<ConvertShared&>(all);
    using C = ConverterLane<BYTES>;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int odd = lane / 4 % 2, quarter = lane / 8;
    const Part part(p, blockIdx.z);
    TileCursor<GATHER, EXTRA> cursor(p, part);
    // Lanes i and i + 16 look up the address of the warp's i-th token.
    const int first = warp * C::TOKENS, own = first + lane % C::TOKENS;
    const C c{warp,
              lane,
              odd,
              first,
              own,
              unsigned(quarter * 64 + lane % 4 * 16),
              unsigned((C::PAGED ? PAGED_LATENT : C::LATENT_DIMS + C::SCALES * 4) + lane % 8 * 16),
              unsigned(quarter * TILE_BYTES + (first + odd) * COLUMNS * 2 + ((lane % 4 * 2) ^ odd) * 16)};
    Entry entry; // entry of this lane's token in the first tile that is not yet in `addresses`
    auto look_up = [&] {
        entry = cursor.entry(c.own);
        cursor.advance();
    };
    auto find = [&](int tile) {
        Found found;
        if constexpr (EXTRA)
            found.template find_extra<true, BYTES>(p, entry);
        else
            found.template find<true, GATHER>(p, entry);
        if (c.lane < C::TOKENS) {
            unsigned long long address = found.bad ? C::OUTSIDE : C::MISSING;
            if (found.there >> c.lane & 1) address = reinterpret_cast<unsigned long long>(found.from);
            address_of(shared, tile, c.own) = address;
            if constexpr (C::PAGED) {
                unsigned long long& scales = shared.scales[tile & 3][c.own];
                if (found.there >> c.lane & 1)
                    copy_async_8(shared_address(&scales), found.scales);
                else
                    scales = 0;
            }
        }
        __syncwarp();
        if constexpr (C::PAGED) cp_async_commit_group();
        found.template prefetch<C::TOKENS, C::FETCHED>();
        look_up();
    };

    uint4 raw[C::HELD];
    look_up();
    find(0);
    float scale = C::PAGED ? 0.f : load_scale(shared, c, 0, 0);
#pragma unroll
    for (int i = 0; i < C::HELD; ++i) raw[i] = load_latent(shared, c, 0, 0, i);
    find(1);
    int used = 0, visited = 0; // tiles so far; sequences with tiles so far
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const VisitOf<EXTRA> visit(p, part_again<EXTRA>(p, part), sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, C::WARPS, C::PAGED ? VALUE_TILES : TILES>(p, visit, queries, c.warp);
        const int before = used, tiles = ceil_div(visit.end - visit.begin, BLOCK_TOKENS);
        for (; used < before + tiles; ++used) {
            const int buffer = used & 1, phase = used / 2 + 1;
            find(used + 2);
            mbarrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
            const unsigned long long address = address_of(shared, used, c.own);
            if constexpr (GATHER) {
                const unsigned there = __ballot_sync(FULL_WARP, address > C::OUTSIDE);
                if (c.lane == 0) reinterpret_cast<unsigned short*>(&shared.valid[buffer])[c.warp] = there;
            }
            if (address == C::OUTSIDE) shared.bad[visited % VISITS] = visited;
            if constexpr (C::PAGED) {
                cp_async_wait_group<2>(); // all copies are complete except the scales of the next two tiles
                __syncwarp();
            }
            if constexpr (C::PAGED)
                convert_paged_half<T>(shared, queries, c, raw, used, buffer, used);
            else
                convert_first_half<T>(shared, queries, c, raw, scale, used);
            if (used == before) publish_queries<0>(shared);
            publish_keys(shared_address(&shared.full[buffer][buffer]));

            mbarrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
            if constexpr (C::PAGED)
                convert_paged_half<T>(shared, queries, c, raw, used, 1 - buffer, used + 1);
            else
                convert_second_half<T>(shared, queries, c, raw, scale, used);
            publish_keys(shared_address(&shared.full[buffer][1 - buffer]));
        }
    }
}
