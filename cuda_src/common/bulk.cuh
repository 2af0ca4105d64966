// Bulk copies from shared to global memory by the tensor memory accelerator (TMA), from sm_90 on.
#pragma once

// Make this thread's writes to shared memory visible to TMA and wgmma (the async proxy). Call this before you arrive at
// the barrier on which the reader waits.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Issue a copy of `bytes` bytes as one bulk group. `bytes` is a multiple of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(unsigned(__cvta_generic_to_shared(shared))), "r"(bytes)
                 : "memory");
}

// Wait for all bulk groups of this thread except the latest PENDING.
template <int PENDING> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Wait until all bulk groups of this thread except the latest PENDING have read their source. Their writes may still be
// in flight.
template <int PENDING> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
