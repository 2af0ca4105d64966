// What a block keeps in static shared memory, and the copy of its row there.
//
// Inlined wherever they are needed, the passes would not fit the instruction cache, so those that few calls need are
// functions of their own. Were they passed the address of the row, it could not stay in registers: instead they start
// from a copy in shared memory. A pass is told the number of passes before it, which says which half of the slots it
// writes.
#pragma once
#include "sampling/row.cuh"

// The k best candidates of the draw from the list, by rank.
struct Listed {
    float weight[MAX_LISTED];
    float before[MAX_LISTED]; // the sum of the weights of the better ones
    int group[MAX_LISTED];
    unsigned long long best[MAX_LISTED / 32]; // the votes of each warp
    int chosen[MAX_LISTED / 32];
};

// What the threads of a block share.
template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // a value that the k best reach
    Bound drawn;
    Listed listed;
    int list_size; // of the lists of all blocks, in the first block
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// Store the row, once `top` is known: by one thread, with a barrier after it.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

// The stored row as this thread has it after so many passes.
template <typename Row> __device__ __forceinline__ Row recall(int passes) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.turn = passes % 2;
    return x;
}
