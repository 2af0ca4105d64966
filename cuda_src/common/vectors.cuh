// A vector is the 1, 2, 4, 8 or 16 contiguous bytes of one load or store of a thread. Kernels copy rows of any dtype
// vector by vector. Divisor divides a vector's index by the vectors per row.
#pragma once

// The unsigned type of BYTES bytes.
template <int BYTES> struct VectorOf;
template <> struct VectorOf<16> {
    using Type = uint4;
};
template <> struct VectorOf<8> {
    using Type = uint2;
};
template <> struct VectorOf<4> {
    using Type = unsigned;
};
template <> struct VectorOf<2> {
    using Type = unsigned short;
};
template <> struct VectorOf<1> {
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
