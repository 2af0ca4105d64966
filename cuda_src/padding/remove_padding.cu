// Copy the words (rows of tokens) of a padded batch to consecutive rows, without the padding.
//
//   out[w] = src[w + padding_offset[w]], or 0 if src does not have this row
//
// src is [padded_rows, columns] or, if TRANSPOSED, [batch, heads, max_seq_len, dim]. Wrong offsets never cause an
// access outside of the arrays.
//
// Grid: tiles of `out` (padding/tile.cuh).
//
// Speed of light: memory bandwidth; each word is read once and written once. At 32768 words of 4096 float16, an H200
// reaches 96% of the bandwidth of a copy (97% if TRANSPOSED). At 16384 words of 1024, it reaches 85% in both cases.
#include "common/overlap.cuh"
#include "padding/tile.cuh"

struct RemoveParams {
    const void* src;           // padded rows, `row_stride` units apart, or [batch, heads, max_seq_len, dim]
    const int* padding_offset; // [words]
    void* out;                 // [words, columns]
    long long row_stride;
    int padded_rows;
    Geometry geometry;
    Heads heads; // only if TRANSPOSED
};

template <int BYTES, int COLUMNS, bool TRANSPOSED, int HEAD_COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) remove_padding(const __grid_constant__ RemoveParams p) {
    begin_behind_earlier_kernels();
    using Unit = typename VectorOf<BYTES>::Type;
    constexpr unsigned NOWHERE = ~0u;
    const Tile<COLUMNS, THREADS, ITEMS> tile(p.geometry);
    const Unit* src = static_cast<const Unit*>(p.src);
    Unit* out = static_cast<Unit*>(p.out);

    unsigned from[ITEMS];
    Unit unit[ITEMS];
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        from[i] = NOWHERE;
        if (tile.locate(i, row, column)) {
            const unsigned word = tile.first_row + row;
            // The sum is unsigned, so a negative sum becomes an index after all rows. An overflow never gives a valid
            // index.
            from[i] = word + unsigned(p.padding_offset[word]);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        tile.locate(i, row, column);
        unit[i] = Unit{};
        if (from[i] < unsigned(p.padded_rows)) {
            long long at;
            if constexpr (TRANSPOSED)
                at = by_head<HEAD_COLUMNS>(p.heads, from[i], column);
            else
                at = from[i] * p.row_stride + column;
            unit[i] = __ldg(src + at);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (tile.locate(i, row, column)) out[tile.offset(row, column)] = unit[i];
}
