// Drop the padding of a batch of sequences, and put it back.
//
// A padded batch has batch * max_seq_len rows; only the first length[b] of sequence b hold words. The words alone, one
// sequence after the other, are `words` rows. With row(w) = w + padding_offset[w], the padded row of word w:
//
//   build_padding_offset      cu_seqlens[b] = length[0] + ... + length[b - 1]
//                             padding_offset[w] = b * max_seq_len - cu_seqlens[b], w a word of sequence b
//   remove_padding            out[w] = src[row(w)], zero where there is no such row
//   rebuild_padding           out[row(w)] = src[w], `fill` in the other rows
//   add_bias_rebuild_padding  out[row(w)] = src[w] + bias, added in float32, for q, k and v; zero in the other rows
//
// Where the layout is by heads, element (row, column) of the padded side lies in [batch, heads, max_seq_len, dim].
// row() grows strictly. Whatever padding_offset holds, nothing is read or written outside of the arrays.
//
// Grid of the last three: a block writes a tile of rows, or of parts of long rows, in units of BYTES bytes. Thread
// t takes ITEMS units, t, t + THREADS, ..., and has asked for all of them before it stores the first. x: tiles of rows;
// y: parts of a row; z: q, k, v.
//
// COLUMNS (units in a row) == 0 and HEAD_COLUMNS (units in a head's part of it) == 0 take these from the arguments.
#include "common/numeric.cuh"
#include "common/units.cuh"
#include "common/warp.cuh"

struct Geometry {
    int rows;      // of the array that is written
    int columns;   // units in a row
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

// Where a block and its threads work.
template <int COLUMNS, int THREADS, int ITEMS> struct Tile {
    const Geometry& geometry;
    unsigned first_row;
    int rows, first_column, columns;

    __device__ __forceinline__ explicit Tile(const Geometry& g) : geometry(g) {
        static_assert(COLUMNS <= THREADS * ITEMS, "a specialized row is one tile wide");
        const int tile_rows = COLUMNS ? THREADS * ITEMS / (COLUMNS ? COLUMNS : 1) : g.tile_rows;
        first_row = blockIdx.x * unsigned(tile_rows);
        rows = min(tile_rows, int(g.rows - first_row));
        first_column = COLUMNS ? 0 : blockIdx.y * g.tile_columns;
        columns = COLUMNS ? COLUMNS : min(g.tile_columns, g.columns - first_column);
    }
    // The thread's i-th unit: its row in the tile, and its column in the row. False past the end of either.
    __device__ __forceinline__ bool locate(int i, int& row, int& column) const {
        const int slot = threadIdx.x + i * THREADS;
        int within;
        if constexpr (COLUMNS) {
            row = slot / COLUMNS;
            within = slot % COLUMNS;
        } else {
            row = geometry.by_tile_columns.quotient(slot);
            within = slot - row * geometry.tile_columns;
        }
        column = first_column + within;
        return row < rows && within < columns;
    }
    // In units, from the start of an array of rows without gaps.
    __device__ __forceinline__ long long offset(int row, int column) const {
        return (long long)(first_row + row) * (COLUMNS ? COLUMNS : geometry.columns) + column;
    }
};

struct Heads {
    int heads;
    int max_seq_len;
    int head_columns;
    Divisor by_max_seq_len;
    Divisor by_head_columns;
};

// The place, in units, of a padded row's column in [batch, heads, max_seq_len, dim].
template <int HEAD_COLUMNS> __device__ __forceinline__ long long by_head(const Heads& h, unsigned row, int column) {
    const int head_columns = HEAD_COLUMNS ? HEAD_COLUMNS : h.head_columns;
    const unsigned sequence = h.by_max_seq_len.quotient(row), position = row - sequence * h.max_seq_len;
    int head;
    if constexpr (HEAD_COLUMNS)
        head = column / HEAD_COLUMNS;
    else
        head = h.by_head_columns.quotient(column);
    const long long line = ((long long)sequence * h.heads + head) * h.max_seq_len + position;
    return line * head_columns + (column - head * head_columns);
}

// --- the offsets ---------------------------------------------------------------------------------------

struct BuildParams {
    const int* lengths;  // [batch], clamped to [0, max_seq_len]
    int* padding_offset; // [words]
    int* cu_seqlens;     // [batch + 1]
    int words;           // as the caller counts them: words past the real ones belong to a sequence number `batch`
    int batch;
    int max_seq_len;
    int words_per_block;
    int first_step; // the largest power of two below the sequences of a tile, at most below THREADS * LENGTHS
};

constexpr int LENGTHS = 4; // per thread and tile

// Grid: a block per words_per_block words. There are few lengths, so each block sums them up itself, tile by tile, up
// to its last word, and waits for no other. The last block goes on to the end and writes cu_seqlens.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) build_padding_offset(const __grid_constant__ BuildParams p) {
    constexpr int TILE = THREADS * LENGTHS, WARPS = THREADS / 32;
    __shared__ int starts[TILE];
    __shared__ int warp_sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool last_block = blockIdx.x == gridDim.x - 1;
    const int first = int(blockIdx.x) * p.words_per_block;
    const int end = last_block ? p.words : first + p.words_per_block;

