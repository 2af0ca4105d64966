// First GEMM of a gated MoE layer in FP8 (e4m3) with block scales on Hopper, by TMA and wgmma. It applies the
// activation and quantizes the result to FP8. A tile is 128 rows times 128 gate rows of the weights and their 128 up
// rows.
//
//   x[r, j] = sum over blocks c of 128 indices along k of
//                 a_scale[r, c] * b_scale[e, j / 128, c] * (sum over i of block c of a[r, i] * b[e, j, i])
//   y[r, j] = activate(T(x[r, j]), T(x[r, n / 2 + j]))       where T() rounds to T
//   out_scale[r, g] = max |y[r, group g of 128]| / 448,  out[r, j] = e4m3 of y[r, j] / out_scale[r, j / 128]
//
// for the rows r of the group of expert e. moe_gemm/params.cuh defines the groups. The result is bit-identical to
// gemm_fp8_wgmma followed by quantize_groups.
//
// Grid: CLUSTER * (number of resident clusters) persistent blocks of 384 threads, one block per multiprocessor. The
// blocks of a cluster have the same weights and neighbouring rows. In a cluster of two blocks, each block loads half of
// the weights and multicasts them to both blocks.
//
//   warp 8          finds tiles; copies 128 bytes along k per stage to a ring of STAGES stages, by TMA
//   warp 9          multiplies the scales of the rows by the scales of the weights, and writes them to the same stages
//   warpgroup 0, 1  multiplies 64 rows of a tile by the gate rows and then by the up rows, and writes the result
//
// Two resources limit the kernel: the tensor cores, and the bandwidth of shared memory (128 bytes per cycle). With both
// operands in shared memory, the MMAs of 64 rows and 128 rows of weights would read 96 bytes per cycle, while TMA
// writes 48 bytes per cycle. So a warpgroup loads its rows to registers once, for the gate rows and the up rows. This
// reduces the reads to 80 bytes per cycle. While one warpgroup adds the sums of 128 elements along k to its totals, the
// MMAs of the other warpgroup run. With CLUSTER > 1 the two warpgroups start their MMAs alternately, which saves 5% of
// the time for 4 groups of 8192 rows.
//
// Speed of light: as for gemm_fp8_wgmma, but the result has half the bytes. Times on an H200 with n = 4096, k = 7168:
//
//                                   this kernel   gemm_fp8_wgmma, activation, quantization
//   4 x 8192 rows                   1525 us       1543 us
//   8 x 1024 rows                   378 us        387 us
//   32 x 1024 rows, random routing  1634 us       1692 us
//
// For 32 x 256 rows with random routing gemm_fp8_wgmma is faster, because it multiplies a few extra rows as the tail of
// a tile: gemm_fp8_wgmma takes 429 us without the activation, and this kernel takes 508 us with it. Odd tiles (the
// short last tiles of groups) are distributed to the clusters separately, as Fp8Tiles explains. If all tiles were
// distributed together, 32 x 256 rows would take 557 us, and 32 x 1024 rows would take 1665 us.
#include "common/fp8.cuh"
#include "common/launch.cuh"
#include "moe_gemm/fp8_blocks_products.cuh"
#include "moe_gemm/fp8_blocks_store.cuh"
#include "moe_gemm/fp8_scales.cuh"

// Run the TMA producer warp. The first stage of a tile carries the tile's description (shared.tiles). A description
// with -1 rows ends the loop of the consumers.
template <class Layout>
__device__ __forceinline__ void load_block_tiles(const Fp8BlocksParams& p, typename Layout::Shared& shared,
                                                 unsigned ring) {
    constexpr int CLUSTER = Layout::CLUSTER, STAGES = Layout::STAGES;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, half_n = p.n / 2;
    Fp8BlocksTiles<Layout, 0> tiles(p, shared.groups[0]);
    unsigned used = 0;
    // The empty barrier counts the consumers of all blocks of the cluster, because this block's weights go to all of
    // them.
    auto wait_empty = [&](int stage) { mbarrier_wait(shared_address(&shared.empty[stage]), used / STAGES + 1); };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const unsigned before = used;
        if (lane == 0) {
            const int boxes = (tile.z + FP8_BOX - 1) / FP8_BOX, bytes = boxes * FP8_BOX_BYTES + 2 * FP8_WEIGHT_BYTES;
#pragma unroll 1
            for (int i = 0; i < k_blocks; ++i, ++used) {
                const int stage = used % STAGES, k = i * FP8_K;
                const unsigned to = ring + stage * Layout::STAGE_BYTES, weights = to + Layout::ROW_BYTES;
                const unsigned full = shared_address(&shared.full[stage]);
                wait_empty(stage);
                if (i == 0) shared.tiles[stage] = tile;
                mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
                for (int box = 0; box < 2; ++box)
                    if (box < boxes)
                        tma_load<EVICT_NORMAL>(to + box * FP8_BOX_BYTES, p.a_map, k, tile.y + box * FP8_BOX, 0, 0,
                                               full);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned here = weights + half * FP8_WEIGHT_BYTES;
                    const int row = tile.w + half * half_n;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(here, p.b_map, k, row, tile.x, 0, full);
                    else if (half == rank)
                        tma_load_multicast((1 << CLUSTER) - 1, here, p.b_map, k, row, tile.x, 0, full);
                }
            }
        }
        __syncwarp();
        used = before + k_blocks;
    }
    if (lane == 0) {
        const int stage = used % STAGES;
        wait_empty(stage);
        shared.tiles[stage].z = -1;
        mbarrier_arrive(shared_address(&shared.full[stage]));
    }
    __syncwarp();
}

