// Sort the pairs (token, slot) by expert with a shorter chain of dependent steps than sort_pairs.
//
// Formulas, order and results are the same as in sort_pairs.cu. To rank a pair is to count the pairs of the same expert
// before it. A chunk is 32 consecutive pairs, one per lane of a warp. A block ranks CHUNKS chunks. For each expert and
// chunk it keeps the number of pairs in one byte:
//
//   pairs of expert e before p = in earlier segments + in earlier chunks (a prefix sum of bytes) + in earlier lanes
//
// One multiplication computes the prefix sums of four bytes, so one thread per expert needs only a few instructions for
// all chunks. The ids are loaded once, at the start, and stay in registers.
//
// CLUSTER == 1 is for few pairs. Every block ranks all pairs, because waiting for other blocks would take as long. Only
// the output is divided among the blocks: each block assembles a range of `rows` in shared memory, including the fill
// values, and writes the range.
//
// CLUSTER > 1 is for more pairs. The pairs are cut into segments of 32 * CHUNKS pairs. Each cluster counts all pairs:
// block r of the cluster counts `clusters` segments, starting with segment `r * clusters`, and sends the counts to the
// other blocks of the cluster. Then each block knows, for each expert, how many pairs there are in all and how many are
// before the segments that it counted. A block ranks only one of the segments that it counted: in cluster c, each block
// ranks the c-th of the segments that it counted.
//
// ID: an unsigned integer type as wide as an id in topk_ids. BITS: enough bits for the index of any expert, at most 9.
//
// Grid: blocks of whole warps with at least one thread per expert; if CLUSTER > 1, CHUNK_THREADS threads. Each warp
// ranks CHUNKS / 16 chunks: warp w ranks chunk w and then every (threads / 32)-th chunk.
//
// Speed of light: latency, as in sort_pairs. The dependent steps are the launch, the load of the ids, and three
// barriers (four in a cluster) with one or two shared memory accesses between them. On an H200, with 256 experts, one
// block sorts 64 x 8 pairs into padded rows in 3.1 us, and clusters sort 4096 x 8 pairs in 5.6 us; an empty kernel
// takes 0.54 us.
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
    int group_fill; // value of `group_ids` entries past the end of all rows
    int max_tokens; // batch mode: rows per expert, and both `rows` and `group_ids` are null; 0: not batch mode
    Divisor topk;   // `rows` gets the pair divided by this: topk for tokens, 1 for pairs
    Divisor by_block_size;
};

