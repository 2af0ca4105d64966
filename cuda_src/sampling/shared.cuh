// Define a block's static shared memory, which includes a copy of its Row.
//
// Rare passes are separate functions (__noinline__), because the kernel would not fit the instruction cache with all
// passes inlined. They copy the Row from shared memory (`recall`), because a Row passed by address could not stay in
// registers. The parity of `passes_done`, the number of earlier passes, selects the half of the slots that a pass
// writes.
#pragma once
#include "sampling/row.cuh"

// The k best candidates, by rank, best first.
struct Listed {
    float weight[MAX_LIST_K];
    float sum_above[MAX_LIST_K];
    int group[MAX_LIST_K];
    unsigned long long group_vote[MAX_LIST_K / 32]; // by warp
    int id_vote[MAX_LIST_K / 32];
};

template <typename Row> struct Common {
    alignas(16) unsigned char row[sizeof(Row)];
    float sum; // of all weights
    float low; // the candidates are the tokens with at least this value
    Bound drawn;
    Listed listed;
    int list_size; // counted in the first block; all blocks have the same list
};

template <typename Row> __device__ __forceinline__ Common<Row>& common() {
    __shared__ Common<Row> here;
    return here;
}

// One thread calls this after it has set `row_max`. A barrier must follow.
template <typename Row> __device__ __forceinline__ void store(const Row& x) {
    *reinterpret_cast<Row*>(common<Row>().row) = x;
}

template <typename Row> __device__ __forceinline__ const Row& stored() {
    return *reinterpret_cast<const Row*>(common<Row>().row);
}

template <typename Row> __device__ __forceinline__ Row recall(int passes_done) {
    Row x = stored<Row>();
    x.lane = threadIdx.x % 32;
    x.warp = threadIdx.x / 32;
    x.parity = passes_done % 2;
    return x;
}
