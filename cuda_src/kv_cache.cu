// Store keys and values in a paged cache, copy its blocks, and gather it back into rows.
//
// A cache has `blocks` blocks of block_size tokens. slot_mapping gives each new token its slot: block
// slot / block_size, place slot % block_size in it. A slot outside of the cache, such as -1, has its token left out.
//
//   store_rows    cache[slot, head, d] = stored(src[token, head, d])            the rows of a token stay rows
//   store_blocks  key_cache[block, head, d / x, place, d % x] = stored(key[token, head, d]), x elements = 16 bytes
//                 value_cache[block, head, d, place] = stored(value[token, head, d])
//   copy_blocks   cache[to] = cache[from] for all pairs of blocks, in several caches
//   gather_rows   dst[cu_seq_lens[b] + t] = read(src[block_table[b, first + t / block_size], t % block_size])
//
// stored() and read() are the identity, or for an FP8 cache value / scale, rounded to the nearest and saturated, and
// its inverse. Whatever slots, tables and mappings hold, nothing is read or written outside of the arrays.
//
//   store_latents, gather_latents   store_rows of two sources and gather_rows, with a scale for each 128 numbers of the
//                                   first source, and the second one in bfloat16
//
// T: the elements that are converted; where nothing is, any type of their size.
// BYTES: a unit of T, the width of a load. Strides are in bytes.
#include "common/fp8.cuh"
#include "common/numeric.cuh"
#include "common/units.cuh"
#include "common/warp.cuh"

template <int BYTES> using Unit = typename UnitOf<BYTES>::Type;

// --- the FP8 formats -----------------------------------------------------------------------------------

enum Format { SAME, E4M3, E5M2 }; // of the cache: the array's own, or one byte

template <int FORMAT> constexpr __nv_fp8_interpretation_t INTERPRETATION = FORMAT == E4M3 ? __NV_E4M3 : __NV_E5M2;

struct Scale {
    const float* array; // one float, or null
    float number;       // what counts where there is no array
    __device__ __forceinline__ float load() const { return array ? __ldg(array) : number; }
};

// x / scale from the reciprocal: an exact remainder corrects the product to the quotient rounded to nearest. Where that
// is no number (infinities, overflow, a scale of zero) the product is already what the division would give.
struct Quotient {
    float scale, reciprocal;
    __device__ __forceinline__ explicit Quotient(float s) : scale(s), reciprocal(__frcp_rn(s)) {}
    __device__ __forceinline__ float operator()(float x) const {
        const float product = __fmul_rn(x, reciprocal);
        const float corrected = __fmaf_rn(__fmaf_rn(-product, scale, x), reciprocal, product);
        return corrected == corrected ? copysignf(corrected, product) : product; // the sign also of a zero
    }
};

// A unit of T as it is stored.
template <typename T, int FORMAT, int BYTES> struct Store {
    static constexpr int OUT_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Unit<OUT_BYTES> convert(const Unit<BYTES>& unit, const Quotient& quotient) {
        if constexpr (FORMAT == SAME) {
            return unit;
        } else {
            Unit<OUT_BYTES> out;
            const T* in = reinterpret_cast<const T*>(&unit);
            if constexpr (OUT_BYTES == 1) {
                out = to_fp8<INTERPRETATION<FORMAT>>(quotient(to_float(in[0])));
            } else {
#pragma unroll
                for (int i = 0; i < OUT_BYTES / 2; ++i) {
                    const float x = quotient(to_float(in[2 * i])), y = quotient(to_float(in[2 * i + 1]));
                    reinterpret_cast<unsigned short*>(&out)[i] = to_fp8<INTERPRETATION<FORMAT>>(x, y);
                }
            }
            return out;
        }
    }
};

// --- rows into rows ------------------------------------------------------------------------------------

