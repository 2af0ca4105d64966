// Divide the tokens of all sequences into SM parts of nearly equal cost. An SM part is a block's range of the work
// (parts.cuh).
//
//   blocks[i] = ceil(max(lengths[i], 0) / BLOCK_TOKENS), the number of token blocks of sequence i
//   cost      = FIXED_COST + n, the cost of a split with n token blocks
//   limit     = the smallest limit such that `parts` parts, each filled up to this cost in sequence order, suffice
//
// Grid: one block of PLAN_THREADS threads.
//
// A part leaves at most FIXED_COST unused at its end, and pays FIXED_COST again if it continues a sequence. The limit
// is therefore at least ceil(total cost / parts), and at most 2 * FIXED_COST larger. The LIMITS = 2 * FIXED_COST + 1
// candidates in this range are tested in parallel, each by a chain of dependent steps: one step per sequence
// (plan_by_sequences.cuh) or, with more than 256 threads for many sequences, one step per part (plan_by_parts.cuh).
//
// Speed of light: the latency of this chain. On an H200 the kernel takes 3.3 us for 1 sequence, 4.2 us for 128 and 5.8
// us for 1024. With one step per sequence it takes 6.3 us for 128 sequences and 52.4 us for 1024. An empty kernel takes
// 0.5 us.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "mla_decode/plan_by_parts.cuh"
#include "mla_decode/plan_by_sequences.cuh"

// table_bytes: size of the table of plan_by_parts, or 0 to plan with one step per sequence.
template <int PLAN_THREADS = 256, bool = false> constexpr Launch plan_parts_launch(int sequences, int table_bytes) {
    const int by_parts = PLAN_THREADS > 256 ? BY_PARTS_BYTES + table_bytes + int(sizeof(int)) * (sequences + 1) : 0;
    return {PLAN_THREADS, by_parts > BY_SEQUENCES_BYTES ? by_parts : BY_SEQUENCES_BYTES};
}

template <int PLAN_THREADS = 256, bool EXTRA = false>
__global__ __launch_bounds__(PLAN_THREADS, 1) void plan_parts(const __grid_constant__ PlanParams p) {
    begin_behind_earlier_kernels();
    extern __shared__ __align__(16) char shared[];
    if (p.sequences == 0) {
        for (int i = threadIdx.x; i < p.parts * 8; i += PLAN_THREADS) p.metadata[i] = 0;
        if (threadIdx.x == 0) p.splits[0] = 0;
        return;
    }
    if constexpr (PLAN_THREADS > 256) {
        if (plan_by_parts<PLAN_THREADS, EXTRA>(p, shared)) return;
        __syncthreads();
    }
    plan_by_sequences<PLAN_THREADS, EXTRA>(p, *reinterpret_cast<SequencesMemory*>(shared));
}
