// The loading warpgroups of attend_two_loaders for an 8-bit cache of 656 bytes a token, by pages or with `indices`,
// which they convert to bfloat16.
//
// A warp converts eight tokens of each tile, half after half of the value columns. A lane has 16 numbers of every
// second token: four lanes have the 64 columns of a tile in shared memory, the next four those of the next token, whose
// chunks are in other banks. Registers hold the bytes of the next half while its place is still in use. The rotary part
// is of 16 bits already, and copied as it is.
#pragma once
#include "common/fp8.cuh"
#include "mla_decode/two_loaders_shared.cuh"

// A lane that converts.
struct Converter {
    static constexpr int TOKENS = BLOCK_TOKENS / LOADING_WARPS; // of a warp
    static constexpr int EACH = TOKENS / 2;                     // of these, a lane's
    static constexpr int LATENT_DIMS = 512, ROTARY_OFFSET = LATENT_DIMS + 4 * 4;
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr unsigned long long MISSING = 0, OUTSIDE = 1; // in place of a token's address

    WgmmaShared& shared;
    const unsigned queries;
    const int first, lane; // the tile's row of the warp's first token
    float scale;           // of token lane % 8, for columns 128 (lane / 8) ...

    // The lane again: what is computed from it takes no registers while tiles are converted.
    static __device__ __forceinline__ int lane_again() {
        int lane;
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
        return lane;
    }

    __device__ __forceinline__ int odd() const { return lane / 4 % 2; }
    // The tile's row of the token that the lane finds.
    __device__ __forceinline__ int own() const { return first + lane_again() % TOKENS; }
    __device__ __forceinline__ unsigned long long& address(int tile, int i) const {
        return shared.addresses[tile & 3][first + i];
    }

    // Take up the places of the tokens of a tile.
    template <bool GATHER> __device__ __forceinline__ void find(const Params& p, const Entry& entry, int tile) const {
        const int lane = lane_again();
        Found found;
        found.template find<true, GATHER>(p, entry);
        if (lane < TOKENS) {
            unsigned long long at = found.bad ? OUTSIDE : MISSING;
            if (found.there >> lane & 1) at = reinterpret_cast<unsigned long long>(found.from);
            address(tile, lane) = at;
        }
        __syncwarp();
    }

    // Say which tokens of the tile in `buffer` are there, and whether one is outside of the cache.
    template <bool GATHER> __device__ __forceinline__ void tell(int tile, int visited) const {
        const int lane = lane_again();
        const unsigned long long at = address(tile, lane % TOKENS);
        if constexpr (GATHER) {
            const unsigned there = __ballot_sync(FULL_WARP, at > OUTSIDE);
            if (lane == 0) reinterpret_cast<unsigned char*>(&shared.valid[tile & 1])[first / TOKENS] = there;
        }
        if (at == OUTSIDE) shared.bad[visited % VISITS] = visited;
    }

    __device__ __forceinline__ float load_scale(int tile) const {
        const int lane = lane_again();
        const unsigned long long at = address(tile, lane % TOKENS);
        float found = 0.f;
        if (at > OUTSIDE) found = __ldg(reinterpret_cast<const float*>(at + LATENT_DIMS) + lane / TOKENS);
        return found;
    }

    // The lane's i-th 16 bytes of a half of a tile.
    __device__ __forceinline__ uint4 load(int tile, int half, int i) const {
        const unsigned long long at = address(tile, 2 * i + odd());
        return load_or_zero(reinterpret_cast<const char*>(at + half * 256 + lane / 8 * 64 + lane % 4 * 16),
                            at > OUTSIDE);
    }

    // The scale of the lane's i-th token there.
    __device__ __forceinline__ float scale_of(int half, int i) const {
        return __shfl_sync(FULL_WARP, scale, 2 * i + odd() + (half * 2 + lane / 16) * TOKENS);
    }

    // Eight numbers as they are multiplied.
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

    // Where the first of them are, of the lane's i-th token in a half; the others are at this ^ 16.
    __device__ __forceinline__ unsigned place(int buffer, int half, int i) const {
        const unsigned offset = lane / 8 * TILE_BYTES + (first + odd()) * ROW_BYTES + ((lane % 4 * 2) ^ odd()) * 16;
        return ((key_tile(queries, buffer, half * 4) + offset) ^ (2 * i * 16)) + 2 * i * ROW_BYTES;
    }