// The pairs and the shared memory of a block. The function sort_all below calls the member functions.
template <typename ID, int BITS, int CHUNKS, int CLUSTER> struct ChunkSort {
    static constexpr int TURNS = CHUNKS / (CHUNK_THREADS / 32); // chunks per warp
    static constexpr int SEGMENT = 32 * CHUNKS;
    static constexpr int WORDS = CHUNKS / 4; // 32-bit words of an expert's counts, one byte per chunk
    // Words from one expert's counts to the next expert's: an odd number of 16-byte units, which avoids bank conflicts.
    static constexpr int PITCH = WORDS / 4 % 2 ? WORDS : WORDS + 4;
    static constexpr int EXPERT_WARPS = BITS > 5 ? 1 << (BITS - 5) : 1;
    static constexpr int COUNTS_AT_ONCE = 8; // loads in flight

    const Params& p;
    const int experts = p.pairs.experts, threads = blockDim.x, thread = threadIdx.x;
    const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int first = CLUSTER > 1 ? (rank * clusters + cluster) * SEGMENT : 0; // first pair that this block ranks

    unsigned* const bytes; // [experts, PITCH] pairs per chunk; add_up_chunks turns them into prefix sums
    int* const base = (int*)bytes + experts * PITCH; // [experts, PITCH] first row per four chunks
    int* const map = base + experts * PITCH;         // [global_experts + 1]
    int* const rest = map + (p.pairs.expert_map ? p.pairs.global_experts + 1 : 0);
    int* const staged = rest;                       // [rows_per_block]; CLUSTER == 1
    int* const earlier = rest;                      // [experts + 1] pairs in the block's earlier segments; CLUSTER > 1
    int* const later = earlier + experts + 1;       // [experts + 1] pairs in the block's later segments; CLUSTER > 1
    int* const of_rank = later + experts + 1;       // [CLUSTER, experts] pairs in each block's segments; CLUSTER > 1
    int* const start = of_rank + CLUSTER * experts; // [experts + 1]
    int* const count = start + experts + 1;         // [experts]

    __device__ __forceinline__ ChunkSort(const Params& p, uint4* shared) : p(p), bytes((unsigned*)shared) {}

    // Return the size of shared memory in integers. `mapped` is the size of the expert map, or 0 without a map.
    static constexpr int integers(int experts, int mapped, int rows_per_block) {
        const int behind_map = CLUSTER > 1 ? 3 * (experts + 1) + (CLUSTER + 1) * experts : rows_per_block;
        return 2 * experts * PITCH + (mapped ? mapped + 1 : 0) + behind_map;
    }

    __device__ __forceinline__ int chunk_of(int turn) const { return turn * warps + warp; }
    __device__ __forceinline__ int pair_of(int turn) const { return first + chunk_of(turn) * 32 + lane; }
    __device__ __forceinline__ ID load_id(int pair) const {
        return pair < p.pairs.pairs ? static_cast<const ID*>(p.pairs.topk_ids)[pair] : ID(p.pairs.global_experts);
    }
    // Return the local expert of an id, or `experts` if the id has no local expert.
    __device__ __forceinline__ int expert_of(ID id) const {
        int expert = int(min(id, ID(p.pairs.global_experts)));
        if (p.pairs.expert_map) expert = map[expert];
        return int(min(unsigned(expert), unsigned(experts)));
    }

    // Return the i-th pair of the segments that this block counts but does not rank. Set `is_earlier` if this pair is
    // before the segment that the block ranks.
    __device__ __forceinline__ int other_pair(int i, bool& is_earlier) const {
        is_earlier = i < cluster * SEGMENT;
        return rank * clusters * SEGMENT + i + (is_earlier ? 0 : SEGMENT);
    }
    __device__ __forceinline__ void load_others(int from, ID (&id)[COUNTS_AT_ONCE]) const {
#pragma unroll
        for (int j = 0; j < COUNTS_AT_ONCE; ++j) {
            const int i = from + j * CHUNK_THREADS;
            bool is_earlier;
            id[j] = i < (clusters - 1) * SEGMENT ? load_id(other_pair(i, is_earlier)) : ID(p.pairs.global_experts);
        }
    }
    // Count the pairs of the segments that this block does not rank, in `earlier` and `later`. `id` already holds the
    // ids of the first iteration.
    __device__ __forceinline__ void count_others(ID (&id)[COUNTS_AT_ONCE]) const {
#pragma unroll 1
        for (int from = thread; from < (clusters - 1) * SEGMENT; from += COUNTS_AT_ONCE * CHUNK_THREADS) {
            if (from != thread) load_others(from, id);
#pragma unroll
            for (int j = 0; j < COUNTS_AT_ONCE; ++j) {
                bool is_earlier;
                other_pair(from + j * CHUNK_THREADS, is_earlier);
                const int expert = expert_of(id[j]);
                if (expert < experts) atomicAdd((is_earlier ? earlier : later) + expert, 1);
            }
        }
    }

    __device__ __forceinline__ void initialize(int* warp_sums) const {
        uint4* units = reinterpret_cast<uint4*>(bytes);
        for (int i = thread; i < experts * (PITCH / 4); i += threads) units[i] = make_uint4(0, 0, 0, 0);
        if (thread < EXPERT_WARPS) warp_sums[thread] = 0;
        if constexpr (CLUSTER > 1)
            for (int i = thread; i < 2 * (experts + 1); i += CHUNK_THREADS) earlier[i] = 0;
        else
            fill_staged();
        load_map(p.pairs, map);
    }

    // Turn the byte counts of expert e into exclusive prefix sums within each group of four consecutive chunks. Set
    // of_four[i] to the number of the expert's pairs before chunk `4 * i`. Return the number of its pairs in all
    // chunks.
    __device__ __forceinline__ int add_up_chunks(int e, int (&of_four)[WORDS]) const {
        uint4* units = reinterpret_cast<uint4*>(bytes + e * PITCH);
        int sum = 0;
#pragma unroll
        for (int k = 0; k < WORDS / 4; ++k) {
            const uint4 four = units[k];
            // Byte j of the product is the sum of bytes 0 to j, at most 128.
            const unsigned up_to[4] = {four.x * 0x01010101u, four.y * 0x01010101u, four.z * 0x01010101u,
                                       four.w * 0x01010101u};
            units[k] = make_uint4(up_to[0] << 8, up_to[1] << 8, up_to[2] << 8, up_to[3] << 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                of_four[4 * k + j] = sum;
                sum += up_to[j] >> 24;
            }
        }
        return sum;
    }

    // Exchange the counts of expert e with the other blocks of the cluster. `own` is the number of the expert's pairs
    // in the segment that this block ranks. Return the number of the expert's pairs in all segments. Set `before` to
    // their number in the segments before the ranked segment.
    __device__ __forceinline__ int exchange(int e, int own, int& before) const {
        int all = 0;
        if (e < experts) {
            before = earlier[e];
            own += before + later[e];
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) dsmem_store<CLUSTER>(r, of_rank + rank * experts + e, own);
        }
        cluster_sync<CLUSTER>();
        if (e < experts) {
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) {
                const int of_this = of_rank[r * experts + e];
                before += r < rank ? of_this : 0;
                all += of_this;
            }
        }
        return all;
    }

    __device__ __forceinline__ void store_base(int e, int row, const int (&of_four)[WORDS]) const {
        int4* units = reinterpret_cast<int4*>(base + e * PITCH);
#pragma unroll
        for (int k = 0; k < WORDS / 4; ++k)
            units[k] = make_int4(row + of_four[4 * k], row + of_four[4 * k + 1], row + of_four[4 * k + 2],
                                 row + of_four[4 * k + 3]);
    }

    // Return the row of the chunk's first pair of `expert`. sums[w] is the number of rows of the 32 experts whose
    // counts warp w adds up.
    __device__ __forceinline__ int row_of(int expert, int chunk, const int (&sums)[EXPERT_WARPS]) const {
        const int in_four = reinterpret_cast<const unsigned char*>(bytes)[expert * PITCH * 4 + chunk];
        int row = base[expert * PITCH + chunk / 4] + in_four;
        if (!p.max_tokens) row += sum_before(expert / 32, sums);
        return row;
    }
    static __device__ __forceinline__ int sum_before(int expert_warp, const int (&sums)[EXPERT_WARPS]) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < EXPERT_WARPS - 1; ++w) sum += w < expert_warp ? sums[w] : 0;
        return sum;
    }

    __device__ __forceinline__ void fill_staged() const {
        if (p.rows)
            for (int i = thread; i < p.rows_per_block; i += threads) staged[i] = p.fill;
    }

    // Assemble this block's entries of `rows` in shared memory and write them. Used if CLUSTER == 1.
    __device__ __forceinline__ void write_staged(const int (&row)[TURNS]) const {
        const int size = p.rows_per_block, step = gridDim.x * size;
        for (int from = blockIdx.x * size; from < p.capacity; from += step) {
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn)
                // The unsigned comparison also excludes rows before `from` and a row of -1.
                if (unsigned(row[turn] - from) < unsigned(size))
                    staged[row[turn] - from] = p.topk.quotient(pair_of(turn));
            __syncthreads();
            for (int i = thread; i < min(size, p.capacity - from); i += threads) p.rows[from + i] = staged[i];
            if (from + step < p.capacity) {
                __syncthreads();
                fill_staged();
                __syncthreads();
            }
        }
    }

    // Write the entries of `rows` for this block's pairs, and fill the entries without a pair. Used if CLUSTER > 1.
    __device__ __forceinline__ void write_rows(const int (&row)[TURNS], int total) const {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
            if (row[turn] >= 0) p.rows[row[turn]] = p.topk.quotient(pair_of(turn));
        const int all = gridDim.x * threads;
        for (int r = total + blockIdx.x * threads + thread; r < p.capacity; r += all) p.rows[r] = p.fill;
        if (p.block_size == 1) return;
        __syncthreads(); // wait for start and count
        for (int e = blockIdx.x * warps + warp; e < experts; e += gridDim.x * warps)
            for (int r = start[e] + count[e] + lane; r < start[e + 1]; r += 32) p.rows[r] = p.fill;
    }
};

