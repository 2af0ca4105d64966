// Scale producer warps of gemm_fp8_wgmma and gemm_fp8_blocks.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/fp8_tiles.cuh"
#include "moe_gemm/shared_memory.cuh"

// Load the four scales of a row that start at index `k`. `scales`: number of scales of the row. Indices past the last
// scale are replaced by the last index.
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

// Run a scale producer warp. The warp handles SCALED_ROWS rows of each tile, starting at row `SCALED_ROWS * part`. It
// multiplies the scales of these rows by the weight scales and writes the results to the ring of stages. The warp goes
// through the same stages as the TMA producer and arrives at the same full barriers: a stage is full when its TMA bytes
// and its scales are both written. The warp loads the scales of four stages before it waits for the first of these
// stages to be empty. So the loads run during the wait.
template <class Layout, class Tiles = Fp8Tiles<Layout>>
__device__ __forceinline__ void load_fp8_scales(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                unsigned scales, int part) {
    constexpr int TOKENS = Layout::TOKENS, STAGES = Layout::STAGES;
    constexpr int SETS = Layout::SETS, ROWS = Layout::SCALED_ROWS / 32;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, strips = (p.n + FP8_COLUMNS - 1) / FP8_COLUMNS;
    const int lane = threadIdx.x % 32, first_row = part * Layout::SCALED_ROWS + lane * ROWS;
    const bool aligned = k_blocks % FP8_SCALES == 0 && reinterpret_cast<size_t>(p.a_scale) % 16 == 0;
    Tiles tiles(p, shared.groups[1 + part]);
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
            float of_rows[ROWS][FP8_SCALES], of_weights[SETS]; // of_weights: lane l has scale `k + l % 4`
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                load_four_scales(of_rows[i], a + min(first_row + i, tile.z - 1) * k_blocks, k, k_blocks, aligned);
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const int strip = min((tile.w + set * (p.n / 2)) / FP8_COLUMNS, strips - 1);
                of_weights[set] = __ldg(b + (long long)strip * k_blocks + min(k + lane % FP8_SCALES, k_blocks - 1));
            }
#pragma unroll
            for (int j = 0; j < FP8_SCALES; ++j)
                if (k + j < k_blocks)
                    fill([&] {
#pragma unroll
                        for (int set = 0; set < SETS; ++set) {
                            const float by = __shfl_sync(FULL_WARP, of_weights[set], j);
                            const unsigned to = scales + stage * Layout::SCALE_BYTES + (set * TOKENS + first_row) * 4;
                            if constexpr (ROWS == 4)
                                store_shared(to, make_uint4(__float_as_uint(of_rows[0][j] * by),
                                                            __float_as_uint(of_rows[1][j] * by),
                                                            __float_as_uint(of_rows[2][j] * by),
                                                            __float_as_uint(of_rows[3][j] * by)));
                            else
#pragma unroll
                                for (int i = 0; i < ROWS; ++i) store_shared_float(to + i * 4, of_rows[i][j] * by);
                        }
                    });
        }
        __syncwarp();
    }
    fill([] {}); // the last stage: its tile description ends the consumers' loops
    __syncwarp();
}
