// The tiles of attend_mma: copied ahead into a ring of stages, through all visits of a part.
//
// A ring has the methods init, start, acquire and release. LockstepRing is for warps that all use the same tile,
// BarrierRing for groups that do not wait for each other. TILE::copy copies the tokens of a warp.
#pragma once
#include "common/barrier.cuh"
#include "common/hopper.cuh"
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"

// The tokens of a tile that are there, a bit each, and whether the table's entry of one is outside the cache. Each copying
// warp has 64 / COPIERS bits.
struct alignas(16) Arrival {
    unsigned long long valid, bad;
};

// `valid` of a tile that is full.
template <typename F> __device__ constexpr unsigned long long all_valid() {
    unsigned long long all = 0;
    for (int copier = 0; copier < F::COPIERS; ++copier) all |= ((1ull << F::COPIED) - 1) << copier * (64 / F::COPIERS);
    return all;
}

// The tokens that a warp copies, one for each lane.
struct Sources {
    const char* from;   // this lane's token
    bool known;         // it is there
    unsigned lanes;     // those whose token is there
    const char* scales; // of this lane's token, where they lie apart from it

    // The token of lane i.
    __device__ __forceinline__ const char* of(int i) const { return of_lane(from, i); }
    __device__ __forceinline__ const char* scales_of(int i) const { return of_lane(scales, i); }

    static __device__ __forceinline__ const char* of_lane(const char* address, int i) {
        const unsigned long long mine = reinterpret_cast<unsigned long long>(address);
        const unsigned low = __shfl_sync(FULL_WARP, unsigned(mine), i);
        const unsigned high = __shfl_sync(FULL_WARP, unsigned(mine >> 32), i);
        return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
    }
};

// The next tile to copy. The table's entry of a token is read one tile before it is needed.
template <typename F> struct TileCursor {
    const bool copies; // whether this warp copies
    const int copier;  // its number among those that do
    Arrival* const arrivals;
    int sequence, token, end;
    bool more;       // there is a tile
    bool wanted;     // this lane has a token of it
    int entry, slot; // what the table, or `indices`, says of that token; with EXTRA `slot` is the cache, 0 or 1

    __device__ __forceinline__ TileCursor(const Thread<F>& thread, char* shared)
        : copies(F::RINGS == 2 || thread.warp >= F::WARPS - F::COPIERS),
          copier(F::RINGS == 2 ? thread.member : thread.warp - (F::WARPS - F::COPIERS)),
          arrivals(reinterpret_cast<Arrival*>(shared + F::ARRIVALS) + thread.first_stage()) {}

    // Go to the first tile of sequence `next`, or of the first one after it that has tokens here.
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

    // Where the warp's tokens lie; those who use the tile are told by `arrivals`.
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
        // A warp's share of the 64 bits.
        using Bits = typename Choose<F::COPIERS == 8, unsigned char, unsigned short>::Type;
        if (thread.lane == 0) {
            reinterpret_cast<Bits*>(&arrivals[stage].valid)[copier] = known_lanes & ((1u << F::COPIED) - 1);
            reinterpret_cast<Bits*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
        }
        return {from, known, known_lanes, scales};
    }
};

// Stages that all warps go through in step: while a tile is used, the stage of the tile before is filled.
template <typename F, typename TILE> struct LockstepRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0; // of the tile in use

    __device__ __forceinline__ LockstepRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ void init(const Thread<F>&, unsigned) {}

    __device__ __forceinline__ void tma_load(const Params& p, const Part& part, const Thread<F>& thread, int stage) {
        if (cursor.more) {
            const Sources sources = cursor.find(p, thread, stage);
            TILE::copy(p, thread, sources, cursor.copier, shared_at + stage * F::TILE_BYTES, 0);
            cursor.advance(p, part, thread);
        }
        cp_async_commit_group();
    }

    // Start the copies of the first tiles.
    __device__ __forceinline__ void start(const Params& p, const Part& part, const Thread<F>& thread) {
        cursor.enter(p, part, thread, part.first);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES - 1; ++stage) tma_load(p, part, thread, stage);
    }

    // Wait for the next tile.
    __device__ __forceinline__ Arrival acquire(const Params& p, const Part& part, const Thread<F>& thread) {
        cp_async_wait_group<F::STAGES - 2>();
        // After it no warp uses the tile before any more.
        __syncthreads();
        const Arrival arrival = cursor.arrivals[stage];
        tma_load(p, part, thread, stage == 0 ? F::STAGES - 1 : stage - 1);
        return arrival;
    }

    // This warp no longer uses the tile.
    __device__ __forceinline__ void release(const Params&, const Part&, const Thread<F>&) {
        if (++stage == F::STAGES) stage = 0;
    }
};

// Stages with two barriers each, one for "the tile is here" and one for "its place is free".
template <typename F, typename TILE> struct BarrierRing {
    const unsigned shared_at;
    TileCursor<F> cursor;
    int stage = 0, phase = 0; // of the tile in use

    __device__ __forceinline__ BarrierRing(const Thread<F>& thread, char* shared, unsigned shared_at)
        : shared_at(shared_at), cursor(thread, shared) {}

    __device__ __forceinline__ unsigned full(const Thread<F>& thread, int stage) const {
        return shared_at + F::BARRIERS + (thread.first_stage() + stage) * 16;
    }
    __device__ __forceinline__ unsigned empty(const Thread<F>& thread, int stage) const {
        return full(thread, stage) + 8;
    }

    // `meeting` is a barrier of all threads, where they need one.
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
        __syncthreads();
    }

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

    // Start the copies of the first tiles.
    __device__ __forceinline__ void start(const Params& p, const Part& part, const Thread<F>& thread) {
        if (!cursor.copies) return;
        cursor.enter(p, part, thread, part.first);
        cursor.look_up(p, thread);
#pragma unroll 1
        for (int stage = 0; stage < F::STAGES; ++stage) tma_load(p, part, thread, stage);
    }

    // Wait for the next tile.
    __device__ __forceinline__ Arrival acquire(const Params&, const Part&, const Thread<F>& thread) {
        mbarrier_wait(full(thread, stage), phase);
        return cursor.arrivals[stage];
    }

    // This warp no longer uses the tile; if it is one that copies, it fills the stage again as soon as no other does.
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
