// The epilogue of gemm_fp8_blocks: from sums to results in memory.
#pragma once
#include "common/quotient.cuh"
#include "moe_gemm/fp8_blocks_layout.cuh"
#include "moe_gemm/fp8_store.cuh"

__device__ __forceinline__ void store_shared_half(unsigned to, unsigned short value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

// Begin to copy `bytes`, a multiple of 16, from shared to global memory, as a group of its own of this thread.
__device__ __forceinline__ void bulk_store_from(void* to, unsigned from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

// Copy the staged rows of a warp, of which `left` are of the group, each by a lane: `bytes` of it from `out` on, where
// rows lie `pitch` bytes apart. The copies go on behind this.
template <class Layout>
__device__ __forceinline__ void copy_staged_rows(char* out, long long pitch, int bytes, int left, unsigned staged) {
    const int lane = threadIdx.x % 32;
    fence_proxy_async();
    __syncwarp();
    if (lane < min(left, 16)) bulk_store_from(out + lane * pitch, staged + lane * Layout::STAGED_PITCH, bytes);
}

// Wait until what this warp staged has been copied from there.
__device__ __forceinline__ void wait_staged() {
    bulk_wait_read<0>();
    __syncwarp();
}

// Write the 16 rows of a warp's sums by way of its staging room, which has space for all of them.
template <typename T, class Layout>
__device__ __forceinline__ void store_wide_rows(const Fp8BlocksParams& p, const Fp8Tile& tile, int first_row,
                                                const float (&sums)[2][64], unsigned staged) {
    const int lane = threadIdx.x % 32, left = tile.z - first_row;
    if (left <= 0) return;
    wait_staged();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < FP8_COLUMNS / 8; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] =
                    pack<T>(sums[half][(j + i / 2) * 4 + i % 2 * 2], sums[half][(j + i / 2) * 4 + i % 2 * 2 + 1]);
            stmatrix(staged + lane % 16 * Layout::STAGED_PITCH + (half * (FP8_COLUMNS / 8) + j + lane / 16) * 16,
                     pairs);
        }
    T* const out = static_cast<T*>(p.out) + ((long long)tile.y + first_row) * p.n + tile.w;
    copy_staged_rows<Layout>(reinterpret_cast<char*>(out), p.n * (long long)sizeof(T), min(p.n - tile.w, FP8_WIDE) * 2,
                             left, staged);
}

// Write activate(gate, up) of the 16 rows of a warp in e4m3, each row of the tile with a scale: its largest magnitude,
// or `smallest`, by 448. Gates and ups are rounded to T before, and quotients are those of division, so that the bits
// are those of products in T whose activation is quantized by groups of 128.
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
            largest = fmaxf(largest, fabsf(sums[0][at])); // fmaxf leaves NaN out
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
    copy_staged_rows<Layout>(out, columns, FP8_COLUMNS, left, staged);
}

// Write the 16 rows of a warp by what room the layout has.
template <typename T, class Layout>
__device__ __forceinline__ void store_block_rows(const Fp8BlocksParams& p, const Fp8Tile& tile, int first_row,
                                                 float (&sums)[2][64], unsigned staged) {
    if constexpr (Layout::ACTIVATION != 0) {
        store_activated_rows<T, Layout>(p, tile, first_row, sums, staged);
    } else if constexpr (Layout::IN_BULK) {
        store_wide_rows<T, Layout>(p, tile, first_row, sums, staged);
    } else {
        using Halved = Fp8Layout<128, 1, 2, true, 0>; // of one half, as store_fp8_rows takes it
        Fp8Tile half = tile;
        store_fp8_rows<T, Halved>(p, half, first_row, sums[0], staged);
        half.w += FP8_COLUMNS;
        if (half.w < p.n) store_fp8_rows<T, Halved>(p, half, first_row, sums[1], staged);
    }
}
