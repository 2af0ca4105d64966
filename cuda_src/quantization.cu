// Quantize rows to 8 or 4 bits, and read 4 bits back.
//
//   quantize_groups   scale = max(max |v|, smallest) / LARGEST for each GROUP neighbours of a row, a few lanes of a warp
//   quantize_rows     the same for each row, or for groups of any size; a block
//   quantize_tensor   one scale for all, given or, from partial maxima, the same of all
//   largest_magnitude   those partial maxima
//   quantize_fp4, dequantize_fp4   e2m1 with a scale for each 32 (MXFP4: a power of two) or 16 (NVFP4: e4m3)
//
//   q = v / scale, rounded to nearest, ties to even, and saturated; v is x, or activate(gate, up) of a row of two halves
//
// Every quotient is the IEEE one, so that all but an activation's error is the same in any other implementation.
//
// T: the elements of x. FORMAT: of q. EACH: numbers of a unit, 8 or, where sizes or addresses do not allow that, 1; of
// 4 bits also 16. ITEMS: units of a thread, or groups of units. BYTES: the width of a load.
//
// In the layout [experts, max_tokens, k], rows from the count of their expert on are neither read nor written.
#include "common/activation.cuh"
#include "common/quantize.cuh"
#include "common/warp.cuh"

// --- rows and tiles ------------------------------------------------------------------------------------

struct Rows {
    const char* x;     // T [rows, k], or [rows, 2 * k] of which the second half is up
    const int* counts; // [rows / max_tokens], may be null
    long long stride;  // bytes between rows
    int rows;
    int max_tokens; // rows of one expert
    Divisor by_max_tokens;
    __device__ __forceinline__ bool counts_row(int row) const {
        if (!counts) return true;
        const int expert = by_max_tokens.quotient(row);
        return row - expert * max_tokens < __ldg(counts + expert);
    }
};

// A block takes a tile of rows, or of parts of long rows: x: tiles of rows; y: parts of a row. tile_columns / ITEMS
// threads side by side have a row: thread t its columns t, t + threads, ... A thread has asked for all of them before it
// looks at the first.
struct Tile {
    int columns;      // in a row
    int tile_rows;    // tile_rows * threads <= blockDim.x
    int tile_columns; // a multiple of ITEMS
    Divisor by_threads;
    template <int ITEMS> __device__ __forceinline__ int threads() const { return unsigned(tile_columns) / ITEMS; }
    // The row and the first column of this thread; whether there is such a row.
    template <int ITEMS>
    __device__ __forceinline__ bool locate(const Rows& in, int x, int y, int& row, int& column) const {
        const int tile_row = by_threads.quotient(threadIdx.x);
        row = x * tile_rows + tile_row;
        column = y * tile_columns + threadIdx.x - tile_row * threads<ITEMS>();
        return tile_row < tile_rows && row < in.rows && in.counts_row(row);
    }
};

// Two 16-bit numbers side by side.
template <typename T> struct PairOf;
template <> struct PairOf<__half> {
    using Type = __half2;
};
template <> struct PairOf<__nv_bfloat16> {
    using Type = __nv_bfloat162;
};

// The larger one, or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// EACH numbers of a row, or of both halves of one, as they were loaded.
template <typename T, int ACTIVATION, int EACH, int BYTES> struct Loaded {
    static constexpr int HALVES = ACTIVATION ? 2 : 1, LOADS = EACH * int(sizeof(T)) / BYTES;
    alignas(BYTES < 4 ? 4 : BYTES) Unit<BYTES> unit[HALVES][LOADS];

    __device__ __forceinline__ void load(const char* from, long long up) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                unit[half][i] = __ldg(reinterpret_cast<const Unit<BYTES>*>(from + half * up) + i);
    }
    __device__ __forceinline__ void values(float (&value)[EACH]) const {
        floats(value, 0);
        if constexpr (ACTIVATION) {
            float up[EACH];
            floats(up, 1);
#pragma unroll
            for (int i = 0; i < EACH; ++i) value[i] = activate<ACTIVATION>(value[i], up[i]);
        }
    }
    __device__ __forceinline__ void floats(float (&value)[EACH], int half) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if constexpr (IS_BFLOAT16<T> && EACH % 2 == 0) {
                // Its high half is a float already, but for the low one.
                const unsigned pair = reinterpret_cast<const unsigned*>(unit[half])[i / 2];
                value[i] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            } else {
                value[i] = to_float(reinterpret_cast<const T*>(unit[half])[i]);
            }
        }
    }
};

