// How the warps of a block of attend_mma share the work.
#pragma once
#include "mla_decode/copies.cuh"

// How the eight warps of a block share the work, and its shared memory.
//
// The ROWS rows are divided among GROUPS groups of warps. The warps of a group share the scores of its rows with a tile
// of TILE tokens: HALVES [of the tokens] x DEPTHS [of the dimensions] (a warp that does more of the product loads less
// for it), whose partial sums meet in shared memory. There each warp sums up and exponentiates its own few tokens. The
// second product is divided by columns. Two groups go their own way: while one waits for its exponentials, the other
// keeps the tensor cores busy. If there are too few rows for two groups, these take tiles in turn, each from a ring of
// stages of its own, and what they found is put together at the end of a visit.
//
// A token of a tile in shared memory is a row of 16-byte chunks, permuted within each 128 bytes so that eight tokens
// are in different banks. Queries, partial scores and shares (the exponentials) lie as fragments.
//
// An 8-bit tile lies as in the cache (656 bytes are an odd number of chunks), and a warp converts what it needs of it in
// registers to float16, exactly. Scales are left out of both products: a warp's dimensions in the first one (of which
// it has 16 of the rotary part besides, in T) and its columns in the second are the 128 of one scale. The first product
// is multiplied by it, and of the shares there is a kind for each scale: their exponentials times it.
//
// BYTES, with G = GROUPS, H = HALVES and K = KEPT, where a tile is TILE * 1152 bytes (whatever DIM is) or TILE * 656:
//
//   RINGS * STAGES * (a tile + 32) + ROWS / 16 * (36 - K * 4 / (G H / 2)) * 512 + 4096 * SENT * M
//   + G * GROUP_ROWS * TILE * 2 * KINDS + GROUP_ROWS * 64
//
//   rows, tile, stages with 227 KB   163 KB     99 KB      of an 8-bit cache   227 KB     163 KB     99 KB
//                      16, 64, 2     16, 64, 2  16, 32, 2                      16, 64, 2  16, 32, 3  16, 16, 4
//                      32, 64, 2     32, 32, 3  32, 32, 2                      32, 64, 4  32, 64, 2  32, 32, 3
//                      64, 64, 2     64, 32, 2  -                              64, 32, 4  64, 32, 2  -
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V> struct Form {
    static constexpr int WARPS = 8, GROUPS = FP8 || ROWS == 64 ? 2 : 1, MEMBERS = WARPS / GROUPS;
    static constexpr int RINGS = FP8 && ROWS == 16 ? 2 : 1; // 2: groups take tiles in turn, not rows
    static constexpr int GROUP_ROWS = ROWS / GROUPS * RINGS, M = GROUP_ROWS / 16; // fragments of rows
    static constexpr int HALVES = FP8 ? 1 : 2, DEPTHS = MEMBERS / HALVES;
    static constexpr int N = TILE / HALVES / 8;                               // fragments of a warp's tokens
    static constexpr int OWN = N > DEPTHS ? N / DEPTHS : 1, OWNERS = N / OWN; // of these it exponentiates; who does
    static constexpr int SENT = N >= DEPTHS ? N - OWN : N;

    static constexpr int DIMS = DIM ? DIM : 576, DIMS_V = DIM_V ? DIM_V : 576;
    static constexpr int LINES = DIMS / 64; // of 128 bytes, which is 64 dimensions
    // Of 16 dimensions each, for a warp: those of whole lines, then its share of the last line if LINES is odd.
    static constexpr int STEPS = LINES * 4 / DEPTHS, LINE_STEPS = LINES / DEPTHS * 4, REST_STEPS = STEPS - LINE_STEPS;
    static constexpr int KEPT = M == 1 || GROUPS == 1 ? STEPS : FP8 ? 0 : 4; // of the queries, in registers
    // Fragments of a warp's columns: those of whole lines, then its share of the last line.
    static constexpr int V = DIMS_V / 8 / MEMBERS, LINE_V = DIMS_V / 64 / MEMBERS * 8, REST_V = V - LINE_V;

    static constexpr int LATENT = 512, SCALE_DIMS = 128, ROTARY = 528; // of an 8-bit token: rotary part from there
    static constexpr int PITCH = FP8 ? 656 : DIMS * 2, TILE_BYTES = TILE * PITCH;

    static constexpr bool APART = GROUPS == 2;              // groups do not wait for each other
    static constexpr int COPIERS = APART ? MEMBERS : WARPS; // warps that copy tiles
    static constexpr int COPIED = TILE / COPIERS;           // tokens, by each; they lie in the same page
    static constexpr bool ROW_COPIES = FP8 && HAS_ROW_COPIES;
    static constexpr int ARRIVING = ROW_COPIES ? COPIERS : COPIERS * 33; // for a tile to be there, threads

    // Offsets of what lies in shared memory.
    static constexpr int QUERIES = RINGS * STAGES * TILE_BYTES;
    static constexpr int PARTIAL_SCORES = QUERIES + ROWS / 16 * DEPTHS * (STEPS - KEPT) * 512;
    static constexpr int SHARES = PARTIAL_SCORES + WARPS * SENT * M * 512;
    static constexpr int KINDS = FP8 ? LATENT / SCALE_DIMS : 1, KIND_BYTES = GROUP_ROWS * TILE * 2; // of shares
    static constexpr int MAXIMA = SHARES + GROUPS * KINDS * KIND_BYTES;
    static constexpr int SUMS = MAXIMA + WARPS * GROUP_ROWS * 4;
    static constexpr int ARRIVALS = SUMS + WARPS * GROUP_ROWS * 4;
    static constexpr int BARRIERS = ARRIVALS + RINGS * STAGES * 16;
    static constexpr int BYTES = BARRIERS + RINGS * STAGES * 16;
    static_assert(BYTES <= 232448, "");

    // Fragments of a row of accumulators that one group gives the other at once, where scores and shares were.
    static constexpr int GIVEN = MAXIMA - PARTIAL_SCORES >= V * MEMBERS * 512       ? V
                                 : MAXIMA - PARTIAL_SCORES >= V / 2 * MEMBERS * 512 ? V / 2
                                                                                    : V / 4;
    static_assert(RINGS == 1 || (M == 1 && MAXIMA - PARTIAL_SCORES >= GIVEN * MEMBERS * 512), "");

    static_assert(DIMS == LINES * 64 && LINES * 4 % DEPTHS == 0 && LINES % DEPTHS < 2 && N % 2 == 0, "");
    static_assert(DIMS_V % 64 == 0 && REST_V < 2 && COPIED % 4 == 0, "");
    static_assert(!FP8 || (DIM == 576 && DIM_V == 512 && DEPTHS == KINDS && MEMBERS == KINDS), "");

    static __device__ __forceinline__ int chunk_of_step(int depth, int step) {
        return step < LINE_STEPS ? depth * LINE_STEPS * 2 + step * 2
                                 : (LINES - 1) * 8 + (depth * REST_STEPS + step - LINE_STEPS) * 2;
    }

    static __device__ __forceinline__ int column_of(int member, int n) {
        return n < LINE_V ? (member * LINE_V + n) * 8 : DIMS_V - 64 + (member * REST_V + n - LINE_V) * 8;
    }

    // Where chunk `chunk` of a token lies, if its numbers are of T.
    static __device__ __forceinline__ int chunk_at(int token, int chunk) {
        return token * PITCH + (chunk ^ (token & 7)) * 16;
    }
};
