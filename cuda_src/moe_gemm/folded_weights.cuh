// Conversion of prepared weights (folded_prepared.cuh) to A fragments in gemm_folded_wgmma.
#pragma once
#include "common/fp8.cuh"
#include "moe_gemm/folded_layout.cuh"
#include "moe_gemm/shared_memory.cuh"

// Return entry `difference` of FoldedLayout's table.
__device__ __forceinline__ uint2 folded_elements(int difference) {
    const float by = __uint_as_float((127 + FOLDED_SHIFT - difference) << 23);
    auto two = [&](float x, float y) { return to_fp8<__NV_E4M3>(x * by, y * by); };
    return make_uint2(two(0.f, 0.5f) | two(1.f, 1.5f) << 16, two(2.f, 3.f) | two(4.f, 6.f) << 16);
}

// Return 2^(E - 6) of a row of weights: NaN if the E8M0 byte is 255, 0 if E is below -120 (the result would be
// subnormal).
__device__ __forceinline__ float folded_factor(unsigned scale_word) {
    const int exponent = int(folded_exponent(scale_word));
    return exponent == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(max(exponent - FOLDED_SHIFT, 0) << 23);
}

// The packed weights that a lane needs for two MMAs: rows `lane / 4` and `lane / 4 + 8` of their A fragments.
template <bool INTERLEAVED_GATES> struct FoldedPacked {
    // Bytes between the lane's two rows, which are 8 rows apart or, with INTERLEAVED_GATES, neighbours.
    static constexpr int ELEMENT_STRIDE = INTERLEAVED_GATES ? FOLDED_ROW_BYTES : FOLDED_UNIT_BYTES;
    static constexpr int SCALE_STRIDE = INTERLEAVED_GATES ? 4 : FOLDED_UNIT_BYTES;

    uint2 elements[2];
    unsigned scale_words[2]; // for all MMAs of a stage

    __device__ __forceinline__ void load_elements(unsigned from) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(elements[i].x), "=r"(elements[i].y)
                         : "r"(from + i * ELEMENT_STRIDE)
                         : "memory");
    }

    __device__ __forceinline__ void load_scale_words(unsigned from) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scale_words[i] = __float_as_uint(load_shared_float(from + i * SCALE_STRIDE));
    }
};

// The A fragments of a warp for four MMAs: 16 rows and 128 elements along k.
struct FoldedFragments {
    unsigned a[4][4];

    // Convert the fragments of MMAs `FIRST` and `FIRST + 1`.
    template <int FIRST, bool INTERLEAVED_GATES>
    __device__ __forceinline__ void convert(const FoldedPacked<INTERLEAVED_GATES>& packed, unsigned table) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const unsigned differences = packed.scale_words[row] & 0xf8f8f8f8;
#pragma unroll
            for (int i = FIRST; i < FIRST + 2; ++i) {
                const unsigned word32 = i % 2 ? packed.elements[row].y : packed.elements[row].x;
                uint2 entry;
                // Byte i of `differences` is d * 8. It replaces the lowest byte of `table`, which gives the address of
                // table[d].
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(entry.x), "=r"(entry.y)
                             : "r"(__byte_perm(differences, table, 0x7650 | i)));
                const unsigned magnitudes = word32 & 0x77777777; // each nibble selects a magnitude
                a[i][row] = __byte_perm(entry.x, entry.y, magnitudes) | (word32 & 0x80808080);
                a[i][2 + row] = __byte_perm(entry.x, entry.y, magnitudes >> 16) | (word32 << 4 & 0x80808080);
            }
        }
    }

    // Compiler fence.
    template <int FIRST> __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[FIRST + i / 4][i % 4])::"memory");
    }
};
