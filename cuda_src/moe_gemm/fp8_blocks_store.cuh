#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/quotient.cuh"
#include "moe_gemm/fp8_blocks_layout.cuh"
#include "moe_gemm/shared_memory.cuh"

__device__ __forceinline__ void store_shared_half(unsigned to, unsigned short value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

// Start the bulk copy of one staged row to global memory.
__device__ __forceinline__ void copy_staged_row(void* to, unsigned from) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "n"(FP8_COLUMNS)
                 : "memory");
}

__device__ __forceinline__ void wait_staged() {
    bulk_wait_read<0>();
    __syncwarp();
}

// Write activate(gate, up) of a warp's 16 rows as e4m3, with one scale per row of the tile. Sums are rounded to T, and
// quotients as by IEEE division, so the result is bit-identical to separate kernels. The bulk copies of the rows may
// complete after the call.
template <typename T, class Layout>
__device__ __forceinline__ void store_activated_rows(const Fp8BlocksParams& p, const Fp8Tile& tile, int first_row,
                                                     float (&sums)[2][64], unsigned staged) {
    const int lane = threadIdx.x % 32, left = tile.z - first_row, columns = p.n / 2;
    if (left <= 0) return;
    const long long first = (long long)tile.y + first_row;
    wait_staged();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float largest = 0.f;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
            const int at = j / 2 * 4 + i * 2 + j % 2;
            const float gate = to_float(from_float<T>(sums[0][at])), up = to_float(from_float<T>(sums[1][at]));
            sums[0][at] = activate<Layout::ACTIVATION>(gate, up);
            largest = fmaxf(largest, fabsf(sums[0][at])); // fmaxf ignores NaN
        }
        const float scale = __fdiv_rn(fmaxf(lanes_max<4>(largest), p.smallest), 448.f);
        const Quotient<SMALL> quotient(scale);
        const int row = lane / 4 + i * 8;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const int at = j * 4 + i * 2;
            store_shared_half(staged + row * Layout::STAGED_PITCH + j * 8 + lane % 4 * 2,
                              to_fp8<__NV_E4M3>(quotient(sums[0][at]), quotient(sums[0][at + 1])));
        }
        if (lane % 4 == 0 && row < left)
            p.out_scale[(first + row) * (columns / FP8_COLUMNS) + tile.w / FP8_COLUMNS] = scale;
    }
    char* const out = static_cast<char*>(p.out) + first * columns + tile.w;
    fence_proxy_async();
    __syncwarp();
    if (lane < min(left, 16)) copy_staged_row(out + (long long)lane * columns, staged + lane * Layout::STAGED_PITCH);
}
