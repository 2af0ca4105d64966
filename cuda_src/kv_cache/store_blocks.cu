// Store the keys and values of new tokens in a paged cache in vLLM's layout.
//
//   key_cache[block, head, d / x, place, d % x] = stored(key[token, head, d]); x elements are 16 bytes
//   value_cache[block, head, d, place] = stored(value[token, head, d])        stored: see kv_cache/format.cuh
//
// slot_mapping has the slot of each new token. Slot s is place `s % block_size` of block `s / block_size`. A token
// whose slot is outside of the cache, such as -1, is not stored.
//
// Runs. In key_cache, groups of 16 bytes of a token are contiguous. In value_cache the elements of a token are
// block_size elements apart, so a warp that stored single elements would touch 32 sectors of memory for 64 bytes. A run
// is RUN tokens with consecutive slots; its first slot is a multiple of RUN. In each column of value_cache, a run fills
// one whole vector. So the kernel loads a run as rows, transposes it in registers and stores column vectors. Values of
// tokens outside of runs are stored element by element.
//
// Grid: x: PARTS thread blocks per window; a window is WINDOW consecutive tokens; y: groups of WARPS * LINE units of 16
// bytes along a row; z: keys, values. With PARTS > 1, the tokens of a window are divided among PARTS blocks, so that a
// small batch keeps the whole GPU busy. The first of these blocks stores all runs. A large batch uses PARTS = 1,
// because it needs many loads in flight: 32 warps per multiprocessor with 8 loads per thread.
//
// Speed of light: memory bandwidth; each row is read once and written once. At 8192 tokens of 8 heads of 128 in
// bfloat16, an H200 reaches 77% of the bandwidth of a copy; 60% if sequences begin at arbitrary positions in the batch;
// 65% with an FP8 cache. A decoding step of 64 tokens takes 5.0 us, because all its values are stored element by
// element.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "kv_cache/format.cuh"

struct Side {
    const char* src; // T [tokens, columns]
    char* cache;     // [blocks, heads, head_dim / x, block_size, x], or [blocks, heads, head_dim, block_size]
    Scale scale;
    long long src_stride; // between tokens
    long long block_stride;
    long long head_stride;
};

struct StoreBlocksParams {
    Side key, value;
    const long long* slot_mapping; // [tokens]
    int tokens;
    int slots;   // slots in the cache
    int columns; // heads * head_dim
    int head_dim;
    Divisor by_head_dim;
    int block_size;
    Divisor by_block_size;
};

constexpr int WINDOW = 32; // tokens per window
// Units of 16 bytes per 128-byte cache line. LINE lanes of a warp load one line of a token, so one load instruction of
// a warp covers 32 / LINE tokens.
constexpr int LINE = 8;
constexpr int RUN = 8; // tokens per run
static_assert(32 / LINE * RUN == WINDOW);

// Return the slot of a token, or -1 if the token does not exist or its slot is outside of the cache.
__device__ __forceinline__ int slot_of(const StoreBlocksParams& p, int token) {
    if (unsigned(token) >= unsigned(p.tokens)) return -1;
    const long long slot = __ldg(p.slot_mapping + token);
    return (unsigned long long)slot < (unsigned long long)p.slots ? int(slot) : -1;
}

// Load 16 bytes of a row with one instruction or, if the row is not ALIGNED, element by element.
template <typename T, bool ALIGNED> __device__ __forceinline__ uint4 load_vector(const char* from) {
    if constexpr (ALIGNED) {
        return __ldg(reinterpret_cast<const uint4*>(from));
    } else {
        uint4 vector;
#pragma unroll
        for (int i = 0; i < int(16 / sizeof(T)); ++i)
            reinterpret_cast<T*>(&vector)[i] = reinterpret_cast<const T*>(from)[i];
        return vector;
    }
}

// Store the keys of a window. In the cache, each 16-byte unit of a token is followed by the unit with the same index of
// the token in the next slot. Lane l copies unit `l % LINE` of tokens `l / LINE`, `l / LINE + 4`, `l / LINE + 8` and so
// on, so each load instruction of a warp reads one whole line of each of 4 tokens. If these 4 tokens have consecutive
// slots, each store instruction writes ranges of 64 contiguous bytes.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__device__ __forceinline__ void store_keys(const StoreBlocksParams& p, int first, int part) {
    constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / OUT_SIZE;
    constexpr int LOADS = COLUMNS * sizeof(T) / 16, TOKENS = RUN / PARTS;
    constexpr int BATCH = TOKENS < RUN / LOADS ? TOKENS : RUN / LOADS; // tokens per batch of RUN loads
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = ((blockIdx.y * WARPS + warp) * LINE + lane % LINE) * COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const char* src = p.key.src + (long long)column * sizeof(T);
    const long long before = (long long)(column - head * p.head_dim) * p.block_size; // offset in the head
    char* cache = p.key.cache + head * p.key.head_stride + before * OUT_SIZE;
    const Quotient quotient(FORMAT == SAME ? 1.f : p.key.scale.load());

