// Compute the offset of each token of a padded batch.
//
// The first lengths[b] of the max_seq_len padded rows of sequence b hold tokens.
//
//   cu_seqlens[b]     = lengths[0] + ... + lengths[b - 1]
//   padding_offset[t] = b * max_seq_len - cu_seqlens[b], if token t is in sequence b; its padded row is
//                       t + padding_offset[t]
//
// Grid: one block per tokens_per_block tokens. Each block computes the prefix sums of the lengths itself, so that no
// block waits for another. It scans tiles of sequences up to its last token. The last block writes cu_seqlens.
//
// Speed of light: latency of a launch, a load, a scan and a binary search. On an H200, 16384 tokens of 64 sequences
// take 2.2 us, four times as long as an empty kernel.
#include "common/overlap.cuh"
#include "common/warp.cuh"

struct BuildParams {
    const int* lengths;  // [batch], clamped to [0, max_seq_len]
    int* padding_offset; // [tokens]
    int* cu_seqlens;     // [batch + 1]
    int tokens;          // a token beyond the sum of the lengths gets a row after the batch
    int batch;
    int max_seq_len;
    int tokens_per_block;
    int first_step; // the largest power of two below min(batch, THREADS * LENGTHS)
};

constexpr int LENGTHS = 4; // sequence lengths per thread and tile

template <int THREADS> struct Sequences {
    static constexpr int TILE = THREADS * LENGTHS, WARPS = THREADS / 32;
    const BuildParams& p;
    int (&starts)[TILE]; // tokens before each sequence of the tile
    int (&warp_sums)[WARPS];
    const int lane, warp;
    const bool last_block;

    // Fill `starts` for the sequences of a tile. `before`: tokens before the tile. Return the number of tokens up to
    // the end of the tile.
    __device__ __forceinline__ int scan(int tile, int before) const {
        int length[LENGTHS], sum = 0;
#pragma unroll
        for (int i = 0; i < LENGTHS; ++i) {
            const int sequence = tile + threadIdx.x * LENGTHS + i;
            length[i] = sequence < p.batch ? min(max(p.lengths[sequence], 0), p.max_seq_len) : 0;
            sum += length[i];
        }
        const int inclusive = lanes_inclusive_sum<32>(sum);
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        const int sums = lanes_inclusive_sum<32>(lane < WARPS ? warp_sums[lane] : 0);
        const int after = before + __shfl_sync(FULL_WARP, sums, WARPS - 1);
        const int earlier_warps = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
        int start = before + (warp ? earlier_warps : 0) + inclusive - sum;
#pragma unroll
        for (int i = 0; i < LENGTHS; ++i) {
            const int sequence = tile + threadIdx.x * LENGTHS + i;
            starts[threadIdx.x * LENGTHS + i] = start;
            start += length[i];
            if (last_block && sequence < p.batch) p.cu_seqlens[sequence + 1] = start;
        }
        __syncthreads();
        return after;
    }
    // Return the last of the tile's sequences that start at or before the token. This skips empty sequences.
    __device__ __forceinline__ int find(int token) const {
        int sequence = 0;
        for (int step = p.first_step; step > 0; step /= 2)
            if (starts[sequence + step] <= token) sequence += step;
        return sequence;
    }
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS) build_padding_offset(const __grid_constant__ BuildParams p) {
    begin_behind_earlier_kernels();
    using Tiles = Sequences<THREADS>;
    __shared__ int starts[Tiles::TILE];
    __shared__ int warp_sums[Tiles::WARPS];
    const bool last_block = blockIdx.x == gridDim.x - 1;
    const Tiles sequences{p, starts, warp_sums, int(threadIdx.x % 32), int(threadIdx.x / 32), last_block};
    const int first = int(blockIdx.x) * p.tokens_per_block;
    const int end = last_block ? p.tokens : first + p.tokens_per_block;

    int before = 0; // tokens before the tile
    for (int tile = 0; tile < p.batch && (before < end || last_block); tile += Tiles::TILE) {
        const int after = sequences.scan(tile, before);
        for (int token = max(first, before) + threadIdx.x; token < min(end, after); token += THREADS) {
            const int sequence = sequences.find(token);
            p.padding_offset[token] = (tile + sequence) * p.max_seq_len - starts[sequence];
        }
        before = after;
        __syncthreads();
    }
    for (int token = max(first, before) + threadIdx.x; token < end; token += THREADS)
        p.padding_offset[token] = p.batch * p.max_seq_len - before;
    if (last_block && threadIdx.x == 0) p.cu_seqlens[0] = 0;
}
