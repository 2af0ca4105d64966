// Compute a rank's contribution to a token: the output rows of the rank's experts for this token, either each row
// separately or their weighted sum.
#pragma once
#include "all_to_all/lines.cuh"
#include "common/numeric.cuh"

constexpr int THREADS = 256;
// A block processes one chunk of a row at a time. A unit is 16 bytes. Every eight neighbouring lanes process UNITS
// lines of a chunk; a line has 7 units of data (all_to_all/lines.cuh). Smaller chunks have less latency; larger chunks
// have less overhead.
constexpr int LINES_AT_ONCE = THREADS / LANES_OF_LINE, UNITS_AT_ONCE = LINES_AT_ONCE * UNITS_OF_LINE;
template <int UNITS> constexpr int CHUNK = UNITS * UNITS_AT_ONCE;
// Units per thread that one flag covers. This is a constant, because the sending and the receiving rank may use
// different chunk sizes.
constexpr int FLAG_UNITS = 2;
// SUMMED: src holds one row per token, summed by the caller. BY_SLOT: src holds one row per slot, a (token, expert)
// pair; `inverse` gives the row of a slot, and this rank sums the rows of a token. APART: src also holds one row per
// slot, but each row is sent separately.
constexpr int SUMMED = 0, BY_SLOT = 1, APART = 2;
// Resident blocks per multiprocessor that the registers allow. RESIDENT_LARGE applies to BY_SLOT and to large chunks.
constexpr int RESIDENT = 3, RESIDENT_LARGE = 2;

struct Params {
    Ranks ranks;
    const void* src;      // [rows, 8 * units]  T; SUMMED: [ranks * max_tokens, 8 * units]
    const int* inverse;   // [ranks, max_tokens, topk]: a row of src, or a value outside its rows for none; null: SUMMED
    const void* topk_ids; // [tokens, topk]  ID, of this rank's own tokens
    const float* weights; // [tokens, topk], of this rank's own tokens
    void* out;            // [tokens, 8 * units]  T
    long long ids_at;     // byte offsets in a window, for the last dispatch's buffer; ids: [ranks, max_tokens, topk]
    long long weights_at; // [ranks, max_tokens, topk]
    long long partial_at; // [ranks, max_tokens, 8 * units]; APART: [max_tokens, topk, 8 * units]
    long long flags_at;   // [ranks, max_tokens, flags], unsigned; APART: [max_tokens, topk, flags]
    long long lines_at;   // [ranks, line_tokens, lines]
    int weighted;         // 0: all weights are 1
    int rows, tokens, units, chunks, flags, lines, topk, max_tokens, senders, buffer;
    int line_tokens; // a source with at most this many tokens receives lines, not flags
};

// Eight 16-bit elements.
template <typename T> struct Eight {
    union {
        uint4 unit;
        T number[8];
    };
};

template <typename T> __device__ __forceinline__ void add(float (&sum)[8], const uint4& unit, float weight) {
    Eight<T> eight;
    eight.unit = unit;
#pragma unroll
    // No fused multiply-add: unpermute_rows also rounds the product and the sum separately, so both give the same bits.
    for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, to_float(eight.number[i])));
}

template <typename T> __device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.number[i] = from_float<T>(sum[i]);
    return eight.unit;
}

// The slots of a token that this rank received. A slot is a (token, expert) pair; lane k holds slot k.
struct Slots {
    int id = -1, row = -1; // row: index of the row in src
    float weight = 1.f;

    // Issue the loads of the slots of a token; `place` is source * max_tokens + token. The first use of the slots, in
    // `here` or `has_row`, waits for the loads.
    template <int MODE> static __device__ __forceinline__ Slots load(const Params& p, long long place) {
        const char* const window = p.ranks.windows[p.ranks.rank];
        const int lane = threadIdx.x % 32;
        Slots slots;
        if (lane >= p.topk) return slots;
        const long long at = place * p.topk + lane;
        slots.id = __ldcg(reinterpret_cast<const int*>(window + p.ids_at) + at);
        if (MODE != SUMMED) slots.row = p.inverse[at];
        if (MODE == BY_SLOT && p.weighted)
            slots.weight = __ldcg(reinterpret_cast<const float*>(window + p.weights_at) + at);
        return slots;
    }

