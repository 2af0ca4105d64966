// Perform one step of beam search: merge the candidate lists, select the running beams, update the pool of finished
// hypotheses, and decide whether the search is done.
//
//   candidates    the k largest keys of the lists (selection.cuh), best first; an id is parent * vocab + token
//   new_*         the running beams: the best `beams` candidates whose token is not an end token
//   new_finished  the pool: the best `beams` hypotheses among the old pool and the ending candidates. Only the best
//                 `beams` candidates may end; their score is total / penalty
//   new_done      true if done was true, or this is the last step, or the pool is full and (unless stop_when_full)
//                 no running beam can still beat its worst hypothesis
//
// Grid: one block per batch entry. Thread i handles candidate i and pool entry i. GROUPS (groups of threads, see
// selection.cuh): 32 for up to 16 candidates, else THREADS. LATE: the kernel reads the index of the step from device
// memory (`step`), so that one captured CUDA graph serves all steps.
//
// Speed of light: the latency of a launch and of a chain of block reductions; the state is only a few values per beam.
// On an H200, a step for 32 requests with 4 beams each and a vocabulary of 128256 (float32) takes 27 us including
// topk_chunks, 1.5 us more than a top-k of the same size without beam_step.
#include "beam_search/beams.cuh"
#include "beam_search/merge.cuh"
#include "common/overlap.cuh"

constexpr int MAX_ENDS = 8;

struct StepParams {
    const Key* lists;             // [batch, count, k]
    const void* log_probs;        // [batch, beams, vocab]; read again only with a diversity rate
    const float* scores;          // [batch, beams]; from here on, an array may be the same as its new_ array
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
    int dtype;   // type of log_probs: 0 float, 1 half, 2 bfloat16
    int diverse; // the keys include the diversity term, but the scores must not: recompute them
    int length;  // length of a hypothesis that ends in this step
    int last;    // this is the last step, so every candidate ends
    int stop_when_full;
    int ends;
    int end_ids[MAX_ENDS];
    float penalty;          // length ** length_penalty
    float furthest_penalty; // length penalty at the greatest length that a running beam may reach
    // LATE: the kernel derives `length`, `last` and `penalty` from these, and `furthest_penalty` if it is 0.
    int max_steps;
    const int* step; // [1], clamped to [0, max_steps - 1]
    double length_penalty;
};

// The values that the kernel derives from `step` if LATE.
struct Found {
    int length, last;
    float penalty, furthest_penalty;
};

// Accessors to the values that depend on the step. The values come from `found` if LATE, else from the kernel's
// parameters.
template <bool LATE> struct Moment {
    const StepParams& p;
    const Found& found;

    __device__ __forceinline__ int length() const { return LATE ? found.length : p.length; }
    __device__ __forceinline__ int last() const { return LATE ? found.last : p.last; }
    __device__ __forceinline__ float penalty() const { return LATE ? found.penalty : p.penalty; }
    __device__ __forceinline__ float furthest_penalty() const {
        return LATE ? found.furthest_penalty : p.furthest_penalty;
    }
};

// Values that the threads of a block exchange.
struct Exchange {
    unsigned running_in_warp[WARPS];
    float old_score[MAX_BEAMS], ending_score[MAX_BEAMS];
    float running_score[MAX_BEAMS], pool_score[MAX_BEAMS];
    int pool_length[MAX_BEAMS];
};

// A thread's candidate. `runs`: the candidate may become a running beam. `ends`: the candidate may enter the pool. Both
// stay false in a thread without a candidate.
struct Candidate {
    bool runs = false, ends = false;
    int token = 0, parent = 0;
    float score = -CUDART_INF_F;

    template <bool LATE>
    __device__ __forceinline__ void load(const StepParams& p, long long b, Key key, bool was_done,
                                         const Moment<LATE>& now) {
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
        for (int e = 0; e < p.ends; ++e) is_end |= token == p.end_ids[e];
        runs = !is_end;
        // Only the best `beams` candidates may enter the pool. The list has more candidates, so that at least `beams`
        // of them do not end.
        ends = threadIdx.x < p.beams && (is_end || now.last()) && !was_done && score > -CUDART_INF_F;
    }
};

// An entry of the pool: a finished hypothesis.
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

