// Store new keys and values in a paged cache in vLLM's layout, where x elements are 16 bytes.
//
//   key_cache[block, head, d / x, offset, d % x] = stored(key[token, head, d])
//   value_cache[block, head, d, offset] = stored(value[token, head, d])        stored: see kv_cache/format.cuh
//
// block, offset = slot / block_size, slot % block_size, with slot = slot_mapping[token].
//
// In value_cache the elements of a token are block_size elements apart, so storing 32 single elements of 16 bits (64
// bytes) touches 32 memory sectors. A slot group is 8 consecutive tokens in 8 consecutive slots; its first slot is a
// multiple of 8. It fills one vector per column of value_cache: the kernel transposes its rows in registers and stores
// column vectors. Other values are stored element by element.
//
// Grid: x: SPLITS thread blocks per tile of 32 tokens; y: groups of WARPS * TOKEN_LANES vectors along a row; z: keys,
// values. To keep the GPU busy, a small batch has SPLITS > 1 blocks per tile; the first block stores all slot groups. A
// large batch needs loads in flight: 32 warps per multiprocessor with 8 loads per thread.
//
// Speed of light: memory bandwidth. At 8192 tokens of 8 heads of 128 in bfloat16, an H200 reaches 77% of the bandwidth
// of a copy, 60% if sequences begin at arbitrary positions in the batch, and 65% with an FP8 cache. 64 tokens, stored
// element by element, take 5.0 us.
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "kv_cache/format.cuh"

struct KeyOrValue {
    const char* src; // T [tokens, columns]
    char* cache;     // [blocks, heads, head_dim / x, block_size, x], or [blocks, heads, head_dim, block_size]
    Scale scale;
    long long src_stride; // between tokens
    long long block_stride;
    long long head_stride;
};

struct StoreBlocksParams {
    KeyOrValue key, value;
    const long long* slot_mapping; // [tokens]; a slot outside of the cache, such as -1, is skipped
    int tokens;
    int slots;   // of the cache
    int columns; // heads * head_dim
    int head_dim;
    Divisor by_head_dim;
    int block_size;
    Divisor by_block_size;
};

constexpr int TILE = 32;
// TOKEN_LANES lanes load 128 contiguous bytes of one token.
constexpr int TOKEN_LANES = 8;
constexpr int SLOT_GROUP = 8; // tokens
static_assert(32 / TOKEN_LANES * SLOT_GROUP == TILE);

__device__ __forceinline__ int slot_of(const StoreBlocksParams& p, int token) {
    if (unsigned(token) >= unsigned(p.tokens)) return -1;
    const long long slot = __ldg(p.slot_mapping + token);
    return (unsigned long long)slot < (unsigned long long)p.slots ? int(slot) : -1;
}

// Load 16 bytes with one instruction or, if not ALIGNED, element by element.
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

// Store the keys of a tile of tokens. Each load of a warp reads 128 contiguous bytes of 4 tokens. The cache stores the
// vectors with the same index in slot order, so 4 tokens in consecutive slots give stores of 64 contiguous bytes.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int SPLITS>
__device__ __forceinline__ void store_keys(const StoreBlocksParams& p, int first, int split) {
    constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / OUT_SIZE;
    constexpr int LOADS = COLUMNS * sizeof(T) / 16, TOKENS = SLOT_GROUP / SPLITS;
    constexpr int BATCH =
        TOKENS < SLOT_GROUP / LOADS ? TOKENS : SLOT_GROUP / LOADS; // tokens per batch of SLOT_GROUP loads
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = ((blockIdx.y * WARPS + warp) * TOKEN_LANES + lane % TOKEN_LANES) * COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const char* src = p.key.src + (long long)column * sizeof(T);
    const long long head_offset = (long long)(column - head * p.head_dim) * p.block_size;
    char* cache = p.key.cache + head * p.key.head_stride + head_offset * OUT_SIZE;
    const Quotient quotient(FORMAT == SAME ? 1.f : p.key.scale.load());

#pragma unroll
    for (int batch = 0; batch < TOKENS; batch += BATCH) {
        int slot[BATCH];
        uint4 vector[BATCH][LOADS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = first + (split * TOKENS + batch + i) * (32 / TOKEN_LANES) + lane / TOKEN_LANES;
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
            const int block_offset = slot[i] - block * p.block_size;
            uint4 out;
            if constexpr (FORMAT == SAME) {
                out = vector[i][0];
            } else {
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    using Stored = Store<T, FORMAT, 16>;
                    reinterpret_cast<Vector<Stored::OUT_BYTES>*>(&out)[j] = Stored::convert(vector[i][j], quotient);
                }
            }
            char* to = cache + block * p.key.block_stride + block_offset * 16LL;
            if constexpr (ALIGNED) {
                *reinterpret_cast<uint4*>(to) = out;
            } else {
                using Element = Vector<OUT_SIZE>;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    reinterpret_cast<Element*>(to)[c] = reinterpret_cast<const Element*>(&out)[c];
            }
        }
    }
}