struct Rows {
    const char* src; // [tokens, columns]
    char* cache;     // [blocks, block_size, heads, head_columns]; [blocks, block_size, p.columns] if CONCAT
    Scale scale;
    long long src_stride; // between tokens
    long long block_stride;
    long long token_stride;
    long long head_stride;
    int columns; // units in a row
    int head_columns;
    Divisor by_head_columns;
};

struct StoreRowsParams {
    Rows rows[2];                  // if CONCAT, without heads, and of the second only src and src_stride
    const long long* slot_mapping; // [tokens]
    int tokens;
    int slots; // of the cache
    int block_size;
    Divisor by_block_size;
    int columns;   // units in a row, of both sources if CONCAT
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

// Grid: a block takes a tile of tokens, or of parts of long rows. Thread t takes units t, t + THREADS, ..., and has
// asked for all of them, and for their slots, before it stores the first. x: tiles of tokens; y: parts of a row; z:
// keys, values. If CONCAT, the columns of a token are those of both sources, and z is 0.
template <typename T, int FORMAT, int BYTES, bool CONCAT, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) store_rows(const __grid_constant__ StoreRowsParams p) {
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

// --- latents into rows with scales ---------------------------------------------------------------------

// A token of FlashMLA's FP8 cache: E4M3 [512], float [4], one for each GROUP of those, __nv_bfloat16 [64].
constexpr int LATENTS = 512, GROUP = 128;
constexpr int SCALES_AT = LATENTS, ROTARY_AT = SCALES_AT + LATENTS / GROUP * 4; // bytes
constexpr float LARGEST_E4M3 = 448.f, SMALLEST_SCALE = 0x1p-126f;

struct StoreLatentsParams {
    const char* latents;           // T [tokens, LATENTS]
    const char* rotary;            // T [tokens, 64]
    char* cache;                   // [blocks, block_size, 656]
    const long long* slot_mapping; // [tokens]
    long long latents_stride;      // between tokens
    long long rotary_stride;
    long long block_stride;
    long long token_stride;
    int tokens;
    int slots; // of the cache
    int block_size;
    Divisor by_block_size;
};

// At once or, if it is not ALIGNED, byte by byte.
template <typename U, bool ALIGNED> __device__ __forceinline__ U load_unit(const char* from) {
    if constexpr (ALIGNED) {
        return __ldg(reinterpret_cast<const U*>(from));
    } else {
        U unit;
#pragma unroll
        for (int i = 0; i < int(sizeof(U)); ++i) reinterpret_cast<char*>(&unit)[i] = __ldg(from + i);
        return unit;
    }
}

template <bool ALIGNED, typename U> __device__ __forceinline__ void store_unit(char* to, const U& unit) {
    if constexpr (ALIGNED) {
        *reinterpret_cast<U*>(to) = unit;
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(U)); ++i) to[i] = reinterpret_cast<const char*>(&unit)[i];
    }
}

// Between T and the format of the rotary numbers, which keeps its bits, also those of a NaN.
template <typename T> __device__ __forceinline__ __nv_bfloat16 to_bfloat16(T x) {
    return from_float<__nv_bfloat16>(to_float(x));
}
template <> __device__ __forceinline__ __nv_bfloat16 to_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }

template <typename T> __device__ __forceinline__ T from_bfloat16(__nv_bfloat16 x) { return from_float<T>(to_float(x)); }
template <> __device__ __forceinline__ __nv_bfloat16 from_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }

