// How the eight warps of a block of attend_mma share the work, and what is a thread's part of it.
//
// The ROWS query rows of a block are divided among GROUPS groups of MEMBERS warps. The warps of a group divide the
// scores of its rows with a tile of TILE tokens into HALVES of the tokens times DEPTHS of the dimensions: a warp that has
// a larger piece of the product loads less for each multiplication. The partial sums over the dimensions meet in shared
// memory, where each warp sums up and exponentiates the few tokens that it owns. The product with the values is divided
// by columns of the output.
//
// Two groups do not wait for each other: while one exponentiates, the other keeps the tensor cores busy. Where the rows
// are too few for two groups, both have all rows and take the tiles in turn, each from a ring of stages of its own
// (RINGS == 2); their results are merged at the end of a visit.
//
// A token of a tile in shared memory is a row of 16-byte chunks. They are permuted within each 128 bytes (swizzled), so
// that ldmatrix finds the same chunk of eight tokens in eight different groups of banks. Queries, partial scores and
// probabilities lie as fragments of mma.sync, lane by lane.
//
// An 8-bit tile lies as in the cache: 656 bytes are an odd number of chunks, so eight tokens are in different banks
// without a permutation. A warp converts the numbers that it needs to float16 in registers, which is exact. Both products
// leave the scales out: a warp's dimensions in the first product, and its columns in the second, are the 128 of one
// scale. Scores are multiplied by it after the product. Of the probabilities there is a copy for each scale, multiplied
// by it. In the first product a warp also has 16 dimensions of the rotary part, in the format of the queries.
#pragma once
#include "common/mma.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"

// The sizes that follow from the template arguments of attend_mma. BYTES is the shared memory. With G = GROUPS and
// H = HALVES it is
//
//   RINGS * STAGES * (tile + 32) + ROWS / 16 * (36 - KEPT_STEPS * 4 / (G H / 2)) * 512 + 4096 * SENT * M
//   + G * GROUP_ROWS * TILE * 2 * SCALES + GROUP_ROWS * 64,
//
// where a tile is TILE * 1152 bytes (also if DIM == 0), or TILE * 656. What fits, as ROWS, TILE, STAGES:
//
//   shared memory          227 KiB       163 KiB       99 KiB
//   16-bit cache           16, 64, 2     16, 64, 2     16, 32, 2
//                          32, 64, 2     32, 32, 3     32, 32, 2
//                          64, 64, 2     64, 32, 2     -
//   8-bit cache            16, 64, 2     16, 32, 3     16, 16, 4
//                          32, 64, 4     32, 64, 2     32, 32, 3
//                          64, 32, 4     64, 32, 2     -
template <typename T_, bool FP8_, int ROWS_, int TILE_, int STAGES_, int DIM_, int DIM_V_, bool EXTRA_ = false>
struct Form {
    using T = T_;
    static constexpr bool EXTRA = EXTRA_;
    // An 8-bit cache of 512 dimensions is converted while it is copied; all else is as with a 16-bit cache.
    static constexpr bool CONVERTS = FP8_ && DIM_ == 512, FP8 = FP8_ && !CONVERTS;
    static constexpr int ROWS = ROWS_, TILE = TILE_, STAGES = STAGES_, DIM = DIM_, DIM_V = DIM_V_;

    static constexpr int WARPS = 8, GROUPS = FP8 || ROWS == 64 ? 2 : 1, MEMBERS = WARPS / GROUPS;
    static constexpr int RINGS = FP8 && ROWS == 16 ? 2 : 1;
    static constexpr int GROUP_ROWS = ROWS / GROUPS * RINGS, M = GROUP_ROWS / 16; // fragments of a group's rows
    static constexpr int HALVES = FP8 ? 1 : 2, DEPTHS = MEMBERS / HALVES;
    static constexpr int N = TILE / HALVES / 8; // fragments of a warp's tokens
    // Fragments of tokens that a warp exponentiates, the warps of a half that do so, and the fragments of partial scores
    // that a warp sends to others.
    static constexpr int OWN = N > DEPTHS ? N / DEPTHS : 1, OWNERS = N / OWN, SENT = N >= DEPTHS ? N - OWN : N;

    static constexpr int DIMS = DIM ? DIM : 576, DIMS_V = DIM_V ? DIM_V : 576;
    static constexpr int LINES = DIMS / 64; // of 128 bytes, which are 64 dimensions
    // Steps of 16 dimensions of a warp: those of whole lines, then its share of the last line if LINES is odd.
    static constexpr int STEPS = LINES * 4 / DEPTHS, LINE_STEPS = LINES / DEPTHS * 4, REST_STEPS = STEPS - LINE_STEPS;
    // Steps whose queries stay in registers; those of the others are in shared memory.
    static constexpr int KEPT_STEPS = M == 1 || GROUPS == 1 ? STEPS : FP8 ? 0 : 4;
    // Fragments of a warp's columns of the output: those of whole lines, then its share of the last line.
    static constexpr int V = DIMS_V / 8 / MEMBERS, LINE_V = DIMS_V / 64 / MEMBERS * 8, REST_V = V - LINE_V;

    // A token of an 8-bit cache: 512 numbers of a byte, a float32 scale for each 128 of them, the rotary part.
    static constexpr int LATENT_DIMS = 512, SCALE_DIMS = 128, ROTARY_OFFSET = 528;
    static constexpr int SCALES = FP8 ? LATENT_DIMS / SCALE_DIMS : 1; // copies of the probabilities
    static constexpr int PITCH = FP8 ? 656 : DIMS * 2, TILE_BYTES = TILE * PITCH;

