// Copy tokens to shared memory asynchronously.
#pragma once

// Write zeros if not `wanted`, because an unused slot may hold NaN, and 0 * NaN is NaN.
__device__ __forceinline__ void copy_async_or_zero(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_4(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_async_8(unsigned to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// cp.async.bulk copies any multiple of 16 bytes with one instruction.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_ROW_COPIES = true;
#else
constexpr bool HAS_ROW_COPIES = false;
#endif

// `barrier`: address of the mbarrier that counts the bytes.
__device__ __forceinline__ void copy_row(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