// Sort all pairs. Set warp_sums[w] to the number of rows of the 32 experts whose counts warp w adds up.
template <typename ID, int BITS, int CHUNKS, int CLUSTER>
__device__ __forceinline__ void sort_all(const Params& p, uint4* shared, int* warp_sums) {
    using Sort = ChunkSort<ID, BITS, CHUNKS, CLUSTER>;
    constexpr int TURNS = Sort::TURNS, EXPERT_WARPS = Sort::EXPERT_WARPS;
    // A block may write to another block only after all blocks of the cluster have begun.
    cluster_arrive<CLUSTER>();
    const Sort sort(p, shared);
    const int experts = sort.experts, e = sort.thread;

    ID id[TURNS], others[Sort::COUNTS_AT_ONCE];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) id[turn] = sort.load_id(sort.pair_of(turn));
    if constexpr (CLUSTER > 1) sort.load_others(sort.thread, others);
    sort.initialize(warp_sums);
    __syncthreads();

    int expert[TURNS], rank[TURNS], group_id[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        expert[turn] = sort.expert_of(id[turn]);
        const bool has_expert = expert[turn] < experts;
        const unsigned lanes = lanes_of_expert<BITS>(expert[turn], experts);
        rank[turn] = __popc(lanes & ((1u << sort.lane) - 1));
        if (has_expert && rank[turn] == 0)
            reinterpret_cast<unsigned char*>(sort.bytes)[expert[turn] * Sort::PITCH * 4 + sort.chunk_of(turn)] =
                __popc(lanes);
        group_id[turn] = expert[turn];
        if (p.group_ids && p.id_of && has_expert) group_id[turn] = p.id_of[expert[turn]];
    }
    if constexpr (CLUSTER > 1) {
        sort.count_others(others);
        cluster_wait<CLUSTER>();
    }
    __syncthreads();

    // Each thread handles one expert. It computes the number of the expert's pairs, the number of the expert's rows
    // (padded to a multiple of block_size), and the first of these rows, relative to the first row of the warp's 32
    // experts.
    int of_four[Sort::WORDS], pairs = 0, before = 0, rows = 0;
    if (e < experts) pairs = sort.add_up_chunks(e, of_four);
    if constexpr (CLUSTER > 1) pairs = sort.exchange(e, pairs, before);
    rows = pairs;
    if (p.block_size > 1) rows = p.by_block_size.quotient(pairs + p.block_size - 1) * p.block_size;
    const int up_to_own = lanes_inclusive_sum<32>(rows);
    if (sort.lane == 31 && sort.warp < EXPERT_WARPS) warp_sums[sort.warp] = up_to_own;
    if (e < experts) sort.store_base(e, (p.max_tokens ? e * p.max_tokens : up_to_own - rows) + before, of_four);
    __syncthreads();

    int sums[EXPERT_WARPS], total = 0;