template <typename T, int EACH> constexpr bool IN_PAIRS = sizeof(T) == 2 && EACH % 2 == 0;

// What is left of the pairs that were loaded, of each as `of` has it, when `pick` has chosen from two until it is one.
template <typename OF, typename PICK, typename T, int EACH, int BYTES>
__device__ __forceinline__ auto picked(const Loaded<T, NO_ACTIVATION, EACH, BYTES>& loaded, OF of, PICK pick) {
    using Pair = typename PairOf<T>::Type;
    const Pair* pair = reinterpret_cast<const Pair*>(loaded.unit[0]);
    Pair best = of(pair[0]);
#pragma unroll
    for (int i = 1; i < EACH / 2; ++i) best = pick(best, of(pair[i]));
    return best;
}

// The larger one of `largest` and the largest magnitude of what was loaded. NaN does not count or, if NANS, is the
// result.
template <bool NANS, typename T, int EACH, int BYTES>
__device__ __forceinline__ float magnitude(const Loaded<T, NO_ACTIVATION, EACH, BYTES>& loaded, float largest) {
    if constexpr (IN_PAIRS<T, EACH>) {
        const auto best = picked(
            loaded, [](auto a) { return __habs2(a); },
            [](auto a, auto b) { return NANS ? __hmax2_nan(a, b) : __hmax2(a, b); });
        const float low = to_float(best.x), high = to_float(best.y);
        return NANS ? max_or_nan(largest, max_or_nan(low, high)) : fmaxf(largest, fmaxf(low, high));
    } else {
        float value[EACH];
        loaded.values(value);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            largest = NANS ? max_or_nan(largest, fabsf(value[i])) : fmaxf(largest, fabsf(value[i]));
        return largest;
    }
}

// The largest of a block's values, none of them negative or NaN, in every thread.
__device__ __forceinline__ float block_max(float value) {
    __shared__ unsigned of_warp[32];
    unsigned largest = __reduce_max_sync(FULL_WARP, __float_as_uint(value));
    if (blockDim.x > 32) {
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
        const unsigned lane = threadIdx.x % 32;
        largest = __reduce_max_sync(FULL_WARP, lane < blockDim.x / 32 ? of_warp[lane] : 0);
    }
    return __uint_as_float(largest);
}

// The same of any two values but NaN.
__device__ __forceinline__ void block_max(float& first, float& second) {
    __shared__ uint2 of_warp[32];
    uint2 key;
    key.x = __reduce_max_sync(FULL_WARP, sortable(first)), key.y = __reduce_max_sync(FULL_WARP, sortable(second));
    if (blockDim.x > 32) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) of_warp[threadIdx.x / 32] = key;
        __syncthreads();
        const bool there = lane < blockDim.x / 32;
        key.x = __reduce_max_sync(FULL_WARP, there ? of_warp[lane].x : 0);
        key.y = __reduce_max_sync(FULL_WARP, there ? of_warp[lane].y : 0);
    }
    first = from_sortable(key.x), second = from_sortable(key.y);
}

// --- a scale for each group, or each row ---------------------------------------------------------------

struct Scales {
    float* to; // [experts, max_tokens, groups], in any order
    long long expert_stride;
    long long row_stride;
    long long group_stride;
    __device__ __forceinline__ long long at(const Rows& in, int row, int group) const {
        const int expert = in.by_max_tokens.quotient(row);
        return expert * expert_stride + (row - expert * in.max_tokens) * row_stride + group * group_stride;
    }
};

struct QuantizeGroupsParams {
    Rows in;
    char* q; // [rows, k]
    Scales scales;
    float smallest;
    int power_of_two; // scales are rounded up to one
    Tile tile;
};

