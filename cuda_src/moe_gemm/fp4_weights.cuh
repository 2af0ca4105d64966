// The warps of gemm_fp4_wgmma that multiply: prepared weights from shared memory to fragments in registers.
#pragma once
#include "moe_gemm/fp4_pairs.cuh"
#include "moe_gemm/fp4_prepared.cuh"

__device__ __forceinline__ unsigned load_shared_byte(unsigned from) {
    unsigned value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint2 load_shared_two(unsigned from) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ unsigned load_shared_word(unsigned from) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

// Scales of a lane's row for 32 numbers along k, and what they become: factors, which bring the missing 2^126 back
// (float16: 2^14) but for MISSING, by which the sums are multiplied; otherwise they would overflow. With bfloat16 all is
// exact for E8M0 from 2^-100 to 2^33 and for all of e4m3; with float16 for E8M0 from 2^-17 to 2^7, of which 2^8 and
// more count as infinite and less than 2^-22 as 0, and for all of e4m3.
template <typename T, int FORMAT> struct Fp4Factors;

template <typename T> struct Fp4Factors<T, MXFP4> {
    static constexpr float MISSING = IS_BFLOAT16<T> ? 0x1p32f : 0x1p6f;
    unsigned byte;

    // at: the scales of the lane's row in a unit.
    __device__ __forceinline__ void load(unsigned at, int half) { byte = load_shared_byte(at + half); }

    // The factor of 16 numbers, as a pair.
    __device__ __forceinline__ unsigned factor(int) const {
        if constexpr (IS_BFLOAT16<T>) return byte * 0x00800080 + 0x2f002f00; // 2^(byte - 127) * 2^126 * 2^-32
        return (min(max(byte, 104u), 135u) - 104) * 0x04000400;              // 2^(byte - 127) * 2^14 * 2^-6
    }
};

template <typename T> struct Fp4Factors<T, NVFP4> {
    static constexpr float MISSING = IS_BFLOAT16<T> ? 0x1p32f : 0x1p7f;
    unsigned bytes;

    __device__ __forceinline__ void load(unsigned at, int half) {
        asm volatile("{ .reg .u16 both;\n"
                     "  ld.shared.u16 both, [%1];\n"
                     "  cvt.u32.u16 %0, both; }"
                     : "=r"(bytes)
                     : "r"(at + half * 2)
                     : "memory");
    }

    __device__ __forceinline__ unsigned factor(int step) const {
        const unsigned scale = step ? bytes >> 8 : bytes & 255;
        if constexpr (IS_BFLOAT16<T>) return scale * 0x00100010 + 0x66806680; // * 2^126 * 2^-32
        return scale * 0x00800080 + 0x18001800;                               // * 2^14 * 2^-7
    }
};

// Fragments of a warp's 16 rows and 32 HALVES numbers along k: two steps of 16 for each half of a unit.
template <int HALVES> struct Fp4Fragments {
    unsigned a[2 * HALVES][4];

    // Convert a half of the numbers, `words` of rows l / 4 and l / 4 + 8 (of lane l), with their scales.
    template <typename T, class Factors>
    __device__ __forceinline__ void convert(int half, const unsigned (&words)[2], const Factors (&factors)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            unsigned pairs[4];
            unpack_pairs(pairs, words[row]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (!IS_BFLOAT16<T>) pairs[i] = (pairs[i] << 3 & 0x0e000e00) | (pairs[i] & 0x80008000);
                a[half * 2 + i / 2][i % 2 * 2 + row] = multiply_pairs<T>(pairs[i], factors[row].factor(i / 2));
            }
        }
    }

    // Compiler fence: what computes the fragments stays before this line.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8 * HALVES; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    }
};
