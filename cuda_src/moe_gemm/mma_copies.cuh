// Load phase of gemm_mma: cp.async copies from global to shared memory.
#pragma once
#include "common/mma.cuh"
#include "moe_gemm/mma_block.cuh"
#include "moe_gemm/shared_memory.cuh"

// True if the weights of a form (the class for one operand format, see MmaFormOf) are [experts, k, n] in memory. If
// true, a row of weights in shared memory belongs to one index along k.
template <class Form> constexpr bool IS_TRANSPOSED = false;

// The global-to-shared copies that one thread issues. In each step along k it copies one 16-byte chunk of every
// A_ROWS-th row of tokens, one chunk of every B_ROWS-th row of weights, and some of the scales. BY_STEPS: weights are
// [experts, k, n].
template <class Form> struct MmaCopies {
    using Block = typename Form::Block;
    static constexpr int TOKENS = Block::TOKENS, WEIGHTS = Block::WEIGHTS, THREADS = Block::THREADS;
    static constexpr bool GATED = Block::GATED, HALVES = Block::HALVES, BY_STEPS = IS_TRANSPOSED<Form>;
    static constexpr int A_CHUNKS = Form::A_LINE / 16, A_ROWS = THREADS / A_CHUNKS;
    static constexpr int B_CHUNKS = Form::B_LINE / 16, B_ROWS = THREADS / B_CHUNKS;
    static constexpr int B_LINES = BY_STEPS ? Block::STEP : WEIGHTS; // rows of weights in a stage
    static constexpr int A_COPIES = (TOKENS + A_ROWS - 1) / A_ROWS, B_COPIES = (B_LINES + B_ROWS - 1) / B_ROWS;
    // Distance, in rows of the expert's weights, between two successive copies of this thread. With HALVES, B_ROWS rows
    // of the tile are B_ROWS / 2 gate rows and their up rows.
    static constexpr int B_APART = HALVES ? B_ROWS / 2 : B_ROWS;
    static_assert(A_ROWS % 8 == 0 && B_ROWS % (GATED && !BY_STEPS ? 16 : 8) == 0, "");
    static_assert(!BY_STEPS || B_LINES % B_ROWS == 0, "");

    // Rows of `a` that this thread copies. The array is a variable of the kernel, not a member, because a member array
    // would cost registers: the compiler splits a struct with an array into registers only after it has unrolled all
    // loops over the array.
    int (&tokens)[A_COPIES];
    const unsigned shared_at;
    const int a_row, a_chunk, b_row, b_chunk;
    const unsigned a_to, b_to;
    const long long a_pitch, b_pitch; // bytes of a row in memory
    const char *b_from, *a_from;      // the thread's chunk of the next step, in row 0
    int weight, last_weight;          // first row of weights, last valid row; BY_STEPS: indices along k
    int steps;
    typename Form::ScaleCopies scales;

    __device__ __forceinline__ MmaCopies(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>& me,
                                         unsigned shared_at, int (&tokens)[A_COPIES])
        : tokens(tokens), shared_at(shared_at), a_row(me.thread / A_CHUNKS), a_chunk(me.thread % A_CHUNKS),
          b_row(me.thread / B_CHUNKS), b_chunk(me.thread % B_CHUNKS), a_to(shared_at + Form::a_at(a_row, a_chunk)),
          b_to(shared_at + Form::B + Form::b_at(b_row, b_chunk)), a_pitch(Form::a_bytes(p.k)),
          b_pitch(Form::b_bytes(BY_STEPS ? p.n : p.k)) {
        a_from = static_cast<const char*>(p.a) + a_chunk * 16;
        b_from = static_cast<const char*>(p.b) + tile.group.expert * b_pitch * (BY_STEPS ? p.k : p.n);
        if constexpr (BY_STEPS)
            b_from += b_row * b_pitch + Form::b_column(tile, b_chunk) * 2;
        else
            b_from += b_chunk * 16;
#pragma unroll
        for (int i = 0; i < A_COPIES; ++i) tokens[i] = tile.token_of(a_row + i * A_ROWS);
        const int half = tile.half;
        const int side = b_row / 8 % 2, column = tile.first_column + b_row / 16 * 8 + b_row % 8;
        if constexpr (BY_STEPS)
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

    // Start the copies of a step to the stage at byte `to` of shared memory. Call this for the steps in order. A call
    // for a step past the last one copies nothing, but it commits a cp.async group too. Elements past k become 0.
    __device__ __forceinline__ void start(int step, unsigned to) {
        if (step < steps) {
            const int a_left = int(a_pitch) - a_chunk * 16 - step * Form::A_LINE; // bytes left in the row
            const int b_left = int(b_pitch) - b_chunk * 16 - step * Form::B_LINE;
#pragma unroll
            for (int i = 0; i < A_COPIES; ++i)
                if (TOKENS % A_ROWS == 0 || a_row + i * A_ROWS < TOKENS)
                    copy_part_async<16>(to + a_to + i * A_ROWS * Form::A_LINE, a_from + tokens[i] * a_pitch,
                                        a_left > 0 ? 16 : 0);
#pragma unroll
            for (int i = 0; i < B_COPIES; ++i)
                if constexpr (BY_STEPS)
                    copy_part_async<16>(to + b_to + i * B_ROWS * Form::B_LINE, b_from + i * B_ROWS * b_pitch,
                                        step * Block::STEP + weight + i * B_ROWS <= last_weight ? 16 : 0);
                else if (WEIGHTS % B_ROWS == 0 || b_row + i * B_ROWS < WEIGHTS)
                    copy_part_async<16>(to + b_to + i * B_ROWS * Form::B_LINE,
                                        b_from + min(weight + i * B_APART, last_weight) * b_pitch, b_left > 0 ? 16 : 0);
            a_from += Form::A_LINE, b_from += BY_STEPS ? Block::STEP * b_pitch : Form::B_LINE;
            scales.start(step, shared_at + to + Form::SCALES);
        }
        cp_async_commit_group();
    }
};

// ScaleCopies of a form whose scales do not change along k. It copies nothing.
template <class Block> struct NoScaleCopies {
    __device__ __forceinline__ void begin(const GemmParams&, const MmaTile<Block>&, const MmaThread<Block>&) {}
    __device__ __forceinline__ void start(int, unsigned) {}
};
