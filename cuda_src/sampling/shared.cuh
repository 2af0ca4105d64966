// Keep a block's static shared memory, with a copy of its row.
//
// The passes that few calls need are separate functions, because inlining all passes would exceed the instruction
// cache. A Row passed to them by address could not stay in registers, so they start from the copy in shared memory.
// `passes`, the number of earlier passes, tells a pass which half of the slots it writes.
#pragma once
#include "sampling/row.cuh"

// The k best candidates of draw_listed, by rank.
struct Listed {
    float weight[MAX_LISTED];
    float before[MAX_LISTED]; // the sum of the weights of the better candidates
    int group[MAX_LISTED];
    unsigned long long best[MAX_LISTED / 32]; // the vote of each warp
    int chosen[MAX_LISTED / 32];
};

// Data shared by the threads of a block.
template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // a value that the k best tokens reach
    Bound drawn;
    Listed listed;
    int list_size; // length of the lists of all blocks, kept in the first block
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// Store the row after `top` is known. Run by one thread; a barrier must follow.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

// Return the stored row with this thread's lane and warp, after `passes` passes.
template <typename Row> __device__ __forceinline__ Row recall(int passes) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.turn = passes % 2;
    return x;
}