// Masks of the tokens of a tile. Bit i stands for token `first + i`.
struct SlotGroups {
    unsigned begins; // first tokens of slot groups
    unsigned single; // tokens with a slot, outside of slot groups
};

// Find the slot groups that begin in a tile. A group may end in the next tile, so groups need no alignment within the
// batch.
template <bool ALIGNED>
__device__ __forceinline__ SlotGroups find_groups(const StoreBlocksParams& p, int first, int lane) {
    // Each lane loads two slots. Bit i of the 64-bit masks stands for token `first - SLOT_GROUP + i`.
    const int early = slot_of(p, first - SLOT_GROUP + lane), late = slot_of(p, first - SLOT_GROUP + 32 + lane);
    unsigned long long groups = 0;
    if constexpr (ALIGNED) {
        if (p.block_size % SLOT_GROUP == 0) {
            int previous_early = __shfl_up_sync(FULL_WARP, early, 1),
                previous_late = __shfl_up_sync(FULL_WARP, late, 1);
            const int last_early = __shfl_sync(FULL_WARP, early, 31);
            if (lane == 0) previous_early = -1, previous_late = last_early;
            const unsigned follows_early = __ballot_sync(FULL_WARP, previous_early >= 0 && early == previous_early + 1);
            const unsigned follows_late = __ballot_sync(FULL_WARP, previous_late >= 0 && late == previous_late + 1);
            const unsigned begins_early = __ballot_sync(FULL_WARP, early >= 0 && early % SLOT_GROUP == 0);
            const unsigned begins_late = __ballot_sync(FULL_WARP, late >= 0 && late % SLOT_GROUP == 0);
            const unsigned long long follows = follows_early | (unsigned long long)follows_late << 32;
            groups = begins_early | (unsigned long long)begins_late << 32;
#pragma unroll
            for (int i = 1; i < SLOT_GROUP; ++i) groups &= follows >> i;
        }
    }
    unsigned long long in_groups = groups;
#pragma unroll
    for (int step = 1; step < SLOT_GROUP; step *= 2) in_groups |= in_groups << step;
    const unsigned valid_early = __ballot_sync(FULL_WARP, early >= 0), valid_late = __ballot_sync(FULL_WARP, late >= 0);
    const unsigned long long valid = valid_early | (unsigned long long)valid_late << 32;
    return {unsigned(groups >> SLOT_GROUP), unsigned((valid & ~in_groups) >> SLOT_GROUP)};
}

// Return 32-bit word j of a column of a slot group. `row` holds the rows of the group. SIZE: bytes of an element.
template <int SIZE, int WORDS>
__device__ __forceinline__ unsigned column_word(const unsigned (&row)[SLOT_GROUP][WORDS], int column, int j) {
    if constexpr (SIZE == 4) {
        return row[j][column];
    } else if constexpr (SIZE == 2) {
        return __byte_perm(row[2 * j][column / 2], row[2 * j + 1][column / 2], column % 2 ? 0x7632 : 0x5410);
    } else {
        const int word32 = column / 4, byte = column % 4, selector = byte | (byte + 4) << 4;
        const unsigned low = __byte_perm(row[4 * j][word32], row[4 * j + 1][word32], selector);
        return __byte_perm(low, __byte_perm(row[4 * j + 2][word32], row[4 * j + 3][word32], selector), 0x5410);
    }
}

