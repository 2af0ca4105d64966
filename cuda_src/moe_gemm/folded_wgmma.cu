// Grouped GEMM (moe_gemm/params.cuh) of FP8 tokens with block scales and prepared MXFP4 weights, whose scales are
// folded into e4m3 elements and a power of two per row (moe_gemm/folded_prepared.cuh), on Hopper, by TMA and wgmma.
//
// Weights are the M side of wgmma, tokens (rows of a group) the N side, so each weight is converted once per tile. The
// conversion looks elements up in a table in shared memory. For each ratio of a scale to the largest scale of its row,
// the table has the 8 magnitudes of e2m1 times this ratio, as e4m3. One __byte_perm looks up four elements.
//
// FP8 tensor cores accumulate with less than float32 precision. So they sum only 128 elements along k. This sum times
// its token's scale is added to a float32 total. At the end the total is multiplied by the power of two of its row.
//
// Grid: CLUSTER * (resident clusters) persistent blocks. A tile is 128 rows of weights (gated: 64 gate rows and their
// up rows) times up to TOKENS tokens. The blocks of a cluster have neighbouring weights and the same tokens; each block
// multicasts every CLUSTER-th TMA box of the tokens.
//
//   warp 8           TMA producer: 128 elements along k per stage, in a ring of STAGES stages
//   warps 9, 10      copy the scales of up to 128 tokens each
//   warpgroup w < 2  converts and multiplies weight rows `64 * w` to `64 * w + 63` of a tile, and writes the results
//
// A warpgroup multiplies up to 128 tokens of a tile at a time. It converts the weights of the next stage during and
// after the last MMAs of the current stage. While it adds sums to its totals, the MMAs of the other warpgroup run.
//
// Speed of light: for few rows it is the time to read the weights, for many rows the time of 2 * rows * n * k
// operations at the FP8 rate. On an H200 with n = 4096, k = 7168, 8 experts of 1024 rows take 461 us (1043 TFLOP/s);
// with FP8 weights and block scales they take 352 us. 256 experts of 8 rows take 1.01 ms; reading the weights alone
// would take 0.83 ms.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/folded_load.cuh"
#include "moe_gemm/folded_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"

// A lane's operands in stage 0. `weights`, `scale_words`: shared addresses for its first row of weights. `scales`:
// shared address of its tokens' scales. `tokens`: lower half of the token descriptor.
struct FoldedOperands {
    unsigned weights, scale_words, scales, tokens;
};

// Start MMAs `FIRST` and `FIRST + 1` of the four MMAs of a stage, for `2 * N` tokens. The N sums of a lane are for two
// rows of weights and a quarter of the tokens.
template <int FIRST, int N>
__device__ __forceinline__ void start_folded_products(float (&sums)[N], const FoldedFragments& fragments,
                                                      unsigned tokens) {
#pragma unroll
    for (int i = FIRST; i < FIRST + 2; ++i) // 32 bytes along k: 2 descriptor units of 16 bytes
        wgmma_k_major<__nv_fp8_e4m3>(sums, fragments.a[i], k_major_descriptor_of(tokens + i * 2), i > 0);
}

// Add the sums, times the scales of their tokens, to `total`. The N sums of a lane are for two rows of weights and a
// quarter of `2 * N` tokens.
template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N], const float (&sums)[N], unsigned scales) {
    if constexpr (N == 4) {
        float by[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(by[0]), "=f"(by[1]) : "r"(scales) : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = fmaf(sums[i], by[i % 2], total[i]);
    } else {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) { // 16 tokens; a lane has sums of 4 of them
            const uint4 four = load_shared(scales + j * 16);
            const float by[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                                 __uint_as_float(four.w)};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                total[j * 8 + i] = fmaf(sums[j * 8 + i], by[i / 4 * 2 + i % 2], total[j * 8 + i]);
        }
    }
}

