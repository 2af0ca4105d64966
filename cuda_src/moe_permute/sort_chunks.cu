// Sort the pairs (token, slot) by expert with a shorter chain of dependent steps than sort_pairs.
//
// The formulas and the order of the rows are in sort_pairs.cu. The rank of a pair is the number of pairs of the same
// expert before it. A chunk is 32 consecutive pairs, one per lane of a warp. A block ranks a segment of CHUNKS
// consecutive chunks, and counts the pairs of an expert in a chunk in one byte, so that one multiplication gives the
// prefix sums of four counts:
//
//   pairs of expert e before p = in earlier segments + in earlier chunks (a prefix sum of bytes) + in earlier lanes
//
// CLUSTER == 1, for few pairs: every block ranks all pairs, because waiting for other blocks would take as long. Each
// block assembles a range of `rows` in shared memory.
//
// CLUSTER > 1, for more pairs: block r of a cluster counts `clusters` segments, starting with segment `r * clusters`,
// and sends the counts to the other blocks of its cluster. Block r of cluster c ranks segment `r * clusters + c`.
//
// ID: an unsigned integer type as wide as an id in topk_ids. BITS: enough bits for the index of any expert, at most 9.
//
// Grid: blocks with at least one thread per expert; CHUNK_THREADS threads if CLUSTER > 1. Warp w ranks chunk w and then
// every (threads / 32)-th chunk.
//
// Speed of light: latency of the launch, the load of the ids, and three barriers (four in a cluster) with one or two
// shared memory accesses between them. On an H200, with 256 experts, one block sorts 64 x 8 pairs into padded rows in
// 3.1 us, and clusters sort 4096 x 8 pairs in 5.6 us; an empty kernel takes 0.54 us.
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_permute/pairs.cuh"

constexpr int CHUNK_THREADS = 512;

struct Params {
    Pairs pairs;
    const int* id_of; // [experts]: the id to write to group_ids for an expert; null: the expert's index
    // Results; each may be null.
    int* offsets;            // [experts + 1]: start, then the end of all rows; in batch mode [experts]: rows used
    long long* offsets_long; // [experts + 1]: start; not in batch mode
    int* rows;               // [capacity]
    int* inverse;            // [pairs]
    int* group_ids;          // [groups]: the expert of each block of block_size rows
    int* end_of_rows;        // [1]
    int block_size;
    int capacity;
    int rows_per_block; // rows that a block assembles at a time; CLUSTER == 1
    int fill;           // value of `rows` entries without a pair
    int groups;
    int group_fill; // value of unused `group_ids` entries
    int max_tokens; // batch mode: rows per expert, without `rows` and `group_ids`; 0: not batch mode
    Divisor topk;   // `rows` gets pair / topk (tokens), or pair / 1
    Divisor by_block_size;
};

