// The producer warpgroups of attend_two_loaders for an 8-bit cache of 656 bytes per token, addressed by block table or
// by `indices`. They convert the tokens to bfloat16.
//
// A warp converts eight tokens of each tile: first one half of their value columns, then the other half. In each half a
// lane converts 16 elements of every second token. Four lanes write the 64 columns of one row of a tile in shared
// memory. The next four lanes write the row of the next token, whose chunks are in other banks. Registers hold the
// bytes of a whole tile. As soon as a half is converted, loads for the next tile are issued into its registers, and are
// in flight while the other half is converted. The rotary part is copied unchanged, because it is bfloat16 already. The
// lanes look up the addresses of four tiles at once, four to seven tiles before the tiles are converted.
//
// No warp waits for data that it does not need yet. The producers execute no proxy fence before they arrive at a full
// barrier, because the fence would also wait for the loads of the next tile. The consumers execute the fence instead
// (Seesaw::wait_for_keys). For the rotary part and the queries, cp.async.mbarrier.arrive arrives at the barrier when
// the copies complete.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/two_loaders_shared.cuh"

// Bit of an address that marks a missing token.
constexpr unsigned long long MISSING = 1ull << 63;

// Load 16 bytes of a token. Return zeros if the token is missing. The load is not ld.global.nc, because ptxas may move
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

// Issue a cp.async of 16 bytes of a token. Write zeros if the token is missing.
__device__ __forceinline__ void copy_token_async(unsigned to, unsigned long long from) {
    asm volatile("{ .reg .pred missing;\n"
                 "  setp.lt.s64 missing, %1, 0;\n"
                 "  cp.async.cg.shared.global.L2::128B [%0], [%2], 16, missing; }" ::"r"(to),
                 "l"(from), "l"(from & ~MISSING)
                 : "memory");
}

// The record that a converting warp keeps for a tile. It says whether a sequence begins with the tile, and which of the
// warp's eight tokens exist.
struct TileNote {
    static constexpr int NONE = -1, END = -2;

    int start;            // the sequence that begins with this tile; NONE: no sequence begins; END: after the last tile
    unsigned short there; // a bit per token, set if the token exists
    unsigned short bad;   // not 0 if an entry is outside the cache
};

// The state of the converting warps. Each warp uses its own entries. The state is in shared memory, so that it occupies
// no registers in the mainloop.
struct ConverterShared : WgmmaShared {
    static constexpr int FOUND = 8, AHEAD = FOUND / 2; // tiles with an address; tiles from lookup to conversion

    alignas(16) float scales[2][BLOCK_TOKENS][4];      // [tile % 2][token]: the scales of this tile and the next one
    unsigned long long addresses[FOUND][BLOCK_TOKENS]; // first an Entry, then the address of a token or MISSING
    TileNote notes[FOUND][LOADING_WARPS];
    TilePlace places[AHEAD][LOADING_WARPS]; // the next tiles to look up
};
static_assert(sizeof(Entry) == sizeof(unsigned long long), "");

struct Converter {
    static constexpr int TOKENS = BLOCK_TOKENS / LOADING_WARPS; // tokens of a warp in a tile
    static constexpr int EACH = TOKENS / 2;                     // tokens of a lane in a tile
    static constexpr int TOGETHER = 32 / TOKENS;                // tiles that the lanes look up at once
    static constexpr int FOUND = ConverterShared::FOUND, AHEAD = ConverterShared::AHEAD;
    static constexpr int LATENT_DIMS = 512, ROTARY_OFFSET = LATENT_DIMS + 4 * 4;
    static constexpr int ROW_BYTES = COLUMNS * 2;

    const Params& p;
    ConverterShared& shared;
    const unsigned queries;
    const unsigned warp;

    // Return the lane index. It is read each time, so that values derived from it occupy no registers in the mainloop.
    static __device__ __forceinline__ unsigned lane() {
        unsigned lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }

    // Return the row of the warp's first token in a tile.
    __device__ __forceinline__ unsigned first() const { return warp * TOKENS; }
    __device__ __forceinline__ unsigned long long& address(unsigned tile, unsigned i) const {
        return shared.addresses[tile % FOUND][first() + i];
    }
    __device__ __forceinline__ TileNote& note(unsigned tile) const { return shared.notes[tile % FOUND][warp]; }

