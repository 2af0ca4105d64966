// Units of 1 to 16 bytes for copying rows of any type, and the division that finds the row of a unit.
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

// Division of n < 2^31 by a number that is constant during a launch. The host chooses `multiplier` and `shift` so that
// the quotient is (n * multiplier) >> shift.
struct Divisor {
    unsigned multiplier;
    int shift;
    __device__ __forceinline__ unsigned quotient(unsigned n) const {
        return unsigned((unsigned long long)n * multiplier >> shift);
    }
};
