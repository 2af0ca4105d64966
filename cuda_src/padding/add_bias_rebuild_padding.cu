// Add biases to queries, keys and values, and store them in a padded batch by head.
//
//   out[b, h, s, d] = src[t, h * dim + d] + bias[h * dim + d], added in float32, for the token t with
//                     t + padding_offset[t] = b * max_seq_len + s; 0 if there is no such token
//
// `t + padding_offset[t]` must increase strictly with t; otherwise the result is wrong.
//
// Grid: x and y: tiles of padded rows (padding/tile.cuh); z: q, k, v.
//
// Speed of light: memory bandwidth. If half of the padded rows hold tokens, an H200 reaches 93% of the bandwidth of a
// copy at 65536 rows of 4096 float16, and 90% at 32768 rows of 1024.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "padding/tile.cuh"
#include "padding/tokens.cuh"

struct AddBiasParams {
    const void* src[3];        // q, k, v: T [tokens, columns]
    const void* bias[3];       // T [columns]
    void* out[3];              // T [batch, heads, max_seq_len, dim]
    const int* padding_offset; // [tokens]
    long long row_stride[3];   // in vectors
    int tokens;
    Geometry geometry;
    Heads heads;
};

// Add the elements of two registers in float32. Each register holds one float or two 16-bit elements.
template <typename T> struct Packed;
template <> struct Packed<float> {
    static __device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
        return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
    }
};
template <> struct Packed<__half> {
    static __device__ __forceinline__ unsigned add(const unsigned& a, const unsigned& b) {
        const float2 x = __half22float2(reinterpret_cast<const __half2&>(a));
        const float2 y = __half22float2(reinterpret_cast<const __half2&>(b));
        const __half2 sum = __float22half2_rn(make_float2(x.x + y.x, x.y + y.y));
        return reinterpret_cast<const unsigned&>(sum);
    }
};
template <> struct Packed<__nv_bfloat16> {
    static __device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
        // A bfloat16 is the upper half of a float.
        const float2 x = make_float2(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u));
        const float2 y = make_float2(__uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u));
        const __nv_bfloat162 sum = __float22bfloat162_rn(make_float2(x.x + y.x, x.y + y.y));
        return reinterpret_cast<const unsigned&>(sum);
    }
};

template <typename T> __device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
    return make_uint4(Packed<T>::add(a.x, b.x), Packed<T>::add(a.y, b.y), Packed<T>::add(a.z, b.z),
                      Packed<T>::add(a.w, b.w));
}
template <typename T> __device__ __forceinline__ uint2 add(uint2 a, uint2 b) {
    return make_uint2(Packed<T>::add(a.x, b.x), Packed<T>::add(a.y, b.y));
}
template <typename T> __device__ __forceinline__ unsigned add(unsigned a, unsigned b) { return Packed<T>::add(a, b); }
template <typename T> __device__ __forceinline__ unsigned short add(unsigned short a, unsigned short b) {
    return (unsigned short)Packed<T>::add(unsigned(a), unsigned(b));
}

template <typename T, int BYTES, int COLUMNS, int HEAD_COLUMNS, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) add_bias_rebuild_padding(const __grid_constant__ AddBiasParams p) {
    begin_behind_earlier_kernels();
    using Rows = Tile<COLUMNS, THREADS, ITEMS>;
    __shared__ int token_of[Rows::MAX_ROWS];
    const Rows tile(p.geometry);
    const int z = blockIdx.z;
    const Vector<BYTES>* src = static_cast<const Vector<BYTES>*>(z == 0 ? p.src[0] : z == 1 ? p.src[1] : p.src[2]);
    const Vector<BYTES>* bias = static_cast<const Vector<BYTES>*>(z == 0 ? p.bias[0] : z == 1 ? p.bias[1] : p.bias[2]);
    Vector<BYTES>* out = static_cast<Vector<BYTES>*>(z == 0 ? p.out[0] : z == 1 ? p.out[1] : p.out[2]);
    const long long row_stride = z == 0 ? p.row_stride[0] : z == 1 ? p.row_stride[1] : p.row_stride[2];
    find_tokens<THREADS>(p.padding_offset, p.tokens, tile.first_row, tile.rows, token_of);

    Vector<BYTES> vector[ITEMS], addend[ITEMS];
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int token = tile.locate(i, row, column) ? token_of[row] : -1;
        vector[i] = addend[i] = Vector<BYTES>{};
        if (token >= 0) {
            vector[i] = __ldcs(src + token * row_stride + column);
            addend[i] = __ldg(bias + column);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (tile.locate(i, row, column))
            __stcs(out + by_head<HEAD_COLUMNS>(p.heads, tile.first_row + row, column), add<T>(vector[i], addend[i]));
}
