// Maxima of |x| of parts of an array, of which quantize_tensor makes one scale; NaN is left out.
//
// Grid: as many blocks as run at a time, each of which takes every gridDim.x-th tile (quantization/load.cuh) and writes
// one maximum: no atomics, the same result every time.
//
// Speed of light: memory, each number read once. With quantize_tensor after it, an H200 takes 75 us for 8192 x 7168 of
// bfloat16: 5 bytes a number, where one pass, which would need the scale beforehand, moves 3 in 43 us.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"

struct LargestMagnitudeParams {
    Rows in;
    float* partial; // [gridDim.x]
    int tiles;
    int chunks; // parts of a row
    Tile tile;
};

template <typename T, int EACH, int ITEMS>
__global__ void __launch_bounds__(1024) largest_magnitude(const __grid_constant__ LargestMagnitudeParams p) {
    begin_behind_earlier_kernels();
    using In = Loaded<T, NO_ACTIVATION, EACH, EACH == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = EACH * int(sizeof(T));
    const int threads = p.tile.threads<ITEMS>();
    float largest = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int x = tile / p.chunks, y = tile - x * p.chunks;
        In loaded[ITEMS];
        int row, column;
        if (!p.tile.locate<ITEMS>(p.in, x, y, row, column)) continue;
        const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (column + i * threads < p.tile.columns) loaded[i].load(from + i * threads * SIZE, 0);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (column + i * threads < p.tile.columns) largest = magnitude<false>(loaded[i], largest);
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = largest;
}