// Write the running beams: the best candidates that do not end. `running` is a mask of the lanes of this warp whose
// candidate may become a running beam.
__device__ __forceinline__ void write_running(const StepParams& p, long long b, Exchange& shared, const Candidate& mine,
                                              unsigned running) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int place = __popc(running & ((1u << lane) - 1));
    for (int before = 0; before < warp; ++before) place += __popc(shared.running_in_warp[before]);
    if (mine.runs && place < p.beams) {
        const long long at = b * p.beams + place;
        p.new_ids[at] = mine.token;
        p.new_parents[at] = mine.parent;
        p.new_scores[at] = mine.score;
        shared.running_score[place] = mine.score;
    }
}

// Write the new pool: the best hypotheses of the old pool and of the candidates that end. If scores are equal, entries
// of the old pool rank before candidates.
template <bool LATE>
__device__ __forceinline__ void write_pool(const StepParams& p, long long b, Exchange& shared, const Hypothesis& old,
                                           const Candidate& mine, float ended, const Moment<LATE>& now) {
    const int i = threadIdx.x;
    int old_rank = 0, new_rank = 0;
    if (i < p.beams) {
        for (int j = 0; j < p.beams; ++j) {
            old_rank += shared.old_score[j] > old.score || (shared.old_score[j] == old.score && j < i);
            old_rank += shared.ending_score[j] > old.score;
            new_rank += shared.old_score[j] >= ended;
            new_rank += shared.ending_score[j] > ended || (shared.ending_score[j] == ended && j < i);
        }
    }
    const auto keep = [&](int rank, float score, int length, int id, int parent) {
        if (rank >= p.beams) return;
        const long long at = b * p.beams + rank;
        p.new_finished_scores[at] = shared.pool_score[rank] = score;
        p.new_finished_lengths[at] = shared.pool_length[rank] = length;
        p.new_finished_ids[at] = id;
        p.new_finished_parents[at] = parent;
    };
    if (i < p.beams) keep(old_rank, old.score, old.length, old.id, old.parent);
    if (mine.ends) keep(new_rank, ended, now.length(), mine.token, mine.parent);
}

// Write to new_done whether the search of batch entry b is done. Run by one warp.
template <bool LATE>
__device__ __forceinline__ void write_done(const StepParams& p, long long b, const Exchange& shared, bool was_done,
                                           const Moment<LATE>& now) {
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
    const bool can_improve = !full || best / now.furthest_penalty() > worst;
    if (lane == 0) p.new_done[b] = was_done || !can_improve || (p.stop_when_full && full) || now.last();
}

// Derive the values of a step whose index is in device memory. Only one thread calls this function, because double
// precision is slow on some GPUs. The penalty has the same bits as a penalty computed on the host.
__device__ __forceinline__ Found find_moment(const StepParams& p) {
    const int length = min(max(*p.step, 0), p.max_steps - 1) + 1;
    const float penalty = p.length_penalty == 1.0 ? float(length) : float(pow(double(length), p.length_penalty));
    return {length, length == p.max_steps, penalty, p.furthest_penalty > 0.f ? p.furthest_penalty : penalty};
}

template <int GROUPS, bool LATE = false>
__global__ void __launch_bounds__(THREADS, 2) beam_step(const __grid_constant__ StepParams p) {
    begin_behind_earlier_kernels();
    __shared__ Selection<GROUPS> s;
    __shared__ Key sorted[MAX_K];
    __shared__ Exchange shared;
    __shared__ Found found;
    const long long b = blockIdx.x;
    const int i = threadIdx.x;
    const Moment<LATE> now = {p, found};
    // The barriers in `merge` separate this write from the first use.
    if (LATE && i == THREADS - 1) found = find_moment(p);
    merge(s, p.lists + b * p.count * p.k, p.count, p.k, p.depth, p.beam_depth, sorted);

    // Read all inputs before the first write, because the new arrays may alias the old arrays.
    const bool was_done = p.done[b];
    Candidate mine;
    if (i < p.k) mine.load(p, b, sorted[i], was_done, now);
    const float ended = mine.ends ? mine.score / now.penalty() : -CUDART_INF_F;
    Hypothesis old;
    if (i < p.beams) {
        old.load(p, b * p.beams + i);
        shared.old_score[i] = old.score;
        shared.ending_score[i] = ended;
    }
    const unsigned running = __ballot_sync(FULL_WARP, mine.runs);
    if (i % 32 == 0) shared.running_in_warp[i / 32] = running;
    __syncthreads();

    write_running(p, b, shared, mine, running);
    write_pool(p, b, shared, old, mine, ended, now);
    __syncthreads();
    if (i < 32) write_done(p, b, shared, was_done, now);
}
