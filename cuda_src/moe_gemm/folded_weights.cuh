// The warps of gemm_folded_wgmma that multiply: prepared weights from shared memory to fragments in registers.
#pragma once
#include "common/fp8.cuh"
#include "moe_gemm/folded_layout.cuh"
#include "moe_gemm/shared_memory.cuh"

// Entry d of FoldedLayout's table, by thread d: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^(6 - d).
__device__ __forceinline__ uint2 folded_numbers(int difference) {
    const float by = __uint_as_float((127 + FOLDED_SHIFT - difference) << 23);
    auto two = [&](float x, float y) { return to_fp8<__NV_E4M3>(x * by, y * by); };
    return make_uint2(two(0.f, 0.5f) | two(1.f, 1.5f) << 16, two(2.f, 3.f) | two(4.f, 6.f) << 16);
}

// 2^(E - 6) of a row, of which `word` is a word. NaN, which 255 stands for, makes the row NaN; below 2^-120 it is 0.
__device__ __forceinline__ float folded_factor(unsigned word) {
    const int exponent = int(folded_exponent(word));
    return exponent == 255 ? __uint_as_float(0x7fc00000) : __uint_as_float(max(exponent - FOLDED_SHIFT, 0) << 23);
}

// What a lane reads of a stage for two products along k: of rows l / 4 and l / 4 + 8 of its warp; with PAIRS, of
// neighbours.
template <bool PAIRS> struct FoldedWords {
    // Bytes from the lane's first row to its second: 8 rows, or one.
    static constexpr int NUMBERS_APART = PAIRS ? FOLDED_ROW_NUMBERS : FOLDED_UNIT;
    static constexpr int ROWS_APART = PAIRS ? 4 : FOLDED_UNIT;

    uint2 numbers[2];
    unsigned rows[2]; // the rows' words, the same for all products of a stage

    // from: of this lane, in the unit of the first row.
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

// Fragments of a warp's 16 rows and 128 numbers along k: of each 32 those of one product.
struct FoldedFragments {
    unsigned a[4][4];

    // Convert the numbers of products FIRST and FIRST + 1. table: shared address, a multiple of 256.
    template <int FIRST, bool PAIRS>
    __device__ __forceinline__ void convert(const FoldedWords<PAIRS>& words, unsigned table) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const unsigned differences = words.rows[row] & 0xf8f8f8f8;
#pragma unroll
            for (int i = FIRST; i < FIRST + 2; ++i) {
                const unsigned word = i % 2 ? words.numbers[row].y : words.numbers[row].x;
                uint2 numbers;
                // The address: the table's, with the difference times 8 as its last byte.
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(numbers.x), "=r"(numbers.y)
                             : "r"(__byte_perm(differences, table, 0x7650 | i)));
                const unsigned sizes = word & 0x77777777;
                a[i][row] = __byte_perm(numbers.x, numbers.y, sizes) | (word & 0x80808080);
                a[i][2 + row] = __byte_perm(numbers.x, numbers.y, sizes >> 16) | (word << 4 & 0x80808080);
            }
        }
    }

    // Compiler fence: what computes the fragments of products FIRST and FIRST + 1 stays before this line.
    template <int FIRST> __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[FIRST + i / 4][i % 4])::"memory");
    }
};
