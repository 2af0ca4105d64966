// Find the addresses of tokens in the cache, for the producers that cannot use TMA.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

struct Entry {
    int id;   // page, or slot in the cache
    int slot; // slot in the page; -1: no token

    // With EXTRA an entry fits in one register: `id` is the slot, its sign bit marks the second cache, and -1 means no
    // token.
    static __device__ __forceinline__ Entry packed(int slot, bool second) {
        return {slot < 0 ? -1 : int(min(slot, LAST) | unsigned(second) << 31), 0};
    }
    __device__ __forceinline__ bool second() const { return id < -1; }
    __device__ __forceinline__ int packed_slot() const { return id & 0x7fffffff; }
    static constexpr int LAST = 0x7ffffffe; // larger than any valid slot
};

// With RELOAD, read the SmPart from memory again, so that it occupies no registers in the mainloop.
template <bool RELOAD> __device__ __forceinline__ SmPart reload_sm_part(const Params& p, const SmPart& sm_part) {
    if constexpr (RELOAD)
        return SmPart(p, blockIdx.z);
    else
        return sm_part;
}

// A tile of 64 tokens. `token`: the tile's first token. `end`: the end of the split's tokens. `token` and `end` are 0
// after the last tile.
struct TilePosition {
    int sequence, token, end;
};

// A cursor over all tiles of an SM part (the block's range of the work).
template <bool GATHER, bool EXTRA, bool RELOAD = EXTRA> struct TileCursor : TilePosition {
    const Params& p;
    const SmPart& sm_part;

    __device__ __forceinline__ TileCursor(const Params& p, const SmPart& sm_part) : p(p), sm_part(sm_part) {
        enter(sm_part.first_sequence);
    }
    __device__ __forceinline__ TileCursor(const Params& p, const SmPart& sm_part, const TilePosition& view)
        : TilePosition(view), p(p), sm_part(sm_part) {}

    // Move to the first tile of sequence `first`, or of the first later sequence with tokens in the block's range of
    // the work.
    __device__ __forceinline__ void enter(int first) {
        for (sequence = first; sequence <= sm_part.last_sequence; ++sequence) {
            const SplitOf<EXTRA> split(p, reload_sm_part<RELOAD>(p, sm_part), sequence);
            token = split.begin, end = split.end;
            if (token < end) return;
        }
        token = end = 0;
    }

    __device__ __forceinline__ void advance() {
        if (sequence > sm_part.last_sequence) return;
        token += BLOCK_TOKENS;
        if (token >= end) enter(sequence + 1);
    }

    __device__ __forceinline__ Entry entry(int i) const {
        const int at = token + i;
        Entry entry{0, -1};
        if (at >= end) return EXTRA ? Entry::packed(-1, false) : entry;
        if constexpr (EXTRA) {
            const Index index(p, sequence, at);
            return Entry::packed(index.slot, index.second);
        } else {
            entry.id = *id_of(at, entry.slot);
        }
        return entry;
    }

    // Return the address of token `at`'s entry in the block table (GATHER: in `indices`). Set `slot` to the token's
    // slot in its page (GATHER: to 0). EXTRA must be false.
    __device__ __forceinline__ const int* id_of(int at, int& slot) const {
        if constexpr (GATHER) {
            const Split query(p, sequence);
            slot = 0;
            return p.indices + (query.batch * p.indices_strides[0] + query.token * p.indices_strides[1] + at);
        } else {
            const int page = unsigned(at) / unsigned(p.page_size);
            slot = at - page * p.page_size;
            return p.block_table + (sequence * p.table_stride + page);
        }
    }
};

// The addresses of a warp's tokens, one per lane.
struct TokenAddresses {
    const char* from;
    unsigned valid_lanes;
    bool bad;           // an entry of one of the lanes is outside the cache
    const char* scales; // if they are not part of the token

    template <bool FP8, int BYTES> __device__ __forceinline__ void find_extra(const Params& p, const Entry& entry) {
        const int slot = entry.packed_slot();
        const bool wanted = entry.id != -1;
        const CacheView view(p, entry.second());
        const bool exists = wanted && view.has(slot);
        bad = __any_sync(FULL_WARP, wanted && !exists);
        from = view.cache, scales = nullptr;
        if constexpr (FP8 && BYTES == BYTES_OF_512) {
            if (exists) from = view.at_paged(slot, scales);
        } else {
            if (exists) from = view.at<FP8 ? 1 : 2>(slot, blockIdx.y);
        }
        valid_lanes = __ballot_sync(FULL_WARP, exists);
    }

    template <bool FP8, bool GATHER> __device__ __forceinline__ void find(const Params& p, const Entry& entry) {
        const bool wanted = entry.slot >= 0;
        bool exists;
        int page = entry.id, slot = entry.slot;
        if constexpr (GATHER) {
            exists = wanted && entry.id >= 0 && entry.id < (long long)p.pages * p.page_size;
            bad = __any_sync(FULL_WARP, wanted && entry.id >= 0 && !exists);
            page = unsigned(entry.id) / unsigned(p.page_size), slot = entry.id - page * p.page_size;
        } else {
            exists = wanted && unsigned(entry.id) < unsigned(p.pages);
            bad = __any_sync(FULL_WARP, wanted && !exists);
        }
        from = static_cast<const char*>(p.cache);
        if (exists)
            from += (page * p.cache_strides[0] + slot * p.cache_strides[1] + blockIdx.y * p.cache_strides[2]) *
                    (FP8 ? 1 : 2);
        valid_lanes = __ballot_sync(FULL_WARP, exists);
    }

    __device__ __forceinline__ const char* of(int i) const {
        return reinterpret_cast<const char*>(__shfl_sync(FULL_WARP, reinterpret_cast<unsigned long long>(from), i));
    }

    // For each of the first TOKENS lanes, prefetch BYTES bytes of the lane's token into L2.
    template <int TOKENS, int BYTES> __device__ __forceinline__ void prefetch() const {
        constexpr int STRIDE = 64, PREFETCHES = (BYTES + STRIDE - 1) / STRIDE, ALL = TOKENS * PREFETCHES;
#pragma unroll 1
        for (int start = 0; start < ALL; start += 32) {
            const int i = start + threadIdx.x % 32, t = min(i / PREFETCHES, TOKENS - 1);
            const char* const address = of(t) + (i - t * PREFETCHES) * STRIDE;
            if (i < ALL && valid_lanes >> t & 1) prefetch_l2(address);
        }
    }
};
