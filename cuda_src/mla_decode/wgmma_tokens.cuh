// The addresses of tokens in the cache, for the producers that cannot use TMA.
#pragma once
#include "mla_decode/wgmma_shared.cuh"

// The entry of a token in the block table or in `indices`.
struct Entry {
    int id;   // page of the token, or its slot in the cache
    int slot; // slot in the page; -1: the token does not exist

    // Return an entry that needs only one register, for EXTRA: `id` is the slot, and the sign bit of `id` marks the
    // second cache. -1 means no token.
    static __device__ __forceinline__ Entry in_one(int slot, bool second) {
        return {slot < 0 ? -1 : int(min(slot, LAST) | unsigned(second) << 31), 0};
    }
    __device__ __forceinline__ bool second() const { return id < -1; }
    __device__ __forceinline__ int slot_of_one() const { return id & 0x7fffffff; }
    static constexpr int LAST = 0x7ffffffe; // larger than any valid slot
};

// Return the part (the work) of this thread block. With AGAIN the part is read from memory again, so that it does not
// occupy registers in the mainloop.
template <bool AGAIN> __device__ __forceinline__ Part part_again(const Params& p, const Part& part) {
    if constexpr (AGAIN)
        return Part(p, blockIdx.z);
    else
        return part;
}

// The position of a tile of 64 tokens: the sequence, the first token, and the end (exclusive) of the part's tokens in
// this sequence. `token` and `end` are 0 after the last tile of the part.
struct TilePlace {
    int sequence, token, end;
};

// A cursor over all tiles of a part, sequence by sequence.
template <bool GATHER, bool EXTRA, bool AGAIN = EXTRA> struct TileCursor : TilePlace {
    const Params& p;
    const Part& part;

    __device__ __forceinline__ TileCursor(const Params& p, const Part& part) : p(p), part(part) { enter(part.first); }
    __device__ __forceinline__ TileCursor(const Params& p, const Part& part, const TilePlace& place)
        : TilePlace(place), p(p), part(part) {}

    // Move to the first tile of sequence `first`. If this part has no tokens of `first`, move to the next sequence that
    // has some.
    __device__ __forceinline__ void enter(int first) {
        for (sequence = first; sequence <= part.last; ++sequence) {
            const VisitOf<EXTRA> visit(p, part_again<AGAIN>(p, part), sequence);
            token = visit.begin, end = visit.end;
            if (token < end) return;
        }
        token = end = 0;
    }

    __device__ __forceinline__ void advance() {
        if (sequence > part.last) return;
        token += BLOCK_TOKENS;
        if (token >= end) enter(sequence + 1);
    }

    // Return the entry of the i-th token of the tile.
    __device__ __forceinline__ Entry entry(int i) const {
        const int at = token + i;
        Entry entry{0, -1};
        if (at >= end) return EXTRA ? Entry::in_one(-1, false) : entry;
        if constexpr (EXTRA) {
            const Index index(p, sequence, at);
            return Entry::in_one(index.slot, index.second);
        } else {
            entry.id = *id_of(at, entry.slot);
        }
        return entry;
    }

    // Return the address of the entry for token `at` in the block table or in `indices`. Set `slot` to the token's slot
    // in its page (0 with `indices`). Not for EXTRA.
    __device__ __forceinline__ const int* id_of(int at, int& slot) const {
        if constexpr (GATHER) {
            const Visit which(p, sequence);
            slot = 0;
            return p.indices + (which.batch * p.indices_strides[0] + which.token * p.indices_strides[1] + at);
        } else {
            const int page = unsigned(at) / unsigned(p.page_size);
            slot = at - page * p.page_size;
            return p.block_table + (sequence * p.table_stride + page);
        }
    }
};

// The addresses of a warp's tokens in the cache, one per lane.
struct Found {
    const char* from;   // address of this lane's token
    unsigned there;     // mask of the lanes whose token exists
    bool bad;           // whether an entry of one of the lanes is outside the cache
    const char* scales; // address of this token's scales, if they are stored apart from it

    // Find the addresses with EXTRA. BYTES: bytes per token of an 8-bit cache.
    template <bool FP8, int BYTES> __device__ __forceinline__ void find_extra(const Params& p, const Entry& entry) {
        const int slot = entry.slot_of_one();
        const bool wanted = entry.id != -1;
        const Place place(p, entry.second());
        const bool known = wanted && place.has(slot);
        bad = __any_sync(FULL_WARP, wanted && !known);
        from = place.cache, scales = nullptr;
        if constexpr (FP8 && BYTES == BYTES_OF_512) {
            if (known) from = place.in_two_parts(slot, scales);
        } else {
            if (known) from = place.at<FP8 ? 1 : 2>(slot, blockIdx.y);
        }
        there = __ballot_sync(FULL_WARP, known);
    }

    template <bool FP8, bool GATHER> __device__ __forceinline__ void find(const Params& p, const Entry& entry) {
        const bool wanted = entry.slot >= 0;
        bool known;
        int page = entry.id, slot = entry.slot;
        if constexpr (GATHER) {
            known = wanted && entry.id >= 0 && entry.id < (long long)p.pages * p.page_size;
            bad = __any_sync(FULL_WARP, wanted && entry.id >= 0 && !known);
            page = unsigned(entry.id) / unsigned(p.page_size), slot = entry.id - page * p.page_size;
        } else {
            known = wanted && unsigned(entry.id) < unsigned(p.pages);
            bad = __any_sync(FULL_WARP, wanted && !known);
        }
        from = static_cast<const char*>(p.cache);
        if (known)
            from += (page * p.cache_strides[0] + slot * p.cache_strides[1] + blockIdx.y * p.cache_strides[2]) *
                    (FP8 ? 1 : 2);
        there = __ballot_sync(FULL_WARP, known);
    }

    __device__ __forceinline__ const char* of(int i) const {
        return reinterpret_cast<const char*>(__shfl_sync(FULL_WARP, reinterpret_cast<unsigned long long>(from), i));
    }

    // Prefetch the tokens of the first TOKENS lanes, BYTES each, into L2.
    template <int TOKENS, int BYTES> __device__ __forceinline__ void prefetch() const {
        constexpr int PIECE = 64, PIECES = (BYTES + PIECE - 1) / PIECE, ALL = TOKENS * PIECES;
#pragma unroll 1
        for (int start = 0; start < ALL; start += 32) {
            const int i = start + threadIdx.x % 32, t = min(i / PIECES, TOKENS - 1);
            const char* const piece = of(t) + (i - t * PIECES) * PIECE;
            if (i < ALL && there >> t & 1) prefetch_l2(piece);
        }
    }
};