template <typename ID, int BITS, int CHUNKS, int CLUSTER> struct ChunkSort {
    static constexpr int CHUNKS_PER_WARP = CHUNKS / (CHUNK_THREADS / 32);
    static constexpr int SEGMENT = 32 * CHUNKS;
    static constexpr int WORDS = CHUNKS / 4; // 32-bit words of an expert's counts, one byte per chunk
    // Words from one expert's counts to the next: an odd number of 16-byte vectors, which avoids bank conflicts.
    static constexpr int PITCH = WORDS / 4 % 2 ? WORDS : WORDS + 4;
    static constexpr int EXPERT_WARPS = BITS > 5 ? 1 << (BITS - 5) : 1;
    static constexpr int COUNTS_IN_FLIGHT = 8;

    const Params& p;
    const int experts = p.pairs.experts, threads = blockDim.x, thread = threadIdx.x;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int first = CLUSTER > 1 ? (rank * clusters + cluster) * SEGMENT : 0; // first pair that this block ranks

    unsigned* const chunk_counts; // [experts, PITCH] pairs per chunk; after prefix_sum_chunks exclusive prefix sums
    int* const first_rows = (int*)chunk_counts + experts * PITCH; // [experts, PITCH] first row per four chunks
    int* const map = first_rows + experts * PITCH;                // [global_experts + 1]
    int* const after_map = map + (p.pairs.expert_map ? p.pairs.global_experts + 1 : 0);
    int* const shared_rows = after_map;           // [rows_per_block]; CLUSTER == 1
    int* const earlier = after_map;               // [experts + 1] pairs in the block's earlier segments; CLUSTER > 1
    int* const later = earlier + experts + 1;     // [experts + 1] pairs in the block's later segments; CLUSTER > 1
    int* const rank_counts = later + experts + 1; // [CLUSTER, experts] pairs in each block's segments; CLUSTER > 1
    int* const start = rank_counts + CLUSTER * experts; // [experts + 1]
    int* const count = start + experts + 1;             // [experts]

    __device__ __forceinline__ ChunkSort(const Params& p, uint4* shared) : p(p), chunk_counts((unsigned*)shared) {}

    // Return the size of shared memory in integers. `mapped`: size of the expert map, or 0 without a map.
    static constexpr int integers(int experts, int mapped, int rows_per_block) {
        const int size_after_map = CLUSTER > 1 ? 3 * (experts + 1) + (CLUSTER + 1) * experts : rows_per_block;
        return 2 * experts * PITCH + (mapped ? mapped + 1 : 0) + size_after_map;
    }

    __device__ __forceinline__ int chunk_of(int i) const { return i * warps + warp; }
    __device__ __forceinline__ int pair_of(int i) const { return first + chunk_of(i) * 32 + lane; }
    __device__ __forceinline__ ID load_id(int pair) const {
        return pair < p.pairs.pairs ? static_cast<const ID*>(p.pairs.topk_ids)[pair] : ID(p.pairs.global_experts);
    }
    // Return the local expert of an id, or `experts` if it has none.
    __device__ __forceinline__ int expert_of(ID id) const {
        int expert = int(min(id, ID(p.pairs.global_experts)));
        if (p.pairs.expert_map) expert = map[expert];
        return int(min(unsigned(expert), unsigned(experts)));
    }

    // Return the i-th pair of the segments that this block counts but does not rank.
    __device__ __forceinline__ int unranked_pair(int i, bool& is_earlier) const {
        is_earlier = i < cluster * SEGMENT;
        return rank * clusters * SEGMENT + i + (is_earlier ? 0 : SEGMENT);
    }
    __device__ __forceinline__ void load_unranked(int from, ID (&id)[COUNTS_IN_FLIGHT]) const {
#pragma unroll
        for (int j = 0; j < COUNTS_IN_FLIGHT; ++j) {
            const int i = from + j * CHUNK_THREADS;
            bool is_earlier;
            id[j] = i < (clusters - 1) * SEGMENT ? load_id(unranked_pair(i, is_earlier)) : ID(p.pairs.global_experts);
        }
    }
    // On entry, `id` already holds the ids of the first iteration.
    __device__ __forceinline__ void count_unranked(ID (&id)[COUNTS_IN_FLIGHT]) const {
#pragma unroll 1
        for (int from = thread; from < (clusters - 1) * SEGMENT; from += COUNTS_IN_FLIGHT * CHUNK_THREADS) {
            if (from != thread) load_unranked(from, id);
#pragma unroll
            for (int j = 0; j < COUNTS_IN_FLIGHT; ++j) {
                bool is_earlier;
                unranked_pair(from + j * CHUNK_THREADS, is_earlier);
                const int expert = expert_of(id[j]);
                if (expert < experts) atomicAdd((is_earlier ? earlier : later) + expert, 1);
            }
        }
    }

    __device__ __forceinline__ void initialize(int* warp_sums) const {
        uint4* vectors = reinterpret_cast<uint4*>(chunk_counts);
        for (int i = thread; i < experts * (PITCH / 4); i += threads) vectors[i] = make_uint4(0, 0, 0, 0);
        if (thread < EXPERT_WARPS) warp_sums[thread] = 0;
        if constexpr (CLUSTER > 1)
            for (int i = thread; i < 2 * (experts + 1); i += CHUNK_THREADS) earlier[i] = 0;
        else
            fill_shared_rows();
        load_map(p.pairs, map);
    }

    // Turn the counts of expert e into exclusive prefix sums within every four chunks. Set before_quad[i] to the number
    // of the expert's pairs before chunk `4 * i`. Return the number of its pairs in all chunks.
    __device__ __forceinline__ int prefix_sum_chunks(int e, int (&before_quad)[WORDS]) const {
        uint4* vectors = reinterpret_cast<uint4*>(chunk_counts + e * PITCH);
        int sum = 0;
#pragma unroll
        for (int k = 0; k < WORDS / 4; ++k) {
            const uint4 four = vectors[k];
            // Byte j of the product is the sum of bytes 0 to j of the word, at most 128 (4 chunks of 32 pairs).
            const unsigned up_to[4] = {four.x * 0x01010101u, four.y * 0x01010101u, four.z * 0x01010101u,
                                       four.w * 0x01010101u};
            vectors[k] = make_uint4(up_to[0] << 8, up_to[1] << 8, up_to[2] << 8, up_to[3] << 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                before_quad[4 * k + j] = sum;
                sum += up_to[j] >> 24;
            }
        }
        return sum;
    }

    // Exchange the counts of expert e with the other blocks of the cluster. `pairs` is the count of the segment that
    // this block ranks. Return the sum of the counts of all segments, and set `before` to the sum of the counts of
    // earlier segments.
    __device__ __forceinline__ int exchange(int e, int pairs, int& before) const {
        int total_pairs = 0;
        if (e < experts) {
            before = earlier[e];
            pairs += before + later[e];
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) dsmem_store<CLUSTER>(r, rank_counts + rank * experts + e, pairs);
        }
        cluster_sync<CLUSTER>();
        if (e < experts) {
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) {
                const int block_pairs = rank_counts[r * experts + e];
                before += r < rank ? block_pairs : 0;
                total_pairs += block_pairs;
            }
        }
        return total_pairs;
    }

    __device__ __forceinline__ void store_first_rows(int e, int row, const int (&before_quad)[WORDS]) const {
        int4* vectors = reinterpret_cast<int4*>(first_rows + e * PITCH);
#pragma unroll
        for (int k = 0; k < WORDS / 4; ++k)
            vectors[k] = make_int4(row + before_quad[4 * k], row + before_quad[4 * k + 1], row + before_quad[4 * k + 2],
                                   row + before_quad[4 * k + 3]);
    }

    // Return the row of the first pair of `expert` in a chunk. sums[w] is the number of rows of the 32 experts of warp
    // w.
    __device__ __forceinline__ int row_of(int expert, int chunk, const int (&sums)[EXPERT_WARPS]) const {
        const int in_quad = reinterpret_cast<const unsigned char*>(chunk_counts)[expert * PITCH * 4 + chunk];
        int row = first_rows[expert * PITCH + chunk / 4] + in_quad;
        if (!p.max_tokens) row += sum_before(expert / 32, sums);
        return row;
    }
    static __device__ __forceinline__ int sum_before(int expert_warp, const int (&sums)[EXPERT_WARPS]) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < EXPERT_WARPS - 1; ++w) sum += w < expert_warp ? sums[w] : 0;
        return sum;
    }

    __device__ __forceinline__ void fill_shared_rows() const {
        if (p.rows)
            for (int i = thread; i < p.rows_per_block; i += threads) shared_rows[i] = p.fill;
    }

    __device__ __forceinline__ void write_shared_rows(const int (&row)[CHUNKS_PER_WARP]) const {
        const int size = p.rows_per_block, step = gridDim.x * size;
        for (int from = blockIdx.x * size; from < p.capacity; from += step) {
#pragma unroll
            for (int i = 0; i < CHUNKS_PER_WARP; ++i)
                // An unsigned comparison excludes rows before `from` and a row of -1.
                if (unsigned(row[i] - from) < unsigned(size)) shared_rows[row[i] - from] = p.topk.quotient(pair_of(i));
            __syncthreads();
            for (int i = thread; i < min(size, p.capacity - from); i += threads) p.rows[from + i] = shared_rows[i];
            if (from + step < p.capacity) {
                __syncthreads();
                fill_shared_rows();
                __syncthreads();
            }
        }
    }

    __device__ __forceinline__ void write_rows(const int (&row)[CHUNKS_PER_WARP], int total) const {
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_WARP; ++i)
            if (row[i] >= 0) p.rows[row[i]] = p.topk.quotient(pair_of(i));
        const int grid_threads = gridDim.x * threads;
        for (int r = total + blockIdx.x * threads + thread; r < p.capacity; r += grid_threads) p.rows[r] = p.fill;
        if (p.block_size == 1) return;
        __syncthreads(); // wait for start and count
        for (int e = blockIdx.x * warps + warp; e < experts; e += gridDim.x * warps)
            for (int r = start[e] + count[e] + lane; r < start[e + 1]; r += 32) p.rows[r] = p.fill;
    }
};

