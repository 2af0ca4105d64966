// Attention of the last few tokens of each sequence (the query tokens) over all its keys and values in a paged cache,
// on tensor cores.
//
//   position = length - query_tokens + i                          of query token i
//   score[t] = scale * key_scale * dot(query[i, head, :], key[t, head / group, :])
//              then softcap * tanh(score / softcap), then + slope[head] * (t - position)
//   p        = softmax over the t <= position (and > position - window), with exp(sink[head]) in its denominator
//   out      = value_scale * sum_t p[t] * value[t, head / group, :]
//   lse      = log of that denominator, natural
//
// Token t of a sequence is in slot t % block_size of cache block tables[seq, t / block_size].
//
// Work. A row is one head of one query token. The rows of a sequence that share a kv head are processed together, so
// the cache is read once for all of them. A work item is one block of rows of a sequence and a kv head. The block has
// as many rows as a team of warps holds. A piece is a range of tokens of an item. `Dealing` says how items are
// distributed over thread blocks:
//   QUEUE     Blocks take pieces from a queue. An item with more than an equal share of the tokens is cut into several
//             pieces. Each piece stores a partial result (maximum, sum, output), and the block that finishes last
//             merges the partial results. If `split` is not 0, it is the size of all pieces, so that a row's summation
//             order does not depend on the batch.
//   CLUSTERS  Each item has a cluster of CLUSTER blocks, which merge their results through distributed shared memory.
//             If there are more items than resident blocks, CLUSTER is 1 and each item has one block.
//   EITHER    The kernel reads the lengths and decides between CLUSTERS and QUEUE.
//
// Grid: as many blocks as are resident at once, or CLUSTER blocks per item. A block has WARPS warps in teams of TEAM
// warps. The teams take the tiles of a piece in turn, so a team takes every `step()`-th tile. A tile has 16 tokens.
// Each team has its own pipeline of STAGES stages: cp.async copies a tile into shared memory, and ldmatrix loads
// fragments from there. With AT_ONCE == 2 a team multiplies two tiles at once, so that the MMAs, conversions and
// exponentials of one tile overlap with the same steps of the other tile; this helps if few other warps are resident. A
// warp processes ROWS of the team's rows, 16 or 8. 16 rows are the M side of the MMA. If the kv head has at most 8
// rows, the rows are the N side, which halves the MMAs and exponentials. For the lanes see paged_attention/rows.cuh.
//
// The kernel multiplies scores by log2(e) and uses exp2 instead of exp. The stored lse and the values in vLLM's
// workspace use the natural base.
//
// If HEAD_DIM is 0, the head size comes from the arguments. If BLOCK_SIZE is 0, the block size comes from the
// arguments. DIMS is the padded head size: stages and registers are laid out for DIMS dimensions, and DIMS is at least
// head_dim. EXTRAS is true if the call uses a softcap, ALiBi slopes or a block-sparse pattern. The compiler limits the
// registers so that FIT blocks can be resident on a multiprocessor.
//
// Speed of light: the cache is read once, with group * query_tokens flops per byte of a 16-bit cache (4 for one query
// token of Llama-3-8B). Memory bandwidth is the limit, and the tensor cores wait. Times on an H200 with 32 heads, 8 kv
// heads and head_dim 128, next to the time of a copy of the same bytes:
//   64 sequences of 4096 tokens, bfloat16 cache    251 us, the same as the copy (100%)
//   64 sequences of 4096 tokens, 8-bit cache       136 us, copy 125 us (92%)
//   64 sequences of 1024 tokens                    67.8 us, copy 62.7 us (92%)
//   8 sequences of 8192 tokens                     67.1 us, copy 63 us (93%)
//   16 sequences of 2048 tokens                    36 us if the block table holds at most 2048 tokens, else 38 us;
//                                                  copy 31 us (87 to 83%)
//   1 sequence of 32768 tokens                     36.4 us, copy 31.4 us (86%)
//   1 sequence of 4096 tokens                      9.6 us, copy 3.9 us (40%)
// With few tokens the limit is the latency of a chain of dependent steps: load the length, load the block table, load
// the tiles, merge.
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "paged_attention/form.cuh"
#include "paged_attention/masks.cuh"
#include "paged_attention/pipeline.cuh"
#include "paged_attention/query.cuh"
#include "paged_attention/schedule.cuh"
#include "paged_attention/team.cuh"

