// Cut the work items (a sequence, a kv head and a block of rows) into KV splits.
#pragma once
#include "common/warp.cuh"
#include "paged_attention/params.cuh"

// The tokens [low, length) that the rows of a sequence attend to. They are in the units [first, first + units); a unit
// has UNIT_TOKENS tokens.
struct TokenRange {
    int low, length, first, units;
    bool covered; // false if `length` was cut to the capacity of the table or of vLLM's workspace

    __device__ TokenRange(const Params& p, int seq) {
        const int wanted = max(p.lengths[seq], 0);
        // Token indices are 32-bit integers, so the capacity is limited to 2^30 tokens.
        long long capacity = min((long long)p.max_blocks * p.block_size, 1ll << 30);
        if (p.vllm_workspace) capacity = min(capacity, (long long)p.max_splits * p.split);
        covered = wanted <= capacity;
        length = covered ? wanted : int(capacity);
        low = p.window ? max(0, length - p.query_tokens - p.window + 1) : 0;
        first = low / UNIT_TOKENS;
        // A sequence without tokens has one unit, because its output must be written.
        units = max(1, ceil_div(length, UNIT_TOKENS) - first);
    }
};

// Tokens [begin, end) of a work item.
struct KvSplit {
    int seq, kv_head, row_block;
    int begin, end, low, length; // `low` and `length` as in TokenRange
    int split_index, num_splits; // index in the item, and splits of the item
    int batch_index;             // index in the batch
    bool covered;

    __device__ bool partial(const Params& p) const { return num_splits > 1 || (p.vllm_workspace && length); }
};

struct Row {
    int token, head; // in range even if the row is not valid
    bool valid;      // false after the last row of the kv head

    __device__ Row(const Params& p, const KvSplit& kv_split, int row) {
        token = p.query_tokens == 1 && row < p.group ? 0 : row / p.group;
        head = kv_split.kv_head * p.group + row - token * p.group;
        valid = token < p.query_tokens;
        if (!valid) token = 0, head = kv_split.kv_head * p.group;
    }

    __device__ long long index(const Params& p, const KvSplit& kv_split) const {
        return ((long long)kv_split.seq * p.query_tokens + token) * p.heads + head;
    }

    // Return the index of the last token that the row attends to.
    __device__ int position(const Params& p, const KvSplit& kv_split) const {
        return valid ? kv_split.length - p.query_tokens + token : -1;
    }
};

// All KV splits of the batch. The device computes them from the lengths, so a CUDA graph stays valid as sequences grow.
// Long sequences come first, so that all blocks finish at about the same time.
struct SplitScheduler {
    static constexpr int CLASSES = 4;
    static constexpr int MAX_UNITS = 1 << 25; // larger than any sequence

    const Params& p;
    const int items;         // per sequence
    int split_units = 0;     // largest size of a split
    int total = 0, mean = 0; // units of all sequences, and per sequence
    int most = 0;            // units of the longest of the lane's sequences
    // `find` looks at 32 sequences at a time, from `first_seq` on, and only at sequences in `length_class`. `before`:
    // the number of splits before these sequences.
    int length_class = 0, first_seq = 0, before = 0;

    __device__ explicit SplitScheduler(const Params& p) : p(p), items(p.kv_heads * p.row_blocks) {}

    __device__ void read_lengths() {
        for (int seq = threadIdx.x % 32; seq < p.seqs; seq += 32) {
            const int units = TokenRange(p, seq).units;
            total += units, most = max(most, units);
        }
        total = __reduce_add_sync(FULL_WARP, total);
        mean = total / p.seqs;
    }

    __device__ bool near_mean(int more) const { return within(mean + more); }

    __device__ int share_of(int blocks) const { return max(p.min_units, ceil_div(total * items, blocks)); }

    __device__ bool within(int units) const { return __reduce_max_sync(FULL_WARP, most) <= units; }

    // Give each block an equal share of the units. If rounding would give more splits than blocks, take the smallest of
    // 32 candidate sizes that gives at most one split per block. Lane l tries `share * (1 + l / 16)`.
    __device__ void plan(unsigned blocks) {
        if (p.split) {
            split_units = p.split / UNIT_TOKENS;
            return;
        }
        const int share = share_of(blocks);
        split_units = share;
        if (p.seqs * items > blocks) return;
        const int lane = threadIdx.x % 32;
        const int tried = share + share * lane / 16;
        // With more than 2^21 units the float rounding may miscount. A few blocks may then get a second split, or
        // splits may be larger than necessary.
        const float inverse = 1.f / tried, rounded = tried - 0.5f;
        int num_splits = 0;
        for (int seq = 0; seq < p.seqs; ++seq) num_splits += int((TokenRange(p, seq).units + rounded) * inverse);
        const unsigned fits = __ballot_sync(FULL_WARP, num_splits * items <= blocks);
        if (fits) split_units = __shfl_sync(FULL_WARP, tried, __ffs(fits) - 1);
    }

    // Return the number of splits. Splits of a fixed size begin at multiples of this size.
    __device__ int count(const TokenRange& range) const {
        return ceil_div(p.split ? range.first % split_units + range.units : range.units, split_units);
    }

    // Return the length class of a sequence: 0 for the longest sequences.
    __device__ int class_of(const TokenRange& range) const {
        return (range.units * 2 <= mean * 3) + (range.units <= mean) + (range.units * 2 <= mean);
    }

    // Find split `index` of the batch. `index` must not decrease between calls. Return false after the last split.
    __device__ bool find(int index, KvSplit& kv_split) {
        const int lane = threadIdx.x % 32;
        for (;; first_seq += 32) {
            if (first_seq >= p.seqs) {
                if (++length_class == CLASSES) return false;
                first_seq = 0;
            }
            int mine = 0;
            if (first_seq + lane < p.seqs) {
                const TokenRange range(p, first_seq + lane);
                if (class_of(range) == length_class) mine = count(range) * items;
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
            set(kv_split, first_seq + found, number, index);
            return true;
        }
    }

    // Splits of different items that cover the same tokens have consecutive numbers.
    __device__ void set(KvSplit& kv_split, int seq, int number, int index) const {
        const TokenRange range(p, seq);
        const int item = number % items;
        kv_split.kv_head = p.row_blocks == 1 ? item : item / p.row_blocks;
        kv_split.row_block = item - kv_split.kv_head * p.row_blocks;
        kv_split.seq = seq, kv_split.split_index = number / items, kv_split.num_splits = count(range),
        kv_split.batch_index = index;
        kv_split.low = range.low, kv_split.length = range.length, kv_split.covered = range.covered;
        auto first_unit = [&](int split_index) {
            if (p.split) return (range.first / split_units + split_index) * split_units;
            // The sizes of an item's splits differ by at most one unit.
            return range.first + split_index * (range.units / kv_split.num_splits) +
                   min(split_index, range.units % kv_split.num_splits);
        };
        kv_split.begin = first_unit(kv_split.split_index) * UNIT_TOKENS;
        kv_split.end = max(kv_split.begin, min(first_unit(kv_split.split_index + 1) * UNIT_TOKENS, range.length));
    }
};