// LANES neighbours have a group, of which a thread takes UNITS units: lane l units l, l + LANES, ... A column of a tile
// is a lane of a group, and a row of it has whole groups.
template <typename T, int FORMAT, int ACTIVATION, int GROUP, int UNITS, int ITEMS>
__global__ void __launch_bounds__(256) quantize_groups(const __grid_constant__ QuantizeGroupsParams p) {
    constexpr int EACH = 8, LANES = GROUP / (EACH * UNITS), STEP = LANES * EACH;
    Loaded<T, ACTIVATION, EACH, 16> loaded[ITEMS][UNITS];
    int row, column;
    const bool mine = p.tile.locate<ITEMS>(p.in, blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>(), k = p.tile.columns * (UNITS * EACH);
    const long long up = k * (long long)sizeof(T);
    const int first = unsigned(column) / LANES * GROUP + unsigned(column) % LANES * EACH;
    const char* from = p.in.x + row * p.in.stride + first * (long long)sizeof(T);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        // Lanes without a group know nothing, but have no part in another's.
        if (!mine || column + i * threads >= p.tile.columns) continue;
#pragma unroll
        for (int j = 0; j < UNITS; ++j)
            loaded[i][j].load(from + (i * threads * (UNITS * EACH) + j * STEP) * int(sizeof(T)), up);
    }
    char* to = p.q + ((long long)row * k + first);
    float* scale_to = p.scales.to + p.scales.at(p.in, row, unsigned(column) / LANES);
    const long long scale_step = unsigned(threads) / LANES * p.scales.group_stride;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float value[UNITS][EACH], largest = 0;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            if constexpr (ACTIVATION) {
                loaded[i][j].values(value[j]);
#pragma unroll
                for (int n = 0; n < EACH; ++n)
                    largest = fmaxf(largest, fabsf(value[j][n])); // the number, where one of them is NaN
            } else {
                largest = magnitude<false>(loaded[i][j], largest);
            }
        }
        const float scale = scale_of<FORMAT>(lanes_max<LANES>(largest), p.smallest, p.power_of_two);
        if (!mine || column + i * threads >= p.tile.columns) continue;
        const Quotient<SMALL> quotient(scale);
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
            if constexpr (!ACTIVATION) loaded[i][j].values(value[j]);
#pragma unroll
            for (int n = 0; n < EACH; ++n) value[j][n] = quotient(value[j][n]);
            *reinterpret_cast<uint2*>(to + i * threads * (UNITS * EACH) + j * STEP) =
                to_bytes<FORMAT, EACH>(value[j], 0.f);
        }
        if (unsigned(column) % LANES == 0) scale_to[i * scale_step] = scale;
    }
}

struct QuantizeRowsParams {
    Rows in;
    char* q; // [rows, groups, columns * EACH]
    Scales scales;
    int* azp;    // [rows], only of INT8_AZP
    Scale upper; // at most so much counts as the largest
    float smallest;
    int power_of_two;
    int groups; // in a row
    Divisor by_groups;
    int columns; // units in a group
};