// Write the warp's results (maximum, sum and output of each row) to shared memory. The results overwrite the last
// stage, so the caller must pass a block barrier first. If `bad`, the sum of each row is NaN, which makes the stored
// result NaN.
template <typename F>
__device__ __forceinline__ void leave_results(const Params& p, typename F::Softmax& softmax,
                                              const float (&out)[F::OUT_FRAGMENTS][4], const Row (&rows)[2], bool bad,
                                              const typename F::Results& found) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / F::TEAM, member = warp % F::TEAM;
    softmax.finish();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = member * F::Rows::ROWS + F::Rows::row(lane, j), at = team * F::ROWS + row;
        const float correction = softmax.final_correction(j);
        const float total = bad ? CUDART_NAN_F : softmax.sum[j] * correction;
        if (F::Rows::column(lane, 0) == 0) found.maxima[at] = softmax.maximum[j], found.sums[at] = total;
        if (!rows[j].valid) continue;
#pragma unroll
        for (int n = 0; n < F::OUT_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (F::Rows::row_index(i) == j)
                    found.outputs[(team * p.rows + row) * F::Results::STRIDE + F::dim(n, i, lane)] =
                        out[n][i] * correction;
    }
}

// The two rows whose scores a lane holds, and the terms that scale and mask these scores.
template <typename F> struct WarpRows {
    Row rows[2];
    ScoreTerms terms;
    int all_from, all_to; // every row attends to the tokens [all_from, all_to)

    __device__ __forceinline__ WarpRows(const Params& p, const Team<F>& team, const Segment& segment, float scale)
        : rows{team.row_of(p, segment, 0), team.row_of(p, segment, 1)},
          terms{{rows[0].position(p, segment), rows[1].position(p, segment)}, {scale, scale}},
          all_from(p.window ? segment.length - p.window : 0), all_to(segment.length - p.query_tokens + 1) {}
};

// Process N tiles of the team, from its k-th tile on: compute the scores, mask them, update the online softmax, and add
// to the output.
template <typename F, int N>
__device__ __forceinline__ void attend_tiles(const Params& p, const Team<F>& team, const Segment& segment,
                                             const WarpRows<F>& warp, const typename F::Query& query, int k,
                                             typename F::Softmax& softmax, float (&out)[F::OUT_FRAGMENTS][4]) {
    unsigned keys_at[N], values_at[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int token = team.token(segment, k + i);
        char* const stage = team.stage(k + i);
        keys_at[i] = shared_address(stage), values_at[i] = keys_at[i] + F::Tile::BYTES;
        if (token < segment.low || token + TILE > segment.length) team.clear_values(segment, token, stage);
    }
    float chains[F::CHAINS][N][F::Rows::FRAGMENTS][4] = {};
    F::Products::template multiply_keys<F::KEY_STEPS>(chains, query, keys_at, team.lane);
    auto& scores = chains[0];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int token = team.token(segment, k + i);
        if constexpr (F::CHAINS == 2) add_scores(scores[i], chains[1][i]);
        scale_scores<F>(scores[i], p, segment, warp.rows, warp.terms, token, team.lane);
        if (token < warp.all_from || token + TILE > warp.all_to)
            mask_scores<F>(scores[i], p, warp.terms, token, team.lane);
    }
    unsigned weights[N][F::Rows::OPERAND];
    softmax.add(scores, out, weights);
    F::Products::multiply_values(out, weights, values_at, team.lane);
}

// Return the launch configuration for pieces with `rows` rows.
template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER, int WARPS, Dealing DEALING, int AT_ONCE, int ROWS, int>
constexpr Launch attend_launch(int rows) {
    using F = Form<T, CACHE, LAYOUT, HEAD_DIM, DIMS, BLOCK_SIZE, TEAM, EXTRAS, STAGES, CLUSTER, WARPS, DEALING, AT_ONCE,
                   ROWS>;
    return {32 * WARPS, F::shared_bytes(rows)};
}

