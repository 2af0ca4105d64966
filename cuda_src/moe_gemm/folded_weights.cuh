// Consumer warps of gemm_folded_wgmma: convert prepared weights in shared memory to A fragments in registers.
#pragma once
#include "common/fp8.cuh"
#include "moe_gemm/folded_layout.cuh"
#include "moe_gemm/shared_memory.cuh"

// Return entry `difference` of FoldedLayout's table: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^(6 - difference), as e4m3.
__device__ __forceinline__ uint2 folded_numbers(int difference) {
    const float by = __uint_as_float((127 + FOLDED_SHIFT - difference) << 23);
    auto two = [&](float x, float y) { return to_fp8<__NV_E4M3>(x * by, y * by); };
    return make_uint2(two(0.f, 0.5f) | two(1.f, 1.5f) << 16, two(2.f, 3.f) | two(4.f, 6.f) << 16);
}

// Return the factor 2^(E - 6) of a row. `word`: the row's scale word, which holds E as an E8M0 byte. If this byte is
// 255 (NaN), the factor is NaN. If E is below -120, the factor would be subnormal, and the function returns 0 instead.
__device__ __forceinline__ float folded_factor(unsigned word) {
    const int exponent = int(folded_exponent(word));
    return exponent == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(max(exponent - FOLDED_SHIFT, 0) << 23);
}

// The 32-bit words of weights that a lane reads from a stage for two MMAs along k. In an A fragment, lane l has rows
// `l / 4` and `l / 4 + 8` of its warp's 16 rows. With PAIRS these two rows are a gate row and its up row, which are
// neighbours in memory.
template <bool PAIRS> struct FoldedWords {
    // Distance in bytes from the lane's first row to its second row: the size of 8 rows or, with PAIRS, of one row.
    static constexpr int NUMBERS_APART = PAIRS ? FOLDED_ROW_NUMBERS : FOLDED_UNIT;
    static constexpr int ROWS_APART = PAIRS ? 4 : FOLDED_UNIT;

    uint2 numbers[2];
    unsigned rows[2]; // the scale words of the two rows, for all MMAs of a stage

    // `from`: shared address of the lane's elements in its first row.
    __device__ __forceinline__ void load_numbers(unsigned from) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(numbers[i].x), "=r"(numbers[i].y)
                         : "r"(from + i * NUMBERS_APART)
                         : "memory");
    }

    __device__ __forceinline__ void load_rows(unsigned from) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rows[i] = __float_as_uint(load_shared_float(from + i * ROWS_APART));
    }
};

// A fragments of a warp for 16 rows and 128 elements along k: four MMAs of 32 elements each.
struct FoldedFragments {
    unsigned a[4][4];

    // Convert the fragments of MMAs `FIRST` and `FIRST + 1`. `table`: shared address of FoldedLayout's table, a
    // multiple of 256.
    template <int FIRST, bool PAIRS>
    __device__ __forceinline__ void convert(const FoldedWords<PAIRS>& words, unsigned table) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const unsigned differences = words.rows[row] & 0xf8f8f8f8;
#pragma unroll
            for (int i = FIRST; i < FIRST + 2; ++i) {
                const unsigned word = i % 2 ? words.numbers[row].y : words.numbers[row].x;
                uint2 numbers;
                // Address of table[d]: byte i of `differences`, d * 8, replaces the lowest byte of the table's address.
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(numbers.x), "=r"(numbers.y)
                             : "r"(__byte_perm(differences, table, 0x7650 | i)));
                const unsigned sizes = word & 0x77777777; // each nibble selects one of the entry's 8 magnitudes
                a[i][row] = __byte_perm(numbers.x, numbers.y, sizes) | (word & 0x80808080);
                a[i][2 + row] = __byte_perm(numbers.x, numbers.y, sizes >> 16) | (word << 4 & 0x80808080);
            }
        }
    }

    // Compiler fence: keep the computation of fragments `FIRST` and `FIRST + 1` before the call.
    template <int FIRST> __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[FIRST + i / 4][i % 4])::"memory");
    }
};