    int before = 0; // words of all sequences before the tile
    for (int tile = 0; tile < p.batch && (before < end || last_block); tile += TILE) {
        int length[LENGTHS], sum = 0;
#pragma unroll
        for (int i = 0; i < LENGTHS; ++i) {
            const int sequence = tile + threadIdx.x * LENGTHS + i;
            length[i] = sequence < p.batch ? min(max(p.lengths[sequence], 0), p.max_seq_len) : 0;
            sum += length[i];
        }
        const int inclusive = lanes_inclusive_sum<32>(sum);
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        const int sums = lanes_inclusive_sum<32>(lane < WARPS ? warp_sums[lane] : 0);
        const int after = before + __shfl_sync(FULL_WARP, sums, WARPS - 1);
        const int of_warps_before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
        int start = before + (warp ? of_warps_before : 0) + inclusive - sum;
#pragma unroll
        for (int i = 0; i < LENGTHS; ++i) {
            const int sequence = tile + threadIdx.x * LENGTHS + i;
            starts[threadIdx.x * LENGTHS + i] = start;
            start += length[i];
            if (last_block && sequence < p.batch) p.cu_seqlens[sequence + 1] = start;
        }
        __syncthreads();
        for (int word = max(first, before) + threadIdx.x; word < min(end, after); word += THREADS) {
            // The last sequence that starts at or before the word: empty ones, which start there too, come before it.
            int sequence = 0;
            for (int step = p.first_step; step > 0; step /= 2)
                if (starts[sequence + step] <= word) sequence += step;
            p.padding_offset[word] = (tile + sequence) * p.max_seq_len - starts[sequence];
        }
        before = after;
        __syncthreads();
    }
    for (int word = max(first, before) + threadIdx.x; word < end; word += THREADS)
        p.padding_offset[word] = p.batch * p.max_seq_len - before;
    if (last_block && threadIdx.x == 0) p.cu_seqlens[0] = 0;
}

// --- removing ------------------------------------------------------------------------------------------

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
    using Unit = typename UnitOf<BYTES>::Type;
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
            // The sum is never 2^32 or more, and one below 0 becomes one past all rows.
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

// --- rebuilding ----------------------------------------------------------------------------------------

// The first word whose row is at or past `row`, by the whole warp: 32 probes at once leave a 32nd of the words.
__device__ __forceinline__ int first_word_from(const int* padding_offset, int words, unsigned row, int lane) {
    // Word w lies in row w or a later one.
    int low = 0, high = int(min(unsigned(words), row));
    while (low < high) {
        const int step = (high - low - 1) / 32 + 1;
        const long long probe = low + (lane + 1LL) * step - 1;
        const bool before = probe < high && unsigned(probe) + unsigned(padding_offset[probe]) < row;
        low += __popc(__ballot_sync(FULL_WARP, before)) * step;
        high = int(min(unsigned(high), unsigned(low) + step - 1));
    }
    return low;
}

// word_of[r] = the word of row first_row + r, or -1. Which words a tile holds, one search finds out: they follow each
// other, and so none of them is far, however long the gaps are.
template <int THREADS>
__device__ __forceinline__ void find_words(const int* padding_offset, int words, unsigned first_row, int rows,
                                           int* word_of) {
    __shared__ int first_word;
    if (threadIdx.x < 32) {
        const int found = first_word_from(padding_offset, words, first_row, threadIdx.x);
        if (threadIdx.x == 0) first_word = found;
    }
    for (int r = threadIdx.x; r < rows; r += THREADS) word_of[r] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < min(rows, words - first_word); i += THREADS) {
        const int word = first_word + i;
        const unsigned r = unsigned(word) + unsigned(padding_offset[word]) - first_row;
        // Two words have no business in one row; if they are sent there, the last one wins.
        if (r < unsigned(rows)) atomicMax(&word_of[r], word);
    }
    __syncthreads();
}