// Grid: a block has a group. Its threads keep up to ITEMS units each in registers; of more, they read the rest again.
//
// INT8_AZP: scale = max((max v - min v) / 255, max |v| / 2^22), azp = round(-128 - min v / scale), and azp is added to
// the rounded quotient.
template <typename T, int FORMAT, int ACTIVATION, int EACH, int ITEMS>
__global__ void __launch_bounds__(1024, 1) quantize_rows(const __grid_constant__ QuantizeRowsParams p) {
    using In = Loaded<T, ACTIVATION, EACH, EACH == 1 ? sizeof(T) : 16>;
    const int row = p.by_groups.quotient(blockIdx.x), group = blockIdx.x - row * p.groups;
    if (!p.in.counts_row(row)) return;
    const int threads = blockDim.x;
    const long long units = (long long)p.groups * p.columns, first = (long long)group * p.columns;
    constexpr int SIZE = EACH * int(sizeof(T));
    const char* from = p.in.x + row * p.in.stride + first * SIZE;
    char* to = p.q + (row * units + first) * EACH;

    In loaded[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int unit = threadIdx.x + i * threads;
        if (unit < p.columns) loaded[i].load(from + unit * (long long)SIZE, units * SIZE);
    }
    // Of INT8_AZP the largest and the largest of the negated, else the largest magnitude.
    float largest = FORMAT == INT8_AZP ? -CUDART_INF_F : 0.f, negated = -CUDART_INF_F;
    // NaN does not count.
    auto take = [&](const float (&value)[EACH]) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            largest = fmaxf(largest, FORMAT == INT8_AZP ? value[j] : fabsf(value[j]));
            if constexpr (FORMAT == INT8_AZP) negated = fmaxf(negated, -value[j]);
        }
    };
    auto look = [&](const In& in) {
        if constexpr (!ACTIVATION && FORMAT != INT8_AZP) {
            largest = magnitude<false>(in, largest);
        } else if constexpr (!ACTIVATION && IN_PAIRS<T, EACH>) {
            const auto same = [](auto a) { return a; };
            const auto high = picked(in, same, [](auto a, auto b) { return __hmax2(a, b); });
            const auto low = picked(in, same, [](auto a, auto b) { return __hmin2(a, b); });
            largest = fmaxf(largest, fmaxf(to_float(high.x), to_float(high.y)));
            negated = fmaxf(negated, fmaxf(-to_float(low.x), -to_float(low.y)));
        } else {
            float value[EACH];
            in.values(value);
            take(value);
        }
    };
    // An activation is computed once, and what it gives is kept in place of what was loaded.
    float kept[ACTIVATION ? ITEMS : 1][EACH], value[EACH];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (int(threadIdx.x + i * threads) >= p.columns) continue;
        if constexpr (ACTIVATION) {
            loaded[i].values(kept[i]);
            take(kept[i]);
        } else {
            look(loaded[i]);
        }
    }
    for (int unit = threadIdx.x + ITEMS * threads; unit < p.columns; unit += threads) {
        In more;
        more.load(from + unit * (long long)SIZE, units * SIZE);
        look(more);
    }

    float scale, azp = 0;
    if constexpr (FORMAT == INT8_AZP) {
        block_max(largest, negated);
        const bool none = largest < -negated;
        const float high = none ? 0.f : largest, low = none ? 0.f : -negated;
        const float magnitude = fmaxf(fmaxf(fabsf(high), fabsf(low)), p.smallest);
        scale = fmaxf(__fdiv_rn(__fsub_rn(high, low), 255.f), __fmul_rn(magnitude, 0x1p-22f));
        azp = rintf(__fsub_rn(-128.f, __fdiv_rn(low, scale)));
        azp = azp == azp ? azp : 0.f;
    } else {
        scale = scale_of<FORMAT>(fminf(block_max(largest), p.upper.load()), p.smallest, p.power_of_two);
    }
    if (threadIdx.x == 0) {
        p.scales.to[p.scales.at(p.in, row, group)] = scale;
        if constexpr (FORMAT == INT8_AZP) p.azp[row] = __float2int_rn(azp);
    }

    // FP8 may have a bound of its scales. What is no larger than 2^22 times its scale is as good as SMALL.
    const Quotient<FORMAT == E4M3 ? LARGE : SMALL> quotient(scale);
    auto put = [&](int unit, const float (&value)[EACH]) {
        float quotients[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) quotients[j] = quotient(value[j]);
        *reinterpret_cast<Unit<EACH>*>(to + (long long)unit * EACH) = to_bytes<FORMAT, EACH>(quotients, azp);
    };
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int unit = threadIdx.x + i * threads;
        if (unit >= p.columns) continue;
        if constexpr (ACTIVATION) {
            put(unit, kept[i]);
        } else {
            loaded[i].values(value);
            put(unit, value);
        }
    }
    for (int unit = threadIdx.x + ITEMS * threads; unit < p.columns; unit += threads) {
        In more;
        more.load(from + unit * (long long)SIZE, units * SIZE);
        more.values(value);
        put(unit, value);
    }
}

// --- one scale for all ---------------------------------------------------------------------------------

struct LargestMagnitudeParams {
    Rows in;
    float* partial; // [gridDim.x]
    int tiles;
    int chunks; // parts of a row
    Tile tile;
};

// Grid: as many blocks as run at a time. Each takes every so manieth tile.
template <typename T, int EACH, int ITEMS>
__global__ void __launch_bounds__(1024) largest_magnitude(const __grid_constant__ LargestMagnitudeParams p) {
    using In = Loaded<T, NO_ACTIVATION, EACH, EACH == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = EACH * int(sizeof(T));
    const int threads = p.tile.threads<ITEMS>();
    float largest = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int x = tile / p.chunks, y = tile - x * p.chunks;
        In loaded[ITEMS];
        int row, column;
        if (!p.tile.locate<ITEMS>(p.in, x, y, row, column)) continue;
        const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (column + i * threads < p.tile.columns) loaded[i].load(from + i * threads * SIZE, 0);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (column + i * threads < p.tile.columns) largest = magnitude<false>(loaded[i], largest);
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = largest;
}

