// Add biases to queries, keys and values, and put their words (rows of tokens without padding) back into a padded batch
// in the layout [batch, heads, max_seq_len, dim].
//
//   out[b, h, s, d] = src[w, h * dim + d] + bias[h * dim + d], added in float32, for the word w whose padded row
//                     w + padding_offset[w] is b * max_seq_len + s; 0 if there is no such word
//
// `w + padding_offset[w]` must increase strictly with w. If it does not, the result is wrong, but no access is outside
// of the arrays.
//
// Grid: x and y: tiles of padded rows (padding/tile.cuh); z: q, k, v. Each block searches for the words that belong to
// its rows.
//
// Speed of light: memory bandwidth; each word of q, k and v is read once, and each padded row is written once. An H200
// reaches 93% of the bandwidth of a copy at 65536 padded rows of 4096 float16 (half of them hold words), and 90% at
// 32768 rows of 1024.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "padding/tile.cuh"
#include "padding/words.cuh"

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

// Add two 32-bit registers. Each register holds one float or two 16-bit elements. 16-bit elements are added in float32
// and rounded once.
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
    begin_behind_earlier_kernels();
    using Unit = typename VectorOf<BYTES>::Type;
    using Rows = Tile<COLUMNS, THREADS, ITEMS>;
    __shared__ int word_of[Rows::MAX_ROWS];
    const Rows tile(p.geometry);
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
