// Define a block's static shared memory, which includes a copy of its Row object.
//
// Rarely needed passes are separate functions (__noinline__), because the kernel would not fit the instruction cache if
// all passes were inlined. A Row object passed to them by address could not stay in registers, so these functions copy
// it from shared memory (`recall`). Their argument `passes` is the number of passes over the row made so far. Its
// parity selects the half of the slots that they write.
#pragma once
#include "sampling/row.cuh"

// The k best candidates of draw_listed. Arrays of MAX_LISTED entries are indexed by rank, best first.
struct Listed {
    float weight[MAX_LISTED];
    float before[MAX_LISTED]; // the sum of the weights of all better candidates
    int group[MAX_LISTED];
    unsigned long long best[MAX_LISTED / 32]; // each warp's vote for a group
    int chosen[MAX_LISTED / 32];
};

// Data shared by the threads of a block.
template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // the candidates are the tokens with at least this value
    Bound drawn;
    Listed listed;
    int list_size; // length of the lists, which are the same in all blocks; counted in the first block
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// Copy the Row object to shared memory, once `top` is set. Run by one thread; a barrier must follow.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

// Return the Row object in shared memory, with this thread's lane and warp. `passes` is the number of passes over the
// row made so far.
template <typename Row> __device__ __forceinline__ Row recall(int passes) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.turn = passes % 2;
    return x;
}
