// Tokens grouped by expert, and brought together again.
//
// A pair p = token * topk + slot asks for expert topk_ids[p], or, with a map, for expert_map[topk_ids[p]]. The pairs
// whose expert is in [0, experts) have rows, ordered by expert and, within one, by p:
//
//   count[e]   = pairs of expert e
//   start[e]   = sum over d < e of count[d], each rounded up to a multiple of block_size
//   inverse[p] = start[e] + pairs of expert e before p, or -1 where p has no row
//   rows[inverse[p]] = p / topk (its token), or p itself
//
// or, where every expert has room for as many rows, inverse[p] = e * room + pairs of expert e before p, -1 past the room.
//
//   permute:   out[inverse[t * topk + s]] = src[t]
//   unpermute: out[t] = sum over s of weights[t, s] * src[inverse[t * topk + s]], in float32, slot by slot
//
// sort_pairs    A block ranks pairs_per_block pairs that follow each other, a warp 32 of them at once. What each block
//               must know of the pairs before its own it counts itself, from all ids, or reads from count_pairs.
// count_pairs   The pairs of each expert in each block of sort_pairs, where there are too many to be counted so often.
// permute_rows  A block has blockDim.y tokens and a part of their columns, which it reads once and writes topk times.
// unpermute_rows  A block has blockDim.y tokens and a part of their columns; a thread sums up one unit of a token.
#include "common/units.cuh"
#include "common/warp.cuh"

constexpr int SORT_THREADS = 1024, ROW_THREADS = 256;

// --- sorting -------------------------------------------------------------------------------------------

struct Pairs {
    const void* topk_ids;  // ID [pairs]
    const int* expert_map; // [global_experts], may be null
    int pairs, global_experts, experts;
};

// The experts of the pairs first, first + step, ..., or p.experts for a pair that has none or is not before `end`. The
// ids are loaded before any is looked at. ID is unsigned, so that a negative id is one past all experts.
template <typename ID, int NUMBER>
__device__ __forceinline__ void load_experts(const Pairs& p, const int* map, int first, int step, int end,
                                             int (&expert)[NUMBER]) {
    ID id[NUMBER];
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) {
        const int pair = first + j * step;
        id[j] = ID(p.global_experts);
        if (pair < end) id[j] = static_cast<const ID*>(p.topk_ids)[pair];
    }
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) expert[j] = int(min(id[j], ID(p.global_experts)));
    if (p.expert_map) {
#pragma unroll
        for (int j = 0; j < NUMBER; ++j) expert[j] = map[expert[j]];
    }
#pragma unroll
    for (int j = 0; j < NUMBER; ++j) expert[j] = int(min(unsigned(expert[j]), unsigned(p.experts)));
}

// The map in shared memory, with an entry more for ids past all experts.
__device__ __forceinline__ void load_map(const Pairs& p, int* map) {
    if (p.expert_map)
        for (int i = threadIdx.x; i <= p.global_experts; i += int(blockDim.x))
            map[i] = i < p.global_experts ? p.expert_map[i] : -1;
}

// The lanes whose expert is this lane's; of no meaning where it has none. BITS hold any expert.
template <int BITS> __device__ __forceinline__ unsigned lanes_of_expert(int expert, int experts) {
    unsigned lanes = __ballot_sync(FULL_WARP, expert < experts);
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const bool set = expert >> bit & 1;
        const unsigned lanes_set = __ballot_sync(FULL_WARP, set);
        lanes &= set ? lanes_set : ~lanes_set;
    }
    return lanes;
}

struct CountParams {
    Pairs pairs;
    int* counts; // [blocks, experts]
    int pairs_per_block;
};

