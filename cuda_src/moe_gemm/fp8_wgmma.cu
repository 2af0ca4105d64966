// Grouped GEMM (moe_gemm/params.cuh) in FP8 (e4m3) on Hopper, by TMA and wgmma, with row scales or block scales
// (BLOCK_SCALED).
//
// Grid: CLUSTER * (resident clusters) persistent blocks, one per multiprocessor. A tile is TOKENS rows of a group times
// 128 rows of weights (gated: 64 gate rows and their up rows). The blocks of a cluster have neighbouring weights and
// the same rows; each block multicasts some of the rows.
//
//   warp 8          TMA producer: 128 bytes along k per stage, in a ring of STAGES stages
//   warps 9 to 11   BLOCK_SCALED: write row scales times weight scales to the same stages, 128 rows per warp
//                   (TOKENS = 288: 96)
//   warpgroup 0, 1  multiplies every second block of 64 rows of a tile, and writes the result
//
// Tails. With TOKENS = 288 the last tile of a group has up to 288 rows, and the other tiles have 256. The rows after
// row 256 are the tail, with swapped operands: each warpgroup has 64 rows of weights as M and the 32 rows of the tail
// as N, so that the sums fit in the registers. With random routing of about 256 rows per expert, a group often has a
// few rows more than its full tiles. A separate tile for them would read all weights of the expert again.
//
// FP8 tensor cores align the products of an MMA to the largest product, and lose bits of their sum. So they sum only
// 128 elements along k. This sum times its scale is added to a float32 total. While one warpgroup adds, the MMAs of the
// other run. Blocks of 64 rows past the end of the group are neither loaded nor multiplied.
//
// Speed of light: up to about 200 rows per expert it is the time to read the weights, above that the time of
// `2 * rows * n * k` operations at the FP8 rate. The percentages are this second time divided by the measured time, on
// an H200, with `n = 4096`, `k = 7168` unless noted. Lines with "about" have random routing:
//
//   8 x 1024 rows                        84% with block scales, 88% with row scales
//   4 x 8192 rows                        87%
//   4 x 256 rows                         74%; with n = 7168, k = 2048 56%, in 33 us
//   32 groups of about 256 rows          429 us with tails, 493 us without (without SEPARATE_ODD: 437 us, 547 us)
//   about 1024 rows, n = 7168, k = 2048  826 us with tails, 830 us without
#include "common/fp8.cuh"
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/fp8_scales.cuh"
#include "moe_gemm/fp8_store.cuh"
#include "moe_gemm/fp8_tiles.cuh"

// Run the TMA producer warp. A tile's first stage carries its description (shared.tiles). A description with 0 rows
// ends the consumers' loops.
template <class Layout>
__device__ __forceinline__ void load_fp8_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                               unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, CLUSTER = Layout::CLUSTER, STAGES = Layout::STAGES;
    constexpr int BOX = Layout::LOADED_ROWS, BOX_BYTES = BOX * FP8_K;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, half = p.n / 2;
    Fp8Tiles<Layout> tiles(p, shared.groups[0]);
    unsigned used = 0;
    // Wait until all blocks of the cluster have released a stage, because all receive this block's rows.
    auto wait_empty = [&](int stage) { mbarrier_wait(shared_address(&shared.empty[stage]), used / STAGES + 1); };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const unsigned before = used;
        if (lane == 0) {
            const int boxes = (tile.z + BOX - 1) / BOX, bytes = boxes * BOX_BYTES + FP8_WEIGHT_BYTES;
#pragma unroll 1
            for (int i = 0; i < k_blocks; ++i, ++used) {
                const int stage = used % STAGES, k = i * FP8_K;
                const unsigned to = ring + stage * Layout::STAGE_BYTES, weights = to + TOKENS * FP8_K;
                const unsigned full = shared_address(&shared.full[stage]);
                wait_empty(stage);
                if (i == 0) shared.tiles[stage] = tile;
                mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll 1
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const int row = tile.y + box * BOX;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(to + box * BOX_BYTES, p.a_map, k, row, 0, 0, full);
                    else
                        tma_load_multicast((1 << CLUSTER) - 1, to + box * BOX_BYTES, p.a_map, k, row, 0, 0, full);
                }
                tma_load<EVICT_NORMAL>(weights, p.b_map, k, tile.w, tile.x, 0, full);
                if constexpr (Layout::GATED)
                    tma_load<EVICT_NORMAL>(weights + FP8_WEIGHT_BYTES / 2, p.b_map, k, half + tile.w, tile.x, 0, full);
            }
        }
        __syncwarp();
        used = before + k_blocks;
    }
    if (lane == 0) {
        const int stage = used % STAGES;
        wait_empty(stage);
        shared.tiles[stage].z = 0;
        mbarrier_arrive(shared_address(&shared.full[stage]));
    }
    __syncwarp();
}

