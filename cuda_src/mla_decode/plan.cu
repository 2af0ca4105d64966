// Deal the tokens of all sequences out to parts of nearly the same load, for attend_mma and attend_wgmma.
//
// Grid: one block of 256 threads.
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr int FIXED = 5; // what a visit costs besides its blocks, in blocks

struct PlanParams {
    const int* lengths; // [sequences]; null: all of `length`
    int* metadata;      // [parts, 8]: first sequence, its first block, last sequence, its last block + 1, number of the
                        // split of the first sequence, 0, 0, 0; of an unused part: sequences, 0, ...
    int* splits;        // [sequences + 1]: visits to the sequences before
    int sequences, parts, length;
};

// Each part takes sequences in their order until its load is used up, where a visit costs FIXED and its blocks. The
// load is the smallest for which the parts suffice: between ceil(total / parts) and 2 FIXED more, since no part wastes
// more than FIXED at its end and pays FIXED again for going on with a sequence.
//
// Lane l of the first warp tries the l-th load, sequence by sequence, on a short chain: let `room` be the blocks that
// still go into the part after a fixed cost (`most` if it is new), and let n = whole * most + rest with 1 <= rest <=
// most (n = 0: both 0). Where room < rest, either the sequence begins in a new part (room <= 0), or its last part is
// one further on; both come to
//
//   part += whole + (room < rest),   room = max(room, 0) + (room < rest ? most : 0) - rest - FIXED.
//
// All threads prepare `whole` and `rest`, and afterwards write what follows from part and room before each sequence.
constexpr int LOADS = 2 * FIXED + 1, PLAN_CHUNK = 256;

template <int PLAN_THREADS = 256>
__global__ __launch_bounds__(PLAN_THREADS) void plan_parts(const __grid_constant__ PlanParams p) {
    // Before the sequences of a chunk have been dealt out: whole, rest. After: part and room before each.
    __shared__ int2 steps[PLAN_CHUNK * LOADS];
    // The parts up to there that began with a whole sequence.
    __shared__ int fresh[PLAN_CHUNK * LOADS];
    __shared__ int blocks[PLAN_CHUNK];
    __shared__ long long totals[PLAN_THREADS / 32];
    __shared__ int chosen;
    const int thread = threadIdx.x, lane = thread % 32;
    auto blocks_of = [&](int i) {
        const int length = max(p.lengths ? p.lengths[i] : p.length, 0);
        return length / BLOCK_TOKENS + (length % BLOCK_TOKENS > 0);
    };

    for (int i = thread; i < p.parts * 8; i += PLAN_THREADS) p.metadata[i] = i % 8 == 0 ? p.sequences : 0;
    if (p.sequences == 0) {
        if (thread == 0) p.splits[0] = 0;
        return;
    }

    long long total = 0;
    for (int i = thread; i < p.sequences; i += PLAN_THREADS) {
        const int n = blocks_of(i);
        if (i < PLAN_CHUNK) blocks[i] = n;
        total += n + FIXED;
    }
    total = lanes_sum<32>(total);
    if (lane == 0) totals[thread / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < PLAN_THREADS / 32; ++warp) total += totals[warp];
    const long long share = max((total + p.parts - 1) / p.parts, (long long)FIXED + 1);
    const int least = int(min(share, 1ll << 30)) - FIXED; // of `most`

    // Once for all loads; then for the one chosen, whose steps are still there if all sequences were in one chunk.
    const bool one_chunk = p.sequences <= PLAN_CHUNK;
    for (int pass = 0; pass < 2; ++pass) {
        const int loads = pass == 0 ? LOADS : 1, offset = pass == 0 ? 0 : chosen;
        const int most = least + offset + (pass == 0 ? lane : 0);
        int part = 0, room = most, begun = 1;
        for (int start = 0; start < p.sequences; start += PLAN_CHUNK) {
            const int count = min(PLAN_CHUNK, p.sequences - start);
            if (pass == 0 || !one_chunk) {
                if (!one_chunk) {
                    __syncthreads();
                    for (int i = thread; i < count; i += PLAN_THREADS) blocks[i] = blocks_of(start + i);
                    __syncthreads();
                }
                for (int i = thread; i < count * LOADS; i += PLAN_THREADS) {
                    const int n = blocks[i / LOADS], of_load = least + offset + i % LOADS;
                    const int whole = n > 0 ? (n - 1) / of_load : 0;
                    steps[i] = make_int2(whole, n - whole * of_load);
                }
                __syncthreads();
                if (thread < loads) {
                    // Read two ahead: a read does not wait for the writes before it.
                    auto step_of = [&](int i) { return steps[min(i, count - 1) * LOADS + thread]; };
                    int2 step = step_of(0), next = step_of(1);
#pragma unroll 8
                    for (int i = 0; i < count; ++i) {
                        const int2 after = step_of(i + 2);
                        const int at = i * LOADS + thread, whole = step.x, rest = step.y;
                        steps[at] = make_int2(part, room), fresh[at] = begun;
                        const bool less = room < rest;
                        begun += room < min(rest, 1);
                        part += whole + less;
                        room = max(room, 0) + ((less ? most : 0) - rest - FIXED);
                        step = next, next = after;
                    }
                }
            }
            if (pass == 0) continue;
            __syncthreads();
            // LANES lanes for a sequence, which take its visits in turn.
            constexpr int LANES = 8;
            for (int i = thread / LANES; i < count; i += PLAN_THREADS / LANES) {
                const int sequence = start + i, n = blocks[i], at = i * LOADS + (one_chunk ? chosen : 0);
                const int before = steps[at].x, left = steps[at].y, most = least + chosen;
                const bool begins = left < min(n, 1);
                const int first = before + begins, take = min(n, begins ? most : left);
                const int visits = 1 + (n > take ? (n - take - 1) / most + 1 : 0);
                const int earlier = sequence + before + 1 - fresh[at];
                for (int visit = thread % LANES; visit < visits && first + visit < p.parts; visit += LANES) {
                    int* const row = p.metadata + (first + visit) * 8;
                    const int block = visit == 0 ? 0 : take + (visit - 1) * most;
                    if (visit > 0) {
                        row[0] = sequence, row[1] = block, row[4] = visit;
                        row[2 - 8] = sequence, row[3 - 8] = block;
                    } else {
                        p.splits[sequence] = earlier;
                        if (begins || sequence == 0) row[0] = sequence;
                        if (begins)
                            row[2 - 8] = sequence - 1, row[3 - 8] = i > 0 ? blocks[i - 1] : blocks_of(sequence - 1);
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
