// RMS norm: divide each row by the root mean square of its elements, and multiply by a weight. Optionally, add a
// residual to the row first, and convert the result to FP8 (e4m3).
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
// Each product and each sum is rounded to float32 (no fused multiply-add), and squares are summed in the order that
// norm/row.cuh describes. All template instances therefore give the same bits.
//
// W: type of the weight, T or float. WIDTH: width of a row; 0 if it is known only at run time. BYTES: width of a load,
// 16 bytes or one element. THREADS: threads per row, a power of two; either all threads of a block, or at most a warp.
// ITEMS: units per thread that stay in registers. BLOCK: threads per block.
//
// Grid: BLOCK / THREADS rows per block. A unit is EACH consecutive elements. Thread t of a row has the units `t`,
// `t + THREADS`, `t + 2 * THREADS` and so on. The first ITEMS units of a thread stay in registers. A thread has more
// units only if THREADS == COLUMNS; they are loaded again after the sum of squares.
//
// Speed of light: memory bandwidth. A row and its residual are read once and written once; about ten flops per element
// take less time. With few rows, the limit is the latency of a load, a reduction and a store. On an H200 with bfloat16,
// 8192 rows of 7168 take 62 us (90% of the bandwidth of a copy), and 119 us with a residual (93%). 8192 rows of 1536
// take 15 us (78%). With e4m3 results, 8192 rows of 7168 take 63 us (66%): as long as with bfloat16, although fewer
// bytes are written. 32 rows take 2.8 us; an empty kernel takes 0.54 us.
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

__device__ __forceinline__ float sum_of_squares(const float (&value)[EACH]) {
    float sum = __fmul_rn(value[0], value[0]);
#pragma unroll
    for (int i = 1; i < EACH; ++i) sum = __fadd_rn(sum, __fmul_rn(value[i], value[i]));
    return sum;
}

// Return the maximum of `largest` and the magnitudes of a unit. fmaxf ignores NaN.
__device__ __forceinline__ float largest_with(float largest, const float (&value)[EACH]) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) largest = fmaxf(largest, fabsf(value[j]));
    return largest;
}

// Return the maximum of `value` over the THREADS threads of a row. Every thread gets the result. The values must not be
// negative or NaN.
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

// The units of a row that belong to a thread: their positions, and the operations on a unit (EACH consecutive
// elements). The elements are in local arrays of the kernel, not in members of this class. The compiler would not keep
// members in registers, because loops index them before the loops are unrolled.
template <typename T, typename W, int SUM, int WIDTH, int THREADS, int ITEMS, int BYTES, int BLOCK>
struct Row : Dealt<WIDTH, THREADS, ITEMS, BLOCK> {
    using Own = Dealt<WIDTH, THREADS, ITEMS, BLOCK>;
    using Own::SLOTS, Own::SUMS, Own::FITS, Own::row, Own::width, Own::outer, Own::inner, Own::count, Own::column;
    using In = Eight<T, BYTES>;
    using Weight = Eight<W, BYTES == 16 ? 16 : int(sizeof(W))>;
    static constexpr bool EARLY = ITEMS * EACH * int(sizeof(W)) <= EARLY_BYTES;
    static constexpr bool ADD = SUM != ALONE;
    static constexpr int OTHERS = ADD ? ITEMS : 1, EARLIES = EARLY ? ITEMS : 1;

    const Params& p;
    const char* input;
    char *residual, *out;

    __device__ __forceinline__ explicit Row(const Params& p) : Own(p), p(p) {
        input = p.input.at(outer, inner);
        residual = p.residual.at(outer, inner), out = p.out.at(outer, inner);
    }

    __device__ __forceinline__ Weight load_weight(int i) const {
        Weight weight;
        if (p.weight) weight.load_shared(p.weight + column(i) * int(sizeof(W)), width - column(i));
        return weight;
    }