struct QuantizeTensorParams {
    Rows in;
    char* q;          // [rows, k]
    float* scale_out; // one
    int* azp_out;     // one, only of INT8_AZP
    Scale scale;      // unless DYNAMIC
    const int* azp;
    const float* partial; // if DYNAMIC, maxima
    int partials;
    Scale upper; // at most so much counts as the largest
    float smallest;
    Tile tile;
};

// If DYNAMIC, the last tiles come first: they are what the pass before read last, and may still be in L2.
template <typename T, int FORMAT, int ACTIVATION, int EACH, int ITEMS, bool DYNAMIC>
__global__ void __launch_bounds__(256, 4) quantize_tensor(const __grid_constant__ QuantizeTensorParams p) {
    using In = Loaded<T, ACTIVATION, EACH, EACH == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = EACH * int(sizeof(T));
    In loaded[ITEMS];
    int row, column;
    const bool mine =
        p.tile.locate<ITEMS>(p.in, DYNAMIC ? gridDim.x - 1 - blockIdx.x : blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>();
    const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (mine && column + i * threads < p.tile.columns)
            loaded[i].load(from + i * threads * SIZE, p.tile.columns * (long long)SIZE);
    float scale, azp = 0;
    if constexpr (DYNAMIC) {
        float largest = 0;
        for (int i = threadIdx.x; i < p.partials; i += blockDim.x) largest = fmaxf(largest, __ldg(p.partial + i));
        scale = scale_of<FORMAT>(fminf(block_max(largest), p.upper.load()), p.smallest, false);
    } else {
        scale = p.scale.load();
    }
    if constexpr (FORMAT == INT8_AZP) azp = float(__ldg(p.azp));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *p.scale_out = scale;
        if constexpr (FORMAT == INT8_AZP) *p.azp_out = __ldg(p.azp);
    }
    const Quotient<ANY> quotient(scale);
    char* to = p.q + ((long long)row * p.tile.columns + column) * EACH;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!mine || column + i * threads >= p.tile.columns) continue;
        float value[EACH];
        loaded[i].values(value);
#pragma unroll
        for (int j = 0; j < EACH; ++j) value[j] = quotient(value[j]);
        *reinterpret_cast<Unit<EACH>*>(to + i * threads * EACH) = to_bytes<FORMAT, EACH, false>(value, azp);
    }
}

// --- 4 bits --------------------------------------------------------------------------------------------

template <int FORMAT> constexpr int FP4_GROUP = FORMAT == MXFP4 ? 32 : 16;

// The sign bits of 8 elements, each in the high bit of its nibble. `word` is how they were loaded.
template <typename T> __device__ __forceinline__ unsigned signs(const unsigned* word) {
    unsigned even, odd; // the high bytes of elements 0, 2, 4, 6 and of 1, 3, 5, 7
    if constexpr (sizeof(T) == 2) {
        const unsigned low = __byte_perm(word[0], word[1], 0x7351), high = __byte_perm(word[2], word[3], 0x7351);
        even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
    } else {
        even = __byte_perm(__byte_perm(word[0], word[2], 0x73), __byte_perm(word[4], word[6], 0x73), 0x5410);
        odd = __byte_perm(__byte_perm(word[1], word[3], 0x73), __byte_perm(word[5], word[7], 0x73), 0x5410);
    }
    return (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

// The codes of 8 numbers 2 * half, none of them negative, one in a nibble: the nearest number of e2m1, ties to even, 6
// at most; NaN is 0.
//
// The codes of 0, .5, 1, 1.5, 2, 3, 4 and 6 count 0 to 7. A number's code is what lies below it in three stretches in
// which they are evenly spaced: four to 2, two to 4, one to 6. A saturating addition cuts the number to a stretch, and
// adding the result to ROUNDER, whose last place is 1, rounds it. At the end of a stretch the code is even, so that a
// tie in the next one still goes to the even code.
__device__ __forceinline__ unsigned to_e2m1(const float (&half)[8]) {
    constexpr float ROUNDER = 12582912.f;
    constexpr unsigned BITS = 0x4b400000u; // of ROUNDER
    unsigned codes = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float x = half[i];
        float code = __fmaf_rn(__saturatef(x), 4.f, ROUNDER);
        code = __fmaf_rn(__saturatef(__fadd_rn(x, -1.f)), 2.f, code);
        code = __fadd_rn(__saturatef(__fadd_rn(x, -2.f)), code);
        codes = codes * 16 + __float_as_uint(code);
    }
    return codes - BITS * 0x11111111u;
}

// The same of numbers of at most 11 bits, below 4, two at a time.
__device__ __forceinline__ unsigned to_e2m1_in_pairs(const float (&half)[8]) {
    constexpr unsigned short ROUNDER = 0x6400; // 1024, whose last place is 1
    // Codes 0, 2 | 1, 3 and 4, 6 | 5, 7, each in a byte, and what the ROUNDERs leave there.
    constexpr unsigned BASE = ROUNDER * 0x10001u * 0x101u;
    constexpr unsigned LOW = (BASE & 0xffff) * 0x10001u, HIGH = (BASE >> 16) * 0x10001u;
    const auto number = [](float x) { return __float2half2_rn(x); };
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 x = __floats2half2_rn(half[2 * i], half[2 * i + 1]);
        __half2 code = __hfma2(__hadd2_sat(x, number(0.f)), number(4.f), __half2(__half2_raw{ROUNDER, ROUNDER}));
        code = __hfma2(__hadd2_sat(x, number(-1.f)), number(2.f), code);
        code = __hadd2(__hadd2_sat(x, number(-2.f)), code);
        word[i] = reinterpret_cast<const unsigned&>(code);
    }
    const unsigned first = word[0] + word[1] * 256, second = word[2] + word[3] * 256;
    return __byte_perm(first, second, 0x5410) + __byte_perm(first, second, 0x7632) * 16 - (LOW + HIGH * 16);
}

