// The pieces that sequences are cut into, and the rows that attend to a piece.
//
// A work item is one block of rows of a sequence and a kv head. The block has as many rows as a team of warps holds.
// The tokens of an item are cut into pieces. A piece has a whole number of units of UNIT_TOKENS tokens.
#pragma once
#include "common/warp.cuh"
#include "paged_attention/params.cuh"

// The tokens of a sequence that its rows attend to: tokens [low, length). They lie in the units [first, first + units),
// where a unit is UNIT_TOKENS tokens.
struct Reach {
    int low, length, first, units;
    bool whole; // false if `length` was cut to the capacity of the table or of vLLM's workspace

    __device__ Reach(const Params& p, int seq) {
        const int wanted = max(p.lengths[seq], 0);
        // Token indices are 32-bit integers, so the capacity is limited to 2^30 tokens.
        long long capacity = min((long long)p.max_blocks * p.block_size, 1ll << 30);
        if (p.vllm_workspace) capacity = min(capacity, (long long)p.max_splits * p.split);
        whole = wanted <= capacity;
        length = whole ? wanted : int(capacity);
        low = p.window ? max(0, length - p.query_tokens - p.window + 1) : 0;
        first = low / UNIT_TOKENS;
        // A sequence without tokens has one unit, because its output must still be written.
        units = max(1, ceil_div(length, UNIT_TOKENS) - first);
    }
};

// A piece of an item: tokens [begin, end).
struct Segment {
    int seq, kv_head, row_block;
    int begin, end, low, length; // `low`, `length` and `whole` are copied from `Reach`
    int piece, pieces;           // index in the item, and number of pieces of the item
    int index;                   // index among all pieces of the batch
    bool whole;

    // Return whether the piece stores a partial result instead of a final result.
    __device__ bool partial(const Params& p) const { return pieces > 1 || (p.vllm_workspace && length); }
};

// One row of an item: one head of one query token.
struct Row {
    int token, head; // query token and head; in range even if the row is not valid
    bool valid;      // false after the last row of the kv head

    __device__ Row(const Params& p, const Segment& segment, int row) {
        token = p.query_tokens == 1 && row < p.group ? 0 : row / p.group;
        head = segment.kv_head * p.group + row - token * p.group;
        valid = token < p.query_tokens;
        if (!valid) token = 0, head = segment.kv_head * p.group;
    }

    __device__ long long index(const Params& p, const Segment& segment) const {
        return ((long long)segment.seq * p.query_tokens + token) * p.heads + head;
    }

    // Return the last token of the cache that the row attends to.
    __device__ int position(const Params& p, const Segment& segment) const {
        return valid ? segment.length - p.query_tokens + token : -1;
    }
};

// All pieces of the batch. Every warp computes the pieces from the lengths on the device, so a CUDA graph stays valid
// as sequences grow. Pieces of long sequences come first, so that the last pieces are short and all blocks finish at
// about the same time.
struct Pieces {
    static constexpr int CLASSES = 4;
    static constexpr int MOST_UNITS = 1 << 25; // larger than any sequence

    const Params& p;
    const int items;         // items per sequence
    int piece_units = 0;     // largest size of a piece
    int total = 0, mean = 0; // units of all sequences; mean units per sequence
    int most = 0;            // units of the longest of the lane's sequences (every 32nd sequence)
    // The current position of `find`. `find` looks at 32 sequences at a time, from `first_seq` on, and only at those in
    // class `length_class`. `before` is the number of pieces that precede them.
    int length_class = 0, first_seq = 0, before = 0;

    __device__ explicit Pieces(const Params& p) : p(p), items(p.kv_heads * p.row_blocks) {}

    __device__ void look() {
        for (int seq = threadIdx.x % 32; seq < p.seqs; seq += 32) {
            const int units = Reach(p, seq).units;
            total += units, most = max(most, units);
        }
        total = __reduce_add_sync(FULL_WARP, total);
        mean = total / p.seqs;
    }

    // Return whether every sequence is at most `more` units longer than the mean.
    __device__ bool even(int more) const { return within(mean + more); }

