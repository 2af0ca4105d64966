// Convert units of BYTES bytes, with elements of type T, to the formats of a cache and back.
//
//   SAME         the cache stores T unchanged
//   E4M3, E5M2   stored(x) = x / scale in float32, rounded to the nearest, ties to even, and saturated
//                read(x) = x * scale in float32, rounded to T
//
// T is the type of the elements outside of the cache. With SAME, T may be any type of the same size. All strides are in
// bytes.
#pragma once
#include "common/fp8.cuh"
#include "common/numeric.cuh"
#include "common/vectors.cuh"

template <int BYTES> using Unit = typename VectorOf<BYTES>::Type;

enum Format { SAME, E4M3, E5M2 };

template <int FORMAT> constexpr __nv_fp8_interpretation_t INTERPRETATION = FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2;

// Compute x / scale without a division: multiply by the reciprocal of the scale, then correct the product by its
// remainder, which a fused multiply-add computes exactly. The result is the quotient rounded to nearest, as in an IEEE
// division. If the corrected value is NaN (infinities, overflow, a scale of 0), the uncorrected product already equals
// the quotient.
struct Quotient {
    float scale, reciprocal;
    __device__ __forceinline__ explicit Quotient(float s) : scale(s), reciprocal(__frcp_rn(s)) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float product = __fmul_rn(x, reciprocal);
        const float corrected = __fmaf_rn(__fmaf_rn(-product, scale, x), reciprocal, product);
        return corrected == corrected ? copysignf(corrected, product) : product; // a quotient of -0 keeps its sign
    }
};

// Convert a unit of T to the format of the cache.
template <typename T, int FORMAT, int BYTES> struct Store {
    static constexpr int OUT_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Unit<OUT_BYTES> convert(const Unit<BYTES>& unit, const Quotient& quotient) {
        if constexpr (FORMAT == SAME) {
            return unit;
        } else {
            Unit<OUT_BYTES> out;
            const T* in = reinterpret_cast<const T*>(&unit);
            if constexpr (OUT_BYTES == 1) {
                out = to_fp8<INTERPRETATION<FORMAT>>(quotient(to_float(in[0])));
            } else {
#pragma unroll
                for (int i = 0; i < OUT_BYTES / 2; ++i) {
                    const float x = quotient(to_float(in[2 * i])), y = quotient(to_float(in[2 * i + 1]));
                    reinterpret_cast<unsigned short*>(&out)[i] = to_fp8<INTERPRETATION<FORMAT>>(x, y);
                }
            }
            return out;
        }
    }
};

// Convert a unit in the format of the cache to T.
template <typename T, int FORMAT, int BYTES> struct Read {
    static constexpr int IN_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Unit<BYTES> convert(const Unit<IN_BYTES>& unit, float scale) {
        if constexpr (FORMAT == SAME) {
            return unit;
        } else {
            Unit<BYTES> out;
#pragma unroll
            for (int i = 0; i < IN_BYTES; ++i) {
                const __nv_fp8_storage_t byte = reinterpret_cast<const __nv_fp8_storage_t*>(&unit)[i];
                const __half half = __nv_cvt_fp8_to_halfraw(byte, INTERPRETATION<FORMAT>);
                reinterpret_cast<T*>(&out)[i] = from_float<T>(__fmul_rn(__half2float(half), scale));
            }
            return out;
        }
    }
};
