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

// Blocks of so many warps that fit a multiprocessor.
constexpr int fit(int warps) { return warps > 4 ? 1 : 2; }

template <typename T_, typename CACHE, Layout LAYOUT, int HEAD_DIM_, int DIMS_, int BLOCK_SIZE_, int TEAM_,
          bool EXTRAS_, int STAGES_, int CLUSTER_, int WARPS_, Dealing DEALING_, int AT_ONCE_>
struct Form {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, DIMS = DIMS_, BLOCK_SIZE = BLOCK_SIZE_;
    static constexpr int TEAM = TEAM_, STAGES = STAGES_, CLUSTER = CLUSTER_, WARPS = WARPS_;
    static constexpr Dealing DEALING = DEALING_;
    static constexpr int AT_ONCE = AT_ONCE_; // tiles that a team multiplies at once
    static constexpr bool EXTRAS = EXTRAS_, FP8 = sizeof(CACHE) == 1;

    static_assert(CLUSTER == 1 || DEALING != QUEUE, "blocks that draw pieces share none");
    static_assert(AT_ONCE <= STAGES, "a team's tiles lie in its stages");
    static constexpr int TEAMS = WARPS / TEAM, ROWS = 16 * TEAM;
    static constexpr int STEP = TEAMS * CLUSTER;        // tiles from one of a team to its next, in a cluster's item
    static constexpr int KEY_STEPS = DIMS / 16;         // products along the dimensions, for the scores
    static constexpr int OUT_FRAGMENTS = DIMS / 8;      // fragments of the output across the dimensions
    static constexpr bool QUERY_IN_SHARED = DIMS > 128; // registers hold the query of smaller heads only

    using Tile = typename Choose<LAYOUT == VLLM, VllmTile<CACHE, DIMS>, FlashTile<CACHE, DIMS>>::type;
    using Products = typename Choose<FP8, Products8<T, CACHE, Tile>, Products16<T, CACHE, Tile>>::type;
    using Query =
        typename Choose<QUERY_IN_SHARED, QueryInShared<KEY_STEPS, 32 * WARPS>, QueryInRegisters<KEY_STEPS>>::type;
    using Softmax = OnlineSoftmax<typename Products::Math, OUT_FRAGMENTS>;
    using Results = TeamResults<TEAMS, ROWS, DIMS + 8>;
};
