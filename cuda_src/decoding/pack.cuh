// Load and store neighbouring items together.
#pragma once
#include "common/units.cuh"

template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// A pack between its load and its use. It occupies whole registers; 16-bit items would take one register each.
template <typename T, int WIDTH> using RawPack = typename UnitOf<sizeof(Pack<T, WIDTH>)>::Type;