// Row scale times weight scale, for a lane's two rows in a stage.
template <class Layout> struct Fp8BlockFactors {
    float factors[Layout::SCALE_SETS][2];

    __device__ __forceinline__ void load(unsigned scales, int block) {
#pragma unroll
        for (int set = 0; set < Layout::SCALE_SETS; ++set)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                factors[set][i] = load_shared_float(scales + (set * Layout::TOKENS + block * 2 * FP8_BOX + i * 8) * 4);
    }

    __device__ __forceinline__ void add(float (&total)[64], const float (&sums)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; ++i)
            total[i] = fmaf(sums[i], factors[Layout::SCALE_SETS > 1 ? i / 32 : 0][i / 2 % 2], total[i]);
    }
};

struct Fp8NoFactors {
    __device__ __forceinline__ void load(unsigned, int) {}

    __device__ __forceinline__ void add(float (&total)[64], const float (&sums)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; ++i) total[i] += sums[i];
    }
};

template <bool BLOCK_SCALED, class Layout> struct Fp8FactorsOf {
    using Type = Fp8BlockFactors<Layout>;
};
template <class Layout> struct Fp8FactorsOf<false, Layout> {
    using Type = Fp8NoFactors;
};

// Start the MMAs of 64 rows by a stage's weights. `rows`, `weights`: lower halves of descriptors.
__device__ __forceinline__ void start_fp8_products(float (&sums)[64], unsigned rows, unsigned weights) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < FP8_K / 32; ++i)
        wgmma_k_major<__nv_fp8_e4m3>(sums, k_major_descriptor_of(rows + i * 2), k_major_descriptor_of(weights + i * 2),
                                     i > 0);
    wgmma_commit_group();
}

// MMAs that multiply 64 rows of a stage's weights (M) by a tail (N). `weights`, `tail`: lower halves of descriptors.
struct Fp8Tail {
    float (&sums)[FP8_TAIL / 2];
    float factors[FP8_TAIL / 8][2];

    // Reuse the registers of `others`. These sums are already added to their total.
    __device__ __forceinline__ Fp8Tail(float (&others)[64]) : sums(reinterpret_cast<float (&)[FP8_TAIL / 2]>(others)) {}

    // `scales`: shared address of the scales of the lane's first two rows of the tail.
    __device__ __forceinline__ void load(unsigned scales) {
#pragma unroll
        for (int j = 0; j < FP8_TAIL / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) factors[j][i] = load_shared_float(scales + (j * 8 + i) * 4);
    }

    __device__ __forceinline__ void start(unsigned weights, unsigned tail) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < FP8_K / 32; ++i)
            wgmma_k_major<__nv_fp8_e4m3>(sums, k_major_descriptor_of(weights + i * 2),
                                         k_major_descriptor_of(tail + i * 2), i > 0);
        wgmma_commit_group();
    }

    __device__ __forceinline__ void add(float (&total)[FP8_TAIL / 2]) const {
#pragma unroll
        for (int i = 0; i < FP8_TAIL / 2; ++i) total[i] = fmaf(sums[i], factors[i / 4][i % 2], total[i]);
    }
};

template <int N> __device__ __forceinline__ void clear(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = 0.f;
}