// State of a consumer warpgroup, with the converted weights of the next stage.
template <class Layout, bool INTERLEAVED_GATES> struct FoldedMultiplier {
    static constexpr int WIDTH = Layout::WIDTH, N = WIDTH / 2, CHUNKS = Layout::CHUNKS;
    static constexpr int STAGES = Layout::STAGES, CLUSTER = Layout::CLUSTER;

    typename Layout::Shared& shared;
    FoldedOperands first; // addresses in stage 0
    unsigned table;
    int warpgroup;
    PipelineState<STAGES> state;
    FoldedPacked<INTERLEAVED_GATES> packed;
    FoldedFragments fragments;
    float factors[2]; // 2^(E - 6) of the lane's two rows of weights

    __device__ __forceinline__ FoldedMultiplier(typename Layout::Shared& shared, unsigned ring, int warpgroup)
        : shared(shared), table(shared_address(shared.table)), warpgroup(warpgroup) {
        const int lane = threadIdx.x % 32;
        const unsigned weights =
            ring + Layout::WEIGHTS + (warpgroup * 8 + threadIdx.x % WARPGROUP / 32 * 2) * FOLDED_UNIT_BYTES;
        first.weights = weights + lane * 8, first.scale_words = weights + FOLDED_ELEMENT_BYTES + lane / 4 * 4;
        if constexpr (INTERLEAVED_GATES) { // rows 8 to 15 are in the second unit
            const int row = lane / 4 * 2 % FOLDED_ROWS;
            const unsigned unit = weights + lane / 16 * FOLDED_UNIT_BYTES;
            first.weights = unit + row * FOLDED_ROW_BYTES + lane % 4 * 8,
            first.scale_words = unit + FOLDED_ELEMENT_BYTES + row * 4;
        }
        first.scales = ring + Layout::SCALES + lane % 4 * Layout::SCALE_PITCH;
        first.tokens = unsigned(k_major_descriptor(ring));
        // Without this empty asm, the compiler recomputes the addresses at every stage.
        asm volatile(""
                     : "+r"(first.weights), "+r"(first.scale_words), "+r"(first.scales), "+r"(first.tokens),
                       "+r"(table));
    }

    __device__ __forceinline__ void wait_full(const PipelineState<STAGES>& at) {
        mbarrier_wait(shared_address(&shared.full[at.stage]), at.phase);
    }

    __device__ __forceinline__ void load_packed() {
        packed.load_elements(first.weights + state.stage * Layout::WEIGHT_BYTES);
        packed.load_scale_words(first.scale_words + state.stage * Layout::WEIGHT_BYTES);
    }

    // Convert the weights of a stage's first two MMAs, and load the weights of the other two.
    __device__ __forceinline__ void convert_first() {
        fragments.convert<0>(packed, table);
        packed.load_elements(first.weights + state.stage * Layout::WEIGHT_BYTES + FOLDED_ELEMENT_BYTES / 2);
        fragments.finish<0>();
    }

    __device__ __forceinline__ void convert_second() {
        fragments.convert<2>(packed, table);
        fragments.finish<2>();
    }

    __device__ __forceinline__ void begin() {
        wait_full(state);
        load_packed();
        convert_first();
        convert_second();
    }

    // Release a stage, whose MMAs are complete, in every block of the cluster. elect.sync saves the register of a lane
    // index.
    __device__ __forceinline__ void release(int stage) {
        unsigned elected;
        __syncwarp();
        asm volatile("{ .reg .pred elected;\n"
                     "  elect.sync _|elected, 0xffffffff;\n"
                     "  selp.u32 %0, 1, 0, elected; }"
                     : "=r"(elected));
        if (elected) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) {
                if constexpr (CLUSTER == 1)
                    mbarrier_arrive(shared_address(&shared.empty[stage]));
                else
                    mbarrier_arrive_cluster(map_shared_rank(shared_address(&shared.empty[stage]), rank));
            }
        }
    }

    // Multiply the converted weights of the current stage by the first ACTIVE chunks of WIDTH tokens, add the scaled
    // sums to `total`, and convert the weights of the next stage. `last`: the last stage of the tile.
    template <int ACTIVE> __device__ __forceinline__ void multiply_stage(float (&total)[CHUNKS][N], bool last) {
        const unsigned tokens = first.tokens + state.stage * (Layout::TOKEN_BYTES >> 4);
        const unsigned scales = first.scales + state.stage * Layout::SCALE_BYTES;
        const int stage = state.stage;
        float sums[N];
        auto add = [&](int chunk) {
            wgmma_fence_operand(sums);
            add_scaled(total[chunk], sums, scales + chunk * Layout::CHUNK_SCALE_BYTES);
        };
#pragma unroll
        for (int chunk = 0; chunk < ACTIVE; ++chunk) {
            const unsigned from = tokens + chunk * (WIDTH * FOLDED_K >> 4);
            wgmma_fence();
            start_folded_products<0>(sums, fragments, from);
            // The MMAs of the last chunk form two commit groups, so that the fragments of the first group can be
            // overwritten while the second group still runs.
            if (chunk == ACTIVE - 1) wgmma_commit_group();
            start_folded_products<2>(sums, fragments, from);
            wgmma_commit_group();
            if (chunk == 0) {
                if (last) {
                    const unsigned here = first.scale_words + stage * Layout::WEIGHT_BYTES;
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        factors[i] = folded_factor(__float_as_uint(load_shared_float(here + i * packed.SCALE_STRIDE)));
                }
                state.advance();
                // Wait for the next stage. After the tile's last stage it is the next tile's first stage, or marks the
                // end of all tiles.
                wait_full(state);
                load_packed();
            }
            if (chunk < ACTIVE - 1) {
                wgmma_wait_group<0>();
                add(chunk);
            }
        }
        wgmma_wait_group<1>();
        convert_first();
        wgmma_wait_group<0>();
        add(ACTIVE - 1);
        release(stage);
        convert_second();
    }

    template <int ACTIVE> __device__ __forceinline__ void multiply_tile(float (&total)[CHUNKS][N], int steps) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) multiply_stage<ACTIVE>(total, step == steps - 1);
    }
};