#pragma unroll
    for (int w = 0; w < EXPERT_WARPS; ++w) total += sums[w] = warp_sums[w];
    int row[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        row[turn] = -1;
        if (expert[turn] < experts) {
            const int of_all = sort.row_of(expert[turn], sort.chunk_of(turn), sums) + rank[turn];
            if (!p.max_tokens || of_all - expert[turn] * p.max_tokens < p.max_tokens) row[turn] = of_all;
        }
        const int pair = sort.pair_of(turn);
        if (p.inverse && pair < p.pairs.pairs && (CLUSTER > 1 || blockIdx.x == 0)) p.inverse[pair] = row[turn];
    }
    const int start = up_to_own - rows + Sort::sum_before(sort.warp, sums);
    if constexpr (CLUSTER > 1)
        if (e < experts) {
            sort.start[e] = start;
            sort.count[e] = pairs;
            if (e == experts - 1) sort.start[experts] = total;
        }
    if (p.group_ids) {
        // The first of each block_size rows always belongs to a pair. The thread of that pair writes the entry of
        // `group_ids` for these rows.
        const bool writes = CLUSTER > 1 || blockIdx.x == 0;
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int group = p.by_block_size.quotient(max(row[turn], 0));
            if (writes && row[turn] == group * p.block_size) p.group_ids[group] = group_id[turn];
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
        sort.write_staged(row);
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
