// Divide the tokens of all sequences into parts of nearly equal cost, for the attention kernels.
//
//   blocks[i] = ceil(max(lengths[i], 0) / BLOCK_TOKENS), the blocks of sequence i
//   cost      = FIXED + n, of a visit to n blocks of a sequence
//   load      = the smallest cost limit per part such that `parts` parts hold all visits, in sequence order
//
// Grid: one block of PLAN_THREADS threads.
//
// The load is at least ceil(total cost / parts) and at most 2 FIXED more, because a part wastes at most FIXED at its
// end and pays FIXED again to continue a sequence. The kernel tries these LOADS candidates in parallel and takes the
// smallest that fits. A candidate is tested by a sequential chain: over the sequences (plan_by_sequences.cuh), or over
// the parts (plan_by_parts.cuh). Launches with more than 256 threads, for more sequences, use the chain over the parts
// if its table can hold the total cost.
//
// Speed of light: the latency of the chain. An H200 takes 3.3 us for 1 sequence, 4.2 us for 128 and 5.8 us for 1024.
// The chain over the sequences takes 6.3 us for 128 and 52.4 us for 1024. An empty kernel takes 0.5 us.
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