template <typename ID>
__global__ void __launch_bounds__(SORT_THREADS) count_pairs(const __grid_constant__ CountParams p) {
    constexpr int AT_ONCE = 4;
    extern __shared__ int shared[];
    const int experts = p.pairs.experts, threads = blockDim.x;
    int* count = shared;            // [experts + 1]
    int* map = count + experts + 1; // [global_experts + 1]
    for (int e = threadIdx.x; e <= experts; e += threads) count[e] = 0;
    load_map(p.pairs, map);
    __syncthreads();
    const int first = int(blockIdx.x) * p.pairs_per_block;
    const int end = min(first + p.pairs_per_block, p.pairs.pairs);
    for (int i = first + int(threadIdx.x); i < end; i += threads * AT_ONCE) {
        int expert[AT_ONCE];
        load_experts<ID>(p.pairs, map, i, threads, end, expert);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) atomicAdd(count + expert[j], 1);
    }
    __syncthreads();
    int* counts = p.counts + (long long)blockIdx.x * experts;
    for (int e = threadIdx.x; e < experts; e += threads) counts[e] = count[e];
}

struct SortParams {
    Pairs pairs;
    const int* counts; // [blocks, experts] of count_pairs; null: each block counts
    const int* id_of;  // [experts]: what group_ids calls an expert; null: by its number
    // Any of the results may be null.
    int* offsets; // [experts + 1]: start, and behind it the end of all rows; with `room` [experts]: its rows
    long long* offsets_long;
    int* rows;                                  // [capacity]
    int* inverse;                               // [pairs]
    int* group_ids;                             // [groups]: the expert of each group_rows rows
    int* end_of_rows;                           // [1]
    int pairs_per_block, pairs_per_warp, warps; // so many warps of a block rank its pairs
    int block_size;
    int capacity, fill; // `rows` holds `fill` where no pair is
    int group_rows, groups, group_fill;
    int staged;   // the only block puts `rows` together in shared memory
    int room;     // rows of each expert; 0: as many as it has pairs. With it there are no `rows` and no groups
    Divisor topk; // or 1, for `rows` of pairs
};

