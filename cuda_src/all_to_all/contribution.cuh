// A rank's partial of a token is the rank's part of the token's output. It is the weighted sum of the output rows of
// the rank's experts or, with APART, each of these rows.
#pragma once
#include "all_to_all/lines.cuh"
#include "common/numeric.cuh"

constexpr int THREADS = 256;
// A block processes one chunk of a row at a time. Every eight neighbouring lanes process VECTORS lines of the chunk. A
// line has 7 vectors of 16 bytes, because the eighth lane stores the epoch (all_to_all/lines.cuh). Smaller chunks have
// less latency, larger chunks less overhead.
constexpr int LINES_PER_BLOCK = THREADS / LANES_PER_LINE, BLOCK_VECTORS = LINES_PER_BLOCK * LINE_VECTORS;
template <int VECTORS> constexpr int CHUNK = VECTORS * BLOCK_VECTORS;
// The number of vectors per thread that one flag covers. This number is the same for all chunk sizes, because sender
// and receiver may use different chunk sizes.
constexpr int FLAG_VECTORS = 2;
// A slot is a (token, expert) pair. SUMMED: src holds one row per token, summed by the caller. BY_SLOT: src holds one
// row per slot, and this rank sums the rows of a token. APART: each slot's row is sent separately.
constexpr int SUMMED = 0, BY_SLOT = 1, APART = 2;
// Resident blocks per multiprocessor. RESIDENT_LARGE applies to BY_SLOT and to large chunks, which use more registers.
constexpr int RESIDENT = 3, RESIDENT_LARGE = 2;

struct Params {
    Ranks ranks;
    const void* src;      // [rows, 8 * vectors]  T; SUMMED: [ranks * max_tokens, 8 * vectors]
    const int* inverse;   // [ranks, max_tokens, topk]: a row of src, or a value outside its rows for none; null: SUMMED
    const void* topk_ids; // [tokens, topk]  ID, of this rank's tokens
    const float* weights; // [tokens, topk], of this rank's tokens
    void* out;            // [tokens, 8 * vectors]  T
    long long ids_at;     // byte offsets in a window, for the last dispatch's buffer; ids: [ranks, max_tokens, topk]
    long long weights_at; // [ranks, max_tokens, topk]
    long long partial_at; // [ranks, max_tokens, 8 * vectors]; APART: [max_tokens, topk, 8 * vectors]
    long long flags_at;   // [ranks, max_tokens, flags], unsigned; APART: [max_tokens, topk, flags]
    long long lines_at;   // [ranks, line_tokens, lines]
    int weighted;         // 0: all weights are 1
    int rows, tokens, vectors, chunks, flags, lines, topk, max_tokens, senders, buffer;
    int line_tokens; // a source with at most this many tokens receives lines, not flags
};

template <typename T> struct EightElements {
    union {
        uint4 vector;
        T number[8];
    };
};

template <typename T> __device__ __forceinline__ void add(float (&sum)[8], const uint4& vector, float weight) {
    EightElements<T> eight;
    eight.vector = vector;
#pragma unroll
    // The multiply-add is not fused, so that the sum has the same bits as in unpermute_rows.
    for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, to_float(eight.number[i])));
}

template <typename T> __device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
    EightElements<T> eight;
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.number[i] = from_float<T>(sum[i]);
    return eight.vector;
}

// The slots of a received token. Lane k holds slot k.
struct Slots {
    int id = -1, row = -1; // row: index of the row in src
    float weight = 1.f;

    // `place`: source * max_tokens + token. This only starts the loads; the first use of the slots waits for them.
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

    __device__ __forceinline__ unsigned local_slots(const Params& p) const {
        return __ballot_sync(FULL_WARP, p.ranks.owner(unsigned(id)) == p.ranks.rank);
    }

    __device__ __forceinline__ bool has_row(const Params& p) const { return unsigned(row) < unsigned(p.rows); }

    // Return whether every slot of the mask `local_slots` has a row in src. A slot has no row if the capacity of its
    // expert was exceeded. This failure is recorded on all ranks.
    template <int MODE>
    __device__ __forceinline__ bool have_rows(const Params& p, unsigned local_slots, unsigned long long step) const {
        if (MODE == SUMMED) return true;
        const bool has_rows = !(local_slots >> threadIdx.x % 32 & 1) || has_row(p);
        if (!has_rows) fail(p.ranks, OVER_CAPACITY, p.ranks.rank, COMBINE, step);
        return __all_sync(FULL_WARP, has_rows);
    }
};

// The index, within a chunk, of a thread's i-th line and vector. The last of eight lanes stores the epoch and no
// vector.
__device__ __forceinline__ int line_of(int i) { return i * LINES_PER_BLOCK + threadIdx.x / LANES_PER_LINE; }
__device__ __forceinline__ int vector_of(int i) { return line_of(i) * LINE_VECTORS + threadIdx.x % LANES_PER_LINE; }
__device__ __forceinline__ bool has_vector() { return threadIdx.x % LANES_PER_LINE < LINE_VECTORS; }

// Load a thread's vectors of the chunk that begins at vector `first` of a row.
template <int VECTORS>
__device__ __forceinline__ void load_chunk(uint4 (&value)[VECTORS], const uint4* row, int first, int vectors) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = first + vector_of(i);
        value[i] = has_vector() && vector < vectors ? row[vector] : uint4{};
    }
}

// Compute a thread's vectors of this rank's partial. All lanes of a warp must call this.
template <typename T, int MODE, int VECTORS>
__device__ __forceinline__ void compute_partial(uint4 (&value)[VECTORS], const Params& p, const Slots& slots,
                                                unsigned slots_to_sum, long long place, int first) {
    // ROWS_IN_FLIGHT is smaller on architectures other than Hopper, where the compiler uses more registers.
    constexpr int ROWS_IN_FLIGHT = (__CUDA_ARCH__ == 900 ? 8 : 4) / VECTORS;
    const uint4* const src = static_cast<const uint4*>(p.src);
    if constexpr (MODE == SUMMED) {
        load_chunk(value, src + place * p.vectors, first, p.vectors);
    } else if constexpr (MODE == APART) {
        const int row = __shfl_sync(FULL_WARP, slots.row, __ffs(slots_to_sum) - 1);
        const bool valid = unsigned(row) < unsigned(p.rows);
        load_chunk(value, src + (valid ? (long long)row * p.vectors : 0), first, valid ? p.vectors : 0);
    } else {
        float sum[VECTORS][8] = {};
        slots_to_sum &= __ballot_sync(FULL_WARP, slots.has_row(p));
        while (slots_to_sum) {
            uint4 loaded[ROWS_IN_FLIGHT][VECTORS];
            float weight[ROWS_IN_FLIGHT];
            int count = 0;
#pragma unroll
            for (int k = 0; k < ROWS_IN_FLIGHT; ++k) {
                if (!slots_to_sum) continue;
                const int slot = __ffs(slots_to_sum) - 1;
                slots_to_sum &= slots_to_sum - 1, count = k + 1;
                weight[k] = __shfl_sync(FULL_WARP, slots.weight, slot);
                const int row = __shfl_sync(FULL_WARP, slots.row, slot);
                load_chunk(loaded[k], src + (long long)row * p.vectors, first, p.vectors);
            }
#pragma unroll
            for (int k = 0; k < ROWS_IN_FLIGHT; ++k)
                if (k < count)
#pragma unroll
                    for (int i = 0; i < VECTORS; ++i) add<T>(sum[i], loaded[k][i], weight[k]);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) value[i] = rounded<T>(sum[i]);
    }
}
