// The forms of `attend`: its template arguments, and what follows from them.
#pragma once
#include "paged_attention/products.cuh"
#include "paged_attention/query.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/softmax.cuh"
#include "paged_attention/tile.cuh"

template <bool FIRST, typename A, typename B> struct Choose {
    using type = A;
};
template <typename A, typename B> struct Choose<false, A, B> {
    using type = B;
};

template <typename T_, typename CACHE, Layout LAYOUT, int HEAD_DIM_, int DIMS_, int BLOCK_SIZE_, int TEAM_,
          bool EXTRAS_, int STAGES_, int CLUSTER_, int WARPS_, Dealing DEALING_, int AT_ONCE_, int ROWS_>
struct Form {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, DIMS = DIMS_, BLOCK_SIZE = BLOCK_SIZE_;
    static constexpr int TEAM = TEAM_, STAGES = STAGES_, CLUSTER = CLUSTER_, WARPS = WARPS_;
    static constexpr Dealing DEALING = DEALING_;
    static constexpr int AT_ONCE = AT_ONCE_; // tiles that a team multiplies at once
    static constexpr bool EXTRAS = EXTRAS_, FP8 = sizeof(CACHE) == 1;

    static_assert(CLUSTER == 1 || DEALING != QUEUE, "blocks that draw pieces share none");
    static_assert(AT_ONCE <= STAGES, "a team's tiles lie in its stages");
    static_assert(ROWS_ == 16 || (ROWS_ == 8 && TEAM == 1), "a warp has 16 rows, or all of a kv head's");
    using Rows = typename Choose<ROWS_ == 16, RowsAsA, RowsAsB>::type; // of a warp
    static constexpr int TEAMS = WARPS / TEAM, ROWS = Rows::ROWS * TEAM;
    static constexpr int STEP = TEAMS * CLUSTER; // tiles from one of a team to its next, in a cluster's item
    static constexpr int KEY_STEPS = DIMS / 16;  // products along the dimensions, for the scores
    // Chains of products that scores are the sum of: 8 rows are one fragment, not two, and blocks of clusters have few
    // warps beside them.
    static constexpr int CHAINS = ROWS_ == 8 && CLUSTER > 1 ? 2 : 1;
    static constexpr int OUT_FRAGMENTS = DIMS / 16 * Rows::FRAGMENTS; // fragments of the output across the dimensions
    // Registers hold the query of all but 16 rows of large heads.
    static constexpr bool QUERY_IN_SHARED = KEY_STEPS * Rows::OPERAND > 32;

    using Tile = typename Choose<LAYOUT == VLLM, VllmTile<CACHE, DIMS>, FlashTile<CACHE, DIMS>>::type;
    using Products = typename Choose<FP8, Products8<T, CACHE, Tile, Rows>, Products16<T, CACHE, Tile, Rows>>::type;
    using Query = typename Choose<QUERY_IN_SHARED, QueryInShared<KEY_STEPS, 32 * WARPS>,
                                  QueryInRegisters<KEY_STEPS, Rows::OPERAND>>::type;
    using Softmax = OnlineSoftmax<typename Products::Math, Rows, OUT_FRAGMENTS>;
    // Lanes of four pairs of rows, or of four rows, store to different banks.
    using Results = TeamResults<TEAMS, ROWS, DIMS + ROWS_ / 2>;

    static constexpr int STAGE_BYTES = TEAMS * 2 * Tile::BYTES; // of all teams: keys and values of a tile of each

    // Shared memory for pieces of `rows` rows: the stages, where the last one is results in the end, and behind them the
    // inbox of a block of a cluster (`store_cluster`).
    static constexpr int shared_bytes(int rows) {
        const int results = TEAMS * rows * Results::STRIDE * 4;
        const int found = (STAGES - 1) * STAGE_BYTES + (results > STAGE_BYTES ? results : STAGE_BYTES);
        const int own = (rows * (DIMS / 4) + CLUSTER - 1) / CLUSTER; // quads of a row of a block
        return CLUSTER == 1 ? found : found + CLUSTER * (own * 16 + rows * 8);
    }

    // The token of a tile, and the dimension, of element i of a lane's fragment n of the scores, or of the output.
    static __device__ __forceinline__ int token(int n, int i, int lane) {
        return Tile::token(Rows::eight(n, i), Rows::column(lane, i));
    }
    static __device__ __forceinline__ int dim(int n, int i, int lane) {
        return Tile::dim(Rows::eight(n, i), Rows::column(lane, i));
    }
};
