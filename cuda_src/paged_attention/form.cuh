// The template arguments of `attend`, and the types and constants that follow from them.
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
    static constexpr int AT_ONCE = AT_ONCE_; // tiles that a team multiplies in one iteration
    static constexpr bool EXTRAS = EXTRAS_, FP8 = sizeof(CACHE) == 1;

    static_assert(CLUSTER == 1 || DEALING != QUEUE, "blocks that draw pieces share none");
    static_assert(AT_ONCE <= STAGES, "a team's tiles lie in its stages");
    static_assert(ROWS_ == 16 || (ROWS_ == 8 && TEAM == 1), "a warp has 16 rows, or all of a kv head's");
    using Rows = typename Choose<ROWS_ == 16, RowsAsA, RowsAsB>::type; // the warp's rows as an MMA operand
    static constexpr int TEAMS = WARPS / TEAM, ROWS = Rows::ROWS * TEAM;
    static constexpr int STEP = TEAMS * CLUSTER; // distance between a team's tiles if a cluster shares the item
    static constexpr int KEY_STEPS = DIMS / 16;  // MMA steps along the dimensions for the scores
    // The number of independent accumulators per score fragment; they are added up at the end. Two accumulators hide
    // the latency of the MMAs if few MMAs are independent of each other. This is the case with 8 rows and CLUSTER > 1:
    // a tile then has one score fragment instead of two, and few other warps are resident.
    static constexpr int CHAINS = ROWS_ == 8 && CLUSTER > 1 ? 2 : 1;
    static constexpr int OUT_FRAGMENTS = DIMS / 16 * Rows::FRAGMENTS; // output fragments of a warp
    // The query stays in registers unless its fragments take more than 32 registers. 16 rows of a head larger than 128
    // take more.
    static constexpr bool QUERY_IN_SHARED = KEY_STEPS * Rows::OPERAND > 32;

    using Tile = typename Choose<LAYOUT == VLLM, VllmTile<CACHE, DIMS>, FlashTile<CACHE, DIMS>>::type;
    using Products = typename Choose<FP8, Products8<T, CACHE, Tile, Rows>, Products16<T, CACHE, Tile, Rows>>::type;
    using Query = typename Choose<QUERY_IN_SHARED, QueryInShared<KEY_STEPS, 32 * WARPS>,
                                  QueryInRegisters<KEY_STEPS, Rows::OPERAND>>::type;
    using Softmax = OnlineSoftmax<typename Products::Math, Rows, OUT_FRAGMENTS>;
    // The row stride is padded so that the lanes of a warp store to different banks. With 16 rows, neighbouring rows
    // are an odd multiple of 8 banks apart. With 8 rows, neighbouring pairs of rows are an odd multiple of 8 banks
    // apart.
    using Results = TeamResults<TEAMS, ROWS, DIMS + ROWS_ / 2>;

    static constexpr int STAGE_BYTES = TEAMS * 2 * Tile::BYTES; // one stage: a tile's keys and values for every team

    // Return the dynamic shared memory of a block for pieces with `rows` rows. It contains the stages and, with CLUSTER
    // > 1, the inbox of `store_cluster`. At the end the results overwrite the last stage, so the last stage is enlarged
    // if the results need more space.
    static constexpr int shared_bytes(int rows) {
        const int results = TEAMS * rows * Results::STRIDE * 4;
        const int found = (STAGES - 1) * STAGE_BYTES + (results > STAGE_BYTES ? results : STAGE_BYTES);
        const int own = (rows * (DIMS / 4) + CLUSTER - 1) / CLUSTER; // quads (4 dimensions of a row) of a block
        return CLUSTER == 1 ? found : found + CLUSTER * (own * 16 + rows * 8);
    }

    // Locate element i of a lane's fragment n. token: return the index of its token in the tile. dim: return its
    // dimension.
    static __device__ __forceinline__ int token(int n, int i, int lane) {
        return Tile::token(Rows::eight(n, i), Rows::column(lane, i));
    }
    static __device__ __forceinline__ int dim(int n, int i, int lane) {
        return Tile::dim(Rows::eight(n, i), Rows::column(lane, i));
    }
};
