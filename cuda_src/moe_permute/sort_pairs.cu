// Sort the pairs (token, slot) by expert with a stable counting sort.
//
// Pairs whose expert is in [0, experts) get rows, ordered by expert and then by pair:
//
//   count[e]         = pairs of expert e
//   start[e]         = sum over d < e of count[d], each rounded up to a multiple of block_size
//   inverse[p]       = start[e] + pairs of expert e before p; -1 where p has no row
//   rows[inverse[p]] = p / topk (its token), or p itself
//
// In batch mode every expert has max_tokens rows: inverse[p] = e * max_tokens + pairs of expert e before p, or -1 if
// that is past the expert's rows.
//
// ID: an unsigned integer type as wide as an id in topk_ids. BITS: enough bits for the index of any expert.
//
// Grid: each block ranks pairs_per_block consecutive pairs. The first p.warps warps of a block rank pairs_per_warp
// pairs each, 32 per iteration. The rank of a pair, "pairs of expert e before p", is the sum of the pairs
//
//   in earlier blocks    counted by each block from all ids, or read from the counts of count_pairs
//   in earlier warps     counted by each warp; a prefix sum over warps and iterations follows
//   in earlier lanes     one warp vote per bit of the expert index finds the lanes with the same expert
//
// Blocks never wait for each other, because that would need counters in global memory, which must be zeroed before the
// launch. The results of atomicAdd are not used as ranks, because they depend on the order of the threads.
//
// Speed of light: latency of the launch, the load of the ids, the barriers, and the iterations of a warp. On an H200,
// with 8 slots and 256 experts, 64 tokens take 5.0 us, 1024 take 6.7 us and 4096 take 9.0 us; an empty kernel takes
// 0.54 us (11%, 8% and 6% of the time).
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_permute/pairs.cuh"

struct Params {
    Pairs pairs;
    const int* counts; // [blocks, experts] from count_pairs; null: each block counts
    const int* id_of;  // [experts]: the id to write to group_ids for an expert; null: the expert's index
    // Results; each may be null.
    int* offsets;            // [experts + 1]: start, then the end of all rows; in batch mode [experts]: rows used
    long long* offsets_long; // [experts + 1]: start; not in batch mode
    int* rows;               // [capacity]
    int* inverse;            // [pairs]
    int* group_ids;          // [groups]: the expert of each group of group_rows rows
    int* end_of_rows;        // [1]
    int pairs_per_block;
    int pairs_per_warp;
    int warps; // warps of a block that rank pairs
    int block_size;
    int capacity;
    int fill; // value of `rows` entries without a pair
    int group_rows;
    int groups;
    int group_fill;     // value of unused `group_ids` entries
    int rows_in_shared; // 1: the grid is one block, which assembles `rows` in shared memory
    int max_tokens;     // batch mode: rows per expert, without `rows` and `group_ids`; 0: not batch mode
    Divisor topk;       // `rows` gets pair / topk (tokens), or pair / 1
};

