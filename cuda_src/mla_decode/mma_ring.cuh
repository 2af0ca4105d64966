// The rings of attend_mma. A ring is a circular buffer of stages in shared memory, into which tiles of tokens are
// copied ahead of their use. The copies continue across the sequences of a part (the work of one thread block, see
// parts.cuh).
//
// A ring has the methods init, start (the prologue), acquire and release. LockstepRing is for warps that all use the
// same tile at the same time. BarrierRing is for groups of warps that do not wait for each other. TILE::copy issues the
// copies of one warp's tokens.
#pragma once
#include "common/barrier.cuh"
#include "common/hopper.cuh"
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"

// Bit masks of a tile. Each copying warp writes 64 / COPIERS bits of each mask. `valid` has a bit per token, set if the
// token exists. `bad` is nonzero if the block table or `indices` point outside the cache.
struct alignas(16) Arrival {
    unsigned long long valid, bad;
};

// Return the `valid` mask of a tile whose tokens all exist.
template <typename F> __device__ constexpr unsigned long long all_valid() {
    unsigned long long all = 0;
    for (int copier = 0; copier < F::COPIERS; ++copier) all |= ((1ull << F::COPIED) - 1) << copier * (64 / F::COPIERS);
    return all;
}

// The tokens that a warp copies, one per lane.
struct Sources {
    const char* from;   // address of this lane's token
    bool known;         // whether this token exists
    unsigned lanes;     // mask of the lanes whose token exists
    const char* scales; // address of this token's scales, if they are stored apart from it

    __device__ __forceinline__ const char* of(int i) const { return of_lane(from, i); }
    __device__ __forceinline__ const char* scales_of(int i) const { return of_lane(scales, i); }

    static __device__ __forceinline__ const char* of_lane(const char* address, int i) {
        const unsigned long long mine = reinterpret_cast<unsigned long long>(address);
        const unsigned low = __shfl_sync(FULL_WARP, unsigned(mine), i);
        const unsigned high = __shfl_sync(FULL_WARP, unsigned(mine >> 32), i);
        return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
    }
};

// The next tile that a warp copies. The table entry of a token is loaded one tile before it is needed.
template <typename F> struct TileCursor {
    const bool copies;
    const int copier; // index among the copying warps
    Arrival* const arrivals;
    int sequence, token, end;
    bool more;       // whether there is a next tile
    bool wanted;     // whether this lane has a token of the next tile
    int entry, slot; // block table entry or index, and slot in the page; with EXTRA `slot` is the cache: 0 or 1

    __device__ __forceinline__ TileCursor(const Thread<F>& thread, char* shared)
        : copies(F::RINGS == 2 || thread.warp >= F::WARPS - F::COPIERS),
          copier(F::RINGS == 2 ? thread.member : thread.warp - (F::WARPS - F::COPIERS)),
          arrivals(reinterpret_cast<Arrival*>(shared + F::ARRIVALS) + thread.first_stage()) {}

    // Move to the first tile of sequence `next`. If this part has no tokens of `next`, move to the next sequence that
    // has some.
    __device__ __forceinline__ void enter(const Params& p, const Part& part, const Thread<F>& thread, int next) {
        more = false;
        for (; next <= part.last; ++next) {
            const VisitOf<F::EXTRA> visit(p, part, next);
            sequence = next, token = visit.begin + thread.first_token(), end = visit.end;
            if (token < end) {
                more = true;
                break;
            }
        }
    }

    __device__ __forceinline__ void look_up(const Params& p, const Thread<F>& thread) {
        const int own = token + copier * F::COPIED + thread.lane % F::COPIED;
        wanted = more && own < end;
        entry = -1, slot = 0;
        if (!wanted) return;
        if constexpr (F::EXTRA) {
            const Index index(p, sequence, own);
            entry = index.slot, slot = index.second;
            return;
        }
        if (p.indices) {
            const int batch = sequence / p.query_tokens;
            entry = p.indices[batch * p.indices_strides[0] +
                              (sequence - batch * p.query_tokens) * p.indices_strides[1] + own];
        } else {
            const int page = unsigned(own) / unsigned(p.page_size);
            entry = p.block_table[sequence * p.table_stride + page];
            slot = own - page * p.page_size;
        }
    }

    __device__ __forceinline__ void advance(const Params& p, const Part& part, const Thread<F>& thread) {
        token += F::RINGS * F::TILE;
        if (token >= end) enter(p, part, thread, sequence + 1);
        look_up(p, thread);
    }

    // Return the addresses of the warp's tokens, and publish in `arrivals` which of them exist.
    __device__ __forceinline__ Sources find(const Params& p, const Thread<F>& thread, int stage) {
        constexpr int ITEM = F::FP8 ? 1 : sizeof(typename F::T);
        bool known, bad;
        const char *from, *scales = nullptr;
        if constexpr (F::EXTRA) {
            const Place place(p, slot == 1);
            known = wanted && place.has(entry), bad = wanted && entry >= 0 && !known;
            from = place.cache;
            if constexpr (F::CONVERTS) {
                if (known) from = place.in_two_parts(entry, scales);
            } else {
                if (known) from = place.at<ITEM>(entry, thread.kv_head);
            }
        } else {
            long long page = entry;
            known = wanted && unsigned(entry) < unsigned(p.pages);
            bad = wanted && !known;
            if (p.indices) {
                bad = wanted && entry >= (long long)p.pages * p.page_size;
                known = wanted && entry >= 0 && !bad;
                page = unsigned(entry) / unsigned(p.page_size);
                slot = entry - int(page) * p.page_size;
            }
            from = static_cast<const char*>(p.cache);
            if (known)
                from += (page * p.cache_strides[0] + slot * p.cache_strides[1] + thread.kv_head * p.cache_strides[2]) *
                        ITEM;
        }
        const unsigned known_lanes = __ballot_sync(FULL_WARP, known);
        const unsigned bad_lanes = __ballot_sync(FULL_WARP, bad);
        using Bits = typename Choose<F::COPIERS == 8, unsigned char, unsigned short>::Type;
        if (thread.lane == 0) {
            reinterpret_cast<Bits*>(&arrivals[stage].valid)[copier] = known_lanes & ((1u << F::COPIED) - 1);
            reinterpret_cast<Bits*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
        }
        return {from, known, known_lanes, scales};
    }
};

