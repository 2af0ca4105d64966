// A vector is the 1, 2, 4, 8 or 16 contiguous bytes that a thread loads or stores at once. Divisor divides a vector's
// index by the number of vectors per row.
#pragma once

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
template <int BYTES> using Vector = typename VectorOf<BYTES>::Type;

// Divides integers n < 2^31 by a divisor that is constant during a launch. The host chooses `multiplier` and `shift`.
struct Divisor {
    unsigned multiplier;
    int shift;
    __device__ __forceinline__ unsigned quotient(unsigned n) const {
        return unsigned((unsigned long long)n * multiplier >> shift);
    }
};
