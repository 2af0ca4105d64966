// Attention over sequences of different lengths, packed without padding, for 16-bit elements, with Hopper's wgmma and
// TMA.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j of the sequence of query i;
//                                                                       if causal, only for keys that i sees (below)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// Causal: the last query of a sequence sees (attends to) all keys of the sequence, and each earlier query sees one key
// less than the next query. The result of a query without keys is 0. Weights are rounded to T before their MMA with the
// values. All sums are in float32, including the sum of the weights.
//
//   T            __half or __nv_bfloat16
//   DIM          padded size of a head, 64 or 128, at least p.dim; TMA fills the padding with 0
//   WARPGROUPS   warpgroups of a block, with 64 queries each
//   BLOCKS       resident blocks of a multiprocessor
//   TURNS        the warpgroups of a block take turns at the tensor cores
//
// Grid: (tiles of queries, heads), see varlen_attention/sequences.cuh. A warpgroup without queries exits at once. The
// warpgroups loop over the keys of their sequence in tiles of 128. The keys and the values of a tile have two stages
// each in shared memory. For tile n a warpgroup computes
//
//   S = Q K[n]'    P = exp2(S - largest), in registers: fragments of S become fragments of P (FlashAttention-2)
//   O = O * exp2(previous largest - largest) + P V[n]
//
// While one warpgroup exponentiates, the MMAs of other warpgroups run (FlashAttention-3, Shah et al., 2024). These
// warpgroups belong to the other BLOCKS - 1 resident blocks. With TURNS they also belong to the same block: the
// warpgroups of the block issue their MMAs in turn, and named barriers pass the turn from one warpgroup to the next. A
// turn covers P V of one tile and Q K' of the next tile. The registers do not suffice for a producer warp. Therefore
// the last warp that releases a stage issues the TMA copies that refill the stage.
//
// TMA copies a tile in boxes of 128 rows, or a short last tile in boxes of 32 rows. In both cases a box may extend past
// the end of the sequence. Scores of keys outside the sequence become -inf, so that the weights of these keys are 0.
// The values of these keys are cleared in shared memory, because 0 * NaN is NaN. For a last tile of at most 64 keys the
// MMAs process only 64 keys.
//
// Speed of light: the tensor cores, with 4 * dim flops for each pair of a query and a key. With DIM 64 the exponentials
// take as long as the MMAs: a tile of 64 queries and 128 keys takes 512 cycles of a multiprocessor's tensor cores, and
// 512 cycles of its exp2 units, which compute 16 per cycle. With DIM 128 the MMAs take 1024 cycles and the exponentials
// 512. For short sequences memory bandwidth is the limit: queries, keys and values are read, and the results are
// written.
#include "common/hopper.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"
#include "varlen_attention/wgmma_values.cuh"

constexpr int KEYS = 128, NARROW = 64; // keys of a tile, and of a short last tile
constexpr int BOX = 32;                // rows of a TMA box of queries, and of a short last tile
constexpr int STAGES = 2;
constexpr int COLUMNS = 64, LINE = 128; // elements and bytes of a row of a tile in shared memory

struct alignas(64) MappedParams {
    TensorMap q_map; // [tokens, heads, dim], in boxes of BOX tokens x COLUMNS elements
    TensorMap k_map; // [memory_tokens, heads / group, dim], in boxes of KEYS tokens x COLUMNS elements
    TensorMap v_map;
    TensorMap k_box_map; // as k_map and v_map, but in boxes of BOX tokens
    TensorMap v_box_map;
    Params p;
};

// The shared memory after the tiles. A tile with more than 64 columns is stored as SPLITS tiles of 64 columns.
template <int DIM, int WARPGROUPS> struct alignas(8) Shared {
    static constexpr int QUERIES = 64 * WARPGROUPS, SPLITS = DIM / COLUMNS;
    static constexpr int QUERY_SPLIT = QUERIES * LINE, SPLIT = KEYS * LINE, TILE = SPLITS * SPLIT; // bytes
    static constexpr int BEGIN = SPLITS * QUERY_SPLIT + 2 * STAGES * TILE;
    unsigned long long queries_full;    // full barrier: the queries are loaded
    unsigned long long full[2][STAGES]; // full barriers [keys or values]: a stage is loaded
    unsigned done[2][STAGES];           // [keys or values]: warps that are done with a stage
};

