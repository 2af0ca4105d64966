// Shared by both lookups: the parameters, the loads of indices, and the rows and chunk of a thread.
//
// Grid: x: groups of rows; y: parts of a row. A row is `chunks` chunks of WIDTH bytes. Neighbouring threads have
// neighbouring chunks of a row. A row has one thread per chunk, up to a block's threads; several short rows share a
// block. A thread has the same chunk of ROWS_AT_ONCE rows. It loads all of them before it stores the first, so it waits
// once for its indices and once for its rows.
#pragma once
#include "common/units.cuh"

constexpr int THREADS = 128;
constexpr int ROWS_AT_ONCE = 4;

struct Params {
    const void* table;          // [vocab, hidden]
    const void* ids;            // [rows]  int64 if ids_are_int64, else int32
    const void* position_table; // [positions, hidden]; null for a copy
    const void* position_ids;   // [rows], or [1] if one_position; null: the position follows from the row
    void* out;                  // [rows, hidden]
    long long vocab;
    long long positions;
    long long step;
    int rows;
    int chunks; // chunks of WIDTH bytes per row
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

// A thread's part of the work: chunk `chunk` of the rows first_row, first_row + distance, ...
struct Part {
    int first_row, distance, chunk;
    __device__ explicit Part(const Params& p) {
        distance = THREADS >> p.log2_threads_per_row;
        first_row = blockIdx.x * (distance * ROWS_AT_ONCE) + (threadIdx.x >> p.log2_threads_per_row);
        chunk = (blockIdx.y << p.log2_threads_per_row) + (threadIdx.x & ((1 << p.log2_threads_per_row) - 1));
    }
};