    // Load the first ITEMS units, and if EARLY also the weight. All loads are issued before the first computation.
    __device__ __forceinline__ void load(In (&kept)[ITEMS], In (&other)[OTHERS], Weight (&early)[EARLIES]) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            kept[i].load(input + column(i) * int(sizeof(T)), count(i));
            if constexpr (ADD) other[i].load(residual + column(i) * int(sizeof(T)), count(i));
        }
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) early[i] = load_weight(i);
        }
    }

    // Convert the unit `in` to float32 and write it to `value`. If ADD, also add `other`, a unit of the residual.
    __device__ __forceinline__ void get_sum(const In& in, const In& other, float (&value)[EACH]) const {
        in.get(value);
        if constexpr (ADD) {
            float added[EACH];
            other.get(added);
#pragma unroll
            for (int j = 0; j < EACH; ++j) value[j] = __fadd_rn(value[j], added[j]);
        }
    }

    // Return the sum of squares of a unit of z. If ROUNDED, first add `other` (a unit of the residual) to `in` (a unit
    // of the input), round the sum to T, and store it in the residual.
    __device__ __forceinline__ float add_and_square(int i, In& in, const In& other) const {
        float value[EACH];
        get_sum(in, other, value);
        if constexpr (SUM == ROUNDED) {
            in.set(value);
            in.store(residual + column(i) * int(sizeof(T)), count(i));
            in.get(value);
        }
        return sum_of_squares(value);
    }

    __device__ __forceinline__ float inverse_rms(In (&kept)[ITEMS], const In (&other)[OTHERS]) const {
        float sums[SUMS] = {};
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            sums[i % SLOTS] = __fadd_rn(sums[i % SLOTS], add_and_square(i, kept[i], other[ADD ? i : 0]));
        if constexpr (!FITS) {
            for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) {
                In in, more;
                in.load(input + column(i) * int(sizeof(T)), count(i));
                if constexpr (ADD) more.load(residual + column(i) * int(sizeof(T)), count(i));
                sums[0] = __fadd_rn(sums[0], add_and_square(i, in, more));
            }
        }
        float of_row[] = {folded(sums)};
        row_sums<THREADS>(of_row);
        const float mean = __fmul_rn(of_row[0], p.per_width);
        return __frsqrt_rn(__fadd_rn(mean, p.epsilon));
    }

    // Call write(i, y) with the results y of unit i. If UNROUNDED, the last pass (LAST) also stores the sum of input
    // and residual in the residual.
    template <bool LAST, typename Write>
    __device__ __forceinline__ void normalize(int i, const In& in, const In& other, const Weight& weight, float inverse,
                                              Write write) const {
        float y[EACH], factor[EACH];
        if constexpr (SUM == UNROUNDED) {
            get_sum(in, other, y);
            if constexpr (LAST) {
                In sum;
                sum.set(y);
                sum.store(residual + column(i) * int(sizeof(T)), count(i));
            }
        } else {
            in.get(y);
        }
#pragma unroll
        for (int j = 0; j < EACH; ++j) y[j] = __fmul_rn(y[j], inverse);
        if (p.weight) {
            weight.get(factor);
#pragma unroll
            for (int j = 0; j < EACH; ++j) y[j] = __fmul_rn(y[j], __fadd_rn(factor[j], p.offset));
        }
        write(i, y);
    }

    // Call write(i, y) with the results y of each unit i of this thread.
    template <bool LAST, typename Write>
    __device__ __forceinline__ void normalize_each(const In (&kept)[ITEMS], const In (&other)[OTHERS],
                                                   const Weight (&early)[EARLIES], float inverse, Write write) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if constexpr (EARLY)
                normalize<LAST>(i, kept[i], other[ADD ? i : 0], early[i], inverse, write);
            else
                normalize<LAST>(i, kept[i], other[ADD ? i : 0], load_weight(i), inverse, write);
        }
        if constexpr (!FITS) {
            for (int i = ITEMS; i * (THREADS * EACH) < width; ++i) {
                In in, more;
                in.load((SUM == ROUNDED ? residual : input) + column(i) * int(sizeof(T)), count(i));
                if constexpr (SUM == UNROUNDED) more.load(residual + column(i) * int(sizeof(T)), count(i));
                normalize<LAST>(i, in, more, load_weight(i), inverse, write);
            }
        }
    }

    __device__ __forceinline__ void store(int i, const float (&y)[EACH]) const {
        In result;
        result.set(y);
        result.store(out + column(i) * int(sizeof(T)), count(i));
    }

    template <typename Q>
    __device__ __forceinline__ void store_quotients(int i, const float (&y)[EACH], Q quotient) const {
        float quotients[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) quotients[j] = quotient(y[j]);
        Eight<unsigned char, BYTES == 16 ? 8 : 1> bytes;
        *reinterpret_cast<uint2*>(bytes.unit) = to_bytes<E4M3, EACH>(quotients, 0.f);
        bytes.store(out + column(i), count(i));
    }
};

template <typename T, typename W, int RESULT, int GROUP, int SUM, int WIDTH, int THREADS, int ITEMS, int BYTES,
          int BLOCK>
__global__ void __launch_bounds__(BLOCK) rms_norm(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    static_assert(RESULT != BY_GROUP || GROUP / EACH <= THREADS, "a group is neighbouring threads");
    using OwnRow = Row<T, W, SUM, WIDTH, THREADS, ITEMS, BYTES, BLOCK>;
    const OwnRow row(p);
    typename OwnRow::In kept[ITEMS], other[OwnRow::OTHERS];
    typename OwnRow::Weight early[OwnRow::EARLIES];
    row.load(kept, other, early);
    const float inverse = row.inverse_rms(kept, other);
    const auto each = [&](auto write) { row.template normalize_each<true>(kept, other, early, inverse, write); };
    if constexpr (RESULT == PLAIN) {
        each([&](int i, const float (&y)[EACH]) { row.store(i, y); });
    } else if constexpr (RESULT == BY_TENSOR) {
        const float scale = p.scale.load();
        if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scale;
        const Quotient<ANY> quotient(scale);
        each([&](int i, const float (&y)[EACH]) { row.store_quotients(i, y, quotient); });
    } else if constexpr (RESULT == BY_ROW) {
        // Compute the results twice, first for the scale and then for the output. Keeping them until the scale is known
        // would take too many registers.
        float largest = 0;
        row.template normalize_each<false>(kept, other, early, inverse,
                                           [&](int, const float (&y)[EACH]) { largest = largest_with(largest, y); });
        const float scale = scale_of<E4M3>(row_max<THREADS>(largest), p.smallest, false);
        if (row.thread == 0 && row.row < p.rows) p.scales[row.row] = scale;
        const Quotient<SMALL> quotient(scale);
        each([&](int i, const float (&y)[EACH]) { row.store_quotients(i, y, quotient); });
    } else {
        constexpr int LANES = GROUP / EACH; // neighbouring lanes that share a group
        float* scales = p.scales + (long long)row.row * (row.width / GROUP);
        each([&](int i, const float (&y)[EACH]) {
            const float scale = scale_of<E4M3>(lanes_max<LANES>(largest_with(0.f, y)), p.smallest, false);
            if (row.thread % LANES == 0 && row.count(i) > 0) scales[row.column(i) / GROUP] = scale;
            row.store_quotients(i, y, Quotient<SMALL>(scale));
        });
    }
}
