// Divide the rows that a kernel writes into tiles, one per block.
//
// Grid: x: tiles of rows; y: column ranges of long rows. A thread issues the loads of its ITEMS vectors before its
// first store, because the speed of a copy depends on the bytes in flight.
//
// COLUMNS: vectors per row. HEAD_COLUMNS: vectors per head. If either is 0, a kernel argument gives the number.
#pragma once
#include "common/vectors.cuh"

struct Geometry {
    int rows;      // of the array that is written
    int columns;   // vectors per row
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

template <int COLUMNS, int THREADS, int ITEMS> struct Tile {
    static_assert(COLUMNS <= THREADS * ITEMS, "a specialized row is one tile wide");
    static constexpr int MAX_ROWS = THREADS * ITEMS / (COLUMNS ? COLUMNS : 1);
    const Geometry& geometry;
    unsigned first_row;
    int rows, first_column, columns;

    __device__ __forceinline__ explicit Tile(const Geometry& g) : geometry(g) {
        const int tile_rows = COLUMNS ? MAX_ROWS : g.tile_rows;
        first_row = blockIdx.x * unsigned(tile_rows);
        rows = min(tile_rows, int(g.rows - first_row));
        first_column = COLUMNS ? 0 : blockIdx.y * g.tile_columns;
        columns = COLUMNS ? COLUMNS : min(g.tile_columns, g.columns - first_column);
    }
    // Find the row (in the tile) and the column of this thread's i-th vector. Return false if the vector is outside of
    // the tile.
    __device__ __forceinline__ bool locate(int i, int& row, int& column) const {
        const int index = threadIdx.x + i * THREADS;
        int tile_column;
        if constexpr (COLUMNS) {
            row = index / COLUMNS;
            tile_column = index % COLUMNS;
        } else {
            row = geometry.by_tile_columns.quotient(index);
            tile_column = index - row * geometry.tile_columns;
        }
        column = first_column + tile_column;
        return row < rows && tile_column < columns;
    }
    // Return the offset of a vector, in vectors.
    __device__ __forceinline__ long long offset(int row, int column) const {
        return (long long)(first_row + row) * (COLUMNS ? COLUMNS : geometry.columns) + column;
    }
};

struct Heads {
    int heads;
    int max_seq_len;
    int head_columns;
    Divisor by_max_seq_len;
    Divisor by_head_columns;
};

// Find a vector of padded row `row` in an array [batch, heads, max_seq_len, dim]. Return its offset, in vectors.
template <int HEAD_COLUMNS> __device__ __forceinline__ long long by_head(const Heads& h, unsigned row, int column) {
    const int head_columns = HEAD_COLUMNS ? HEAD_COLUMNS : h.head_columns;
    const unsigned sequence = h.by_max_seq_len.quotient(row), position = row - sequence * h.max_seq_len;
    int head;
    if constexpr (HEAD_COLUMNS)
        head = column / HEAD_COLUMNS;
    else
        head = h.by_head_columns.quotient(column);
    const long long head_row = ((long long)sequence * h.heads + head) * h.max_seq_len + position;
    return head_row * head_columns + (column - head * head_columns);
}
