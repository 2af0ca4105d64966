// Divide the tokens of all sequences into parts of nearly equal cost. A part is the work of the thread blocks of an
// attention kernel with the same blockIdx.z (see parts.cuh).
//
//   blocks[i] = ceil(max(lengths[i], 0) / BLOCK_TOKENS), the number of token blocks of sequence i
//   cost      = FIXED + n, the cost of n token blocks of one sequence in one part
//   load      = the smallest cost limit per part such that `parts` parts, filled in sequence order, suffice
//
// Grid: one block of PLAN_THREADS threads.
//
// The load is between ceil(total cost / parts) and that value plus 2 * FIXED, because a part leaves at most FIXED
// unused at its end, and pays FIXED again if it continues a sequence. The kernel therefore tests LOADS = 2 * FIXED + 1
// candidates in parallel and takes the smallest that suffices. A candidate is tested by a chain of dependent steps: one
// step per sequence (plan_by_sequences.cuh) or one step per part (plan_by_parts.cuh). The chain over the parts is used
// if two conditions hold: the launch has more than 256 threads, which the host chooses for many sequences, and the
// table of this chain can hold the total cost.
//
// Speed of light: the latency of the chain. On an H200 the kernel takes 3.3 us for 1 sequence, 4.2 us for 128 and 5.8
// us for 1024. With the chain over the sequences it takes 6.3 us for 128 sequences and 52.4 us for 1024. An empty
// kernel takes 0.5 us.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "mla_decode/plan_by_parts.cuh"
#include "mla_decode/plan_by_sequences.cuh"

// table_bytes: size of the table of plan_by_parts, 0 if that chain is not used.
template <int PLAN_THREADS = 256, bool = false> constexpr Launch plan_parts_launch(int sequences, int table_bytes) {
    const int by_parts = PLAN_THREADS > 256 ? BY_PARTS_BYTES + table_bytes + int(sizeof(int)) * (sequences + 1) : 0;
    return {PLAN_THREADS, by_parts > BY_SEQUENCES_BYTES ? by_parts : BY_SEQUENCES_BYTES};
}

// EXTRA: there is a second cache, or topk_lengths limits the indices.
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