template <typename ID, int BITS> struct Sort {
    static constexpr int IDS_IN_FLIGHT = 4, COUNTS_IN_FLIGHT = 8;

    const Params& p;
    const int experts = p.pairs.experts, threads = blockDim.x, thread = threadIdx.x;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int block = blockIdx.x, blocks = gridDim.x;
    // The pairs of this block, and of this warp.
    const int first = block * p.pairs_per_block, end = min(first + p.pairs_per_block, p.pairs.pairs);
    const int warp_first = first + warp * p.pairs_per_warp;
    const int warp_end = warp < p.warps ? min(warp_first + p.pairs_per_warp, end) : 0;

    const int bins = experts + 1;     // the last bin counts pairs without an expert
    int* const before;                // [bins] pairs in earlier blocks; after add_up this block's first row per expert
    int* const count = before + bins; // [bins] pairs in this block and later blocks; after add_up in all blocks
    int* const start = count + bins;  // [experts + 1]
    int* const warp_pairs = start + bins; // [p.warps, bins] pairs in each warp; after add_up in the warps before it
    int* const map = warp_pairs + p.warps * bins;                                         // [global_experts + 1]
    int* const shared_rows = map + (p.pairs.expert_map ? p.pairs.global_experts + 1 : 0); // [capacity]

    __device__ __forceinline__ Sort(const Params& p, int* shared) : p(p), before(shared) {}

    // Return the size of shared memory in integers. `mapped`: size of the expert map, or 0 without a map.
    static constexpr int integers(int experts, int mapped, int warps, int shared_rows) {
        return (3 + warps) * (experts + 1) + (mapped ? mapped + 1 : 0) + shared_rows;
    }

    __device__ __forceinline__ void initialize() const {
        for (int i = thread; i < (3 + p.warps) * bins; i += threads) before[i] = 0;
        if (p.rows_in_shared)
            for (int i = thread; i < p.capacity; i += threads) shared_rows[i] = p.fill;
        load_map(p.pairs, map);
    }

    __device__ __forceinline__ void add_counts() const {
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
    }

    __device__ __forceinline__ void count_all_pairs() const {
        for (int i = thread; i < p.pairs.pairs; i += threads * COUNTS_IN_FLIGHT) {
            int expert[COUNTS_IN_FLIGHT];
            load_experts<ID>(p.pairs, map, i, threads, p.pairs.pairs, expert);
#pragma unroll
            for (int j = 0; j < COUNTS_IN_FLIGHT; ++j)
                atomicAdd((i + threads * j < first ? before : count) + expert[j], 1);
        }
    }

    __device__ __forceinline__ void count_warp_pairs() const {
        int* warp_count = warp_pairs + warp * bins;
        for (int i = warp_first; i < warp_end; i += 32 * IDS_IN_FLIGHT) {
            int expert[IDS_IN_FLIGHT];
            load_experts<ID>(p.pairs, map, i + lane, 32, warp_end, expert);
#pragma unroll
            for (int j = 0; j < IDS_IN_FLIGHT; ++j) atomicAdd(warp_count + expert[j], 1);
        }
    }

    // Turn the counts of expert e into exclusive prefix sums over the warps, and return the total.
    __device__ __forceinline__ int add_up_warps(int e) const {
        int pairs = 0;
        for (int w = 0; w < p.warps; w += COUNTS_IN_FLIGHT) {
            int warp_count[COUNTS_IN_FLIGHT];
#pragma unroll
            for (int j = 0; j < COUNTS_IN_FLIGHT; ++j)
                warp_count[j] = w + j < p.warps ? warp_pairs[(w + j) * bins + e] : 0;
#pragma unroll
            for (int j = 0; j < COUNTS_IN_FLIGHT; ++j) {
                if (w + j < p.warps) warp_pairs[(w + j) * bins + e] = pairs;
                pairs += warp_count[j];
            }
        }
        return pairs;
    }

    // Return the sum of `value` over the earlier threads of the block, and set `total` to the sum over all threads.
    __device__ __forceinline__ int sum_before(int value, int& total) const {
        __shared__ int warp_sums[32];
        const int inclusive = lanes_inclusive_sum<32>(value);
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        const int sums = lanes_inclusive_sum<32>(lane < warps ? warp_sums[lane] : 0);
        const int earlier_warps = __shfl_sync(FULL_WARP, sums, max(warp - 1, 0));
        total = __shfl_sync(FULL_WARP, sums, warps - 1);
        return (warp ? earlier_warps : 0) + inclusive - value;
    }

    // Set start[e] to the first row of expert e, and before[e] to the row of this block's first pair of expert e.
    __device__ __forceinline__ int add_up() const {
        const int per_thread = (experts - 1) / threads + 1;
        const int first_expert = min(thread * per_thread, experts);
        const int end_expert = min(first_expert + per_thread, experts);
        int sum = 0, total;
        for (int e = first_expert; e < end_expert; ++e) {
            const int block_pairs = add_up_warps(e), pairs = blocks == 1 ? block_pairs : before[e] + count[e];
            const int rows = p.block_size > 1 ? (pairs + p.block_size - 1) / p.block_size * p.block_size : pairs;
            count[e] = pairs;
            start[e] = rows;
            sum += rows;
        }
        int row = sum_before(sum, total);
        for (int e = first_expert; e < end_expert; ++e) {
            const int rows = start[e];
            start[e] = row;
            before[e] += row;
            row += rows;
        }
        if (thread == 0) start[experts] = total;
        return total;
    }

    __device__ __forceinline__ void rank_pairs() const {
        for (int i = warp_first; i < warp_end; i += 32 * IDS_IN_FLIGHT) {
            int expert[IDS_IN_FLIGHT];
            unsigned lanes[IDS_IN_FLIGHT];
            load_experts<ID>(p.pairs, map, i + lane, 32, warp_end, expert);
#pragma unroll
            for (int j = 0; j < IDS_IN_FLIGHT; ++j) lanes[j] = lanes_of_expert<BITS>(expert[j], experts);
#pragma unroll
            for (int j = 0; j < IDS_IN_FLIGHT; ++j) {
                if (i + 32 * j >= warp_end) break;
                rank_and_write(i + 32 * j + lane, expert[j], lanes[j]);
            }
        }
    }

    // Rank and write 32 pairs, one per lane. `lanes`: the lanes with the same expert `e`.
    __device__ __forceinline__ void rank_and_write(int pair, int e, unsigned lanes) const {
        int* earlier_pairs = warp_pairs + warp * bins;
        const bool has_expert = e < experts;
        const int rank = __popc(lanes & ((1u << lane) - 1)), earlier = earlier_pairs[e];
        // All lanes read the count before the first lane of each expert changes it.
        __syncwarp();
        if (has_expert && rank == 0) earlier_pairs[e] = earlier + __popc(lanes);
        __syncwarp();
        int row = has_expert ? before[e] + earlier + rank : -1;
        if (p.max_tokens && has_expert) {
            const int row_in_expert = row - start[e];
            row = row_in_expert < p.max_tokens ? e * p.max_tokens + row_in_expert : -1;
        }
        if (p.inverse && pair < warp_end) p.inverse[pair] = row;
        if (p.rows && row >= 0) {
            const int value = p.topk.quotient(pair);
            if (p.rows_in_shared)
                shared_rows[row] = value;
            else
                p.rows[row] = value;
        }
    }

    // Fill the padding rows of each expert, and the rows from `total` on.
    __device__ __forceinline__ void fill_rows(int total) const {
        if (p.block_size > 1)
            for (int e = block * warps + warp; e < experts; e += blocks * warps)
                for (int r = start[e] + count[e] + lane; r < start[e + 1]; r += 32) p.rows[r] = p.fill;
        for (int r = total + block * threads + thread; r < p.capacity; r += blocks * threads) p.rows[r] = p.fill;
    }

    __device__ __forceinline__ void write_group_ids(int total) const {
        for (int e = block * warps + warp; e < experts; e += blocks * warps) {
            const int id = p.id_of ? p.id_of[e] : e;
            for (int g = start[e] / p.group_rows + lane; g < start[e + 1] / p.group_rows; g += 32) p.group_ids[g] = id;
        }
        for (int g = total / p.group_rows + block * threads + thread; g < p.groups; g += blocks * threads)
            p.group_ids[g] = p.group_fill;
    }

    __device__ __forceinline__ void write_offsets(int total) const {
        if (p.offsets && p.max_tokens)
            for (int e = thread; e < experts; e += threads) p.offsets[e] = min(count[e], p.max_tokens);
        else if (p.offsets)
            for (int e = thread; e <= experts; e += threads) p.offsets[e] = start[e];
        if (p.offsets_long)
            for (int e = thread; e <= experts; e += threads) p.offsets_long[e] = start[e];
        if (p.end_of_rows && thread == 0) *p.end_of_rows = total;
    }
};

template <typename ID, int BITS>
constexpr Launch sort_pairs_launch(int experts, int mapped, int warps, int shared_rows) {
    return {SORT_THREADS, int(sizeof(int)) * Sort<ID, BITS>::integers(experts, mapped, warps, shared_rows)};
}

template <typename ID, int BITS>
__global__ void __launch_bounds__(SORT_THREADS) sort_pairs(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    extern __shared__ int shared[];
    const Sort<ID, BITS> sort(p, shared);
    sort.initialize();
    __syncthreads();
    if (sort.blocks > 1) {
        if (p.counts)
            sort.add_counts();
        else
            sort.count_all_pairs();
    }
    sort.count_warp_pairs();
    __syncthreads();
    const int total = sort.add_up();
    __syncthreads();
    sort.rank_pairs();
    if (p.rows_in_shared) {
        __syncthreads();
        for (int r = sort.thread; r < p.capacity; r += sort.threads) p.rows[r] = sort.shared_rows[r];
    } else if (p.rows) {
        sort.fill_rows(total);
    }
    if (p.group_ids) sort.write_group_ids(total);
    if (sort.block == 0) sort.write_offsets(total);
}
