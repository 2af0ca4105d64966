// A unit is 1, 2, 4, 8 or 16 contiguous bytes. Kernels copy rows of any element type unit by unit. Divisor is a fast
// division, which finds the row of a unit.
#pragma once

// The unsigned type of BYTES bytes.
template <int BYTES> struct UnitOf;
template <> struct UnitOf<16> {
    using Type = uint4;
};
template <> struct UnitOf<8> {
    using Type = uint2;
};
template <> struct UnitOf<4> {
    using Type = unsigned;
};
template <> struct UnitOf<2> {
    using Type = unsigned short;
};
template <> struct UnitOf<1> {
    using Type = unsigned char;
};

// Divides integers n < 2^31 by a divisor that is constant during a launch. The host chooses `multiplier` and `shift` so
// that the quotient is `(n * multiplier) >> shift`.
struct Divisor {
    unsigned multiplier;
    int shift;
    __device__ __forceinline__ unsigned quotient(unsigned n) const {
        return unsigned((unsigned long long)n * multiplier >> shift);
    }
};
