// Compute the RMS norm of each row. Optionally, add a residual to the row first, and convert the result to FP8 (e4m3).
//
//   z[r, c] = input[r, c]                                                                                       ALONE
//           = input[r, c] + residual[r, c] rounded to T, which also becomes residual[r, c]                    ROUNDED
//           = input[r, c] + residual[r, c] in float32; residual[r, c] becomes z[r, c] rounded to T            UNROUNDED
//   y[r, c] = z[r, c] * rsqrt(sum of z[r, :]^2 / width + epsilon) * (weight[c] + offset)                    in float32
//   out     = y rounded to T                                                                                    PLAIN
//           = e4m3(y / scale), scale is given                                                               BY_TENSOR
//           = e4m3(y / scale), scale = max(max |y|, smallest) / 448 of a row                                   BY_ROW
//                                                                or of each GROUP columns of a row           BY_GROUP
//
// No multiply-add is fused, and norm/row.cuh fixes the order of sums, so all template instances give the same bits.
//
// W: type of the weight, T or float. The other template parameters are as in norm/row.cuh.
//
// Grid: BLOCK / THREADS rows per block. A thread loads its vectors beyond ITEMS again after the sum of squares.
//
// Speed of light: memory bandwidth. Few rows are bound by the latency of a load, a reduction and a store. On an H200
// with bfloat16, 8192 rows of 7168 take 62 us (90% of the bandwidth of a copy), 119 us with a residual (93%), and 63 us
// with e4m3 results (66%). 8192 rows of 1536 take 15 us (78%). 32 rows take 2.8 us; an empty kernel takes 0.54 us.
#include "common/overlap.cuh"
#include "norm/row.cuh"

enum Result { PLAIN, BY_TENSOR, BY_ROW, BY_GROUP };
enum Sum { ALONE, ROUNDED, UNROUNDED };

struct Params {
    Rows input;         // T
    Rows residual;      // T unless ALONE
    Rows out;           // T if PLAIN, else e4m3
    const char* weight; // [width]  W, null: 1
    float* scales;      // [1] if BY_TENSOR, [rows] if BY_ROW, [rows, width / GROUP] if BY_GROUP
    Scale scale;        // BY_TENSOR
    int rows;
    int inner; // rows per outer index
    Divisor by_inner;
    int width;
    float per_width; // 1 / width
    float epsilon;
    float offset;
    float smallest;
};

// --- reductions -----------------------------------------------------------------------------------------

__device__ __forceinline__ float sum_of_squares(const float (&value)[VECTOR]) {
    float sum = __fmul_rn(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < VECTOR; ++i) sum = __fadd_rn(sum, __fmul_rn(value[i], value[i]));
    return sum;
}

// fmaxf ignores NaN.
__device__ __forceinline__ float largest_with(float largest, const float (&value)[VECTOR]) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) largest = fmaxf(largest, fabsf(value[j]));
    return largest;
}

// Return the maximum over the threads of a row. `value` is neither negative nor NaN.
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

// --- a row ----------------------------------------------------------------------------------------------

// The vectors of one thread. Their elements are in local arrays of the kernel, because the compiler would not keep
// class members in registers.
template <typename T, typename W, int SUM, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
struct Row : RowPartition<WIDTH, THREADS, ITEMS, BLOCK> {
    using Partition = RowPartition<WIDTH, THREADS, ITEMS, BLOCK>;
    using Partition::MAX_SUMS, Partition::SUMS, Partition::IN_REGISTERS, Partition::row, Partition::width,
        Partition::outer, Partition::inner, Partition::count, Partition::column;
    using InVector = RowVector<T, BYTES>;
    using Weight = RowVector<W, BYTES == 16 ? 16 : int(sizeof(W))>;
    static constexpr bool PREFETCH = ITEMS * VECTOR * int(sizeof(W)) <= PREFETCH_BYTES;
    static constexpr bool ADD = SUM != ALONE;
    static constexpr int RESIDUALS = ADD ? ITEMS : 1, PREFETCHED = PREFETCH ? ITEMS : 1;