    // Return the number of units per piece if the batch is divided equally over `blocks` blocks.
    __device__ int share_of(int blocks) const { return max(p.min_units, ceil_div(total * items, blocks)); }

    // Return whether every sequence has at most `units` units.
    __device__ bool within(int units) const { return __reduce_max_sync(FULL_WARP, most) <= units; }

    // Choose the size of the pieces. The first choice is an equal share of the units per block. If this size gives more
    // pieces than blocks, choose the smallest of 32 candidate sizes that gives at most one piece per block: lane l
    // tries the size `share * (1 + l / 16)`.
    __device__ void plan(unsigned blocks) {
        if (p.split) {
            piece_units = p.split / UNIT_TOKENS;
            return;
        }
        const int share = share_of(blocks);
        piece_units = share;
        if (p.seqs * items > blocks) return;
        const int lane = threadIdx.x % 32;
        const int tried = share + share * lane / 16;
        // With more than 2^21 units the float rounding may miscount. The result is still correct, but there may be a
        // few more pieces than blocks, or pieces larger than necessary.
        const float inverse = 1.f / tried, rounded = tried - 0.5f;
        int pieces = 0;
        for (int seq = 0; seq < p.seqs; ++seq) pieces += int((Reach(p, seq).units + rounded) * inverse);
        const unsigned fits = __ballot_sync(FULL_WARP, pieces * items <= blocks);
        if (fits) piece_units = __shfl_sync(FULL_WARP, tried, __ffs(fits) - 1);
    }

    // Return the number of pieces of an item. With a fixed `split`, pieces begin at token indices that are multiples of
    // `split`.
    __device__ int count(const Reach& reach) const {
        return ceil_div(p.split ? reach.first % piece_units + reach.units : reach.units, piece_units);
    }

    // Return the length class of a sequence. Class 0 has the longest sequences.
    __device__ int class_of(const Reach& reach) const {
        return (reach.units * 2 <= mean * 3) + (reach.units <= mean) + (reach.units * 2 <= mean);
    }

    // Find piece `index` of the batch. `index` must not be smaller than in the previous call. Return false if there is
    // no such piece.
    __device__ bool find(int index, Segment& segment) {
        const int lane = threadIdx.x % 32;
        for (;; first_seq += 32) {
            if (first_seq >= p.seqs) {
                if (++length_class == CLASSES) return false;
                first_seq = 0;
            }
            int mine = 0;
            if (first_seq + lane < p.seqs) {
                const Reach reach(p, first_seq + lane);
                if (class_of(reach) == length_class) mine = count(reach) * items;
            }
            if (!__any_sync(FULL_WARP, mine)) continue;
            const int sum = lanes_inclusive_sum<32>(mine);
            const unsigned beyond = __ballot_sync(FULL_WARP, sum > index - before);
            if (beyond == 0) {
                before += __shfl_sync(FULL_WARP, sum, 31);
                continue;
            }
            const int found = __ffs(beyond) - 1;
            const int number = index - before - __shfl_sync(FULL_WARP, sum - mine, found);
            set(segment, first_seq + found, number, index);
            return true;
        }
    }

    // Set `segment` to piece `number` of a sequence. `number` counts the pieces of all items of the sequence. Pieces of
    // different items that cover the same tokens have consecutive numbers.
    __device__ void set(Segment& segment, int seq, int number, int index) const {
        const Reach reach(p, seq);
        const int item = number % items;
        segment.kv_head = p.row_blocks == 1 ? item : item / p.row_blocks;
        segment.row_block = item - segment.kv_head * p.row_blocks;
        segment.seq = seq, segment.piece = number / items, segment.pieces = count(reach), segment.index = index;
        segment.low = reach.low, segment.length = reach.length, segment.whole = reach.whole;
        auto first_unit = [&](int piece) {
            if (p.split) return (reach.first / piece_units + piece) * piece_units;
            // The sizes of an item's pieces differ by at most one unit.
            return reach.first + piece * (reach.units / segment.pieces) + min(piece, reach.units % segment.pieces);
        };
        segment.begin = first_unit(segment.piece) * UNIT_TOKENS;
        segment.end = max(segment.begin, min(first_unit(segment.piece + 1) * UNIT_TOKENS, reach.length));
    }
};
