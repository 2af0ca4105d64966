// Store the rows of new tokens in a paged cache with contiguous rows. The layout is the layout of FlashAttention or, if
// CONCAT, of multi-head latent attention (MLA).
//
//   cache[slot, head, d] = stored(src[token, head, d])              stored: see kv_cache/format.cuh
//   cache[slot] = [stored(src0[token]), stored(src1[token])]        if CONCAT: latents, then rotary elements
//
// slot_mapping has the slot of each new token. Slot s is place `s % block_size` of block `s / block_size`. A token
// whose slot is outside of the cache, such as -1, is not stored.
//
// Grid: x: tiles of tokens; y: column ranges of a row; z: keys, values. If CONCAT, a row has the columns of both
// sources, and z is 0. A block stores one tile: several whole rows, or the same column range of several long rows. A
// unit is BYTES bytes of a source row. Thread t stores ITEMS units: `t`, `t + THREADS` and so on. It issues all loads
// of units and slots before its first store. The kernel does not trigger programmatic dependent launch early. With an
// early trigger, 8192 tokens of 512 + 64 columns take 6.6 us instead of 6.1 us, because all blocks of the next kernel
// begin at once.
//
// Speed of light: memory bandwidth; each row is read once and written once. At 8192 tokens of 8 heads of 128 in
// bfloat16, an H200 reaches 84% of the bandwidth of a copy, and 65% with an FP8 cache. With CONCAT, at 8192 tokens of
// 512 + 64 columns, it reaches 67%, and 40% with an FP8 cache. A decoding step of 64 tokens takes 1.9 us; an empty
// kernel takes 0.5 us.
#include "common/overlap.cuh"
#include "kv_cache/format.cuh"

struct Rows {
    const char* src; // [tokens, columns]
    char* cache;     // [blocks, block_size, heads, head_columns]; [blocks, block_size, p.columns] if CONCAT
    Scale scale;
    long long src_stride; // between tokens
    long long block_stride;
    long long token_stride;
    long long head_stride;
    int columns; // units per row
    int head_columns;
    Divisor by_head_columns;
};

struct StoreRowsParams {
    Rows rows[2];                  // keys, values; if CONCAT: the two sources; the cache is in rows[0]
    const long long* slot_mapping; // [tokens]
    int tokens;
    int slots; // slots in the cache
    int block_size;
    Divisor by_block_size;
    int columns;   // units per row, of both sources if CONCAT
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

template <typename T, int FORMAT, int BYTES, bool CONCAT, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) store_rows(const __grid_constant__ StoreRowsParams p) {
    wait_for_earlier_kernels();
    using Stored = Store<T, FORMAT, BYTES>;
    Unit<BYTES> unit[ITEMS];
    long long slot[ITEMS];
    int column[ITEMS];
    const Rows& rows = p.rows[CONCAT ? 0 : blockIdx.z];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int local = threadIdx.x + i * THREADS, row = p.by_tile_columns.quotient(local);
        const int within = local - row * p.tile_columns;
        const int token = blockIdx.x * p.tile_rows + row;
        column[i] = blockIdx.y * p.tile_columns + within;
        slot[i] = -1;
        if (row < p.tile_rows && token < p.tokens && column[i] < p.columns) {
            slot[i] = __ldg(p.slot_mapping + token);
            const bool second = CONCAT && column[i] >= rows.columns;
            const char* src = second ? p.rows[1].src : rows.src;
            const long long src_stride = second ? p.rows[1].src_stride : rows.src_stride;
            const long long at = second ? column[i] - rows.columns : column[i];
            unit[i] = __ldg(reinterpret_cast<const Unit<BYTES>*>(src + token * src_stride + at * BYTES));
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if ((unsigned long long)slot[i] < (unsigned long long)p.slots) {
            const Quotient quotient(FORMAT == SAME ? 1.f : rows.scale.load());
            const unsigned block = p.by_block_size.quotient(unsigned(slot[i]));
            const unsigned place = unsigned(slot[i]) - block * p.block_size;
            const int head = CONCAT ? 0 : rows.by_head_columns.quotient(column[i]);
            char* to = rows.cache + block * rows.block_stride + place * rows.token_stride + head * rows.head_stride +
                       (long long)(column[i] - head * rows.head_columns) * Stored::OUT_BYTES;
            *reinterpret_cast<Unit<Stored::OUT_BYTES>*>(to) = Stored::convert(unit[i], quotient);
        }
    }
}
