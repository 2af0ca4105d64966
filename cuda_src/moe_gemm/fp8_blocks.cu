// First GEMM of a gated MoE layer in FP8 (e4m3) with block scales on Hopper, by TMA and wgmma, with fused activation
// and quantization.
//
//   y[r, j] = activate(T(x[r, j]), T(x[r, n / 2 + j]))       x: see moe_gemm/params.cuh; T() rounds to T
//   out_scale[r, g] = max |y[r, group g of 128]| / 448,  out[r, j] = e4m3 of y[r, j] / out_scale[r, j / 128]
//
// The result is bit-identical to gemm_fp8_wgmma followed by quantize_groups.
//
// Grid: CLUSTER * (resident clusters) persistent blocks, one per multiprocessor. A tile is 128 rows times 128 gate rows
// of the weights and their 128 up rows. The blocks of a cluster have neighbouring rows and the same weights; with
// CLUSTER = 2, each block multicasts half of the weights.
//
//   warp 8          TMA producer: 128 bytes along k per stage, in a ring of STAGES stages
//   warp 9          writes the scales of the rows times the scales of the weights to the same stages
//   warpgroup 0, 1  multiplies 64 rows of a tile by the gate rows and then by the up rows, and writes the result
//
// The limits are the tensor cores and the bandwidth of shared memory (128 bytes per cycle). With both operands in
// shared memory, the MMAs would read 96 bytes per cycle, while TMA writes 48. So a warpgroup loads its rows to
// registers once for gates and ups, which leaves 80 bytes of reads per cycle. While it adds the sums of 128 elements
// along k to its totals, the MMAs of the other warpgroup run. With CLUSTER > 1 the warpgroups start their MMAs
// alternately, which saves 5% of the time for 4 groups of 8192 rows.
//
// Speed of light: as for gemm_fp8_wgmma, but the result has half the bytes. Times on an H200 with n = 4096, k = 7168,
// for groups x rows per group:
//
//                                   this kernel   gemm_fp8_wgmma, activation, quantization
//   4 x 8192 rows                   1525 us       1543 us
//   8 x 1024 rows                   378 us        387 us
//   32 x 1024 rows, random routing  1634 us       1692 us
//
// For 32 x 256 rows with random routing, gemm_fp8_wgmma takes 429 us without the activation, and this kernel takes 508
// us with it. gemm_fp8_wgmma is faster because of its tails (fp8_wgmma.cu). Without SEPARATE_ODD (Fp8Tiles), 32 x 256
// rows would take 557 us, and 32 x 1024 rows 1665 us.
#include "common/fp8.cuh"
#include "common/launch.cuh"
#include "moe_gemm/fp8_blocks_products.cuh"
#include "moe_gemm/fp8_blocks_store.cuh"
#include "moe_gemm/fp8_scales.cuh"

