// Traits of gemm_mma (MmaTraitsOf) for tokens and weights of 16 bits or of 8 bits.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "moe_gemm/mma_copies.cuh"

// Layout of a stage. Chunk c (16 bytes) of row r is stored at chunk `c ^ (r % 8)`, or `c ^ (r / 2 % 4)` in rows of 64
// bytes, so that the chunks of 8 rows that ldmatrix reads at once are in different banks.
template <class Block_, int ELEMENT_BYTES, int SCALE_BYTES> struct LdmatrixLayout {
    using Block = Block_;
    static constexpr int A_ROW_BYTES = Block::STEP * ELEMENT_BYTES, B_ROW_BYTES = A_ROW_BYTES;
    static constexpr int B = Block::TOKENS * A_ROW_BYTES, SCALES = B + Block::WEIGHTS * B_ROW_BYTES;
    static constexpr int BYTES = (SCALES + SCALE_BYTES + 127) / 128 * 128;
    static_assert(ELEMENT_BYTES == 1 ? Block::STEP == 128 : Block::STEP == 32 || Block::STEP == 64, "");

    static __device__ __forceinline__ int a_at(int row, int chunk) {
        chunk ^= A_ROW_BYTES == 128 ? row & 7 : row >> 1 & 3;
        return row * A_ROW_BYTES + chunk * 16;
    }
    static __device__ __forceinline__ int b_at(int row, int chunk) { return a_at(row, chunk); }

    // Row sizes in memory.
    static __device__ __forceinline__ long long a_bytes(int k) { return (long long)k * ELEMENT_BYTES; }
    static __device__ __forceinline__ long long b_bytes(int k) { return a_bytes(k); }
};

// Fragments of a warp's tokens and weights, with 32 bytes along k of each row.
template <class Block> struct MmaFragments {
    unsigned a[Block::M][4], b[Block::N / 2][4];
};

template <typename T> struct ProductsOf16Bits {
    template <class Block>
    static __device__ __forceinline__ void multiply(MmaSums<Block>& sums, const MmaFragments<Block>& fragments) {
#pragma unroll
        for (int n = 0; n < Block::N; ++n)
#pragma unroll
            for (int m = 0; m < Block::M; ++m)
                mma_m16n8k16<T>(sums[m][n], fragments.a[m], fragments.b[n / 2][n % 2 * 2],
                                fragments.b[n / 2][n % 2 * 2 + 1]);
    }
};

// Multiplies e4m3 elements, after an exact conversion to float16. Four neighbouring elements along k become two pairs,
// one for each half of an MMA's 16 elements, in the same order for tokens and weights.
struct ProductsOf8Bits {
    template <class Block>
    static __device__ __forceinline__ void multiply(MmaSums<Block>& sums, const MmaFragments<Block>& fragments) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned a[Block::M][4];
#pragma unroll
            for (int m = 0; m < Block::M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    unsigned pairs[2];
                    to_halves<__nv_fp8_e4m3>(pairs, fragments.a[m][i * 2 + j]);
                    a[m][j] = pairs[0], a[m][j + 2] = pairs[1];
                }
#pragma unroll
            for (int n = 0; n < Block::N; ++n) {
                unsigned b[2];
                to_halves<__nv_fp8_e4m3>(b, fragments.b[n / 2][n % 2 * 2 + i]);
#pragma unroll
                for (int m = 0; m < Block::M; ++m) mma_m16n8k16<__half>(sums[m][n], a[m], b[0], b[1]);
            }
        }
    }
};

template <class Block> struct PlainSums {
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void read_scales(const char*, const MmaThread<Block>&) {}
    __device__ __forceinline__ MmaSums<Block>& target(MmaSums<Block>& totals) { return totals; }
    __device__ __forceinline__ void end(MmaSums<Block>&) {}
};

