// Look up rows of an embedding table, scale them, and add position embeddings.
//
//   position = step + position_ids[row], or step + row % period
//   out[row] = table[ids[row]] * scale + position_table[position], in float32, rounded once
//
// `period`: rows per sequence. A row whose id or position is out of range becomes 0.
//
// Grid: see embedding/rows.cuh.
//
// WIDTH: bytes per load; it divides the row size and the addresses.
//
// Speed of light: memory bandwidth. On an H200, 8192 rows of 4096 bfloat16 take 39 us, 81% of the bandwidth of a copy;
// 8192 rows of 1024 take 12 us (65%). 64 rows take 2.5 us, the latency of a launch and two dependent loads.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "embedding/rows.cuh"

template <typename T, int WIDTH>
__global__ __launch_bounds__(THREADS) void embedding_add(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int COUNT = WIDTH / sizeof(T);
    const ThreadWork work(p);
    if (work.chunk >= p.chunks) return;
    long long id[ROWS_AT_ONCE], position[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const int row = min(work.first_row + i * work.distance, p.rows - 1);
        id[i] = load_index(p.ids, row, p.ids_are_int64);
        position[i] = p.position_ids ? load_index(p.position_ids, p.one_position ? 0 : row, p.position_ids_are_int64)
                                     : row % p.period;
    }
    Vector<WIDTH> vector[ROWS_AT_ONCE], added[ROWS_AT_ONCE];
    bool valid[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        position[i] += p.step;
        valid[i] = id[i] >= 0 && id[i] < p.vocab && position[i] >= 0 && position[i] < p.positions;
        vector[i] = added[i] = Vector<WIDTH>{};
        if (valid[i]) {
            vector[i] = __ldg(static_cast<const Vector<WIDTH>*>(p.table) + id[i] * p.chunks + work.chunk);
            added[i] = __ldg(static_cast<const Vector<WIDTH>*>(p.position_table) + position[i] * p.chunks + work.chunk);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const T* x = reinterpret_cast<const T*>(&vector[i]);
        const T* y = reinterpret_cast<const T*>(&added[i]);
        Vector<WIDTH> result;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            // No fused multiply-add, so that every machine gives the same bits.
            const float scaled = __fmul_rn(to_float(x[j]), p.scale);
            reinterpret_cast<T*>(&result)[j] = from_float<T>(__fadd_rn(scaled, to_float(y[j])));
        }
        const int row = work.first_row + i * work.distance;
        if (row < p.rows) static_cast<Vector<WIDTH>*>(p.out)[(long long)row * p.chunks + work.chunk] = result;
    }
}