    const Params& p;
    const char* input;
    char *residual, *out;

    __device__ __forceinline__ explicit Row(const Params& p) : Partition(p), p(p) {
        input = p.input.at(outer, inner);
        residual = p.residual.at(outer, inner), out = p.out.at(outer, inner);
    }

    __device__ __forceinline__ Weight load_weight(int i) const {
        Weight weight;
        if (p.weight) weight.load_shared(p.weight + column(i) * int(sizeof(W)), width - column(i));
        return weight;
    }

    // All loads are issued before the first computation.
    __device__ __forceinline__ void load(InVector (&inputs)[ITEMS], InVector (&residuals)[RESIDUALS],
                                         Weight (&weights)[PREFETCHED]) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            inputs[i].load(input + column(i) * int(sizeof(T)), count(i));
            if constexpr (ADD) residuals[i].load(residual + column(i) * int(sizeof(T)), count(i));
        }
        if constexpr (PREFETCH) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) weights[i] = load_weight(i);
        }
    }

    __device__ __forceinline__ void get_sum(const InVector& input_vector, const InVector& residual_vector,
                                            float (&value)[VECTOR]) const {
        input_vector.get(value);
        if constexpr (ADD) {
            float added[VECTOR];
            residual_vector.get(added);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) value[j] = __fadd_rn(value[j], added[j]);
        }
    }

    // If ROUNDED, the rounded sum replaces `input_vector` and the residual in memory.
    __device__ __forceinline__ float add_and_square(int i, InVector& input_vector,
                                                    const InVector& residual_vector) const {
        float value[VECTOR];
        get_sum(input_vector, residual_vector, value);
        if constexpr (SUM == ROUNDED) {
            input_vector.set(value);
            input_vector.store(residual + column(i) * int(sizeof(T)), count(i));
            input_vector.get(value);
        }
        return sum_of_squares(value);
    }

    __device__ __forceinline__ float inverse_rms(InVector (&inputs)[ITEMS],
                                                 const InVector (&residuals)[RESIDUALS]) const {
        float sums[SUMS] = {};
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            sums[i % MAX_SUMS] = __fadd_rn(sums[i % MAX_SUMS], add_and_square(i, inputs[i], residuals[ADD ? i : 0]));
        if constexpr (!IN_REGISTERS) {
            for (int i = ITEMS; i * (THREADS * VECTOR) < width; ++i) {
                InVector input_vector, residual_vector;
                input_vector.load(input + column(i) * int(sizeof(T)), count(i));
                if constexpr (ADD) residual_vector.load(residual + column(i) * int(sizeof(T)), count(i));
                sums[0] = __fadd_rn(sums[0], add_and_square(i, input_vector, residual_vector));
            }
        }
        float of_row[] = {folded(sums)};
        row_sums<THREADS>(of_row);
        const float mean = __fmul_rn(of_row[0], p.per_width);
        return __frsqrt_rn(__fadd_rn(mean, p.epsilon));
    }

    // Call write(i, y) with the results of vector i. If UNROUNDED, the LAST pass stores the sum in the residual.
    template <bool LAST, typename Write>
    __device__ __forceinline__ void normalize(int i, const InVector& input_vector, const InVector& residual_vector,
                                              const Weight& weight, float inverse, Write write) const {
        float y[VECTOR], factor[VECTOR];
        if constexpr (SUM == UNROUNDED) {
            get_sum(input_vector, residual_vector, y);
            if constexpr (LAST) {
                InVector sum;
                sum.set(y);
                sum.store(residual + column(i) * int(sizeof(T)), count(i));
            }
        } else {
            input_vector.get(y);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) y[j] = __fmul_rn(y[j], inverse);
        if (p.weight) {
            weight.get(factor);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) y[j] = __fmul_rn(y[j], __fadd_rn(factor[j], p.offset));
        }
        write(i, y);
    }

    template <bool LAST, typename Write>
    __device__ __forceinline__ void
    normalize_all(const InVector (&inputs)[ITEMS], const InVector (&residuals)[RESIDUALS],
                  const Weight (&weights)[PREFETCHED], float inverse, Write write) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (PREFETCH)
                normalize<LAST>(i, inputs[i], residuals[ADD ? i : 0], weights[i], inverse, write);
            else
                normalize<LAST>(i, inputs[i], residuals[ADD ? i : 0], load_weight(i), inverse, write);
        }
        if constexpr (!IN_REGISTERS) {
            for (int i = ITEMS; i * (THREADS * VECTOR) < width; ++i) {
                InVector input_vector, residual_vector;
                input_vector.load((SUM == ROUNDED ? residual : input) + column(i) * int(sizeof(T)), count(i));
                if constexpr (SUM == UNROUNDED) residual_vector.load(residual + column(i) * int(sizeof(T)), count(i));
                normalize<LAST>(i, input_vector, residual_vector, load_weight(i), inverse, write);
            }
        }
    }

    __device__ __forceinline__ void store(int i, const float (&y)[VECTOR]) const {
        InVector result;
        result.set(y);
        result.store(out + column(i) * int(sizeof(T)), count(i));
    }

    template <typename Q>
    __device__ __forceinline__ void store_quantized(int i, const float (&y)[VECTOR], Q quotient) const {
        float quotients[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) quotients[j] = quotient(y[j]);
        RowVector<unsigned char, BYTES == 16 ? 8 : 1> bytes;
        *reinterpret_cast<uint2*>(bytes.loads) = to_bytes<E4M3, VECTOR>(quotients, 0.f);
        bytes.store(out + column(i), count(i));
    }
};