// Sort the pairs. warp_sums[w] receives the number of rows of the 32 experts of warp w.
template <typename ID, int BITS, int CHUNKS, int CLUSTER>
__device__ __forceinline__ void sort_all(const Params& p, uint4* shared, int* warp_sums) {
    using Sort = ChunkSort<ID, BITS, CHUNKS, CLUSTER>;
    constexpr int CHUNKS_PER_WARP = Sort::CHUNKS_PER_WARP, EXPERT_WARPS = Sort::EXPERT_WARPS;
    // A block may write to another block only after all blocks of the cluster have begun.
    cluster_arrive<CLUSTER>();
    const Sort sort(p, shared);
    const int experts = sort.experts, e = sort.thread;

    ID id[CHUNKS_PER_WARP], unranked_ids[Sort::COUNTS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_WARP; ++i) id[i] = sort.load_id(sort.pair_of(i));
    if constexpr (CLUSTER > 1) sort.load_unranked(sort.thread, unranked_ids);
    sort.initialize(warp_sums);
    __syncthreads();

    int expert[CHUNKS_PER_WARP], rank[CHUNKS_PER_WARP], group_id[CHUNKS_PER_WARP];
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_WARP; ++i) {
        expert[i] = sort.expert_of(id[i]);
        const bool has_expert = expert[i] < experts;
        const unsigned lanes = lanes_of_expert<BITS>(expert[i], experts);
        rank[i] = __popc(lanes & ((1u << sort.lane) - 1));
        if (has_expert && rank[i] == 0)
            reinterpret_cast<unsigned char*>(sort.chunk_counts)[expert[i] * Sort::PITCH * 4 + sort.chunk_of(i)] =
                __popc(lanes);
        group_id[i] = expert[i];
        if (p.group_ids && p.id_of && has_expert) group_id[i] = p.id_of[expert[i]];
    }
    if constexpr (CLUSTER > 1) {
        sort.count_unranked(unranked_ids);
        cluster_wait<CLUSTER>();
    }
    __syncthreads();

    // Each thread handles one expert. It finds the number of the expert's pairs, the number of its rows (padded to a
    // multiple of block_size), and its first row, counted from the first row of the warp's 32 experts.
    int before_quad[Sort::WORDS], pairs = 0, before = 0, rows = 0;
    if (e < experts) pairs = sort.prefix_sum_chunks(e, before_quad);
    if constexpr (CLUSTER > 1) pairs = sort.exchange(e, pairs, before);
    rows = pairs;
    if (p.block_size > 1) rows = p.by_block_size.quotient(pairs + p.block_size - 1) * p.block_size;
    const int inclusive_rows = lanes_inclusive_sum<32>(rows);
    if (sort.lane == 31 && sort.warp < EXPERT_WARPS) warp_sums[sort.warp] = inclusive_rows;
    if (e < experts)
        sort.store_first_rows(e, (p.max_tokens ? e * p.max_tokens : inclusive_rows - rows) + before, before_quad);
    __syncthreads();

    int sums[EXPERT_WARPS], total = 0;
