// Quantize rows to 8 bits with one scale per group of GROUP neighbouring elements.
//
//   scale = max(max |v|, smallest) / LARGEST, over a group; NaN is ignored
//   q     = v / scale, rounded to nearest, ties to even, and saturated
//
// v is x or, with an activation, activate(gate, up) of the two halves of a row. LARGEST is the largest value of the
// 8-bit format, and `smallest` is an argument. Every quotient has the bits of an IEEE division (Quotient in
// common/quotient.cuh). Another implementation with IEEE divisions therefore gives the same result, except for rounding
// errors of the activation.
//
// Grid: tiles of rows (quantization/load.cuh). A unit is 8 neighbouring elements. LANES neighbouring threads share a
// group. Lane l handles UNITS units of the group: `l`, `l + LANES` and so on. These UNITS units are one column of the
// tile. A row of a tile consists of whole groups.
//
// Speed of light: memory bandwidth. A conversion from bfloat16 moves 3 bytes per element and 4 bytes per group. On an
// H200 the kernel reaches 96% of the bandwidth of a copy for 8192 x 7168 elements in groups of 128, and 90% for 8192 x
// 2048 with silu. The instruction rate is nearly as tight a limit. Therefore a thread locates its row only once, and
// computes the scale of a group only once for its UNITS units.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"
#include "quantization/scales.cuh"

struct QuantizeGroupsParams {
    Rows in;
    char* q; // [rows, k]
    Scales scales;
    float smallest;
    int power_of_two; // round scales up to a power of two
    Tile tile;
};

template <typename T, int FORMAT, int ACTIVATION, int GROUP, int UNITS, int ITEMS>
__global__ void __launch_bounds__(256) quantize_groups(const __grid_constant__ QuantizeGroupsParams p) {
    begin_behind_earlier_kernels();
    constexpr int EACH = 8, LANES = GROUP / (EACH * UNITS), STEP = LANES * EACH;
    Loaded<T, ACTIVATION, EACH, 16> loaded[ITEMS][UNITS];
    int row, column;
    const bool mine = p.tile.locate<ITEMS>(p.in, blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>(), k = p.tile.columns * (UNITS * EACH);
    const long long up = k * (long long)sizeof(T);
    const int first = unsigned(column) / LANES * GROUP + unsigned(column) % LANES * EACH;
    const char* from = p.in.x + row * p.in.stride + first * (long long)sizeof(T);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        // A lane that skips its loads takes part in the shuffles below with undefined values, but its group is not
        // written.
        if (!mine || column + i * threads >= p.tile.columns) continue;
#pragma unroll
        for (int j = 0; j < UNITS; ++j)
            loaded[i][j].load(from + (i * threads * (UNITS * EACH) + j * STEP) * int(sizeof(T)), up);
    }
    char* to = p.q + ((long long)row * k + first);
    float* scale_to = p.scales.to + p.scales.at(p.in, row, unsigned(column) / LANES);
    const long long scale_step = unsigned(threads) / LANES * p.scales.group_stride;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float value[UNITS][EACH], largest = 0;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            if constexpr (ACTIVATION) {
                loaded[i][j].values(value[j]);
#pragma unroll
                for (int n = 0; n < EACH; ++n) largest = fmaxf(largest, fabsf(value[j][n])); // fmaxf ignores NaN
            } else {
                largest = magnitude<false>(loaded[i][j], largest);
            }
        }
        const float scale = scale_of<FORMAT>(lanes_max<LANES>(largest), p.smallest, p.power_of_two);
        if (!mine || column + i * threads >= p.tile.columns) continue;
        const Quotient<SMALL> quotient(scale);
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            if constexpr (!ACTIVATION) loaded[i][j].values(value[j]);
#pragma unroll
            for (int n = 0; n < EACH; ++n) value[j][n] = quotient(value[j][n]);
            *reinterpret_cast<uint2*>(to + i * threads * (UNITS * EACH) + j * STEP) =
                to_bytes<FORMAT, EACH>(value[j], 0.f);
        }
        if (unsigned(column) % LANES == 0) scale_to[i * scale_step] = scale;
    }
}
