// Compute the attention of varlen_attention/sequences.cuh for 16-bit elements, with Hopper's wgmma and TMA.
//
//   DIM          padded head_dim, 64 or 128; TMA fills the padding with 0
//   WARPGROUPS   warpgroups of a block, with 64 queries each
//   BLOCKS       resident blocks of a multiprocessor
//   TURNS        the warpgroups of a block issue their MMAs in turn
//
// Grid: (tiles of queries, heads). A warpgroup loops over tiles of 128 keys, with two stages of keys and two stages of
// values. For tile n it computes
//
//   S = Q K[n]'    P = exp2(S - row_max), in registers: fragments of S become fragments of P (FlashAttention-2)
//   O = O * exp2(previous row_max - row_max) + P V[n]
//
// While a warpgroup exponentiates, warpgroups of other resident blocks or, with TURNS, of the same block run their MMAs
// (FlashAttention-3, Shah et al., 2024). A turn covers P V of one tile and Q K' of the next; named barriers pass the
// turn to the next warpgroup. There are too few registers for a producer warp, so the last warp to release a stage
// issues the TMA copies that refill the stage.
//
// TMA copies a tile as one box of 128 rows, or a short last tile as boxes of 32 rows. For rows past the end of the
// sequence, scores become -inf, and values are cleared in shared memory, because 0 * NaN is NaN.
//
// Speed of light: the tensor cores, with 4 * dim flops per query and key. Short sequences are bound by memory
// bandwidth. Per tile of 64 queries and 128 keys, a multiprocessor needs 8 * DIM cycles of its tensor cores and 512 of
// its exp2 units, which compute 16 per cycle.
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"
#include "varlen_attention/wgmma_values.cuh"

constexpr int KEYS = 128, NARROW = 64; // keys of a tile, and of the MMAs of a short last tile
constexpr int BOX = 32;                // rows of a TMA box of queries or of a short last tile
constexpr int STAGES = 2;
constexpr int COLUMNS = 64, ROW_BYTES = 128; // of a row in shared memory

struct alignas(64) MappedParams {
    TensorMap q_map; // [tokens, heads, dim], in boxes of BOX tokens x COLUMNS elements
    TensorMap k_map; // [memory_tokens, heads / group, dim], in boxes of KEYS tokens x COLUMNS elements
    TensorMap v_map;
    TensorMap k_box_map; // in boxes of BOX tokens
    TensorMap v_box_map;
    Params p;
};

// The part of shared memory that follows the tiles. A tile is stored in SPLITS parts of 64 columns.
template <int DIM, int WARPGROUPS> struct alignas(8) Shared {
    static constexpr int QUERIES = 64 * WARPGROUPS, SPLITS = DIM / COLUMNS;
    static constexpr int QUERY_SPLIT = QUERIES * ROW_BYTES, SPLIT = KEYS * ROW_BYTES, TILE = SPLITS * SPLIT; // bytes
    static constexpr int BEGIN = SPLITS * QUERY_SPLIT + 2 * STAGES * TILE;
    unsigned long long queries_full;    // full barrier of the queries
    unsigned long long full[2][STAGES]; // full barriers [keys, values]
    unsigned released[2][STAGES];       // [keys, values]: warps that released the stage
};

// Named barriers of warpgroup i: TURN + i begins its turn, ARRIVED + i synchronizes its warps.
enum { TURN = 1, ARRIVED = 5 };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Increment a counter, wrapping to 0 after `last`, and return the old value. The thread that gets `last` sees the
// memory accesses of the other threads before their increments.
__device__ __forceinline__ unsigned increment_wrapping(unsigned counter, unsigned last) {
    unsigned old;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;" : "=r"(old) : "r"(counter), "r"(last) : "memory");
    return old;
}

template <unsigned long long POLICY>
__device__ __forceinline__ void copy_boxes(unsigned to, const TensorMap& map, int column, int head, int row, int boxes,
                                           unsigned full) {
#pragma unroll 1
    for (int box = 0; box < boxes; ++box)
        tma_load<POLICY>(to + box * BOX * ROW_BYTES, map, column, head, row + box * BOX, 0, full);
}

