// Convert the tokens of an 8-bit cache to the dtype of the queries, in the producer warpgroup of attend_wgmma.
//
// A warp converts 16 tokens of each tile. A lane converts 16 elements of every second token in one half of the value
// columns, then in the other half. Neighbouring groups of four lanes write rows in different banks. The bytes of a half
// are loaded into registers while the consumers still read the buffer to refill. The tokens two tiles ahead are
// prefetched into L2.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/wgmma_tokens.cuh"

struct ConvertShared : WgmmaShared {
    unsigned long long addresses[4][BLOCK_TOKENS]; // [tile % 4][token]: address, MISSING or OUTSIDE
    unsigned long long scales[4][BLOCK_TOKENS];    // [tile % 4][token]: one byte each, if PAGED
};

template <int BYTES> struct ConverterLane {
    static constexpr bool PAGED = BYTES == BYTES_OF_512; // tokens of 584 bytes (parts.cuh)
    static constexpr int WARPS = WARPGROUP / 32, TOKENS = BLOCK_TOKENS / WARPS;
    static constexpr int HALF_VECTORS = TOKENS / 2;   // 16-byte registers for half of the columns
    static constexpr int ROTARY_VECTORS = TOKENS / 4; // for the rotary part
    static constexpr int LATENT_DIMS = 512, SCALES = 4;
    static constexpr int PREFETCHED_BYTES = PAGED ? PAGED_BYTES : BYTES;
    static constexpr unsigned long long MISSING = 0, OUTSIDE = 1; // values instead of an address

    int warp, lane, odd;     // odd: 1 if the lane converts the odd tokens
    int first, lookup_token; // the warp's first token, and the token whose address the lane finds
    unsigned latent_offset;  // of the lane's elements in a token
    unsigned rotary_offset;  // of the lane's rotary elements in a token
    unsigned tile_offset;    // of the lane's elements in a half of the tile, for its first token
};

__device__ __forceinline__ unsigned long long& address_of(ConvertShared& shared, int tile, int token) {
    return shared.addresses[tile & 3][token];
}

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

// Load a scale of token `lookup_token`. Lanes 0 to 15 load the scale of the first 128 columns of a half, and lanes 16
// to 31 load the scale of the other 128 columns.
template <int BYTES>
__device__ __forceinline__ float load_scale(ConvertShared& shared, const ConverterLane<BYTES>& c, int tile, int half) {
    const unsigned long long address = address_of(shared, tile, c.lookup_token);
    float scale = 0.f;
    if (address > c.OUTSIDE)
        scale = __ldg(reinterpret_cast<const float*>(address + c.LATENT_DIMS) + half * 2 + c.lane / 16);
    return scale;
}

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

// `scale` is this lane's result of `load_scale`; a shuffle fetches the token's scale from the lane that has it.
template <typename T, int BYTES>
__device__ __forceinline__ void store_latent(unsigned queries, const ConverterLane<BYTES>& c, int buffer, int half,
                                             int i, const uint4& raw, float scale) {
    store_scaled<T>(queries, c, buffer, half, i, raw, __shfl_sync(FULL_WARP, scale, 2 * i + c.odd + (c.lane & 16)));
}

