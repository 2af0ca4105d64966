// Set the counters from which the blocks of attend and attend_scalar draw their pieces to 0.
//
// A kernel and not a memory node of the driver, whose start waits for the kernel before it and holds up the one behind
// it: in a graph that is 5.6 us on an H200, where this takes 1.
//
// Grid: a thread for each counter.
//
// Speed of light: the latency of a launch; the bytes are few.
#include "common/overlap.cuh"

struct ClearParams {
    int* counters; // [count]
    int count;
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS) clear_counters(const __grid_constant__ ClearParams p) {
    begin_behind_earlier_kernels();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < p.count) p.counters[i] = 0;
}
