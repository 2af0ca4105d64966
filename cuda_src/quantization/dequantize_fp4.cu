// Dequantize the results of quantize_fp4.
//
//   MXFP4   out = q * scale
//   NVFP4   out = q * (scale / global)         rounded once to T
//
// Grid: each block handles `THREADS * ITEMS` vectors of 8 elements.
//
// Speed of light: memory bandwidth, with 2.5 bytes per bfloat16 element and 1 per group. On an H200 the kernel reaches
// 89% of the bandwidth of a copy for 8192 x 7168 elements in both formats.
#include "common/overlap.cuh"
#include "quantization/e2m1.cuh"

struct DequantizeFp4Params {
    const unsigned char* packed; // [vectors, 4]
    const unsigned char* scales; // [vectors * 8 / GROUP]
    char* out;                   // T [vectors, 8]
    Scale global;                // NVFP4
    long long vectors;
};

template <typename T, int FORMAT, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) dequantize_fp4(const __grid_constant__ DequantizeFp4Params p) {
    begin_behind_earlier_kernels();
    constexpr int LANES = FP4_GROUP<FORMAT> / 8;
    const long long first = (long long)blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
    unsigned packed[ITEMS], byte[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long vector = first + i * THREADS;
        if (vector >= p.vectors) continue;
        if constexpr (ALIGNED) {
            packed[i] = __ldg(reinterpret_cast<const unsigned*>(p.packed) + vector);
        } else {
            packed[i] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[i] |= __ldg(p.packed + vector * 4 + j) << 8 * j;
        }
        byte[i] = __ldg(p.scales + vector / LANES);
    }
    const float global = FORMAT == NVFP4 ? p.global.load() : 1.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long vector = first + i * THREADS;
        if (vector >= p.vectors) continue;
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
            // Move the bits of e2m1 to the exponent and mantissa of a float. Multiplying by 2^126 corrects the bias.
            const unsigned nibble = packed[i] >> 4 * j;
            const float number = __fmul_rn(__uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22), 0x1p126f);
            reinterpret_cast<T*>(out)[j] = from_float<T>(__fmul_rn(number, factor));
        }
#pragma unroll
        for (int j = 0; j < int(sizeof(T)) / 2; ++j)
            reinterpret_cast<uint4*>(p.out + vector * (long long)(8 * sizeof(T)))[j] = out[j];
    }
}
