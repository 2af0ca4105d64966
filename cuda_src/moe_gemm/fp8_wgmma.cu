// ---- 8 bits, by warpgroups ----
//
// Groups of e4m3 rows times the e4m3 weights of their experts, on Hopper.
//
// BLOCK_SCALED: a_scale [rows, ceil(k / 128)], b_scale [experts, ceil(n / 128), ceil(k / 128)]. Else a_scale is one for each
// row or for all, b_scale one for each weight row or for each expert.
//
//   gemm_fp8_wgmma<...>     CLUSTER * (clusters that walk over the tiles) blocks of 384 threads, a multiprocessor each
//
// A tile is TOKENS rows of a group times 128 weight rows (64 gate and 64 up rows with ACTIVATION), and the blocks of a
// cluster have the same rows and neighbouring weights: each loads a part of the rows, for all. One warp finds tiles and
// loads 128 bytes along k at a time into a ring of STAGES, and with BLOCK_SCALED TOKENS / 128 more bring the products of the
// scales there, of 128 rows each; two warpgroups have every second 64 rows of the tile each. The tensor cores keep too few
// bits of a sum of 8-bit products, so theirs end every 128 bytes, and go on in float32. While a warpgroup adds, the products
// of the other run. 64 rows of which none is of the group are neither loaded nor multiplied.
#include "common/fp8.cuh"
#include "moe_gemm/fp8_scales.cuh"
#include "moe_gemm/fp8_store.cuh"
#include "moe_gemm/fp8_tiles.cuh"

// The warp that loads. The first stage of a tile brings which one it is.
template <int TOKENS, int CLUSTER, int STAGES, int ACTIVATION>
__device__ __forceinline__ void load_fp8_tiles(const MappedGemmParams& p, Fp8GemmShared<STAGES>& shared,
                                               unsigned ring) {
    constexpr int OUT_COLUMNS = ACTIVATION ? FP8_COLUMNS / 2 : FP8_COLUMNS;
    constexpr int STAGE_BYTES = TOKENS * FP8_K + FP8_WEIGHT_BYTES;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, half = p.n / 2;
    Fp8Tiles<TOKENS, CLUSTER, OUT_COLUMNS> tiles(p, shared.groups[0]);
    unsigned used = 0;
    // A stage is empty when no block of the cluster needs what it has: their copies come from here, too.
    auto wait_empty = [&](int stage) { barrier_wait(shared_address(&shared.empty[stage]), used / STAGES + 1); };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const unsigned before = used;
        if (lane == 0) {
            const int boxes = (tile.z + FP8_BOX - 1) / FP8_BOX, bytes = boxes * FP8_BOX_BYTES + FP8_WEIGHT_BYTES;
#pragma unroll 1
            for (int i = 0; i < k_blocks; ++i, ++used) {
                const int stage = used % STAGES, k = i * FP8_K;
                const unsigned to = ring + stage * STAGE_BYTES, weights = to + TOKENS * FP8_K;
                const unsigned full = shared_address(&shared.full[stage]);
                wait_empty(stage);
                if (i == 0) shared.tiles[stage] = tile;
                barrier_expect(full, bytes);
#pragma unroll 1
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const int row = tile.y + box * FP8_BOX;
                    if constexpr (CLUSTER == 1)
                        copy_tile<EVICT_NORMAL>(to + box * FP8_BOX_BYTES, p.a_map, k, row, 0, 0, full);
                    else
                        copy_tile_to((1 << CLUSTER) - 1, to + box * FP8_BOX_BYTES, p.a_map, k, row, 0, 0, full);
                }
                copy_tile<EVICT_NORMAL>(weights, p.b_map, k, tile.w, tile.x, 0, full);
                if constexpr (ACTIVATION != 0)
                    copy_tile<EVICT_NORMAL>(weights + FP8_WEIGHT_BYTES / 2, p.b_map, k, half + tile.w, tile.x, 0, full);
            }
        }
        __syncwarp();
        used = before + k_blocks;
    }
    if (lane == 0) {
        const int stage = used % STAGES;
        wait_empty(stage);
        shared.tiles[stage].z = 0;
        barrier_arrive(shared_address(&shared.full[stage]));
    }
    __syncwarp();
}

