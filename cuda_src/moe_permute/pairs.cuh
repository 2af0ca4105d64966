#pragma once
#include "common/vectors.cuh"
#include "common/warp.cuh"

constexpr int SORT_THREADS = 1024;

// Pair `p = token * topk + slot` goes to expert topk_ids[p], or, with a map, to expert expert_map[topk_ids[p]].
struct Pairs {
    const void* topk_ids;  // [pairs]  ID
    const int* expert_map; // [global_experts], may be null
    int pairs;
    int global_experts; // range of the ids
    int experts;        // local experts, 0 .. experts - 1
};

// Load the experts of the pairs `first`, `first + step`, ..., with NUMBER loads in flight. A pair gets p.experts if it
// has no local expert, or is not before `end`. ID is unsigned, so a negative id compares greater than all experts.
template <typename ID, int NUMBER>
__device__ __forceinline__ void load_experts(const Pairs& p, const int* map, int first, int step, int end,
                                             int (&expert)[NUMBER]) {
    ID id[NUMBER];
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) {
        const int pair = first + j * step;
        id[j] = ID(p.global_experts);
        if (pair < end) id[j] = static_cast<const ID*>(p.topk_ids)[pair];
    }
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) expert[j] = int(min(id[j], ID(p.global_experts)));
    if (p.expert_map) {
#pragma unroll
        for (int j = 0; j < NUMBER; ++j) expert[j] = map[expert[j]];
    }
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) expert[j] = int(min(unsigned(expert[j]), unsigned(p.experts)));
}

// Copy the expert map to shared memory. All invalid ids use the last entry, -1.
__device__ __forceinline__ void load_map(const Pairs& p, int* map) {
    if (p.expert_map)
        for (int i = threadIdx.x; i <= p.global_experts; i += int(blockDim.x))
            map[i] = i < p.global_experts ? p.expert_map[i] : -1;
}

// Return the mask of the lanes that have the same expert as this lane. The mask of a lane without an expert is
// meaningless.
template <int BITS> __device__ __forceinline__ unsigned lanes_of_expert(int expert, int experts) {
    unsigned lanes = __ballot_sync(FULL_WARP, expert < experts);
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const bool set = expert >> bit & 1;
        const unsigned lanes_set = __ballot_sync(FULL_WARP, set);
        lanes &= set ? lanes_set : ~lanes_set;
    }
    return lanes;
}
