// The tokens and columns of a block, as permute_rows and unpermute_rows share them.
#pragma once
#include "common/units.cuh"

constexpr int ROW_THREADS = 256;

// A block has blockDim.y tokens and tile_columns of their columns; `chunks` blocks side by side have whole rows, and
// follow each other in the grid.
struct Tiling {
    int tokens;
    int columns;      // of a row, in units
    int tile_columns; // of a block, in units
    int chunks;
    Divisor by_chunks;

    __device__ __forceinline__ int chunk() const { return int(blockIdx.x - group() * chunks); }
    __device__ __forceinline__ int token() const { return int(group() * blockDim.y + threadIdx.y); }
    __device__ __forceinline__ unsigned group() const { return by_chunks.quotient(blockIdx.x); }
};