template <typename ID, int BITS>
__global__ void __launch_bounds__(SORT_THREADS) sort_pairs(const __grid_constant__ SortParams p) {
    constexpr int AT_ONCE = 4, COUNTS_AT_ONCE = 8;
    extern __shared__ int shared[];
    __shared__ int warp_sums[32];
    const int experts = p.pairs.experts, threads = blockDim.x, thread = threadIdx.x;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    // Bin `experts` counts the pairs without one.
    const int bins = experts + 1;
    int* before = shared;                // [bins] pairs of earlier blocks; later the row of this block's first
    int* count = before + bins;          // [bins]
    int* start = count + bins;           // [experts + 1]
    int* of_warp = start + bins;         // [p.warps, bins] pairs of a warp, then of those before it
    int* map = of_warp + p.warps * bins; // [global_experts + 1]
    int* staged = map + (p.pairs.expert_map ? p.pairs.global_experts + 1 : 0); // [capacity]
    for (int i = thread; i < (3 + p.warps) * bins; i += threads) shared[i] = 0;
    if (p.staged)
        for (int i = thread; i < p.capacity; i += threads) staged[i] = p.fill;
    load_map(p.pairs, map);
    __syncthreads();

    const int block = blockIdx.x, blocks = gridDim.x;
    const int first = block * p.pairs_per_block, end = min(first + p.pairs_per_block, p.pairs.pairs);
    const int warp_first = first + warp * p.pairs_per_warp;
    const int warp_end = warp < p.warps ? min(warp_first + p.pairs_per_warp, end) : 0;
    if (blocks > 1) {
        if (p.counts) {
            // As many threads share an expert as there are for it.
            const int sharing = max(1, threads / experts);
            for (int i = thread; i < experts * sharing; i += threads) {
                const int share = i / experts, e = i - share * experts;
                int earlier = 0, others = 0;
#pragma unroll 8
                for (int b = share; b < blocks; b += sharing) {
                    const int pairs = p.counts[(long long)b * experts + e];
                    if (b < block)
                        earlier += pairs;
                    else
                        others += pairs;
                }
                if (earlier) atomicAdd(before + e, earlier);
                if (others) atomicAdd(count + e, others);
            }
        } else {
            for (int i = thread; i < p.pairs.pairs; i += threads * COUNTS_AT_ONCE) {
                int expert[COUNTS_AT_ONCE];
                load_experts<ID>(p.pairs, map, i, threads, p.pairs.pairs, expert);
#pragma unroll
                for (int j = 0; j < COUNTS_AT_ONCE; ++j)
                    atomicAdd((i + threads * j < first ? before : count) + expert[j], 1);
            }
        }
    }
    int* of_earlier = of_warp + warp * bins;
    for (int i = warp_first; i < warp_end; i += 32 * AT_ONCE) {
        int expert[AT_ONCE];
        load_experts<ID>(p.pairs, map, i + lane, 32, warp_end, expert);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) atomicAdd(of_earlier + expert[j], 1);
    }
    __syncthreads();

    // Each thread has some experts that follow each other.
    const int per_thread = (experts - 1) / threads + 1;
    const int first_expert = min(thread * per_thread, experts), end_expert = min(first_expert + per_thread, experts);
    int sum = 0;
    for (int e = first_expert; e < end_expert; ++e) {
        int pairs = 0;
        for (int w = 0; w < p.warps; w += COUNTS_AT_ONCE) {
            int of_this[COUNTS_AT_ONCE];
#pragma unroll
            for (int j = 0; j < COUNTS_AT_ONCE; ++j) of_this[j] = w + j < p.warps ? of_warp[(w + j) * bins + e] : 0;
#pragma unroll
            for (int j = 0; j < COUNTS_AT_ONCE; ++j) {
                if (w + j < p.warps) of_warp[(w + j) * bins + e] = pairs;
                pairs += of_this[j];
            }
        }
        pairs = blocks == 1 ? pairs : before[e] + count[e];
        count[e] = pairs;
        if (p.block_size > 1) pairs = (pairs + p.block_size - 1) / p.block_size * p.block_size;
        start[e] = pairs;
        sum += pairs;
    }
    const int inclusive = lanes_inclusive_sum<32>(sum);
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const int sums = lanes_inclusive_sum<32>(lane < warps ? warp_sums[lane] : 0);
    const int of_warps_before = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
    const int total = __shfl_sync(FULL_WARP, sums, warps - 1);
    int row = (warp ? of_warps_before : 0) + inclusive - sum;
    for (int e = first_expert; e < end_expert; ++e) {
        const int rows = start[e];
        start[e] = row;
        before[e] += row;
        row += rows;
    }
    if (thread == 0) start[experts] = total;
    __syncthreads();

    for (int i = warp_first; i < warp_end; i += 32 * AT_ONCE) {
        int expert[AT_ONCE];
        unsigned lanes[AT_ONCE];
        load_experts<ID>(p.pairs, map, i + lane, 32, warp_end, expert);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) lanes[j] = lanes_of_expert<BITS>(expert[j], experts);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (i + 32 * j >= warp_end) break;
            const int pair = i + 32 * j + lane, e = expert[j];
            const bool there = e < experts;
            const int rank = __popc(lanes[j] & ((1u << lane) - 1));
            const int earlier = of_earlier[e];
            // All lanes have read what the first one of each expert now changes.
            __syncwarp();
            if (there && rank == 0) of_earlier[e] = earlier + __popc(lanes[j]);
            __syncwarp();
            int at = there ? before[e] + earlier + rank : -1;
            if (p.room && there) {
                const int of_expert = at - start[e];
                at = of_expert < p.room ? e * p.room + of_expert : -1;
            }
            if (p.inverse && pair < warp_end) p.inverse[pair] = at;
            if (p.rows && at >= 0) {
                const int value = p.topk.quotient(pair);
                if (p.staged)
                    staged[at] = value;
                else
                    p.rows[at] = value;
            }
        }
    }

    const int grid_thread = block * threads + thread, grid_threads = blocks * threads;
    const int grid_warp = block * warps + warp, grid_warps = blocks * warps;
    if (p.staged) {
        __syncthreads();
        for (int r = thread; r < p.capacity; r += threads) p.rows[r] = staged[r];
    } else if (p.rows) {
        if (p.block_size > 1)
            for (int e = grid_warp; e < experts; e += grid_warps)
                for (int r = start[e] + count[e] + lane; r < start[e + 1]; r += 32) p.rows[r] = p.fill;
        for (int r = total + grid_thread; r < p.capacity; r += grid_threads) p.rows[r] = p.fill;
    }
    if (p.group_ids) {
        for (int e = grid_warp; e < experts; e += grid_warps) {
            const int id = p.id_of ? p.id_of[e] : e;
            for (int g = start[e] / p.group_rows + lane; g < start[e + 1] / p.group_rows; g += 32) p.group_ids[g] = id;
        }
        for (int g = total / p.group_rows + grid_thread; g < p.groups; g += grid_threads) p.group_ids[g] = p.group_fill;
    }
    if (block == 0) {
        if (p.offsets && p.room)
            for (int e = thread; e < experts; e += threads) p.offsets[e] = min(count[e], p.room);
        else if (p.offsets)
            for (int e = thread; e <= experts; e += threads) p.offsets[e] = start[e];
        if (p.offsets_long)
            for (int e = thread; e <= experts; e += threads) p.offsets_long[e] = start[e];
        if (p.end_of_rows && thread == 0) *p.end_of_rows = total;
    }
}

