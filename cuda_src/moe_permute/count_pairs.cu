// Count, for each block of sort_pairs, the pairs (token, slot) of each expert.
//
//   counts[b, e] = pairs of expert e among the pairs_per_block pairs from b * pairs_per_block on
//
// ID: an unsigned integer type as wide as an id in topk_ids.
//
// Grid: as many blocks as in sort_pairs. A block has one counter per expert in shared memory. The last counter (index
// `experts`) is for the pairs without a local expert.
//
// Speed of light: the latencies of the launch, a load, a shared memory atomic and a store. The kernel is timed only as
// a part of moe_permute, which takes 293 us for 8192 tokens with 8 slots on an H200, nearly all of it in permute_rows.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_permute/pairs.cuh"

struct Params {
    Pairs pairs;
    int* counts; // [blocks, experts]
    int pairs_per_block;
};

// `mapped`: size of the expert map, or 0 without a map.
template <typename> constexpr Launch count_pairs_launch(int experts, int mapped) {
    return {SORT_THREADS, int(sizeof(int)) * (experts + 1 + (mapped ? mapped + 1 : 0))};
}

template <typename ID> __global__ void __launch_bounds__(SORT_THREADS) count_pairs(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int IDS_IN_FLIGHT = 4;
    extern __shared__ int shared[];
    const int experts = p.pairs.experts, threads = blockDim.x;
    int* count = shared;            // [experts + 1]
    int* map = count + experts + 1; // [global_experts + 1]
    for (int e = threadIdx.x; e <= experts; e += threads) count[e] = 0;
    load_map(p.pairs, map);
    __syncthreads();
    const int first = int(blockIdx.x) * p.pairs_per_block;
    const int end = min(first + p.pairs_per_block, p.pairs.pairs);
    for (int i = first + int(threadIdx.x); i < end; i += threads * IDS_IN_FLIGHT) {
        int expert[IDS_IN_FLIGHT];
        load_experts<ID>(p.pairs, map, i, threads, end, expert);
#pragma unroll
        for (int j = 0; j < IDS_IN_FLIGHT; ++j) atomicAdd(count + expert[j], 1);
    }
    __syncthreads();
    int* counts = p.counts + (long long)blockIdx.x * experts;
    for (int e = threadIdx.x; e < experts; e += threads) counts[e] = count[e];
}