// The scale of NVFP4 and half of global / scale, both 0 if it is. Where no remainder is inexact or overflows, products
// with reciprocals are corrected to what IEEE division gives.
__device__ __forceinline__ unsigned scale_of(float largest, float global, bool is_usual, float& half) {
    constexpr float RECIPROCAL = 1.f / 6.f;
    constexpr unsigned SMALLEST = 37u << 23, RANGE = 217u << 23; // 2^-90 and, from there, up to 2^127
    const auto number = [](unsigned byte) {
        __nv_fp8_e4m3 scale;
        scale.__x = (__nv_fp8_storage_t)byte;
        return to_float(scale);
    };
    if (is_usual && __float_as_uint(largest) - SMALLEST < RANGE) {
        const float part = __fmul_rn(largest, RECIPROCAL);
        const float sixth = __fmaf_rn(-__fmaf_rn(part, 6.f, -largest), RECIPROCAL, part);
        const unsigned byte = to_fp8<__NV_E4M3>(__fmul_rn(global, sixth));
        const float scale = number(byte), guess = fast_reciprocal(scale);
        const float reciprocal = __fmaf_rn(__fmaf_rn(-guess, scale, 1.f), guess, guess);
        const float product = __fmul_rn(.5f * global, reciprocal);
        const float quotient = __fmaf_rn(-__fmaf_rn(product, scale, -.5f * global), reciprocal, product);
        half = byte == 0 ? 0.f : quotient;
        return byte;
    }
    const unsigned byte = to_fp8<__NV_E4M3>(__fmul_rn(global, __fdiv_rn(largest, 6.f)));
    const float scale = number(byte);
    half = scale == 0 ? 0.f : .5f * __fdiv_rn(global, scale);
    return byte;
}

struct QuantizeFp4Params {
    Rows in;
    char* packed;          // [rows, k / 2], the first of two numbers in the low half
    unsigned char* scales; // [rows, k / GROUP]
    Scale global;          // of NVFP4
    Tile tile;
};