// The columns of value_cache that one thread stores: 16 bytes of each token in `src`.
template <typename T, int FORMAT, bool ALIGNED> struct Values {
    static constexpr int OUT_SIZE = FORMAT == SAME ? sizeof(T) : 1, COLUMNS = 16 / sizeof(T);
    static constexpr int WORDS = COLUMNS * OUT_SIZE / 4; // 32-bit words of a converted row
    using Converted = Vector<WORDS * 4>;
    const StoreBlocksParams& p;
    const char* src;         // columns of token 0
    char* cache;             // first column, at slot 0
    long long column_stride; // in the cache
    Quotient quotient;

    __device__ __forceinline__ void load_group(int token, uint4 (&vector)[SLOT_GROUP]) const {
#pragma unroll
        for (int i = 0; i < SLOT_GROUP; ++i)
            vector[i] = load_vector<T, ALIGNED>(src + (token + i) * p.value.src_stride);
    }
    // Transpose a slot group in registers, and store one vector per column.
    __device__ __forceinline__ void store_group(int token, const uint4 (&vector)[SLOT_GROUP]) const {
        unsigned row[SLOT_GROUP][WORDS];
        const unsigned slot = unsigned(__ldg(p.slot_mapping + token));
        const unsigned block = p.by_block_size.quotient(slot);
        char* to = cache + block * p.value.block_stride + (slot - block * p.block_size) * OUT_SIZE;
#pragma unroll
        for (int i = 0; i < SLOT_GROUP; ++i) {
            const Converted converted = Store<T, FORMAT, 16>::convert(vector[i], quotient);
#pragma unroll
            for (int j = 0; j < WORDS; ++j) row[i][j] = reinterpret_cast<const unsigned*>(&converted)[j];
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            constexpr int LENGTH = SLOT_GROUP * OUT_SIZE / 4;
            unsigned word32[LENGTH];
#pragma unroll
            for (int j = 0; j < LENGTH; ++j) word32[j] = column_word<OUT_SIZE, WORDS>(row, c, j);
            if constexpr (LENGTH == 2) {
                *reinterpret_cast<uint2*>(to + c * column_stride) = make_uint2(word32[0], word32[1]);
            } else {
#pragma unroll
                for (int j = 0; j < LENGTH; j += 4)
                    *reinterpret_cast<uint4*>(to + c * column_stride + j * 4) =
                        make_uint4(word32[j], word32[j + 1], word32[j + 2], word32[j + 3]);
            }
        }
    }
    // Of the TOKENS tokens from `first + index` on, store each token that is in `single`, element by element. Bit i of
    // `single` stands for token `first + i`.
    template <int TOKENS> __device__ __forceinline__ void store_single(int first, int index, unsigned single) const {
        using Element = Vector<OUT_SIZE>;
        uint4 vector[TOKENS];
        int slot[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            slot[i] = -1;
            if (single >> (index + i) & 1) {
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

// Store the values of a tile of tokens. A lane stores slot group `lane / TOKEN_LANES`, then tokens outside of groups.
template <typename T, int FORMAT, bool ALIGNED, int WARPS, int SPLITS>
__device__ __forceinline__ void store_values(const StoreBlocksParams& p, int first, int split) {
    using Columns = Values<T, FORMAT, ALIGNED>;
    constexpr int TOKENS = SLOT_GROUP / SPLITS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const SlotGroups groups = find_groups<ALIGNED>(p, first, lane);

    const int column = ((blockIdx.y * WARPS + warp) * TOKEN_LANES + lane % TOKEN_LANES) * Columns::COLUMNS;
    if (column >= p.columns) return;
    const int head = p.by_head_dim.quotient(column);
    const long long column_stride = (long long)p.block_size * Columns::OUT_SIZE;
    const char* src = p.value.src + (long long)column * sizeof(T);
    char* cache = p.value.cache + head * p.value.head_stride + (column - head * p.head_dim) * column_stride;
    const Columns columns{p, src, cache, column_stride, Quotient(FORMAT == SAME ? 1.f : p.value.scale.load())};

    // Clear the bits of the first `lane / TOKEN_LANES` groups, so that the lowest set bit is the group of this lane.
    unsigned begin = groups.begins;
#pragma unroll
    for (int i = 1; i < 32 / TOKEN_LANES; ++i)
        if (lane / TOKEN_LANES >= i) begin &= begin - 1;
    if (begin && split == 0) {
        const int token = first + __ffs(begin) - 1;
        uint4 vector[SLOT_GROUP];
        columns.load_group(token, vector);
        columns.store_group(token, vector);
    }
    if (groups.single == 0) return;
    const int index = lane / TOKEN_LANES * SLOT_GROUP + split * TOKENS;
    columns.template store_single<TOKENS>(first, index, groups.single);
}

template <typename T, int FORMAT, bool ALIGNED, int WARPS, int SPLITS>
__global__ void __launch_bounds__(WARPS * 32, ALIGNED&& FORMAT == SAME && SPLITS == 1 ? 32 / WARPS : 1)
    store_blocks(const __grid_constant__ StoreBlocksParams p) {
    begin_behind_earlier_kernels();
    const int first = int(blockIdx.x / SPLITS) * TILE, split = blockIdx.x % SPLITS;
    if (blockIdx.z == 0)
        store_keys<T, FORMAT, ALIGNED, WARPS, SPLITS>(p, first, split);
    else
        store_values<T, FORMAT, ALIGNED, WARPS, SPLITS>(p, first, split);
}
