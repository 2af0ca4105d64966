// Copy tokens back to their rows of a padded batch.
//
//   out[t + padding_offset[t]] = src[t]; rows of `out` without a token become `fill`
//
// `t + padding_offset[t]` must increase strictly with t; otherwise the result is wrong.
//
// Grid: tiles of `out` (padding/tile.cuh).
//
// Speed of light: memory bandwidth. If half of the padded rows hold tokens, an H200 reaches 92% of the bandwidth of a
// copy at 65536 rows of 4096 float16, and 84% at 32768 rows of 1024.
#include "common/overlap.cuh"
#include "padding/tile.cuh"
#include "padding/tokens.cuh"

struct RebuildParams {
    const void* src;           // [tokens, columns]
    const int* padding_offset; // [tokens]
    void* out;                 // [padded rows, columns]
    long long row_stride;      // of src, in vectors
    int tokens;
    unsigned fill; // bits of the fill element; two bytes are repeated
    Geometry geometry;
};

template <int BYTES, int COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) rebuild_padding(const __grid_constant__ RebuildParams p) {
    begin_behind_earlier_kernels();
    using Rows = Tile<COLUMNS, THREADS, ITEMS>;
    __shared__ int token_of[Rows::MAX_ROWS];
    const Rows tile(p.geometry);
    const Vector<BYTES>* src = static_cast<const Vector<BYTES>*>(p.src);
    Vector<BYTES>* out = static_cast<Vector<BYTES>*>(p.out);
    Vector<BYTES> fill;
    if constexpr (BYTES == 16)
        fill = make_uint4(p.fill, p.fill, p.fill, p.fill);
    else if constexpr (BYTES == 8)
        fill = make_uint2(p.fill, p.fill);
    else
        fill = Vector<BYTES>(p.fill);
    find_tokens<THREADS>(p.padding_offset, p.tokens, tile.first_row, tile.rows, token_of);

    Vector<BYTES> vector[ITEMS];
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int token = tile.locate(i, row, column) ? token_of[row] : -1;
        vector[i] = fill;
        if (token >= 0) vector[i] = __ldcs(src + token * p.row_stride + column);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        // A streaming store is faster here than a plain store.
        if (tile.locate(i, row, column)) __stcs(out + tile.offset(row, column), vector[i]);
}