// Release a stage in every block of the cluster. The stage's MMAs must be complete, and a __syncwarp must follow the
// warp's last read of the stage's scales. `empty`: lane i passes the stage's empty barrier in block i of the cluster.
template <int CLUSTER> __device__ __forceinline__ void release_fp8_stage(unsigned empty) {
    if (threadIdx.x % 32 < CLUSTER) {
        if constexpr (CLUSTER == 1)
            mbarrier_arrive(empty);
        else
            mbarrier_arrive_cluster(empty);
    }
}

// Assemble a tile; each lane passes field `lane % 4`. The shuffles make the tile warp-uniform.
__device__ __forceinline__ Fp8Tile tile_of_fields(int field) {
    return make_int4(__shfl_sync(FULL_WARP, field, 0), __shfl_sync(FULL_WARP, field, 1),
                     __shfl_sync(FULL_WARP, field, 2), __shfl_sync(FULL_WARP, field, 3));
}

// Run a consumer warpgroup. It multiplies blocks `side`, `side + 2`, ... of 64 rows of each tile by the tile's weights,
// and the tail by 64 rows of weights.
template <typename T, class Layout>
__device__ __forceinline__ void multiply_fp8_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                   unsigned ring, int side) {
    constexpr int CLUSTER = Layout::CLUSTER, BLOCKS = Layout::ROW_BLOCKS; // BLOCKS: of 64 rows
    constexpr int TAIL = Layout::TAIL, ROWS_BEFORE_TAIL = BLOCKS * 2 * FP8_BOX;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K;
    const int first_row = side * FP8_BOX + warp % 4 * 16;
    const unsigned staged = ring + Layout::STAGED + warp * Layout::STAGED_BYTES;
    // Addresses in stage 0. `tokens`: lower half of a descriptor. `empty`: lane i has the address of the barrier in
    // block i of the cluster.
    const unsigned tokens = unsigned(k_major_descriptor(ring + side * FP8_BOX_BYTES));
    const unsigned weights_offset = (Layout::TOKENS * FP8_K - side * FP8_BOX_BYTES) / 16;
    const unsigned scales = ring + Layout::SCALES + (first_row + lane / 4) * 4;
    const unsigned empty =
        CLUSTER == 1 ? shared_address(&shared.empty[0]) : map_shared_rank(&shared.empty[0], lane % CLUSTER);
    // Bytes from `scales` to the scales of the lane's first two rows of a tail.
    const unsigned tail_scales_offset = (ROWS_BEFORE_TAIL + lane % 4 * 2 - first_row - lane / 4) * 4;
    int stage = 0, phase = 0;
    unsigned tokens_here = tokens, scales_here = scales; // in the current stage
    auto advance = [&] {
        const bool wraps = stage == Layout::STAGES - 1;
        stage = wraps ? 0 : stage + 1, phase ^= wraps;
        tokens_here = tokens + stage * (Layout::STAGE_BYTES / 16);
        scales_here = scales + stage * Layout::SCALE_BYTES;
    };
    auto wait_full = [&] { mbarrier_wait(shared_address(&shared.full[stage]), phase); };
    for (;;) {
        wait_full();
        // Each lane keeps only one field of the tile, because registers are scarce.
        const int field = reinterpret_cast<const int*>(&shared.tiles[stage])[lane % 4];
        // The reduction makes `rows` and the stage warp-uniform.
        const int rows = __reduce_max_sync(FULL_WARP, lane % 4 == 2 ? field : 0);
        if (rows == 0) break;
        float total[BLOCKS][64], sums[64], tail_total[FP8_TAIL / 2];
        // Multiply a block of 64 rows; after the `last` block of a stage, release the stage.
        auto multiply = [&](int block, bool last) {
            typename Fp8FactorsOf<Layout::BLOCK_SCALED, Layout>::Type factors;
            factors.load(scales_here, block);
            if (last) __syncwarp();
            start_fp8_products(sums, tokens_here + block * (2 * FP8_BOX_BYTES / 16), tokens_here + weights_offset);
            const unsigned used = empty + stage * 8;
            if (last) advance();
            wgmma_wait_group<0>();
            wgmma_fence_operand(sums);
            if (last) release_fp8_stage<CLUSTER>(used);
            factors.add(total[block], sums);
        };
        // Multiply the tail by this side's 64 rows of weights and release the stage.
        auto multiply_tail = [&] {
            Fp8Tail tail(sums);
            tail.load(scales_here + tail_scales_offset);
            __syncwarp();
            // `tokens_here` is `64 * side` rows after the start of the tokens, and the weights follow the tokens. So
            // `tokens_here` plus the size of a stage's tokens is the address of this side's weights.
            tail.start(tokens_here + Layout::TOKENS * FP8_K / 16, tokens_here + weights_offset - TAIL * FP8_K / 16);
            const unsigned used = empty + stage * 8;
            advance();
            wgmma_wait_group<0>();
            wgmma_fence_operand(tail.sums);
            release_fp8_stage<CLUSTER>(used);
            tail.add(tail_total);
        };
        const int boxes = (rows + FP8_BOX - 1) / FP8_BOX, side_boxes = (boxes + 1 - side) / 2;
        if (TAIL && rows > ROWS_BEFORE_TAIL) {
            clear(total[0]), clear(total[BLOCKS - 1]), clear(tail_total);
#pragma unroll 1
            for (int left = k_blocks; left > 0; --left) {
                wait_full();
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) multiply(block, false);
                if constexpr (TAIL) multiply_tail();
            }
        } else if (side_boxes == BLOCKS) { // most tiles: no conditions in the loop
            clear(total[0]), clear(total[BLOCKS - 1]);
#pragma unroll 1
            for (int left = k_blocks; left > 0; --left) {
                wait_full();
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) multiply(block, block == BLOCKS - 1);
            }
        } else {
            // This warpgroup has at most one block of 64 rows.
            clear(total[0]);
#pragma unroll 1
            for (int left = k_blocks; left > 0; --left) {
                wait_full();
                if (BLOCKS > 1 && side_boxes > 0) {
                    multiply(0, true);
                } else {
                    __syncwarp();
                    release_fp8_stage<CLUSTER>(empty + stage * 8);
                    advance();
                }
            }
        }
        store_fp8_rows<T, Layout>(p, tile_of_fields(field), first_row, total[0], staged);
        if constexpr (BLOCKS > 1)
            store_fp8_rows<T, Layout>(p, tile_of_fields(field), first_row + 2 * FP8_BOX, total[1], staged);
        if constexpr (TAIL) {
            const Fp8Tile tile = tile_of_fields(field);
            if (rows > ROWS_BEFORE_TAIL) store_fp8_tail<T, Layout>(p, tile, tile.w + first_row, tail_total, staged);
        }
    }
}

