// Divide the work of an attend_mma block among its eight warps.
//
// GROUPS groups of GROUP_WARPS warps divide the ROWS query rows. The warps of a group divide both MMAs of a tile:
//
//   scores   A warp computes partial scores for one of TOKEN_RANGES ranges of the tokens, over one of DIM_RANGES ranges
//            of the dimensions. This takes few shared-memory loads per MMA. A warp owns a few tokens. The other warps
//            send it their partial scores through shared memory, and it adds up and exponentiates the scores.
//   values   Each warp computes a range of the output columns.
//
// While one group exponentiates, the other keeps the tensor cores busy. With too few rows for two groups, both groups
// compute all rows and take alternate tiles, each from its own ring of stages (RINGS == 2). Their results are merged at
// the end of each sequence.
//
// In shared memory a token is a row of 16-byte chunks, swizzled within each 128 bytes: ldmatrix reads the chunk with
// the same index from eight tokens without bank conflicts. Queries, partial scores and probabilities are stored as
// mma.sync fragments.
//
// A token of an 8-bit cache has an odd number of chunks (41) and needs no swizzle. A warp converts its e4m3 elements to
// float16 in registers, which is exact. The 128 dimensions or columns of a warp share one scale per token, which
// multiplies the scores of the first MMA and the probabilities of the second. Each warp also computes the scores of 16
// rotary dimensions, in the dtype of the queries.
#pragma once
#include "common/mma.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"

// Sizes that follow from the template arguments of attend_mma. The table lists the ROWS, TILE and STAGES that fit into
// a block's shared memory:
//
//   shared memory          227 KiB       163 KiB       99 KiB
//   16-bit cache           16, 64, 2     16, 64, 2     16, 32, 2
//                          32, 64, 2     32, 32, 3     32, 32, 2
//                          64, 64, 2     64, 32, 2     -
//   8-bit cache            16, 64, 2     16, 32, 3     16, 16, 4
//                          32, 64, 4     32, 64, 2     32, 32, 3
//                          64, 32, 4     64, 32, 2     -
template <typename T_, bool FP8_, int ROWS_, int TILE_, int STAGES_, int DIM_, int DIM_V_, bool EXTRA_ = false>
struct MmaConfig {
    using T = T_;
    static constexpr bool EXTRA = EXTRA_;
    // An 8-bit cache of 512 dimensions is converted to 16 bits during the copy.
    static constexpr bool CONVERTS = FP8_ && DIM_ == 512, FP8 = FP8_ && !CONVERTS;
    static constexpr int ROWS = ROWS_, TILE = TILE_, STAGES = STAGES_, DIM = DIM_, DIM_V = DIM_V_;

    static constexpr int WARPS = 8, GROUPS = FP8 || ROWS == 64 ? 2 : 1, GROUP_WARPS = WARPS / GROUPS;
    static constexpr int RINGS = FP8 && ROWS == 16 ? 2 : 1;
    static constexpr int GROUP_ROWS = ROWS / GROUPS * RINGS, M = GROUP_ROWS / 16; // M: 16-row fragments
    static constexpr int TOKEN_RANGES = FP8 ? 1 : 2, DIM_RANGES = GROUP_WARPS / TOKEN_RANGES;
    static constexpr int N = TILE / TOKEN_RANGES / 8; // 8-token fragments per warp
    // A warp exponentiates the token fragments that it owns, and sends its other partial scores to the warps that own
    // them.
    static constexpr int OWNED_FRAGMENTS = N > DIM_RANGES ? N / DIM_RANGES : 1, OWNING_WARPS = N / OWNED_FRAGMENTS,
                         SENT_FRAGMENTS = N >= DIM_RANGES ? N - OWNED_FRAGMENTS : N;

    static constexpr int DIMS = DIM ? DIM : 576, DIMS_V = DIM_V ? DIM_V : 576;
    static constexpr int LINES = DIMS / 64; // lines of 128 bytes
    // STEPS: a warp's MMA steps, of 16 dimensions each. If LINES (lines of 64 dimensions) is odd, the warps share the
    // last line.
    static constexpr int STEPS = LINES * 4 / DIM_RANGES, LINE_STEPS = LINES / DIM_RANGES * 4,
                         LAST_LINE_STEPS = STEPS - LINE_STEPS;
    // MMA steps whose query fragments stay in registers. The fragments of the other steps are in shared memory.
    static constexpr int REGISTER_STEPS = M == 1 || GROUPS == 1 ? STEPS : FP8 ? 0 : 4;
    // V: number of 8-column output fragments of a warp. If the number of lines (64 columns) is not a multiple of
    // GROUP_WARPS, the warps of a group share the last line.
    static constexpr int V = DIMS_V / 8 / GROUP_WARPS, LINE_V = DIMS_V / 64 / GROUP_WARPS * 8, LAST_LINE_V = V - LINE_V;

    // An 8-bit token: 512 e4m3 elements, a float32 scale per 128 elements, then the rotary part.
    static constexpr int LATENT_DIMS = 512, SCALE_DIMS = 128, ROTARY_OFFSET = 528;
    static constexpr int SCALES = FP8 ? LATENT_DIMS / SCALE_DIMS : 1; // copies of the probabilities
    static constexpr int PITCH = FP8 ? 656 : DIMS * 2, TILE_BYTES = TILE * PITCH;