// A ring whose tiles all warps use at the same time. While a tile is in use, copies refill the stage of the previous
// tile.
template <typename F, typename TILE> struct LockstepRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0; // stage of the tile in use

    __device__ __forceinline__ LockstepRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ void init(const Thread<F>&, unsigned) {}

    // Issue the copies of the next tile into a stage, as one commit group.
    __device__ __forceinline__ void tma_load(const Params& p, const Part& part, const Thread<F>& thread, int stage) {
        if (cursor.more) {
            const Sources sources = cursor.find(p, thread, stage);
            TILE::copy(p, thread, sources, cursor.copier, shared_at + stage * F::TILE_BYTES, 0);
            cursor.advance(p, part, thread);
        }
        cp_async_commit_group();
    }

    // Prologue: issue the copies of the first STAGES - 1 tiles.
    __device__ __forceinline__ void start(const Params& p, const Part& part, const Thread<F>& thread) {
        cursor.enter(p, part, thread, part.first);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES - 1; ++stage) tma_load(p, part, thread, stage);
    }

    // Wait until the next tile is in shared memory, then issue the copies of a later tile.
    __device__ __forceinline__ Arrival acquire(const Params& p, const Part& part, const Thread<F>& thread) {
        cp_async_wait_group<F::STAGES - 2>();
        // When this barrier completes, the whole tile is visible, and no warp still uses the previous tile.
        __syncthreads();
        const Arrival arrival = cursor.arrivals[stage];
        tma_load(p, part, thread, stage == 0 ? F::STAGES - 1 : stage - 1);
        return arrival;
    }

    __device__ __forceinline__ void release(const Params&, const Part&, const Thread<F>&) {
        if (++stage == F::STAGES) stage = 0;
    }
};

// A ring whose stages have a full barrier (the tile is in shared memory) and an empty barrier (no warp uses the tile).
template <typename F, typename TILE> struct BarrierRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0, phase = 0; // stage of the tile in use, and the phase parity of its barriers

    __device__ __forceinline__ BarrierRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ unsigned full(const Thread<F>& thread, int stage) const {
        return shared_at + F::BARRIERS + (thread.first_stage() + stage) * 16;
    }
    __device__ __forceinline__ unsigned empty(const Thread<F>& thread, int stage) const {
        return full(thread, stage) + 8;
    }

    // Initialize the barriers. `meeting` is the address of the barrier for all threads of the block, used only if RINGS
    // == 2.
    __device__ __forceinline__ void init(const Thread<F>&, unsigned meeting) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < F::RINGS * F::STAGES; ++i) {
                const unsigned at = shared_at + F::BARRIERS + i * 16;
                mbarrier_init(at, F::ARRIVALS_OF_TILE);
                mbarrier_init(at + 8, F::WARPS / F::RINGS);
            }
            if constexpr (F::RINGS == 2) mbarrier_init(meeting, F::WARPS * 32);
            if constexpr (F::ROW_COPIES) fence_mbarrier_init();
        }
        __syncthreads(); // the barriers are initialized
    }

    // Issue the copies of the next tile into a stage. The full barrier of the stage completes when the copies have
    // arrived.
    __device__ __forceinline__ void tma_load(const Params& p, const Part& part, const Thread<F>& thread, int stage) {
        if (!cursor.more) return;
        const Sources sources = cursor.find(p, thread, stage);
        TILE::copy(p, thread, sources, cursor.copier, shared_at + (thread.first_stage() + stage) * F::TILE_BYTES,
                   full(thread, stage));
        cursor.advance(p, part, thread);
        if constexpr (F::ROW_COPIES) {
            __syncwarp();
            const int there = __popc(sources.lanes & ((1u << F::COPIED) - 1));
            if (thread.lane == 0) mbarrier_arrive_expect_tx(full(thread, stage), there * F::PITCH);
        } else {
            cp_async_mbarrier_arrive(full(thread, stage));
            __syncwarp();
            if (thread.lane == 0) mbarrier_arrive(full(thread, stage));
        }
    }

    // Prologue: issue the copies of the first STAGES tiles.
    __device__ __forceinline__ void start(const Params& p, const Part& part, const Thread<F>& thread) {
        if (!cursor.copies) return;
        cursor.enter(p, part, thread, part.first);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES; ++stage) tma_load(p, part, thread, stage);
    }

    // Wait at the full barrier of the next tile.
    __device__ __forceinline__ Arrival acquire(const Params&, const Part&, const Thread<F>& thread) {
        mbarrier_wait(full(thread, stage), phase);
        return cursor.arrivals[stage];
    }

    // Arrive at the stage's empty barrier. A copying warp then waits until all warps have released the stage, and
    // refills it.
    __device__ __forceinline__ void release(const Params& p, const Part& part, const Thread<F>& thread) {
        __syncwarp();
        if (thread.lane == 0) mbarrier_arrive(empty(thread, stage));
        if (cursor.copies) {
            if (cursor.more) mbarrier_wait(empty(thread, stage), phase);
            tma_load(p, part, thread, stage);
        }
        if (++stage == F::STAGES) stage = 0, phase ^= 1;
    }
};
