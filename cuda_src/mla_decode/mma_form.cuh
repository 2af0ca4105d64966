// How the eight warps of an attend_mma block divide the work.
//
// A block processes ROWS query rows with GROUPS groups of MEMBERS warps. The groups divide the rows. The warps of a
// group divide both MMAs of a tile:
//
//   scores   The TILE tokens of a tile are split into HALVES ranges, and the dimensions into DEPTHS ranges. A warp
//            computes one range of tokens over one range of dimensions, for all rows of its group. This takes few
//            shared-memory loads per MMA. The warps exchange their partial sums over the dimensions through shared
//            memory. Each warp then adds up and exponentiates the scores of the few tokens that it owns.
//   values   The columns of the output are split over the warps of the group.
//
// The two groups do not wait for each other: while one exponentiates, the other keeps the tensor cores busy. If a block
// has too few rows for two groups, both groups compute all rows and take alternate tiles, each from its own ring of
// stages (RINGS == 2). The results of the two groups are merged at the end of each sequence.
//
// A token of a tile in shared memory is a row of 16-byte chunks. The chunks are swizzled within each 128 bytes.
// ldmatrix can therefore read the chunk with the same index from eight tokens without bank conflicts. Queries, partial
// scores and probabilities are stored as mma.sync fragments, lane by lane.
//
// A tile of an 8-bit cache keeps the layout of the cache. A token of 656 bytes has an odd number of chunks (41), so
// eight tokens have the chunk with the same index in different banks even without a swizzle. A warp converts the e4m3
// elements to float16 in registers, which is exact, and the MMAs use them without their scales. In the first MMA the
// 128 dimensions of a warp share one scale per token, so the scores are multiplied by the scale afterwards. In the
// second MMA the 128 columns of a warp share one scale per token. The probabilities are therefore stored once per
// scale, multiplied by that scale. In the first MMA each warp also computes 16 dimensions of the rotary part, in the
// dtype of the queries.
#pragma once
#include "common/mma.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"

