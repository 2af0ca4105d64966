// Load and store a pack (WIDTH neighbouring elements) with one instruction.
#pragma once
#include "common/vectors.cuh"

template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// The type of a pack in registers between its load and its use. A RawPack uses all bits of its 32-bit registers, but a
// Pack of 16-bit elements would take one register per element.
template <typename T, int WIDTH> using RawPack = typename VectorOf<sizeof(Pack<T, WIDTH>)>::Type;