    static constexpr bool INDEPENDENT_GROUPS = GROUPS == 2;
    static constexpr int COPY_WARPS = INDEPENDENT_GROUPS ? GROUP_WARPS : WARPS;
    static constexpr int COPIED_TOKENS = TILE / COPY_WARPS; // per copying warp; all are in one page
    static constexpr bool ROW_COPIES = FP8 && HAS_ROW_COPIES;
    // Arrivals at a full barrier: one per copying warp, and with cp.async also one per lane.
    static constexpr int ARRIVALS_OF_TILE = ROW_COPIES ? COPY_WARPS : COPY_WARPS * 33;

    // Offsets in shared memory.
    static constexpr int QUERIES = RINGS * STAGES * TILE_BYTES;
    static constexpr int PARTIAL_SCORES = QUERIES + ROWS / 16 * DIM_RANGES * (STEPS - REGISTER_STEPS) * 512;
    static constexpr int PROBABILITIES = PARTIAL_SCORES + WARPS * SENT_FRAGMENTS * M * 512;
    static constexpr int PROBABILITY_BYTES = GROUP_ROWS * TILE * 2;
    static constexpr int MAXIMA = PROBABILITIES + GROUPS * SCALES * PROBABILITY_BYTES;
    static constexpr int SUMS = MAXIMA + WARPS * GROUP_ROWS * 4;
    static constexpr int ARRIVALS = SUMS + WARPS * GROUP_ROWS * 4;
    static constexpr int BARRIERS = ARRIVALS + RINGS * STAGES * 16;
    static constexpr int BYTES = BARRIERS + RINGS * STAGES * 16;

    // With RINGS == 2, group 1 passes its output to group 0 in chunks that overwrite partial scores and probabilities.
    static constexpr int EXCHANGED_FRAGMENTS = MAXIMA - PARTIAL_SCORES >= V * GROUP_WARPS * 512       ? V
                                               : MAXIMA - PARTIAL_SCORES >= V / 2 * GROUP_WARPS * 512 ? V / 2
                                                                                                      : V / 4;
    static_assert(RINGS == 1 || (M == 1 && MAXIMA - PARTIAL_SCORES >= EXCHANGED_FRAGMENTS * GROUP_WARPS * 512), "");

    static_assert(DIMS == LINES * 64 && LINES * 4 % DIM_RANGES == 0 && LINES % DIM_RANGES < 2 && N % 2 == 0, "");
    static_assert(DIMS_V % 64 == 0 && LAST_LINE_V < 2 && COPIED_TOKENS % 4 == 0, "");
    static_assert(!CONVERTS || (EXTRA && DIM_V == 512), "");
    static_assert(!FP8 || (DIM == 576 && DIM_V == 512 && DIM_RANGES == SCALES && GROUP_WARPS == SCALES), "");

    static __device__ __forceinline__ int head_dim(const Params& p) { return DIM ? DIM : p.head_dim; }
    static __device__ __forceinline__ int head_dim_v(const Params& p) { return DIM_V ? DIM_V : p.head_dim_v; }

    // Return the first 16-byte chunk of an MMA step in a range of the dimensions.
    static __device__ __forceinline__ int chunk_of_step(int dim_range, int step) {
        return step < LINE_STEPS ? dim_range * LINE_STEPS * 2 + step * 2
                                 : (LINES - 1) * 8 + (dim_range * LAST_LINE_STEPS + step - LINE_STEPS) * 2;
    }

    // Return the first output column of fragment n.
    static __device__ __forceinline__ int column_of(int group_warp, int n) {
        return n < LINE_V ? (group_warp * LINE_V + n) * 8 : DIMS_V - 64 + (group_warp * LAST_LINE_V + n - LINE_V) * 8;
    }

    // Return the swizzled byte offset of a token's chunk in a 16-bit tile.
    static __device__ __forceinline__ int chunk_at(int token, int chunk) {
        return token * PITCH + (chunk ^ (token & 7)) * 16;
    }
};

template <bool CONDITION, typename A, typename B> struct Conditional {
    using Type = A;
};
template <typename A, typename B> struct Conditional<false, A, B> {
    using Type = B;
};

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Return whether `mine` is true for any thread of the barrier.
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

// The position of a thread in the block. It holds no Params, because the compiler would not treat Params behind a
// reference as constant.
template <typename F> struct Thread {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, pair = lane % 4; // row and column pair in a fragment
    const int group = warp / F::GROUP_WARPS, group_warp = warp % F::GROUP_WARPS;
    const int token_range = group_warp / F::DIM_RANGES, dim_range = group_warp % F::DIM_RANGES;
    const int kv_head = blockIdx.y, block_row = blockIdx.x * F::ROWS;

    __device__ __forceinline__ bool owns() const { return dim_range < F::OWNING_WARPS; }

    __device__ __forceinline__ int first_row() const { return block_row + (F::RINGS == 2 ? 0 : group * F::GROUP_ROWS); }

    // Return the index of this lane's row in half j (8 rows) of fragment m, counted from the group's first row.
    __device__ __forceinline__ int row_of(int m, int j) const { return m * 16 + j * 8 + row; }

    __device__ __forceinline__ int first_stage() const { return F::RINGS == 2 ? group * F::STAGES : 0; }

    // Return the offset of the group's first tile from the first token of a split.
    __device__ __forceinline__ int first_token() const { return F::RINGS == 2 ? group * F::TILE : 0; }

    __device__ __forceinline__ void group_barrier() const { named_barrier(1 + group, F::GROUP_WARPS * 32); }

    __device__ __forceinline__ bool group_barrier_any(bool mine) const {
        return named_barrier_any(1 + group, F::GROUP_WARPS * 32, mine);
    }
};
