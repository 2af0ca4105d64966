// Compute the weighted sum of each token's rows, one row per slot (expert of the token).
//
//   out[t] = sum over s of weights[t, s] * src[inverse[t, s]]
//
// Each product and each sum is rounded to float32. A slot adds nothing if its row is outside [0, rows) or past the end
// that `offsets` gives.
//
// T: the element type. BYTES: size of a vector, one load or store. TOPK: slots per token; 0: the kernel reads p.topk.
//
// Grid: a block handles blockDim.y tokens and one tile of their columns (Tiling). A thread sums one vector of a token,
// with the loads of up to 8 slots in flight.
//
// Speed of light: memory traffic. On an H200, with 8 slots of 7168 bfloat16, 64 tokens take 4.3 us (45% of the
// bandwidth of a copy), 1024 take 33 us (94%) and 8192 take 242 us (103%: unlike a copy, the kernel mostly reads).
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "moe_permute/rows.cuh"

struct Params {
    const void* src;      // [rows, columns]  T, rows `row_stride` vectors apart
    const float* weights; // [tokens, topk]; null: 1
    const int* inverse;   // [tokens, topk]; null: row t * topk + s
    const int* offsets;   // [1]: the end of all rows; null: `rows`
    void* out;            // [tokens, columns]  T
    long long row_stride;
    int topk;
    int rows;
    Tiling tiling;
};

// Elements are extracted from 32-bit words, because each 16-bit variable would take a complete register.
template <typename T, int BYTES> struct Elements {
    static constexpr int COUNT = BYTES / sizeof(T);
    union {
        Vector<BYTES> vector;
        unsigned words[(BYTES + 3) / 4];
    };
    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(T) == 4)
            return __uint_as_float(words[i]);
        else if constexpr (IS_BFLOAT16<T>)
            return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        else
            return __half2float(__ushort_as_half((unsigned short)(words[i / 2] >> i % 2 * 16)));
    }
    __device__ __forceinline__ void set(int i, float value) {
        if constexpr (sizeof(T) == 4) {
            words[i] = __float_as_uint(value);
        } else {
            unsigned bits;
            if constexpr (IS_BFLOAT16<T>)
                bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
            else
                bits = __half_as_ushort(__float2half_rn(value));
            words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
        }
    }
};

template <typename T, int BYTES, int TOPK>
__global__ void __launch_bounds__(ROW_THREADS, 4) unpermute_rows(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using VectorElements = Elements<T, BYTES>;
    constexpr int SLOTS = TOPK && TOPK < 8 ? TOPK : 8;
    const int topk = TOPK ? TOPK : p.topk;
    const int token = p.tiling.token(), column = p.tiling.tile() * p.tiling.tile_columns + int(threadIdx.x);
    if (token >= p.tiling.tokens || column >= p.tiling.columns) return;
    const Vector<BYTES>* src = static_cast<const Vector<BYTES>*>(p.src) + column;
    const int rows = p.offsets ? min(*p.offsets, p.rows) : p.rows;

    float sum[VectorElements::COUNT];
#pragma unroll
    for (int i = 0; i < VectorElements::COUNT; ++i) sum[i] = 0.f;
#pragma unroll
    for (int slot = 0; slot < topk; slot += SLOTS) {
        VectorElements loaded[SLOTS];
        float weight[SLOTS];
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const long long pair = (long long)token * topk + slot + s;
            row[s] = -1;
            weight[s] = 1.f;
            if (slot + s < topk) {
                row[s] = p.inverse ? p.inverse[pair] : int(pair);
                if (p.weights) weight[s] = p.weights[pair];
            }
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            // A slot without a row adds 0 even if its weight is NaN.
            const bool has_row = row[s] >= 0 && row[s] < rows;
            if (!has_row) weight[s] = 0.f;
            loaded[s] = VectorElements{};
            if (has_row) loaded[s].vector = src[row[s] * p.row_stride];
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
#pragma unroll
            for (int i = 0; i < VectorElements::COUNT; ++i)
                // Multiply and add are not fused, so that the sum is the same in every kernel.
                sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[s], loaded[s].get(i)));
    }
    VectorElements result;
#pragma unroll
    for (int i = 0; i < VectorElements::COUNT; ++i) result.set(i, sum[i]);
    static_cast<Vector<BYTES>*>(p.out)[(long long)token * p.tiling.columns + column] = result.vector;
}
