// Compute the layer norm of each row. If ADD, first add an input bias and a residual to the row.
//
//   z[r, c]       = input[r, c]; if ADD, input[r, c] + input_bias[c] + residual[r, c] rounded to T; this is stored
//                   in residual_out[r, c] unless residual_out is null
//   mean[r]       = sum of z[r, :] / width                                                                   in float32
//   mean_error[r] = sum of (z[r, :] - mean[r]) / width
//   variance[r]   = sum of (z[r, :] - mean[r])^2 / width - mean_error[r]^2, at least 0
//   y[r, c]       = (z[r, c] - mean[r] - mean_error[r]) * rsqrt(variance[r] + epsilon)
//   out[r, c]     = y[r, c] * weight[c] + bias[c], rounded to T
//
// This is the corrected two-pass algorithm (Chan, Golub and LeVeque, 1983). `mean_error`, the rounding error of the
// mean, keeps the result accurate even if the mean is much larger than the standard deviation.
//
// No multiply-add is fused, and norm/row.cuh fixes the order of sums, so all template instances give the same bits.
//
// W: type of the weight and the bias, T or float. The other template parameters are as in norm/row.cuh.
//
// Grid: BLOCK / THREADS rows per block. A thread loads its vectors beyond ITEMS in each of three passes: mean, variance
// and result. If ADD, the first pass stores z of these vectors, and the later passes load it.
//
// Speed of light: memory bandwidth. Few rows are bound by the latency of a load, two reductions and a store.
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

struct Moments {
    float mean, mean_error, inverse; // inverse: rsqrt(variance + epsilon)
};

__device__ __forceinline__ float sum_of(const float (&value)[VECTOR]) {
    float sum = value[0];
#pragma unroll
    for (int i = 1; i < VECTOR; ++i) sum = __fadd_rn(sum, value[i]);
    return sum;
}

// The vectors of one thread. Their elements are in local arrays of the kernel, because the compiler would not keep
// class members in registers.
template <typename T, typename W, bool ADD, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
struct Row : RowPartition<WIDTH, THREADS, ITEMS, BLOCK> {
    using Partition = RowPartition<WIDTH, THREADS, ITEMS, BLOCK>;
    using Partition::MAX_SUMS, Partition::SUMS, Partition::IN_REGISTERS, Partition::width, Partition::outer,
        Partition::inner, Partition::count, Partition::column;
    using InVector = RowVector<T, BYTES>;
    using Weight = RowVector<W, BYTES == 16 ? 16 : int(sizeof(W))>;
    // Load weight and bias before the reductions, if there are enough registers.
    static constexpr bool PREFETCH = IN_REGISTERS && ITEMS * VECTOR * int(sizeof(W)) <= PREFETCH_BYTES;
    static constexpr int RESIDUALS = ADD ? ITEMS : 1, PREFETCHED = PREFETCH ? ITEMS : 1;
    // Loads of 16 bytes require rows of whole vectors. With loads of single elements, a row may end inside a vector.
    static constexpr bool ENDS_IN_VECTOR = BYTES < 16;

    const Params& p;
    const char *input, *residual;
    char *residual_out, *out;

    __device__ __forceinline__ explicit Row(const Params& p) : Partition(p), p(p) {
        input = p.input.at(outer, inner), residual = p.residual.at(outer, inner), out = p.out.at(outer, inner);
        residual_out = p.residual_out.first ? p.residual_out.at(outer, inner) : nullptr;
    }

    __device__ __forceinline__ InVector load(const char* row, int i) const {
        InVector vector;
        vector.load(row + column(i) * int(sizeof(T)), count(i));
        return vector;
    }
    __device__ __forceinline__ void store(char* row, int i, const InVector& vector) const {
        vector.store(row + column(i) * int(sizeof(T)), count(i));
    }
    // Load vector i of the weight or bias. A null array counts as 0.
    template <typename V> __device__ __forceinline__ V load_shared(const char* shared_row, int i) const {
        V vector = {};
        constexpr int SIZE = sizeof(vector) / VECTOR;
        if (shared_row) vector.load_shared(shared_row + column(i) * SIZE, width - column(i));
        return vector;
    }