// An operand along the sum, as along_the_sum describes it, from the lower half of that. Only this half has to be computed.
__device__ __forceinline__ unsigned long long fp8_operand(unsigned lower) {
    unsigned long long operand;
    asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(lower), "r"(1u << 30 | 64u));
    return operand;
}

// A warpgroup that computes.
template <typename T, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
__device__ __forceinline__ void multiply_fp8_tiles(const MappedGemmParams& p, Fp8GemmShared<STAGES>& shared,
                                                   unsigned ring, int side) {
    using Layout = Fp8GemmLayout<TOKENS, STAGES, BLOCK_SCALED, ACTIVATION>;
    constexpr int BLOCKS = TOKENS / (2 * FP8_BOX); // of 64 rows, of a warpgroup
    constexpr int SETS = Layout::SETS, PIECES = FP8_K / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K;
    const int first_row = side * FP8_BOX + warp % 4 * 16; // of this warp, in the first block
    const unsigned staged = ring + Layout::STAGED + warp * Layout::STAGED_BYTES;
    // In the first stage: the operands, the scales of this lane's rows, the barrier to free it (of every block of the cluster).
    const unsigned tokens = unsigned(along_the_sum(ring + side * FP8_BOX_BYTES));
    const unsigned further_weights = (TOKENS * FP8_K - side * FP8_BOX_BYTES) / 16;
    const unsigned scales = ring + Layout::SCALES + (first_row + lane / 4) * 4;
    const unsigned empty =
        CLUSTER == 1 ? shared_address(&shared.empty[0]) : address_in(&shared.empty[0], lane % CLUSTER);
    int stage = 0, phase = 0;
    unsigned tokens_here = tokens, scales_here = scales; // in this stage
    auto advance = [&] {
        const bool wraps = stage == STAGES - 1;
        stage = wraps ? 0 : stage + 1, phase ^= wraps;
        tokens_here = tokens + stage * (Layout::STAGE_BYTES / 16);
        scales_here = scales + stage * Layout::SCALE_BYTES;
    };
    auto wait_full = [&] { barrier_wait(shared_address(&shared.full[stage]), phase); };
    // When the products have been waited for, and after a __syncwarp behind the last read of a scale.
    auto release = [&](unsigned used) {
        if (lane < CLUSTER) {
            if constexpr (CLUSTER == 1)
                barrier_arrive(used);
            else
                barrier_arrive_in(used);
        }
    };
    // From one lane, so that the compiler knows that it is the same in all.
    auto tile_of = [&](int part) {
        return make_int4(__shfl_sync(FULL_WARP, part, 0), __shfl_sync(FULL_WARP, part, 1),
                         __shfl_sync(FULL_WARP, part, 2), __shfl_sync(FULL_WARP, part, 3));
    };
    for (;;) {
        wait_full();
        // Held by four neighbouring lanes each, as registers are scarce.
        const int part = reinterpret_cast<const int*>(&shared.tiles[stage])[lane % 4];
        // By a reduction, so that the compiler knows that it is the same in all lanes, and with it the stage.
        const int rows = __reduce_max_sync(FULL_WARP, lane % 4 == 2 ? part : 0);
        if (rows == 0) break;
        float total[BLOCKS][64], sums[64];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < 64; ++i) total[block][i] = 0.f;
        // Of 64 rows. The last of a stage frees it and goes on to the next.
        auto multiply = [&](int block, bool last) {
            float factors[SETS][2];
            if constexpr (BLOCK_SCALED) {
#pragma unroll
                for (int set = 0; set < SETS; ++set)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        factors[set][i] =
                            fp8_load_scale(scales_here + (set * TOKENS + block * 2 * FP8_BOX + i * 8) * 4);
            }
            if (last) __syncwarp();
            products_begin();
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                multiply_tiles<__nv_fp8_e4m3>(sums, fp8_operand(tokens_here + block * (2 * FP8_BOX_BYTES / 16) + i * 2),
                                              fp8_operand(tokens_here + further_weights + i * 2), i > 0);
            products_commit();
            const unsigned used = empty + stage * 8;
            if (last) advance();
            products_wait<0>();
            pin(sums);
            if (last) release(used);
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if constexpr (BLOCK_SCALED)
                    total[block][i] = fmaf(sums[i], factors[SETS > 1 ? i / 32 : 0][i / 2 % 2], total[block][i]);
                else
                    total[block][i] += sums[i];
        };
        const int boxes = (rows + FP8_BOX - 1) / FP8_BOX, mine = (boxes + 1 - side) / 2;
        if (mine == BLOCKS) { // most tiles, without conditions
#pragma unroll 1
            for (int k = 0; k < k_blocks; ++k) {
                wait_full();
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) multiply(block, block == BLOCKS - 1);
            }
        } else {
            // No more than one block.
#pragma unroll 1
            for (int k = 0; k < k_blocks; ++k) {
                wait_full();
                if (BLOCKS > 1 && mine > 0) {
                    multiply(0, true);
                } else {
                    __syncwarp();
                    release(empty + stage * 8);
                    advance();
                }
            }
        }
        store_fp8_rows<T, BLOCK_SCALED, ACTIVATION>(p, tile_of(part), first_row, total[0], staged);
        if constexpr (BLOCKS > 1)
            store_fp8_rows<T, BLOCK_SCALED, ACTIVATION>(p, tile_of(part), first_row + 2 * FP8_BOX, total[1], staged);
    }
}

