// Copy blocks within the paged caches of all layers.
//
//   cache[to] = cache[from], for all pairs (from, to) of blocks
//
// A pair with a block outside of the cache is skipped.
//
// Grid: x: `splits` thread blocks per pair; y: caches, whose addresses are kernel parameters.
//
// Speed of light: memory bandwidth. For 64 pairs in each of 64 caches, with blocks of 16 tokens of 8 heads of 128 in
// bfloat16, an H200 reaches 88% of the bandwidth of a copy.
#include "common/overlap.cuh"
#include "common/vectors.cuh"

constexpr int CACHES = 64; // per launch

struct CopyBlocksParams {
    char* cache[CACHES];
    const long long* block_mapping; // [pairs, 2]: (from, to)
    long long block_stride;
    int blocks;  // per cache
    int columns; // vectors of BYTES bytes per cache block
    int splits;  // thread blocks per cache block
};

template <int BYTES, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) copy_blocks(const __grid_constant__ CopyBlocksParams p) {
    begin_behind_earlier_kernels();
    const int pair = blockIdx.x / p.splits, split = blockIdx.x - pair * p.splits;
    const long long from = __ldg(p.block_mapping + 2LL * pair), to = __ldg(p.block_mapping + 2LL * pair + 1);
    const unsigned long long blocks = p.blocks;
    if ((unsigned long long)from >= blocks || (unsigned long long)to >= blocks) return;
    char* cache = p.cache[blockIdx.y];
    const Vector<BYTES>* src = reinterpret_cast<const Vector<BYTES>*>(cache + from * p.block_stride);
    Vector<BYTES>* dst = reinterpret_cast<Vector<BYTES>*>(cache + to * p.block_stride);
    const int first = split * (THREADS * ITEMS) + threadIdx.x;
    Vector<BYTES> vector[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) vector[i] = src[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) dst[first + i * THREADS] = vector[i];
}
