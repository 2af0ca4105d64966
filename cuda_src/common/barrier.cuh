// Barriers in shared memory (mbarrier), on every GPU from sm_80 on. Phase after phase, one is complete when so many
// threads have arrived. Barriers are named by their shared address.
#pragma once

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrive as soon as the copies that this thread started have.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until phase `phase` (modulo 2) is complete.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int phase) {
    asm volatile("{ .reg .pred complete;\n"
                 "again:\n"
#if __CUDA_ARCH__ >= 900
                 "  mbarrier.try_wait.parity.shared.b64 complete, [%0], %1;\n"
#else
                 "  mbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n"
#endif
                 "  @!complete bra again; }"
                 :
                 : "r"(barrier), "r"(phase & 1)
                 : "memory");
}
