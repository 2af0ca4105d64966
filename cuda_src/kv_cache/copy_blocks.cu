// Copy blocks within a paged cache, in the caches of all layers at once.
//
//   cache[to] = cache[from], for all pairs (from, to) of blocks
//
// A pair is skipped if one of its blocks is outside of the cache.
//
// Grid: x: `parts` thread blocks per pair; y: caches. The addresses of the caches are passed as kernel arguments, so
// they do not have to be copied to the device first.
//
// Speed of light: memory bandwidth; each block is read once and written once. For 64 pairs in each of 64 caches, with
// blocks of 16 tokens of 8 heads of 128 in bfloat16, an H200 reaches 88% of the bandwidth of a copy.
#include "common/overlap.cuh"
#include "common/vectors.cuh"

template <int BYTES> using Unit = typename VectorOf<BYTES>::Type;

constexpr int CACHES = 64; // maximum number of caches per launch

struct CopyBlocksParams {
    char* cache[CACHES];
    const long long* block_mapping; // [pairs, 2]: block numbers (from, to)
    long long block_stride;
    int blocks;  // blocks per cache
    int columns; // units of BYTES bytes per cache block
    int parts;   // thread blocks per cache block, each for THREADS * ITEMS units
};

template <int BYTES, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) copy_blocks(const __grid_constant__ CopyBlocksParams p) {
    begin_behind_earlier_kernels();
    const int pair = blockIdx.x / p.parts, part = blockIdx.x - pair * p.parts;
    const long long from = __ldg(p.block_mapping + 2LL * pair), to = __ldg(p.block_mapping + 2LL * pair + 1);
    const unsigned long long blocks = p.blocks;
    if ((unsigned long long)from >= blocks || (unsigned long long)to >= blocks) return;
    char* cache = p.cache[blockIdx.y];
    const Unit<BYTES>* src = reinterpret_cast<const Unit<BYTES>*>(cache + from * p.block_stride);
    Unit<BYTES>* dst = reinterpret_cast<Unit<BYTES>*>(cache + to * p.block_stride);
    const int first = part * (THREADS * ITEMS) + threadIdx.x;
    Unit<BYTES> unit[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) unit[i] = src[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) dst[first + i * THREADS] = unit[i];
}
