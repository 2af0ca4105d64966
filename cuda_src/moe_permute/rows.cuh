// Tile tokens and columns over blocks, for permute_rows, unpermute_rows and permute_quantized.
#pragma once
#include "common/vectors.cuh"

constexpr int ROW_THREADS = 256;

// A block handles blockDim.y tokens, and tile_columns columns of each. `chunks` consecutive blocks cover all columns of
// the same tokens.
struct Tiling {
    int tokens;
    int columns;      // of a row, in units
    int tile_columns; // of a block, in units
    int chunks;
    Divisor by_chunks;

    // The index of this block's column tile, and the token of this thread.
    __device__ __forceinline__ int chunk() const { return int(blockIdx.x - group() * chunks); }
    __device__ __forceinline__ int token() const { return int(group() * blockDim.y + threadIdx.y); }
    // The index of this block's group of blockDim.y tokens.
    __device__ __forceinline__ unsigned group() const { return by_chunks.quotient(blockIdx.x); }
};