//   scale  = max(max(|latent|) / 448, 2^-126) over the GROUP, NaN left out
//   stored = E4M3(latent / scale), the nearest, ties to even, the largest at most
//
// Grid: a warp takes a token. Lane l takes latents 16 l to 16 l + 15, so that 8 lanes have a group, and rotary numbers
// 2 l and 2 l + 1.
template <typename T, bool ALIGNED, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) store_latents(const __grid_constant__ StoreLatentsParams p) {
    constexpr int EACH = LATENTS / 32, LOADS = EACH * int(sizeof(T)) / 16;
    using Pair = Unit<2 * sizeof(T)>;
    const int lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= p.tokens) return;
    const long long slot = __ldg(p.slot_mapping + token);
    const char* latents = p.latents + token * p.latents_stride + lane * (EACH * int(sizeof(T)));
    const char* rotary = p.rotary + token * p.rotary_stride + lane * int(sizeof(Pair));
    uint4 vector[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) vector[i] = load_unit<uint4, ALIGNED>(latents + i * 16);
    const Pair pair = load_unit<Pair, ALIGNED>(rotary);

    float latent[EACH], largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        latent[i] = to_float(reinterpret_cast<const T*>(vector)[i]);
        largest = fmaxf(largest, fabsf(latent[i])); // the number, where one of them is NaN
    }
    const float scale = fmaxf(__fdiv_rn(lanes_max<GROUP / EACH>(largest), LARGEST_E4M3), SMALLEST_SCALE);
    if ((unsigned long long)slot >= (unsigned long long)p.slots) return;

    // Where the scale is tiny, a quotient's remainder is too small to be exact: there both are raised by a power of two.
    const float raise = scale < 0x1p-64f ? 0x1p64f : 1.f;
    const Quotient quotient(__fmul_rn(scale, raise));
    uint4 stored;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        const float x = quotient(__fmul_rn(latent[i], raise)), y = quotient(__fmul_rn(latent[i + 1], raise));
        reinterpret_cast<unsigned short*>(&stored)[i / 2] = to_fp8<__NV_E4M3>(x, y);
    }
    unsigned rounded;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        reinterpret_cast<__nv_bfloat16*>(&rounded)[i] = to_bfloat16(reinterpret_cast<const T*>(&pair)[i]);

    const unsigned block = p.by_block_size.quotient(unsigned(slot)), place = unsigned(slot) - block * p.block_size;
    char* to = p.cache + block * p.block_stride + place * p.token_stride;
    store_unit<ALIGNED>(to + lane * EACH, stored);
    if (lane % (GROUP / EACH) == 0) store_unit<ALIGNED>(to + SCALES_AT + lane / (GROUP / EACH) * 4, scale);
    store_unit<ALIGNED>(to + ROTARY_AT + lane * 4, rounded);
}

// --- rows into blocks ----------------------------------------------------------------------------------

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
    int slots;   // of the cache
    int columns; // heads * head_dim
    int head_dim;
    Divisor by_head_dim;
    int block_size;
    Divisor by_block_size;
};

// A block of threads takes a window of so many tokens.
constexpr int WINDOW = 32;
// A warp's lanes take so many columns of units side by side, a cache line, for 32 / LINE tokens at a time.
constexpr int LINE = 8;
constexpr int RUN = 8; // tokens that a thread turns into vectors of consecutive places
static_assert(32 / LINE * RUN == WINDOW);

// The token's slot, or -1.
__device__ __forceinline__ int slot_of(const StoreBlocksParams& p, int token) {
    if (unsigned(token) >= unsigned(p.tokens)) return -1;
    const long long slot = __ldg(p.slot_mapping + token);
    return (unsigned long long)slot < (unsigned long long)p.slots ? int(slot) : -1;
}

// 16 bytes of a row by one load or, if it is not ALIGNED, element by element.
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

// Keys: 16 bytes of a token stay together, and those of the next place follow. Lane l takes unit l % LINE of the tokens
// l / LINE + 0, 4, 8, ...: a warp reads whole lines of 4 tokens and, where their slots follow each other, writes 64
// bytes without a gap.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__device__ __forceinline__ void store_keys(const StoreBlocksParams& p, int first, int part) {
    constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / OUT_SIZE;
    constexpr int LOADS = COLUMNS * sizeof(T) / 16, TOKENS = RUN / PARTS;
    constexpr int BATCH = TOKENS < RUN / LOADS ? TOKENS : RUN / LOADS; // RUN loads at once
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = ((blockIdx.y * WARPS + warp) * LINE + lane % LINE) * COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const char* src = p.key.src + (long long)column * sizeof(T);
    const long long before = (long long)(column - head * p.head_dim) * p.block_size; // elements of the head
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

