// The launch configuration of a kernel with dynamic shared memory.
//
// The function `k_launch` returns the launch configuration of kernel `k`. It has the template parameters of the kernel,
// and takes the sizes of a call. The host computes the same configuration. When an instance is compiled, an assertion
// checks that both agree (`Kernel.variant` of cukern/runtime/kernel.py).
#pragma once

struct Launch {
    int threads;      // per block; the maximum if the number depends on the call
    int shared_bytes; // dynamic shared memory
    int box = 0;      // rows of a TMA box; 0 if the template arguments do not determine it
};

constexpr int HOPPER_SHARED_BYTES = 227 << 10; // maximum of a block

// Return the bytes of shared memory to request for a block that needs `bytes`. This is Hopper's maximum per block, so
// that no other block is resident on the same multiprocessor.
constexpr int all_for(int bytes) { return bytes <= HOPPER_SHARED_BYTES ? HOPPER_SHARED_BYTES : bytes; }
