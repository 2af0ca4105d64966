// Copy tiles into rings of stages, ahead of their use in attend_mma. The copies run ahead from one sequence into the
// next within an SM part, which is a block's range of the work (parts.cuh).
#pragma once
#include "common/barrier.cuh"
#include "common/hopper.cuh"
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"

// Bit masks of a tile; each copying warp writes 64 / COPY_WARPS bits. `valid` has a bit per token, set if the token
// exists. `bad` is nonzero if a page or slot is outside the cache.
struct alignas(16) Arrival {
    unsigned long long valid, bad;
};

template <typename F> __device__ constexpr unsigned long long all_valid() {
    unsigned long long all = 0;
    for (int copy_warp = 0; copy_warp < F::COPY_WARPS; ++copy_warp)
        all |= ((1ull << F::COPIED_TOKENS) - 1) << copy_warp * (64 / F::COPY_WARPS);
    return all;
}

// The addresses of the tokens that a warp copies, one per lane.
struct TokenAddresses {
    const char* from;
    bool valid;
    unsigned valid_lanes;
    const char* scales; // if they are not part of the token

    __device__ __forceinline__ const char* of(int i) const { return of_lane(from, i); }
    __device__ __forceinline__ const char* scales_of(int i) const { return of_lane(scales, i); }

    static __device__ __forceinline__ const char* of_lane(const char* address, int i) {
        const unsigned long long mine = reinterpret_cast<unsigned long long>(address);
        const unsigned low = __shfl_sync(FULL_WARP, unsigned(mine), i);
        const unsigned high = __shfl_sync(FULL_WARP, unsigned(mine >> 32), i);
        return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
    }
};

// The next tile that a warp copies. A token's table entry is loaded one tile ahead.
template <typename F> struct TileCursor {
    const bool copies;
    const int copy_warp; // index among the copying warps
    Arrival* const arrivals;
    int sequence, token, end;
    bool more;   // whether there is a next tile
    bool wanted; // whether this lane has a token of it
    int entry,
        slot; // block table entry or index, and slot in the page; with EXTRA `slot` is the cache: 0 or 1

    __device__ __forceinline__ TileCursor(const Thread<F>& thread, char* shared)
        : copies(F::RINGS == 2 || thread.warp >= F::WARPS - F::COPY_WARPS),
          copy_warp(F::RINGS == 2 ? thread.group_warp : thread.warp - (F::WARPS - F::COPY_WARPS)),
          arrivals(reinterpret_cast<Arrival*>(shared + F::ARRIVALS) + thread.first_stage()) {}

    // Move to the first tile of sequence `next`, or of the first later sequence with tokens in the block's range of the
    // work.
    __device__ __forceinline__ void enter(const Params& p, const SmPart& sm_part, const Thread<F>& thread, int next) {
        more = false;
        for (; next <= sm_part.last_sequence; ++next) {
            const SplitOf<F::EXTRA> split(p, sm_part, next);
            sequence = next, token = split.begin + thread.first_token(), end = split.end;
            if (token < end) {
                more = true;
                break;
            }
        }
    }

    __device__ __forceinline__ void look_up(const Params& p, const Thread<F>& thread) {
        const int token_index = token + copy_warp * F::COPIED_TOKENS + thread.lane % F::COPIED_TOKENS;
        wanted = more && token_index < end;
        entry = -1, slot = 0;
        if (!wanted) return;
        if constexpr (F::EXTRA) {
            const Index index(p, sequence, token_index);
            entry = index.slot, slot = index.second;
            return;
        }
        if (p.indices) {
            const int batch = sequence / p.query_tokens;
            entry = p.indices[batch * p.indices_strides[0] +
                              (sequence - batch * p.query_tokens) * p.indices_strides[1] + token_index];
        } else {
            const int page = unsigned(token_index) / unsigned(p.page_size);
            entry = p.block_table[sequence * p.table_stride + page];
            slot = token_index - page * p.page_size;
        }
    }

    __device__ __forceinline__ void advance(const Params& p, const SmPart& sm_part, const Thread<F>& thread) {
        token += F::RINGS * F::TILE;
        if (token >= end) enter(p, sm_part, thread, sequence + 1);
        look_up(p, thread);
    }

    // Return the addresses of the warp's tokens, and publish in `arrivals` which tokens exist.
    __device__ __forceinline__ TokenAddresses find(const Params& p, const Thread<F>& thread, int stage) {
        constexpr int ITEM = F::FP8 ? 1 : sizeof(typename F::T);
        bool valid, bad;
        const char *from, *scales = nullptr;
        if constexpr (F::EXTRA) {
            const CacheView view(p, slot == 1);
            valid = wanted && view.has(entry), bad = wanted && entry >= 0 && !valid;
            from = view.cache;
            if constexpr (F::CONVERTS) {
                if (valid) from = view.at_paged(entry, scales);
            } else {
                if (valid) from = view.at<ITEM>(entry, thread.kv_head);
            }
        } else {
            long long page = entry;
            valid = wanted && unsigned(entry) < unsigned(p.pages);
            bad = wanted && !valid;
            if (p.indices) {
                bad = wanted && entry >= (long long)p.pages * p.page_size;
                valid = wanted && entry >= 0 && !bad;
                page = unsigned(entry) / unsigned(p.page_size);
                slot = entry - int(page) * p.page_size;
            }
            from = static_cast<const char*>(p.cache);
            if (valid)
                from += (page * p.cache_strides[0] + slot * p.cache_strides[1] + thread.kv_head * p.cache_strides[2]) *
                        ITEM;
        }
        const unsigned valid_lanes = __ballot_sync(FULL_WARP, valid);
        const unsigned bad_lanes = __ballot_sync(FULL_WARP, bad);
        using Bits = typename Conditional<F::COPY_WARPS == 8, unsigned char, unsigned short>::Type;
        if (thread.lane == 0) {
            reinterpret_cast<Bits*>(&arrivals[stage].valid)[copy_warp] = valid_lanes & ((1u << F::COPIED_TOKENS) - 1);
            reinterpret_cast<Bits*>(&arrivals[stage].bad)[copy_warp] = bad_lanes != 0;
        }
        return {from, valid, valid_lanes, scales};
    }
};

