// Define the template arguments of `attend`, and the types and constants that follow from them.
#pragma once
#include "paged_attention/products.cuh"
#include "paged_attention/query.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/softmax.cuh"
#include "paged_attention/tile.cuh"

template <bool FIRST, typename A, typename B> struct Conditional {
    using type = A;
};
template <typename A, typename B> struct Conditional<false, A, B> {
    using type = B;
};

template <typename T_, typename CACHE, Layout LAYOUT, int HEAD_DIM_, int DIMS_, int BLOCK_SIZE_, int TEAM_,
          bool EXTRAS_, int STAGES_, int CLUSTER_, int WARPS_, Scheduling SCHEDULING_, int AT_ONCE_, int ROWS_>
struct AttendConfig {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, DIMS = DIMS_, BLOCK_SIZE = BLOCK_SIZE_;
    static constexpr int TEAM = TEAM_, STAGES = STAGES_, CLUSTER = CLUSTER_, WARPS = WARPS_;
    static constexpr Scheduling SCHEDULING = SCHEDULING_;
    static constexpr int AT_ONCE = AT_ONCE_; // tiles that a team multiplies per iteration
    static constexpr bool EXTRAS = EXTRAS_, FP8 = sizeof(CACHE) == 1;

    static_assert(CLUSTER == 1 || SCHEDULING != QUEUE, "blocks that draw pieces share none");
    static_assert(AT_ONCE <= STAGES, "a team's tiles lie in its stages");
    static_assert(ROWS_ == 16 || (ROWS_ == 8 && TEAM == 1), "a warp has 16 rows, or all of a kv head's");
    using Rows = typename Conditional<ROWS_ == 16, RowsAsA, RowsAsB>::type; // as an MMA operand
    static constexpr int TEAMS = WARPS / TEAM, ROWS = Rows::ROWS * TEAM;
    static constexpr int STEP = TEAMS * CLUSTER; // distance between a team's tiles if a cluster shares the item
    static constexpr int KEY_STEPS = DIMS / 16;  // MMA steps for the scores
    // CHAINS independent accumulators per score fragment hide the latency of dependent MMAs. One accumulator suffices
    // unless a tile has a single score fragment (8 rows) and few other warps are resident (clusters).
    static constexpr int CHAINS = ROWS_ == 8 && CLUSTER > 1 ? 2 : 1;
    static constexpr int OUT_FRAGMENTS = DIMS / 16 * Rows::FRAGMENTS; // per warp
    // The query is in shared memory if it needs more than 32 registers: for 16 rows of a head larger than 128.
    static constexpr bool QUERY_IN_SHARED = KEY_STEPS * Rows::OPERAND > 32;

    using Tile = typename Conditional<LAYOUT == VLLM, VllmTile<CACHE, DIMS>, FlashTile<CACHE, DIMS>>::type;
    using Products = typename Conditional<FP8, Products8<T, CACHE, Tile, Rows>, Products16<T, CACHE, Tile, Rows>>::type;
    using Query = typename Conditional<QUERY_IN_SHARED, QueryInShared<KEY_STEPS, 32 * WARPS>,
                                       QueryInRegisters<KEY_STEPS, Rows::OPERAND>>::type;
    using Softmax = OnlineSoftmax<typename Products::Math, Rows, OUT_FRAGMENTS>;
    // The padding puts the stores of a warp into different banks: with 16 rows per warp, neighbouring rows are an odd
    // multiple of 8 banks apart; with 8 rows per warp, neighbouring pairs of rows are an odd multiple of 8 banks apart.
    using Results = TeamResults<TEAMS, ROWS, DIMS + ROWS_ / 2>;

    static constexpr int STAGE_BYTES = TEAMS * 2 * Tile::BYTES; // keys and values for every team

    // Return the bytes of dynamic shared memory: the stages, and the receive buffer of `store_cluster`. The last stage
    // is large enough for the results.
    static constexpr int shared_bytes(int rows) {
        const int results = TEAMS * rows * Results::STRIDE * 4;
        const int found = (STAGES - 1) * STAGE_BYTES + (results > STAGE_BYTES ? results : STAGE_BYTES);
        const int block_quads = (rows * (DIMS / 4) + CLUSTER - 1) / CLUSTER; // of 4 dimensions of a row
        return CLUSTER == 1 ? found : found + CLUSTER * (block_quads * 16 + rows * 8);
    }

    // `token` and `dim` return what element i of a lane's fragment n stands for: a token in the scores, a dimension in
    // the output.
    static __device__ __forceinline__ int token(int n, int i, int lane) {
        return Tile::token(Rows::eight(n, i), Rows::column(lane, i));
    }
    static __device__ __forceinline__ int dim(int n, int i, int lane) {
        return Tile::dim(Rows::eight(n, i), Rows::column(lane, i));
    }
};