    // Return a mask of the slots whose expert is on this rank.
    __device__ __forceinline__ unsigned here(const Params& p) const {
        return __ballot_sync(FULL_WARP, p.ranks.owner(unsigned(id)) == p.ranks.rank);
    }

    // Return whether this lane's slot has a row.
    __device__ __forceinline__ bool has_row(const Params& p) const { return unsigned(row) < unsigned(p.rows); }

    // Return whether every slot of the mask `here` has a row in src. A slot has no row if the capacity of its expert
    // was exceeded. If a row is missing, record the failure on all ranks.
    template <int MODE>
    __device__ __forceinline__ bool have_rows(const Params& p, unsigned here, unsigned long long step) const {
        if (MODE == SUMMED) return true;
        const bool has = !(here >> threadIdx.x % 32 & 1) || has_row(p);
        if (!has) fail(p.ranks, OVER_CAPACITY, p.ranks.rank, COMBINE, step);
        return __all_sync(FULL_WARP, has);
    }
};

// Return the index, within a chunk, of a thread's i-th line (line_of) and i-th unit (unit_of). has_unit() is false in
// the last of the eight lanes of a line, because that lane stores the epoch and no unit.
__device__ __forceinline__ int line_of(int i) { return i * LINES_AT_ONCE + threadIdx.x / LANES_OF_LINE; }
__device__ __forceinline__ int unit_of(int i) { return line_of(i) * UNITS_OF_LINE + threadIdx.x % LANES_OF_LINE; }
__device__ __forceinline__ bool has_unit() { return threadIdx.x % LANES_OF_LINE < UNITS_OF_LINE; }

// Load a thread's units of a chunk. The chunk begins at unit `first` of the row.
template <int UNITS>
__device__ __forceinline__ void load_chunk(uint4 (&value)[UNITS], const uint4* row, int first, int units) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = first + unit_of(i);
        value[i] = has_unit() && unit < units ? row[unit] : uint4{};
    }
}

// Compute a thread's units of this rank's contribution to a token. `which` is a mask of the slots to sum. All lanes of
// a warp must call it.
template <typename T, int MODE, int UNITS>
__device__ __forceinline__ void contribution(uint4 (&value)[UNITS], const Params& p, const Slots& slots, unsigned which,
                                             long long place, int first) {
    // Number of rows that are loaded before they are added. It is smaller on architectures other than Hopper, where the
    // compiler uses more registers.
    constexpr int AT_ONCE = (__CUDA_ARCH__ == 900 ? 8 : 4) / UNITS;
    const uint4* const src = static_cast<const uint4*>(p.src);
    if constexpr (MODE == SUMMED) {
        load_chunk(value, src + place * p.units, first, p.units);
    } else if constexpr (MODE == APART) {
        const int row = __shfl_sync(FULL_WARP, slots.row, __ffs(which) - 1);
        const bool valid = unsigned(row) < unsigned(p.rows);
        load_chunk(value, src + (valid ? (long long)row * p.units : 0), first, valid ? p.units : 0);
    } else {
        float sum[UNITS][8] = {};
        which &= __ballot_sync(FULL_WARP, slots.has_row(p));
        while (which) {
            uint4 part[AT_ONCE][UNITS];
            float weight[AT_ONCE];
            int count = 0;
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                if (!which) continue;
                const int slot = __ffs(which) - 1;
                which &= which - 1, count = k + 1;
                weight[k] = __shfl_sync(FULL_WARP, slots.weight, slot);
                const int row = __shfl_sync(FULL_WARP, slots.row, slot);
                load_chunk(part[k], src + (long long)row * p.units, first, p.units);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                if (k < count)
#pragma unroll
                    for (int i = 0; i < UNITS; ++i) add<T>(sum[i], part[k][i], weight[k]);
        }
#pragma unroll
        for (int i = 0; i < UNITS; ++i) value[i] = rounded<T>(sum[i]);
    }
}
