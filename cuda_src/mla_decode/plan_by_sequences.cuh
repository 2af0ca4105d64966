// The planning chain with one step per sequence (see plan.cu), for any number of sequences and token blocks.
//
// Lane l of the first warp tests the l-th candidate load, sequence by sequence. `room` is the number of token blocks
// that fit into the current part if it starts on another sequence, which costs FIXED. A new part has room for `capacity
// = load - FIXED` token blocks. A sequence has `whole * capacity + rest` token blocks, where `rest` is between 1 and
// `capacity` (`whole` and `rest` are 0 for an empty sequence). If the rest does not fit into the room, the sequence
// either begins in a new part (room <= 0) or ends one part later. Both cases have the same update:
//
//   part += whole + (room < rest),   room = max(room, 0) + (room < rest ? capacity : 0) - rest - FIXED.
//
// All threads compute `whole` and `rest` before the chain. After the chain, they write the plan from `part` and `room`.
#pragma once
#include "mla_decode/plan_params.cuh"

constexpr int PLAN_CHUNK = 256; // sequences per chunk

// A chunk of up to PLAN_CHUNK sequences, in shared memory.
struct PlanChunk {
    int2* const steps; // [sequence][load]: whole and rest; deal() replaces them by the current part and room
    int* const fresh;  // [sequence][load]: number of parts so far that begin at the start of a sequence
    int* const blocks; // [sequence]: number of token blocks
};

// Return the total cost of all sequences. Store the number of token blocks of each sequence of the first chunk in
// `blocks`.
template <int THREADS, bool EXTRA>
__device__ __forceinline__ long long total_cost(const PlanParams& p, int* blocks, long long* totals, int thread,
                                                int lane) {
    long long total = 0;
    for (int i = thread; i < p.sequences; i += THREADS) {
        const int n = blocks_of<EXTRA>(p, i);
        if (i < PLAN_CHUNK) blocks[i] = n;
        total += n + FIXED;
    }
    total = lanes_sum<32>(total);
    if (lane == 0) totals[thread / 32] = total;
    __syncthreads(); // all warps' totals are in shared memory
    total = 0;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) total += totals[warp];
    return total;
}

// Compute `whole` and `rest` of each sequence for LOADS consecutive capacities, which start at `least`.
template <int THREADS> __device__ __forceinline__ void prepare_steps(const PlanChunk& chunk, int count, int least) {
    for (int i = threadIdx.x; i < count * LOADS; i += THREADS) {
        const int n = chunk.blocks[i / LOADS], capacity = least + i % LOADS;
        const int whole = n > 0 ? (n - 1) / capacity : 0;
        chunk.steps[i] = make_int2(whole, n - whole * capacity);
    }
}

// Run the chain over the sequences of a chunk with this lane's load. Each step is read two iterations before its use,
// so that the chain does not wait for shared memory.
__device__ __forceinline__ void deal(const PlanChunk& chunk, int count, int capacity, int& part, int& room,
                                     int& begun) {
    const int load = threadIdx.x;
    auto step_of = [&](int i) { return chunk.steps[min(i, count - 1) * LOADS + load]; };
    int2 step = step_of(0), next = step_of(1);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
        const int2 after = step_of(i + 2);
        const int at = i * LOADS + load, whole = step.x, rest = step.y;
        chunk.steps[at] = make_int2(part, room), chunk.fresh[at] = begun;
        const bool overflows = room < rest;
        begun += room < min(rest, 1);
        part += whole + overflows;
        room = max(room, 0) + ((overflows ? capacity : 0) - rest - FIXED);
        step = next, next = after;
    }
}

struct SequencesMemory {
    int2 steps[PLAN_CHUNK * LOADS];
    int fresh[PLAN_CHUNK * LOADS];
    int blocks[PLAN_CHUNK];
    long long totals[32];
    int chosen; // index of the chosen load
};
constexpr int BY_SEQUENCES_BYTES = 35080;
static_assert(sizeof(SequencesMemory) == BY_SEQUENCES_BYTES, "plan_parts: BY_SEQUENCES_BYTES");

