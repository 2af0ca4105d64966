// The schedule of attention_wgmma: where each sequence's tiles begin in the list of all tiles, and a counter of tiles.
//
//   starts[s] = sum over the sequences r < s of ceil(queries of r / tile_tokens)
//
// Rows of q after the last sequence are one more sequence. `counter` becomes 0.
//
// Grid: one block. Each thread counts the tiles of one sequence, and the block computes inclusive sums, in rounds of
// THREADS sequences.
//
// Speed of light: latency. The kernel reads 4 bytes per sequence and writes 4.
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"

struct PlanParams {
    const int* cu_seqlens_q; // [sequences + 1]
    int* starts;             // [sequences + 2]; the last one is the number of tiles
    int* counter;            // [1]
    int tokens;
    int sequences;
    int tile_tokens;
};

template <int THREADS> __global__ void __launch_bounds__(THREADS) plan_tiles(const __grid_constant__ PlanParams p) {
    begin_behind_earlier_kernels();
    __shared__ int warp_sums[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) *p.counter = 0, p.starts[0] = 0;
    int before = 0;
    for (int first = 0; first <= p.sequences; first += THREADS) {
        const int s = first + threadIdx.x;
        int tiles = 0;
        if (s <= p.sequences) {
            const int begin = begin_of(p.cu_seqlens_q, s, p.tokens);
            const int end = s < p.sequences ? begin_of(p.cu_seqlens_q, s + 1, p.tokens) : p.tokens;
            tiles = (max(end - begin, 0) + p.tile_tokens - 1) / p.tile_tokens;
        }
        const int sum = lanes_inclusive_sum<32>(tiles);
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int earlier = before;
        for (int i = 0; i < THREADS / 32; ++i) {
            if (i < warp) earlier += warp_sums[i];
            before += warp_sums[i];
        }
        if (s <= p.sequences) p.starts[s + 1] = earlier + sum;
        __syncthreads(); // all threads have read warp_sums
    }
}