// Run the TMA producer warp. A tile's first stage carries its description (shared.tiles). A description with -1 rows
// ends the consumers' loops.
template <class Layout>
__device__ __forceinline__ void load_block_tiles(const Fp8BlocksParams& p, typename Layout::Shared& shared,
                                                 unsigned ring) {
    constexpr int CLUSTER = Layout::CLUSTER, STAGES = Layout::STAGES;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, half_n = p.n / 2;
    Fp8BlocksTiles<Layout, 0> tiles(p, shared.groups[0]);
    unsigned used = 0;
    // Wait until all blocks of the cluster have released a stage, because all receive this block's weights.
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

// TURNS: the two consumer warpgroups start their MMAs alternately. Warpgroup `side` waits for its turn at named barrier
// `1 + side`, and passes the turn to the other warpgroup by an arrival at barrier `2 - side`.
template <bool TURNS> struct Fp8Turns {
    const int side;

    __device__ __forceinline__ void begin() const {
        if (TURNS && side == 1) pass();
    }

    __device__ __forceinline__ void wait() const {
        if constexpr (TURNS) asm volatile("bar.sync %0, %1;" ::"r"(1 + side), "n"(2 * WARPGROUP) : "memory");
    }

    __device__ __forceinline__ void pass() const {
        if constexpr (TURNS) asm volatile("bar.arrive %0, %1;" ::"r"(2 - side), "n"(2 * WARPGROUP) : "memory");
    }

    // Wait for the last arrival of warpgroup 1, because a barrier must have no pending arrivals when the kernel ends.
    __device__ __forceinline__ void end() const {
        if (TURNS && side == 0) wait();
    }
};

template <class Layout> struct Fp8BlocksRing {
    typename Layout::Shared& shared;
    const unsigned rows, weights, scales, empty; // in stage 0; rows: for ldmatrix
    int stage = 0, phase = 0;

    __device__ __forceinline__ Fp8BlocksRing(typename Layout::Shared& shared, unsigned ring)
        : shared(shared), rows(ring + (first_row() + lane() % 16) * FP8_K + (lane() / 16 ^ lane() % 8) * 16),
          weights(unsigned(k_major_descriptor(ring + Layout::ROW_BYTES))),
          scales(ring + Layout::SCALES + (first_row() + lane() / 4) * 4),
          // Lane i has the address of the barrier in block i of the cluster.
          empty(Layout::CLUSTER == 1 ? shared_address(&shared.empty[0])
                                     : map_shared_rank(&shared.empty[0], lane() % Layout::CLUSTER)) {}

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * 16; }

    __device__ __forceinline__ void wait_full() const { mbarrier_wait(shared_address(&shared.full[stage]), phase); }

    __device__ __forceinline__ void advance() {
        const bool wraps = stage == Layout::STAGES - 1;
        stage = wraps ? 0 : stage + 1, phase ^= wraps;
    }

    __device__ __forceinline__ unsigned releases() const { return empty + stage * 8; }

    // Release a stage in every block of the cluster. The stage's MMAs must be complete, and a __syncwarp must follow
    // the warp's last read of the stage's scales.
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

    // Return the lower half of the descriptor of the gate rows (`half` 0) or up rows (`half` 1).
    __device__ __forceinline__ unsigned operand(int half) const {
        return weights + stage * (Layout::STAGE_BYTES / 16) + half * (FP8_WEIGHT_BYTES / 16);
    }
};

// Multiply the 64 rows of a warpgroup by all weights of a tile. The tile's first stage must be full.
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
        // Load the next stage before the additions, which hide the latency of the loads. After the last stage the
        // loaded values are unused.
        ring.load(fragments, factors);
        add_block_products(total[1], sums, scales);
    }
}

// Run a consumer warpgroup. It multiplies rows `64 * side` to `64 * side + 63` of each tile.
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
        // Each lane keeps only one field of the tile, because registers are scarce.
        const int field = reinterpret_cast<const int*>(&shared.tiles[ring.stage])[lane % 4];
        // The reduction makes `rows` and the stage warp-uniform.
        const int rows = __reduce_max_sync(FULL_WARP, lane % 4 == 2 ? field : -1);
        if (rows < 0) break;
        if (rows > side * FP8_BOX) {
            float total[2][64];
            multiply_block_tile(ring, turns, total, k_blocks);
            const Fp8Tile tile = make_int4(0, __shfl_sync(FULL_WARP, field, 1), rows, __shfl_sync(FULL_WARP, field, 3));
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
    // The block must not exit before the bulk copies are complete.
    bulk_wait<0>();
}

template <typename, int CLUSTER, int ACTIVATION> constexpr Launch gemm_fp8_blocks_launch() {
    using Layout = Fp8BlocksLayout<CLUSTER, ACTIVATION>;
    return {FP8_THREADS, all_for(1024 - 16 + Layout::SHARED_OFFSET + int(sizeof(typename Layout::Shared)))};
}

// T: the type to which the sums are rounded. CLUSTER: 1 or 2 blocks.
template <typename T, int CLUSTER, int ACTIVATION>
__global__ CLUSTER_OF(CLUSTER)
    __launch_bounds__(FP8_THREADS, 1) void gemm_fp8_blocks(const __grid_constant__ Fp8BlocksParams p) {
#if HAS_WGMMA
    using Layout = Fp8BlocksLayout<CLUSTER, ACTIVATION>;
    // Registers per thread. The average is 168; consumers need more, producers less.
    constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + padding;
    auto& shared = *reinterpret_cast<typename Layout::Shared*>(memory + padding + Layout::SHARED_OFFSET);
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
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        multiply_block_tiles<T, Layout>(p, shared, ring, warpgroup);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x % WARPGROUP / 32), 0);
        if (warp == 0)
            load_block_tiles<Layout>(p, shared, ring);
        else if (warp == 1)
            load_fp8_scales<Layout, Fp8BlocksTiles<Layout, 1>>(p, shared, ring + Layout::SCALES, 0);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
