// Neighbouring items that are loaded and stored at once.
#pragma once
#include "common/units.cuh"

template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// A pack as it waits between its load and its use: whole registers, where 16-bit items would take one each.
template <typename T, int WIDTH> using RawPack = typename UnitOf<sizeof(Pack<T, WIDTH>)>::Type;
