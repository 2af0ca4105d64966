// Mark the sequences that end with a stop word.
//
//   finished[b] |= sequence b ends with one of its stop words
//
// Grid: one warp per sequence. Lane l tests the words `l`, `l + 32` and so on.
//
// Speed of light: the latency of a launch and of a chain of dependent loads. The comparison of a word nearly always
// stops at the first token.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "decoding/words.cuh"

struct StopWordsParams {
    const int* output_ids;      // [batch, max_length]
    const int* sequence_length; // [batch]
    const int* stop_words;      // [2, stop_words_size] for all rows, or one such list per row
    unsigned char* finished;    // [batch]
    long long ids_row_stride;
    long long stop_words_stride; // 0: one list for all rows
    int batch;
    int max_length;
    int stop_words_size;
};

template <int WARPS_PER_BLOCK>
__global__ void __launch_bounds__(WARPS_PER_BLOCK * 32)
    stop_words_criterion(const __grid_constant__ StopWordsParams p) {
    begin_behind_earlier_kernels();
    const int row = blockIdx.x * WARPS_PER_BLOCK + threadIdx.x / 32;
    if (row >= p.batch) return;
    const int* sequence = p.output_ids + row * p.ids_row_stride;
    const int length = min(max(p.sequence_length[row], 0), p.max_length);
    const Words words(p.stop_words + row * p.stop_words_stride, p.stop_words_size);
    bool stops = false;
    for (int w = threadIdx.x % 32; w < words.size; w += 32) {
        int begin, end;
        stops = stops || (words.find(w, begin, end) && ends_with(sequence, length, words.ids + begin, end - begin));
    }
    if (__any_sync(FULL_WARP, stops) && threadIdx.x % 32 == 0) p.finished[row] = 1;
}
