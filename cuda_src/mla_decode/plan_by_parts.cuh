// The planning chain with one step per part (see plan.cu). A warp takes up to 32 steps at once. The chain needs a table
// in shared memory with one byte per unit of the total cost.
//
// Place the costs of all sequences on a line, one after the other. Sequence i begins at position starts[i], the sum of
// FIXED + blocks over the earlier sequences. A part that begins at position x has room up to q = x + load. Let i be the
// last sequence that begins at or before q. The next part begins at the larger of two positions:
//
//   q - FIXED   within sequence i: the next part pays the fixed cost of this sequence again
//   starts[i]   at the start of sequence i: at most FIXED is left of the part, too little for a block of this sequence
//
// So the next part begins at q - spare[q] with spare[q] = min(FIXED, q - starts[i]). `spare` is a table of bytes. Its
// entries are FIXED except at the first FIXED positions of each sequence.
//
// One warp follows this chain for each candidate load. Most steps find the same value in `spare` as the step before.
// The warp therefore looks up the next 32 steps under the assumption that the value stays the same. It accepts the
// steps up to and including the first step that finds a different value.
//
// All other phases use one thread per part or per sequence, with binary searches.
#pragma once
#include "mla_decode/plan_params.cuh"

constexpr int MOST_PARTS = 255; // one thread per part, and one for the end of the last part
constexpr int CUT_PITCH = MOST_PARTS + 1;
constexpr int FILLED_EARLY = 32768; // bytes of the table that are filled while the lengths are read from memory

struct PartsMemory {
    int cuts[LOADS][CUT_PITCH];     // [load][part]: position where the part begins; the total cost for an unused part
    int2 firsts[MOST_PARTS + 1];    // [part]: the sequence and the token block at which the part begins
    int cut_counts[MOST_PARTS + 1]; // [part]: parts of its warp, up to this one, that begin within a sequence
    int sums[32], cut_sums[8];      // [warp]: sums over the threads of a warp
    bool fits[LOADS];               // [load]: whether `parts` parts hold all sequences
};
constexpr int BY_PARTS_BYTES = 14512; // offset of the table
static_assert((sizeof(PartsMemory) + 15) / 16 * 16 == BY_PARTS_BYTES, "plan_parts: BY_PARTS_BYTES");