// If TURNS, the two consumer warpgroups start their MMAs alternately, ordered by named barriers. Warpgroup `side` waits
// for its turn at barrier `1 + side`. To give the turn to the other warpgroup, it arrives at that warpgroup's barrier,
// `2 - side`.
template <bool TURNS> struct Fp8Turns {
    const int side;

    // Give warpgroup 0 the first turn.
    __device__ __forceinline__ void begin() const {
        if (TURNS && side == 1) pass();
    }

    __device__ __forceinline__ void wait() const {
        if constexpr (TURNS) asm volatile("bar.sync %0, %1;" ::"r"(1 + side), "n"(2 * WARPGROUP) : "memory");
    }

    __device__ __forceinline__ void pass() const {
        if constexpr (TURNS) asm volatile("bar.arrive %0, %1;" ::"r"(2 - side), "n"(2 * WARPGROUP) : "memory");
    }

    // At the end, warpgroup 0 waits for the last arrival of warpgroup 1, so that the barrier is left without pending
    // arrivals.
    __device__ __forceinline__ void end() const {
        if (TURNS && side == 0) wait();
    }
};

// A consumer warpgroup's position in the ring, and the addresses of a lane's operands.
template <class Layout> struct Fp8BlocksRing {
    typename Layout::Shared& shared;
    const unsigned rows, weights, scales, empty; // addresses in stage 0; rows: for ldmatrix
    int stage = 0, phase = 0;

    __device__ __forceinline__ Fp8BlocksRing(typename Layout::Shared& shared, unsigned ring)
        : shared(shared), rows(ring + (first_row() + lane() % 16) * FP8_K + (lane() / 16 ^ lane() % 8) * 16),
          weights(unsigned(k_major_descriptor(ring + Layout::ROW_BYTES))),
          scales(ring + Layout::SCALES + (first_row() + lane() / 4) * 4),
          // Lane i has the address of the empty barrier in block i of the cluster.
          empty(Layout::CLUSTER == 1 ? shared_address(&shared.empty[0])
                                     : map_shared_rank(&shared.empty[0], lane() % Layout::CLUSTER)) {}

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * 16; } // first of the warp's 16

    __device__ __forceinline__ void wait_full() const { mbarrier_wait(shared_address(&shared.full[stage]), phase); }

    __device__ __forceinline__ void advance() {
        const bool wraps = stage == Layout::STAGES - 1;
        stage = wraps ? 0 : stage + 1, phase ^= wraps;
    }

    // Return the address of the current stage's empty barrier, in the block of the cluster in which this lane arrives.
    __device__ __forceinline__ unsigned releases() const { return empty + stage * 8; }

    // Release a stage: arrive at its empty barrier in every block of the cluster. Call this after the stage's MMAs are
    // complete, and after a __syncwarp that follows the warp's last read of the stage's scales.
    static __device__ __forceinline__ void release(unsigned barrier) {
        if (lane() < Layout::CLUSTER) {
            if constexpr (Layout::CLUSTER == 1)
                mbarrier_arrive(barrier);
            else
                mbarrier_arrive_cluster(barrier);
        }
    }

    // Load the A fragments of the current stage, and the factors of its sums: row scale times weight scale.
    __device__ __forceinline__ void load(unsigned (&fragments)[4][4], float (&factors)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) ldmatrix(fragments[i], (rows + stage * Layout::STAGE_BYTES) ^ i * 32);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                factors[half][i] =
                    load_shared_float(scales + stage * Layout::SCALE_BYTES + (half * Layout::TOKENS + i * 8) * 4);
    }

    // Return the lower half of the descriptor of the current stage's gate rows (`half` 0) or up rows (`half` 1).
    __device__ __forceinline__ unsigned operand(int half) const {
        return weights + stage * (Layout::STAGE_BYTES / 16) + half * (FP8_WEIGHT_BYTES / 16);
    }
};