// Word j of a column of elements of SIZE bytes, from the words of RUN rows.
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

// Values: the elements of a token lie block_size elements apart, and those of a column side by side. A run, RUN tokens
// whose slots follow each other from a multiple of RUN on, so fills a vector of each column. Every warp finds the runs
// itself, from the slots of the window and of the tokens around it: a run belongs to the window in which it begins, and
// so it does not matter where in the batch a sequence begins. Lane l takes unit l % LINE of run l / LINE and transposes
// it in registers; the vectors of neighbouring runs meet in one store. What is in no run is written by elements.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__device__ __forceinline__ void store_values(const StoreBlocksParams& p, int first, int part) {
    constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / sizeof(T), WORDS = COLUMNS * OUT_SIZE / 4;
    constexpr int TOKENS = RUN / PARTS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // Bit i stands for token first - RUN + i.
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
    const unsigned alone = unsigned((valid & ~in_runs) >> RUN);

    const int column = ((blockIdx.y * WARPS + warp) * LINE + lane % LINE) * COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const long long column_stride = (long long)p.block_size * OUT_SIZE;
    const char* src = p.value.src + (long long)column * sizeof(T);
    char* cache = p.value.cache + head * p.value.head_stride + (column - head * p.head_dim) * column_stride;
    const Quotient quotient(FORMAT == SAME ? 1.f : p.value.scale.load());
    using Converted = Unit<WORDS * 4>;

    // Run number l / LINE: as a run has RUN tokens, no more than 32 / LINE begin in the window.
    unsigned begin = unsigned(runs >> RUN);