template <typename, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
constexpr Launch gemm_fp8_wgmma_launch() {
    using Layout = Fp8Layout<TOKENS, CLUSTER, STAGES, BLOCK_SCALED, ACTIVATION>;
    return {FP8_THREADS, all_for(1024 - 16 + Layout::SHARED_OFFSET + int(sizeof(typename Layout::Shared))),
            Layout::LOADED_ROWS};
}

// T: type of the result. TOKENS: 128, 256 or 288. CLUSTER: 1 or 2 blocks.
template <typename T, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
__global__ CLUSTER_OF(CLUSTER)
    __launch_bounds__(FP8_THREADS, 1) void gemm_fp8_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Layout = Fp8Layout<TOKENS, CLUSTER, STAGES, BLOCK_SCALED, ACTIVATION>;
    // Registers per thread. The average is 168; consumers need more, producers less.
    constexpr int PRODUCER_REGISTERS = BLOCK_SCALED && !Layout::TAIL ? 56 : 40,
                  CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + padding;
    auto& shared = *reinterpret_cast<typename Layout::Shared*>(memory + padding + Layout::SHARED_OFFSET);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), 1 + Layout::SCALE_WARPS * 32);
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
        multiply_fp8_tiles<T, Layout>(p, shared, ring, warpgroup);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x % WARPGROUP / 32), 0);
        if (warp == 0)
            load_fp8_tiles<Layout>(p, shared, ring);
        else if constexpr (BLOCK_SCALED)
            if (warp <= Layout::SCALE_WARPS) load_fp8_scales<Layout>(p, shared, ring + Layout::SCALES, warp - 1);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