// Named barriers, for up to four warpgroups. TURN + i: warpgroup i may issue its MMAs. TOGETHER + i: all warps of
// warpgroup i have arrived.
enum { TURN = 1, TOGETHER = 5 };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Increment a counter, which wraps to 0 after `last`, and return its old value. If a thread gets `last`, the memory
// accesses that the other threads made before their increments happen before its later memory accesses.
__device__ __forceinline__ unsigned count_around(unsigned counter, unsigned last) {
    unsigned before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(counter), "r"(last)
                 : "memory");
    return before;
}

// Issue the copies of `boxes` consecutive boxes of BOX rows.
template <unsigned long long POLICY>
__device__ __forceinline__ void copy_boxes(unsigned to, const TensorMap& map, int column, int head, int row, int boxes,
                                           unsigned full) {
#pragma unroll 1
    for (int box = 0; box < boxes; ++box)
        tma_load<POLICY>(to + box * BOX * LINE, map, column, head, row + box * BOX, 0, full);
}

// The tiles of keys and values of a block's sequence and head.
template <int DIM, int WARPGROUPS> struct Tiles {
    using S = Shared<DIM, WARPGROUPS>;
    const MappedParams& params;
    S& shared;
    const unsigned stages; // shared address of the first stage
    const int begin, head; // first row and head in k and v
    const int keys, count; // number of keys and of tiles

    // Return the shared address of tile n. `which`: 0 for keys, 1 for values.
    __device__ __forceinline__ unsigned at(int which, int n) const {
        return stages + (which * STAGES + n % STAGES) * S::TILE;
    }

    // Issue the copies of tile n. Only one thread calls this.
    __device__ __forceinline__ void start(int which, int n) const {
        const unsigned full = shared_address(&shared.full[which][n % STAGES]);
        const int row = n * KEYS, boxes = min((keys - row + BOX - 1) / BOX, KEYS / BOX);
        mbarrier_arrive_expect_tx(full, S::SPLITS * boxes * BOX * LINE);
#pragma unroll
        for (int split = 0; split < S::SPLITS; ++split)
            if (boxes == KEYS / BOX)
                tma_load<EVICT_NORMAL>(at(which, n) + split * S::SPLIT, which ? params.v_map : params.k_map,
                                       split * COLUMNS, head, begin + row, 0, full);
            else
                copy_boxes<EVICT_NORMAL>(at(which, n) + split * S::SPLIT, which ? params.v_box_map : params.k_box_map,
                                         split * COLUMNS, head, begin + row, boxes, full);
    }

    __device__ __forceinline__ void wait(int which, int n) const {
        mbarrier_wait(shared_address(&shared.full[which][n % STAGES]), n / STAGES);
    }

    // Release the stage of tile n for this warp; all lanes call this. The last of `warps` warps to release a stage
    // issues the copies that refill it.
    __device__ __forceinline__ void release(int which, int n, int warps) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0 && n + STAGES < count &&
            count_around(shared_address(&shared.done[which][n % STAGES]), warps - 1) == warps - 1)
            start(which, n + STAGES);
    }
};

