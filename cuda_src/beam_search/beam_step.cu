// Merge the lists of the candidates and keep the books of a step of beam search: which beams run on, which hypotheses
// are finished, whether the search is done.
//
//   candidates    the k largest keys of the lists, best first; a candidate is a beam, its parent, and a token
//   new_*         the best `beams` candidates whose token is no end token run on
//   new_finished  the best `beams` of the old pool and of the candidates that end, which must be among the best `beams`;
//                 the score of a candidate that ends is its total / penalty
//   new_done      done already, or no running beam can still better the worst of a full pool, or the last step
//
// Grid: a block per batch entry. Thread i has candidate i and place i of the pool.
// GROUPS: 32 for up to 16 candidates, THREADS for more.
//
// Speed of light: latency, of a launch and a chain of reductions over the block; the state is a few numbers per beam. On
// an H200 a step of 32 requests of 4 beams of 128256 float32 takes 27 us with its first stage, 1.5 us more than the
// top-k of as many candidates alone.
#include "beam_search/beams.cuh"
#include "beam_search/merge.cuh"

constexpr int MAX_ENDS = 8;

struct StepParams {
    const Key* lists;             // [batch, count, k]
    const void* log_probs;        // [batch, beams, vocab]; read again only with a diversity rate
    const float* scores;          // [batch, beams]; any of these may be the array of the same name below
    const float* finished_scores; // [batch, beams]
    const int* finished_lengths;
    const int* finished_ids;
    const int* finished_parents;
    const unsigned char* done; // [batch]
    int* new_ids;              // [batch, beams]
    int* new_parents;
    float* new_scores;
    float* new_finished_scores;
    int* new_finished_lengths;
    int* new_finished_ids;
    int* new_finished_parents;
    unsigned char* new_done;
    int count;
    int k;
    int depth;
    int beam_depth;
    int beams;
    int vocab;
    int dtype; // of log_probs: 0 float, 1 half, 2 bfloat16
    int diverse;
    int length; // of a hypothesis that ends in this step
    int last;   // whether all do
    int stop_when_full;
    int ends;
    int end_ids[MAX_ENDS];
    float penalty;          // length ** length_penalty
    float furthest_penalty; // the same of the length that a running beam may reach
};

template <int GROUPS> __global__ void __launch_bounds__(THREADS, 2) beam_step(const __grid_constant__ StepParams p) {
    __shared__ Selection<GROUPS> s;
    __shared__ Key sorted[MAX_K];
    __shared__ unsigned running_in_warp[WARPS];
    __shared__ float old_score[MAX_BEAMS], ending_score[MAX_BEAMS];
    __shared__ float running_score[MAX_BEAMS], pool_score[MAX_BEAMS];
    __shared__ int pool_length[MAX_BEAMS];
    const long long b = blockIdx.x;
    const int beams = p.beams, i = threadIdx.x, lane = i % 32, warp = i / 32;
    merge(s, p.lists + b * p.count * p.k, p.count, p.k, p.depth, p.beam_depth, sorted);

    // --- read everything: the arrays may be written in place ---
    const bool was_done = p.done[b];
    bool runs = false, ends = false;
    int token = 0, parent = 0;
    float score = -CUDART_INF_F;
    if (i < p.k) {
        const int id = key_id(sorted[i]);
        parent = id / p.vocab;
        token = id - parent * p.vocab;
        score = from_sortable(key_value(sorted[i]));
        if (p.diverse) {
            const long long at = b * beams * p.vocab + id;
            const float log_prob = p.dtype == 0   ? static_cast<const float*>(p.log_probs)[at]
                                   : p.dtype == 1 ? to_float(static_cast<const __half*>(p.log_probs)[at])
                                                  : to_float(static_cast<const __nv_bfloat16*>(p.log_probs)[at]);
            score = fmaxf(log_prob + p.scores[b * beams + parent], -CUDART_INF_F);
        }
        bool is_end = false;
        for (int e = 0; e < p.ends; ++e) is_end |= token == p.end_ids[e];
        runs = !is_end;
        // Only the best `beams` candidates may finish; the others are there so that `beams` are left to run.
        ends = i < beams && (is_end || p.last) && !was_done && score > -CUDART_INF_F;
    }
    const float ended = ends ? score / p.penalty : -CUDART_INF_F;
    float old = -CUDART_INF_F;
    int old_length = 0, old_id = 0, old_parent = 0;
    if (i < beams) {
        const long long at = b * beams + i;
        old = fmaxf(p.finished_scores[at], -CUDART_INF_F);
        old_length = p.finished_lengths[at];
        old_id = p.finished_ids[at];
        old_parent = p.finished_parents[at];
        old_score[i] = old;
        ending_score[i] = ended;
    }
    const unsigned running = __ballot_sync(FULL_WARP, runs);
    if (lane == 0) running_in_warp[warp] = running;
    __syncthreads();

    // --- the beams that run on: the best that do not end ---
    int place = __popc(running & ((1u << lane) - 1));
    for (int before = 0; before < warp; ++before) place += __popc(running_in_warp[before]);
    if (runs && place < beams) {
        const long long at = b * beams + place;
        p.new_ids[at] = token;
        p.new_parents[at] = parent;
        p.new_scores[at] = score;
        running_score[place] = score;
    }

    // --- the finished hypotheses: the best of the old and the new ones, the old first where they tie ---
    int old_rank = 0, new_rank = 0;
    if (i < beams) {
        for (int j = 0; j < beams; ++j) {
            old_rank += old_score[j] > old || (old_score[j] == old && j < i);
            old_rank += ending_score[j] > old;
            new_rank += old_score[j] >= ended;
            new_rank += ending_score[j] > ended || (ending_score[j] == ended && j < i);
        }
    }
    const auto keep = [&](int rank, float score, int length, int id, int parent) {
        if (rank >= beams) return;
        const long long at = b * beams + rank;
        p.new_finished_scores[at] = pool_score[rank] = score;
        p.new_finished_lengths[at] = pool_length[rank] = length;
        p.new_finished_ids[at] = id;
        p.new_finished_parents[at] = parent;
    };
    if (i < beams) keep(old_rank, old, old_length, old_id, old_parent);
    if (ends) keep(new_rank, ended, p.length, token, parent);
    __syncthreads();

    // --- done: no running beam can still better the worst of a full pool ---
    if (warp == 0) {
        float best = -CUDART_INF_F, worst = CUDART_INF_F;
        bool full = true;
        for (int j = lane; j < beams; j += 32) {
            best = fmaxf(best, running_score[j]);
            worst = fminf(worst, pool_score[j]);
            full &= pool_length[j] > 0;
        }
        best = lanes_max<32>(best);
        worst = lanes_min<32>(worst);
        full = __all_sync(FULL_WARP, full);
        const bool can_improve = !full || best / p.furthest_penalty > worst;
        if (lane == 0) p.new_done[b] = was_done || !can_improve || (p.stop_when_full && full) || p.last;
    }
}