// --- rows ----------------------------------------------------------------------------------------------

// Which token and which columns a thread has: blocks side by side in a row follow each other.
struct Tiling {
    int tokens, columns; // columns in units
    int tile_columns;    // of a block
    int chunks;          // blocks side by side
    Divisor by_chunks;
};

struct PermuteParams {
    const void* src;    // [tokens, columns], rows `row_stride` units apart
    const int* inverse; // [tokens, topk]
    void* out;          // [rows, columns]
    const float* scale; // [tokens, scale_columns], rows `scale_stride` apart; null: none
    float* out_scale;   // [rows, scale_columns]
    long long row_stride, scale_stride;
    int topk, rows, scale_columns;
    Tiling tiling;
};

template <int BYTES, int ITEMS>
__global__ void __launch_bounds__(ROW_THREADS, 4) permute_rows(const __grid_constant__ PermuteParams p) {
    using Unit = typename UnitOf<BYTES>::Type;
    constexpr int SLOTS = 8;
    const unsigned group = p.tiling.by_chunks.quotient(blockIdx.x);
    const int chunk = int(blockIdx.x - group * p.tiling.chunks);
    const int token = int(group * blockDim.y + threadIdx.y);
    if (token >= p.tiling.tokens) return;
    const int first = chunk * p.tiling.tile_columns + int(threadIdx.x);
    const int end = min((chunk + 1) * p.tiling.tile_columns, p.tiling.columns);
    const Unit* src = static_cast<const Unit*>(p.src) + token * p.row_stride;
    const int* inverse = p.inverse + (long long)token * p.topk;

    Unit unit[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = first + i * int(blockDim.x);
        if (column < end) unit[i] = src[column];
    }
    const bool all = first + (ITEMS - 1) * int(blockDim.x) < end;
    for (int slot = 0; slot < p.topk; slot += SLOTS) {
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) row[s] = slot + s < p.topk ? inverse[slot + s] : -1;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (unsigned(row[s]) >= unsigned(p.rows)) continue;
            Unit* out = static_cast<Unit*>(p.out) + (long long)row[s] * p.tiling.columns + first;
            // Nearly every thread stores all that it has, and needs no predicate for each.
            if (all) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) out[i * int(blockDim.x)] = unit[i];
            } else {
#pragma unroll
                for (int i = 0; i < ITEMS - 1; ++i)
                    if (first + i * int(blockDim.x) < end) out[i * int(blockDim.x)] = unit[i];
            }
        }
    }
    if (p.scale && chunk == 0)
        for (int column = threadIdx.x; column < p.scale_columns; column += int(blockDim.x)) {
            const float scale = p.scale[token * p.scale_stride + column];
            for (int slot = 0; slot < p.topk; ++slot) {
                const int row = inverse[slot];
                if (unsigned(row) < unsigned(p.rows)) p.out_scale[(long long)row * p.scale_columns + column] = scale;
            }
        }
}

