// What of each sequence is attended to, and how it is cut into pieces for the blocks of threads.
#pragma once
#include "common/warp.cuh"
#include "paged_attention/params.cuh"

// What of a sequence is attended to: tokens [low, length), in units [first, first + units) of UNIT_TOKENS.
struct Reach {
    int low, length, first, units;
    bool whole; // there is room for every token

    __device__ Reach(const Params& p, int seq) {
        const int wanted = max(p.lengths[seq], 0);
        // Tokens are counted in 32 bits; and vLLM's workspace has room for so many pieces.
        long long capacity = min((long long)p.max_blocks * p.block_size, 1ll << 30);
        if (p.narrow) capacity = min(capacity, (long long)p.max_splits * p.split);
        whole = wanted <= capacity;
        length = whole ? wanted : int(capacity);
        low = p.window ? max(0, length - p.query_tokens - p.window + 1) : 0;
        first = low / UNIT_TOKENS;
        // A sequence of no tokens is a unit too: its rows must be written.
        units = max(1, ceil_div(length, UNIT_TOKENS) - first);
    }
};

// A piece of an item: its tokens [begin, end).
struct Segment {
    int seq, kv_head, row_block;
    int begin, end, low, length;
    int piece, pieces; // of the item
    int index;         // among the pieces of the batch
    bool whole;

    __device__ bool partial(const Params& p) const { return pieces > 1 || (p.narrow && length); }
};

// The pieces of the batch. Every warp finds them by itself, from the lengths. Long sequences come first, so that there
// are short ones left to fill in with when blocks become idle at different times.
struct Pieces {
    static constexpr int CLASSES = 4; // of lengths

    const Params& p;
    const int items;                    // of a sequence
    int piece_units = 0;                // at most
    int mean = 0;                       // units of a sequence
    int kind = 0, base = 0, before = 0; // a class, a sequence, and the pieces of those before

    __device__ explicit Pieces(const Params& p) : p(p), items(p.kv_heads * p.row_blocks) {}

    __device__ void plan() {
        const int lane = threadIdx.x % 32;
        int total = 0;
        for (int seq = lane; seq < p.seqs; seq += 32) total += Reach(p, seq).units;
        total = __reduce_add_sync(FULL_WARP, total);
        mean = total / p.seqs;
        if (p.split) {
            piece_units = p.split / UNIT_TOKENS;
            return;
        }
        // An equal share for each block, or as little more as gives no more pieces than there are blocks: lane l tries
        // l / 16 more.
        const int share = max(p.least, ceil_div(total * items, gridDim.x));
        piece_units = share;
        if (p.seqs * items > gridDim.x) return;
        const int tried = share + share * lane / 16;
        int pieces = 0;
        for (int seq = 0; seq < p.seqs; ++seq) pieces += ceil_div(Reach(p, seq).units, tried);
        const unsigned fits = __ballot_sync(FULL_WARP, pieces * items <= gridDim.x);
        if (fits) piece_units = __shfl_sync(FULL_WARP, tried, __ffs(fits) - 1);
    }

    __device__ int count(const Reach& reach) const {
        // Those of a given size begin at its multiples.
        return ceil_div(p.split ? reach.first % piece_units + reach.units : reach.units, piece_units);
    }

    __device__ int class_of(const Reach& reach) const {
        return (reach.units * 2 <= mean * 3) + (reach.units <= mean) + (reach.units * 2 <= mean);
    }

    // The piece `index`, which is not smaller than at the last call; false if there are not so many.
    __device__ bool find(int index, Segment& segment) {
        const int lane = threadIdx.x % 32;
        for (;; base += 32) {
            if (base >= p.seqs) {
                if (++kind == CLASSES) return false;
                base = 0;
            }
            int mine = 0;
            if (base + lane < p.seqs) {
                const Reach reach(p, base + lane);
                if (class_of(reach) == kind) mine = count(reach) * items;
            }
            const int sum = lanes_inclusive_sum<32>(mine);
            const unsigned beyond = __ballot_sync(FULL_WARP, sum > index - before);
            if (beyond == 0) {
                before += __shfl_sync(FULL_WARP, sum, 31);
                continue;
            }
            const int found = __ffs(beyond) - 1;
            const int rest = index - before - __shfl_sync(FULL_WARP, sum - mine, found);
            const Reach reach(p, base + found);
            const int item = rest % items;
            segment.kv_head = p.row_blocks == 1 ? item : item / p.row_blocks;
            segment.row_block = item - segment.kv_head * p.row_blocks;
            segment.seq = base + found, segment.piece = rest / items, segment.pieces = count(reach),
            segment.index = index;
            segment.low = reach.low, segment.length = reach.length, segment.whole = reach.whole;
            auto unit_at = [&](int piece) {
                if (p.split) return (reach.first / piece_units + piece) * piece_units;
                // As equal as can be.
                return reach.first + piece * (reach.units / segment.pieces) + min(piece, reach.units % segment.pieces);
            };
            segment.begin = unit_at(segment.piece) * UNIT_TOKENS;
            segment.end = max(segment.begin, min(unit_at(segment.piece + 1) * UNIT_TOKENS, reach.length));
            return true;
        }
    }
};