    // Issue the copies of the table entries of TOGETHER tiles, from `tile` on. TOKENS lanes look up one tile, and
    // `cursor` is at the lane's tile. The entry of a token is copied to the location where `find` will store the
    // address of the token.
    template <typename Cursor> __device__ __forceinline__ void look_up(Cursor cursor, unsigned tile) const {
        const unsigned lane = Converter::lane(), which = lane / TOKENS, i = lane % TOKENS;
        Entry& entry = reinterpret_cast<Entry&>(address(tile + which, i));
        const int at = cursor.token + int(first() + i);
        int slot = -1;
        if (at < cursor.end) copy_async_4(shared_address(&entry.id), cursor.id_of(at, slot));
        entry.slot = slot;
        if (i == 0) {
            const bool starts = cursor.token == 0 || tile + which == 0;
            note(tile + which).start = cursor.end == 0 ? TileNote::END : starts ? cursor.sequence : TileNote::NONE;
        }
#pragma unroll 1
        for (int n = 0; n < TOGETHER; ++n) cursor.advance();
        __syncwarp(); // all lanes have read `places`
        if (i == 0) shared.places[which][warp] = cursor;
    }

    // Replace the table entries of TOGETHER tiles, from `tile` on, by the addresses of the tokens.
    template <bool GATHER> __device__ __forceinline__ void find(unsigned tile) const {
        const unsigned lane = Converter::lane(), which = lane / TOKENS, i = lane % TOKENS;
        unsigned long long& to = address(tile + which, i);
        const Entry entry = reinterpret_cast<const Entry&>(to);
        Found found;
        found.template find<true, GATHER>(p, entry);
        const bool there = found.there >> lane & 1, wanted = entry.slot >= 0 && (!GATHER || entry.id >= 0);
        const unsigned bad = __ballot_sync(FULL_WARP, wanted && !there);
        to = reinterpret_cast<unsigned long long>(found.from) | (there ? 0 : MISSING);
        constexpr unsigned ALL = (1u << TOKENS) - 1;
        if (i == 0) {
            note(tile + which).there = found.there >> which * TOKENS & ALL;
            note(tile + which).bad = bad >> which * TOKENS & ALL;
        }
        __syncwarp();
    }

    // Issue the copies of the scales of a tile, as one commit group.
    __device__ __forceinline__ void copy_scales(unsigned tile) const {
        const unsigned lane = Converter::lane();
        if (lane < TOKENS)
            copy_token_async(shared_address(&shared.scales[tile & 1][first() + lane]),
                             address(tile, lane) + LATENT_DIMS);
        cp_async_commit_group();
    }

