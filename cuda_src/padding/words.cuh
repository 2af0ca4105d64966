// Find the words (rows of tokens, without padding) that belong to the padded rows of a block. The padded row of word w
// is `w + padding_offset[w]`. The padded row increases strictly with w, so the words can be found by a search.
#pragma once
#include "common/warp.cuh"

// Return the first word whose padded row is at least `row`. A whole warp searches. In each step the 32 lanes test 32
// words, which reduces the search range to 1/32.
__device__ __forceinline__ int first_word_from(const int* padding_offset, int words, unsigned row, int lane) {
    // Padded rows increase strictly, so the padded row of word w is at least w. Therefore the search can stop at word
    // `row`.
    int low = 0, high = int(min(unsigned(words), row));
    while (low < high) {
        const int step = (high - low - 1) / 32 + 1;
        const long long probe = low + (lane + 1LL) * step - 1;
        const bool before = probe < high && unsigned(probe) + unsigned(padding_offset[probe]) < row;
        low += __popc(__ballot_sync(FULL_WARP, before)) * step;
        high = int(min(unsigned(high), unsigned(low) + step - 1));
    }
    return low;
}

// For each row r of a tile, set word_of[r] to the word that belongs to padded row `first_row + r`, or to -1 if there is
// none. All threads of the block must call it. The words of a tile are consecutive, and there are at most `rows` of
// them. Therefore it is enough to search for the first word.
template <int THREADS>
__device__ __forceinline__ void find_words(const int* padding_offset, int words, unsigned first_row, int rows,
                                           int* word_of) {
    __shared__ int first_word;
    if (threadIdx.x < 32) {
        const int found = first_word_from(padding_offset, words, first_row, threadIdx.x);
        if (threadIdx.x == 0) first_word = found;
    }
    for (int r = threadIdx.x; r < rows; r += THREADS) word_of[r] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < min(rows, words - first_word); i += THREADS) {
        const int word = first_word + i;
        const unsigned r = unsigned(word) + unsigned(padding_offset[word]) - first_row;
        // Two words share a row only if padding_offset is wrong. In this case the later word is used.
        if (r < unsigned(rows)) atomicMax(&word_of[r], word);
    }
    __syncthreads();
}
