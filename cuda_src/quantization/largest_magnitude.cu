// Find the maximum of |x| over the tiles of each block. quantize_tensor reduces these partial maxima to one scale. NaN
// is ignored.
//
// Grid: one wave of resident blocks; a block handles every gridDim.x-th tile (quantization/load.cuh).
//
// Speed of light: memory bandwidth. On an H200, this kernel and quantize_tensor together take 75 us for 8192 x 7168
// bfloat16 and move 5 bytes per element. quantize_tensor alone, with a given scale, takes 43 us and moves 3 bytes.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"

struct LargestMagnitudeParams {
    Rows in;
    float* partial; // [gridDim.x]
    int tiles;
    int tiles_per_row;
    Tile tile;
};

template <typename T, int VECTOR, int ITEMS>
__global__ void __launch_bounds__(1024) largest_magnitude(const __grid_constant__ LargestMagnitudeParams p) {
    begin_behind_earlier_kernels();
    using Input = Loaded<T, NO_ACTIVATION, VECTOR, VECTOR == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = VECTOR * int(sizeof(T));
    const int threads = p.tile.threads<ITEMS>();
    float largest = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int x = tile / p.tiles_per_row, y = tile - x * p.tiles_per_row;
        Input loaded[ITEMS];
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