    // Issue the copies of a tile's rotary part, as one commit group. On completion the copies arrive at the full
    // barrier of the rotary part.
    __device__ __forceinline__ void copy_rotary(unsigned tile) const {
        const unsigned lane = Converter::lane();
        const unsigned long long* const from = &address(tile, lane / 8);
        const unsigned to =
            key_tile(queries, tile & 1, ROTARY_TILE) + (first() + lane / 8) * ROW_BYTES + ((lane ^ lane / 8) & 7) * 16;
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i)
            copy_token_async((to ^ (4 * i % 8 * 16)) + 4 * i * ROW_BYTES, from[4 * i] + ROTARY_OFFSET + lane % 8 * 16);
        cp_async_mbarrier_arrive(shared_address(&shared.full[tile & 1][ROTARY_FULL]));
        cp_async_commit_group();
    }

    // Issue the copies of the warp's query rows of a sequence. On completion the copies arrive at queries_full. The
    // rows are copied one at a time, which takes fewer registers than load_queries.
    template <typename T> __device__ __forceinline__ void copy_queries(const Visit& visit) const {
        const unsigned lane = Converter::lane();
#pragma unroll 1
        for (unsigned r = warp; r < WGMMA_ROWS; r += LOADING_WARPS) {
            const Row row(p, visit, blockIdx.y, blockIdx.x * WGMMA_ROWS + r);
            const T* const from = static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                  row.token * p.q_strides[1] + row.head * p.q_strides[2] + lane * 8;
            const unsigned to = queries + lane / 8 * TILE_BYTES + r * ROW_BYTES + ((lane ^ r) & 7) * 16;
            copy_async_or_zero(to, from, row.valid);
            copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, row.valid);
            if (lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, row.valid);
        }
        cp_async_mbarrier_arrive(shared_address(&shared.queries_full));
    }

    // Publish which tokens of a tile exist, and whether an entry is outside the cache.
    template <bool GATHER>
    __device__ __forceinline__ void tell(const TileNote& note, unsigned tile, int visited) const {
        if (GATHER && lane() == 0) reinterpret_cast<unsigned char*>(&shared.valid[tile & 1])[warp] = note.there;
        if (note.bad) shared.bad[visited % VISITS] = visited;
    }

    // Issue the loads of this lane's share of half `half` of a tile.
    __device__ __forceinline__ void load(uint4 (&raw)[EACH], unsigned tile, unsigned half) const {
        const unsigned lane = Converter::lane(), odd = lane / 4 % 2;
        const unsigned offset = half * 256 + lane / 8 * 64 + lane % 4 * 16;
        const unsigned long long* const from = &address(tile, odd);
#pragma unroll
        for (int i = 0; i < EACH; ++i) raw[i] = load_token(from[2 * i] + offset);
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

    // Convert and store this lane's share of half `half` of a tile, then arrive once for the whole warp at the full
    // barrier of this half.
    __device__ __forceinline__ void convert(const uint4 (&raw)[EACH], unsigned tile, unsigned half) const {
        const unsigned lane = Converter::lane(), odd = lane / 4 % 2, buffer = tile & 1;
        const unsigned to = key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + (first() + odd) * ROW_BYTES +
                            ((lane % 4 * 2) ^ odd) * 16;
        const float* const scales = &shared.scales[buffer][first() + odd][half * 2 + lane / 16];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
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
    const C c{p, shared, queries, unsigned(loading_warp())};
    const Part part(p, blockIdx.z);
    Cursor cursor(p, part);
#pragma unroll 1
    for (unsigned i = c.lane() / C::TOKENS; i > 0; --i) cursor.advance();
    c.look_up(cursor, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncwarp();
    c.template find<GATHER>(0);
    c.copy_scales(0);
    cp_async_commit_group(); // an empty group, because the loop expects one per rotary part
    uint4 raw[2][C::EACH];   // bytes of the half that is converted first, and of the other half
    c.load(raw[0], 0, 0), c.load(raw[1], 0, 1);
    int visited = 0; // sequences with tiles so far
#pragma unroll 1
    for (unsigned tile = 0;; ++tile) {
        const TileNote note = c.note(tile);
        if (note.start == TileNote::END) break;
        if (note.start != TileNote::NONE) {
            mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
            c.template copy_queries<T>(Visit(p, note.start));
        }
        // Wait for all copies except the latest rotary part. The scales of this tile are then in shared memory.
        cp_async_wait_group<1>();
        __syncwarp();
        c.copy_scales(tile + 1);
        // Convert the half that the buffer's own consumer reads as values first, because this half is freed first.
        const unsigned buffer = tile & 1, phase = tile / 2 + 1;
        mbarrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
        c.template tell<GATHER>(note, tile, visited);
        c.convert(raw[0], tile, buffer);
        // The lookups are done at this point, because most registers are free here.
        if (tile % C::TOGETHER == 0)
            c.look_up(Cursor(p, part, shared.places[c.lane() / C::TOKENS][c.warp]), tile + C::AHEAD);
        if ((tile + 2) % C::TOGETHER == 0) c.template find<GATHER>(tile + 2);
        c.load(raw[0], tile + 1, 1 - buffer);

        mbarrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
        c.copy_rotary(tile);
        c.convert(raw[1], tile, 1 - buffer);
        c.load(raw[1], tile + 1, buffer);
    }
    cp_async_wait_group<0>();
}
