// RMS norm: rows divided by the root of the mean of their squares, times a weight.
//
//   z[r, c] = x[r, c]; if ADD, x[r, c] + residual[r, c] rounded to T, which also becomes residual[r, c]
//   y[r, c] = z[r, c] * rsqrt(sum of z[r, :]^2 / width + epsilon) * (weight[c] + offset)                    in float32
//   out     = y rounded to T; or e4m3(y / scale), with one scale that is given, or max(max |y|, smallest) / 448 for each
//             row or for each GROUP neighbours of one
//
// Each product and each sum is rounded as IEEE says, and the order of the sum is the same however a row is dealt out:
// EACH neighbours one after the other; of these sums those COLUMNS apart, one after the other; and then the second half
// of what there is is added to the first, until one is left. So all instances give the same bits.
//
// T: the elements. W: those of the weight, T or float. WIDTH: of a row, 0: dynamic. BYTES: the width of a load, 16 or one
// element. THREADS: have a row, a power of two: a block, or up to a warp of one. A thread has units of EACH neighbours, t,
// t + THREADS, ..., and keeps ITEMS of them in registers; those past them, which only rows of COLUMNS threads have, it
// reads again. Grid: rows, BLOCK / THREADS of them in a block.
#include "common/quantize.cuh"
#include "common/warp.cuh"

constexpr int EACH = 8;
constexpr int COLUMNS = 1024;
constexpr int EARLY_BYTES = 64; // of the weight, that a thread may hold while it waits for the others

enum Result { PLAIN, BY_TENSOR, BY_ROW, BY_GROUP }; // a scale for each of these

// Rows [outer, inner, width] at two distances.
struct Rows {
    char* first;
    long long outer_stride; // bytes
    long long inner_stride;
    __device__ __forceinline__ char* at(int outer, int inner) const {
        return first + outer * outer_stride + inner * inner_stride;
    }
};

struct Params {
    Rows x;
    Rows residual; // if ADD
    Rows out;
    const char* weight; // W [width], may be null: 1
    float* scales;      // [1], [rows] or [rows, width / GROUP]
    Scale scale;        // BY_TENSOR
    int rows;
    int inner; // rows with one distance between them
    Divisor by_inner;
    int width;
    float per_width; // 1 / width
    float epsilon;
    float offset;
    float smallest;
};

// EACH neighbours of a row.
template <typename T, int BYTES> struct Eight {
    static constexpr int LOADS = EACH * int(sizeof(T)) / BYTES, IN_LOAD = BYTES / int(sizeof(T));
    alignas(16) Unit<BYTES> unit[LOADS];

    // The first `count` of them; the others are 0. Not by the way for constants: x may be written by this kernel.
    __device__ __forceinline__ void load(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = i * IN_LOAD < count ? __ldcs(reinterpret_cast<const Unit<BYTES>*>(from) + i) : Unit<BYTES>{};
    }
    // The same of what all rows share.
    __device__ __forceinline__ void load_shared(const char* from, int count) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = i * IN_LOAD < count ? __ldg(reinterpret_cast<const Unit<BYTES>*>(from) + i) : Unit<BYTES>{};
    }
    __device__ __forceinline__ void store(char* to, int count) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (i * IN_LOAD < count) reinterpret_cast<Unit<BYTES>*>(to)[i] = unit[i];
    }
    __device__ __forceinline__ void get(float (&value)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if constexpr (IS_BFLOAT16<T> && BYTES > 2) {
                // Its high half is a float already, but for the low one.
                const unsigned pair = reinterpret_cast<const unsigned*>(unit)[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(unit)[i]);
            }
        }
    }
    __device__ __forceinline__ void set(const float (&value)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) reinterpret_cast<T*>(unit)[i] = from_float<T>(value[i]);
    }
};

__device__ __forceinline__ float sum_of_squares(const float (&value)[EACH]) {
    float sum = __fmul_rn(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < EACH; ++i) sum = __fadd_rn(sum, __fmul_rn(value[i], value[i]));
    return sum;
}

