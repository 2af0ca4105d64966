// Divide the rows that a kernel writes into tiles, one per block, and compute the offset of an element in the layout
// [batch, heads, max_seq_len, dim].
//
// Grid: x: tiles of rows; y: column ranges of a row. A tile is several whole rows, or the same column range of several
// long rows. A block writes its tile in units of BYTES bytes. Thread t writes ITEMS units: `t`, `t + THREADS` and so
// on. A thread issues all its loads before its first store, because the speed of a copy depends on the number of bytes
// in flight.
//
// COLUMNS: units in a row. HEAD_COLUMNS: units of one head in a row. If one of them is 0, its value comes from the
// kernel's arguments.
#pragma once
#include "common/vectors.cuh"

struct Geometry {
    int rows;      // rows of the array that is written
    int columns;   // units per row
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

// The tile of this block, and this thread's units in it.
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
    // Find the row in the tile and the column in the row of this thread's i-th unit. Return false if the tile has no
    // such row or column.
    __device__ __forceinline__ bool locate(int i, int& row, int& column) const {
        const int slot = threadIdx.x + i * THREADS;
        int within;
        if constexpr (COLUMNS) {
            row = slot / COLUMNS;
            within = slot % COLUMNS;
        } else {
            row = geometry.by_tile_columns.quotient(slot);
            within = slot - row * geometry.tile_columns;
        }
        column = first_column + within;
        return row < rows && within < columns;
    }
    // Return the offset of a unit of this tile in an array of contiguous rows. The offset is in units.
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

// Return the offset, in the layout [batch, heads, max_seq_len, dim], of unit `column` of padded row `row`. The offset
// is in units.
template <int HEAD_COLUMNS> __device__ __forceinline__ long long by_head(const Heads& h, unsigned row, int column) {
    const int head_columns = HEAD_COLUMNS ? HEAD_COLUMNS : h.head_columns;
    const unsigned sequence = h.by_max_seq_len.quotient(row), position = row - sequence * h.max_seq_len;
    int head;
    if constexpr (HEAD_COLUMNS)
        head = column / HEAD_COLUMNS;
    else
        head = h.by_head_columns.quotient(column);
    const long long line = ((long long)sequence * h.heads + head) * h.max_seq_len + position;
    return line * head_columns + (column - head * head_columns);
}