// A warpgroup and its 64 queries.
template <typename T, int DIM, int WARPGROUPS, bool TURNS> struct Warpgroup {
    using S = Shared<DIM, WARPGROUPS>;
    const MappedParams& params;
    const Part<S::QUERIES>& part;
    const Tiles<DIM, WARPGROUPS>& tiles;
    const unsigned queries;  // shared address of its first query
    const int index, active; // its index, and the number of warpgroups with queries
    const int lane, warp;    // lane of the warp, and warp of the warpgroup
    const int first;         // first row of this warp among the block's queries
    float sums[DIM / 2];
    float largest[2], total[2]; // largest raw score and sum of this lane's weights, for its 2 rows

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < DIM / 2; ++j) sums[j] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) largest[i] = -CUDART_INF_F, total[i] = 0.f;
    }

    __device__ __forceinline__ void release(int which, int n) const {
        tiles.release(which, n, active * (WARPGROUP / 32));
    }

    // take_turn waits until this warpgroup may issue its MMAs, and pass_turn lets the next warpgroup issue its MMAs. At
    // the start, the last warpgroup gives the first turn to warpgroup 0.
    __device__ __forceinline__ void take_turn() {
        if (TURNS && active > 1) barrier_sync(TURN + index, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pass_turn(bool is_last) {
        if (TURNS && active > 1 && !(is_last && index == active - 1))
            barrier_arrive(TURN + (index + 1 == active ? 0 : index + 1), 2 * WARPGROUP);
    }

    // Compute the scores of the first `2 * SCORES` keys of tile n. Then end the turn, so that the next warpgroup may
    // issue its MMAs.
    template <int SCORES> __device__ __forceinline__ void multiply_keys(int n, float (&scores)[SCORES]) {
        tiles.wait(0, n);
        const unsigned long long a = k_major_descriptor(queries), b = k_major_descriptor(tiles.at(0, n));
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            const int split = d / 4, within = d % 4 * 32;
            wgmma_k_major<T>(scores, a + ((split * S::QUERY_SPLIT + within) >> 4),
                             b + ((split * S::SPLIT + within) >> 4), d > 0);
        }
        wgmma_commit_group();
        pass_turn(false);
        if (n > 0) release(1, n - 1); // only now, so that the release overlaps the MMAs
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release(0, n);
    }

    // Replace the score of every key that a query does not attend to by -inf.
    template <int WIDTH> __device__ __forceinline__ void mask(int key, float (&scores)[WIDTH / 2]) {
        const Params& p = params.p;
        if (key + WIDTH <= part.keys && (!p.causal || key + WIDTH <= part.seen + first)) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first + lane / 4 + 8 * i;
            const int limit = (p.causal ? min(part.keys, part.seen + row) : part.keys) - key - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (n * 8 + j >= limit) scores[4 * n + 2 * i + j] = -CUDART_INF_F;
        }
    }

    // Convert the scores of tile n to weights. Rescale the sums to the new largest scores.
    template <int WIDTH>
    __device__ __forceinline__ void weigh(int n, float (&scores)[WIDTH / 2], unsigned (&weights)[WIDTH / 16][4]) {
        const float scale = params.p.scale;
        mask<WIDTH>(n * KEYS, scores);
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most[2] = {largest[i], largest[i]};
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j)
                most[j % 2] = fmaxf(most[j % 2], fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            const float highest = lanes_max<4>(fmaxf(most[0], most[1]));
            // If all scores so far are -inf, use 0: any finite offset gives weights of 0.
            offset[i] = highest == -CUDART_INF_F ? 0.f : highest * scale;
            const float factor = fast_exp2(fmaf(largest[i], scale, -offset[i])); // 0 for the first tile
            largest[i] = highest;
            total[i] *= factor;
#pragma unroll
            for (int j = 0; j < DIM / 8; ++j) sums[4 * j + 2 * i] *= factor, sums[4 * j + 2 * i + 1] *= factor;
        }
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = fast_exp2(fmaf(scores[8 * k + 2 * i], scale, -offset[i % 2]));
                const float high = fast_exp2(fmaf(scores[8 * k + 2 * i + 1], scale, -offset[i % 2]));
                total[i % 2] += low + high;
                weights[k][i] = pack<T>(low, high);
            }
    }

    // In the last tile, clear the values after the end of the sequence, because they may be NaN.
    template <int WIDTH> __device__ __forceinline__ void clear_values(int n) {
        const int present = part.keys - n * KEYS;
        if (present >= WIDTH) return;
        for (int i = present * 8 + threadIdx.x % WARPGROUP; i < WIDTH * 8; i += WARPGROUP)
#pragma unroll
            for (int split = 0; split < S::SPLITS; ++split)
                store_shared(tiles.at(1, n) + split * S::SPLIT + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        barrier_sync(TOGETHER + index, WARPGROUP); // all warps have cleared their share
    }

    // Add the product of weights and values of tile n to the sums.
    template <int WIDTH>
    __device__ __forceinline__ void multiply_values(int n, const unsigned (&weights)[WIDTH / 16][4]) {
        const unsigned long long b = mn_major_descriptor<S::SPLIT>(tiles.at(1, n));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < WIDTH / 16; ++k) wgmma_values<T>(sums, weights[k], b + (k * 16 * LINE >> 4));
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
    }

    // The mainloop body for the first WIDTH keys of tile n. The warpgroup has the turn at the beginning and at the end.
    template <int WIDTH> __device__ __forceinline__ void add_tile(int n) {
        float scores[WIDTH / 2];
        unsigned weights[WIDTH / 16][4];
        multiply_keys(n, scores);
        weigh<WIDTH>(n, scores, weights);
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
        const int wide = tiles.count - (part.keys - (tiles.count - 1) * KEYS <= NARROW);
#pragma unroll 1
        for (int n = 0; n < wide; ++n) add_tile<KEYS>(n);
        if (wide < tiles.count) add_tile<NARROW>(wide);
        pass_turn(true);
    }

    // Store the results. They are first written over the queries in shared memory, so that 8 lanes store 128 contiguous
    // bytes.
    __device__ __forceinline__ void store(int head) {
        const Params& p = params.p;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = lanes_sum<4>(total[i]);
            const float factor = sum == 0.f && largest[i] == -CUDART_INF_F ? 0.f : 1.f / sum;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) sums[4 * n + 2 * i] *= factor, sums[4 * n + 2 * i + 1] *= factor;
        }
        barrier_sync(TOGETHER + index, WARPGROUP); // no warp of the warpgroup still reads these queries
        const unsigned lines = queries + warp * 16 * LINE;
