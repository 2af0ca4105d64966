// Make one step of beam search: find new running beams, and a new pool of finished hypotheses.
//
//   candidates    the k largest keys of the lists (selection.cuh), best first; an id is parent * vocab + token
//   new_*         the running beams: the best `beams` candidates whose token is not an end token
//   new_finished  the pool: the best `beams` hypotheses among the old pool and the ending candidates. Only the best
//                 `beams` candidates may end; their score is total / penalty
//   new_done      true if done was true, if this is the last step, or if the pool is full and one of these holds:
//                 stop_when_full is set, or no running beam can still beat the worst hypothesis of the pool
//
// Grid: one block per batch entry. Thread i handles candidate i and pool entry i. GROUPS: see selection.cuh.
// STEP_ON_DEVICE: the kernel reads the index of the step from device memory, so that one captured CUDA graph serves all
// steps.
//
// Speed of light: the latency of a launch and of a chain of block reductions. On an H200, a step for 32 requests with 4
// beams each and a vocabulary of 128256 (float32) takes 27 us including topk_chunks, 1.5 us more than a top-k.
#include "beam_search/beams.cuh"
#include "beam_search/merge.cuh"
#include "common/overlap.cuh"

constexpr int MAX_ENDS = 8;

struct StepParams {
    const Key* lists;             // [batch, count, k]
    const void* log_probs;        // [batch, beams, vocab]; read again only with a diversity rate
    const float* scores;          // [batch, beams]; may alias new_scores; each array below may alias its new_ array
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
    int count; // lists per batch entry
    int k;
    int depth, beam_depth; // arguments of merge
    int beams;
    int vocab;
    int dtype;   // of log_probs: 0 float, 1 half, 2 bfloat16
    int diverse; // the keys include the diversity term; recompute the scores without it
    int length;  // of a hypothesis that ends in this step
    int last;    // every candidate finishes
    int stop_when_full;
    int end_count;
    int end_ids[MAX_ENDS];
    float penalty;          // length ** length_penalty
    float furthest_penalty; // `penalty` at the greatest length that a running beam may reach
    // STEP_ON_DEVICE: the kernel computes `length`, `last` and `penalty` from the next three fields. If
    // `furthest_penalty` is 0, `penalty` replaces it.
    int max_steps;
    const int* step; // [1], clamped to [0, max_steps - 1]
    double length_penalty;
};

struct StepValues {
    int length, last;
    float penalty, furthest_penalty;
};

template <bool STEP_ON_DEVICE> struct StepInfo {
    const StepParams& p;
    const StepValues& step_values;

    __device__ __forceinline__ int length() const { return STEP_ON_DEVICE ? step_values.length : p.length; }
    __device__ __forceinline__ int last() const { return STEP_ON_DEVICE ? step_values.last : p.last; }
    __device__ __forceinline__ float penalty() const { return STEP_ON_DEVICE ? step_values.penalty : p.penalty; }
    __device__ __forceinline__ float furthest_penalty() const {
        return STEP_ON_DEVICE ? step_values.furthest_penalty : p.furthest_penalty;
    }
};

struct Exchange {
    unsigned running_in_warp[WARPS];
    float old_score[MAX_BEAMS], ending_score[MAX_BEAMS];
    float running_score[MAX_BEAMS], pool_score[MAX_BEAMS];
    int pool_length[MAX_BEAMS];
};

struct Candidate {
    bool can_run = false, can_finish = false;
    int token = 0, parent = 0;
    float score = -CUDART_INF_F;

    template <bool STEP_ON_DEVICE>
    __device__ __forceinline__ void load(const StepParams& p, long long b, Key key, bool was_done,
                                         const StepInfo<STEP_ON_DEVICE>& step_info) {
        const int id = key_id(key);
        parent = id / p.vocab;
        token = id - parent * p.vocab;
        score = from_sortable(key_value(key));
        if (p.diverse) {
            const long long at = b * p.beams * p.vocab + id;
            const float log_prob = p.dtype == 0   ? static_cast<const float*>(p.log_probs)[at]
                                   : p.dtype == 1 ? to_float(static_cast<const __half*>(p.log_probs)[at])
                                                  : to_float(static_cast<const __nv_bfloat16*>(p.log_probs)[at]);
            score = fmaxf(log_prob + p.scores[b * p.beams + parent], -CUDART_INF_F);
        }
        bool is_end = false;
        for (int e = 0; e < p.end_count; ++e) is_end |= token == p.end_ids[e];
        can_run = !is_end;
        // The list has more than `beams` candidates, so that at least `beams` of them can become running beams. Only
        // its best `beams` candidates can finish.
        can_finish = threadIdx.x < p.beams && (is_end || step_info.last()) && !was_done && score > -CUDART_INF_F;
    }
};

struct Hypothesis {
    float score = -CUDART_INF_F;
    int length = 0, id = 0, parent = 0;

    __device__ __forceinline__ void load(const StepParams& p, long long at) {
        score = fmaxf(p.finished_scores[at], -CUDART_INF_F);
        length = p.finished_lengths[at];
        id = p.finished_ids[at];
        parent = p.finished_parents[at];
    }
};

