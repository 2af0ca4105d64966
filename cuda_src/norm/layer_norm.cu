// Layer norm: subtract the mean of a row, divide by its standard deviation, multiply by a weight and add a bias. If
// ADD, a residual and a bias are first added to the row.
//
//   z[r, c]      = input[r, c]; if ADD, input[r, c] + input_bias[c] + residual[r, c] rounded to T, which is also stored
//                  in residual_out[r, c] unless residual_out is null
//   mean[r]      = sum of z[r, :] / width                                                                   in float32
//   left[r]      = sum of (z[r, :] - mean[r]) / width
//   variance[r]  = sum of (z[r, :] - mean[r])^2 / width - left[r]^2, at least 0
//   out[r, c]    = (z[r, c] - mean[r] - left[r]) * rsqrt(variance[r] + epsilon) * weight[c] + bias[c], rounded to T
//
// This is the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983). `left`, the mean of the differences from
// the mean, corrects the rounding error of the mean. The result is therefore accurate even if the mean is much larger
// than the standard deviation. For a row of equal elements the result is exactly the bias. The second pass costs
// little, because the row is in registers. Welford's one-pass algorithm would need a division per element, or a merge
// of means at each step of the reduction.
//
// Each product and each sum is rounded to float32 (no fused multiply-add), and the sums are computed in the order that
// norm/row.cuh describes. All template instances therefore give the same bits.
//
// W: type of the weight and the bias, T or float. WIDTH: width of a row; 0 if it is known only at run time. BYTES:
// width of a load, 16 bytes or one element. THREADS: threads per row, a power of two; either all threads of a block, or
// at most a warp. ITEMS: units per thread that stay in registers. BLOCK: threads per block.
//
// Grid: BLOCK / THREADS rows per block. A unit is EACH consecutive elements. Thread t of a row has the units `t`,
// `t + THREADS`, `t + 2 * THREADS` and so on. The first ITEMS units of a thread stay in registers. A thread has more
// units only if THREADS == COLUMNS; they are loaded again in each of three passes: mean, variance and result. If ADD,
// the first pass stores z of these units in residual_out (in `out`, if residual_out is null), and the later passes load
// z from there.
//
// Speed of light: memory bandwidth. The row and its residual are read once, and the result and residual_out are written
// once; about twenty flops per element take less time. With few rows, the limit is the latency of a load, two
// reductions and a store.
#include "common/overlap.cuh"
#include "norm/row.cuh"

struct Params {
    Rows input;             // T
    Rows residual;          // T if ADD
    Rows residual_out;      // T if ADD, null: z is not stored
    Rows out;               // T
    const char* input_bias; // [width]  T if ADD, null: 0
    const char* weight;     // [width]  W, null: 1
    const char* bias;       // [width]  W, null: 0
    int rows;
    int inner; // rows per outer index
    Divisor by_inner;
    int width;
    float per_width; // 1 / width
    float epsilon;
};

// The statistics of a row, as in the formulas at the top of this file.
struct Moments {
    float mean, left, inverse; // inverse: rsqrt(variance + epsilon)
};

__device__ __forceinline__ float sum_of(const float (&value)[EACH]) {
    float sum = value[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i) sum = __fadd_rn(sum, value[i]);
    return sum;
}

// The units of a row that belong to a thread: their positions, and the operations on a unit (EACH consecutive
// elements). The elements are in local arrays of the kernel, not in members of this class. The compiler would not keep
// members in registers, because loops index them before the loops are unrolled.
template <typename T, typename W, bool ADD, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
struct Row : Dealt<WIDTH, THREADS, ITEMS, BLOCK> {
    using Own = Dealt<WIDTH, THREADS, ITEMS, BLOCK>;
    using Own::SLOTS, Own::SUMS, Own::FITS, Own::width, Own::outer, Own::inner, Own::count, Own::column;
    using In = Eight<T, BYTES>;
    using Weight = Eight<W, BYTES == 16 ? 16 : int(sizeof(W))>;
    // EARLY: weight and bias are loaded together with the row, before the reductions, if there are enough registers.
    static constexpr bool EARLY = FITS && ITEMS * EACH * int(sizeof(W)) <= EARLY_BYTES;
    static constexpr int OTHERS = ADD ? ITEMS : 1, EARLIES = EARLY ? ITEMS : 1;
    // A row can end in the middle of a unit only if the loads are single elements.
    static constexpr bool ENDS_IN_UNIT = BYTES < 16;

