// Reconstruct the tokens of each beam by following its parents from the last step to the first.
//
//   out[t, b, j] = ids[t, b, beam(t)],   beam(t - 1) = parents[t, b, beam(t)],   beam(length - 1) = j
//   out[t, b, j] = end_id   for all t from the length of beam j on, and after the first end_id of beam j
//
// `last_ids` and `last_parents` replace the token and the parent of beam j in its last step.
//
// Grid: one block per batch entry, one thread per beam. A beam needs one dependent load per step. To shorten the
// latency of these loads, the block copies chunks of steps (ENTRIES tokens and parents) to shared memory, and follows
// the beams through each chunk.
//
// Speed of light: the latency of the dependent loads. On an H200, 128 steps of 32 batch entries with 4 beams each take
// 6.5 us.
#include "beam_search/beams.cuh"
#include "common/overlap.cuh"

struct TreeParams {
    const int* ids;      // [steps, batch, beams]
    const int* parents;  // [steps, batch, beams]
    const int* lengths;  // [batch] or [batch, beams]; null: steps
    const int* last_ids; // [batch, beams]; may be null
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
    const long long step_stride = (long long)p.batch * beams, offset = (long long)b * beams;
    int length = 0, beam = j, ended = p.steps;
    if (j < beams) {
        length = p.steps;
        if (p.lengths) length = min(max(p.lengths[p.length_per_beam ? offset + j : b], 0), p.steps);
        // `ended` is the first step that gets end_id. It starts at the beam's length; an earlier end_id lowers it.
        ended = length;
    }
    const int chunk_steps = ENTRIES / beams;
    for (int chunk_end = p.steps; chunk_end > 0; chunk_end -= chunk_steps) {
        const int chunk_begin = max(chunk_end - chunk_steps, 0);
        __syncthreads();
        for (int i = j; i < (chunk_end - chunk_begin) * beams; i += THREADS) {
            const int step = i / beams;
            const long long at = (chunk_begin + step) * step_stride + offset + (i - step * beams);
            ids[i] = p.ids[at];
            parents[i] = p.parents[at];
        }
        __syncthreads();
        if (j >= beams) continue;
        for (int step = min(chunk_end, length) - 1; step >= chunk_begin; --step) {
            int token, parent;
            if (p.last_ids && step == length - 1) {
                token = p.last_ids[offset + j];
                parent = p.last_parents[offset + j];
            } else {
                token = ids[(step - chunk_begin) * beams + beam];
                parent = parents[(step - chunk_begin) * beams + beam];
            }
            p.out[step * step_stride + offset + j] = token;
            beam = min(max(parent, 0), beams - 1);
            if (token == p.end_id) ended = step;
        }
    }
    if (j < beams) ended_at[j] = ended;
    __syncthreads();
    for (long long i = j; i < (long long)p.steps * beams; i += THREADS) {
        const int step = int(i / beams), of_beam = int(i - (long long)step * beams);
        if (step >= ended_at[of_beam]) p.out[step * step_stride + offset + of_beam] = p.end_id;
    }
}