// Multiply the 64 rows of a warpgroup by all weights of a tile. The first stage of the tile is already full.
template <class Layout, class Turns>
__device__ __forceinline__ void multiply_block_tile(Fp8BlocksRing<Layout>& ring, const Turns& turns,
                                                    float (&total)[2][64], int k_blocks) {
    float sums[64], factors[2][2];
    unsigned fragments[4][4];
#pragma unroll
    for (int i = 0; i < 64; ++i) total[0][i] = total[1][i] = 0.f;
    ring.load(fragments, factors);
#pragma unroll 1
    for (int left = k_blocks; left > 0; --left) {
        turns.wait();
        start_block_products(sums, fragments, ring.operand(0));
        turns.pass();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        add_block_products(total[0], sums, factors[0]);
        __syncwarp();
        turns.wait();
        start_block_products(sums, fragments, ring.operand(1));
        turns.pass();
        const unsigned used = ring.releases();
        const float scales[2] = {factors[1][0], factors[1][1]};
        ring.advance();
        if (left > 1) ring.wait_full();
        wgmma_wait_group<0>();
        wgmma_fence_operand(sums);
        ring.release(used);
        // Load the fragments of the next stage before the additions, which hide the latency of the loads. After the
        // last stage the loaded values are unused.
        ring.load(fragments, factors);
        add_block_products(total[1], sums, scales);
    }
}

// Run a consumer warpgroup. It computes rows `64 * side` to `64 * side + 63` of each tile, if the tile has such rows.
template <typename T, class Layout>
__device__ __forceinline__ void multiply_block_tiles(const Fp8BlocksParams& p, typename Layout::Shared& shared,
                                                     unsigned start, int side) {
    const int lane = threadIdx.x % 32, k_blocks = (p.k + FP8_K - 1) / FP8_K;
    const unsigned staged = start + Layout::STAGED + threadIdx.x / 32 * Layout::STAGED_BYTES;
    Fp8BlocksRing<Layout> ring(shared, start);
    const Fp8Turns<(Layout::CLUSTER > 1)> turns{side};
    turns.begin();
    for (;;) {
        ring.wait_full();
        // A lane keeps only field `lane % 4` of the tile, because registers are scarce.
        const int part = reinterpret_cast<const int*>(&shared.tiles[ring.stage])[lane % 4];
        // The reduction tells the compiler that `rows`, and so the stage, is warp-uniform.
        const int rows = __reduce_max_sync(FULL_WARP, lane % 4 == 2 ? part : -1);
        if (rows < 0) break;
        if (rows > side * FP8_BOX) {
            float total[2][64];
            multiply_block_tile(ring, turns, total, k_blocks);
            const Fp8Tile tile = make_int4(0, __shfl_sync(FULL_WARP, part, 1), rows, __shfl_sync(FULL_WARP, part, 3));
            store_activated_rows<T, Layout>(p, tile, ring.first_row(), total, staged);
        } else {
#pragma unroll 1
            for (int k = 0; k < k_blocks; ++k) {
                ring.wait_full();
                turns.wait(), turns.pass();
                turns.wait(), turns.pass();
                __syncwarp();
                ring.release(ring.releases());
                ring.advance();
            }
        }
    }
    turns.end();
    // The block must not exit before the bulk copies of its staged rows are complete.
    bulk_wait<0>();
}

template <typename, int CLUSTER, int ACTIVATION> constexpr Launch gemm_fp8_blocks_launch() {
    using Layout = Fp8BlocksLayout<CLUSTER, ACTIVATION>;
    return {FP8_THREADS, all_for(1024 - 16 + Layout::REST + int(sizeof(typename Layout::Shared)))};
}

// T: __nv_bfloat16 or __half; the sums are rounded to T. CLUSTER: 1 or 2 blocks. ACTIVATION: see common/activation.cuh.
template <typename T, int CLUSTER, int ACTIVATION>
__global__ CLUSTER_OF(CLUSTER)
    __launch_bounds__(FP8_THREADS, 1) void gemm_fp8_blocks(const __grid_constant__ Fp8BlocksParams p) {
#if HAS_WGMMA
    using Layout = Fp8BlocksLayout<CLUSTER, ACTIVATION>;
    // Registers per thread are 168 on average. The producer warpgroup gives most of its registers to the consumers.
    constexpr int LOADING = 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + misplaced;
    auto& shared = *reinterpret_cast<typename Layout::Shared*>(memory + misplaced + Layout::REST);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Layout::STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), 1 + 32);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * 2 * WARPGROUP / 32);
        }
        fence_mbarrier_init();
    } else if (threadIdx.x == 2 * WARPGROUP) {
        prefetch_tensormap(p.a_map), prefetch_tensormap(p.b_map);
    }
    __syncthreads();
    // No block may access the shared memory of a block that has not started or has exited.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
    // The shuffle tells the compiler that the value is warp-uniform.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    if (warpgroup < 2) {
        setmaxnreg_inc<COMPUTING>();
        multiply_block_tiles<T, Layout>(p, shared, ring, warpgroup);
    } else {
        setmaxnreg_dec<LOADING>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x % WARPGROUP / 32), 0);
        if (warp == 0)
            load_block_tiles<Layout>(p, shared, ring);
        else if (warp == 1)
            load_fp8_scales<Layout, Fp8BlocksTiles<Layout, 1>>(p, shared, ring + Layout::SCALES, 0);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
