// What a block of a kernel is launched with.
//
// A kernel `k` with dynamic shared memory has a function `k_launch`: of the template parameters of `k`, and of the sizes
// of a call that its shared memory depends on. The host computes the same, and the compilation of an instance asserts
// that both agree (`Kernel.variant` of cukern/runtime/kernel.py).
#pragma once

struct Launch {
    int threads;      // the most where they depend on the call
    int shared_bytes; // of dynamic shared memory
    int box = 0;      // rows of a box of TMA, where boxes are of as many rows as suit the form
};

constexpr int HOPPER_SHARED_BYTES = 227 << 10; // of a block on Hopper, at most

// The shared memory of a block that is alone on its multiprocessor and needs `bytes`: all there is.
constexpr int all_for(int bytes) { return bytes <= HOPPER_SHARED_BYTES ? HOPPER_SHARED_BYTES : bytes; }