// Keys and values of a block.
template <int DIM, int WARPGROUPS> struct Tiles {
    using S = Shared<DIM, WARPGROUPS>;
    const MappedParams& params;
    S& shared;
    const unsigned stages;     // shared address of the first stage
    const int first_row, head; // in k and v
    const int keys, count;

    // `kv`: 0 for keys, 1 for values.
    __device__ __forceinline__ unsigned address(int kv, int n) const {
        return stages + (kv * STAGES + n % STAGES) * S::TILE;
    }

    // One thread calls this.
    __device__ __forceinline__ void load(int kv, int n) const {
        const unsigned full = shared_address(&shared.full[kv][n % STAGES]);
        const int row = n * KEYS, boxes = min((keys - row + BOX - 1) / BOX, KEYS / BOX);
        mbarrier_arrive_expect_tx(full, S::SPLITS * boxes * BOX * ROW_BYTES);
#pragma unroll
        for (int split = 0; split < S::SPLITS; ++split)
            if (boxes == KEYS / BOX)
                tma_load<EVICT_NORMAL>(address(kv, n) + split * S::SPLIT, kv ? params.v_map : params.k_map,
                                       split * COLUMNS, head, first_row + row, 0, full);
            else
                copy_boxes<EVICT_NORMAL>(address(kv, n) + split * S::SPLIT, kv ? params.v_box_map : params.k_box_map,
                                         split * COLUMNS, head, first_row + row, boxes, full);
    }

    __device__ __forceinline__ void wait(int kv, int n) const {
        mbarrier_wait(shared_address(&shared.full[kv][n % STAGES]), n / STAGES);
    }

    // All lanes call this. The last of `warps` warps to release the stage refills it.
    __device__ __forceinline__ void release(int kv, int n, int warps) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0 && n + STAGES < count &&
            increment_wrapping(shared_address(&shared.released[kv][n % STAGES]), warps - 1) == warps - 1)
            load(kv, n + STAGES);
    }
};