// FP8 with block scales: the sums of a step along k are multiplied by the step's scales, and added to the totals.
template <class Block> struct BlockScaledSums {
    MmaSums<Block> sums;
    float a_scales[Block::M][2], b_scales[Block::N];

    __device__ __forceinline__ void begin() { clear(sums); }

    // `from` holds one scale per token, then one scale per 8 rows of weights.
    __device__ __forceinline__ void read_scales(const char* from, const MmaThread<Block>& me) {
        const float* const scales = reinterpret_cast<const float*>(from);
#pragma unroll
        for (int m = 0; m < Block::M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) a_scales[m][j] = scales[(me.token_warp * Block::M + m) * 16 + j * 8 + me.row];
#pragma unroll
        for (int n = 0; n < Block::N; ++n) b_scales[n] = scales[Block::TOKENS + me.weight_warp * Block::N + n];
    }

    __device__ __forceinline__ MmaSums<Block>& target(MmaSums<Block>&) { return sums; }

    __device__ __forceinline__ void end(MmaSums<Block>& totals) {
#pragma unroll
        for (int m = 0; m < Block::M; ++m)
#pragma unroll
            for (int n = 0; n < Block::N; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) totals[m][n][i] += sums[m][n][i] * (a_scales[m][i / 2] * b_scales[n]);
    }
};

// Mainloop. A k block is 32 bytes of each row. The fragments of the next k block are loaded before the current one is
// multiplied.
template <class Traits> struct LdmatrixProducts {
    using Block = typename Traits::Block;
    using Fragments = MmaFragments<Block>;
    static constexpr int K_BLOCKS = Traits::A_ROW_BYTES / 32;
    static constexpr unsigned LAST_STAGE = (Block::STAGES - 1) * Traits::BYTES;

    Fragments fragments[2];
    typename Traits::Sums sums;

    static __device__ __forceinline__ void load(Fragments& to, unsigned a_at, unsigned b_at, unsigned stage_at,
                                                int k_block) {
        // Each XOR changes only address bits of the chunk index.
        const unsigned a = (a_at + stage_at) ^ k_block * 32, b = (b_at + stage_at) ^ k_block * 32;
        const unsigned b_step = b_at + stage_at + k_block * 16 * Traits::B_ROW_BYTES; // TRANSPOSED: 16 rows
#pragma unroll
        for (int m = 0; m < Block::M; ++m) ldmatrix(to.a[m], a + m * 16 * Traits::A_ROW_BYTES);
#pragma unroll
        for (int n = 0; n < Block::N / 2; ++n) {
            if constexpr (IS_TRANSPOSED<Traits>)
                ldmatrix_trans(to.b[n], b_step ^ n * 32);
            else
                ldmatrix(to.b[n], b + n * 16 * Traits::B_ROW_BYTES);
        }
    }

    // Run the mainloop. The copies of the first `STAGES - 1` steps are already started.
    __device__ __forceinline__ void add_to(MmaSums<Block>& totals, MmaCopies<Traits>& copies,
                                           const MmaThread<Block>& me, const char* shared) {
        const int a_row = me.token_warp * Block::M * 16 + me.lane % 16;
        const unsigned a_at = copies.shared_at + Traits::a_at(a_row, me.lane / 16);
        const int b_row = me.weight_warp * Block::N * 8 + me.lane % 8 + me.lane / 16 * 8;
        const int b_place = IS_TRANSPOSED<Traits> ? Traits::b_at(me.lane % 16, me.weight_warp * Block::N + me.lane / 16)
                                                  : Traits::b_at(b_row, me.lane / 8 % 2);
        const unsigned b_at = copies.shared_at + Traits::B + b_place;
        cp_async_wait_group<Block::STAGES - 2>();
        __syncthreads();
        unsigned stage_at = 0;
        load(fragments[0], a_at, b_at, stage_at, 0);
#pragma unroll 1
        for (int step = 0; step < copies.steps; ++step) {
            sums.begin();
#pragma unroll
            for (int k_block = 0; k_block < K_BLOCKS; ++k_block) {
                if (k_block == K_BLOCKS - 1) {
                    sums.read_scales(shared + stage_at + Traits::SCALES, me);
                    // After this barrier the next stage is complete, and the current stage may be overwritten.
                    cp_async_wait_group<Block::STAGES - 2>();
                    __syncthreads();
                    stage_at = stage_at == LAST_STAGE ? 0 : stage_at + Traits::BYTES;
                }
                load(fragments[(k_block + 1) % 2], a_at, b_at, stage_at, (k_block + 1) % K_BLOCKS);
                if (k_block == 0)
                    copies.start(step + Block::STAGES - 1, stage_at == 0 ? LAST_STAGE : stage_at - Traits::BYTES);
                Traits::template multiply<Block>(sums.target(totals), fragments[k_block % 2]);
            }
            sums.end(totals);
        }
    }
};