template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER, int WARPS, Dealing DEALING, int AT_ONCE, int ROWS, int FIT>
__global__ __launch_bounds__(32 * WARPS, FIT) CLUSTER_OF(CLUSTER) void attend(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = Form<T, CACHE, LAYOUT, HEAD_DIM, DIMS, BLOCK_SIZE, TEAM, EXTRAS, STAGES, CLUSTER, WARPS, DEALING, AT_ONCE,
                   ROWS>;
    using Tile = typename F::Tile;
    using Schedule = typename ScheduleOf<F, DEALING, CLUSTER == 1>::type;
    __shared__ float maxima[F::TEAMS * F::ROWS], sums[F::TEAMS * F::ROWS];
    __shared__ uint4 queries[F::QUERY_IN_SHARED ? F::KEY_STEPS * 32 * F::WARPS : 1];
    __shared__ int next;
    __shared__ bool last;
    __shared__ Segment previous;
    __shared__ unsigned long long inbox;
    Team<F> team(p);
    const typename F::Results found = {maxima, sums, reinterpret_cast<float*>(shared + (STAGES - 1) * F::STAGE_BYTES)};
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    Schedule schedule(p, {next, previous, last, shared_address(&inbox)});
    Pipeline<F> pipeline;
    typename F::Query query;
    // EARLY: issue the loads of the query before the copies of the first tiles. Otherwise the query would arrive after
    // the copies of all stages and delay the first MMA. QUEUE does not need EARLY, because other resident blocks hide
    // the latency. EARLY is impossible with QUERY_IN_SHARED, because large heads leave no registers for the query.
    // HAS_ITEM: the item depends only on the block index, so the query is loaded even before the lengths arrive.
    constexpr bool EARLY = DEALING != QUEUE && !F::QUERY_IN_SHARED, HAS_ITEM = DEALING == CLUSTERS && CLUSTER > 1;
    bool has_query = EARLY;
    if constexpr (EARLY && HAS_ITEM) {
        schedule.locate(p, pipeline.segment);
        load_query<F>(p, team, pipeline.segment, query.fragments);
    }
    bool more = schedule.first(p, team, pipeline);
    if (EARLY && !HAS_ITEM && more) load_query<F>(p, team, pipeline.segment, query.fragments);
    if (more) pipeline.start(p, team);
    __syncthreads();
    while (more) {
        const Segment& segment = pipeline.segment;
        WarpRows<F> warp(p, team, segment, scale);
        team.clear_padding();
        if constexpr (AT_ONCE > 1) pipeline.start_copies(p, team, STAGES - 1);
        if (!has_query) load_query<F>(p, team, segment, query.fragments);
        has_query = false;
        find_factors<F>(scale, team.lane, query.fragments, warp.terms.factors);
        query.keep(queries);
        int taken;
        schedule.draw(p, pipeline.tiles <= AHEAD, taken);
        if constexpr (EXTRAS) warp.terms.load_slopes(p, warp.rows);
        float out[F::OUT_FRAGMENTS][4] = {};
        typename F::Softmax softmax;

        for (int k = 0; k < pipeline.tiles; k += AT_ONCE) {
            cp_async_wait_group<STAGES - 2>();
            team.barrier();
            if constexpr (AT_ONCE == 1) {
                pipeline.start_copies(p, team, k + STAGES - 1);
                schedule.draw(p, k == pipeline.tiles - 1 - AHEAD, taken);
                if (pipeline.wanted(p, team, k)) attend_tiles<F, 1>(p, team, segment, warp, query, k, softmax, out);
            } else {
                schedule.draw(p, k == pipeline.tiles - 1 - AHEAD || k + 1 == pipeline.tiles - 1 - AHEAD, taken);
                const bool first = pipeline.wanted(p, team, k), second = pipeline.wanted(p, team, k + 1);
                if (first && second)
                    attend_tiles<F, 2>(p, team, segment, warp, query, k, softmax, out);
                else if (first || second)
                    attend_tiles<F, 1>(p, team, segment, warp, query, first ? k : k + 1, softmax, out);
                if (k + AT_ONCE >= pipeline.tiles) break;
                // Tiles k and k + 1 are done, so their stages can be refilled. The copies of the next STAGES - 2 tiles
                // are already in flight.
                team.barrier();
                pipeline.start_copies(p, team, k + STAGES);
                pipeline.start_copies(p, team, k + STAGES + 1);
            }
        }

        // When all warps of the team have read their last stage, the copies of the next piece may overwrite the stages.
        team.barrier();
        Pipeline<F> following;
        more = schedule.go_on(p, team, taken, following);
        // A cluster kernel does not start the next grid early, because the clusters of the next kernel would be placed
        // on multiprocessors that are still in use while other multiprocessors are free.
        if (CLUSTER == 1 && !more) let_later_kernels_begin();
        __syncthreads();
        schedule.look_back();
        leave_results<F>(p, softmax, out, warp.rows, __any_sync(FULL_WARP, pipeline.bad), found);
        __syncthreads();
        schedule.store(p, segment, found);
        pipeline = following;
    }
    schedule.finish(p);
}