#pragma unroll
    for (int w = 0; w < EXPERT_WARPS; ++w) total += sums[w] = warp_sums[w];
    int row[CHUNKS_PER_WARP];
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_WARP; ++i) {
        row[i] = -1;
        if (expert[i] < experts) {
            const int expert_row = sort.row_of(expert[i], sort.chunk_of(i), sums) + rank[i];
            if (!p.max_tokens || expert_row - expert[i] * p.max_tokens < p.max_tokens) row[i] = expert_row;
        }
        const int pair = sort.pair_of(i);
        if (p.inverse && pair < p.pairs.pairs && (CLUSTER > 1 || blockIdx.x == 0)) p.inverse[pair] = row[i];
    }
    const int start = inclusive_rows - rows + Sort::sum_before(sort.warp, sums);
    if constexpr (CLUSTER > 1)
        if (e < experts) {
            sort.start[e] = start;
            sort.count[e] = pairs;
            if (e == experts - 1) sort.start[experts] = total;
        }
    if (p.group_ids) {
        // The first of every block_size rows always has a pair. The thread of this pair writes the group id of these
        // rows.
        const bool writes = CLUSTER > 1 || blockIdx.x == 0;
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_WARP; ++i) {
            const int group = p.by_block_size.quotient(max(row[i], 0));
            if (writes && row[i] == group * p.block_size) p.group_ids[group] = group_id[i];
        }
        for (int g = p.by_block_size.quotient(total) + blockIdx.x * sort.threads + sort.thread; g < p.groups;
             g += gridDim.x * sort.threads)
            p.group_ids[g] = p.group_fill;
    }
    if (blockIdx.x == 0) {
        if (e < experts) {
            if (p.offsets) p.offsets[e] = p.max_tokens ? min(pairs, p.max_tokens) : start;
            if (p.offsets_long) p.offsets_long[e] = start;
        }
        if (e == 0) {
            if (p.offsets && !p.max_tokens) p.offsets[experts] = total;
            if (p.offsets_long) p.offsets_long[experts] = total;
            if (p.end_of_rows) *p.end_of_rows = total;
        }
    }
    if constexpr (CLUSTER > 1) {
        if (p.rows) sort.write_rows(row, total);
    } else if (p.rows) {
        sort.write_shared_rows(row);
    }
}

template <typename ID, int BITS, int CHUNKS, int CLUSTER>
constexpr Launch sort_chunks_launch(int experts, int mapped, int rows_per_block) {
    using Sort = ChunkSort<ID, BITS, CHUNKS, CLUSTER>;
    return {CHUNK_THREADS, int(sizeof(int)) * Sort::integers(experts, mapped, rows_per_block)};
}

template <typename ID, int BITS, int CHUNKS, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(CHUNK_THREADS, 1) sort_chunks(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        extern __shared__ uint4 shared[];
        __shared__ int warp_sums[CHUNK_THREADS / 32];
        sort_all<ID, BITS, CHUNKS, CLUSTER>(p, shared, warp_sums);
    }
}
