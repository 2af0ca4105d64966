#pragma once
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/groups.cuh"

template <int TOKENS_, int WEIGHTS_, int TOKEN_WARPS_, int WEIGHT_WARPS_, int STEP_, int STAGES_, int ACTIVATION_>
struct MmaBlock {
    static constexpr int TOKENS = TOKENS_, WEIGHTS = WEIGHTS_, TOKEN_WARPS = TOKEN_WARPS_, WEIGHT_WARPS = WEIGHT_WARPS_;
    static constexpr int STEP = STEP_, STAGES = STAGES_, ACTIVATION = ACTIVATION_;
    static constexpr bool GATED = is_gated(ACTIVATION), HALVES = has_halves(ACTIVATION);
    static constexpr int THREADS = TOKEN_WARPS * WEIGHT_WARPS * 32;
    static constexpr int M = TOKENS / TOKEN_WARPS / 16, N = WEIGHTS / WEIGHT_WARPS / 8; // MMA tiles of a warp
    static constexpr int OUT = GATED ? N / 2 : N; // MMA tiles of a warp's results along n
    static_assert(M * TOKEN_WARPS * 16 == TOKENS && N * WEIGHT_WARPS * 8 == WEIGHTS && N % (GATED ? 4 : 2) == 0, "");
};

// common/mma.cuh explains `row` and `pair`.
template <class Block> struct MmaThread {
    const int thread = threadIdx.x, lane = thread % 32;
    const int row = lane / 4, pair = lane % 4;
    const int token_warp = thread / 32 / Block::WEIGHT_WARPS, weight_warp = thread / 32 % Block::WEIGHT_WARPS;
};

// The tile of a block. If gated, 8 gate rows alternate with their 8 up rows in the tile's weights, so that one lane has
// the sums of a gate and of its up.
template <class Block> struct MmaTile {
    const GemmParams& p;
    const GroupTile& group;
    const int weight_tiles;
    int first_row, first_column, end; // first_column: of the result; end: of the group's rows
    int half;                         // columns of the result

    __device__ __forceinline__ MmaTile(const GemmParams& p, const GroupTile& group, int weight_tiles)
        : p(p), group(group), weight_tiles(weight_tiles) {
        locate();
        half = Block::GATED ? p.n / 2 : p.n;
    }

    // Find the tile by the block index. A band is BAND_TILES token tiles times all weight tiles. Bands are computed one
    // after the other, so that concurrent blocks share tokens and weights in L2.
    __device__ __forceinline__ void locate() {
        constexpr int BAND_TILES = 8;
        const int within = blockIdx.x - group.before * weight_tiles, band = within / (BAND_TILES * weight_tiles);
        const int height = min(group.tiles - band * BAND_TILES, BAND_TILES);
        const int in_band = within - band * BAND_TILES * weight_tiles, weight_tile = in_band / height;
        first_row = group.begin + (band * BAND_TILES + in_band - weight_tile * height) * Block::TOKENS;
        first_column = weight_tile * (Block::GATED ? Block::WEIGHTS / 2 : Block::WEIGHTS);
        end = group.end;
    }

    // Return the row of `a` for row `r` of the tile, clamped to the group's last row.
    __device__ __forceinline__ int token_of(int r) const {
        const int mine = min(first_row + r, end - 1);
        return source_of(p, mine);
    }

    // Return the row of the expert's weights for row `r` of the tile's weights, clamped to the last row.
    __device__ __forceinline__ int weight_of(int r) const {
        if constexpr (!Block::GATED) return min(first_column + r, p.n - 1);
        if constexpr (!Block::HALVES) return r / 8 % 2 + min(first_column + r / 16 * 8 + r % 8, half - 1) * 2;
        return r / 8 % 2 * half + min(first_column + r / 16 * 8 + r % 8, half - 1);
    }
};

template <class Block> using MmaSums = float[Block::M][Block::N][4];

template <int M, int N> __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;
}
