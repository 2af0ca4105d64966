// Put words (rows of tokens without padding) back into their rows of a padded batch.
//
//   out[w + padding_offset[w]] = src[w]; rows of `out` without a word are filled with `fill`
//
// `w + padding_offset[w]` must increase strictly with w. If it does not, the result is wrong, but no access is outside
// of the arrays.
//
// Grid: tiles of `out` (padding/tile.cuh). All blocks write the same number of rows, whether the rows hold words or
// padding. Each block searches for the words that belong to its rows.
//
// Speed of light: memory bandwidth; each word is read once and each padded row written once. An H200 reaches 92% of the
// bandwidth of a copy at 65536 padded rows of 4096 float16 (half of them hold words), and 84% at 32768 rows of 1024.
#include "common/overlap.cuh"
#include "padding/tile.cuh"
#include "padding/words.cuh"

struct RebuildParams {
    const void* src;           // [words, columns], rows `row_stride` units apart
    const int* padding_offset; // [words]
    void* out;                 // [padded rows, columns]
    long long row_stride;
    int words;
    unsigned fill; // bits of the element that fills padding; a two-byte element appears twice
    Geometry geometry;
};

template <int BYTES, int COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) rebuild_padding(const __grid_constant__ RebuildParams p) {
    begin_behind_earlier_kernels();
    using Unit = typename VectorOf<BYTES>::Type;
    using Rows = Tile<COLUMNS, THREADS, ITEMS>;
    __shared__ int word_of[Rows::MAX_ROWS];
    const Rows tile(p.geometry);
    const Unit* src = static_cast<const Unit*>(p.src);
    Unit* out = static_cast<Unit*>(p.out);
    Unit fill;
    if constexpr (BYTES == 16)
        fill = make_uint4(p.fill, p.fill, p.fill, p.fill);
    else if constexpr (BYTES == 8)
        fill = make_uint2(p.fill, p.fill);
    else
        fill = Unit(p.fill);
    find_words<THREADS>(p.padding_offset, p.words, tile.first_row, tile.rows, word_of);

    Unit unit[ITEMS];
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int word = tile.locate(i, row, column) ? word_of[row] : -1;
        unit[i] = fill;
        if (word >= 0) unit[i] = __ldcs(src + word * p.row_stride + column);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        // Use a streaming store, which was measured to be faster here than a plain store.
        if (tile.locate(i, row, column)) __stcs(out + tile.offset(row, column), unit[i]);
}
