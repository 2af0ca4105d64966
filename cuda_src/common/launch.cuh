// The launch configuration of a block: its threads and its dynamic shared memory.
//
// A kernel `k` with dynamic shared memory has a function `k_launch`. `k_launch` has the same template parameters as
// `k`, and its arguments are the sizes of a call that determine the shared memory. The host computes the same launch
// configuration. When an instance is compiled, an assertion checks that both agree (`Kernel.variant` of
// cukern/runtime/kernel.py).
#pragma once

struct Launch {
    int threads;      // threads of a block; the maximum if the number depends on the call
    int shared_bytes; // bytes of dynamic shared memory
    int box = 0;      // rows of a TMA box; 0 if the template arguments do not determine it
};

constexpr int HOPPER_SHARED_BYTES = 227 << 10; // maximum shared memory of a block on Hopper

// Return the shared memory to request for a block that needs `bytes`. The result is the maximum, so that no other block
// is resident on the same multiprocessor.
constexpr int all_for(int bytes) { return bytes <= HOPPER_SHARED_BYTES ? HOPPER_SHARED_BYTES : bytes; }
