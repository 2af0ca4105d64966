// Barriers in shared memory (mbarrier), for every GPU from sm_80 on. A barrier goes through phases 0, 1, 2, ... A phase
// completes after the number of arrivals that mbarrier_init sets. `barrier` is the barrier's shared address.
#pragma once

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Make this thread arrive at the barrier once all cp.async copies that it has issued so far are complete. This call
// does not wait.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Wait until phase `phase` is complete. The hardware compares only the parity of the phase, which is enough because a
// waiting thread is at most one phase behind.
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
