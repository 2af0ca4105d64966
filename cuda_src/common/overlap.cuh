// Overlap of kernels that follow one another on a stream (programmatic dependent launch, from sm_90 on): the blocks of a
// kernel are put in place while those of the one before it end, so that the time between the two, 0.65 us on an H200, is
// not lost. `cukern.runtime.overlap` allows it to every kernel whose file includes this one. Such a kernel waits with one
// of the functions here, as its first statement: what it touches before may still be written or read by others.
#pragma once

// Waits until all that the kernels before this one wrote can be seen.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel take their places as soon as all blocks of this one have said so, or have ended. To
// be said behind the wait, so that kernels do not pile up: one waits, and one runs. A kernel that fills the GPU for long
// says so when a block has nothing left but to merge and to store: else the next kernel's blocks would lie on the few
// multiprocessors that are free first.
__device__ __forceinline__ void let_later_kernels_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for short kernels.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
    wait_for_earlier_kernels();
    let_later_kernels_begin();
}