struct UnpermuteParams {
    const void* src;      // T [rows, columns], rows `row_stride` units apart
    const float* weights; // [tokens, topk]; null: 1
    const int* inverse;   // [tokens, topk]; null: the rows lie in the order of the pairs
    const int* offsets;   // the end of all rows that hold anything; null: `rows`
    void* out;            // T [tokens, columns]
    long long row_stride;
    int topk, rows;
    Tiling tiling;
};

// A unit as its elements. They are taken out of whole words: as halves of their own they would fill twice the registers.
template <typename T, int BYTES> struct Elements {
    static constexpr int COUNT = BYTES / sizeof(T);
    union {
        typename UnitOf<BYTES>::Type unit;
        unsigned words[(BYTES + 3) / 4];
    };
    __device__ __forceinline__ float get(int i) const {
        if constexpr (sizeof(T) == 4)
            return __uint_as_float(words[i]);
        else if constexpr (IS_BFLOAT16<T>)
            return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        else
            return __half2float(__ushort_as_half((unsigned short)(words[i / 2] >> i % 2 * 16)));
    }
    __device__ __forceinline__ void set(int i, float value) {
        if constexpr (sizeof(T) == 4) {
            words[i] = __float_as_uint(value);
        } else {
            unsigned bits;
            if constexpr (IS_BFLOAT16<T>)
                bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
            else
                bits = __half_as_ushort(__float2half_rn(value));
            words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
        }
    }
};

template <typename T, int BYTES, int TOPK>
__global__ void __launch_bounds__(ROW_THREADS, 4) unpermute_rows(const __grid_constant__ UnpermuteParams p) {
    using Unit = typename UnitOf<BYTES>::Type;
    using Of = Elements<T, BYTES>;
    constexpr int SLOTS = TOPK && TOPK < 8 ? TOPK : 8;
    const int topk = TOPK ? TOPK : p.topk;
    const unsigned group = p.tiling.by_chunks.quotient(blockIdx.x);
    const int chunk = int(blockIdx.x - group * p.tiling.chunks);
    const int token = int(group * blockDim.y + threadIdx.y);
    const int column = chunk * p.tiling.tile_columns + int(threadIdx.x);
    if (token >= p.tiling.tokens || column >= p.tiling.columns) return;
    const Unit* src = static_cast<const Unit*>(p.src) + column;
    const int rows = p.offsets ? min(*p.offsets, p.rows) : p.rows;

    float sum[Of::COUNT];
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) sum[i] = 0.f;
#pragma unroll
    for (int slot = 0; slot < topk; slot += SLOTS) {
        Of part[SLOTS];
        float weight[SLOTS];
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const long long pair = (long long)token * topk + slot + s;
            row[s] = -1;
            weight[s] = 1.f;
            if (slot + s < topk) {
                row[s] = p.inverse ? p.inverse[pair] : int(pair);
                if (p.weights) weight[s] = p.weights[pair];
            }
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            // A row that is absent adds 0: its weight, which may be NaN, does not count.
            const bool there = row[s] >= 0 && row[s] < rows;
            if (!there) weight[s] = 0.f;
            part[s] = Of{};
            if (there) part[s].unit = src[row[s] * p.row_stride];
        }
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
#pragma unroll
            for (int i = 0; i < Of::COUNT; ++i)
                // Not fused, so that the sum is the same wherever it is computed.
                sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[s], part[s].get(i)));
    }
    Of result;
#pragma unroll
    for (int i = 0; i < Of::COUNT; ++i) result.set(i, sum[i]);
    static_cast<Unit*>(p.out)[(long long)token * p.tiling.columns + column] = result.unit;
}