// Return the index of the last element of `numbers` that is at most `value`. The `count` elements are in ascending
// order, and numbers[0] is 0.
__device__ __forceinline__ int last_up_to(const int* numbers, int count, int value) {
    int low = 0, high = count; // numbers[low] <= value < numbers[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (numbers[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Follow the chain for one candidate load, with one warp. Return whether `parts` parts hold all sequences.
__device__ __forceinline__ bool follow(const unsigned char* spare, int* cuts, int load, int total, int parts) {
    const int lane = threadIdx.x % 32;
    int end = load, part = 0, usual = FIXED; // the part has room up to `end`; `usual` predicts `spare`
    if (lane == 0) cuts[0] = 0;
    while (part < parts) {
        const int q = end + lane * (load - usual), found = spare[min(q, total)];
        const bool stops = lane == 31 || found != usual || q >= total;
        const int step = __ffs(__ballot_sync(FULL_WARP, stops)) - 1; // the last step that the warp accepts
        const int next = part + 1 + lane;
        if (lane <= step && next <= parts) cuts[next] = q >= total ? total : q - found;
        const int last = end + step * (load - usual), spared = __shfl_sync(FULL_WARP, found, step);
        part += step + 1;
        if (last >= total) return part <= parts;
        end = last - spared + load;
        usual = step == 0 || spared == usual ? spared : FIXED;
    }
    return false;
}

// Fill `starts` and the table `spare`, and return the total cost. If the total cost is at least table_bytes, the table
// is too small and is not filled. The caller must pass a block barrier before it reads `starts` and the table.
template <int THREADS, bool EXTRA>
__device__ __forceinline__ int line_up(const PlanParams& p, PartsMemory& memory, int* starts, unsigned char* spare) {
    constexpr int WARPS = THREADS / 32, MOST = 1 << 18; // limit for a sequence's blocks, larger than the table
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int each = (p.sequences + THREADS - 1) / THREADS, first = thread * each;
    const int end = min(first + each, p.sequences);
    const unsigned word = FIXED * 0x01010101u;
    auto fill = [&](int from, int to) {
        for (int i = from / 16 + thread; i < (to + 15) / 16; i += THREADS)
            reinterpret_cast<uint4*>(spare)[i] = make_uint4(word, word, word, word);
    };
    int blocks = first < end ? blocks_of<EXTRA>(p, first) : 0;
    fill(0, min(p.table_bytes, FILLED_EARLY));
    int own = 0;
    for (int i = first; i < end; ++i) {
        if (i > first) blocks = blocks_of<EXTRA>(p, i);
        own += starts[i] = min(blocks, MOST) + FIXED;
    }
    const int inclusive = lanes_inclusive_sum<32>(own);
    if (lane == 31) memory.sums[warp] = inclusive;
    __syncthreads(); // all warps' sums are in shared memory
    const int sums = lanes_inclusive_sum<32>(lane < WARPS ? memory.sums[lane] : 0);
    const int total = __shfl_sync(FULL_WARP, sums, WARPS - 1), before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
    if (total >= p.table_bytes) return total;
    if (total >= FILLED_EARLY) {
        fill(FILLED_EARLY, total + 1);
        __syncthreads(); // the table is full of FIXED
    }
    int start = (warp > 0 ? before : 0) + inclusive - own;
    for (int i = first; i < end; ++i) {
        const int cost = starts[i];
        starts[i] = start;
#pragma unroll
        for (int j = 0; j < FIXED; ++j) spare[start + j] = j;
        start += cost;
    }
    if (thread == 0) starts[p.sequences] = total;
    for (int i = thread; i < LOADS * CUT_PITCH; i += THREADS) memory.cuts[i / CUT_PITCH][i % CUT_PITCH] = total;
    return total;
}

// Make the plan and return true. Return false if the table is too small.
template <int THREADS, bool EXTRA> __device__ __forceinline__ bool plan_by_parts(const PlanParams& p, char* shared) {
    PartsMemory& memory = *reinterpret_cast<PartsMemory*>(shared);
    unsigned char* const spare = reinterpret_cast<unsigned char*>(shared) + BY_PARTS_BYTES;
    int* const starts = reinterpret_cast<int*>(spare + p.table_bytes);
    constexpr int WARPS = THREADS / 32;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int total = line_up<THREADS, EXTRA>(p, memory, starts, spare);
    if (total >= p.table_bytes) return false;
    const int least = max((total + p.parts - 1) / p.parts, FIXED + 1);
    __syncthreads(); // `starts`, the table and the initial cuts are in shared memory
    static_assert(WARPS >= LOADS, "");
    if (warp < LOADS) {
        const bool fits = follow(spare, memory.cuts[warp], least + warp, total, p.parts);
        if (lane == 0) memory.fits[warp] = fits;
    }
    __syncthreads(); // the cuts of all loads are in shared memory
    const unsigned fitting = __ballot_sync(FULL_WARP, lane < LOADS && memory.fits[min(lane, LOADS - 1)]);
    const int* const cuts = memory.cuts[fitting ? __ffs(fitting) - 1 : LOADS - 1];

    // Find the part in which each sequence begins. Threads take the sequences in reverse order, because the threads
    // with low indices also search for the start of a part below. `part_of` overwrites the table.
    int* const part_of = reinterpret_cast<int*>(spare);
    for (int i = THREADS - 1 - thread; i < p.sequences; i += THREADS) part_of[i] = last_up_to(cuts, p.parts, starts[i]);
    // Thread k finds where part k begins.
    int2 begin = make_int2(p.sequences, 0);
    bool used = false;
    if (thread < MOST_PARTS + 1) {
        const int cut = cuts[min(thread, p.parts)];
        used = thread < p.parts && cut < total;
        if (cut < total) {
            begin.x = last_up_to(starts, p.sequences, cut);
            begin.y = cut - starts[begin.x];
        }
        const unsigned within = __ballot_sync(FULL_WARP, begin.y > 0);
        memory.firsts[thread] = begin;
        memory.cut_counts[thread] = __popc(within & (2u << lane) - 1);
        if (lane == 0) memory.cut_sums[warp] = __popc(within);
    }
    __syncthreads(); // `part_of`, `firsts` and the counts are in shared memory
    if (thread < p.parts) {
        int2 end = memory.firsts[thread + 1];
        if (end.y == 0) {
            end.x -= 1;
            end.y = starts[end.x + 1] - starts[end.x] - FIXED;
        }
        const int split = begin.y ? thread - part_of[begin.x] : 0;
        int* const row = p.metadata + thread * 8;
        row[0] = begin.x, row[1] = used ? begin.y : 0, row[2] = used ? end.x : 0, row[3] = used ? end.y : 0;
        row[4] = used ? split : 0, row[5] = 0, row[6] = 0, row[7] = 0;
    }
    for (int i = thread; i <= p.sequences; i += THREADS) {
        const int part = i < p.sequences ? part_of[i] : p.parts;
        int visits = i + memory.cut_counts[part];
        for (int w = 0; w < part / 32; ++w) visits += memory.cut_sums[w];
        p.splits[i] = visits;
    }
    return true;
}
