// Overlap of kernels that follow one another on a stream (programmatic dependent launch, from sm_90 on): the blocks of a
// kernel are put in place while those of the one before it end, so that the time between the two is not lost.
// `cukern.runtime.launch` allows it to every kernel whose file says `begin_behind_earlier_kernels()`, so that must be the
// first statement of the kernel: whatever is read or written before it may still be written or read by others.
#pragma once

// Waits until all that the kernels before this one wrote can be seen, then lets the next kernel's blocks take their places
// as soon as all of this one have theirs. The order keeps kernels from piling up: one waits, and one runs.
__device__ __forceinline__ void begin_behind_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
