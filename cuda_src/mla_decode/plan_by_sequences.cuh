// Plan with one step per sequence (plan.cu), for any number of sequences and token blocks.
//
// Lane l of the first warp tests the l-th candidate limit. A new part has room for `capacity = limit - FIXED_COST`
// token blocks of one sequence. `room` is the number of token blocks of another sequence that still fit into the
// current part. A sequence has `full * capacity + remainder` token blocks, with 1 <= remainder <= capacity (both are 0
// for an empty sequence). If the remainder does not fit into the room, the sequence begins in a new part (room <= 0) or
// ends one part later. Both cases have the same update:
//
//   part += full + (room < remainder)
//   room  = max(room, 0) + (room < remainder ? capacity : 0) - remainder - FIXED_COST
#pragma once
#include "mla_decode/plan_params.cuh"

constexpr int PLAN_CHUNK = 256; // sequences per chunk

struct PlanChunk {
    int2* const steps;    // [sequence][limit]: full and remainder, then part and room before the sequence
    int* const new_parts; // [sequence][limit]: parts so far that begin at the start of a sequence
    int* const blocks;
};

// Return the total cost. For each sequence of the first chunk, store the number of token blocks in `blocks`.
template <int THREADS, bool EXTRA>
__device__ __forceinline__ long long total_cost(const PlanParams& p, int* blocks, long long* totals, int thread,
                                                int lane) {
    long long total = 0;
    for (int i = thread; i < p.sequences; i += THREADS) {
        const int n = blocks_of<EXTRA>(p, i);
        if (i < PLAN_CHUNK) blocks[i] = n;
        total += n + FIXED_COST;
    }
    total = lanes_sum<32>(total);
    if (lane == 0) totals[thread / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) total += totals[warp];
    return total;
}

// Compute each sequence's `full` and `remainder` for LIMITS consecutive capacities.
template <int THREADS>
__device__ __forceinline__ void prepare_steps(const PlanChunk& chunk, int count, int min_capacity) {
    for (int i = threadIdx.x; i < count * LIMITS; i += THREADS) {
        const int n = chunk.blocks[i / LIMITS], capacity = min_capacity + i % LIMITS;
        const int full = n > 0 ? (n - 1) / capacity : 0;
        chunk.steps[i] = make_int2(full, n - full * capacity);
    }
}

// Process the sequences of a chunk one after the other, with this lane's limit. Each element of `chunk.steps` is read
// two iterations ahead, to hide the latency of shared memory.
__device__ __forceinline__ void assign_chunk(const PlanChunk& chunk, int count, int capacity, int& part, int& room,
                                             int& new_part_count) {
    const int limit = threadIdx.x;
    auto step_of = [&](int i) { return chunk.steps[min(i, count - 1) * LIMITS + limit]; };
    int2 step = step_of(0), next = step_of(1);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const int2 after = step_of(i + 2);
        const int at = i * LIMITS + limit, full = step.x, remainder = step.y;
        chunk.steps[at] = make_int2(part, room), chunk.new_parts[at] = new_part_count;
        const bool overflows = room < remainder;
        new_part_count += room < min(remainder, 1);
        part += full + overflows;
        room = max(room, 0) + ((overflows ? capacity : 0) - remainder - FIXED_COST);
        step = next, next = after;
    }
}

struct SequencesMemory {
    int2 steps[PLAN_CHUNK * LIMITS];
    int new_parts[PLAN_CHUNK * LIMITS];
    int blocks[PLAN_CHUNK];
    long long totals[32];
    int chosen; // index of a limit
};
constexpr int BY_SEQUENCES_BYTES = 35080;
static_assert(sizeof(SequencesMemory) == BY_SEQUENCES_BYTES, "plan_parts: BY_SEQUENCES_BYTES");

template <int PLAN_THREADS, bool EXTRA>
__device__ __forceinline__ void plan_by_sequences(const PlanParams& p, SequencesMemory& memory) {
    int2* const steps = memory.steps;
    int *const new_parts = memory.new_parts, *const blocks = memory.blocks, &chosen = memory.chosen;
    const PlanChunk chunk{steps, new_parts, blocks};
    const int thread = threadIdx.x, lane = thread % 32;

    for (int i = thread; i < p.parts * 8; i += PLAN_THREADS) p.metadata[i] = i % 8 == 0 ? p.sequences : 0;
    const long long total = total_cost<PLAN_THREADS, EXTRA>(p, blocks, memory.totals, thread, lane);
    const long long share = max((total + p.parts - 1) / p.parts, (long long)FIXED_COST + 1);
    const int min_capacity = int(min(share, 1ll << 30)) - FIXED_COST; // with the smallest limit

    // Pass 0 tests all limits. Pass 1 repeats the steps with the chosen limit and writes the plan. With a single chunk,
    // pass 1 reuses the steps of pass 0.
    const bool one_chunk = p.sequences <= PLAN_CHUNK;
    for (int pass = 0; pass < 2; ++pass) {
        const int limits = pass == 0 ? LIMITS : 1, offset = pass == 0 ? 0 : chosen;
        const int capacity = min_capacity + offset + (pass == 0 ? lane : 0);
        int part = 0, room = capacity, new_part_count = 1;
        for (int start = 0; start < p.sequences; start += PLAN_CHUNK) {
            const int count = min(PLAN_CHUNK, p.sequences - start);
            if (pass == 0 || !one_chunk) {
                if (!one_chunk) {
                    __syncthreads();
                    for (int i = thread; i < count; i += PLAN_THREADS) blocks[i] = blocks_of<EXTRA>(p, start + i);
                    __syncthreads();
                }
                prepare_steps<PLAN_THREADS>(chunk, count, min_capacity + offset);
                __syncthreads();
                if (thread < limits) assign_chunk(chunk, count, capacity, part, room, new_part_count);
            }
            if (pass == 0) continue;
            __syncthreads();
            constexpr int LANES = 8;
            for (int i = thread / LANES; i < count; i += PLAN_THREADS / LANES) {
                const int sequence = start + i, n = blocks[i], at = i * LIMITS + (one_chunk ? chosen : 0);
                const int before = steps[at].x, room = steps[at].y, capacity = min_capacity + chosen;
                const bool begins = room < min(n, 1);
                const int first = before + begins, take = min(n, begins ? capacity : room);
                const int splits = 1 + (n > take ? (n - take - 1) / capacity + 1 : 0);
                const int earlier = sequence + before + 1 - new_parts[at];
                for (int split = thread % LANES; split < splits && first + split < p.parts; split += LANES) {
                    int* const row = p.metadata + (first + split) * 8;
                    const int block = split == 0 ? 0 : take + (split - 1) * capacity;
                    if (split > 0) {
                        row[0] = sequence, row[1] = block, row[4] = split;
                        row[2 - 8] = sequence, row[3 - 8] = block;
                    } else {
                        p.splits[sequence] = earlier;
                        if (begins || sequence == 0) row[0] = sequence;
                        if (begins)
                            row[2 - 8] = sequence - 1,
                                    row[3 - 8] = i > 0 ? blocks[i - 1] : blocks_of<EXTRA>(p, sequence - 1);
                    }
                    if (sequence == p.sequences - 1 && split == splits - 1) {
                        row[2] = sequence, row[3] = n;
                        p.splits[p.sequences] = earlier + splits;
                    }
                }
            }
        }
        if (pass == 0) {
            const unsigned fits = __ballot_sync(FULL_WARP, lane < LIMITS && part < p.parts);
            if (thread == 0) chosen = fits ? __ffs(fits) - 1 : LIMITS - 1;
            __syncthreads();
        }
    }
}
