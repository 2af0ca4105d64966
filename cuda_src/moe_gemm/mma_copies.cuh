// cp.async copies of gemm_mma from global to shared memory.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/mma_block.cuh"
#include "moe_gemm/shared_memory.cuh"

// True if the weights are [experts, k, n] in memory. A row of weights in shared memory then has one index along k.
template <class Traits> constexpr bool IS_TRANSPOSED = false;

// The copies of one thread in a step along k: a 16-byte chunk of every A_ROWS-th row of tokens and of every B_ROWS-th
// row of weights, and some scales.
template <class Traits> struct MmaCopies {
    using Block = typename Traits::Block;
    static constexpr int TOKENS = Block::TOKENS, WEIGHTS = Block::WEIGHTS, THREADS = Block::THREADS;
    static constexpr bool GATED = Block::GATED, HALVES = Block::HALVES, TRANSPOSED_B = IS_TRANSPOSED<Traits>;
    static constexpr int A_CHUNKS = Traits::A_ROW_BYTES / 16, A_ROWS = THREADS / A_CHUNKS;
    static constexpr int B_CHUNKS = Traits::B_ROW_BYTES / 16, B_ROWS = THREADS / B_CHUNKS;
    static constexpr int B_STAGE_ROWS = TRANSPOSED_B ? Block::STEP : WEIGHTS; // rows of weights in a stage
    static constexpr int A_COPIES = (TOKENS + A_ROWS - 1) / A_ROWS, B_COPIES = (B_STAGE_ROWS + B_ROWS - 1) / B_ROWS;
    // Rows of the expert's weights from one copy of this thread to the next. With HALVES, half of the tile's rows are
    // gates, so B_ROWS rows of the tile are only `B_ROWS / 2` gate rows and their ups.
    static constexpr int B_STRIDE = HALVES ? B_ROWS / 2 : B_ROWS;
    static_assert(A_ROWS % 8 == 0 && B_ROWS % (GATED && !TRANSPOSED_B ? 16 : 8) == 0, "");
    static_assert(!TRANSPOSED_B || B_STAGE_ROWS % B_ROWS == 0, "");

    // Rows of `a` that this thread copies. This is a reference, because an array as a member would cost registers: the
    // compiler splits a struct with an array into registers only after it has unrolled all loops over the array.
    int (&tokens)[A_COPIES];
    const unsigned shared_at;
    const int a_row, a_chunk, b_row, b_chunk;
    const unsigned a_to, b_to;
    const long long a_pitch, b_pitch; // row sizes in memory
    const char *b_from, *a_from;      // the thread's chunk of the next step, in row 0
    int weight, last_weight;          // first and last valid row of weights; TRANSPOSED_B: indices along k
    int steps;
    typename Traits::ScaleCopies scales;

    __device__ __forceinline__ MmaCopies(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>& me,
                                         unsigned shared_at, int (&tokens)[A_COPIES])
        : tokens(tokens), shared_at(shared_at), a_row(me.thread / A_CHUNKS), a_chunk(me.thread % A_CHUNKS),
          b_row(me.thread / B_CHUNKS), b_chunk(me.thread % B_CHUNKS), a_to(shared_at + Traits::a_at(a_row, a_chunk)),
          b_to(shared_at + Traits::B + Traits::b_at(b_row, b_chunk)), a_pitch(Traits::a_bytes(p.k)),
          b_pitch(Traits::b_bytes(TRANSPOSED_B ? p.n : p.k)) {
        a_from = static_cast<const char*>(p.a) + a_chunk * 16;
        b_from = static_cast<const char*>(p.b) + tile.group.expert * b_pitch * (TRANSPOSED_B ? p.k : p.n);
        if constexpr (TRANSPOSED_B)
            b_from += b_row * b_pitch + Traits::b_column(tile, b_chunk) * 2;
        else
            b_from += b_chunk * 16;
#pragma unroll
        for (int i = 0; i < A_COPIES; ++i) tokens[i] = tile.token_of(a_row + i * A_ROWS);
        const int half = tile.half;
        const int side = b_row / 8 % 2, column = tile.first_column + b_row / 16 * 8 + b_row % 8;
        if constexpr (TRANSPOSED_B)
            weight = b_row, last_weight = p.k - 1;
        else if constexpr (HALVES)
            weight = side * half + column, last_weight = (side + 1) * half - 1;
        else if constexpr (GATED)
            weight = column * 2 + side, last_weight = p.n - 2 + side;
        else
            weight = tile.first_column + b_row, last_weight = p.n - 1;
        steps = (p.k + Block::STEP - 1) / Block::STEP;
        scales.begin(p, tile, me);
    }

    // Start the copies of a step to the stage at byte `to`. A step past the last only commits an empty cp.async group.
    // Elements past k become 0.
    __device__ __forceinline__ void start(int step, unsigned to) {
        if (step < steps) {
            const int a_left = int(a_pitch) - a_chunk * 16 - step * Traits::A_ROW_BYTES; // bytes
            const int b_left = int(b_pitch) - b_chunk * 16 - step * Traits::B_ROW_BYTES;
#pragma unroll
            for (int i = 0; i < A_COPIES; ++i)
                if (TOKENS % A_ROWS == 0 || a_row + i * A_ROWS < TOKENS)
                    copy_part_async<16>(to + a_to + i * A_ROWS * Traits::A_ROW_BYTES, a_from + tokens[i] * a_pitch,
                                        a_left > 0 ? 16 : 0);
#pragma unroll
            for (int i = 0; i < B_COPIES; ++i)
                if constexpr (TRANSPOSED_B)
                    copy_part_async<16>(to + b_to + i * B_ROWS * Traits::B_ROW_BYTES, b_from + i * B_ROWS * b_pitch,
                                        step * Block::STEP + weight + i * B_ROWS <= last_weight ? 16 : 0);
                else if (WEIGHTS % B_ROWS == 0 || b_row + i * B_ROWS < WEIGHTS)
                    copy_part_async<16>(to + b_to + i * B_ROWS * Traits::B_ROW_BYTES,
                                        b_from + min(weight + i * B_STRIDE, last_weight) * b_pitch,
                                        b_left > 0 ? 16 : 0);
            a_from += Traits::A_ROW_BYTES, b_from += TRANSPOSED_B ? Block::STEP * b_pitch : Traits::B_ROW_BYTES;
            scales.start(step, shared_at + to + Traits::SCALES);
        }
        cp_async_commit_group();
    }
};

// Copies nothing, for scales that do not change along k.
template <class Block> struct NoScaleCopies {
    __device__ __forceinline__ void begin(const GemmParams&, const MmaTile<Block>&, const MmaThread<Block>&) {}
    __device__ __forceinline__ void start(int, unsigned) {}
};