// The second half is added to the first, until one is left.
template <int COUNT> __device__ __forceinline__ float folded(float (&sums)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    return sums[0];
}

// The sums of THREADS threads folded, in each of them.
template <int THREADS> __device__ __forceinline__ float row_sum(float sum) {
    if constexpr (THREADS > 32) {
        // Warps first: halves of the threads are added before neighbours are.
        __shared__ float of_thread[THREADS];
        of_thread[threadIdx.x] = sum;
        __syncthreads();
        float of_warp[THREADS / 32];
#pragma unroll
        for (int i = 0; i < THREADS / 32; ++i) of_warp[i] = of_thread[i * 32 + threadIdx.x % 32];
        sum = folded(of_warp);
    }
#pragma unroll
    for (int step = (THREADS > 32 ? 32 : THREADS) / 2; step > 0; step /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, step));
    return sum;
}

// The largest of the values of THREADS threads, none of them negative or NaN, in each of them.
template <int THREADS> __device__ __forceinline__ float row_max(float value) {
    value = lanes_max<(THREADS > 32 ? 32 : THREADS)>(value);
    if constexpr (THREADS > 32) {
        __shared__ float of_warp[THREADS / 32];
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
        __syncthreads();
        value = lanes_max<THREADS / 32>(of_warp[threadIdx.x % (THREADS / 32)]);
    }
    return value;
}

constexpr int power_of_two_from(int count) { return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2); }

template <typename T, typename W, int RESULT, int GROUP, bool ADD, int WIDTH, int THREADS, int ITEMS, int BYTES,
          int BLOCK>