// LANES neighbours have a group.
//
//   MXFP4   scale = 2^(floor(log2(max |x|)) - 2), which puts the largest between 4 and 8; NaN (255) where one is no
//           finite number
//   NVFP4   scale = e4m3(global * (max |x| / 6)); e2m1(x * (global / scale))
template <typename T, int FORMAT, int EACH, int BYTES, int ITEMS>
__global__ void __launch_bounds__(256) quantize_fp4(const __grid_constant__ QuantizeFp4Params p) {
    constexpr int LANES = FP4_GROUP<FORMAT> / EACH, SIZE = EACH * int(sizeof(T));
    Loaded<T, NO_ACTIVATION, EACH, BYTES> loaded[ITEMS];
    int row, column;
    const bool mine = p.tile.locate<ITEMS>(p.in, blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>();
    const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (mine && column + i * threads < p.tile.columns) loaded[i].load(from + i * threads * SIZE, 0);
    }
    const float global = FORMAT == NVFP4 ? p.global.load() : 1.f;
    const bool is_usual = fabsf(global) >= 0x1p-90f && fabsf(global) <= 0x1p90f;
    const long long first = (long long)row * p.tile.columns + column;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        float largest = magnitude<FORMAT == MXFP4>(loaded[i], 0.f);
        unsigned scale;
        float half; // of the factor
        if constexpr (FORMAT == MXFP4) {
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                largest = max_or_nan(largest, __shfl_xor_sync(FULL_WARP, largest, step));
            const int exponent = max(int(__float_as_uint(largest) >> 23) - 2, 0);
            const bool number = exponent < 253;
            scale = number ? exponent : 255;
            half = number ? __uint_as_float(unsigned(253 - exponent) << 23) : 0.f;
        } else {
            scale = scale_of(lanes_max<LANES>(largest), global, is_usual, half);
        }
        if (!mine || column + i * threads >= p.tile.columns) continue;
        float value[EACH];
        loaded[i].values(value);
        unsigned codes[EACH / 8];
#pragma unroll
        for (int j = 0; j < EACH / 8; ++j) {
            float halves[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) halves[n] = __fmul_rn(fabsf(value[j * 8 + n]), half);
            codes[j] = FORMAT == MXFP4 && sizeof(T) == 2 ? to_e2m1_in_pairs(halves) : to_e2m1(halves);
            codes[j] |= signs<T>(reinterpret_cast<const unsigned*>(loaded[i].unit[0]) + j * 2 * sizeof(T));
        }
        const long long at = first + i * threads;
        if constexpr (EACH == 16)
            reinterpret_cast<uint2*>(p.packed)[at] = make_uint2(codes[0], codes[1]);
        else
            reinterpret_cast<unsigned*>(p.packed)[at] = codes[0];
        if (unsigned(column) % LANES == 0) p.scales[(unsigned long long)at / LANES] = (unsigned char)scale;
    }
}

struct DequantizeFp4Params {
    const unsigned char* packed; // [units, 4], a unit has 8 numbers
    const unsigned char* scales; // [units * 8 / GROUP]
    char* out;                   // T [units, 8]
    Scale global;                // of NVFP4: scales are divided by it
    long long units;
};

// Grid: THREADS * ITEMS units to a block.
template <typename T, int FORMAT, bool ALIGNED, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) dequantize_fp4(const __grid_constant__ DequantizeFp4Params p) {
    constexpr int LANES = FP4_GROUP<FORMAT> / 8;
    const long long first = (long long)blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
    unsigned packed[ITEMS], byte[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long unit = first + i * THREADS;
        if (unit >= p.units) continue;
        if constexpr (ALIGNED) {
            packed[i] = __ldg(reinterpret_cast<const unsigned*>(p.packed) + unit);
        } else {
            packed[i] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[i] |= __ldg(p.packed + unit * 4 + j) << 8 * j;
        }
        byte[i] = __ldg(p.scales + unit / LANES);
    }
    const float global = FORMAT == NVFP4 ? p.global.load() : 1.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const long long unit = first + i * THREADS;
        if (unit >= p.units) continue;
        float factor;
        if constexpr (FORMAT == MXFP4) {
            factor = __uint_as_float(byte[i] == 0 ? 0x400000 : byte[i] == 255 ? 0x7fc00000 : byte[i] << 23);
        } else {
            __nv_fp8_e4m3 stored;
            stored.__x = (__nv_fp8_storage_t)byte[i];
            factor = __fdiv_rn(to_float(stored), global);
        }
        uint4 out[sizeof(T) / 2];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            // e2m1 is a float without the low places whose exponent counts from another number.
            const unsigned nibble = packed[i] >> 4 * j;
            const float number = __fmul_rn(__uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22), 0x1p126f);
            reinterpret_cast<T*>(out)[j] = from_float<T>(__fmul_rn(number, factor));
        }
#pragma unroll
        for (int j = 0; j < int(sizeof(T)) / 2; ++j)
            reinterpret_cast<uint4*>(p.out + unit * (long long)(8 * sizeof(T)))[j] = out[j];
    }
}
