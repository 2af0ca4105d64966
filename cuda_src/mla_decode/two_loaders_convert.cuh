// Convert the tokens of an 8-bit cache to bfloat16, in the producer warpgroups of attend_two_loaders.
//
// A warp converts eight tokens of each tile. A lane converts 16 elements of every second token in one half of the value
// columns, then in the other half. Neighbouring groups of four lanes write rows in different banks. As soon as a half
// is converted, its registers are refilled from the next tile. The lanes look up the addresses of four tiles at once,
// four to seven tiles ahead.
//
// The producers execute no proxy fence, because it would wait for the loads of the next tile. The consumers execute it
// instead (Consumer::wait_for_keys).
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/two_loaders_shared.cuh"

// Bit of an address that marks a missing token.
constexpr unsigned long long MISSING = 1ull << 63;

// Load 16 bytes of a token, or return zeros for a missing token. The load is not ld.global.nc, because ptxas may move
// read-only loads past later barriers to the first use of their bytes.
__device__ __forceinline__ uint4 load_token(unsigned long long from) {
    uint4 value;
    asm volatile("{ .reg .pred there;\n"
                 "  setp.ge.s64 there, %4, 0;\n"
                 "  mov.u32 %0, 0;\n"
                 "  mov.u32 %1, 0;\n"
                 "  mov.u32 %2, 0;\n"
                 "  mov.u32 %3, 0;\n"
                 "  @there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void copy_token_async(unsigned to, unsigned long long from) {
    asm volatile("{ .reg .pred missing;\n"
                 "  setp.lt.s64 missing, %1, 0;\n"
                 "  cp.async.cg.shared.global.L2::128B [%0], [%2], 16, missing; }" ::"r"(to),
                 "l"(from), "l"(from & ~MISSING)
                 : "memory");
}

// The state that a warp keeps for its tokens of a tile.
struct TileRecord {
    static constexpr int NONE = -1, END = -2;

    int start; // the sequence that begins with this tile; NONE: no sequence begins; END: after the last tile
    unsigned short valid_lanes;
    unsigned short bad;
};

// The converters keep this state in shared memory, so that it occupies no registers in the mainloop.
struct ConverterShared : WgmmaShared {
    static constexpr int ADDRESS_TILES = 8,
                         LOOKUP_DISTANCE = ADDRESS_TILES / 2; // tiles with stored addresses; distance in tiles

    alignas(16) float scales[2][BLOCK_TOKENS][4];              // [tile % 2][token]
    unsigned long long addresses[ADDRESS_TILES][BLOCK_TOKENS]; // first an Entry, then the address of a token or MISSING
    TileRecord records[ADDRESS_TILES][PRODUCER_WARPS];
    TilePosition positions[LOOKUP_DISTANCE][PRODUCER_WARPS]; // the next tiles to look up
};
static_assert(sizeof(Entry) == sizeof(unsigned long long), "");

struct Converter {
    static constexpr int WARP_TOKENS = BLOCK_TOKENS / PRODUCER_WARPS; // per warp and tile
    static constexpr int LANE_TOKENS = WARP_TOKENS / 2;               // per lane and tile
    static constexpr int TILES_PER_LOOKUP = 32 / WARP_TOKENS;
    static constexpr int ADDRESS_TILES = ConverterShared::ADDRESS_TILES,
                         LOOKUP_DISTANCE = ConverterShared::LOOKUP_DISTANCE;
    static constexpr int LATENT_DIMS = 512, ROTARY_OFFSET = LATENT_DIMS + 4 * 4;
    static constexpr int ROW_BYTES = COLUMNS * 2;

    const Params& p;
    ConverterShared& shared;
    const unsigned queries;
    const unsigned warp;

    // Return the lane index. Each call reads it again, so that values derived from it occupy no registers in the
    // mainloop.
    static __device__ __forceinline__ unsigned lane() {
        unsigned lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }

    __device__ __forceinline__ unsigned first() const { return warp * WARP_TOKENS; }
    __device__ __forceinline__ unsigned long long& address(unsigned tile, unsigned i) const {
        return shared.addresses[tile % ADDRESS_TILES][first() + i];
    }
    __device__ __forceinline__ TileRecord& record(unsigned tile) const {
        return shared.records[tile % ADDRESS_TILES][warp];
    }

    // Issue the copies of the table entries of TILES_PER_LOOKUP tiles. WARP_TOKENS lanes look up one tile, and `cursor`
    // is at the tile that this lane looks up.
    template <typename Cursor> __device__ __forceinline__ void look_up(Cursor cursor, unsigned tile) const {
        const unsigned lane = Converter::lane(), which = lane / WARP_TOKENS, i = lane % WARP_TOKENS;
        Entry& entry = reinterpret_cast<Entry&>(address(tile + which, i));
        const int at = cursor.token + int(first() + i);
        int slot = -1;
        if (at < cursor.end) copy_async_4(shared_address(&entry.id), cursor.id_of(at, slot));
        entry.slot = slot;
        if (i == 0) {
            const bool starts = cursor.token == 0 || tile + which == 0;
            record(tile + which).start = cursor.end == 0 ? TileRecord::END
                                         : starts        ? cursor.sequence
                                                         : TileRecord::NONE;
        }
#pragma unroll 1
        for (int n = 0; n < TILES_PER_LOOKUP; ++n) cursor.advance();
        __syncwarp(); // all lanes have read `positions`
        if (i == 0) shared.positions[which][warp] = cursor;
    }

    // Replace the table entries of TILES_PER_LOOKUP tiles by the addresses of the tokens.
    template <bool GATHER> __device__ __forceinline__ void find(unsigned tile) const {
        const unsigned lane = Converter::lane(), which = lane / WARP_TOKENS, i = lane % WARP_TOKENS;
        unsigned long long& to = address(tile + which, i);
        const Entry entry = reinterpret_cast<const Entry&>(to);
        TokenAddresses token;
        token.template find<true, GATHER>(p, entry);
        const bool exists = token.valid_lanes >> lane & 1, wanted = entry.slot >= 0 && (!GATHER || entry.id >= 0);
        const unsigned bad = __ballot_sync(FULL_WARP, wanted && !exists);
        to = reinterpret_cast<unsigned long long>(token.from) | (exists ? 0 : MISSING);
        constexpr unsigned ALL = (1u << WARP_TOKENS) - 1;
        if (i == 0) {
            record(tile + which).valid_lanes = token.valid_lanes >> which * WARP_TOKENS & ALL;
            record(tile + which).bad = bad >> which * WARP_TOKENS & ALL;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void copy_scales(unsigned tile) const {
        const unsigned lane = Converter::lane();
        if (lane < WARP_TOKENS)
            copy_token_async(shared_address(&shared.scales[tile & 1][first() + lane]),
                             address(tile, lane) + LATENT_DIMS);
        cp_async_commit_group();
    }

    __device__ __forceinline__ void copy_rotary(unsigned tile) const {
        const unsigned lane = Converter::lane();
        const unsigned long long* const from = &address(tile, lane / 8);
        const unsigned to =
            key_tile(queries, tile & 1, ROTARY_TILE) + (first() + lane / 8) * ROW_BYTES + ((lane ^ lane / 8) & 7) * 16;
#pragma unroll
        for (int i = 0; i < WARP_TOKENS / 4; ++i)
            copy_token_async((to ^ (4 * i % 8 * 16)) + 4 * i * ROW_BYTES, from[4 * i] + ROTARY_OFFSET + lane % 8 * 16);
        cp_async_mbarrier_arrive(shared_address(&shared.full[tile & 1][ROTARY_FULL]));
        cp_async_commit_group();
    }

    // Copying one row at a time takes fewer registers than load_queries takes.
    template <typename T> __device__ __forceinline__ void copy_queries(const Split& split) const {
        const unsigned lane = Converter::lane();
#pragma unroll 1
        for (unsigned r = warp; r < WGMMA_ROWS; r += PRODUCER_WARPS) {
            const Row row(p, split, blockIdx.y, blockIdx.x * WGMMA_ROWS + r);
            const T* const from = static_cast<const T*>(p.q) + split.batch * p.q_strides[0] +
                                  row.token * p.q_strides[1] + row.head * p.q_strides[2] + lane * 8;
            const unsigned to = queries + lane / 8 * TILE_BYTES + r * ROW_BYTES + ((lane ^ r) & 7) * 16;
            copy_async_or_zero(to, from, row.valid);
            copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, row.valid);
            if (lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, row.valid);
        }
        cp_async_mbarrier_arrive(shared_address(&shared.queries_full));
    }

    template <bool GATHER>
    __device__ __forceinline__ void publish_valid_tokens(const TileRecord& record, unsigned tile,
                                                         int split_count) const {
        if (GATHER && lane() == 0) reinterpret_cast<unsigned char*>(&shared.valid[tile & 1])[warp] = record.valid_lanes;
        if (record.bad) shared.bad[split_count % BAD_FLAGS] = split_count;
    }

    __device__ __forceinline__ void load(uint4 (&raw)[LANE_TOKENS], unsigned tile, unsigned half) const {
        const unsigned lane = Converter::lane(), odd = lane / 4 % 2;
        const unsigned offset = half * 256 + lane / 8 * 64 + lane % 4 * 16;
        const unsigned long long* const from = &address(tile, odd);
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; ++i) raw[i] = load_token(from[2 * i] + offset);
    }

    // Convert eight e4m3 elements to bfloat16, multiplied by their scale.
    static __device__ __forceinline__ uint4 widen(unsigned low, unsigned high, float scale) {
        const unsigned fours[2] = {low, high};
        unsigned to[4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            unsigned halves[2];
            to_halves<__nv_fp8_e4m3>(halves, fours[k]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves[h]));
                to[k * 2 + h] = pack<__nv_bfloat16>(both.x * scale, both.y * scale);
            }
        }
        return make_uint4(to[0], to[1], to[2], to[3]);
    }

    // Convert and store this lane's share of half of a tile. Then one lane of the warp arrives at the full barrier.
    __device__ __forceinline__ void convert(const uint4 (&raw)[LANE_TOKENS], unsigned tile, unsigned half) const {
        const unsigned lane = Converter::lane(), odd = lane / 4 % 2, buffer = tile & 1;
        const unsigned to = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + (first() + odd) * ROW_BYTES +
                            ((lane % 4 * 2) ^ odd) * 16;
        const float* const scales = &shared.scales[buffer][first() + odd][half * 2 + lane / 16];
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; ++i) {
            const unsigned at = (to ^ (2 * i % 8 * 16)) + 2 * i * ROW_BYTES;
            const float scale = scales[2 * i * 4];
            store_shared(at, widen(raw[i].x, raw[i].y, scale));
            store_shared(at ^ 16, widen(raw[i].z, raw[i].w, scale));
        }
        __syncwarp();
        if (Converter::lane() == 0) mbarrier_arrive(shared_address(&shared.full[buffer][half]));
    }
};

