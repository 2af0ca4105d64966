// Tiles: how the blocks of a kernel divide the rows that they write, and the offset of an element in the layout by
// heads.
//
// Grid: x: tiles of rows; y: parts of a row. A block writes a tile of rows, or of parts of long rows, in units of BYTES
// bytes. Thread t takes ITEMS units: t, t + THREADS, ... It issues all their loads before the first store, because the
// bytes in flight limit a copy.
//
// COLUMNS (units in a row) and HEAD_COLUMNS (units of a head in a row): if 0, the kernel's arguments give them.
#pragma once
#include "common/units.cuh"

struct Geometry {
    int rows;      // of the array that is written
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
    // Locate the thread's i-th unit: its row in the tile, and its column in the row. Return false past the end of
    // either.
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
    // Return the offset, in units, in an array of contiguous rows.
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

// Return the offset, in units, of (row, column) of the padded rows in the layout [batch, heads, max_seq_len, dim].
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