template <typename T, typename W, int RESULT, int GROUP, int SUM, int WIDTH, int THREADS, int ITEMS, int BYTES,
          int BLOCK>
__global__ void __launch_bounds__(BLOCK) rms_norm(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    static_assert(RESULT != BY_GROUP || GROUP / VECTOR <= THREADS, "a group is neighbouring threads");
    using RowType = Row<T, W, SUM, WIDTH, THREADS, ITEMS, BYTES, BLOCK>;
    const RowType row(p);
    typename RowType::InVector inputs[ITEMS], residuals[RowType::RESIDUALS];
    typename RowType::Weight weights[RowType::PREFETCHED];
    row.load(inputs, residuals, weights);
    const float inverse = row.inverse_rms(inputs, residuals);
    const auto for_each_vector = [&](auto write) {
        row.template normalize_all<true>(inputs, residuals, weights, inverse, write);
    };
    if constexpr (RESULT == PLAIN) {
        for_each_vector([&](int i, const float (&y)[VECTOR]) { row.store(i, y); });
    } else if constexpr (RESULT == BY_TENSOR) {
        const float scale = p.scale.load();
        if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scale;
        const Quotient<ANY> quotient(scale);
        for_each_vector([&](int i, const float (&y)[VECTOR]) { row.store_quantized(i, y, quotient); });
    } else if constexpr (RESULT == BY_ROW) {
        // Compute the results twice, because keeping them until the scale is known would take too many registers.
        float largest = 0;
        row.template normalize_all<false>(inputs, residuals, weights, inverse,
                                          [&](int, const float (&y)[VECTOR]) { largest = largest_with(largest, y); });
        const float scale = scale_of<E4M3>(row_max<THREADS>(largest), p.smallest, false);
        if (row.thread == 0 && row.row < p.rows) p.scales[row.row] = scale;
        const Quotient<SMALL> quotient(scale);
        for_each_vector([&](int i, const float (&y)[VECTOR]) { row.store_quantized(i, y, quotient); });
    } else {
        constexpr int LANES = GROUP / VECTOR; // per group
        float* scales = p.scales + (long long)row.row * (row.width / GROUP);
        for_each_vector([&](int i, const float (&y)[VECTOR]) {
            const float scale = scale_of<E4M3>(lanes_max<LANES>(largest_with(0.f, y)), p.smallest, false);
            if (row.thread % LANES == 0 && row.count(i) > 0) scales[row.column(i) / GROUP] = scale;
            row.store_quantized(i, y, Quotient<SMALL>(scale));
        });
    }
}