// A warpgroup and its 64 queries.
template <typename T, int DIM, int WARPGROUPS, bool TURNS> struct Warpgroup {
    using S = Shared<DIM, WARPGROUPS>;
    const MappedParams& params;
    const WorkTile<S::QUERIES>& work;
    const Tiles<DIM, WARPGROUPS>& tiles;
    const unsigned queries;  // shared address
    const int index, active; // active: warpgroups with queries
    const int lane, warp;
    const int first_row; // of this warp in the work tile
    float sums[DIM / 2];
    float row_max[2], row_sum[2]; // of this lane's 2 rows; row_sum: this lane's keys only

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < DIM / 2; ++j) sums[j] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) row_max[i] = -CUDART_INF_F, row_sum[i] = 0.f;
    }

    __device__ __forceinline__ void release(int kv, int n) const { tiles.release(kv, n, active * (WARPGROUP / 32)); }

    // At the start, the last warpgroup passes the turn to warpgroup 0.
    __device__ __forceinline__ void take_turn() {
        if (TURNS && active > 1) barrier_sync(TURN + index, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pass_turn(bool is_last) {
        if (TURNS && active > 1 && !(is_last && index == active - 1))
            barrier_arrive(TURN + (index + 1 == active ? 0 : index + 1), 2 * WARPGROUP);
    }

    // Compute the scores of `2 * SCORES` keys of tile n, and pass the turn to the next warpgroup. The 128 threads hold
    // 64 rows of scores, so each thread holds SCORES.
    template <int SCORES> __device__ __forceinline__ void multiply_keys(int n, float (&scores)[SCORES]) {
        tiles.wait(0, n);
        const unsigned long long a = k_major_descriptor(queries), b = k_major_descriptor(tiles.address(0, n));
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            const int split = d / 4, within = d % 4 * 32;
            wgmma_k_major<T>(scores, a + ((split * S::QUERY_SPLIT + within) >> 4),
                             b + ((split * S::SPLIT + within) >> 4), d > 0);
        }
        wgmma_commit_group();
        pass_turn(false);
        if (n > 0) release(1, n - 1); // after the commit, so that the release overlaps the MMAs
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release(0, n);
    }

    // Set the scores of masked keys to -inf.
    template <int WIDTH> __device__ __forceinline__ void mask(int key, float (&scores)[WIDTH / 2]) {
        const Params& p = params.p;
        if (key + WIDTH <= work.keys && (!p.causal || key + WIDTH <= work.first_row_keys + first_row)) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + lane / 4 + 8 * i;
            const int limit = (p.causal ? min(work.keys, work.first_row_keys + row) : work.keys) - key - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (n * 8 + j >= limit) scores[4 * n + 2 * i + j] = -CUDART_INF_F;
        }
    }

    // Convert scores to softmax weights, and rescale `sums` to the new running maxima.
    template <int WIDTH>
    __device__ __forceinline__ void online_softmax(int n, float (&scores)[WIDTH / 2],
                                                   unsigned (&weights)[WIDTH / 16][4]) {
        const float scale = params.p.scale;
        mask<WIDTH>(n * KEYS, scores);
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float maxima[2] = {row_max[i], row_max[i]};
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j)
                maxima[j % 2] = fmaxf(maxima[j % 2], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            const float new_max = lanes_max<4>(fmaxf(maxima[0], maxima[1]));
            // If all scores are -inf, any finite offset gives weights of 0.
            offset[i] = new_max == -CUDART_INF_F ? 0.f : new_max * scale;
            const float factor = fast_exp2(fmaf(row_max[i], scale, -offset[i])); // 0 for the first tile
            row_max[i] = new_max;
            row_sum[i] *= factor;
#pragma unroll
            for (int j = 0; j < DIM / 8; ++j) sums[4 * j + 2 * i] *= factor, sums[4 * j + 2 * i + 1] *= factor;
        }
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = fast_exp2(fmaf(scores[8 * k + 2 * i], scale, -offset[i % 2]));
                const float high = fast_exp2(fmaf(scores[8 * k + 2 * i + 1], scale, -offset[i % 2]));
                row_sum[i % 2] += low + high;
                weights[k][i] = pack<T>(low, high);
            }
    }

    // Clear the values after the end of the sequence, because they may be NaN.
    template <int WIDTH> __device__ __forceinline__ void clear_values(int n) {
        const int valid = work.keys - n * KEYS;
        if (valid >= WIDTH) return;
        for (int i = valid * 8 + threadIdx.x % WARPGROUP; i < WIDTH * 8; i += WARPGROUP)
#pragma unroll
            for (int split = 0; split < S::SPLITS; ++split)
                store_shared(tiles.address(1, n) + split * S::SPLIT + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        barrier_sync(ARRIVED + index, WARPGROUP);
    }

    template <int WIDTH>
    __device__ __forceinline__ void multiply_values(int n, const unsigned (&weights)[WIDTH / 16][4]) {
        const unsigned long long b = mn_major_descriptor<S::SPLIT>(tiles.address(1, n));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) wgmma_values<T>(sums, weights[k], b + (k * 16 * ROW_BYTES >> 4));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
    }

    // The warpgroup has the turn to issue MMAs at the beginning and at the end of this call.
    template <int WIDTH> __device__ __forceinline__ void add_tile(int n) {
        float scores[WIDTH / 2];
        unsigned weights[WIDTH / 16][4];
        multiply_keys(n, scores);
        online_softmax<WIDTH>(n, scores, weights);
        tiles.wait(1, n);
        clear_values<WIDTH>(n);
        take_turn();
        multiply_values<WIDTH>(n, weights);
    }

    __device__ __forceinline__ void attend() {
        clear();
        if (tiles.count == 0) return;
        if (TURNS && active > 1 && index == active - 1) barrier_arrive(TURN, 2 * WARPGROUP);
        mbarrier_wait(shared_address(&tiles.shared.queries_full), 0);
        take_turn();
        const int full_tiles = tiles.count - (work.keys - (tiles.count - 1) * KEYS <= NARROW);
#pragma unroll 1
        for (int n = 0; n < full_tiles; ++n) add_tile<KEYS>(n);
        if (full_tiles < tiles.count) add_tile<NARROW>(full_tiles);
        pass_turn(true);
    }

    // Collect the output in the shared memory of the queries, so that 8 lanes store 128 contiguous bytes.
    __device__ __forceinline__ void store(int head) {
        const Params& p = params.p;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = lanes_sum<4>(row_sum[i]);
            const float factor = sum == 0.f && row_max[i] == -CUDART_INF_F ? 0.f : 1.f / sum;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) sums[4 * n + 2 * i] *= factor, sums[4 * n + 2 * i + 1] *= factor;
        }
        barrier_sync(ARRIVED + index, WARPGROUP); // all warps have read the queries
        const unsigned rows = queries + warp * 16 * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            unsigned fragments[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) fragments[i] = pack<T>(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
            stmatrix(rows + k / 4 * S::QUERY_SPLIT + lane % 16 * ROW_BYTES + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16,
                     fragments);
        }
        __syncwarp();
        const int chunk = lane % 8;