    __device__ __forceinline__ InVector added(int i, const InVector& input_vector,
                                              const InVector& residual_vector) const {
        float value[VECTOR], bias[VECTOR], more[VECTOR];
        input_vector.get(value), load_shared<InVector>(p.input_bias, i).get(bias), residual_vector.get(more);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            // Adding a bias of 0 would turn -0 into 0.
            const float biased = p.input_bias ? __fadd_rn(value[j], bias[j]) : value[j];
            value[j] = __fadd_rn(biased, more[j]);
        }
        InVector z;
        z.set(value);
        return z;
    }

    // All loads are issued before the first computation.
    __device__ __forceinline__ void load_all(InVector (&z)[ITEMS], InVector (&residuals)[RESIDUALS],
                                             Weight (&weight)[PREFETCHED], Weight (&bias)[PREFETCHED]) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            z[i] = load(input, i);
            if constexpr (ADD) residuals[i] = load(residual, i);
        }
        if constexpr (PREFETCH) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                weight[i] = load_shared<Weight>(p.weight, i), bias[i] = load_shared<Weight>(p.bias, i);
            }
        }
        if constexpr (ADD) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                z[i] = added(i, z[i], residuals[i]);
                if (residual_out) store(residual_out, i, z[i]);
            }
        }
    }

    // Between the passes, the row at this address holds z of the vectors beyond ITEMS.
    __device__ __forceinline__ char* overflow_out() const { return residual_out ? residual_out : out; }
    __device__ __forceinline__ const char* overflow_in() const { return ADD ? overflow_out() : input; }

    // Compute COUNT sums over the row. `contribution(i, vector, numbers)` sets `numbers` to the terms that vector i
    // adds to the sums. `load_rest(i)` loads a vector beyond ITEMS.
    template <int COUNT, typename Contribution, typename LoadRest>
    __device__ __forceinline__ void sum_up(const InVector (&z)[ITEMS], float (&total)[COUNT], Contribution contribution,
                                           LoadRest load_rest) const {
        float sums[COUNT][SUMS] = {}, numbers[COUNT];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            contribution(i, z[i], numbers);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) sums[k][i % MAX_SUMS] = __fadd_rn(sums[k][i % MAX_SUMS], numbers[k]);
        }
        if constexpr (!IN_REGISTERS) {
            for (int i = ITEMS; i * (THREADS * VECTOR) < width; ++i) {
                contribution(i, load_rest(i), numbers);
#pragma unroll
                for (int k = 0; k < COUNT; ++k) sums[k][0] = __fadd_rn(sums[k][0], numbers[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < COUNT; ++k) total[k] = folded(sums[k]);
        row_sums<THREADS>(total);
    }

    __device__ __forceinline__ float mean(const InVector (&z)[ITEMS]) const {
        float total[1];
        sum_up(
            z, total,
            [&](int i, const InVector& vector, float (&numbers)[1]) {
                float value[VECTOR];
                vector.get(value);
                numbers[0] = sum_of(value);
            },
            [&](int i) {
                InVector vector = load(input, i);
                if constexpr (ADD) {
                    vector = added(i, vector, load(residual, i));
                    store(overflow_out(), i, vector);
                }
                return vector;
            });
        return __fmul_rn(total[0], p.per_width);
    }

    // The difference is 0 after the end of the row.
    __device__ __forceinline__ void differences(int i, const InVector& vector, float mean,
                                                float (&value)[VECTOR]) const {
        vector.get(value);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j)
            value[j] = (ENDS_IN_VECTOR ? j : 0) < count(i) ? __fsub_rn(value[j], mean) : 0.f;
    }

    __device__ __forceinline__ Moments moments(const InVector (&z)[ITEMS]) const {
        Moments found;
        found.mean = mean(z);
        float total[2];
        sum_up(
            z, total,
            [&](int i, const InVector& vector, float (&numbers)[2]) {
                float value[VECTOR];
                differences(i, vector, found.mean, value);
                numbers[0] = sum_of(value);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) value[j] = __fmul_rn(value[j], value[j]);
                numbers[1] = sum_of(value);
            },
            [&](int i) { return load(overflow_in(), i); });
        found.mean_error = __fmul_rn(total[0], p.per_width);
        float variance = __fsub_rn(__fmul_rn(total[1], p.per_width), __fmul_rn(found.mean_error, found.mean_error));
        if (variance < 0.f) variance = 0.f; // not fmaxf, so that NaN stays NaN
        found.inverse = __frsqrt_rn(__fadd_rn(variance, p.epsilon));
        return found;
    }

    __device__ __forceinline__ void normalize(int i, const InVector& vector, const Weight& weight, const Weight& bias,
                                              const Moments& moments) const {
        float y[VECTOR], factor[VECTOR], more[VECTOR];
        vector.get(y), weight.get(factor), bias.get(more);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            y[j] = __fmul_rn(__fsub_rn(__fsub_rn(y[j], moments.mean), moments.mean_error), moments.inverse);
            if (p.weight) y[j] = __fmul_rn(y[j], factor[j]);
            if (p.bias) y[j] = __fadd_rn(y[j], more[j]);
        }
        InVector result;
        result.set(y);
        store(out, i, result);
    }

    __device__ __forceinline__ void normalize_all(const InVector (&z)[ITEMS], const Weight (&weight)[PREFETCHED],
                                                  const Weight (&bias)[PREFETCHED], const Moments& moments) const {
        const auto normalize_late = [&](int i, const InVector& vector) {
            normalize(i, vector, load_shared<Weight>(p.weight, i), load_shared<Weight>(p.bias, i), moments);
        };
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (PREFETCH)
                normalize(i, z[i], weight[i], bias[i], moments);
            else
                normalize_late(i, z[i]);
        }
        if constexpr (!IN_REGISTERS)
            for (int i = ITEMS; i * (THREADS * VECTOR) < width; ++i) normalize_late(i, load(overflow_in(), i));
    }
};

template <typename T, typename W, bool ADD, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
__global__ void __launch_bounds__(BLOCK) layer_norm(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using RowType = Row<T, W, ADD, WIDTH, THREADS, ITEMS, BYTES, BLOCK>;
    const RowType row(p);
    typename RowType::InVector z[ITEMS], residuals[RowType::RESIDUALS];
    typename RowType::Weight weight[RowType::PREFETCHED], bias[RowType::PREFETCHED];
    row.load_all(z, residuals, weight, bias);
    const Moments moments = row.moments(z);
    row.normalize_all(z, weight, bias, moments);
}