// Copies one scale per token, and one per 8 rows of weights. The 8 rows are in the same block of 128 rows.
template <class Block> struct BlockScaleCopies {
    static_assert(Block::TOKENS <= Block::THREADS && Block::WEIGHTS / 8 <= Block::THREADS, "");
    int thread;
    const float *a_from, *b_from;

    __device__ __forceinline__ void begin(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>& me) {
        thread = me.thread;
        const int steps = (p.k + Block::STEP - 1) / Block::STEP;
        a_from = p.a_scale + (long long)tile.token_of(thread) * steps;
        b_from = static_cast<const float*>(p.b_scale) +
                 ((long long)tile.group.expert * ((p.n + 127) / 128) + tile.weight_of(thread * 8) / 128) * steps;
    }

    __device__ __forceinline__ void start(int step, unsigned to) {
        if (thread < Block::TOKENS) copy_part_async<4>(to + thread * 4, a_from + step, 4);
        if (thread < Block::WEIGHTS / 8) copy_part_async<4>(to + (Block::TOKENS + thread) * 4, b_from + step, 4);
    }
};

template <class Block> struct NoFactors {
    __device__ __forceinline__ NoFactors(const GemmParams&, const MmaTile<Block>&, const MmaThread<Block>&,
                                         MmaSums<Block>&) {}
    __device__ __forceinline__ float of_row(int) const { return 1.f; }
};

// Row scales. The constructor multiplies the sums by the weights' scales; `of_row` returns the scale of a token.
template <class Block> struct RowFactors {
    const GemmParams& p;
    const MmaTile<Block>& tile;

    __device__ __forceinline__ RowFactors(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>& me,
                                          MmaSums<Block>& sums)
        : p(p), tile(tile) {
        const float* const expert_scales =
            static_cast<const float*>(p.b_scale) + (long long)tile.group.expert * (p.b_scale_stride ? p.n : 1);
#pragma unroll
        for (int n = 0; n < Block::N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = tile.weight_of((me.weight_warp * Block::N + n) * 8 + me.pair * 2 + i);
                const float scale = expert_scales[(long long)column * p.b_scale_stride];
#pragma unroll
                for (int m = 0; m < Block::M; ++m) sums[m][n][i] *= scale, sums[m][n][i + 2] *= scale;
            }
    }

    __device__ __forceinline__ float of_row(int r) const {
        if constexpr (Block::ACTIVATION & EXPERT_SCALE) return p.a_scale[tile.group.expert];
        return p.a_scale[(long long)tile.token_of(r) * p.a_scale_stride];
    }
};

template <typename T, class Block> struct PlainTraits : LdmatrixLayout<Block, 2, 0>, ProductsOf16Bits<T> {
    using ScaleCopies = NoScaleCopies<Block>;
    using Sums = PlainSums<Block>;
    using Products = LdmatrixProducts<PlainTraits>;
    using Factors = NoFactors<Block>;
};

// FP8 with row scales.
template <class Block> struct Fp8RowTraits : LdmatrixLayout<Block, 1, 0>, ProductsOf8Bits {
    using ScaleCopies = NoScaleCopies<Block>;
    using Sums = PlainSums<Block>;
    using Products = LdmatrixProducts<Fp8RowTraits>;
    using Factors = RowFactors<Block>;
};

// FP8 with block scales.
template <class Block>
struct Fp8BlockTraits : LdmatrixLayout<Block, 1, (Block::TOKENS + Block::WEIGHTS / 8) * 4>, ProductsOf8Bits {
    using ScaleCopies = BlockScaleCopies<Block>;
    using Sums = BlockScaledSums<Block>;
    using Products = LdmatrixProducts<Fp8BlockTraits>;
    using Factors = NoFactors<Block>;
};
