// Compute the attention of the last few tokens of each sequence (the query tokens) over a paged cache, on tensor cores.
//
//   position = length - query_tokens + i                          of query token i
//   score[t] = scale * key_scale * dot(query[i, head, :], key[t, head / group, :])
//              then softcap * tanh(score / softcap), then + slope[head] * (t - position)
//   p        = softmax over the t <= position (and > position - window), with exp(sink[head]) in its denominator
//   out      = value_scale * sum_t p[t] * value[t, head / group, :]
//   lse      = natural logarithm of the softmax denominator
//
// Token t of a sequence is in slot t % block_size of cache block tables[seq, t / block_size].
//
// A work item is a sequence, a kv head and a block of query rows; a row is one head of one query token. A KV split is a
// range of tokens of an item. SCHEDULING assigns items to thread blocks:
//   QUEUE     Blocks take splits from a queue. The splits of a long item store partial results (maximum, sum, output),
//             which the block that finishes last merges. If the caller fixes the size of the splits (`split`), a row's
//             summation order does not depend on the batch.
//   CLUSTERS  A cluster of CLUSTER blocks processes an item, and merges through distributed shared memory. With more
//             items than resident blocks, CLUSTER is 1.
//   EITHER    The kernel decides between CLUSTERS and QUEUE from the lengths.
//
// Grid: as many blocks as are resident at once, or CLUSTER blocks per item. A block has WARPS warps in teams of TEAM
// warps. The teams take tiles of 16 tokens in turn. cp.async copies a team's tiles into the team's STAGES stages. A
// warp processes ROWS of the team's rows. With AT_ONCE == 2 the MMAs, conversions and exponentials of two tiles
// overlap, which helps if few other warps are resident. 16 rows are the M side of the MMA; 8 rows are the N side, which
// halves the MMAs and exponentials.
//
// HEAD_DIM == 0, BLOCK_SIZE == 0: the size comes from the arguments. DIMS: dimensions in stages and registers, at least
// head_dim. EXTRAS: a softcap, ALiBi slopes or a block-sparse pattern. MIN_BLOCKS: resident blocks per multiprocessor.
//
// Scores are multiplied by log2(e), so that exp2 replaces exp. lse and vLLM's workspace use the natural base.
//
// Speed of light: memory bandwidth, with group * query_tokens flops per byte of a 16-bit cache (4 for one query token
// of Llama-3-8B). Times on an H200 with 32 heads, 8 kv heads and head_dim 128, next to a copy of the same bytes:
//   64 sequences of 4096 tokens, bfloat16 cache    251 us, the same as the copy (100%)
//   64 sequences of 4096 tokens, 8-bit cache       136 us, copy 125 us (92%)
//   64 sequences of 1024 tokens                    67.8 us, copy 62.7 us (92%)
//   8 sequences of 8192 tokens                     67.1 us, copy 63 us (93%)
//   16 sequences of 2048 tokens                    36 us if the block table holds at most 2048 tokens, else 38 us;
//                                                  copy 31 us (87 to 83%)
//   1 sequence of 32768 tokens                     36.4 us, copy 31.4 us (86%)
//   1 sequence of 4096 tokens                      9.6 us, copy 3.9 us (40%)
// With few tokens the limit is a chain of dependent steps: load the length, the block table and the tiles, then merge.
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

// Store a warp's results in shared memory. The results overwrite the last stage of tiles, so the caller must
// synchronize the block first. `bad`: make the results NaN.
template <typename F>
__device__ __forceinline__ void store_in_shared(const Params& p, typename F::Softmax& softmax,
                                                const float (&out)[F::OUT_FRAGMENTS][4], const Row (&rows)[2], bool bad,
                                                const typename F::Results& results) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / F::TEAM, member = warp % F::TEAM;
    softmax.finish();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int row = member * F::Rows::ROWS + F::Rows::row(lane, j), at = team * F::ROWS + row;
        const float correction = softmax.final_correction(j);
        const float total = bad ? CUDART_NAN_F : softmax.sum[j] * correction;
        if (F::Rows::column(lane, 0) == 0) results.maxima[at] = softmax.maximum[j], results.sums[at] = total;
        if (!rows[j].valid) continue;