// The sizes that follow from the template arguments of attend_mma. BYTES is the shared memory of a block. With G =
// GROUPS, H = HALVES and M = GROUP_ROWS / 16 this is
//
//   RINGS * STAGES * (tile + 32) + ROWS / 16 * (36 - KEPT_STEPS * 4 / (G H / 2)) * 512 + 4096 * SENT * M
//   + G * GROUP_ROWS * TILE * 2 * SCALES + GROUP_ROWS * 64,
//
// where a tile has TILE * 1152 bytes (also if DIM == 0), or TILE * 656 bytes with an 8-bit cache. These combinations of
// ROWS, TILE and STAGES fit into the shared memory of a block:
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
    // An 8-bit cache of 512 dimensions is converted during the copy, and then treated as a 16-bit cache.
    static constexpr bool CONVERTS = FP8_ && DIM_ == 512, FP8 = FP8_ && !CONVERTS;
    static constexpr int ROWS = ROWS_, TILE = TILE_, STAGES = STAGES_, DIM = DIM_, DIM_V = DIM_V_;

    static constexpr int WARPS = 8, GROUPS = FP8 || ROWS == 64 ? 2 : 1, MEMBERS = WARPS / GROUPS;
    static constexpr int RINGS = FP8 && ROWS == 16 ? 2 : 1;
    static constexpr int GROUP_ROWS = ROWS / GROUPS * RINGS, M = GROUP_ROWS / 16; // M: 16-row fragments
    static constexpr int HALVES = FP8 ? 1 : 2, DEPTHS = MEMBERS / HALVES;
    static constexpr int N = TILE / HALVES / 8; // 8-token fragments of a warp
    // OWN: token fragments that a warp owns, which means that it exponentiates their scores. OWNERS: warps per half of
    // the tile that own tokens. SENT: fragments of partial scores that a warp sends to other warps.
    static constexpr int OWN = N > DEPTHS ? N / DEPTHS : 1, OWNERS = N / OWN, SENT = N >= DEPTHS ? N - OWN : N;

    static constexpr int DIMS = DIM ? DIM : 576, DIMS_V = DIM_V ? DIM_V : 576;
    static constexpr int LINES = DIMS / 64; // lines of 128 bytes, 64 dimensions each
    // A warp has STEPS MMA steps of 16 dimensions each: LINE_STEPS in whole lines, and REST_STEPS in the last line,
    // which the warps share if LINES is odd.
    static constexpr int STEPS = LINES * 4 / DEPTHS, LINE_STEPS = LINES / DEPTHS * 4, REST_STEPS = STEPS - LINE_STEPS;
    // The number of steps whose query fragments stay in registers. The fragments of the other steps are in shared
    // memory.
    static constexpr int KEPT_STEPS = M == 1 || GROUPS == 1 ? STEPS : FP8 ? 0 : 4;
    // A warp has V fragments of 8 output columns: LINE_V in whole lines of 64 columns, and REST_V in the last line.
    static constexpr int V = DIMS_V / 8 / MEMBERS, LINE_V = DIMS_V / 64 / MEMBERS * 8, REST_V = V - LINE_V;

    // A token of an 8-bit cache has 512 e4m3 elements, then a float32 scale per 128 of them, then the rotary part.
    static constexpr int LATENT_DIMS = 512, SCALE_DIMS = 128, ROTARY_OFFSET = 528;
    static constexpr int SCALES = FP8 ? LATENT_DIMS / SCALE_DIMS : 1; // copies of the probabilities, one per scale
    static constexpr int PITCH = FP8 ? 656 : DIMS * 2, TILE_BYTES = TILE * PITCH;

    static constexpr bool APART = GROUPS == 2;              // the groups do not wait for each other
    static constexpr int COPIERS = APART ? MEMBERS : WARPS; // warps that copy tiles
    static constexpr int COPIED = TILE / COPIERS;           // tokens per copying warp; all are in one page
    static constexpr bool ROW_COPIES = FP8 && HAS_ROW_COPIES;
    // Arrivals at a full barrier: one per copying warp with cp.async.bulk, or one per copying warp and one per lane
    // with cp.async.
    static constexpr int ARRIVALS_OF_TILE = ROW_COPIES ? COPIERS : COPIERS * 33;

    // Offsets in shared memory.
    static constexpr int QUERIES = RINGS * STAGES * TILE_BYTES;
    static constexpr int PARTIAL_SCORES = QUERIES + ROWS / 16 * DEPTHS * (STEPS - KEPT_STEPS) * 512;
    static constexpr int PROBABILITIES = PARTIAL_SCORES + WARPS * SENT * M * 512;
    static constexpr int PROBABILITY_BYTES = GROUP_ROWS * TILE * 2; // bytes of one copy
    static constexpr int MAXIMA = PROBABILITIES + GROUPS * SCALES * PROBABILITY_BYTES;
    static constexpr int SUMS = MAXIMA + WARPS * GROUP_ROWS * 4;
    static constexpr int ARRIVALS = SUMS + WARPS * GROUP_ROWS * 4;
    static constexpr int BARRIERS = ARRIVALS + RINGS * STAGES * 16;
    static constexpr int BYTES = BARRIERS + RINGS * STAGES * 16;

    // With RINGS == 2, group 1 passes its output to group 0 through shared memory, in chunks of GIVEN fragments. The
    // chunks overwrite the partial scores and the probabilities.
    static constexpr int GIVEN = MAXIMA - PARTIAL_SCORES >= V * MEMBERS * 512       ? V
                                 : MAXIMA - PARTIAL_SCORES >= V / 2 * MEMBERS * 512 ? V / 2
                                                                                    : V / 4;
    static_assert(RINGS == 1 || (M == 1 && MAXIMA - PARTIAL_SCORES >= GIVEN * MEMBERS * 512), "");

    static_assert(DIMS == LINES * 64 && LINES * 4 % DEPTHS == 0 && LINES % DEPTHS < 2 && N % 2 == 0, "");
    static_assert(DIMS_V % 64 == 0 && REST_V < 2 && COPIED % 4 == 0, "");
    static_assert(!CONVERTS || (EXTRA && DIM_V == 512), "");
    static_assert(!FP8 || (DIM == 576 && DIM_V == 512 && DEPTHS == SCALES && MEMBERS == SCALES), "");

    // head_dim: return DIM, or the kernel argument if DIM is 0. head_dim_v: return DIM_V, or the kernel argument if
    // DIM_V is 0.
    static __device__ __forceinline__ int head_dim(const Params& p) { return DIM ? DIM : p.head_dim; }
    static __device__ __forceinline__ int head_dim_v(const Params& p) { return DIM_V ? DIM_V : p.head_dim_v; }

    // Return the index of the first 16-byte chunk of MMA step `step` (16 dimensions) of a warp in range `depth` of the
    // dimensions.
    static __device__ __forceinline__ int chunk_of_step(int depth, int step) {
        return step < LINE_STEPS ? depth * LINE_STEPS * 2 + step * 2
                                 : (LINES - 1) * 8 + (depth * REST_STEPS + step - LINE_STEPS) * 2;
    }

    // Return the first output column of fragment n of a warp.
    static __device__ __forceinline__ int column_of(int member, int n) {
        return n < LINE_V ? (member * LINE_V + n) * 8 : DIMS_V - 64 + (member * REST_V + n - LINE_V) * 8;
    }

    // Return the swizzled byte offset of a token's chunk in a tile of 16-bit elements.
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

// Wait at named barrier `id` until `threads` threads have arrived.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Wait at named barrier `id` until `threads` threads have arrived. Return whether `mine` is true for any of them.
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

// The position of a thread in the block. Functions receive Thread and Params as arguments, because the compiler would
// not treat them as constant if a struct stored references to them.
template <typename F> struct Thread {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, pair = lane % 4; // row and column pair in a fragment
    const int group = warp / F::MEMBERS, member = warp % F::MEMBERS;
    const int half = member / F::DEPTHS, depth = member % F::DEPTHS;
    const int kv_head = blockIdx.y, block_row = blockIdx.x * F::ROWS; // the first row of the block

    __device__ __forceinline__ bool owns() const { return depth < F::OWNERS; }

    __device__ __forceinline__ int first_row() const { return block_row + (F::RINGS == 2 ? 0 : group * F::GROUP_ROWS); }

    // Return the index, among the rows of the group, of this thread's row in half j (8 rows) of fragment m.
    __device__ __forceinline__ int row_of(int m, int j) const { return m * 16 + j * 8 + row; }

    // Return the index of the first stage of the group's ring among the stages of all rings.
    __device__ __forceinline__ int first_stage() const { return F::RINGS == 2 ? group * F::STAGES : 0; }

    // Return the offset of the group's first tile, in tokens after the first token of a visit (the work of one part on
    // one sequence).
    __device__ __forceinline__ int first_token() const { return F::RINGS == 2 ? group * F::TILE : 0; }

    __device__ __forceinline__ void group_barrier() const { named_barrier(1 + group, F::MEMBERS * 32); }

    __device__ __forceinline__ bool group_barrier_any(bool mine) const {
        return named_barrier_any(1 + group, F::MEMBERS * 32, mine);
    }
};
