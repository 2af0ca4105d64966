// The tokens and columns of a block, as permute_rows and unpermute_rows share them.
#pragma once
#include "common/units.cuh"

constexpr int ROW_THREADS = 256;

// A block has blockDim.y tokens and tile_columns of their columns. `chunks` consecutive blocks of the grid have all
// columns of the same tokens.
struct Tiling {
    int tokens;
    int columns;      // of a row, in units
    int tile_columns; // of a block, in units
    int chunks;
    Divisor by_chunks;

    // This block among those of its tokens, and this thread's token.
    __device__ __forceinline__ int chunk() const { return int(blockIdx.x - group() * chunks); }
    __device__ __forceinline__ int token() const { return int(group() * blockDim.y + threadIdx.y); }
    // The number of this block's tokens among groups of blockDim.y.
    __device__ __forceinline__ unsigned group() const { return by_chunks.quotient(blockIdx.x); }
};
