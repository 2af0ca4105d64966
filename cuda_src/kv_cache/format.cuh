// Convert vectors of BYTES bytes, with elements of T, to the format of a cache and back.
//
//   SAME         the cache stores T unchanged
//   E4M3, E5M2   stored(x) = x / scale in float32, rounded to the nearest, ties to even, and saturated
//                read(x) = x * scale in float32, rounded to T
//
// With SAME, only the size of T matters. Strides are in bytes.
#pragma once
#include "common/fp8.cuh"
#include "common/numeric.cuh"
#include "common/vectors.cuh"

enum Format { SAME, E4M3, E5M2 };

template <int FORMAT> constexpr __nv_fp8_interpretation_t INTERPRETATION = FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2;

// Compute x / scale, correctly rounded: multiply by the reciprocal, then correct by the remainder, which a fused
// multiply-add computes exactly. If that gives NaN (infinities, overflow, a scale of 0), return the uncorrected
// product.
struct Quotient {
    float scale, reciprocal;
    __device__ __forceinline__ explicit Quotient(float s) : scale(s), reciprocal(__frcp_rn(s)) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float product = __fmul_rn(x, reciprocal);
        const float corrected = __fmaf_rn(__fmaf_rn(-product, scale, x), reciprocal, product);
        return corrected == corrected ? copysignf(corrected, product) : product; // -0 keeps its sign
    }
};

template <typename T, int FORMAT, int BYTES> struct Store {
    static constexpr int OUT_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Vector<OUT_BYTES> convert(const Vector<BYTES>& vector, const Quotient& quotient) {
        if constexpr (FORMAT == SAME) {
            return vector;
        } else {
            Vector<OUT_BYTES> out;
            const T* element = reinterpret_cast<const T*>(&vector);
            if constexpr (OUT_BYTES == 1) {
                out = to_fp8<INTERPRETATION<FORMAT>>(quotient(to_float(element[0])));
            } else {
#pragma unroll
                for (int i = 0; i < OUT_BYTES / 2; ++i) {
                    const float x = quotient(to_float(element[2 * i])), y = quotient(to_float(element[2 * i + 1]));
                    reinterpret_cast<unsigned short*>(&out)[i] = to_fp8<INTERPRETATION<FORMAT>>(x, y);
                }
            }
            return out;
        }
    }
};

template <typename T, int FORMAT, int BYTES> struct Read {
    static constexpr int IN_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Vector<BYTES> convert(const Vector<IN_BYTES>& vector, float scale) {
        if constexpr (FORMAT == SAME) {
            return vector;
        } else {
            Vector<BYTES> out;
#pragma unroll
            for (int i = 0; i < IN_BYTES; ++i) {
                const __nv_fp8_storage_t byte = reinterpret_cast<const __nv_fp8_storage_t*>(&vector)[i];
                const __half half = __nv_cvt_fp8_to_halfraw(byte, INTERPRETATION<FORMAT>);
                reinterpret_cast<T*>(&out)[i] = from_float<T>(__fmul_rn(__half2float(half), scale));
            }
            return out;
        }
    }
};
