// Compute the weighted sum of each token's rows: one row per slot. A slot is one of the `topk` experts of a token.
//
//   out[t] = sum over s of weights[t, s] * src[inverse[t, s]]
//
// The sum is in float32, from the first slot to the last; each product and each sum is rounded. A slot adds nothing if
// its row is outside [0, rows) or past the end in `offsets`.
//
// T: the element type. A unit is the bytes of one load or store. BYTES: size of a unit. TOPK: slots per token, or 0 if
// `topk` is an argument of the kernel.
//
// Grid: a block handles blockDim.y tokens and one tile of their columns (Tiling). A thread sums one unit of a token. It
// loads this unit from the rows of up to 8 slots before the first addition, so that the loads are in flight together.
//
// Speed of light: memory traffic. Per token, topk rows are read and one row is written, with two flops per element
// read. On an H200, with 8 slots of 7168 bfloat16, 64 tokens take 4.3 us (45% of the bandwidth of a copy), 1024 tokens
// take 33 us (94%) and 8192 tokens take 242 us (103%). The bandwidth can exceed the bandwidth of a copy, because this
// kernel mostly reads, while a copy writes as much as it reads.
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "moe_permute/rows.cuh"

struct Params {
    const void* src;      // [rows, columns]  T, rows `row_stride` units apart
    const float* weights; // [tokens, topk]; null: 1
    const int* inverse;   // [tokens, topk]; null: row t * topk + s
    const int* offsets;   // [1]: the end of all rows; null: `rows`
    void* out;            // [tokens, columns]  T
    long long row_stride;
    int topk;
    int rows;
    Tiling tiling;
};

// Access to the elements of a unit. They are extracted from 32-bit words, because each 16-bit variable would take a
// whole register.
template <typename T, int BYTES> struct Elements {
    static constexpr int COUNT = BYTES / sizeof(T);
    union {
        typename VectorOf<BYTES>::Type unit;
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
    using Unit = typename VectorOf<BYTES>::Type;
    using Of = Elements<T, BYTES>;
    constexpr int SLOTS = TOPK && TOPK < 8 ? TOPK : 8;
    const int topk = TOPK ? TOPK : p.topk;
    const int token = p.tiling.token(), column = p.tiling.chunk() * p.tiling.tile_columns + int(threadIdx.x);
    if (token >= p.tiling.tokens || column >= p.tiling.columns) return;
    const Unit* src = static_cast<const Unit*>(p.src) + column;
    const int rows = p.offsets ? min(*p.offsets, p.rows) : p.rows;

    float sum[Of::COUNT];
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) sum[i] = 0.f;
#pragma unroll
    for (int slot = 0; slot < topk; slot += SLOTS) {
        Of part[SLOTS];
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
            const bool there = row[s] >= 0 && row[s] < rows;
            if (!there) weight[s] = 0.f;
            part[s] = Of{};
            if (there) part[s].unit = src[row[s] * p.row_stride];
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
#pragma unroll
            for (int i = 0; i < Of::COUNT; ++i)
                // Multiply and add are not fused, so that the sum is the same in every kernel that computes it.
                sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[s], part[s].get(i)));
    }
    Of result;
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) result.set(i, sum[i]);
    static_cast<Unit*>(p.out)[(long long)token * p.tiling.columns + column] = result.unit;
}
