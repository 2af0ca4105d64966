// Plan with one step per part (plan.cu). A table in shared memory has one byte per unit of cost.
//
// Place the costs of all sequences on a line. Sequence i begins at position starts[i], the sum of FIXED_COST + blocks
// over the earlier sequences. A part that begins at position x has room up to q = x + limit. Let i be the last sequence
// that begins at or before q. The next part begins at the larger of two positions:
//
//   q - FIXED_COST   within sequence i: the next part pays the fixed cost of this sequence again
//   starts[i]        the start of sequence i, if the room left is too small for a token block of this sequence
//
// So the next part begins at q - step_back[q], with the table step_back[q] = min(FIXED_COST, q - starts[i]).
//
// One warp follows this chain for each candidate limit. Most steps find the same value in the table as the step before.
// The warp therefore looks up 32 steps as if the value stayed the same, and accepts the steps up to the first different
// value.
#pragma once
#include "mla_decode/plan_params.cuh"

constexpr int MAX_PARTS = 255; // one thread per part, and one for the end of the last part
constexpr int PARTS_PITCH = MAX_PARTS + 1;
constexpr int FILLED_EARLY = 32768; // table bytes filled while the lengths are read

struct PartsMemory {
    int part_starts[LIMITS]
                   [PARTS_PITCH]; // [limit][part]: position where the part begins; the total cost for an unused part
    int2 firsts[MAX_PARTS + 1];   // [part]: its first sequence and token block
    int mid_sequence_counts[MAX_PARTS + 1]; // [part]: parts of its warp, up to this part, that begin within a sequence
    int sums[32], mid_sequence_sums[8];     // [warp]
    bool fits[LIMITS];                      // [limit]: whether `parts` parts hold all sequences
};
constexpr int BY_PARTS_BYTES = 14512; // offset of the table
static_assert((sizeof(PartsMemory) + 15) / 16 * 16 == BY_PARTS_BYTES, "plan_parts: BY_PARTS_BYTES");