#pragma unroll
    for (int i = 1; i < 32 / LINE; ++i)
        if (lane / LINE >= i) begin &= begin - 1;
    if (begin && part == 0) {
        const int token = first + __ffs(begin) - 1;
        uint4 vector[RUN];
        unsigned row[RUN][WORDS];
#pragma unroll
        for (int i = 0; i < RUN; ++i) vector[i] = load_vector<T, ALIGNED>(src + (token + i) * p.value.src_stride);
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
            constexpr int LENGTH = RUN * OUT_SIZE / 4; // words of a column
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
    if (alone == 0) return;

    using Element = Unit<OUT_SIZE>;
    const int index = lane / LINE * RUN + part * TOKENS;
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

// Grid: x: windows of tokens, PARTS blocks for each; y: WARPS * LINE units of the columns; z: keys, values. A part
// takes a PARTS-th of each thread's tokens, so that a small batch keeps the whole GPU busy; the runs are all in part 0.
// A large batch needs its loads in flight instead: 32 warps of 8 loads per thread on a multiprocessor.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int PARTS>
__global__ void __launch_bounds__(WARPS * 32, ALIGNED&& FORMAT == SAME && PARTS == 1 ? 32 / WARPS : 1)
    store_blocks(const __grid_constant__ StoreBlocksParams p) {
    const int first = int(blockIdx.x / PARTS) * WINDOW, part = blockIdx.x % PARTS;
    if (blockIdx.z == 0)
        store_keys<T, FORMAT, ALIGNED, WARPS, PARTS>(p, first, part);
    else
        store_values<T, FORMAT, ALIGNED, WARPS, PARTS>(p, first, part);
}

// --- blocks into blocks --------------------------------------------------------------------------------

constexpr int CACHES = 64; // of a launch

struct CopyBlocksParams {
    char* cache[CACHES];
    const long long* block_mapping; // [pairs, 2]: from, to
    long long block_stride;
    int blocks;  // of a cache
    int columns; // units in a block
    int parts;   // tiles of THREADS * ITEMS units in a block
};

// Grid: x: parts of a pair's block, pair after pair; y: caches.
template <int BYTES, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) copy_blocks(const __grid_constant__ CopyBlocksParams p) {
    const int pair = blockIdx.x / p.parts, part = blockIdx.x - pair * p.parts;
    const long long from = __ldg(p.block_mapping + 2LL * pair), to = __ldg(p.block_mapping + 2LL * pair + 1);
    const unsigned long long blocks = p.blocks;
    if ((unsigned long long)from >= blocks || (unsigned long long)to >= blocks) return;
    char* cache = p.cache[blockIdx.y];
    const Unit<BYTES>* src = reinterpret_cast<const Unit<BYTES>*>(cache + from * p.block_stride);
    Unit<BYTES>* dst = reinterpret_cast<Unit<BYTES>*>(cache + to * p.block_stride);
    const int first = part * (THREADS * ITEMS) + threadIdx.x;
    Unit<BYTES> unit[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) unit[i] = src[first + i * THREADS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (first + i * THREADS < p.columns) dst[first + i * THREADS] = unit[i];
}

// --- blocks into rows ----------------------------------------------------------------------------------

struct GatherRowsParams {
    const char* src;        // [blocks, block_size, columns]
    char* dst;              // T [tokens, columns]
    const int* block_table; // [batch, table_columns], rows `table_stride` elements apart
    const int* cu_seq_lens; // [batch + 1]
    const int* seq_starts;  // [batch], may be null
    Scale scale;
    long long block_stride;
    long long token_stride;
    long long dst_stride;
    long long table_stride;
    int blocks;
    int table_columns;
    int batch;
    int tokens;
    int block_size;
    Divisor by_block_size;
    int columns;   // units in a row
    int tile_rows; // tile_rows * tile_columns <= THREADS * ITEMS
    int tile_columns;
    Divisor by_tile_columns;
};

// How many of the values, which do not fall, are at most `limit`; by the whole warp: 32 probes at once leave a 32nd.
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

// A unit of an FP8 cache times the scale, as T.
template <typename T, int FORMAT, int BYTES> struct Read {
    static constexpr int IN_BYTES = FORMAT == SAME ? BYTES : BYTES / int(sizeof(T));
    static __device__ __forceinline__ Unit<BYTES> convert(const Unit<IN_BYTES>& unit, float scale) {
        if constexpr (FORMAT == SAME) {
            return unit;
        } else {
            Unit<BYTES> out;
#pragma unroll
            for (int i = 0; i < IN_BYTES; ++i) {
                const __nv_fp8_storage_t byte = reinterpret_cast<const __nv_fp8_storage_t*>(&unit)[i];
                const __half half = __nv_cvt_fp8_to_halfraw(byte, INTERPRETATION<FORMAT>);
                reinterpret_cast<T*>(&out)[i] = from_float<T>(__fmul_rn(__half2float(half), scale));
            }
            return out;
        }
    }
};

// Where in src the rows of a tile lie: from[r], or -1. Two warps find the sequences of the tile's first and last token,
// with which each of its tokens finds its own among few.
template <int THREADS>
__device__ __forceinline__ void find_rows(const GatherRowsParams& p, long long first, int rows, long long* from) {
    __shared__ int ends[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < 2) {
        const int found = count_up_to(p.cu_seq_lens, p.batch + 1, warp == 0 ? first : first + rows - 1, lane);
        if (lane == 0) ends[warp] = found;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const long long token = first + r;
        int low = ends[0], high = ends[1];
        while (low < high) {
            const int middle = (low + high) / 2;
            if (__ldg(p.cu_seq_lens + middle) <= token)
                low = middle + 1;
            else
                high = middle;
        }
        // So many sequences begin at or before the token; the last of them has it.
        const int sequence = low - 1;
        long long row = -1;
        if (sequence >= 0 && sequence < p.batch) {
            const unsigned t = unsigned(token - __ldg(p.cu_seq_lens + sequence));
            const unsigned block_of = p.by_block_size.quotient(t);
            long long entry = block_of;
            if (p.seq_starts) entry += __ldg(p.seq_starts + sequence) / p.block_size;
            if (entry >= 0 && entry < p.table_columns) {
                const int block = __ldg(p.block_table + sequence * p.table_stride + entry);
                if (unsigned(block) < unsigned(p.blocks))
                    row = block * p.block_stride + (t - block_of * p.block_size) * p.token_stride;
            }
        }
        from[r] = row;
    }
    __syncthreads();
}

// Grid: x: tiles of tokens of dst; y: parts of a row. Once it is known where the rows are, the threads move units as in
// store_rows.
template <typename T, int FORMAT, int BYTES, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) gather_rows(const __grid_constant__ GatherRowsParams p) {
    using Values = Read<T, FORMAT, BYTES>;
    __shared__ long long from[THREADS * ITEMS];
    const long long first = (long long)blockIdx.x * p.tile_rows;
    const int rows = int(min((long long)p.tile_rows, p.tokens - first));
    find_rows<THREADS>(p, first, rows, from);

    Unit<Values::IN_BYTES> unit[ITEMS];
    const float scale = FORMAT == SAME ? 1.f : p.scale.load();
    auto locate = [&](int i, int& row, int& column) {
        const int local = threadIdx.x + i * THREADS;
        row = p.by_tile_columns.quotient(local);
        column = blockIdx.y * p.tile_columns + local - row * p.tile_columns;
        return row < rows && column < p.columns && from[row] >= 0;
    };
    int row, column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, column)) {
            const char* at = p.src + from[row] + (long long)column * Values::IN_BYTES;
            unit[i] = __ldg(reinterpret_cast<const Unit<Values::IN_BYTES>*>(at));
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, column)) {
            char* at = p.dst + (first + row) * p.dst_stride + (long long)column * BYTES;
            *reinterpret_cast<Unit<BYTES>*>(at) = Values::convert(unit[i], scale);
        }
}

