// Reconstruct the tokens of each beam from the tokens and parents of all steps.
//
//   out[t, b, j] = ids[t, b, beam(t)],   beam(t - 1) = parents[t, b, beam(t)],   beam(length - 1) = j
//   out[t, b, j] = end_id   for all t from the length of beam j on, and after the first end_id of beam j
//
// If last_ids and last_parents are given, they replace the token and the parent of beam j in its last step.
//
// Grid: one block per batch entry, one thread per beam. A thread follows its beam from the last step to the first, with
// one dependent load per step. To shorten the latency of these loads, the block copies as many steps as fit to shared
// memory (ENTRIES tokens and parents), follows the beams through these steps, and repeats this until the first step.
//
// Speed of light: the latency of one dependent load from shared memory per step. On an H200, 128 steps of 32 batch
// entries with 4 beams each take 6.5 us; the memory traffic alone would take less time than a kernel launch.
#include "beam_search/beams.cuh"
#include "common/overlap.cuh"

struct TreeParams {
    const int* ids;      // [steps, batch, beams]
    const int* parents;  // [steps, batch, beams]
    const int* lengths;  // [batch] or [batch, beams]; null: steps
    const int* last_ids; // [batch, beams], replaces the token of a beam's last step; may be null
    const int* last_parents;
    int* out; // [steps, batch, beams]
    int steps;
    int batch;
    int beams;
    int length_per_beam;
    int end_id;
};

constexpr int THREADS = 128;
static_assert(MAX_BEAMS <= THREADS, "a thread per beam");

template <int ENTRIES> __global__ void __launch_bounds__(THREADS) gather_tree(const __grid_constant__ TreeParams p) {
    begin_behind_earlier_kernels();
    __shared__ int ids[ENTRIES], parents[ENTRIES];
    __shared__ int ended_at[MAX_BEAMS];
    const int b = blockIdx.x, j = threadIdx.x, beams = p.beams;
    const long long pitch = (long long)p.batch * beams, base = (long long)b * beams;
    int length = 0, beam = j, ended = p.steps;
    if (j < beams) {
        length = p.steps;
        if (p.lengths) length = min(max(p.lengths[p.length_per_beam ? base + j : b], 0), p.steps);
        // The fill writes end_id from step `ended` on. `ended` is the beam's length, or the step of the beam's first
        // end_id if that step is earlier.
        ended = length;
    }
    const int at_once = ENTRIES / beams;
    for (int to = p.steps; to > 0; to -= at_once) {
        const int from = max(to - at_once, 0);
        __syncthreads();
        for (int i = j; i < (to - from) * beams; i += THREADS) {
            const int level = i / beams;
            const long long at = (from + level) * pitch + base + (i - level * beams);
            ids[i] = p.ids[at];
            parents[i] = p.parents[at];
        }
        __syncthreads();
        if (j >= beams) continue;
        for (int level = min(to, length) - 1; level >= from; --level) {
            int token, parent;
            if (p.last_ids && level == length - 1) {
                token = p.last_ids[base + j];
                parent = p.last_parents[base + j];
            } else {
                token = ids[(level - from) * beams + beam];
                parent = parents[(level - from) * beams + beam];
            }
            p.out[level * pitch + base + j] = token;
            beam = min(max(parent, 0), beams - 1);
            if (token == p.end_id) ended = level;
        }
    }
    if (j < beams) ended_at[j] = ended;
    __syncthreads();
    for (long long i = j; i < (long long)p.steps * beams; i += THREADS) {
        const int level = int(i / beams), of = int(i - (long long)level * beams);
        if (level >= ended_at[of]) p.out[level * pitch + base + of] = p.end_id;
    }
}