template <int PLAN_THREADS, bool EXTRA>
__device__ __forceinline__ void plan_by_sequences(const PlanParams& p, SequencesMemory& memory) {
    int2* const steps = memory.steps;
    int *const fresh = memory.fresh, *const blocks = memory.blocks, &chosen = memory.chosen;
    const PlanChunk chunk{steps, fresh, blocks};
    const int thread = threadIdx.x, lane = thread % 32;

    for (int i = thread; i < p.parts * 8; i += PLAN_THREADS) p.metadata[i] = i % 8 == 0 ? p.sequences : 0;
    const long long total = total_cost<PLAN_THREADS, EXTRA>(p, blocks, memory.totals, thread, lane);
    const long long share = max((total + p.parts - 1) / p.parts, (long long)FIXED + 1);
    const int least = int(min(share, 1ll << 30)) - FIXED; // capacity of a part with the smallest load

    // Pass 0 tests all loads. Pass 1 repeats the chosen load and writes the plan. If all sequences are in one chunk,
    // pass 1 reuses the steps of pass 0.
    const bool one_chunk = p.sequences <= PLAN_CHUNK;
    for (int pass = 0; pass < 2; ++pass) {
        const int loads = pass == 0 ? LOADS : 1, offset = pass == 0 ? 0 : chosen;
        const int capacity = least + offset + (pass == 0 ? lane : 0);
        int part = 0, room = capacity, begun = 1;
        for (int start = 0; start < p.sequences; start += PLAN_CHUNK) {
            const int count = min(PLAN_CHUNK, p.sequences - start);
            if (pass == 0 || !one_chunk) {
                if (!one_chunk) {
                    __syncthreads();
                    for (int i = thread; i < count; i += PLAN_THREADS) blocks[i] = blocks_of<EXTRA>(p, start + i);
                    __syncthreads();
                }
                prepare_steps<PLAN_THREADS>(chunk, count, least + offset);
                __syncthreads();
                if (thread < loads) deal(chunk, count, capacity, part, room, begun);
            }
            if (pass == 0) continue;
            __syncthreads();
            // A visit is the work of one part on one sequence. LANES lanes share a sequence. The i-th of these lanes
            // writes the metadata of visits i, i + LANES, and so on.
            constexpr int LANES = 8;
            for (int i = thread / LANES; i < count; i += PLAN_THREADS / LANES) {
                const int sequence = start + i, n = blocks[i], at = i * LOADS + (one_chunk ? chosen : 0);
                const int before = steps[at].x, room = steps[at].y, capacity = least + chosen;
                const bool begins = room < min(n, 1);
                const int first = before + begins, take = min(n, begins ? capacity : room);
                const int visits = 1 + (n > take ? (n - take - 1) / capacity + 1 : 0);
                const int earlier = sequence + before + 1 - fresh[at];
                for (int visit = thread % LANES; visit < visits && first + visit < p.parts; visit += LANES) {
                    int* const row = p.metadata + (first + visit) * 8;
                    const int block = visit == 0 ? 0 : take + (visit - 1) * capacity;
                    if (visit > 0) {
                        row[0] = sequence, row[1] = block, row[4] = visit;
                        row[2 - 8] = sequence, row[3 - 8] = block;
                    } else {
                        p.splits[sequence] = earlier;
                        if (begins || sequence == 0) row[0] = sequence;
                        if (begins)
                            row[2 - 8] = sequence - 1,
                                    row[3 - 8] = i > 0 ? blocks[i - 1] : blocks_of<EXTRA>(p, sequence - 1);
                    }
                    if (sequence == p.sequences - 1 && visit == visits - 1) {
                        row[2] = sequence, row[3] = n;
                        p.splits[p.sequences] = earlier + visits;
                    }
                }
            }
        }
        if (pass == 0) {
            const unsigned fits = __ballot_sync(FULL_WARP, lane < LOADS && part < p.parts);
            if (thread == 0) chosen = fits ? __ffs(fits) - 1 : LOADS - 1;
            __syncthreads();
        }
    }
}
