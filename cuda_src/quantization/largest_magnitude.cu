// Find the maximum of |x| over the part of an array that each block reads. quantize_tensor reduces these partial maxima
// to one scale. NaN is ignored.
//
// Grid: one wave of resident blocks. A block handles every gridDim.x-th tile (quantization/load.cuh) and writes one
// maximum. There are no atomics, so the result is the same in every run.
//
// Speed of light: memory bandwidth; each element is read once. On an H200, this kernel and quantize_tensor together
// take 75 us for 8192 x 7168 bfloat16 and move 5 bytes per element. If the scale is given, quantize_tensor alone takes
// 43 us and moves 3 bytes per element.
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
