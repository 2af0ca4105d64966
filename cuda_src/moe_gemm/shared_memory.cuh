#pragma once

__device__ __forceinline__ uint4 load_shared(unsigned from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ float load_shared_float(unsigned from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_float(unsigned to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// Copy BYTES bytes by cp.async; bytes after the first `valid` become 0.
template <int BYTES> __device__ __forceinline__ void copy_part_async(unsigned to, const void* from, int valid) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(valid),
                     "n"(BYTES)
                     : "memory");
}

// Store 8 x 8 matrices of 16-bit elements, transposed. from[i] is two elements of matrix i: column `lane / 4`, rows
// `2 * (lane % 4)` and `2 * (lane % 4) + 1`. `to`: shared address of a row; lanes `8 * i` to `8 * i + 7` pass the rows
// of matrix i.
template <int MATRICES>
__device__ __forceinline__ void store_transposed(unsigned to, const unsigned (&from)[MATRICES]) {
    if constexpr (MATRICES == 4)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                     "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    else if constexpr (MATRICES == 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(from[0]),
                     "r"(from[1])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(from[0]) : "memory");
}
