// The pieces that sequences are cut into for the blocks of threads, and the rows that attend to a piece.
//
// An item is (sequence, kv head, block of a team's rows). The tokens of an item are cut into pieces, of whole units of
// UNIT_TOKENS.
#pragma once
#include "common/warp.cuh"
#include "paged_attention/params.cuh"

// The tokens of a sequence that are attended to: [low, length), in units [first, first + units).
struct Reach {
    int low, length, first, units;
    bool whole; // whether `length` is the sequence's: its table, and vLLM's workspace, have room for every token

    __device__ Reach(const Params& p, int seq) {
        const int wanted = max(p.lengths[seq], 0);
        // Tokens are counted in 32 bits.
        long long capacity = min((long long)p.max_blocks * p.block_size, 1ll << 30);
        if (p.vllm_workspace) capacity = min(capacity, (long long)p.max_splits * p.split);
        whole = wanted <= capacity;
        length = whole ? wanted : int(capacity);
        low = p.window ? max(0, length - p.query_tokens - p.window + 1) : 0;
        first = low / UNIT_TOKENS;
        // A sequence of no tokens is a unit too: its rows must be written.
        units = max(1, ceil_div(length, UNIT_TOKENS) - first);
    }
};

// A piece of an item: tokens [begin, end).
struct Segment {
    int seq, kv_head, row_block;
    int begin, end, low, length; // `low`, `length` and `whole` are those of `Reach`
    int piece, pieces;           // its number in the item, and how many the item has
    int index;                   // its number in the batch
    bool whole;

    // Whether the piece leaves a partial result.
    __device__ bool partial(const Params& p) const { return pieces > 1 || (p.vllm_workspace && length); }
};

// One row of an item: a query token of a head.
struct Row {
    int token, head; // of the query; valid ones also where the row is not
    bool valid;      // false past the last row of the kv head

    __device__ Row(const Params& p, const Segment& segment, int row) {
        token = p.query_tokens == 1 && row < p.group ? 0 : row / p.group;
        head = segment.kv_head * p.group + row - token * p.group;
        valid = token < p.query_tokens;
        if (!valid) token = 0, head = segment.kv_head * p.group;
    }

    __device__ long long index(const Params& p, const Segment& segment) const {
        return ((long long)segment.seq * p.query_tokens + token) * p.heads + head;
    }

    // The last token of the cache that the row sees.
    __device__ int position(const Params& p, const Segment& segment) const {
        return valid ? segment.length - p.query_tokens + token : -1;
    }
};

// All pieces of the batch, which every warp finds by itself from the lengths: so a CUDA graph stays right as sequences
// grow. Long sequences come first, so that short pieces are left to fill in when blocks become idle at different times.
struct Pieces {
    static constexpr int CLASSES = 4;          // of lengths
    static constexpr int MOST_UNITS = 1 << 25; // of a sequence: more than any has

    const Params& p;
    const int items;         // of a sequence
    int piece_units = 0;     // of a piece, at most
    int total = 0, mean = 0; // units of all sequences, and of one
    int most = 0;            // units of one of every 32 sequences, those of the lane
    // Where `find` stands: at 32 sequences of a class of lengths, after `before` pieces.
    int length_class = 0, first_seq = 0, before = 0;

    __device__ explicit Pieces(const Params& p) : p(p), items(p.kv_heads * p.row_blocks) {}

    // Look at the lengths.
    __device__ void look() {
        for (int seq = threadIdx.x % 32; seq < p.seqs; seq += 32) {
            const int units = Reach(p, seq).units;
            total += units, most = max(most, units);
        }
        total = __reduce_add_sync(FULL_WARP, total);
        mean = total / p.seqs;
    }

    // Whether no sequence has more than `more` units above the mean.
    __device__ bool even(int more) const { return within(mean + more); }

    // Units of a piece that is an equal share of one of so many blocks.
    __device__ int share_of(int blocks) const { return max(p.min_units, ceil_div(total * items, blocks)); }

    // Whether no sequence has more than `units`.
    __device__ bool within(int units) const { return __reduce_max_sync(FULL_WARP, most) <= units; }

    // Choose the size of the pieces: an equal share of the units for each of so many blocks, or as little more (lane l
    // tries l / 16 of a share) as gives no more pieces than there are blocks.
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
        // Rounding may miscount the pieces of more than 2^21 units, which then are some more than blocks, or larger.
        const float inverse = 1.f / tried, rounded = tried - 0.5f;
        int pieces = 0;
        for (int seq = 0; seq < p.seqs; ++seq) pieces += int((Reach(p, seq).units + rounded) * inverse);
        const unsigned fits = __ballot_sync(FULL_WARP, pieces * items <= blocks);
        if (fits) piece_units = __shfl_sync(FULL_WARP, tried, __ffs(fits) - 1);
    }

    // The pieces of an item of a sequence. Pieces of the size `split` begin at its multiples.
    __device__ int count(const Reach& reach) const {
        return ceil_div(p.split ? reach.first % piece_units + reach.units : reach.units, piece_units);
    }

    // The class of a sequence, of which 0 has the longest.
    __device__ int class_of(const Reach& reach) const {
        return (reach.units * 2 <= mean * 3) + (reach.units <= mean) + (reach.units * 2 <= mean);
    }

    // Find piece `index` of the batch, which is not smaller than at the last call; false if there are not so many.
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

    // Set `segment` to piece `number` of a sequence, of which the pieces of all items with the same tokens are
    // neighbours.
    __device__ void set(Segment& segment, int seq, int number, int index) const {
        const Reach reach(p, seq);
        const int item = number % items;
        segment.kv_head = p.row_blocks == 1 ? item : item / p.row_blocks;
        segment.row_block = item - segment.kv_head * p.row_blocks;
        segment.seq = seq, segment.piece = number / items, segment.pieces = count(reach), segment.index = index;
        segment.low = reach.low, segment.length = reach.length, segment.whole = reach.whole;
        auto first_unit = [&](int piece) {
            if (p.split) return (reach.first / piece_units + piece) * piece_units;
            // Pieces of an item differ by a unit at most.
            return reach.first + piece * (reach.units / segment.pieces) + min(piece, reach.units % segment.pieces);
        };
        segment.begin = first_unit(segment.piece) * UNIT_TOKENS;
        segment.end = max(segment.begin, min(first_unit(segment.piece + 1) * UNIT_TOKENS, reach.length));
    }
};
