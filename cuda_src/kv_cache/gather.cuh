// Find the rows of a paged cache that a gather copies to dst.
//
//   row cu_seq_lens[b] + t of dst is token u % block_size of block block_table[b, u / block_size],
//   with u = seq_starts[b] + t
//
// A row of dst is skipped if its sequence, block table entry or block does not exist, so wrong index arrays never cause
// an access outside of an array.
#pragma once
#include "common/warp.cuh"
#include "kv_cache/format.cuh"

struct GatherRowsParams {
    const char* src;        // [blocks, block_size, columns]
    char* dst;              // T [tokens, columns]
    const int* block_table; // [batch, table_columns]
    const int* cu_seq_lens; // [batch + 1]
    const int* seq_starts;  // [batch], or null
    Scale scale;
    long long block_stride;
    long long token_stride;
    long long dst_stride;
    long long table_stride; // in elements
    int blocks;
    int table_columns;
    int batch;
    int tokens;
    int block_size;
    Divisor by_block_size;
    int columns;   // vectors per row
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

// Return how many of the ascending `values` are at most `limit`. A warp tests 32 values per step.
__device__ __forceinline__ int count_up_to(const int* values, int count, long long limit, int lane) {
    int low = 0, high = count;
    while (low < high) {
        const int step = (high - low - 1) / 32 + 1;
        const long long probe = low + (lane + 1LL) * step - 1;
        const bool counts = probe < high && __ldg(values + probe) <= limit;
        low += __popc(__ballot_sync(FULL_WARP, counts)) * step;
        high = int(min((long long)high, (long long)low + step - 1));
    }
    return low;
}

// Return the offset in src of row `token` of dst, or -1. The number of elements of cu_seq_lens that are at most `token`
// is in [low, high].
__device__ __forceinline__ long long find_row(const GatherRowsParams& p, long long token, int low, int high) {
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__ldg(p.cu_seq_lens + middle) <= token)
            low = middle + 1;
        else
            high = middle;
    }
    const int sequence = low - 1;
    if (sequence < 0 || sequence >= p.batch) return -1;
    const unsigned t = unsigned(token - __ldg(p.cu_seq_lens + sequence));
    const unsigned table_column = p.by_block_size.quotient(t);
    unsigned block_offset = t - table_column * p.block_size;
    long long entry = table_column;
    if (p.seq_starts) {
        const int start = __ldg(p.seq_starts + sequence), blocks = start / p.block_size;
        const int remainder = start - blocks * p.block_size; // negative for a negative start
        entry += remainder < 0 ? blocks - 1 : blocks;
        block_offset += remainder < 0 ? remainder + p.block_size : remainder;
        if (block_offset >= unsigned(p.block_size)) block_offset -= p.block_size, ++entry;
    }
    if (entry < 0 || entry >= p.table_columns) return -1;
    const int block = __ldg(p.block_table + sequence * p.table_stride + entry);
    if (unsigned(block) >= unsigned(p.blocks)) return -1;
    return block * p.block_stride + block_offset * p.token_stride;
}

// Set from[r] to the offset in src of row r of a tile, or to -1. All threads of the block call this. Two warps find the
// sequences of the first and the last row, which bound the searches of all rows.
template <int THREADS>
__device__ __forceinline__ void find_rows(const GatherRowsParams& p, long long first, int rows, long long* from) {
    __shared__ int bounds[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < 2) {
        const int found = count_up_to(p.cu_seq_lens, p.batch + 1, warp == 0 ? first : first + rows - 1, lane);
        if (lane == 0) bounds[warp] = found;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < rows; r += THREADS) from[r] = find_row(p, first + r, bounds[0], bounds[1]);
    __syncthreads();
}
