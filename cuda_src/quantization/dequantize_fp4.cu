// Dequantize 4-bit elements (MXFP4 or NVFP4, as written by quantize_fp4).
//
//   MXFP4   out = q * scale
//   NVFP4   out = q * (scale / global)         rounded once to T
//
// Grid: each block handles `THREADS * ITEMS` units; a unit is 8 elements.
//
// Speed of light: memory bandwidth. A conversion to bfloat16 moves 2.5 bytes per element and 1 byte per group. On an
// H200 the kernel reaches 89% of the bandwidth of a copy for 8192 x 7168 elements in both formats.
#include "common/overlap.cuh"
#include "quantization/e2m1.cuh"

struct DequantizeFp4Params {
    const unsigned char* packed; // [units, 4]; a unit has 8 elements
    const unsigned char* scales; // [units * 8 / GROUP]
    char* out;                   // T [units, 8]
    Scale global;                // NVFP4: each group's scale is divided by it
    long long units;
};

template <typename T, int FORMAT, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) dequantize_fp4(const __grid_constant__ DequantizeFp4Params p) {
    begin_behind_earlier_kernels();
    constexpr int LANES = FP4_GROUP<FORMAT> / 8;
    const long long first = (long long)blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
    unsigned packed[ITEMS], byte[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long unit = first + i * THREADS;
        if (unit >= p.units) continue;
        if constexpr (ALIGNED) {
            packed[i] = __ldg(reinterpret_cast<const unsigned*>(p.packed) + unit);
        } else {
            packed[i] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[i] |= __ldg(p.packed + unit * 4 + j) << 8 * j;
        }
        byte[i] = __ldg(p.scales + unit / LANES);
    }
    const float global = FORMAT == NVFP4 ? p.global.load() : 1.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long unit = first + i * THREADS;
        if (unit >= p.units) continue;
        float factor;
        if constexpr (FORMAT == MXFP4) {
            factor = __uint_as_float(byte[i] == 0 ? 0x400000 : byte[i] == 255 ? 0x7fc00000 : byte[i] << 23);
        } else {
            __nv_fp8_e4m3 stored;
            stored.__x = (__nv_fp8_storage_t)byte[i];
            factor = __fdiv_rn(to_float(stored), global);
        }
        uint4 out[sizeof(T) / 2];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // Move the exponent and mantissa bits of e2m1 to the exponent and mantissa of a float. Multiplying by 2^126
            // corrects the exponent bias.
            const unsigned nibble = packed[i] >> 4 * j;
            const float number = __fmul_rn(__uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22), 0x1p126f);
            reinterpret_cast<T*>(out)[j] = from_float<T>(__fmul_rn(number, factor));
        }
#pragma unroll
        for (int j = 0; j < int(sizeof(T)) / 2; ++j)
            reinterpret_cast<uint4*>(p.out + unit * (long long)(8 * sizeof(T)))[j] = out[j];
    }
}
