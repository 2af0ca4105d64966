// Count the new token of each sequence, and finish the sequences whose new token is end_id.
//
//   sequence_length[b] += not finished[b];   finished[b] |= word_ids[b] == end_id
//
// Grid: one thread per sequence.
//
// Speed of light: the latency of a launch and of two dependent loads.
#include "common/overlap.cuh"

struct UpdateFinishedParams {
    const int* word_ids;     // [batch]
    unsigned char* finished; // [batch]
    int* sequence_length;    // [batch]
    int batch;
    int end_id;
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS) update_finished(const __grid_constant__ UpdateFinishedParams p) {
    begin_behind_earlier_kernels();
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= p.batch || p.finished[row]) return;
    p.sequence_length[row] += 1;
    p.finished[row] = p.word_ids[row] == p.end_id;
}
