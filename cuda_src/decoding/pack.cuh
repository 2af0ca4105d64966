// Load and store WIDTH neighbouring items with one instruction.
#pragma once
#include "common/units.cuh"

template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Pack {
    T item[WIDTH];
};

// A pack as it stays in registers between its load and its use. A RawPack fills whole 32-bit registers, while a Pack of
// 16-bit items would take one register per item.
template <typename T, int WIDTH> using RawPack = typename UnitOf<sizeof(Pack<T, WIDTH>)>::Type;
