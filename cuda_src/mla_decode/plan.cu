// Deal the tokens of all sequences out to parts of nearly the same load, for attend_mma and attend_wgmma.
//
//   blocks[i] = ceil(max(lengths[i], 0) / BLOCK_TOKENS)
//   cost      = FIXED + blocks, of a visit to that many blocks of a sequence
//   load      = the smallest for which `parts` parts, filled with the sequences in their order, hold all visits
//
// Grid: one block of PLAN_THREADS threads.
//
// The load lies between ceil(total cost / parts) and 2 FIXED more, because a part wastes at most FIXED at its end and
// pays FIXED again for going on with a sequence. So there are LOADS loads to try, all at once, and the smallest that
// fits is taken: by a chain over the sequences (plan_by_sequences.cuh). With more threads than 256, for more sequences,
// it is one over the parts (plan_by_parts.cuh) if they fit into its table.
//
// Bound by the latency of the chain: on an H200 3.3 us for 1 sequence, 4.2 us for 128 and 5.8 us for 1024 (6.3 us and
// 52.4 us by the sequences), where an empty kernel takes 0.5 us.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "mla_decode/plan_by_parts.cuh"
#include "mla_decode/plan_by_sequences.cuh"

// table_bytes: of the table of plan_by_parts, 0 where that is not taken.
template <int PLAN_THREADS = 256, bool = false> constexpr Launch plan_parts_launch(int sequences, int table_bytes) {
    const int by_parts = PLAN_THREADS > 256 ? BY_PARTS_BYTES + table_bytes + int(sizeof(int)) * (sequences + 1) : 0;
    return {PLAN_THREADS, by_parts > BY_SEQUENCES_BYTES ? by_parts : BY_SEQUENCES_BYTES};
}

// EXTRA: with a second cache, or with numbers of the indices that count.
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
