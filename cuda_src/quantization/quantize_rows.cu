// Quantize rows to 8 bits with one scale per row, or per group of any size.
//
//   scale = max(min(max |v|, upper), smallest) / LARGEST, over a group; NaN is ignored
//   q     = v / scale, rounded to nearest, ties to even (INT8_TRUNCATE: toward zero), and saturated
//
// INT8_AZP also has a zero point:
//
//   scale = max((max v - min v) / 255, max(max |v|, smallest) / 2^22)
//   azp   = round(-128 - min v / scale)
//   q     = round(v / scale) + azp, saturated
//
// v is x or, with an activation, activate(gate, up) of the two halves of a row. LARGEST is the largest value of the
// 8-bit format. Every quotient has the bits of an IEEE division.
//
// Grid: one block per group. Each thread keeps up to ITEMS vectors of VECTOR elements in registers; the other vectors
// of the group are read again, from L2.
//
// Speed of light: memory bandwidth, with 3 bytes per bfloat16 element. On an H200 the kernel reaches 97% of the
// bandwidth of a copy for 8192 x 7168 elements, both for FP8 and int8, and 89% for 8192 x 2048 with silu.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"
#include "quantization/scales.cuh"

struct QuantizeRowsParams {
    Rows in;
    char* q; // [rows, groups, columns * VECTOR]
    Scales scales;
    int* azp;    // [rows], INT8_AZP only
    Scale upper; // upper limit of max |v|
    float smallest;
    int power_of_two;
    int groups; // per row
    Divisor by_groups;
    int columns; // vectors per group
};

// Find the largest magnitude of a group or, with INT8_AZP, the maximum of v and the maximum of -v. NaN is ignored.
template <typename T, int FORMAT, int ACTIVATION, int VECTOR> struct Extremes {
    using Input = Loaded<T, ACTIVATION, VECTOR, VECTOR == 1 ? sizeof(T) : 16>;
    float &largest, &negated; // references to variables of the kernel

    __device__ __forceinline__ void take(const float (&value)[VECTOR]) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            largest = fmaxf(largest, FORMAT == INT8_AZP ? value[j] : fabsf(value[j]));
            if constexpr (FORMAT == INT8_AZP) negated = fmaxf(negated, -value[j]);
        }
    }
    __device__ __forceinline__ void take(const Input& in) {
        if constexpr (!ACTIVATION && FORMAT != INT8_AZP) {
            largest = magnitude<false>(in, largest);
        } else if constexpr (!ACTIVATION && IN_PAIRS<T, VECTOR>) {
            const auto same = [](auto a) { return a; };
            const auto high = reduce_pairs(in, same, [](auto a, auto b) { return __hmax2(a, b); });
            const auto low = reduce_pairs(in, same, [](auto a, auto b) { return __hmin2(a, b); });
            largest = fmaxf(largest, fmaxf(to_float(high.x), to_float(high.y)));
            negated = fmaxf(negated, fmaxf(-to_float(low.x), -to_float(low.y)));
        } else {
            float value[VECTOR];
            in.values(value);
            take(value);
        }
    }
    // All threads must call this function.
    __device__ __forceinline__ float find_scale(const QuantizeRowsParams& p, float& azp) {
        if constexpr (FORMAT == INT8_AZP) {
            block_max(largest, negated);
            const bool none = largest < -negated; // all elements are NaN
            const float high = none ? 0.f : largest, low = none ? 0.f : -negated;
            const float magnitude = fmaxf(fmaxf(fabsf(high), fabsf(low)), p.smallest);
            // Half of max - min, because the difference of two finite floats may overflow.
            const float half_range = __fsub_rn(__fmul_rn(high, 0.5f), __fmul_rn(low, 0.5f));
            const float scale = fmaxf(__fdiv_rn(half_range, 127.5f), __fmul_rn(magnitude, 0x1p-22f));
            azp = rintf(__fsub_rn(-128.f, __fdiv_rn(low, scale)));
            azp = azp == azp ? azp : 0.f;
            return scale;
        } else {
            return scale_of<FORMAT>(fminf(block_max(largest), p.upper.load()), p.smallest, p.power_of_two);
        }
    }
};

template <typename T, int FORMAT, int ACTIVATION, int VECTOR, int ITEMS>
__global__ void __launch_bounds__(1024, 1) quantize_rows(const __grid_constant__ QuantizeRowsParams p) {
    begin_behind_earlier_kernels();
    using Input = Loaded<T, ACTIVATION, VECTOR, VECTOR == 1 ? sizeof(T) : 16>;
    const int row = p.by_groups.quotient(blockIdx.x), group = blockIdx.x - row * p.groups;
    if (!p.in.is_counted(row)) return;
    const int threads = blockDim.x;
    const long long vectors = (long long)p.groups * p.columns, first = (long long)group * p.columns;
    constexpr int SIZE = VECTOR * int(sizeof(T));
    const char* from = p.in.x + row * p.in.stride + first * SIZE;
    char* out = p.q + (row * vectors + first) * VECTOR;

    Input loaded[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int vector = threadIdx.x + i * threads;
        if (vector < p.columns) loaded[i].load(from + vector * (long long)SIZE, vectors * SIZE);
    }
    float largest = FORMAT == INT8_AZP ? -CUDART_INF_F : 0.f, negated = -CUDART_INF_F;
    Extremes<T, FORMAT, ACTIVATION, VECTOR> extremes{largest, negated};
    // The results of the activation stay in registers, so that it is computed only once.
    float activated[ACTIVATION ? ITEMS : 1][VECTOR], value[VECTOR];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (int(threadIdx.x + i * threads) >= p.columns) continue;
        if constexpr (ACTIVATION) {
            loaded[i].values(activated[i]);
            extremes.take(activated[i]);
        } else {
            extremes.take(loaded[i]);
        }
    }
    for (int vector = threadIdx.x + ITEMS * threads; vector < p.columns; vector += threads) {
        Input more;
        more.load(from + vector * (long long)SIZE, vectors * SIZE);
        extremes.take(more);
    }

    float azp = 0;
    const float scale = extremes.find_scale(p, azp);
    if (threadIdx.x == 0) {
        p.scales.out[p.scales.at(p.in, row, group)] = scale;
        if constexpr (FORMAT == INT8_AZP) p.azp[row] = __float2int_rn(azp);
    }

    // The template argument of Quotient is the range of `v / scale`. For FP8, `upper` may limit the scale, so the
    // quotient has no bound (LARGE). With INT8_AZP the quotient is at most 2^22, where SMALL is exact too.
    const Quotient<FORMAT == E4M3 ? LARGE : SMALL> quotient(scale);
    auto store = [&](int vector, const float (&value)[VECTOR]) {
        float quotients[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) quotients[j] = quotient(value[j]);
        *reinterpret_cast<Vector<VECTOR>*>(out + (long long)vector * VECTOR) = to_bytes<FORMAT, VECTOR>(quotients, azp);
    };
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int vector = threadIdx.x + i * threads;
        if (vector >= p.columns) continue;
        if constexpr (ACTIVATION) {
            store(vector, activated[i]);
        } else {
            loaded[i].values(value);
            store(vector, value);
        }
    }
    for (int vector = threadIdx.x + ITEMS * threads; vector < p.columns; vector += threads) {
        Input more;
        more.load(from + vector * (long long)SIZE, vectors * SIZE);
        more.values(value);
        store(vector, value);
    }
}
