// Copy rows of an embedding table.
//
//   out[row] = table[ids[row]]
//
// If the id of a row is out of range, the row becomes 0.
//
// Grid: see embedding/rows.cuh.
//
// WIDTH: bytes per load, a power of two up to 16 that divides the row size and the addresses. The kernel copies bytes,
// so the type of the elements does not matter.
//
// Speed of light: memory bandwidth. Each row is read once and written once. On an H200, 8192 rows of 4096 bfloat16 take
// 34 us, which is 93% of the bandwidth of a copy.
#include "common/overlap.cuh"
#include "embedding/rows.cuh"

template <int WIDTH> __global__ __launch_bounds__(THREADS) void embedding_copy(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using Load = typename VectorOf<WIDTH>::Type;
    const Part part(p);
    if (part.chunk >= p.chunks) return;
    long long id[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i)
        id[i] = load_index(p.ids, min(part.first_row + i * part.distance, p.rows - 1), p.ids_are_int64);
    Load value[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        value[i] = Load{};
        if (id[i] >= 0 && id[i] < p.vocab)
            value[i] = __ldg(static_cast<const Load*>(p.table) + id[i] * p.chunks + part.chunk);
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const int row = part.first_row + i * part.distance;
        if (row < p.rows) static_cast<Load*>(p.out)[(long long)row * p.chunks + part.chunk] = value[i];
    }
}
