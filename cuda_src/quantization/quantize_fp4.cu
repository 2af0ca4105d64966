// Quantize rows to 4 bits (e2m1). Each group of 32 (MXFP4) or 16 (NVFP4) neighbouring elements has one scale.
//
//   MXFP4   scale = 2^(floor(log2(max |x|)) - 2), so the largest quotient is in [4, 8); NaN (255) if a number is not
//           finite. q = e2m1(x / scale)
//   NVFP4   scale = e4m3(global * (max |x| / 6)), NaN ignored. q = e2m1(x * (global / scale))
//
// Grid: tiles of rows (quantization/load.cuh). LANES neighbouring threads share a group.
//
// Speed of light: memory bandwidth, with 2.5 bytes per bfloat16 element and 1 per group. On an H200 the kernel reaches
// 94% of the bandwidth of a copy for 8192 x 7168 elements in both formats. The instruction rate is nearly as tight a
// limit, because GPUs before Blackwell have no instruction that converts to e2m1.
#include "common/overlap.cuh"
#include "quantization/e2m1.cuh"
#include "quantization/magnitude.cuh"

struct QuantizeFp4Params {
    Rows in;
    char* packed;          // [rows, k / 2]; elements with an even index in the low nibbles
    unsigned char* scales; // [rows, k / GROUP]
    Scale global;          // NVFP4 only
    Tile tile;
};

template <typename T, int FORMAT, int VECTOR, int BYTES, int ITEMS>
__global__ void __launch_bounds__(256) quantize_fp4(const __grid_constant__ QuantizeFp4Params p) {
    begin_behind_earlier_kernels();
    constexpr int LANES = FP4_GROUP<FORMAT> / VECTOR, SIZE = VECTOR * int(sizeof(T));
    Loaded<T, NO_ACTIVATION, VECTOR, BYTES> loaded[ITEMS];
    int row, column;
    const bool active = p.tile.locate<ITEMS>(p.in, blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>();
    const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (active && column + i * threads < p.tile.columns) loaded[i].load(from + i * threads * SIZE, 0);
    }
    const float global = FORMAT == NVFP4 ? p.global.load() : 1.f;
    const bool is_usual = fabsf(global) >= 0x1p-90f && fabsf(global) <= 0x1p90f;
    const long long first = (long long)row * p.tile.columns + column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float largest = magnitude<FORMAT == MXFP4>(loaded[i], 0.f);
        unsigned scale;
        float half; // half of the factor that multiplies each element
        if constexpr (FORMAT == MXFP4) {
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                largest = max_or_nan(largest, __shfl_xor_sync(FULL_WARP, largest, step));
            scale = mxfp4_scale(largest, half);
        } else {
            scale = nvfp4_scale(lanes_max<LANES>(largest), global, is_usual, half);
        }
        if (!active || column + i * threads >= p.tile.columns) continue;
        float value[VECTOR];
        loaded[i].values(value);
        unsigned codes[VECTOR / 8];
#pragma unroll
        for (int j = 0; j < VECTOR / 8; ++j) {
            float halves[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) halves[n] = __fmul_rn(fabsf(value[j * 8 + n]), half);
            codes[j] = FORMAT == MXFP4 && sizeof(T) == 2 ? to_e2m1_in_pairs(halves) : to_e2m1(halves);
            codes[j] |= signs<T>(reinterpret_cast<const unsigned*>(loaded[i].vector[0]) + j * 2 * sizeof(T));
        }
        const long long at = first + i * threads;
        if constexpr (VECTOR == 16)
            reinterpret_cast<uint2*>(p.packed)[at] = make_uint2(codes[0], codes[1]);
        else
            reinterpret_cast<unsigned*>(p.packed)[at] = codes[0];
        if (unsigned(column) % LANES == 0) p.scales[(unsigned long long)at / LANES] = (unsigned char)scale;
    }
}