// Bit l of `running` is set if the candidate of lane l of this warp can become a running beam.
__device__ __forceinline__ void write_running(const StepParams& p, long long b, Exchange& shared, const Candidate& mine,
                                              unsigned running) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int rank = __popc(running & ((1u << lane) - 1));
    for (int other_warp = 0; other_warp < warp; ++other_warp) rank += __popc(shared.running_in_warp[other_warp]);
    if (mine.can_run && rank < p.beams) {
        const long long at = b * p.beams + rank;
        p.new_ids[at] = mine.token;
        p.new_parents[at] = mine.parent;
        p.new_scores[at] = mine.score;
        shared.running_score[rank] = mine.score;
    }
}

// Among equal scores, the hypotheses of the old pool come first.
template <bool STEP_ON_DEVICE>
__device__ __forceinline__ void write_pool(const StepParams& p, long long b, Exchange& shared, const Hypothesis& old,
                                           const Candidate& mine, float final_score,
                                           const StepInfo<STEP_ON_DEVICE>& step_info) {
    const int i = threadIdx.x;
    int old_rank = 0, new_rank = 0;
    if (i < p.beams) {
        for (int j = 0; j < p.beams; ++j) {
            old_rank += shared.old_score[j] > old.score || (shared.old_score[j] == old.score && j < i);
            old_rank += shared.ending_score[j] > old.score;
            new_rank += shared.old_score[j] >= final_score;
            new_rank += shared.ending_score[j] > final_score || (shared.ending_score[j] == final_score && j < i);
        }
    }
    const auto write_entry = [&](int rank, float score, int length, int id, int parent) {
        if (rank >= p.beams) return;
        const long long at = b * p.beams + rank;
        p.new_finished_scores[at] = shared.pool_score[rank] = score;
        p.new_finished_lengths[at] = shared.pool_length[rank] = length;
        p.new_finished_ids[at] = id;
        p.new_finished_parents[at] = parent;
    };
    if (i < p.beams) write_entry(old_rank, old.score, old.length, old.id, old.parent);
    if (mine.can_finish) write_entry(new_rank, final_score, step_info.length(), mine.token, mine.parent);
}

// Run by one warp.
template <bool STEP_ON_DEVICE>
__device__ __forceinline__ void write_done(const StepParams& p, long long b, const Exchange& shared, bool was_done,
                                           const StepInfo<STEP_ON_DEVICE>& step_info) {
    const int lane = threadIdx.x % 32;
    float best = -CUDART_INF_F, worst = CUDART_INF_F;
    bool full = true;
    for (int j = lane; j < p.beams; j += 32) {
        best = fmaxf(best, shared.running_score[j]);
        worst = fminf(worst, shared.pool_score[j]);
        full &= shared.pool_length[j] > 0;
    }
    best = lanes_max<32>(best);
    worst = lanes_min<32>(worst);
    full = __all_sync(FULL_WARP, full);
    const bool can_improve = !full || best / step_info.furthest_penalty() > worst;
    if (lane == 0) p.new_done[b] = was_done || !can_improve || (p.stop_when_full && full) || step_info.last();
}

// One thread runs this, because double precision is slow on some GPUs. If the host computes `penalty`, it gets the same
// bits.
__device__ __forceinline__ StepValues load_step_values(const StepParams& p) {
    const int length = min(max(*p.step, 0), p.max_steps - 1) + 1;
    const float penalty = p.length_penalty == 1.0 ? float(length) : float(pow(double(length), p.length_penalty));
    return {length, length == p.max_steps, penalty, p.furthest_penalty > 0.f ? p.furthest_penalty : penalty};
}

template <int GROUPS, bool STEP_ON_DEVICE = false>
__global__ void __launch_bounds__(THREADS, 2) beam_step(const __grid_constant__ StepParams p) {
    begin_behind_earlier_kernels();
    __shared__ Selection<GROUPS> s;
    __shared__ Key sorted[MAX_K];
    __shared__ Exchange shared;
    __shared__ StepValues step_values;
    const long long b = blockIdx.x;
    const int i = threadIdx.x;
    const StepInfo<STEP_ON_DEVICE> step_info = {p, step_values};
    // The barriers in `merge` separate the write to `step_values` from its first read.
    if (STEP_ON_DEVICE && i == THREADS - 1) step_values = load_step_values(p);
    merge(s, p.lists + b * p.count * p.k, p.count, p.k, p.depth, p.beam_depth, sorted);

    // Read all inputs before the first write, because new arrays may alias old arrays.
    const bool was_done = p.done[b];
    Candidate mine;
    if (i < p.k) mine.load(p, b, sorted[i], was_done, step_info);
    const float final_score = mine.can_finish ? mine.score / step_info.penalty() : -CUDART_INF_F;
    Hypothesis old;
    if (i < p.beams) {
        old.load(p, b * p.beams + i);
        shared.old_score[i] = old.score;
        shared.ending_score[i] = final_score;
    }
    const unsigned running = __ballot_sync(FULL_WARP, mine.can_run);
    if (i % 32 == 0) shared.running_in_warp[i / 32] = running;
    __syncthreads();

    write_running(p, b, shared, mine, running);
    write_pool(p, b, shared, old, mine, final_score, step_info);
    __syncthreads();
    if (i < 32) write_done(p, b, shared, was_done, step_info);
}