// T: of the output. TOKENS: 256 or 128. CLUSTER: 1 or 2.
template <typename T, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
__global__ CLUSTER_OF(CLUSTER)
    __launch_bounds__(FP8_THREADS, 1) void gemm_fp8_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    using Layout = Fp8GemmLayout<TOKENS, STAGES, BLOCK_SCALED, ACTIVATION>;
    // 168 for each of 384 threads, dealt out anew.
    constexpr int LOADING = BLOCK_SCALED ? 56 : 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned ring = shared_address(memory) + misplaced;
    auto& shared = *reinterpret_cast<Fp8GemmShared<STAGES>*>(memory + misplaced + Layout::REST);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1 + Layout::SCALE_WARPS * FP8_ARRIVING);
            barrier_init(shared_address(&shared.empty[i]), CLUSTER * 2 * WARPGROUP / 32);
        }
        barriers_ready();
    } else if (threadIdx.x == 2 * WARPGROUP) {
        prefetch_map(p.a_map), prefetch_map(p.b_map);
    }
    __syncthreads();
    // No block may copy to, or arrive at, one that has not begun or has ended.
    if constexpr (CLUSTER > 1) cluster_barrier<CLUSTER>();
    // From one lane: so the compiler knows that it is the same in all.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    if (warpgroup < 2) {
        take_registers<COMPUTING>();
        multiply_fp8_tiles<T, TOKENS, CLUSTER, STAGES, BLOCK_SCALED, ACTIVATION>(p, shared, ring, warpgroup);
    } else {
        leave_registers<LOADING>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x % WARPGROUP / 32), 0);
        if (warp == 0)
            load_fp8_tiles<TOKENS, CLUSTER, STAGES, ACTIVATION>(p, shared, ring);
        else if constexpr (BLOCK_SCALED)
            if (warp <= Layout::SCALE_WARPS)
                bring_fp8_scales<TOKENS, CLUSTER, STAGES, ACTIVATION>(p, shared, ring + Layout::SCALES, warp - 1);
    }
    if constexpr (CLUSTER > 1) cluster_barrier<CLUSTER>();
#endif
}
