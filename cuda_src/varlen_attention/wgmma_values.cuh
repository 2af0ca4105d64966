// Issue wgmma with operand A (the softmax weights) in registers and operand B (the values) in shared memory, for 64 or
// 128 columns.
#pragma once
#include "common/hopper.cuh"

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_VALUES(columns, types, names, a_at, b_at, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" names "}, {" a_at "}, " b_at \
                 ", 1, 1, 1, 1;" \
                 : __VA_ARGS__ \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA_VALUES_64(types) WGMMA_VALUES("64", types, NAMES_32, "%32, %33, %34, %35", "%36", SIXTEEN(0), SIXTEEN(16))
#define WGMMA_VALUES_128(types) \
    WGMMA_VALUES("128", types, NAMES_64, "%64, %65, %66, %67", "%68", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48))

// Compute c += a b for 64 rows and 16 elements along K. b: an MN-major descriptor.
template <typename T>
__device__ __forceinline__ void wgmma_values(float (&c)[32], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (IS_BFLOAT16<T>)
        WGMMA_VALUES_64("bf16.bf16");
    else
        WGMMA_VALUES_64("f16.f16");
}

template <typename T>
__device__ __forceinline__ void wgmma_values(float (&c)[64], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (IS_BFLOAT16<T>)
        WGMMA_VALUES_128("bf16.bf16");
    else
        WGMMA_VALUES_128("f16.f16");
}

#undef FOUR
#undef SIXTEEN
#undef NAMES_32
#undef NAMES_64
#undef WGMMA_VALUES
#undef WGMMA_VALUES_64
#undef WGMMA_VALUES_128
