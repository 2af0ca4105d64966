// Distribute the rows to quantize over blocks and threads, and load the elements of a thread.
//
// T: element type of x. A unit is EACH neighbouring elements of a row. EACH is 8, or 1 if sizes or addresses do not
// allow 8; quantize_fp4 also uses 16. ITEMS: columns per thread (see Tile). BYTES: width of a load in bytes.
#pragma once
#include "common/activation.cuh"
#include "common/quantize.cuh"

struct Rows {
    const char* x;     // T [rows, k]; with an activation [rows, 2 * k], first the gate half, then the up half
    const int* counts; // [rows / max_tokens], may be null
    long long stride;  // bytes between rows
    int rows;
    int max_tokens; // rows per expert
    Divisor by_max_tokens;
    // Return whether a row holds a token. Only the first counts[e] rows of expert e hold tokens; the other rows are
    // neither read nor written.
    __device__ __forceinline__ bool is_counted(int row) const {
        if (!counts) return true;
        const int expert = by_max_tokens.quotient(row);
        return row - expert * max_tokens < __ldg(counts + expert);
    }
};

// A tile is the work of one block: several whole rows, or one part of a long row. Tile (x, y) is part y of the x-th
// tile of rows; y is 0 if a tile has whole rows. A row of a tile is divided into columns. A column is one unit; in
// quantize_groups a column is the UNITS units of a group that one lane handles. `threads` neighbouring threads share a
// row. Thread t of a row handles ITEMS columns: `t`, `t + threads`, `t + 2 * threads` and so on. A thread issues all
// its loads before it uses the first value.
struct Tile {
    int columns;      // columns in a row
    int tile_rows;    // tile_rows * threads <= blockDim.x
    int tile_columns; // a multiple of ITEMS
    Divisor by_threads;
    template <int ITEMS> __device__ __forceinline__ int threads() const { return unsigned(tile_columns) / ITEMS; }
    // Find this thread's row and first column in tile (x, y). Return false if the row does not exist or does not hold a
    // token.
    template <int ITEMS>
    __device__ __forceinline__ bool locate(const Rows& in, int x, int y, int& row, int& column) const {
        const int tile_row = by_threads.quotient(threadIdx.x);
        row = x * tile_rows + tile_row;
        column = y * tile_columns + threadIdx.x - tile_row * threads<ITEMS>();
        return tile_row < tile_rows && row < in.rows && in.is_counted(row);
    }
};

// One unit of a row (EACH neighbouring elements), as loaded from memory. With an activation, the struct holds two
// units: one of the gate half of the row and one of the up half.
template <typename T, int ACTIVATION, int EACH, int BYTES> struct Loaded {
    static constexpr int HALVES = ACTIVATION ? 2 : 1, LOADS = EACH * int(sizeof(T)) / BYTES;
    alignas(BYTES < 4 ? 4 : BYTES) Unit<BYTES> unit[HALVES][LOADS];

    // Load the unit at `from`. `up` is the distance from the gate half to the up half, in bytes.
    __device__ __forceinline__ void load(const char* from, long long up) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                unit[half][i] = __ldg(reinterpret_cast<const Unit<BYTES>*>(from + half * up) + i);
    }
    // Return the values to quantize: the loaded elements or their activation.
    __device__ __forceinline__ void values(float (&value)[EACH]) const {
        floats(value, 0);
        if constexpr (ACTIVATION) {
            float up[EACH];
            floats(up, 1);
#pragma unroll
            for (int i = 0; i < EACH; ++i) value[i] = activate<ACTIVATION>(value[i], up[i]);
        }
    }
    __device__ __forceinline__ void floats(float (&value)[EACH], int half) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if constexpr (IS_BFLOAT16<T> && EACH % 2 == 0) {
                // A bfloat16 is the high half of a float.
                const unsigned pair = reinterpret_cast<const unsigned*>(unit[half])[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(unit[half])[i]);
            }
        }
    }
};