#pragma unroll
        for (int split = 0; split < S::SPLITS; ++split)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 4 + lane / 8, column = split * COLUMNS + chunk * 8;
                if (first_row + row >= work.rows || column >= p.dim) continue;
                char* const to =
                    p.out + (((long long)(work.first_row + first_row + row) * p.heads + head) * p.dim + column) * 2;
                *reinterpret_cast<uint4*>(to) =
                    load_shared(rows + split * S::QUERY_SPLIT + row * ROW_BYTES + (chunk ^ row % 8) * 16);
            }
    }

    static __device__ __forceinline__ uint4 load_shared(unsigned from) {
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(from)
                     : "memory");
        return value;
    }
};

template <typename, int DIM, int WARPGROUPS, int, bool> constexpr Launch attention_wgmma_launch() {
    using S = Shared<DIM, WARPGROUPS>;
    return {WARPGROUPS * WARPGROUP, 1024 + S::BEGIN + int(sizeof(S))};
}

template <typename T, int DIM, int WARPGROUPS, int BLOCKS, bool TURNS>
__global__ void __launch_bounds__((WARPGROUPS * WARPGROUP), BLOCKS)
    attention_wgmma(const __grid_constant__ MappedParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using S = Shared<DIM, WARPGROUPS>;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + padding;
    S& shared = *reinterpret_cast<S*>(memory + padding + S::BEGIN);
    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q_map);
        prefetch_tensormap(params.k_map);
        prefetch_tensormap(params.v_map);
        prefetch_tensormap(params.k_box_map);
        prefetch_tensormap(params.v_box_map);
    }
    const WorkTile<S::QUERIES> work(params.p);
    if (work.rows <= 0) return;
    const int head = blockIdx.y;
    const Tiles<DIM, WARPGROUPS> tiles{params,
                                       shared,
                                       queries + S::SPLITS * S::QUERY_SPLIT,
                                       work.keys_begin,
                                       head / params.p.group,
                                       work.keys,
                                       (work.keys + KEYS - 1) / KEYS};
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&shared.queries_full), 1);
        for (int kv = 0; kv < 2; ++kv)
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(shared_address(&shared.full[kv][stage]), 1);
                shared.released[kv][stage] = 0;
            }
        fence_mbarrier_init();
        fence_proxy_async(); // makes the barriers visible to the TMA copies below
        if (tiles.count > 0) {
            const unsigned full = shared_address(&shared.queries_full);
            const int boxes = (work.rows + BOX - 1) / BOX;
            mbarrier_arrive_expect_tx(full, S::SPLITS * boxes * BOX * ROW_BYTES);
            for (int split = 0; split < S::SPLITS; ++split)
                copy_boxes<EVICT_FIRST>(queries + split * S::QUERY_SPLIT, params.q_map, split * COLUMNS, head,
                                        work.first_row, boxes, full);
        }
        for (int n = 0; n < min(tiles.count, STAGES); ++n) tiles.load(0, n), tiles.load(1, n);
    }
    __syncthreads();
    // The shuffle tells the compiler that the warp index is uniform.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0), index = warp / 4;
    if (index * 64 >= work.rows) return;
    Warpgroup<T, DIM, WARPGROUPS, TURNS> warpgroup{params,
                                                   work,
                                                   tiles,
                                                   queries + index * 64 * ROW_BYTES,
                                                   index,
                                                   min((work.rows + 63) / 64, WARPGROUPS),
                                                   int(threadIdx.x % 32),
                                                   warp % 4,
                                                   warp * 16};
    warpgroup.attend();
    warpgroup.store(head);
#endif
}