    const Params& p;
    const char *input, *residual;
    char *residual_out, *out;

    __device__ __forceinline__ explicit Row(const Params& p) : Own(p), p(p) {
        input = p.input.at(outer, inner), residual = p.residual.at(outer, inner), out = p.out.at(outer, inner);
        residual_out = p.residual_out.first ? p.residual_out.at(outer, inner) : nullptr;
    }

    __device__ __forceinline__ In load(const char* row, int i) const {
        In unit;
        unit.load(row + column(i) * int(sizeof(T)), count(i));
        return unit;
    }
    __device__ __forceinline__ void store(char* row, int i, const In& unit) const {
        unit.store(row + column(i) * int(sizeof(T)), count(i));
    }
    // Load unit i of a vector that all rows share. Return zeros if `vector` is null.
    template <typename Of> __device__ __forceinline__ Of load_shared(const char* vector, int i) const {
        Of unit = {};
        constexpr int SIZE = sizeof(unit) / EACH;
        if (vector) unit.load_shared(vector + column(i) * SIZE, width - column(i));
        return unit;
    }

    // Return unit i of z: the sum of `in` (a unit of the input), the input bias and `other` (the same unit of the
    // residual).
    __device__ __forceinline__ In added(int i, const In& in, const In& other) const {
        float value[EACH], bias[EACH], more[EACH];
        in.get(value), load_shared<In>(p.input_bias, i).get(bias), other.get(more);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            // If there is no bias, skip the addition, because adding 0 would turn -0 into 0.
            const float biased = p.input_bias ? __fadd_rn(value[j], bias[j]) : value[j];
            value[j] = __fadd_rn(biased, more[j]);
        }
        In z;
        z.set(value);
        return z;
    }

    // Load the first ITEMS units, and store z of them in `kept`. All loads are issued before the first computation.
    __device__ __forceinline__ void load_all(In (&kept)[ITEMS], In (&other)[OTHERS], Weight (&weight)[EARLIES],
                                             Weight (&bias)[EARLIES]) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            kept[i] = load(input, i);
            if constexpr (ADD) other[i] = load(residual, i);
        }
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                weight[i] = load_shared<Weight>(p.weight, i), bias[i] = load_shared<Weight>(p.bias, i);
            }
        }
        if constexpr (ADD) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                kept[i] = added(i, kept[i], other[i]);
                if (residual_out) store(residual_out, i, kept[i]);
            }
        }
    }

    // Some units do not stay in registers. If ADD, the first pass stores z of these units in the row `staged()`. Later
    // passes load z from the row `reread()`.
    __device__ __forceinline__ char* staged() const { return residual_out ? residual_out : out; }
    __device__ __forceinline__ const char* reread() const { return ADD ? staged() : input; }

    // Compute COUNT sums over the row. `of(i, unit, numbers)` sets `numbers` to the contributions of unit i to the
    // sums. `rest(i)` loads unit i if it is not in `kept`.
    template <int COUNT, typename Of, typename Rest>
    __device__ __forceinline__ void sum_up(const In (&kept)[ITEMS], float (&total)[COUNT], Of of, Rest rest) const {
        float sums[COUNT][SUMS] = {}, numbers[COUNT];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            of(i, kept[i], numbers);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) sums[k][i % SLOTS] = __fadd_rn(sums[k][i % SLOTS], numbers[k]);
        }
        if constexpr (!FITS) {
            for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) {
                of(i, rest(i), numbers);
#pragma unroll
                for (int k = 0; k < COUNT; ++k) sums[k][0] = __fadd_rn(sums[k][0], numbers[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) total[k] = folded(sums[k]);
        row_sums<THREADS>(total);
    }

    // Return the mean of the row, which still has a rounding error. If ADD, also store z of the units that are not in
    // `kept` in staged().
    __device__ __forceinline__ float mean(const In (&kept)[ITEMS]) const {
        float total[1];
        sum_up(
            kept, total,
            [&](int i, const In& unit, float (&numbers)[1]) {
                float value[EACH];
                unit.get(value);
                numbers[0] = sum_of(value);
            },
            [&](int i) {
                In unit = load(input, i);
                if constexpr (ADD) {
                    unit = added(i, unit, load(residual, i));
                    store(staged(), i, unit);
                }
                return unit;
            });
        return __fmul_rn(total[0], p.per_width);
    }

    // Set value[j] to the difference of element j of a unit from `mean`, or to 0 after the end of the row.
    __device__ __forceinline__ void differences(int i, const In& unit, float mean, float (&value)[EACH]) const {
        unit.get(value);
#pragma unroll
        for (int j = 0; j < EACH; ++j) value[j] = (ENDS_IN_UNIT ? j : 0) < count(i) ? __fsub_rn(value[j], mean) : 0.f;
    }

    __device__ __forceinline__ Moments moments(const In (&kept)[ITEMS]) const {
        Moments found;
        found.mean = mean(kept);
        float total[2];
        sum_up(
            kept, total,
            [&](int i, const In& unit, float (&numbers)[2]) {
                float value[EACH];
                differences(i, unit, found.mean, value);
                numbers[0] = sum_of(value);
#pragma unroll
                for (int j = 0; j < EACH; ++j) value[j] = __fmul_rn(value[j], value[j]);
                numbers[1] = sum_of(value);
            },
            [&](int i) { return load(reread(), i); });
        found.left = __fmul_rn(total[0], p.per_width);
        float variance = __fsub_rn(__fmul_rn(total[1], p.per_width), __fmul_rn(found.left, found.left));
        if (variance < 0.f) variance = 0.f; // not fmaxf, so that NaN stays NaN
        found.inverse = __frsqrt_rn(__fadd_rn(variance, p.epsilon));
        return found;
    }

    __device__ __forceinline__ void normalize(int i, const In& unit, const Weight& weight, const Weight& bias,
                                              const Moments& of) const {
        float y[EACH], factor[EACH], more[EACH];
        unit.get(y), weight.get(factor), bias.get(more);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            y[j] = __fmul_rn(__fsub_rn(__fsub_rn(y[j], of.mean), of.left), of.inverse);
            if (p.weight) y[j] = __fmul_rn(y[j], factor[j]);
            if (p.bias) y[j] = __fadd_rn(y[j], more[j]);
        }
        In result;
        result.set(y);
        store(out, i, result);
    }

    __device__ __forceinline__ void normalize_all(const In (&kept)[ITEMS], const Weight (&weight)[EARLIES],
                                                  const Weight (&bias)[EARLIES], const Moments& of) const {
        const auto late = [&](int i, const In& unit) {
            normalize(i, unit, load_shared<Weight>(p.weight, i), load_shared<Weight>(p.bias, i), of);
        };
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (EARLY)
                normalize(i, kept[i], weight[i], bias[i], of);
            else
                late(i, kept[i]);
        }
        if constexpr (!FITS)
            for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) late(i, load(reread(), i));
    }
};

template <typename T, typename W, bool ADD, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
__global__ void __launch_bounds__(BLOCK) layer_norm(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using OwnRow = Row<T, W, ADD, WIDTH, THREADS, ITEMS, BYTES, BLOCK>;
    const OwnRow row(p);
    typename OwnRow::In kept[ITEMS], other[OwnRow::OTHERS];
    typename OwnRow::Weight weight[OwnRow::EARLIES], bias[OwnRow::EARLIES];
    row.load_all(kept, other, weight, bias);
    const Moments moments = row.moments(kept);
    row.normalize_all(kept, weight, bias, moments);
}
