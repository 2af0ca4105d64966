// Conversion of prepared weights (fp4_prepared.cuh) to A fragments in gemm_fp4_wgmma.
#pragma once
#include "moe_gemm/fp4_pairs.cuh"
#include "moe_gemm/fp4_prepared.cuh"

__device__ __forceinline__ uint2 load_shared_two(unsigned from) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

template <int BYTES> __device__ __forceinline__ unsigned load_shared_bytes(unsigned from) {
    unsigned value;
    if constexpr (BYTES == 1)
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    else if constexpr (BYTES == 2)
        asm volatile("{ .reg .u16 both;\n"
                     "  ld.shared.u16 both, [%1];\n"
                     "  cvt.u32.u16 %0, both; }"
                     : "=r"(value)
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

// Return the low half of `pair` (HIGH: the high half) in both halves of the result. This costs no instruction: it
// becomes an operand modifier of the multiplication.
template <bool HIGH> __device__ __forceinline__ unsigned twice(unsigned pair) {
    unsigned both;
    if constexpr (HIGH)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(pair));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(pair));
    return both;
}

// Factors of the unpacked elements of one row of weights, for `32 * HALVES` elements along k. Unpacked elements are too
// small by a factor of 2^-126 (bfloat16) or 2^-14 (float16). So a factor is the scale times 2^126 or 2^14, divided by
// EPILOGUE_FACTOR against overflow; the epilogue multiplies the sums by EPILOGUE_FACTOR.
//
// The factors are exact for e4m3 scales. For E8M0 scales they are exact from 2^-100 to 2^33 in bfloat16, and from 2^-17
// to 2^7 in float16. In float16, larger E8M0 scales become infinite, and scales below 2^-22 become 0.
template <typename T, int FORMAT, int HALVES> struct Fp4Factors {
    static constexpr float EPILOGUE_FACTOR = IS_BFLOAT16<T> ? 0x1p32f : FORMAT == MXFP4 ? 0x1p6f : 0x1p7f;
    static constexpr int HALF_SCALES = ROW_SCALE_BYTES<FORMAT> / 2,
                         COUNT = HALVES * HALF_SCALES; // HALF_SCALES: of 32 elements along k
    unsigned pairs[(COUNT + 1) / 2];

    // Convert the scales in bytes 0 and 2 of `scales` to a pair of factors.
    static __device__ __forceinline__ unsigned factors_of(unsigned scales) {
        if constexpr (FORMAT == NVFP4) {
            if constexpr (IS_BFLOAT16<T>) return scales * 0x10 + 0x66806680; // scale * 2^126 * 2^-32
            return scales * 0x80 + 0x18001800;                               // scale * 2^14 * 2^-7
        } else if constexpr (IS_BFLOAT16<T>) {
            return scales * 0x80 + 0x2f002f00; // 2^(scale - 127) * 2^126 * 2^-32
        } else {                               // 2^(scale - 127) * 2^14 * 2^-6
            asm("max.u16x2 %0, %0, %1;" : "+r"(scales) : "r"(0x00680068));
            asm("min.u16x2 %0, %0, %1;" : "+r"(scales) : "r"(0x00870087));
            return (scales - 0x00680068) * 0x400;
        }
    }

    // `at`: shared address of a row's scales in a unit.
    __device__ __forceinline__ void load(unsigned at, int half) {
        const unsigned bytes = load_shared_bytes<COUNT>(at + half * HALF_SCALES);
        pairs[0] = factors_of(COUNT == 1 ? bytes : __byte_perm(bytes, 0, 0x4140));
        if constexpr (COUNT == 4) pairs[1] = factors_of(__byte_perm(bytes, 0, 0x4342));
    }

    // Return a pair whose two halves both hold the factor of 16 elements along k, from element `32 * HALF + 16 * STEP`
    // on.
    template <int HALF, int STEP> __device__ __forceinline__ unsigned factor() const {
        constexpr int AT = HALF * HALF_SCALES + (HALF_SCALES == 2 ? STEP : 0);
        return twice<AT % 2>(pairs[AT / 2]);
    }
};

// The A fragments of a warp: 16 rows and `32 * HALVES` elements along k. An MMA takes 16 elements along k.
template <int HALVES> struct Fp4Fragments {
    unsigned a[2 * HALVES][4];

    // Convert the first (HALF 0) or last (HALF 1) 32 elements along k of a unit. `packed` and `factors` hold the
    // elements and factors of the lane's rows, `lane / 4` and `lane / 4 + 8`.
    template <typename T, int HALF, class Factors>
    __device__ __forceinline__ void convert(const unsigned (&packed)[2], const Factors (&factors)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            unsigned pairs[4];
            unpack_pairs(pairs, packed[row]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (!IS_BFLOAT16<T>) pairs[i] = (pairs[i] << 3 & 0x0e000e00) | (pairs[i] & 0x80008000);
                const unsigned factor =
                    i < 2 ? factors[row].template factor<HALF, 0>() : factors[row].template factor<HALF, 1>();
                a[HALF * 2 + i / 2][i % 2 * 2 + row] = multiply_pairs<T>(pairs[i], factor);
            }
        }
    }

    // Compiler fence.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8 * HALVES; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    }
};