__global__ void __launch_bounds__(BLOCK) rms_norm(const __grid_constant__ Params p) {
    using In = Eight<T, BYTES>;
    using Weight = Eight<W, BYTES == 16 ? 16 : int(sizeof(W))>;
    constexpr int SLOTS = COLUMNS / THREADS; // columns of a thread
    constexpr int SUMS = ITEMS < SLOTS ? power_of_two_from(ITEMS) : SLOTS;
    constexpr bool FITS = WIDTH ? WIDTH <= THREADS * ITEMS * EACH : THREADS < COLUMNS;
    constexpr bool EARLY = ITEMS * EACH * int(sizeof(W)) <= EARLY_BYTES;
    static_assert(FITS || SLOTS == 1, "a thread that reads again has one column");
    static_assert(THREADS <= 32 || THREADS == BLOCK, "a row is in a warp, or has a block");
    static_assert(RESULT != BY_GROUP || GROUP / EACH <= THREADS, "neighbouring threads have a group");

    const int thread = threadIdx.x % THREADS, row = blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    const int width = WIDTH ? WIDTH : p.width, outer = p.by_inner.quotient(row), inner = row - outer * p.inner;
    const int end = row < p.rows ? width - thread * EACH : 0; // threads without a row take part in shuffles
    // How many numbers unit i of this thread has, and where they begin.
    auto count = [&](int i) { return end - i * (THREADS * EACH); };
    auto place = [&](int i) { return (thread + i * THREADS) * EACH; };
    const char* x = p.x.at(outer, inner);
    char *residual = p.residual.at(outer, inner), *out = p.out.at(outer, inner);

    In kept[ITEMS], other[ADD ? ITEMS : 1];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        kept[i].load(x + place(i) * int(sizeof(T)), count(i));
        if constexpr (ADD) other[i].load(residual + place(i) * int(sizeof(T)), count(i));
    }
    auto load_weight = [&](int i) {
        Weight weight;
        if (p.weight) weight.load_shared(p.weight + place(i) * int(sizeof(W)), width - place(i));
        return weight;
    };
    Weight early[EARLY ? ITEMS : 1];
    if constexpr (EARLY) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) early[i] = load_weight(i);
    }

    // The sum of squares of a unit, which with ADD first becomes the sum with its residual.
    auto take = [&](int i, In& in, const In& other) {
        float value[EACH];
        in.get(value);
        if constexpr (ADD) {
            float added[EACH];
            other.get(added);
#pragma unroll
            for (int j = 0; j < EACH; ++j) value[j] = __fadd_rn(value[j], added[j]);
            in.set(value);
            in.store(residual + place(i) * int(sizeof(T)), count(i));
            in.get(value);
        }
        return sum_of_squares(value);
    };
    float sums[SUMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) sums[i % SLOTS] = __fadd_rn(sums[i % SLOTS], take(i, kept[i], other[ADD ? i : 0]));
    if constexpr (!FITS) {
        for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) {
            In in, more;
            in.load(x + place(i) * int(sizeof(T)), count(i));
            if constexpr (ADD) more.load(residual + place(i) * int(sizeof(T)), count(i));
            sums[0] = __fadd_rn(sums[0], take(i, in, more));
        }
    }
    const float mean = __fmul_rn(row_sum<THREADS>(folded(sums)), p.per_width);
    const float inverse = __frsqrt_rn(__fadd_rn(mean, p.epsilon));

    // f(i, y) for each unit of this thread.
    auto normalize = [&](int i, const In& in, const Weight& weight, auto f) {
        float y[EACH], factor[EACH];
        in.get(y);
#pragma unroll
        for (int j = 0; j < EACH; ++j) y[j] = __fmul_rn(y[j], inverse);
        if (p.weight) {
            weight.get(factor);
#pragma unroll
            for (int j = 0; j < EACH; ++j) y[j] = __fmul_rn(y[j], __fadd_rn(factor[j], p.offset));
        }
        f(i, y);
    };
    auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (EARLY)
                normalize(i, kept[i], early[i], f);
            else
                normalize(i, kept[i], load_weight(i), f);
        }
        if constexpr (!FITS) {
            for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) {
                In in;
                in.load((ADD ? residual : x) + place(i) * int(sizeof(T)), count(i));
                normalize(i, in, load_weight(i), f);
            }
        }
    };
    auto put = [&](int i, const float (&y)[EACH], auto quotient) {
        float quotients[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) quotients[j] = quotient(y[j]);
        Eight<unsigned char, BYTES == 16 ? 8 : 1> bytes;
        *reinterpret_cast<uint2*>(bytes.unit) = to_bytes<E4M3, EACH>(quotients, 0.f);
        bytes.store(out + place(i), count(i));
    };

    if constexpr (RESULT == PLAIN) {
        each([&](int i, const float (&y)[EACH]) {
            In result;
            result.set(y);
            result.store(out + place(i) * int(sizeof(T)), count(i));
        });
    } else if constexpr (RESULT == BY_TENSOR) {
        const float scale = p.scale.load();
        if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scale;
        const Quotient<ANY> quotient(scale);
        each([&](int i, const float (&y)[EACH]) { put(i, y, quotient); });
    } else {
        auto larger = [](float largest, const float (&y)[EACH]) {
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                largest = fmaxf(largest, fabsf(y[j])); // the number, where one of them is NaN
            return largest;
        };
        if constexpr (RESULT == BY_ROW) {
            float largest = 0;
            each([&](int i, const float (&y)[EACH]) { largest = larger(largest, y); });
            const float scale = scale_of<E4M3>(row_max<THREADS>(largest), p.smallest, false);
            if (thread == 0 && row < p.rows) p.scales[row] = scale;
            const Quotient<SMALL> quotient(scale);
            each([&](int i, const float (&y)[EACH]) { put(i, y, quotient); });
        } else {
            constexpr int LANES = GROUP / EACH;
            float* scales = p.scales + (long long)row * (width / GROUP);
            each([&](int i, const float (&y)[EACH]) {
                const float scale = scale_of<E4M3>(lanes_max<LANES>(larger(0.f, y)), p.smallest, false);
                if (thread % LANES == 0 && count(i) > 0) scales[place(i) / GROUP] = scale;
                put(i, y, Quotient<SMALL>(scale));
            });
        }
    }
}
