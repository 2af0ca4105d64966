// MMAs of gemm_fp8_blocks, with the rows in registers.
#pragma once
#include "moe_gemm/fp8_layout.cuh"

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)

// Compute `c = a * b`, or `c += a * b` if `accumulate`, for 32 elements along k. a[0], a[1]: 4 bytes of rows `lane / 4`
// and `lane / 4 + 8` of the warp's 16 rows, from byte `lane % 4 * 4` on. a[2], a[3]: 16 bytes further along k. b:
// K-major descriptor.
__device__ __forceinline__ void wgmma_e4m3(float (&c)[64], const unsigned (&a)[4], unsigned long long b,
                                           bool accumulate) {
    asm volatile("{ .reg .pred accumulate;\n"
                 "  setp.ne.b32 accumulate, %69, 0;\n"
                 "  wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, accumulate, 1, 1; }"
                 : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

#undef SIXTEEN
#undef FOUR

// Start the MMAs of 64 rows by a stage's gate rows or up rows. `weights`: lower half of their descriptor.
__device__ __forceinline__ void start_block_products(float (&sums)[64], const unsigned (&rows)[4][4],
                                                     unsigned weights) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < FP8_K / 32; ++i) wgmma_e4m3(sums, rows[i], k_major_descriptor_of(weights + i * 2), i > 0);
    wgmma_commit_group();
}

__device__ __forceinline__ void add_block_products(float (&total)[64], const float (&sums)[64],
                                                   const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) total[i] = fmaf(sums[i], factors[i / 2 % 2], total[i]);
}