    // Start copying the rotary part of a tile.
    __device__ __forceinline__ void copy_rotary(const Params& p, int tile) const {
        const int lane = lane_again();
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) {
            const int t = 4 * i + lane / 8;
            const unsigned long long at = address(tile, t);
            const char* const from = at > OUTSIDE ? reinterpret_cast<const char*>(at) + ROTARY_OFFSET + lane % 8 * 16
                                                  : static_cast<const char*>(p.cache);
            copy_async_or_zero(key_tile(queries, tile & 1, ROTARY_TILE) + (first + t) * ROW_BYTES +
                                   ((lane ^ t) & 7) * 16,
                               from, at > OUTSIDE);
        }
        cp_async_commit_group();
    }

    __device__ __forceinline__ void publish(int buffer, int half) const {
        publish_keys(shared_address(&shared.full[buffer][half]));
    }
};

// Start copying the warp's rows of the queries, one after the other: load_queries takes more registers.
template <typename T>
__device__ __forceinline__ void load_queries_by_row(const Params& p, const Visit& visit, unsigned queries, int warp) {
    const int lane = Converter::lane_again();
#pragma unroll 1
    for (int r = warp; r < WGMMA_ROWS; r += LOADING_WARPS) {
        const Row row(p, visit, blockIdx.y, blockIdx.x * WGMMA_ROWS + r);
        const T* const from = static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] + row.token * p.q_strides[1] +
                              row.head * p.q_strides[2] + lane * 8;
        const unsigned to = queries + lane / 8 * TILE_BYTES + r * COLUMNS * 2 + ((lane ^ r) & 7) * 16;
        copy_async_or_zero(to, from, row.valid);
        copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, row.valid);
        if (lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, row.valid);
    }
    cp_async_commit_group();
}

template <typename T, bool GATHER>
__device__ __forceinline__ void convert_by_two(const Params& p, WgmmaShared& shared, unsigned queries) {
    static_assert(IS_BFLOAT16<T>, "the rotary part is copied as it is");
    Converter c{shared, queries, loading_warp() * Converter::TOKENS, int(threadIdx.x % 32), 0.f};
    const Part part(p, blockIdx.z);
    TileCursor<GATHER, false, true> cursor(p, part);
    Entry entry; // of the tile after those that are found
    auto find = [&](int tile) {
        c.template find<GATHER>(p, entry, tile);
        cursor.advance();
        entry = cursor.entry(c.own());
    };
    entry = cursor.entry(c.own());
    uint4 raw[c.EACH];
    find(0);
    c.scale = c.load_scale(0);
#pragma unroll
    for (int i = 0; i < c.EACH; ++i) raw[i] = c.load(0, 0, i);
    find(1), find(2);
    int used = 0, visited = 0; // tiles, and visits with tiles
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part_again<true>(p, part), sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries_by_row<T>(p, visit, queries, c.first / c.TOKENS);
        const int before = used, tiles = ceil_div(visit.end - visit.begin, BLOCK_TOKENS);
        for (; used < before + tiles; ++used) {
            const int buffer = used & 1, phase = used / 2 + 1;
            const float next_scale = c.load_scale(used + 1);
            // First the half that the warpgroup of the buffer reads as values, which is free first.
#pragma unroll 1
            for (int k = 0; k < 2; ++k) {
                const int half = buffer ^ k;
                mbarrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                if (k == 0)
                    c.template tell<GATHER>(used, visited);
                else
                    c.copy_rotary(p, used);
#pragma unroll
                for (int i = 0; i < c.EACH; ++i) {
                    const unsigned to = c.place(buffer, half, i);
                    const float scale = c.scale_of(half, i);
                    store_shared(to, c.widen(raw[i].x, raw[i].y, scale));
                    store_shared(to ^ 16, c.widen(raw[i].z, raw[i].w, scale));
                    raw[i] = c.load(used + k, 1 - buffer, i);
                }
                if (k == 0 && used == before) publish_queries<0>(shared);
                c.publish(buffer, half);
            }
            c.scale = next_scale;
            find(used + 3);
            cp_async_wait_group<0>();
            c.publish(buffer, ROTARY_FULL);
        }
    }
}
