// mma.sync, ldmatrix and cp.async, for every GPU from sm_80 on.
//
// Fragments of m16n8k16, which multiplies A [16 x 16] by B [16 x 8]. With row = lane / 4 and pair = lane % 4, a lane
// holds these elements, given as (row, column):
//
//   A [16 x 16]  a[0]: (row, 2 pair), a[1]: (row + 8, 2 pair), a[2]: (row, 2 pair + 8), a[3]: (row + 8, 2 pair + 8)
//   B [16 x 8]   b[0]: (2 pair, row), b[1]: (2 pair + 8, row)
//   C [16 x 8]   c[0], c[1]: (row, 2 pair), (row, 2 pair + 1)    c[2], c[3]: the same columns of row + 8
//
// A register of A or B holds the listed element and the next one along k.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ unsigned shared_address(const void* here) {
    return unsigned(__cvta_generic_to_shared(here));
}

// Copy 16 bytes from global to shared memory. cp_async_wait_group<N> waits for all groups of this thread except the
// latest N. Other threads see the bytes only after a barrier.
__device__ __forceinline__ void cp_async(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Load matrices of 8 rows of 16 bytes. The i-th group of 8 lanes gives the addresses of the rows of matrix i. Lane l
// receives 4 bytes of each matrix: from row `l / 4`, beginning at byte `4 * (l % 4)`. For 16-bit elements this is a
// fragment of A if the rows are rows of A, or of B if the rows are columns of B.
__device__ __forceinline__ void ldmatrix(unsigned (&to)[2], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Lane l receives two 16-bit elements of each matrix, both from column `l / 4`: in row `2 * (l % 4)` and in the next
// row.
__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[2], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Compute c += a b.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                            unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Round two elements to T, and return them as one register of a fragment, with `low` in the low half.
template <typename T> __device__ __forceinline__ unsigned pack(float low, float high);

template <> __device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <> __device__ __forceinline__ unsigned pack<__half>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