template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_folded_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                     unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, CHUNKS = Layout::CHUNKS, N = Layout::WIDTH / 2;
    // The shuffle tells the compiler that the value is warp-uniform.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const unsigned staging = ring + Layout::STAGED + warpgroup * 2 * Layout::STAGING;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K;
    constexpr bool INTERLEAVED_GATES = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    FoldedMultiplier<Layout, INTERLEAVED_GATES> multiplier(shared, ring, warpgroup);
    WgmmaTile& kept = shared.kept[threadIdx.x / 32];
    int round = 0;
    multiplier.begin();
    for (;;) {
        // The reduction tells the compiler that the value is warp-uniform.
        const int tokens = __reduce_max_sync(FULL_WARP, shared.tiles[multiplier.state.stage].tokens);
        if (tokens == 0) break;
        // Keep the tile in shared memory during the mainloop, because registers are scarce.
        if (threadIdx.x % 32 == 0) kept = shared.tiles[multiplier.state.stage];
        __syncwarp();
        float total[CHUNKS][N];
#pragma unroll
        for (int i = 0; i < CHUNKS * N; ++i) total[i / N][i % N] = 0.f;
        if (CHUNKS == 1 || tokens > TOKENS / 2)
            multiplier.template multiply_tile<CHUNKS>(total, steps);
        else
            multiplier.template multiply_tile<CHUNKS == 1 ? 1 : CHUNKS / 2>(total, steps);
        float (&all)[CHUNKS * N] = reinterpret_cast<float (&)[CHUNKS * N]>(total);
#pragma unroll
        for (int i = 0; i < CHUNKS * N; ++i) all[i] *= multiplier.factors[i / 2 % 2];
        const WgmmaTile tile{kept.row, tokens, kept.column, kept.expert};
        store_tile<T, ACTIVATION, TOKENS>(p, all, tile, warpgroup, staging, round);
        __syncwarp(); // before lane 0 overwrites `kept`
    }
}

template <typename, int, int TOKENS, int STAGES, int CLUSTER, int, bool> constexpr Launch gemm_folded_wgmma_launch() {
    return {folded_threads(TOKENS), FoldedLayout<TOKENS, STAGES, CLUSTER>::BYTES, box_of(TOKENS)};
}

// T: type of the result. TOKENS: 8, 16, 32, 128 or 256.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS_PER_SM, bool MEMORY_BOUND>
__global__ __launch_bounds__(folded_threads(TOKENS), BLOCKS_PER_SM)
    CLUSTER_OF(CLUSTER) void gemm_folded_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Layout = FoldedLayout<TOKENS, STAGES, CLUSTER>;
    using Shared = typename Layout::Shared;
    constexpr bool MOVES_REGISTERS = TOKENS >= 128;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + padding;
    Shared& shared = *reinterpret_cast<Shared*>(memory + padding + Layout::SHARED_OFFSET);
    if (threadIdx.x < 32) shared.table[threadIdx.x] = folded_elements(threadIdx.x);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), 1 + 32 * Layout::SCALE_WARPS);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * WARPGROUPS * (WARPGROUP / 32));
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    // No block may access the shared memory of a block that has not started or has exited.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (MOVES_REGISTERS) setmaxnreg_inc<232>();
        compute_folded_tiles<T, ACTIVATION, Layout>(p, shared, ring);
    } else {
        if constexpr (MOVES_REGISTERS) setmaxnreg_dec<40>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * WARPGROUP / 32, 0);
        if (warp == 0)
            load_folded_tiles<Layout, ACTIVATION, MEMORY_BOUND>(p, shared, ring);
        else if (warp <= Layout::SCALE_WARPS)
            load_folded_scales<Layout>(p, shared, ring + Layout::SCALES, warp - 1);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
