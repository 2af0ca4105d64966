// Find the tokens of the padded rows of a block. Token t is in padded row `t + padding_offset[t]`, which increases
// strictly with t.
#pragma once
#include "common/warp.cuh"

// Return the first token whose padded row is at least `row`. A warp searches: in each step its 32 lanes test 32 tokens.
__device__ __forceinline__ int first_token_from(const int* padding_offset, int tokens, unsigned row, int lane) {
    // The padded row of token t is at least t, so the search ends at token `row`.
    int low = 0, high = int(min(unsigned(tokens), row));
    while (low < high) {
        const int step = (high - low - 1) / 32 + 1;
        const long long probe = low + (lane + 1LL) * step - 1;
        const bool before = probe < high && unsigned(probe) + unsigned(padding_offset[probe]) < row;
        low += __popc(__ballot_sync(FULL_WARP, before)) * step;
        high = int(min(unsigned(high), unsigned(low) + step - 1));
    }
    return low;
}

// Set token_of[r] to the token in padded row `first_row + r`, or to -1. All threads of the block call this. The tokens
// of a tile are consecutive, so a search for the first token is enough.
template <int THREADS>
__device__ __forceinline__ void find_tokens(const int* padding_offset, int tokens, unsigned first_row, int rows,
                                            int* token_of) {
    __shared__ int first_token;
    if (threadIdx.x < 32) {
        const int found = first_token_from(padding_offset, tokens, first_row, threadIdx.x);
        if (threadIdx.x == 0) first_token = found;
    }
    for (int r = threadIdx.x; r < rows; r += THREADS) token_of[r] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < min(rows, tokens - first_token); i += THREADS) {
        const int token = first_token + i;
        const unsigned r = unsigned(token) + unsigned(padding_offset[token]) - first_row;
        // Two tokens share a row only if padding_offset is wrong. Then use the later token.
        if (r < unsigned(rows)) atomicMax(&token_of[r], token);
    }
    __syncthreads();
}
