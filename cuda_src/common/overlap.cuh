// Programmatic dependent launch, from sm_90 on: the blocks of a kernel start while the blocks of the previous kernel on
// the stream end. This hides the gap between two kernels, 0.65 us on an H200. `cukern.runtime.overlap` enables it for
// every kernel whose file includes this header. Such a kernel first waits, because earlier kernels may still access the
// same memory.
#pragma once

// After this, all writes of the earlier kernels are visible.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next grid may start once every block has called this or exited. Call this after wait_for_earlier_kernels, so that
// at most one kernel waits while another runs. In a long kernel that fills the GPU, call this just before the final
// stores. An earlier call would place all blocks of the next kernel on the few multiprocessors that become free first.
__device__ __forceinline__ void let_later_kernels_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Short kernels call this at their beginning.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
    wait_for_earlier_kernels();
    let_later_kernels_begin();
}
