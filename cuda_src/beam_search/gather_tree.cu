// Gather the tokens of each beam from the tokens and parents of all steps.
//
//   out[t, b, j] = ids[t, b, beam(t)],   beam(t - 1) = parents[t, b, beam(t)],   beam(length - 1) = j
//   out[t, b, j] = end_id   from the length of beam j on, and after its first end_id
//
// If last_ids and last_parents are given, they replace the token and the parent of beam j in step length - 1.
//
// Grid: one block per batch entry, one thread per beam. Following a beam back takes one dependent load per step, so the
// block copies ENTRIES of the steps at a time to shared memory, from the last to the first.
//
// Speed of light: latency of one dependent shared memory load per step. On an H200, 128 steps of 32 batch entries of 4
// beams take 6.5 us; the bytes alone would take less than a launch.
#include "beam_search/beams.cuh"
#include "common/overlap.cuh"

struct TreeParams {
    const int* ids;      // [steps, batch, beams]
    const int* parents;  // [steps, batch, beams]
    const int* lengths;  // [batch] or [batch, beams]; null: steps
    const int* last_ids; // [batch, beams], with last_parents replaces a beam's own last step; may be null
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
        // The fill begins here unless an end_id comes earlier.
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
