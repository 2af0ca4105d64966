// Put words back into their rows of a padded batch.
//
//   out[w + padding_offset[w]] = src[w], `fill` in the rows without a word
//
// w + padding_offset[w] increases strictly. Wrong offsets never lead to accesses outside of the arrays.
//
// Grid: tiles of out, see padding/tile.cuh. Tiles contain words and padding alike, so all blocks write equally much.
// Each block searches for the words of its rows.
//
// Speed of light: memory bandwidth; each word is read once and each padded row written once. An H200 reaches 92% of the
// bandwidth of a copy at 65536 rows of 4096 float16, half of them words, and 84% at 32768 rows of 1024.
#include "common/overlap.cuh"
#include "padding/tile.cuh"
#include "padding/words.cuh"

struct RebuildParams {
    const void* src;           // [words, columns], rows `row_stride` units apart
    const int* padding_offset; // [words]
    void* out;                 // [padded rows, columns]
    long long row_stride;
    int words;
    unsigned fill; // the element; repeated if it has two bytes
    Geometry geometry;
};

template <int BYTES, int COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) rebuild_padding(const __grid_constant__ RebuildParams p) {
    begin_behind_earlier_kernels();
    using Unit = typename UnitOf<BYTES>::Type;
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
        // A streaming store is faster here than a plain store (measured).
        if (tile.locate(i, row, column)) __stcs(out + tile.offset(row, column), unit[i]);
}
