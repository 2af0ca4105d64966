// Attention of the last few tokens of each sequence over its keys and values, which lie in blocks of a paged cache.
//
//   position = length - query_tokens + i                          of query token i
//   score[t] = scale * key_scale * dot(query[i, head, :], key[t, head / group, :])
//              then softcap * tanh(score / softcap), then + slope[head] * (t - position)
//   p        = softmax over the t <= position (and > position - window), with exp(sink[head]) in its denominator
//   out      = value_scale * sum_t p[t] * value[t, head / group, :]
//   lse      = log of that denominator, natural
//
// The token t of a sequence is slot t % block_size of the cache's block tables[seq, t / block_size].
//
// The heads of a group and the query tokens of a sequence are the ROWS that share a kv head, so that the cache is read
// once for all of them. An item is (sequence, kv head, block of ROWS rows). Its tokens are cut into pieces where it
// would be more than an equal share for a block of threads; `split` fixes the size of all pieces instead, so that the
// sums of a row are formed in the same order whatever else is in the batch. Blocks of threads take one piece after the
// other. Of an item in several pieces each leaves a partial result (maximum, sum, output), and the block that comes
// last merges them. Where there are few items, a cluster of CLUSTER blocks has one each, and its blocks merge what they
// found through each other's shared memory.
//
// The kernel on tensor cores. Grid: as many blocks as fit the GPU at once; or CLUSTER for each item. A block has WARPS
// warps in teams of TEAM; a team takes every TEAMS-th tile of 16 tokens of a piece, and each of its warps 16 of the
// 16 * TEAM rows. A team runs a pipeline of its own, STAGES tiles deep, without a barrier for the block: cp.async into
// shared memory, from there fragments.
//
// HEAD_DIM == 0 or BLOCK_SIZE == 0: from the arguments. DIMS: head_dim rounded up to what the registers hold. EXTRAS:
// whether there is a softcap, a slope or a block-sparse pattern. CLUSTER > 1: as many blocks per item.
//
// A lane of `attend` and its neighbours: see common/mma.cuh. Scores are kept in powers of 2 until they are stored.
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "paged_attention/form.cuh"
#include "paged_attention/masks.cuh"
#include "paged_attention/pipeline.cuh"
#include "paged_attention/query.cuh"
#include "paged_attention/schedule.cuh"
#include "paged_attention/team.cuh"

// Leave what a warp has found for its rows in shared memory. After a barrier, when all warps have left the stages.
template <typename F>
__device__ __forceinline__ void leave_results(const Params& p, const typename F::Softmax& softmax,
                                              const float (&out)[F::OUT_FRAGMENTS][4], const Row (&rows)[2], bool bad,
                                              const typename F::Results& found) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / F::TEAM, member = warp % F::TEAM;
    const int row = lane / 4, pair = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int at = team * F::ROWS + member * 16 + row + 8 * j;
        const float correction = softmax.final_correction(j);
        float total = lanes_sum<4>(softmax.sum[j]) * correction;
        if (bad) total = CUDART_NAN_F;
        if (pair == 0) found.maxima[at] = softmax.maximum[j], found.sums[at] = total;
        if (!rows[j].valid) continue;
#pragma unroll
        for (int n = 0; n < F::OUT_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                found.outputs[(at - team * (F::ROWS - p.rows)) * F::Results::STRIDE + F::Tile::dim(n, pair * 2 + i)] =
                    out[n][2 * j + i] * correction;
    }
}

template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER>
__global__ __launch_bounds__(32 * warps_of(DIMS), 2) CLUSTER_OF(CLUSTER) void attend(const __grid_constant__ Params p) {
    using F = Form<T, CACHE, LAYOUT, HEAD_DIM, DIMS, BLOCK_SIZE, TEAM, EXTRAS, STAGES, CLUSTER>;
    using Tile = typename F::Tile;
    using Schedule = typename Choose<CLUSTER == 1, PieceQueue<F>, ClusterItem<F>>::type;
    __shared__ float maxima[F::TEAMS * F::ROWS], sums[F::TEAMS * F::ROWS];
    __shared__ float2 statistics[CLUSTER == 1 ? 1 : F::ROWS];
    __shared__ uint4 queries[F::QUERY_IN_SHARED ? F::KEY_STEPS * 32 * F::WARPS : 1];
    __shared__ int next;
    __shared__ bool last;
    __shared__ Segment previous;
    const Team<F> team(p);
    const typename F::Results found = {maxima, sums,
                                       reinterpret_cast<float*>(shared + (STAGES - 1) * F::TEAMS * 2 * Tile::BYTES)};
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    Schedule schedule(p, {next, previous, last}, statistics);
    Pipeline<F> pipeline;
    bool more = schedule.first(p, team, pipeline);
    if (more) pipeline.start(p, team);
    __syncthreads();
    while (more) {
        const Segment& segment = pipeline.segment;
        const Row rows[2] = {team.row_of(p, segment, 0), team.row_of(p, segment, 1)};
        ScoreTerms terms = {{rows[0].position(p, segment), rows[1].position(p, segment)}, {scale, scale}};
        team.clear_padding();
        typename F::Query query;
        load_query<F>(p, team, segment, rows, scale, query.fragments, terms.factors);
        query.keep(queries);
        int taken;
        schedule.draw(p, pipeline.tiles <= AHEAD, taken);
        if constexpr (EXTRAS) terms.load_slopes(p, rows);
        float out[F::OUT_FRAGMENTS][4] = {};
        typename F::Softmax softmax;
        // All rows see the tokens in between.
        const int all_from = p.window ? segment.length - p.window : 0;
        const int all_to = segment.length - p.query_tokens + 1;

        for (int k = 0; k < pipeline.tiles; ++k) {
            cp_async_wait_group<STAGES - 2>();
            team.barrier();
            pipeline.start_copies(p, team, k + STAGES - 1);
            schedule.draw(p, k == pipeline.tiles - 1 - AHEAD, taken);
            const int token = team.token(segment, k);
            if (token + TILE <= segment.low) continue;
            if constexpr (EXTRAS && TEAM == 1)
                if (p.sparse_stride && !__any_sync(FULL_WARP, seen<F>(p, team, segment, token))) continue;
            char* const stage = team.stage(k);
            const unsigned keys_at = shared_address(stage), values_at = keys_at + Tile::BYTES;
            if (token < segment.low || token + TILE > segment.length) team.clear_values(segment, token, stage);

            float scores[2][4] = {};
            F::Products::template multiply_keys<F::KEY_STEPS>(scores, query, keys_at, team.lane);
            scale_scores<F>(scores, p, segment, rows, terms, token, team.pair);
            if (token < all_from || token + TILE > all_to) mask_scores<F>(scores, p, terms, token, team.pair);
            unsigned weights[4];
            softmax.add(scores, out, weights);
            F::Products::multiply_values(out, weights, values_at, team.lane);
        }

        // The next piece begins as soon as the team has left the stages.
        team.barrier();
        Pipeline<F> following;
        more = schedule.go_on(p, team, taken, following);
        __syncthreads();
        schedule.look_back();
        leave_results<F>(p, softmax, out, rows, __any_sync(FULL_WARP, pipeline.bad), found);
        __syncthreads();
        schedule.store(p, segment, found);
        pipeline = following;
    }
    schedule.finish(p);
}