// Grid and roles as in gather_rows. A unit is of NUMBERS latents, or of as many rotary numbers.
template <typename T, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) gather_latents(const __grid_constant__ GatherRowsParams p) {
    constexpr int NUMBERS = ALIGNED ? 16 / sizeof(T) : 1, BYTES = NUMBERS * sizeof(T);
    __shared__ long long from[THREADS * ITEMS];
    const long long first = (long long)blockIdx.x * p.tile_rows;
    const int rows = int(min((long long)p.tile_rows, p.tokens - first));
    find_rows<THREADS>(p, first, rows, from);

    Unit<2 * NUMBERS> unit[ITEMS];
    float scale[ITEMS];
    auto locate = [&](int i, int& row, int& number) {
        const int local = threadIdx.x + i * THREADS;
        row = p.by_tile_columns.quotient(local);
        const int column = blockIdx.y * p.tile_columns + local - row * p.tile_columns;
        number = column * NUMBERS;
        return row < rows && column < p.columns && from[row] >= 0;
    };
    int row, number;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, number)) {
            const char* at = p.src + from[row];
            if (number < LATENTS) {
                reinterpret_cast<Unit<NUMBERS>&>(unit[i]) = load_unit<Unit<NUMBERS>, ALIGNED>(at + number);
                scale[i] = load_unit<float, ALIGNED>(at + SCALES_AT + number / GROUP * 4);
            } else {
                unit[i] = load_unit<Unit<2 * NUMBERS>, ALIGNED>(at + ROTARY_AT + (number - LATENTS) * 2);
            }
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (locate(i, row, number)) {
            Unit<BYTES> out;
            if (number < LATENTS) {
                out = Read<T, E4M3, BYTES>::convert(reinterpret_cast<const Unit<NUMBERS>&>(unit[i]), scale[i]);
            } else {
#pragma unroll
                for (int j = 0; j < NUMBERS; ++j)
                    reinterpret_cast<T*>(&out)[j] =
                        from_bfloat16<T>(reinterpret_cast<const __nv_bfloat16*>(&unit[i])[j]);
            }
            *reinterpret_cast<Unit<BYTES>*>(p.dst + (first + row) * p.dst_stride + number * (long long)sizeof(T)) = out;
        }
}