template <typename T, bool GATHER>
__device__ __forceinline__ void convert_by_two(const Params& p, WgmmaShared& all, unsigned queries) {
    static_assert(IS_BFLOAT16<T>, "the rotary part is copied as it is");
    using C = Converter;
    using Cursor = TileCursor<GATHER, false, true>;
    ConverterShared& shared = static_cast<ConverterShared&>(all);
    const C c{p, shared, queries, unsigned(producer_warp())};
    const SmPart sm_part(p, blockIdx.z);
    Cursor cursor(p, sm_part);
#pragma unroll 1
    for (unsigned i = c.lane() / C::WARP_TOKENS; i > 0; --i) cursor.advance();
    c.look_up(cursor, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncwarp();
    c.template find<GATHER>(0);
    c.copy_scales(0);
    cp_async_commit_group();      // empty, because the loop expects one group per rotary part
    uint4 raw[2][C::LANE_TOKENS]; // the half that is converted first, and the other half
    c.load(raw[0], 0, 0), c.load(raw[1], 0, 1);
    int split_count = 0;
#pragma unroll 1
    for (unsigned tile = 0;; ++tile) {
        const TileRecord record = c.record(tile);
        if (record.start == TileRecord::END) break;
        if (record.start != TileRecord::NONE) {
            mbarrier_wait(shared_address(&shared.queries_empty), ++split_count);
            c.template copy_queries<T>(Split(p, record.start));
        }
        // Wait for all copies except the copy of the latest rotary part. After this wait the scales of this tile have
        // arrived.
        cp_async_wait_group<1>();
        __syncwarp();
        c.copy_scales(tile + 1);
        // First convert the half that the buffer's own consumer reads as values, because that half is freed first.
        const unsigned buffer = tile & 1, phase = tile / 2 + 1;
        mbarrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
        c.template publish_valid_tokens<GATHER>(record, tile, split_count);
        c.convert(raw[0], tile, buffer);
        // Look up tiles here, where most registers are free.
        if (tile % C::TILES_PER_LOOKUP == 0)
            c.look_up(Cursor(p, sm_part, shared.positions[c.lane() / C::WARP_TOKENS][c.warp]),
                      tile + C::LOOKUP_DISTANCE);
        if ((tile + 2) % C::TILES_PER_LOOKUP == 0) c.template find<GATHER>(tile + 2);
        c.load(raw[0], tile + 1, 1 - buffer);

        mbarrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
        c.copy_rotary(tile);
        c.convert(raw[1], tile, 1 - buffer);
        c.load(raw[1], tile + 1, buffer);
    }
    cp_async_wait_group<0>();
}
