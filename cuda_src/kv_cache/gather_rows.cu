// Copy tokens from a paged cache to consecutive rows of type T.
//
//   dst[cu_seq_lens[b] + t] = read(src[block_table[b, u / block_size], u % block_size])
//
// with u = seq_starts[b] + t, and read() as in kv_cache/format.cuh.
//
// Grid: x: tiles of rows of dst; y: column ranges of a row. A block locates its rows in the cache, then each thread
// copies ITEMS vectors.
//
// Speed of light: memory bandwidth. At 8 sequences of 4096 rows of 576 bfloat16, an H200 reaches 81% of the bandwidth
// of a copy, and 73% from an FP8 cache.
#include "common/overlap.cuh"
#include "kv_cache/gather.cuh"

template <typename T, int FORMAT, int BYTES, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) gather_rows(const __grid_constant__ GatherRowsParams p) {
    begin_behind_earlier_kernels();
    using Values = Read<T, FORMAT, BYTES>;
    __shared__ long long from[THREADS * ITEMS];
    const long long first = (long long)blockIdx.x * p.tile_rows;
    const int rows = int(min((long long)p.tile_rows, p.tokens - first));
    find_rows<THREADS>(p, first, rows, from);

    Vector<Values::IN_BYTES> vector[ITEMS];
    const float scale = FORMAT == SAME ? 1.f : p.scale.load();
    auto locate = [&](int i, int& row, int& column) {
        const int local = threadIdx.x + i * THREADS;
        row = p.by_tile_columns.quotient(local);
        column = blockIdx.y * p.tile_columns + local - row * p.tile_columns;
        return row < rows && column < p.columns && from[row] >= 0;
    };
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, column)) {
            const char* at = p.src + from[row] + (long long)column * Values::IN_BYTES;
            vector[i] = __ldg(reinterpret_cast<const Vector<Values::IN_BYTES>*>(at));
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, column)) {
            char* at = p.dst + (first + row) * p.dst_stride + (long long)column * BYTES;
            *reinterpret_cast<Vector<BYTES>*>(at) = Values::convert(vector[i], scale);
        }
}
