// What a block keeps in static shared memory, and the copy of its row there.
//
// Inlined wherever they are needed, the passes would not fit the instruction cache, so those off the usual way are
// functions. They would force the row out of its registers if they took its address: instead they start from a copy in
// shared memory. A pass takes the number of passes before it, which says which half of the slots is its own.
#pragma once
#include "sampling/row.cuh"

// What one block needs to draw from sorted candidates by itself.
struct Listed {
    float weight[MAX_LISTED];
    float before[MAX_LISTED]; // the sum of the better ones
    int group[MAX_LISTED];
    unsigned long long best[MAX_LISTED / 32];
    int chosen[MAX_LISTED / 32];
};

template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // what the k best reach
    Bound drawn;
    Listed listed;
    int list_size;
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// By one thread, before a barrier, once `top` is known.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

// The row as this thread had it before it was stored, after so many passes.
template <typename Row> __device__ __forceinline__ Row recall(int passes) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.turn = passes % 2;
    return x;
}
