// Programmatic dependent launch, from sm_90 on: the blocks of a kernel start while the blocks of the previous kernel on
// the stream end. This hides the gap between two kernels, 0.65 us on an H200. `cukern.runtime.overlap` enables it for
// every kernel whose file includes this one. Such a kernel first calls a wait function of this file, because earlier
// kernels may still access the memory that it uses.
#pragma once

// Wait until all writes of the earlier kernels are visible (griddepcontrol.wait).
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Trigger programmatic dependent launch (griddepcontrol.launch_dependents): once every block has called this or exited,
// the next grid may start. Call this after wait_for_earlier_kernels, so that at most one kernel waits while another
// runs. In a long kernel that fills the GPU, a block calls this just before its final merge and stores. With an earlier
// call, all blocks of the next kernel would be placed on the few multiprocessors that become free first.
__device__ __forceinline__ void let_later_kernels_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for the earlier kernels, and then let the next kernel start. Short kernels call this at their beginning.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
    wait_for_earlier_kernels();
    let_later_kernels_begin();
}
