// A pack is WIDTH neighbouring elements, which one instruction loads or stores.
#pragma once
#include "common/vectors.cuh"

template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// The type of a pack between its load and its use. Two 16-bit elements share a register; in a Pack, each would take a
// whole register.
template <typename T, int WIDTH> using RawPack = Vector<sizeof(Pack<T, WIDTH>)>;
