// Quantize rows to 8 bits with one scale per group of GROUP neighbouring elements.
//
//   scale = max(max |v|, smallest) / LARGEST, over a group; NaN is ignored
//   q     = v / scale, rounded to nearest, ties to even, and saturated
//
// v is x or, with an activation, activate(gate, up) of the two halves of a row. LARGEST is the largest value of the
// 8-bit format. Every quotient has the bits of an IEEE division.
//
// Grid: tiles of rows (quantization/load.cuh). LANES neighbouring threads share a group. Lane l of them handles VECTORS
// vectors of 8 elements: `l`, `l + LANES` and so on. Its vectors form one column of the tile. A row of a tile has
// complete groups.
//
// Speed of light: memory bandwidth, with 3 bytes per bfloat16 element and 4 per group. On an H200 the kernel reaches
// 96% of the bandwidth of a copy for 8192 x 7168 elements in groups of 128, and 90% for 8192 x 2048 with silu. The
// instruction rate is nearly as tight a limit, so a thread locates its row and computes a scale only once for VECTORS
// vectors.
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

template <typename T, int FORMAT, int ACTIVATION, int GROUP, int VECTORS, int ITEMS>
__global__ void __launch_bounds__(256) quantize_groups(const __grid_constant__ QuantizeGroupsParams p) {
    begin_behind_earlier_kernels();
    constexpr int VECTOR = 8, LANES = GROUP / (VECTOR * VECTORS), STEP = LANES * VECTOR;
    Loaded<T, ACTIVATION, VECTOR, 16> loaded[ITEMS][VECTORS];
    int row, column;
    const bool active = p.tile.locate<ITEMS>(p.in, blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>(), k = p.tile.columns * (VECTORS * VECTOR);
    const long long up = k * (long long)sizeof(T);
    const int first = unsigned(column) / LANES * GROUP + unsigned(column) % LANES * VECTOR;
    const char* from = p.in.x + row * p.in.stride + first * (long long)sizeof(T);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        // A lane that skips its loads only takes part in the shuffles.
        if (!active || column + i * threads >= p.tile.columns) continue;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            loaded[i][j].load(from + (i * threads * (VECTORS * VECTOR) + j * STEP) * int(sizeof(T)), up);
    }
    char* out = p.q + ((long long)row * k + first);
    float* scale_to = p.scales.out + p.scales.at(p.in, row, unsigned(column) / LANES);
    const long long scale_step = unsigned(threads) / LANES * p.scales.group_stride;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float value[VECTORS][VECTOR], largest = 0;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            if constexpr (ACTIVATION) {
                loaded[i][j].values(value[j]);
#pragma unroll
                for (int n = 0; n < VECTOR; ++n) largest = fmaxf(largest, fabsf(value[j][n])); // fmaxf ignores NaN
            } else {
                largest = magnitude<false>(loaded[i][j], largest);
            }
        }
        const float scale = scale_of<FORMAT>(lanes_max<LANES>(largest), p.smallest, p.power_of_two);
        if (!active || column + i * threads >= p.tile.columns) continue;
        const Quotient<SMALL> quotient(scale);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            if constexpr (!ACTIVATION) loaded[i][j].values(value[j]);
#pragma unroll
            for (int n = 0; n < VECTOR; ++n) value[j][n] = quotient(value[j][n]);
            *reinterpret_cast<uint2*>(out + i * threads * (VECTORS * VECTOR) + j * STEP) =
                to_bytes<FORMAT, VECTOR>(value[j], 0.f);
        }
        if (unsigned(column) % LANES == 0) scale_to[i * scale_step] = scale;
    }
}