struct RebuildParams {
    const void* src;           // [words, columns], rows `row_stride` units apart
    const int* padding_offset; // [words]
    void* out;                 // [padded rows, columns]
    long long row_stride;
    int words;
    unsigned fill; // the element, twice if it has two bytes
    Geometry geometry;
};

template <int BYTES, int COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) rebuild_padding(const __grid_constant__ RebuildParams p) {
    using Unit = typename UnitOf<BYTES>::Type;
    __shared__ int word_of[COLUMNS ? THREADS * ITEMS / (COLUMNS ? COLUMNS : 1) : THREADS * ITEMS];
    const Tile<COLUMNS, THREADS, ITEMS> tile(p.geometry);
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
        // Measured to be faster than a plain store.
        if (tile.locate(i, row, column)) __stcs(out + tile.offset(row, column), unit[i]);
}

// --- rebuilding q, k and v -----------------------------------------------------------------------------

struct AddBiasParams {
    const void* src[3];        // q, k, v: T [words, columns], rows `row_stride` units apart
    const void* bias[3];       // T [columns]
    void* out[3];              // T [batch, heads, max_seq_len, dim]
    const int* padding_offset; // [words]
    long long row_stride[3];
    int words;
    Geometry geometry;
    Heads heads;
};

// The sum of two words: of one float, or of two elements of half the size, each added in float32 and rounded.
template <typename T> struct Word;
template <> struct Word<float> {
    static __device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
        return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
    }
};
template <> struct Word<__half> {
    static __device__ __forceinline__ unsigned add(const unsigned& a, const unsigned& b) {
        const float2 x = __half22float2(reinterpret_cast<const __half2&>(a));
        const float2 y = __half22float2(reinterpret_cast<const __half2&>(b));
        const __half2 sum = __float22half2_rn(make_float2(x.x + y.x, x.y + y.y));
        return reinterpret_cast<const unsigned&>(sum);
    }
};
template <> struct Word<__nv_bfloat16> {
    static __device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
        // A bfloat16 is the upper half of a float.
        const float2 x = make_float2(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
        const float2 y = make_float2(__uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u));
        const __nv_bfloat162 sum = __float22bfloat162_rn(make_float2(x.x + y.x, x.y + y.y));
        return reinterpret_cast<const unsigned&>(sum);
    }
};

template <typename T> __device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
    return make_uint4(Word<T>::add(a.x, b.x), Word<T>::add(a.y, b.y), Word<T>::add(a.z, b.z), Word<T>::add(a.w, b.w));
}
template <typename T> __device__ __forceinline__ uint2 add(uint2 a, uint2 b) {
    return make_uint2(Word<T>::add(a.x, b.x), Word<T>::add(a.y, b.y));
}
template <typename T> __device__ __forceinline__ unsigned add(unsigned a, unsigned b) { return Word<T>::add(a, b); }
template <typename T> __device__ __forceinline__ unsigned short add(unsigned short a, unsigned short b) {
    return (unsigned short)Word<T>::add(unsigned(a), unsigned(b));
}

template <typename T, int BYTES, int COLUMNS, int HEAD_COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) add_bias_rebuild_padding(const __grid_constant__ AddBiasParams p) {
    using Unit = typename UnitOf<BYTES>::Type;
    __shared__ int word_of[COLUMNS ? THREADS * ITEMS / (COLUMNS ? COLUMNS : 1) : THREADS * ITEMS];
    const Tile<COLUMNS, THREADS, ITEMS> tile(p.geometry);
    const int z = blockIdx.z;
    const Unit* src = static_cast<const Unit*>(z == 0 ? p.src[0] : z == 1 ? p.src[1] : p.src[2]);
    const Unit* bias = static_cast<const Unit*>(z == 0 ? p.bias[0] : z == 1 ? p.bias[1] : p.bias[2]);
    Unit* out = static_cast<Unit*>(z == 0 ? p.out[0] : z == 1 ? p.out[1] : p.out[2]);
    const long long row_stride = z == 0 ? p.row_stride[0] : z == 1 ? p.row_stride[1] : p.row_stride[2];
    find_words<THREADS>(p.padding_offset, p.words, tile.first_row, tile.rows, word_of);

    Unit unit[ITEMS], addend[ITEMS];
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int word = tile.locate(i, row, column) ? word_of[row] : -1;
        unit[i] = addend[i] = Unit{};
        if (word >= 0) {
            unit[i] = __ldcs(src + word * row_stride + column);
            addend[i] = __ldg(bias + column);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (tile.locate(i, row, column))
            __stcs(out + by_head<HEAD_COLUMNS>(p.heads, tile.first_row + row, column), add<T>(unit[i], addend[i]));
}
