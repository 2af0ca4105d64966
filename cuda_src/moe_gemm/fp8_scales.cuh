// Scale producer warps of gemm_fp8_wgmma and gemm_fp8_blocks.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/fp8_tiles.cuh"
#include "moe_gemm/shared_memory.cuh"

// Load four scales of a row from index `k` on. The row has `scales` scales; larger indices are clamped to the last
// scale.
__device__ __forceinline__ void load_four_scales(float (&to)[FP8_SCALES], const float* row, int k, int scales,
                                                 bool aligned) {
    if (aligned) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(row + k));
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
#pragma unroll
        for (int j = 0; j < FP8_SCALES; ++j) to[j] = __ldg(row + min(k + j, scales - 1));
    }
}

// Run a scale producer warp. It multiplies the scales of SCALED_ROWS rows of each tile, from row
// `SCALED_ROWS * scale_warp` on, by the weight scales, and writes the products to the ring of stages. It loads the
// scales of four stages before it waits for the first of these stages, so that the loads overlap the wait.
template <class Layout, class Tiles = Fp8Tiles<Layout>>
__device__ __forceinline__ void load_fp8_scales(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                unsigned scales, int scale_warp) {
    constexpr int TOKENS = Layout::TOKENS, STAGES = Layout::STAGES;
    constexpr int SCALE_SETS = Layout::SCALE_SETS, ROWS = Layout::SCALED_ROWS / 32;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, strips = (p.n + FP8_COLUMNS - 1) / FP8_COLUMNS;
    const int lane = threadIdx.x % 32, first_row = scale_warp * Layout::SCALED_ROWS + lane * ROWS;
    const bool aligned = k_blocks % FP8_SCALES == 0 && reinterpret_cast<size_t>(p.a_scale) % 16 == 0;
    Tiles tiles(p, shared.groups[1 + scale_warp]);
    int stage = 0, phase = 1;
    auto fill = [&](auto&& write) {
        mbarrier_wait(shared_address(&shared.empty[stage]), phase);
        write();
        mbarrier_arrive(shared_address(&shared.full[stage]));
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const float* const a = p.a_scale + (long long)tile.y * k_blocks;
        const float* const b = static_cast<const float*>(p.b_scale) + (long long)tile.x * strips * k_blocks;
#pragma unroll 1
        for (int k = 0; k < k_blocks; k += FP8_SCALES) {
            float row_scales[ROWS][FP8_SCALES],
                weight_scales[SCALE_SETS]; // weight_scales: lane l has scale `k + l % 4`
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                load_four_scales(row_scales[i], a + min(first_row + i, tile.z - 1) * k_blocks, k, k_blocks, aligned);
#pragma unroll
            for (int set = 0; set < SCALE_SETS; ++set) {
                const int strip = min((tile.w + set * (p.n / 2)) / FP8_COLUMNS, strips - 1);
                weight_scales[set] = __ldg(b + (long long)strip * k_blocks + min(k + lane % FP8_SCALES, k_blocks - 1));
            }
#pragma unroll
            for (int j = 0; j < FP8_SCALES; ++j)
                if (k + j < k_blocks)
                    fill([&] {
#pragma unroll
                        for (int set = 0; set < SCALE_SETS; ++set) {
                            const float by = __shfl_sync(FULL_WARP, weight_scales[set], j);
                            const unsigned to = scales + stage * Layout::SCALE_BYTES + (set * TOKENS + first_row) * 4;
                            if constexpr (ROWS == 4)
                                store_shared(to, make_uint4(__float_as_uint(row_scales[0][j] * by),
                                                            __float_as_uint(row_scales[1][j] * by),
                                                            __float_as_uint(row_scales[2][j] * by),
                                                            __float_as_uint(row_scales[3][j] * by)));
                            else
#pragma unroll
                                for (int i = 0; i < ROWS; ++i) store_shared_float(to + i * 4, row_scales[i][j] * by);
                        }
                    });
        }
        __syncwarp();
    }
    fill([] {}); // the stage whose description ends the consumers' loops
    __syncwarp();
}