// Return the index of the last element that is at most `value`. `numbers` is ascending and begins with 0.
__device__ __forceinline__ int last_up_to(const int* numbers, int count, int value) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (numbers[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Return whether `parts` parts, each with a cost of at most `limit`, hold all sequences. One warp tests one limit.
__device__ __forceinline__ bool follow_chain(const unsigned char* step_back, int* part_starts, int limit, int total,
                                             int parts) {
    const int lane = threadIdx.x % 32;
    int end = limit, part = 0, predicted = FIXED_COST; // the part has room up to `end`
    if (lane == 0) part_starts[0] = 0;
    while (part < parts) {
        const int q = end + lane * (limit - predicted), found = step_back[min(q, total)];
        const bool stops = lane == 31 || found != predicted || q >= total;
        const int step = __ffs(__ballot_sync(FULL_WARP, stops)) - 1; // the last accepted step
        const int next = part + 1 + lane;
        if (lane <= step && next <= parts) part_starts[next] = q >= total ? total : q - found;
        const int last = end + step * (limit - predicted), spared = __shfl_sync(FULL_WARP, found, step);
        part += step + 1;
        if (last >= total) return part <= parts;
        end = last - spared + limit;
        predicted = step == 0 || spared == predicted ? spared : FIXED_COST;
    }
    return false;
}

// Fill `starts` and the table, and return the total cost. If this cost is at least table_bytes, the table is too small
// and is not filled. The caller must synchronize the block before it reads the results.
template <int THREADS, bool EXTRA>
__device__ __forceinline__ int prefix_sum_costs(const PlanParams& p, PartsMemory& memory, int* starts,
                                                unsigned char* step_back) {
    constexpr int WARPS = THREADS / 32, MAX_BLOCKS = 1 << 18; // limit for a sequence's blocks, larger than the table
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int per_thread = (p.sequences + THREADS - 1) / THREADS, first = thread * per_thread;
    const int end = min(first + per_thread, p.sequences);
    const unsigned fixed_costs = FIXED_COST * 0x01010101u;
    auto fill = [&](int from, int to) {
        for (int i = from / 16 + thread; i < (to + 15) / 16; i += THREADS)
            reinterpret_cast<uint4*>(step_back)[i] = make_uint4(fixed_costs, fixed_costs, fixed_costs, fixed_costs);
    };
    int blocks = first < end ? blocks_of<EXTRA>(p, first) : 0;
    fill(0, min(p.table_bytes, FILLED_EARLY));
    int thread_cost = 0;
    for (int i = first; i < end; ++i) {
        if (i > first) blocks = blocks_of<EXTRA>(p, i);
        thread_cost += starts[i] = min(blocks, MAX_BLOCKS) + FIXED_COST;
    }
    const int inclusive = lanes_inclusive_sum<32>(thread_cost);
    if (lane == 31) memory.sums[warp] = inclusive;
    __syncthreads();
    const int sums = lanes_inclusive_sum<32>(lane < WARPS ? memory.sums[lane] : 0);
    const int total = __shfl_sync(FULL_WARP, sums, WARPS - 1), before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
    if (total >= p.table_bytes) return total;
    if (total >= FILLED_EARLY) {
        fill(FILLED_EARLY, total + 1);
        __syncthreads();
    }
    int start = (warp > 0 ? before : 0) + inclusive - thread_cost;
    for (int i = first; i < end; ++i) {
        const int cost = starts[i];
        starts[i] = start;
#pragma unroll
        for (int j = 0; j < FIXED_COST; ++j) step_back[start + j] = j;
        start += cost;
    }
    if (thread == 0) starts[p.sequences] = total;
    for (int i = thread; i < LIMITS * PARTS_PITCH; i += THREADS)
        memory.part_starts[i / PARTS_PITCH][i % PARTS_PITCH] = total;
    return total;
}

// Write the plan. If the table is too small, write nothing and return false.
template <int THREADS, bool EXTRA> __device__ __forceinline__ bool plan_by_parts(const PlanParams& p, char* shared) {
    PartsMemory& memory = *reinterpret_cast<PartsMemory*>(shared);
    unsigned char* const step_back = reinterpret_cast<unsigned char*>(shared) + BY_PARTS_BYTES;
    int* const starts = reinterpret_cast<int*>(step_back + p.table_bytes);
    constexpr int WARPS = THREADS / 32;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int total = prefix_sum_costs<THREADS, EXTRA>(p, memory, starts, step_back);
    if (total >= p.table_bytes) return false;
    const int min_limit = max((total + p.parts - 1) / p.parts, FIXED_COST + 1);
    __syncthreads(); // `starts`, the table and the initial part_starts are in shared memory
    static_assert(WARPS >= LIMITS, "");
    if (warp < LIMITS) {
        const bool fits = follow_chain(step_back, memory.part_starts[warp], min_limit + warp, total, p.parts);
        if (lane == 0) memory.fits[warp] = fits;
    }
    __syncthreads(); // all part_starts are in shared memory
    const unsigned fitting = __ballot_sync(FULL_WARP, lane < LIMITS && memory.fits[min(lane, LIMITS - 1)]);
    const int* const part_starts = memory.part_starts[fitting ? __ffs(fitting) - 1 : LIMITS - 1];

    // The threads take the sequences in reverse order, because the threads with low indices also search for the start
    // of a part. `part_of` overwrites the table.
    int* const part_of = reinterpret_cast<int*>(step_back);
    for (int i = THREADS - 1 - thread; i < p.sequences; i += THREADS)
        part_of[i] = last_up_to(part_starts, p.parts, starts[i]);
    int2 begin = make_int2(p.sequences, 0);
    bool used = false;
    if (thread < MAX_PARTS + 1) {
        const int part_start = part_starts[min(thread, p.parts)];
        used = thread < p.parts && part_start < total;
        if (part_start < total) {
            begin.x = last_up_to(starts, p.sequences, part_start);
            begin.y = part_start - starts[begin.x];
        }
        const unsigned within = __ballot_sync(FULL_WARP, begin.y > 0);
        memory.firsts[thread] = begin;
        memory.mid_sequence_counts[thread] = __popc(within & (2u << lane) - 1);
        if (lane == 0) memory.mid_sequence_sums[warp] = __popc(within);
    }
    __syncthreads();
    if (thread < p.parts) {
        int2 end = memory.firsts[thread + 1];
        if (end.y == 0) {
            end.x -= 1;
            end.y = starts[end.x + 1] - starts[end.x] - FIXED_COST;
        }
        const int split = begin.y ? thread - part_of[begin.x] : 0;
        int* const row = p.metadata + thread * 8;
        row[0] = begin.x, row[1] = used ? begin.y : 0, row[2] = used ? end.x : 0, row[3] = used ? end.y : 0;
        row[4] = used ? split : 0, row[5] = 0, row[6] = 0, row[7] = 0;
    }
    for (int i = thread; i <= p.sequences; i += THREADS) {
        const int part = i < p.sequences ? part_of[i] : p.parts;
        int splits = i + memory.mid_sequence_counts[part];
        for (int w = 0; w < part / 32; ++w) splits += memory.mid_sequence_sums[w];
        p.splits[i] = splits;
    }
    return true;
}