#pragma unroll
    for (int batch = 0; batch < TOKENS; batch += BATCH) {
        int slot[BATCH];
        uint4 vector[BATCH][LOADS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = first + (part * TOKENS + batch + i) * (32 / LINE) + lane / LINE;
            slot[i] = slot_of(p, token);
            if (token < p.tokens)
#pragma unroll
                for (int j = 0; j < LOADS; ++j)
                    vector[i][j] = load_vector<T, ALIGNED>(src + token * p.key.src_stride + j * 16);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (slot[i] < 0) continue;
            const unsigned block = p.by_block_size.quotient(slot[i]);
            const int place = slot[i] - block * p.block_size;
            uint4 out;
            if constexpr (FORMAT == SAME) {
                out = vector[i][0];
            } else {
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    using Stored = Store<T, FORMAT, 16>;
                    reinterpret_cast<Unit<Stored::OUT_BYTES>*>(&out)[j] = Stored::convert(vector[i][j], quotient);
                }
            }
            char* to = cache + block * p.key.block_stride + place * 16LL;
            if constexpr (ALIGNED) {
                *reinterpret_cast<uint4*>(to) = out;
            } else {
                using Element = Unit<OUT_SIZE>;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    reinterpret_cast<Element*>(to)[c] = reinterpret_cast<const Element*>(&out)[c];
            }
        }
    }
}

// How a warp stores the values of a window of tokens. Bit i of a mask stands for token `first + i`.
struct Runs {
    unsigned begins; // tokens at which a run begins
    unsigned alone;  // tokens that have a slot but are not in a run
};

// Find the runs of a window. Every warp does this itself, from the slots of the window's tokens and of the neighbouring
// tokens before and after the window. A run belongs to the window of its first token and may end in the next window.
// Runs therefore need no alignment within the batch.
template <bool ALIGNED> __device__ __forceinline__ Runs find_runs(const StoreBlocksParams& p, int first, int lane) {
    // Each lane loads the slots of two tokens, so a warp has 64 slots. In the masks below, bit i stands for token
    // `first - RUN + i`.
    const int early = slot_of(p, first - RUN + lane), late = slot_of(p, first - RUN + 32 + lane);
    unsigned long long runs = 0;
    if constexpr (ALIGNED) {
        if (p.block_size % RUN == 0) {
            int before_early = __shfl_up_sync(FULL_WARP, early, 1), before_late = __shfl_up_sync(FULL_WARP, late, 1);
            const int last_early = __shfl_sync(FULL_WARP, early, 31);
            if (lane == 0) before_early = -1, before_late = last_early;
            const unsigned follows_early = __ballot_sync(FULL_WARP, before_early >= 0 && early == before_early + 1);
            const unsigned follows_late = __ballot_sync(FULL_WARP, before_late >= 0 && late == before_late + 1);
            const unsigned begins_early = __ballot_sync(FULL_WARP, early >= 0 && early % RUN == 0);
            const unsigned begins_late = __ballot_sync(FULL_WARP, late >= 0 && late % RUN == 0);
            const unsigned long long follows = follows_early | (unsigned long long)follows_late << 32;
            runs = begins_early | (unsigned long long)begins_late << 32;
#pragma unroll
            for (int i = 1; i < RUN; ++i) runs &= follows >> i;
        }
    }
    unsigned long long in_runs = runs;
#pragma unroll
    for (int step = 1; step < RUN; step *= 2) in_runs |= in_runs << step;
    const unsigned valid_early = __ballot_sync(FULL_WARP, early >= 0), valid_late = __ballot_sync(FULL_WARP, late >= 0);
    const unsigned long long valid = valid_early | (unsigned long long)valid_late << 32;
    return {unsigned(runs >> RUN), unsigned((valid & ~in_runs) >> RUN)};
}

// Return 32-bit word j of a column of a run, from the words of the RUN rows. Elements have SIZE bytes.
template <int SIZE, int WORDS>
__device__ __forceinline__ unsigned column_word(const unsigned (&row)[RUN][WORDS], int column, int j) {
    if constexpr (SIZE == 4) {
        return row[j][column];
    } else if constexpr (SIZE == 2) {
        return __byte_perm(row[2 * j][column / 2], row[2 * j + 1][column / 2], column % 2 ? 0x7632 : 0x5410);
    } else {
        const int word = column / 4, byte = column % 4, both = byte | (byte + 4) << 4;
        const unsigned low = __byte_perm(row[4 * j][word], row[4 * j + 1][word], both);
        return __byte_perm(low, __byte_perm(row[4 * j + 2][word], row[4 * j + 3][word], both), 0x5410);
    }
}

