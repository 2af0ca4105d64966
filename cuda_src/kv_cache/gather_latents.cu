// Copy the tokens of sequences from FlashMLA's FP8 cache to consecutive rows of type T.
//
//   dst[cu_seq_lens[b] + t] = [latents * scales, rotary elements], with one scale per GROUP latents
//
// kv_cache/latents.cuh describes the layout of a token, and kv_cache/gather.cuh its location in the cache.
//
// Grid: as in gather_rows.cu. A unit, the work of a thread per iteration, is NUMBERS latents or NUMBERS rotary
// elements.
//
// Speed of light: memory bandwidth; for bfloat16, 656 bytes are read and 1152 written per token. An H200 reaches 71% of
// the bandwidth of a copy at 8 sequences of 4096 tokens.
#include "common/overlap.cuh"
#include "kv_cache/gather.cuh"
#include "kv_cache/latents.cuh"

template <typename T, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) gather_latents(const __grid_constant__ GatherRowsParams p) {
    begin_behind_earlier_kernels();
    constexpr int NUMBERS = ALIGNED ? 16 / sizeof(T) : 1, BYTES = NUMBERS * sizeof(T);
    __shared__ long long from[THREADS * ITEMS];
    const long long first = (long long)blockIdx.x * p.tile_rows;
    const int rows = int(min((long long)p.tile_rows, p.tokens - first));
    find_rows<THREADS>(p, first, rows, from);

    Unit<2 * NUMBERS> unit[ITEMS];
    float scale[ITEMS];
    auto locate = [&](int i, int& row, int& number) {
        const int local = threadIdx.x + i * THREADS;
        row = p.by_tile_columns.quotient(local);
        const int column = blockIdx.y * p.tile_columns + local - row * p.tile_columns;
        number = column * NUMBERS;
        return row < rows && column < p.columns && from[row] >= 0;
    };
    int row, number;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, number)) {
            const char* at = p.src + from[row];
            if (number < LATENTS) {
                reinterpret_cast<Unit<NUMBERS>&>(unit[i]) = load_unit<Unit<NUMBERS>, ALIGNED>(at + number);
                scale[i] = load_unit<float, ALIGNED>(at + SCALES_AT + number / GROUP * 4);
            } else {
                unit[i] = load_unit<Unit<2 * NUMBERS>, ALIGNED>(at + ROTARY_AT + (number - LATENTS) * 2);
            }
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, number)) {
            Unit<BYTES> out;
            if (number < LATENTS) {
                out = Read<T, E4M3, BYTES>::convert(reinterpret_cast<const Unit<NUMBERS>&>(unit[i]), scale[i]);
            } else {
#pragma unroll
                for (int j = 0; j < NUMBERS; ++j)
                    reinterpret_cast<T*>(&out)[j] =
                        from_bfloat16<T>(reinterpret_cast<const __nv_bfloat16*>(&unit[i])[j]);
            }
            *reinterpret_cast<Unit<BYTES>*>(p.dst + (first + row) * p.dst_stride + number * (long long)sizeof(T)) = out;
        }
}