#pragma unroll
        for (int k = 0; k < DIM / 16; ++k) {
            unsigned fragments[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) fragments[i] = pack<T>(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
            stmatrix(lines + k / 4 * S::QUERY_SPLIT + lane % 16 * LINE + ((k % 4 * 2 + lane / 16) ^ lane % 8) * 16,
                     fragments);
        }
        __syncwarp();
        const int chunk = lane % 8;
#pragma unroll
        for (int split = 0; split < S::SPLITS; ++split)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 4 + lane / 8, column = split * COLUMNS + chunk * 8;
                if (first + row >= part.rows || column >= p.dim) continue;
                char* const to =
                    p.out + (((long long)(part.first + first + row) * p.heads + head) * p.dim + column) * 2;
                *reinterpret_cast<uint4*>(to) =
                    load_shared(lines + split * S::QUERY_SPLIT + row * LINE + (chunk ^ row % 8) * 16);
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
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + misplaced;
    S& shared = *reinterpret_cast<S*>(memory + misplaced + S::BEGIN);
    if (threadIdx.x == 0) {
        prefetch_tensormap(params.q_map);
        prefetch_tensormap(params.k_map);
        prefetch_tensormap(params.v_map);
        prefetch_tensormap(params.k_box_map);
        prefetch_tensormap(params.v_box_map);
    }
    const Part<S::QUERIES> part(params.p);
    if (part.rows <= 0) return;
    const int head = blockIdx.y;
    const Tiles<DIM, WARPGROUPS> tiles{params,
                                       shared,
                                       queries + S::SPLITS * S::QUERY_SPLIT,
                                       part.keys_begin,
                                       head / params.p.group,
                                       part.keys,
                                       (part.keys + KEYS - 1) / KEYS};
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&shared.queries_full), 1);
        for (int which = 0; which < 2; ++which)
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(shared_address(&shared.full[which][stage]), 1);
                shared.done[which][stage] = 0;
            }
        fence_mbarrier_init();
        fence_proxy_async(); // makes the barriers visible to the TMA copies below
        if (tiles.count > 0) {
            const unsigned full = shared_address(&shared.queries_full);
            const int boxes = (part.rows + BOX - 1) / BOX;
            mbarrier_arrive_expect_tx(full, S::SPLITS * boxes * BOX * LINE);
            for (int split = 0; split < S::SPLITS; ++split)
                copy_boxes<EVICT_FIRST>(queries + split * S::QUERY_SPLIT, params.q_map, split * COLUMNS, head,
                                        part.first, boxes, full);
        }
        for (int n = 0; n < min(tiles.count, STAGES); ++n) tiles.start(0, n), tiles.start(1, n);
    }
    __syncthreads(); // the barriers are initialized
    // The shuffle tells the compiler that the warp index is the same in all lanes.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32), 0), index = warp / 4;
    if (index * 64 >= part.rows) return;
    Warpgroup<T, DIM, WARPGROUPS, TURNS> own{params,
                                             part,
                                             tiles,
                                             queries + index * 64 * LINE,
                                             index,
                                             min((part.rows + 63) / 64, WARPGROUPS),
                                             int(threadIdx.x % 32),
                                             warp % 4,
                                             warp * 16};
    own.attend();
    own.store(head);
#endif
}
