// The plan as a chain over parts, a few steps at once, where the sequences fit into a table in shared memory.
//
// Line up the cost of all sequences: sequence i begins at starts[i], the sum of FIXED + blocks of those before. A part
// of a load that begins at x has room up to q = x + load. Where sequence i is the last to begin at or before q, the
// next part begins
//
//   at q - FIXED, within sequence i, whose fixed cost is paid again; or
//   at starts[i] if that is larger: what is left of the part is no more than the fixed cost.
//
// So x' = q - spare[q], with spare[q] = min(FIXED, q - starts[i]), a table of bytes that is FIXED but for the first
// places of each sequence. A warp follows this chain for each load. Most steps have the same `spare` as the one before:
// its lanes look up 32 steps as if all had, and it takes those up to the first that has not.
//
// All else is one thread for each part or sequence, with binary searches.
#pragma once
#include "mla_decode/plan_params.cuh"

constexpr int MOST_PARTS = 255; // a part has a thread of its own, and so has the end of the last one
constexpr int CUT_PITCH = MOST_PARTS + 1;
constexpr int FILLED_EARLY = 32768; // bytes of the table, filled while the lengths are on their way

// Shared memory of plan_by_parts.
struct PartsMemory {
    int cuts[LOADS][CUT_PITCH];     // where the parts begin, by load; the total from the first unused one on
    int2 firsts[MOST_PARTS + 1];    // the sequence and the block where a part begins
    int cut_counts[MOST_PARTS + 1]; // parts up to it, from those of its warp on, that begin within a sequence
    int sums[32], cut_sums[8];      // of warps
    bool fits[LOADS];               // whether the parts suffice for a load
};
constexpr int BY_PARTS_BYTES = 14512; // before the table
static_assert((sizeof(PartsMemory) + 15) / 16 * 16 == BY_PARTS_BYTES, "plan_parts: BY_PARTS_BYTES");

// The last of `count` ascending numbers, of which the first is 0, that is at most `value`.
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

// Follow the chain for one load, by a warp; returns whether the parts suffice.
__device__ __forceinline__ bool follow(const unsigned char* spare, int* cuts, int load, int total, int parts) {
    const int lane = threadIdx.x % 32;
    int end = load, part = 0, usual = FIXED; // the room of a part ends at `end`
    if (lane == 0) cuts[0] = 0;
    while (part < parts) {
        const int q = end + lane * (load - usual), found = spare[min(q, total)];
        const bool stops = lane == 31 || found != usual || q >= total;
        const int step = __ffs(__ballot_sync(FULL_WARP, stops)) - 1; // the first that ends this turn
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

// Leave the start of each sequence in `starts`, and the table; returns the total cost, or a larger number than the
// table has room for. A barrier must follow.
template <int THREADS, bool EXTRA>
__device__ __forceinline__ int line_up(const PlanParams& p, PartsMemory& memory, int* starts, unsigned char* spare) {
    constexpr int WARPS = THREADS / 32, MOST = 1 << 18; // more blocks than the table has room for
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
    __syncthreads();
    const int sums = lanes_inclusive_sum<32>(lane < WARPS ? memory.sums[lane] : 0);
    const int total = __shfl_sync(FULL_WARP, sums, WARPS - 1), before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
    if (total >= p.table_bytes) return total;
    if (total >= FILLED_EARLY) {
        fill(FILLED_EARLY, total + 1);
        __syncthreads();
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

// Make the plan, if the table has room; returns whether it has.
template <int THREADS, bool EXTRA> __device__ __forceinline__ bool plan_by_parts(const PlanParams& p, char* shared) {
    PartsMemory& memory = *reinterpret_cast<PartsMemory*>(shared);
    unsigned char* const spare = reinterpret_cast<unsigned char*>(shared) + BY_PARTS_BYTES;
    int* const starts = reinterpret_cast<int*>(spare + p.table_bytes);
    constexpr int WARPS = THREADS / 32;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int total = line_up<THREADS, EXTRA>(p, memory, starts, spare);
    if (total >= p.table_bytes) return false;
    const int least = max((total + p.parts - 1) / p.parts, FIXED + 1);
    __syncthreads();
    static_assert(WARPS >= LOADS, "");
    if (warp < LOADS) {
        const bool fits = follow(spare, memory.cuts[warp], least + warp, total, p.parts);
        if (lane == 0) memory.fits[warp] = fits;
    }
    __syncthreads();
    const unsigned fitting = __ballot_sync(FULL_WARP, lane < LOADS && memory.fits[min(lane, LOADS - 1)]);
    const int* const cuts = memory.cuts[fitting ? __ffs(fitting) - 1 : LOADS - 1];

    // The last threads: the part in which each sequence begins, in place of the table.
    int* const part_of = reinterpret_cast<int*>(spare);
    for (int i = THREADS - 1 - thread; i < p.sequences; i += THREADS) part_of[i] = last_up_to(cuts, p.parts, starts[i]);
    // Thread k: where part k begins.
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
    __syncthreads();
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