    static constexpr bool APART = GROUPS == 2;              // groups do not wait for each other
    static constexpr int COPIERS = APART ? MEMBERS : WARPS; // warps that copy tiles
    static constexpr int COPIED = TILE / COPIERS;           // tokens of each; they lie in the same page
    static constexpr bool ROW_COPIES = FP8 && HAS_ROW_COPIES;
    static constexpr int ARRIVALS_OF_TILE = ROW_COPIES ? COPIERS : COPIERS * 33; // at its barrier

    // Offsets in shared memory.
    static constexpr int QUERIES = RINGS * STAGES * TILE_BYTES;
    static constexpr int PARTIAL_SCORES = QUERIES + ROWS / 16 * DEPTHS * (STEPS - KEPT_STEPS) * 512;
    static constexpr int PROBABILITIES = PARTIAL_SCORES + WARPS * SENT * M * 512;
    static constexpr int PROBABILITY_BYTES = GROUP_ROWS * TILE * 2; // of a copy
    static constexpr int MAXIMA = PROBABILITIES + GROUPS * SCALES * PROBABILITY_BYTES;
    static constexpr int SUMS = MAXIMA + WARPS * GROUP_ROWS * 4;
    static constexpr int ARRIVALS = SUMS + WARPS * GROUP_ROWS * 4;
    static constexpr int BARRIERS = ARRIVALS + RINGS * STAGES * 16;
    static constexpr int BYTES = BARRIERS + RINGS * STAGES * 16;

    // Fragments of the output that one group gives the other at once, in place of partial scores and probabilities.
    static constexpr int GIVEN = MAXIMA - PARTIAL_SCORES >= V * MEMBERS * 512       ? V
                                 : MAXIMA - PARTIAL_SCORES >= V / 2 * MEMBERS * 512 ? V / 2
                                                                                    : V / 4;
    static_assert(RINGS == 1 || (M == 1 && MAXIMA - PARTIAL_SCORES >= GIVEN * MEMBERS * 512), "");

    static_assert(DIMS == LINES * 64 && LINES * 4 % DEPTHS == 0 && LINES % DEPTHS < 2 && N % 2 == 0, "");
    static_assert(DIMS_V % 64 == 0 && REST_V < 2 && COPIED % 4 == 0, "");
    static_assert(!CONVERTS || (EXTRA && DIM_V == 512), "");
    static_assert(!FP8 || (DIM == 576 && DIM_V == 512 && DEPTHS == SCALES && MEMBERS == SCALES), "");

    // The sizes of a head.
    static __device__ __forceinline__ int head_dim(const Params& p) { return DIM ? DIM : p.head_dim; }
    static __device__ __forceinline__ int head_dim_v(const Params& p) { return DIM_V ? DIM_V : p.head_dim_v; }

    // The first 16-byte chunk of the 16 dimensions of a step.
    static __device__ __forceinline__ int chunk_of_step(int depth, int step) {
        return step < LINE_STEPS ? depth * LINE_STEPS * 2 + step * 2
                                 : (LINES - 1) * 8 + (depth * REST_STEPS + step - LINE_STEPS) * 2;
    }

    // The first column of fragment n of a warp's output.
    static __device__ __forceinline__ int column_of(int member, int n) {
        return n < LINE_V ? (member * LINE_V + n) * 8 : DIMS_V - 64 + (member * REST_V + n - LINE_V) * 8;
    }

    // The offset of a chunk of a token in a 16-bit tile.
    static __device__ __forceinline__ int chunk_at(int token, int chunk) {
        return token * PITCH + (chunk ^ (token & 7)) * 16;
    }
};

// `Type` is A if the condition holds, else B.
template <bool CONDITION, typename A, typename B> struct Choose {
    using Type = A;
};
template <typename A, typename B> struct Choose<false, A, B> {
    using Type = B;
};

// The numbered barrier `id` of a block, for `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same barrier; whether `mine` holds for any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
    unsigned any;
    asm volatile("{ .reg .pred mine, any;\n"
                 "  setp.ne.u32 mine, %1, 0;\n"
                 "  bar.red.or.pred any, %2, %3, mine;\n"
                 "  selp.u32 %0, 1, 0, any; }"
                 : "=r"(any)
                 : "r"(unsigned(mine)), "r"(id), "r"(threads)
                 : "memory");
    return any;
}

// A thread's place in the block. The phases take it as an argument, and Params too: a struct that keeps the address of
// either hides from the compiler that they are constant.
template <typename F> struct Thread {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, pair = lane % 4; // in a fragment
    const int group = warp / F::MEMBERS, member = warp % F::MEMBERS;
    const int half = member / F::DEPTHS, depth = member % F::DEPTHS;
    const int kv_head = blockIdx.y, block_row = blockIdx.x * F::ROWS; // the first row of the block

    // Whether its warp has tokens to exponentiate.
    __device__ __forceinline__ bool owns() const { return depth < F::OWNERS; }

    // The first row of its group.
    __device__ __forceinline__ int first_row() const { return block_row + (F::RINGS == 2 ? 0 : group * F::GROUP_ROWS); }

    // The row, in its group, of half j of fragment m.
    __device__ __forceinline__ int row_of(int m, int j) const { return m * 16 + j * 8 + row; }

    // The first stage of its group's ring, among all stages.
    __device__ __forceinline__ int first_stage() const { return F::RINGS == 2 ? group * F::STAGES : 0; }

    // Where its group's tiles begin in a visit.
    __device__ __forceinline__ int first_token() const { return F::RINGS == 2 ? group * F::TILE : 0; }

    __device__ __forceinline__ void group_barrier() const { named_barrier(1 + group, F::MEMBERS * 32); }

    __device__ __forceinline__ bool group_barrier_any(bool mine) const {
        return named_barrier_any(1 + group, F::MEMBERS * 32, mine);
    }
};
