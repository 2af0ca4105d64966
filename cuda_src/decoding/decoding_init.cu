// Initialize the state of each sequence.
//
//   word_ids[b] = start_ids[b],   sequence_length[b] = 0,   finished[b] = false,   cum_log_probs[b] = 0
//
// With SORTED, also write the input of a segmented sort of [batch, vocab] probabilities:
//
//   offsets[b] = b * vocab,   id_vals[b, i] = i
//
// Grid: one thread per sequence. With SORTED, `slices` blocks per sequence, and ITEMS ids per thread.
//
// Speed of light: the latency of a launch; with SORTED, the memory bandwidth.
#include "common/overlap.cuh"

struct DecodingInitParams {
    const int* start_ids;    // [batch]
    int* word_ids;           // [batch], may be start_ids
    int* sequence_length;    // [batch]
    unsigned char* finished; // [batch]
    float* cum_log_probs;    // [batch]
    int* offsets;            // SORTED: [batch + 1]
    int* id_vals;            // SORTED: [batch, vocab]
    int batch;
    int vocab;
    int slices; // SORTED: blocks per row
};

template <int THREADS, int ITEMS, bool SORTED>
__global__ void __launch_bounds__(THREADS) decoding_init(const __grid_constant__ DecodingInitParams p) {
    begin_behind_earlier_kernels();
    int row = blockIdx.x * THREADS + threadIdx.x;
    bool starts = row < p.batch;
    if constexpr (SORTED) {
        row = blockIdx.x / p.slices;
        const int slice = blockIdx.x - row * p.slices;
        starts = row < p.batch && slice == 0 && threadIdx.x == 0;
        if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[p.batch] = p.batch * p.vocab;
        if (row < p.batch) {
            int* ids = p.id_vals + (long long)row * p.vocab;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int column = (slice * ITEMS + i) * THREADS + threadIdx.x;
                if (column < p.vocab) ids[column] = column;
            }
        }
    }
    if (!starts) return;
    p.word_ids[row] = p.start_ids[row];
    p.sequence_length[row] = 0;
    p.finished[row] = 0;
    p.cum_log_probs[row] = 0.f;
    if constexpr (SORTED) p.offsets[row] = row * p.vocab;
}