#pragma unroll
        for (int n = 0; n < F::OUT_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (F::Rows::row_index(i) == j)
                    results.outputs[(team * p.rows + row) * F::Results::STRIDE + F::dim(n, i, lane)] =
                        out[n][i] * correction;
    }
}

// The two rows whose scores a lane holds, and their masks.
template <typename F> struct WarpRows {
    Row rows[2];
    ScoreTerms terms;
    int all_from, all_to; // every row attends to the tokens [all_from, all_to)

    __device__ __forceinline__ WarpRows(const Params& p, const Team<F>& team, const KvSplit& kv_split, float scale)
        : rows{team.row_of(p, kv_split, 0), team.row_of(p, kv_split, 1)},
          terms{{rows[0].position(p, kv_split), rows[1].position(p, kv_split)}, {scale, scale}},
          all_from(p.window ? kv_split.length - p.window : 0), all_to(kv_split.length - p.query_tokens + 1) {}
};

// Process the team's tiles k ... k + N - 1.
template <typename F, int N>
__device__ __forceinline__ void attend_tiles(const Params& p, const Team<F>& team, const KvSplit& kv_split,
                                             const WarpRows<F>& warp, const typename F::Query& query, int k,
                                             typename F::Softmax& softmax, float (&out)[F::OUT_FRAGMENTS][4]) {
    unsigned keys_at[N], values_at[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int token = team.token(kv_split, k + i);
        char* const stage = team.stage(k + i);
        keys_at[i] = shared_address(stage), values_at[i] = keys_at[i] + F::Tile::BYTES;
        if (token < kv_split.low || token + TILE > kv_split.length) team.clear_values(kv_split, token, stage);
    }
    float chains[F::CHAINS][N][F::Rows::FRAGMENTS][4] = {};
    F::Products::template multiply_keys<F::KEY_STEPS>(chains, query, keys_at, team.lane);
    auto& scores = chains[0];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int token = team.token(kv_split, k + i);
        if constexpr (F::CHAINS == 2) add_scores(scores[i], chains[1][i]);
        scale_scores<F>(scores[i], p, kv_split, warp.rows, warp.terms, token, team.lane);
        if (token < warp.all_from || token + TILE > warp.all_to)
            mask_scores<F>(scores[i], p, warp.terms, token, team.lane);
    }
    unsigned weights[N][F::Rows::OPERAND];
    softmax.add(scores, out, weights);
    F::Products::multiply_values(out, weights, values_at, team.lane);
}

template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER, int WARPS, Scheduling SCHEDULING, int AT_ONCE, int ROWS, int>
constexpr Launch attend_launch(int rows) {
    using F = AttendConfig<T, CACHE, LAYOUT, HEAD_DIM, DIMS, BLOCK_SIZE, TEAM, EXTRAS, STAGES, CLUSTER, WARPS,
                           SCHEDULING, AT_ONCE, ROWS>;
    return {32 * WARPS, F::shared_bytes(rows)};
}