// Each tile of 64 columns has its own scale.
template <typename T, int BYTES>
__device__ __forceinline__ void store_paged(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                                            int tile, int half, int i, const uint4& raw) {
    const unsigned long long* const scales = &shared.scales[tile & 3][c.first + 2 * i + c.odd];
    const unsigned scale = reinterpret_cast<const unsigned char*>(scales)[half * 4 + c.lane / 8];
    // In the second half, the last eight lanes have the rotary part, which has no scale.
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

// Convert the half that the buffer's own consumer reads as values. Refill `raw` with the other half.
template <typename T, int BYTES>
__device__ __forceinline__ void
convert_first_half(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                   uint4 (&raw)[ConverterLane<BYTES>::HALF_VECTORS], float& scale, int tile_count) {
    const int buffer = tile_count & 1;
    const float next_scale = load_scale(shared, c, tile_count, 1 - buffer);
#pragma unroll
    for (int i = 0; i < c.HALF_VECTORS; ++i) {
        store_latent<T>(queries, c, buffer, buffer, i, raw[i], scale);
        raw[i] = load_latent(shared, c, tile_count, 1 - buffer, i);
    }
    scale = next_scale;
}

// Convert the half that the other consumer reads as values, and the rotary part. Refill `raw` with the half of the next
// tile that is converted first.
template <typename T, int BYTES>
__device__ __forceinline__ void
convert_second_half(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                    uint4 (&raw)[ConverterLane<BYTES>::HALF_VECTORS], float& scale, int tile_count) {
    const int buffer = tile_count & 1;
    const float next_scale = load_scale(shared, c, tile_count + 1, 1 - buffer);
#pragma unroll
    for (int i = 0; i < c.HALF_VECTORS; ++i) {
        store_latent<T>(queries, c, buffer, 1 - buffer, i, raw[i], scale);
        if (i < c.ROTARY_VECTORS)
            raw[i] = load_rotary(shared, c, tile_count, i);
        else
            raw[i] = load_latent(shared, c, tile_count + 1, 1 - buffer, i);
    }
    scale = next_scale;
#pragma unroll
    for (int i = 0; i < c.ROTARY_VECTORS; ++i) {
        store_rotary<T>(queries, c, buffer, i, raw[i]);
        raw[i] = load_latent(shared, c, tile_count + 1, 1 - buffer, i);
    }
}

// With PAGED: convert a half of the value columns, and if `half` is 1, also the rotary part. Refill `raw` with half
// `1 - buffer` of tile `next`.
template <typename T, int BYTES>
__device__ __forceinline__ void
convert_paged_half(ConvertShared& shared, unsigned queries, const ConverterLane<BYTES>& c,
                   uint4 (&raw)[ConverterLane<BYTES>::HALF_VECTORS], int tile_count, int half, int next) {
    const int buffer = tile_count & 1;
    const bool has_rotary = half == 1;
#pragma unroll
    for (int i = 0; i < c.HALF_VECTORS; ++i) {
        store_paged<T>(shared, queries, c, tile_count, half, i, raw[i]);
        if (i < c.ROTARY_VECTORS && has_rotary)
            raw[i] = load_rotary(shared, c, tile_count, i);
        else
            raw[i] = load_latent(shared, c, next, 1 - buffer, i);
    }
    if (!has_rotary) return;
#pragma unroll
    for (int i = 0; i < c.ROTARY_VECTORS; ++i) {
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
    const SmPart sm_part(p, blockIdx.z);
    TileCursor<GATHER, EXTRA> cursor(p, sm_part);
    const int first = warp * C::TOKENS, lookup_token = first + lane % C::TOKENS;
    const C c{warp,
              lane,
              odd,
              first,
              lookup_token,
              unsigned(quarter * 64 + lane % 4 * 16),
              unsigned((C::PAGED ? PAGED_LATENT : C::LATENT_DIMS + C::SCALES * 4) + lane % 8 * 16),
              unsigned(quarter * TILE_BYTES + (first + odd) * COLUMNS * 2 + ((lane % 4 * 2) ^ odd) * 16)};
    Entry entry; // in the first tile that is not yet in `addresses`
    auto look_up = [&] {
        entry = cursor.entry(c.lookup_token);
        cursor.advance();
    };
    auto find = [&](int tile) {
        TokenAddresses token;
        if constexpr (EXTRA)
            token.template find_extra<true, BYTES>(p, entry);
        else
            token.template find<true, GATHER>(p, entry);
        if (c.lane < C::TOKENS) {
            unsigned long long address = token.bad ? C::OUTSIDE : C::MISSING;
            if (token.valid_lanes >> c.lane & 1) address = reinterpret_cast<unsigned long long>(token.from);
            address_of(shared, tile, c.lookup_token) = address;
            if constexpr (C::PAGED) {
                unsigned long long& scales = shared.scales[tile & 3][c.lookup_token];
                if (token.valid_lanes >> c.lane & 1)
                    copy_async_8(shared_address(&scales), token.scales);
                else
                    scales = 0;
            }
        }
        __syncwarp();
        if constexpr (C::PAGED) cp_async_commit_group();
        token.template prefetch<C::TOKENS, C::PREFETCHED_BYTES>();
        look_up();
    };

    uint4 raw[C::HALF_VECTORS];
    look_up();
    find(0);
    float scale = C::PAGED ? 0.f : load_scale(shared, c, 0, 0);
#pragma unroll
    for (int i = 0; i < C::HALF_VECTORS; ++i) raw[i] = load_latent(shared, c, 0, 0, i);
    find(1);
    int tile_count = 0, split_count = 0;
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const SplitOf<EXTRA> split(p, reload_sm_part<EXTRA>(p, sm_part), sequence);
        if (split.begin >= split.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++split_count);
        load_queries<T, C::WARPS, C::PAGED ? VALUE_TILES : TILES>(p, split, queries, c.warp);
        const int before = tile_count, tiles = ceil_div(split.end - split.begin, BLOCK_TOKENS);
        for (; tile_count < before + tiles; ++tile_count) {
            const int buffer = tile_count & 1, phase = tile_count / 2 + 1;
            find(tile_count + 2);
            mbarrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
            const unsigned long long address = address_of(shared, tile_count, c.lookup_token);
            if constexpr (GATHER) {
                const unsigned valid_lanes = __ballot_sync(FULL_WARP, address > C::OUTSIDE);
                if (c.lane == 0) reinterpret_cast<unsigned short*>(&shared.valid[buffer])[c.warp] = valid_lanes;
            }
            if (address == C::OUTSIDE) shared.bad[split_count % BAD_FLAGS] = split_count;
            if constexpr (C::PAGED) {
                cp_async_wait_group<2>(); // all copies except the scales of the next two tiles
                __syncwarp();
            }
            if constexpr (C::PAGED)
                convert_paged_half<T>(shared, queries, c, raw, tile_count, buffer, tile_count);
            else
                convert_first_half<T>(shared, queries, c, raw, scale, tile_count);
            if (tile_count == before) publish_queries<0>(shared);
            publish_keys(shared_address(&shared.full[buffer][buffer]));

            mbarrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
            if constexpr (C::PAGED)
                convert_paged_half<T>(shared, queries, c, raw, tile_count, 1 - buffer, tile_count + 1);
            else
                convert_second_half<T>(shared, queries, c, raw, scale, tile_count);
            publish_keys(shared_address(&shared.full[buffer][1 - buffer]));
        }
    }
}
