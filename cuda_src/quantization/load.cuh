// The rows to quantize, their tiles, and the elements that a thread loads.
//
// T: element type of x. VECTOR: number of elements in a vector. It is 8, or 1 if sizes or addresses do not allow 8;
// quantize_fp4 also uses 16. ITEMS: columns per thread. BYTES: width of a load.
#pragma once
#include "common/activation.cuh"
#include "common/quantize.cuh"

struct Rows {
    const char* x;     // T [rows, k]; with an activation [rows, 2 * k], first the gate half, then the up half
    const int* counts; // [rows / max_tokens] tokens per expert, in its first rows; may be null
    long long stride;  // bytes between rows
    int rows;
    int max_tokens; // rows per expert
    Divisor by_max_tokens;
    // Rows without a token are neither read nor written.
    __device__ __forceinline__ bool is_counted(int row) const {
        if (!counts) return true;
        const int expert = by_max_tokens.quotient(row);
        return row - expert * max_tokens < __ldg(counts + expert);
    }
};

// A tile is the work of one block: several complete rows, or one range of a long row. (x, y) is the tile's index, and y
// is the range, or 0. A column is one vector of a row. In quantize_groups a column is the VECTORS vectors of a group
// that one lane handles. `threads` neighbouring threads share a row: thread t handles the ITEMS columns `t`,
// `t + threads` and so on. It issues all loads before it uses the first.
struct Tile {
    int columns;      // per row
    int tile_rows;    // tile_rows * threads <= blockDim.x
    int tile_columns; // a multiple of ITEMS
    Divisor by_threads;
    template <int ITEMS> __device__ __forceinline__ int threads() const { return unsigned(tile_columns) / ITEMS; }
    // Find this thread's row and first column. Return false if the row does not hold a token.
    template <int ITEMS>
    __device__ __forceinline__ bool locate(const Rows& in, int x, int y, int& row, int& column) const {
        const int tile_row = by_threads.quotient(threadIdx.x);
        row = x * tile_rows + tile_row;
        column = y * tile_columns + threadIdx.x - tile_row * threads<ITEMS>();
        return tile_row < tile_rows && row < in.rows && in.is_counted(row);
    }
};

// One vector of a row, as loaded from memory; with an activation, a vector of the gate half and one of the up half.
template <typename T, int ACTIVATION, int VECTOR, int BYTES> struct Loaded {
    static constexpr int HALVES = ACTIVATION ? 2 : 1, LOADS = VECTOR * int(sizeof(T)) / BYTES;
    alignas(BYTES < 4 ? 4 : BYTES) Vector<BYTES> vector[HALVES][LOADS];

    // `up`: distance in bytes from the gate half to the up half.
    __device__ __forceinline__ void load(const char* from, long long up) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                vector[half][i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from + half * up) + i);
    }
    __device__ __forceinline__ void values(float (&value)[VECTOR]) const {
        floats(value, 0);
        if constexpr (ACTIVATION) {
            float up[VECTOR];
            floats(up, 1);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) value[i] = activate<ACTIVATION>(value[i], up[i]);
        }
    }
    __device__ __forceinline__ void floats(float (&value)[VECTOR], int half) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            if constexpr (IS_BFLOAT16<T> && VECTOR % 2 == 0) {
                // A bfloat16 is the high half of a float.
                const unsigned pair = reinterpret_cast<const unsigned*>(vector[half])[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(vector[half])[i]);
            }
        }
    }
};
