// Overlap of kernels that follow one another on a stream (programmatic dependent launch, from sm_90 on): the blocks of a
// kernel are put in place while those of the one before it end, so that the time between the two, 0.65 us on an H200, is
// not lost. `cukern.runtime.overlap` allows it to every kernel whose file waits with one of the functions here. That must
// be the first statement of the kernel: what is read or written before it may still be written or read by others.
#pragma once

// Waits until all that the kernels before this one wrote can be seen. The next kernel's blocks take their places once all
// blocks of this one have ended: those of a kernel that fills the GPU for long, and whose blocks end at different times,
// would otherwise lie on the few multiprocessors that are free first.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same for short kernels: the next kernel's blocks take their places, and wait, as soon as all of this one have
// theirs. They may do so only behind the wait, so that kernels do not pile up: one waits, and one runs.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
    wait_for_earlier_kernels();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
