// Copy tokens from FlashMLA's FP8 cache (kv_cache/latents.cuh) to consecutive rows of type T.
//
//   dst[cu_seq_lens[b] + t] = [latents * scales, rotary elements], with one scale per GROUP latents
//
// Grid: x: tiles of rows of dst; y: column ranges of a row. A thread handles ELEMENTS latents or rotary elements per
// iteration.
//
// Speed of light: memory bandwidth. At 8 sequences of 4096 tokens of bfloat16, an H200 reaches 71% of the bandwidth of
// a copy.
#include "common/overlap.cuh"
#include "kv_cache/gather.cuh"
#include "kv_cache/latents.cuh"

template <typename T, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) gather_latents(const __grid_constant__ GatherRowsParams p) {
    begin_behind_earlier_kernels();
    constexpr int ELEMENTS = ALIGNED ? 16 / sizeof(T) : 1, BYTES = ELEMENTS * sizeof(T);
    __shared__ long long from[THREADS * ITEMS];
    const long long first = (long long)blockIdx.x * p.tile_rows;
    const int rows = int(min((long long)p.tile_rows, p.tokens - first));
    find_rows<THREADS>(p, first, rows, from);

    Vector<2 * ELEMENTS> vector[ITEMS];
    float scale[ITEMS];
    auto locate = [&](int i, int& row, int& element) {
        const int local = threadIdx.x + i * THREADS;
        row = p.by_tile_columns.quotient(local);
        const int column = blockIdx.y * p.tile_columns + local - row * p.tile_columns;
        element = column * ELEMENTS;
        return row < rows && column < p.columns && from[row] >= 0;
    };
    int row, element;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, element)) {
            const char* token = p.src + from[row];
            if (element < LATENTS) {
                reinterpret_cast<Vector<ELEMENTS>&>(vector[i]) =
                    load_vector<Vector<ELEMENTS>, ALIGNED>(token + element);
                scale[i] = load_vector<float, ALIGNED>(token + SCALES_AT + element / GROUP * 4);
            } else {
                vector[i] = load_vector<Vector<2 * ELEMENTS>, ALIGNED>(token + ROTARY_AT + (element - LATENTS) * 2);
            }
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, element)) {
            Vector<BYTES> out;
            if (element < LATENTS) {
                out = Read<T, E4M3, BYTES>::convert(reinterpret_cast<const Vector<ELEMENTS>&>(vector[i]), scale[i]);
            } else {
#pragma unroll
                for (int j = 0; j < ELEMENTS; ++j)
                    reinterpret_cast<T*>(&out)[j] =
                        from_bfloat16<T>(reinterpret_cast<const __nv_bfloat16*>(&vector[i])[j]);
            }
            *reinterpret_cast<Vector<BYTES>*>(p.dst + (first + row) * p.dst_stride + element * (long long)sizeof(T)) =
                out;
        }
}