template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER, int WARPS, Scheduling SCHEDULING, int AT_ONCE, int ROWS, int MIN_BLOCKS>
__global__ __launch_bounds__(32 * WARPS, MIN_BLOCKS) CLUSTER_OF(CLUSTER) void attend(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = AttendConfig<T, CACHE, LAYOUT, HEAD_DIM, DIMS, BLOCK_SIZE, TEAM, EXTRAS, STAGES, CLUSTER, WARPS,
                           SCHEDULING, AT_ONCE, ROWS>;
    using Tile = typename F::Tile;
    using Schedule = typename ScheduleOf<F, SCHEDULING, CLUSTER == 1>::type;
    __shared__ float maxima[F::TEAMS * F::ROWS], sums[F::TEAMS * F::ROWS];
    __shared__ uint4 queries[F::QUERY_IN_SHARED ? F::KEY_STEPS * 32 * F::WARPS : 1];
    __shared__ int next;
    __shared__ bool last;
    __shared__ KvSplit previous;
    __shared__ unsigned long long receive_barrier;
    Team<F> team(p);
    const typename F::Results results = {maxima, sums,
                                         reinterpret_cast<float*>(shared + (STAGES - 1) * F::STAGE_BYTES)};
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    Schedule schedule(p, {next, previous, last, shared_address(&receive_barrier)});
    Pipeline<F> pipeline;
    typename F::Query query;
    // EARLY: load the query before the first tiles; a load after the copies of the tiles would delay the first MMA.
    // With QUEUE other resident blocks hide this latency, and with QUERY_IN_SHARED no registers are free. HAS_ITEM: the
    // item depends only on the block index, so the query is loaded even before the lengths arrive.
    constexpr bool EARLY = SCHEDULING != QUEUE && !F::QUERY_IN_SHARED, HAS_ITEM = SCHEDULING == CLUSTERS && CLUSTER > 1;
    bool has_query = EARLY;
    if constexpr (EARLY && HAS_ITEM) {
        schedule.locate(p, pipeline.kv_split);
        load_query<F>(p, team, pipeline.kv_split, query.fragments);
    }
    bool more = schedule.first(p, team, pipeline);
    if (EARLY && !HAS_ITEM && more) load_query<F>(p, team, pipeline.kv_split, query.fragments);
    if (more) pipeline.start(p, team);
    __syncthreads();
    while (more) {
        const KvSplit& kv_split = pipeline.kv_split;
        WarpRows<F> warp(p, team, kv_split, scale);
        team.clear_padding();
        if constexpr (AT_ONCE > 1) pipeline.start_copies(p, team, STAGES - 1);
        if (!has_query) load_query<F>(p, team, kv_split, query.fragments);
        has_query = false;
        find_factors<F>(scale, team.lane, query.fragments, warp.terms.factors);
        query.keep(queries);
        int taken;
        schedule.request_next(p, pipeline.tiles <= AHEAD, taken);
        if constexpr (EXTRAS) warp.terms.load_slopes(p, warp.rows);
        float out[F::OUT_FRAGMENTS][4] = {};
        typename F::Softmax softmax;

        for (int k = 0; k < pipeline.tiles; k += AT_ONCE) {
            cp_async_wait_group<STAGES - 2>();
            team.barrier();
            if constexpr (AT_ONCE == 1) {
                pipeline.start_copies(p, team, k + STAGES - 1);
                schedule.request_next(p, k == pipeline.tiles - 1 - AHEAD, taken);
                if (pipeline.wanted(p, team, k)) attend_tiles<F, 1>(p, team, kv_split, warp, query, k, softmax, out);
            } else {
                schedule.request_next(p, k == pipeline.tiles - 1 - AHEAD || k + 1 == pipeline.tiles - 1 - AHEAD, taken);
                const bool first = pipeline.wanted(p, team, k), second = pipeline.wanted(p, team, k + 1);
                if (first && second)
                    attend_tiles<F, 2>(p, team, kv_split, warp, query, k, softmax, out);
                else if (first || second)
                    attend_tiles<F, 1>(p, team, kv_split, warp, query, first ? k : k + 1, softmax, out);
                if (k + AT_ONCE >= pipeline.tiles) break;
                // Refill the stages of tiles k and k + 1. The next STAGES - 2 tiles are already in flight.
                team.barrier();
                pipeline.start_copies(p, team, k + STAGES);
                pipeline.start_copies(p, team, k + STAGES + 1);
            }
        }

        // After this barrier the team has read its last stage, so the copies of the next split may overwrite the
        // stages.
        team.barrier();
        Pipeline<F> next_pipeline;
        more = schedule.advance(p, team, taken, next_pipeline);
        // Clusters do not trigger the next kernel early, because its clusters would be placed on multiprocessors that
        // are still in use while others are free.
        if (CLUSTER == 1 && !more) let_later_kernels_begin();
        __syncthreads();
        schedule.check_previous();
        store_in_shared<F>(p, softmax, out, warp.rows, __any_sync(FULL_WARP, pipeline.bad), results);
        __syncthreads();
        schedule.store(p, kv_split, results);
        pipeline = next_pipeline;
    }
    schedule.finish(p);
}
