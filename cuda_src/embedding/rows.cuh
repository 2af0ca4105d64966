// Define the parameters of embedding_add and embedding_copy, and the work of each thread.
//
// Grid: x: groups of rows; y: parts of long rows. Neighbouring threads handle neighbouring chunks of WIDTH bytes. A
// thread loads the same chunk of ROWS_AT_ONCE rows before its first store, so it waits once for indices and once for
// rows.
#pragma once
#include "common/vectors.cuh"

constexpr int THREADS = 128;
constexpr int ROWS_AT_ONCE = 4;

struct Params {
    const void* table;          // [vocab, hidden]
    const void* ids;            // [rows]  int64 or int32
    const void* position_table; // [positions, hidden]; null for a copy
    const void* position_ids;   // [rows], or [1] if one_position; null: the position is row % period
    void* out;                  // [rows, hidden]
    long long vocab;
    long long positions;
    long long step;
    int rows;
    int chunks; // of WIDTH bytes per row
    int log2_threads_per_row;
    int period; // rows per sequence
    int ids_are_int64;
    int position_ids_are_int64;
    int one_position;
    float scale;
};

__device__ __forceinline__ long long load_index(const void* indices, int at, bool is_int64) {
    return is_int64 ? static_cast<const long long*>(indices)[at] : static_cast<const int*>(indices)[at];
}

// A thread copies chunk `chunk` of rows `first_row`, `first_row + distance` and so on.
struct ThreadWork {
    int first_row, distance, chunk;
    __device__ explicit ThreadWork(const Params& p) {
        distance = THREADS >> p.log2_threads_per_row;
        first_row = blockIdx.x * (distance * ROWS_AT_ONCE) + (threadIdx.x >> p.log2_threads_per_row);
        chunk = (blockIdx.y << p.log2_threads_per_row) + (threadIdx.x & ((1 << p.log2_threads_per_row) - 1));
    }
};