// The columns of value_cache that one thread stores: COLUMNS columns, 16 bytes of each token's values.
template <typename T, int FORMAT, bool ALIGNED> struct Values {
    static constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / sizeof(T);
    static constexpr int WORDS = COLUMNS * OUT_SIZE / 4; // 32-bit words of a row after conversion
    using Converted = Unit<WORDS * 4>;
    const StoreBlocksParams& p;
    const char* src;         // the columns of token 0
    char* cache;             // the first of the columns, in block 0, place 0
    long long column_stride; // bytes between columns of the cache
    Quotient quotient;

    // Load this thread's 16 bytes of each of RUN tokens, starting at `token`.
    __device__ __forceinline__ void load_run(int token, uint4 (&vector)[RUN]) const {
#pragma unroll
        for (int i = 0; i < RUN; ++i) vector[i] = load_vector<T, ALIGNED>(src + (token + i) * p.value.src_stride);
    }
    // Transpose the rows of a run in registers and store them as column vectors, one vector per column.
    __device__ __forceinline__ void store_run(int token, const uint4 (&vector)[RUN]) const {
        unsigned row[RUN][WORDS];
        const unsigned slot = unsigned(__ldg(p.slot_mapping + token));
        const unsigned block = p.by_block_size.quotient(slot);
        char* to = cache + block * p.value.block_stride + (slot - block * p.block_size) * OUT_SIZE;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const Converted converted = Store<T, FORMAT, 16>::convert(vector[i], quotient);
#pragma unroll
            for (int j = 0; j < WORDS; ++j) row[i][j] = reinterpret_cast<const unsigned*>(&converted)[j];
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            constexpr int LENGTH = RUN * OUT_SIZE / 4; // 32-bit words of a column vector
            unsigned word[LENGTH];
#pragma unroll
            for (int j = 0; j < LENGTH; ++j) word[j] = column_word<OUT_SIZE, WORDS>(row, c, j);
            if constexpr (LENGTH == 2) {
                *reinterpret_cast<uint2*>(to + c * column_stride) = make_uint2(word[0], word[1]);
            } else {
#pragma unroll
                for (int j = 0; j < LENGTH; j += 4)
                    *reinterpret_cast<uint4*>(to + c * column_stride + j * 4) =
                        make_uint4(word[j], word[j + 1], word[j + 2], word[j + 3]);
            }
        }
    }
    // Store the TOKENS tokens that start at `first + index`, element by element. Skip tokens whose bit in `alone` is 0;
    // bit i stands for token `first + i`.
    template <int TOKENS> __device__ __forceinline__ void store_alone(int first, int index, unsigned alone) const {
        using Element = Unit<OUT_SIZE>;
        uint4 vector[TOKENS];
        int slot[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            slot[i] = -1;
            if (alone >> (index + i) & 1) {
                slot[i] = slot_of(p, first + index + i);
                vector[i] = load_vector<T, ALIGNED>(src + (first + index + i) * p.value.src_stride);
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            if (slot[i] < 0) continue;
            const unsigned block = p.by_block_size.quotient(slot[i]);
            char* to = cache + block * p.value.block_stride + (slot[i] - block * p.block_size) * OUT_SIZE;
            const Converted converted = Store<T, FORMAT, 16>::convert(vector[i], quotient);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                *reinterpret_cast<Element*>(to + c * column_stride) = reinterpret_cast<const Element*>(&converted)[c];
        }
    }
};

// Store the values of a window. Lane l copies unit `l % LINE` of run `l / LINE` of the window, and then the same unit
// of tokens outside of runs.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__device__ __forceinline__ void store_values(const StoreBlocksParams& p, int first, int part) {
    using Columns = Values<T, FORMAT, ALIGNED>;
    constexpr int TOKENS = RUN / PARTS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Runs runs = find_runs<ALIGNED>(p, first, lane);

    const int column = ((blockIdx.y * WARPS + warp) * LINE + lane % LINE) * Columns::COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const long long column_stride = (long long)p.block_size * Columns::OUT_SIZE;
    const char* src = p.value.src + (long long)column * sizeof(T);
    char* cache = p.value.cache + head * p.value.head_stride + (column - head * p.head_dim) * column_stride;
    const Columns columns{p, src, cache, column_stride, Quotient(FORMAT == SAME ? 1.f : p.value.scale.load())};

    // Clear the bits of the first `lane / LINE` runs, so that the lowest set bit is the run of this lane. At most 32 /
    // LINE runs begin in a window, because each has RUN tokens.
    unsigned begin = runs.begins;
#pragma unroll
    for (int i = 1; i < 32 / LINE; ++i)
        if (lane / LINE >= i) begin &= begin - 1;
    if (begin && part == 0) {
        const int token = first + __ffs(begin) - 1;
        uint4 vector[RUN];
        columns.load_run(token, vector);
        columns.store_run(token, vector);
    }
    if (runs.alone == 0) return;
    const int index = lane / LINE * RUN + part * TOKENS;
    columns.template store_alone<TOKENS>(first, index, runs.alone);
}

template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__global__ void __launch_bounds__(WARPS * 32, ALIGNED&& FORMAT == SAME && PARTS == 1 ? 32 / WARPS : 1)
    store_blocks(const __grid_constant__ StoreBlocksParams p) {
    begin_behind_earlier_kernels();
    const int first = int(blockIdx.x / PARTS) * WINDOW, part = blockIdx.x % PARTS;
    if (blockIdx.z == 0)
        store_keys<T, FORMAT, ALIGNED, WARPS, PARTS>(p, first, part);
    else
        store_values<T, FORMAT, ALIGNED, WARPS, PARTS>(p, first, part);
}