// A ring for warps that all use the same tile, while copies refill the stage of the previous tile.
template <typename F, typename TILE> struct LockstepRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0;

    __device__ __forceinline__ LockstepRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ void init(const Thread<F>&, unsigned) {}

    __device__ __forceinline__ void load_next_tile(const Params& p, const SmPart& sm_part, const Thread<F>& thread,
                                                   int stage) {
        if (cursor.more) {
            const TokenAddresses addresses = cursor.find(p, thread, stage);
            TILE::copy(p, thread, addresses, cursor.copy_warp, shared_at + stage * F::TILE_BYTES, 0);
            cursor.advance(p, sm_part, thread);
        }
        cp_async_commit_group();
    }

    __device__ __forceinline__ void start(const Params& p, const SmPart& sm_part, const Thread<F>& thread) {
        cursor.enter(p, sm_part, thread, sm_part.first_sequence);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES - 1; ++stage) load_next_tile(p, sm_part, thread, stage);
    }

    __device__ __forceinline__ Arrival acquire(const Params& p, const SmPart& sm_part, const Thread<F>& thread) {
        cp_async_wait_group<F::STAGES - 2>();
        // After this barrier the tile is visible to all threads, and no warp still reads the previous tile.
        __syncthreads();
        const Arrival arrival = cursor.arrivals[stage];
        load_next_tile(p, sm_part, thread, stage == 0 ? F::STAGES - 1 : stage - 1);
        return arrival;
    }

    __device__ __forceinline__ void release(const Params&, const SmPart&, const Thread<F>&) {
        if (++stage == F::STAGES) stage = 0;
    }
};

// A ring for groups of warps that do not wait for each other. A stage has a full and an empty barrier.
template <typename F, typename TILE> struct BarrierRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0, phase = 0;

    __device__ __forceinline__ BarrierRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ unsigned full(const Thread<F>& thread, int stage) const {
        return shared_at + F::BARRIERS + (thread.first_stage() + stage) * 16;
    }
    __device__ __forceinline__ unsigned empty(const Thread<F>& thread, int stage) const {
        return full(thread, stage) + 8;
    }

    __device__ __forceinline__ void init(const Thread<F>&, unsigned block_barrier) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < F::RINGS * F::STAGES; ++i) {
                const unsigned at = shared_at + F::BARRIERS + i * 16;
                mbarrier_init(at, F::ARRIVALS_OF_TILE);
                mbarrier_init(at + 8, F::WARPS / F::RINGS);
            }
            if constexpr (F::RINGS == 2) mbarrier_init(block_barrier, F::WARPS * 32);
            if constexpr (F::ROW_COPIES) fence_mbarrier_init();
        }
        __syncthreads(); // the barriers are initialized
    }

    __device__ __forceinline__ void load_next_tile(const Params& p, const SmPart& sm_part, const Thread<F>& thread,
                                                   int stage) {
        if (!cursor.more) return;
        const TokenAddresses addresses = cursor.find(p, thread, stage);
        TILE::copy(p, thread, addresses, cursor.copy_warp, shared_at + (thread.first_stage() + stage) * F::TILE_BYTES,
                   full(thread, stage));
        cursor.advance(p, sm_part, thread);
        if constexpr (F::ROW_COPIES) {
            __syncwarp();
            const int copied_tokens = __popc(addresses.valid_lanes & ((1u << F::COPIED_TOKENS) - 1));
            if (thread.lane == 0) mbarrier_arrive_expect_tx(full(thread, stage), copied_tokens * F::PITCH);
        } else {
            cp_async_mbarrier_arrive(full(thread, stage));
            __syncwarp();
            if (thread.lane == 0) mbarrier_arrive(full(thread, stage));
        }
    }

    __device__ __forceinline__ void start(const Params& p, const SmPart& sm_part, const Thread<F>& thread) {
        if (!cursor.copies) return;
        cursor.enter(p, sm_part, thread, sm_part.first_sequence);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES; ++stage) load_next_tile(p, sm_part, thread, stage);
    }

    __device__ __forceinline__ Arrival acquire(const Params&, const SmPart&, const Thread<F>& thread) {
        mbarrier_wait(full(thread, stage), phase);
        return cursor.arrivals[stage];
    }

    // Release the current stage. A copying warp then waits at its empty barrier and refills it.
    __device__ __forceinline__ void release(const Params& p, const SmPart& sm_part, const Thread<F>& thread) {
        __syncwarp();
        if (thread.lane == 0) mbarrier_arrive(empty(thread, stage));
        if (cursor.copies) {
            if (cursor.more) mbarrier_wait(empty(thread, stage), phase);
            load_next_tile(p, sm_part, thread, stage);
        }
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
};
