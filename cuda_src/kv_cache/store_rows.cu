// Store new tokens in a paged cache with contiguous rows: FlashAttention's layout or, if CONCAT, the layout of
// multi-head latent attention (MLA).
//
//   cache[slot, head, d] = stored(src[token, head, d])              stored: see kv_cache/format.cuh
//   cache[slot] = [stored(src0[token]), stored(src1[token])]        if CONCAT: latents, then rotary elements
//
// Grid: x: tiles of tokens; y: column ranges of long rows; z: keys, values. If CONCAT, a row has the columns of both
// sources. A thread issues the loads of its ITEMS vectors before its first store. The kernel does not trigger
// programmatic dependent launch early. With an early trigger, all blocks of the next kernel begin at once, and 8192
// tokens of 512 + 64 columns take 6.6 us instead of 6.1 us.
//
// Speed of light: memory bandwidth. At 8192 tokens of 8 heads of 128 in bfloat16, an H200 reaches 84% of the bandwidth
// of a copy (FP8 cache: 65%); with CONCAT and 512 + 64 columns, 67% (FP8: 40%). 64 tokens take 1.9 us, an empty kernel
// 0.5 us.
#include "common/overlap.cuh"
#include "kv_cache/format.cuh"

struct Rows {
    const char* src; // [tokens, columns]
    char* cache;     // [blocks, block_size, heads, head_columns]; if CONCAT, [blocks, block_size, p.columns]
    Scale scale;
    long long src_stride; // between tokens
    long long block_stride;
    long long token_stride;
    long long head_stride;
    int columns; // vectors per row
    int head_columns;
    Divisor by_head_columns;
};

struct StoreRowsParams {
    Rows rows[2];                  // keys, values; if CONCAT: the sources, with the cache in rows[0]
    const long long* slot_mapping; // [tokens]; a slot outside of the cache, such as -1, is skipped
    int tokens;
    int slots; // of the cache
    int block_size;
    Divisor by_block_size;
    int columns;   // vectors per row, of both sources if CONCAT
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

template <typename T, int FORMAT, int BYTES, bool CONCAT, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) store_rows(const __grid_constant__ StoreRowsParams p) {
    wait_for_earlier_kernels();
    using Stored = Store<T, FORMAT, BYTES>;
    Vector<BYTES> vector[ITEMS];
    long long slot[ITEMS];
    int column[ITEMS];
    const Rows& rows = p.rows[CONCAT ? 0 : blockIdx.z];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int local = threadIdx.x + i * THREADS, row = p.by_tile_columns.quotient(local);
        const int tile_column = local - row * p.tile_columns;
        const int token = blockIdx.x * p.tile_rows + row;
        column[i] = blockIdx.y * p.tile_columns + tile_column;
        slot[i] = -1;
        if (row < p.tile_rows && token < p.tokens && column[i] < p.columns) {
            slot[i] = __ldg(p.slot_mapping + token);
            const bool is_second = CONCAT && column[i] >= rows.columns;
            const char* src = is_second ? p.rows[1].src : rows.src;
            const long long src_stride = is_second ? p.rows[1].src_stride : rows.src_stride;
            const long long source_column = is_second ? column[i] - rows.columns : column[i];
            vector[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(src + token * src_stride + source_column * BYTES));
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if ((unsigned long long)slot[i] < (unsigned long long)p.slots) {
            const Quotient quotient(FORMAT == SAME ? 1.f : rows.scale.load());
            const unsigned block = p.by_block_size.quotient(unsigned(slot[i]));
            const unsigned block_offset = unsigned(slot[i]) - block * p.block_size;
            const int head = CONCAT ? 0 : rows.by_head_columns.quotient(column[i]);
            char* to = rows.cache + block * rows.block_stride + block_offset * rows.token_stride +
                       head * rows.head_stride + (long long)(column[i] - head * rows.head_columns) * Stored::OUT_BYTES;
            *reinterpret_cast<Vector<Stored::OUT_BYTES>*>(to) = Stored::convert(vector[i], quotient);
        }
    }
}
