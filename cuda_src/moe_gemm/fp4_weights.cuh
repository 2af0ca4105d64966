// Consumer warps of gemm_fp4_wgmma: convert prepared weights in shared memory to A fragments in registers.
#pragma once
#include "moe_gemm/fp4_pairs.cuh"
#include "moe_gemm/fp4_prepared.cuh"

__device__ __forceinline__ uint2 load_shared_two(unsigned from) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

// Load 1, 2 or 4 bytes from shared memory.
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

// Return a pair whose two halves are both equal to the low half of `pair` (HIGH: the high half). This costs no
// instruction: the compiler turns the selection into an operand modifier of the multiplication that reads the result.
template <bool HIGH> __device__ __forceinline__ unsigned twice(unsigned pair) {
    unsigned both;
    if constexpr (HIGH)
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(pair));
    else
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(pair));
    return both;
}

// Factors of the unpacked elements of one row of weights, for `32 * HALVES` elements along k. Each element is
// multiplied by its factor. Unpacking multiplies each element by 2^-126 (bfloat16) or 2^-14 (float16). To undo this, a
// factor is the element's scale times 2^126 or 2^14, divided by MISSING. Without the division the factor would
// overflow. The epilogue multiplies the sums by MISSING.
//
// The factors are exact for all e4m3 scales. They are exact for E8M0 scales from 2^-100 to 2^33 in bfloat16, and from
// 2^-17 to 2^7 in float16. In float16, larger E8M0 scales become infinite, and scales below 2^-22 become 0.
template <typename T, int FORMAT, int HALVES> struct Fp4Factors {
    static constexpr float MISSING = IS_BFLOAT16<T> ? 0x1p32f : FORMAT == MXFP4 ? 0x1p6f : 0x1p7f;
    static constexpr int EACH = UNIT_SCALES<FORMAT> / 2, COUNT = HALVES * EACH; // EACH: scales of half a unit
    unsigned pairs[(COUNT + 1) / 2];

    // Convert two scales to factors, and return the two factors as a packed pair of T. The scales are bytes 0 and 2 of
    // `scales`.
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

    // Load the scales of one row and convert them to factors. `at`: shared address of the row's scales in a unit.
    __device__ __forceinline__ void load(unsigned at, int half) {
        const unsigned bytes = load_shared_bytes<COUNT>(at + half * EACH);
        pairs[0] = factors_of(COUNT == 1 ? bytes : __byte_perm(bytes, 0, 0x4140));
        if constexpr (COUNT == 4) pairs[1] = factors_of(__byte_perm(bytes, 0, 0x4342));
    }

    // Return the factor of 16 elements along k, in both halves of a pair. `HALF` (0 or 1) selects 32 elements of the
    // unit along k, and `STEP` (0 or 1) selects 16 of these.
    template <int HALF, int STEP> __device__ __forceinline__ unsigned factor() const {
        constexpr int AT = HALF * EACH + (EACH == 2 ? STEP : 0);
        return twice<AT % 2>(pairs[AT / 2]);
    }
};

// A fragments of a warp for 16 rows and `32 * HALVES` elements along k. Half a unit has 32 elements along k, which take
// two MMAs of 16 elements.
template <int HALVES> struct Fp4Fragments {
    unsigned a[2 * HALVES][4];

    // Convert one half of a unit along k, selected by `HALF` (0 or 1). `words` and `factors` are the packed elements
    // and the factors of the lane's two rows: lane l has rows `l / 4` and `l / 4 + 8`.
    template <typename T, int HALF, class Factors>
    __device__ __forceinline__ void convert(const unsigned (&words)[2], const Factors (&factors)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            unsigned pairs[4];
            unpack_pairs(pairs, words[row]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (!IS_BFLOAT16<T>) pairs[i] = (pairs[i] << 3 & 0x0e000e00) | (pairs[i] & 0x80008000);
                const unsigned factor =
                    i < 2 ? factors[row].template factor<HALF, 0>() : factors[row].template factor<HALF, 1>();
                a[HALF * 2 + i / 2][i % 2 * 2 + row] = multiply_pairs<T>(pairs[i], factor);
            }
        }
    }

    // Compiler fence: keep the computation of the fragments before the call.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8 * HALVES; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    }
};
