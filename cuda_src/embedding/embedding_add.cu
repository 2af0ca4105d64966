// Look up rows of an embedding table, scale them, and add the embedding of each row's position.
//
//   position = step + position_ids[row], or step + row % period
//   out[row] = table[ids[row]] * scale + position_table[position], in float32, rounded once
//
// `period` is the number of rows per sequence. If the id or the position of a row is out of range, the row becomes 0.
//
// Grid: see embedding/rows.cuh.
//
// WIDTH: bytes per load, a power of two from the size of an element to 16; it divides the row size and the addresses.
//
// Speed of light: memory bandwidth. Each row is read once and written once; the position table is small and stays in
// L2. On an H200, 8192 rows of 4096 bfloat16 take 39 us, which is 81% of the bandwidth of a copy; 8192 rows of 1024
// take 12 us (65%). 64 rows take 2.5 us; they are bound by the latency of a launch and two dependent loads, the index
// and the row.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "embedding/rows.cuh"

template <typename T, int WIDTH>
__global__ __launch_bounds__(THREADS) void embedding_add(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using Load = typename VectorOf<WIDTH>::Type;
    constexpr int COUNT = WIDTH / sizeof(T);
    const Part part(p);
    if (part.chunk >= p.chunks) return;
    long long id[ROWS_AT_ONCE], position[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const int row = min(part.first_row + i * part.distance, p.rows - 1);
        id[i] = load_index(p.ids, row, p.ids_are_int64);
        position[i] = p.position_ids ? load_index(p.position_ids, p.one_position ? 0 : row, p.position_ids_are_int64)
                                     : row % p.period;
    }
    Load word[ROWS_AT_ONCE], added[ROWS_AT_ONCE];
    bool valid[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        position[i] += p.step;
        valid[i] = id[i] >= 0 && id[i] < p.vocab && position[i] >= 0 && position[i] < p.positions;
        word[i] = added[i] = Load{};
        if (valid[i]) {
            word[i] = __ldg(static_cast<const Load*>(p.table) + id[i] * p.chunks + part.chunk);
            added[i] = __ldg(static_cast<const Load*>(p.position_table) + position[i] * p.chunks + part.chunk);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const T* x = reinterpret_cast<const T*>(&word[i]);
        const T* y = reinterpret_cast<const T*>(&added[i]);
        Load result;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            // No fused multiply-add: the product and the sum are rounded separately, so that every machine gives the
            // same bits.
            const float scaled = __fmul_rn(to_float(x[j]), p.scale);
            reinterpret_cast<T*>(&result)[j] = from_float<T>(__fadd_rn(scaled, to_float(y[j])));
        }
        const int row = part.first_row + i * part.distance;
        if (row < p.rows) static_cast<Load*>(p.out)[(long long)row * p.chunks + part.chunk] = result;
    }
}
