// Tiles of tokens and columns, one per block, for permute_rows, unpermute_rows and permute_quantized.
#pragma once
#include "common/vectors.cuh"

constexpr int ROW_THREADS = 256;

// A block handles blockDim.y tokens, and tile_columns columns of each. `tiles` consecutive blocks cover all columns of
// the same tokens.
struct Tiling {
    int tokens;
    int columns;      // vectors or groups per row
    int tile_columns; // vectors or groups per block
    int tiles;
    Divisor by_tiles;

    __device__ __forceinline__ int tile() const { return int(blockIdx.x - token_group() * tiles); }
    __device__ __forceinline__ int token() const { return int(token_group() * blockDim.y + threadIdx.y); }
    __device__ __forceinline__ unsigned token_group() const { return by_tiles.quotient(blockIdx.x); }
};
