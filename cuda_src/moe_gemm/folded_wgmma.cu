// Grouped GEMM of FP8 tokens (e4m3) and prepared MXFP4 weights on Hopper, by TMA and wgmma.
//
//   x[r, j]   = sum over i of a[r, i] * a_scale[r, i / 128] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh lists all forms
//
// Sums are in float32 and rounded once. a_scale is [rows, ceil(k / 128)]. moe_gemm/params.cuh defines the groups.
// moe_gemm/folded_prepared.cuh defines the layout of the weights. The kernel converts 4-bit weights to e4m3 for the
// MMAs; each row of weights has one power of two that multiplies its sums.
//
// Weights are the M side of wgmma (64 rows) and tokens (rows of a group) are the N side, as in gemm_fp4_wgmma. So each
// weight is converted once for all tokens of a tile. The conversion is a table lookup: a table in shared memory has one
// entry for each ratio of a scale (of 32 elements) to the largest scale of its row. The entry is the 8 magnitudes of
// e2m1 times this ratio, as 8 bytes. One __byte_perm looks up four elements.
//
// FP8 tensor cores accumulate with less than float32 precision. So the tensor cores sum only 128 elements along k, as
// in gemm_fp8_wgmma. This partial sum is multiplied by its token's scale and added to a float32 total in registers. At
// the end the total is multiplied by the power of two of its row of weights.
//
// Grid: CLUSTER * (number of resident clusters) persistent blocks of folded_threads(TOKENS) threads. A tile is 128 rows
// of weights (gated: 64 gate rows and their 64 up rows) times up to TOKENS tokens. The blocks of a cluster have the
// same tokens and neighbouring weights. Each block copies every CLUSTER-th TMA box of tokens, by multicast to the whole
// cluster.
//
//   warp 8           finds tiles; copies 128 elements along k per stage to a ring of STAGES stages, by TMA
//   warps 9, 10      copy the scales of up to 128 tokens each
//   warpgroup w < 2  converts and multiplies weight rows `64 * w` to `64 * w + 63` of a tile, and writes the results
//
// A warpgroup multiplies its weights by the tokens of a tile in chunks of up to 128 tokens. While one warpgroup adds
// partial sums to its totals, the MMAs of the other warpgroup run. A warpgroup converts the weights of the next stage
// during and after the last MMAs of the current stage.
//
// Speed of light: for few rows the time to read the weights; for many rows the time of 2 * rows * n * k operations at
// the FP8 rate, twice the bfloat16 rate. On an H200 with n = 4096, k = 7168, 8 experts of 1024 rows take 461 us (1043
// TFLOP/s). The same GEMM with FP8 weights and block scales takes 352 us. 256 experts of 8 rows take 1.01 ms; reading
// the bytes of their weights alone would take 0.83 ms.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/folded_load.cuh"
#include "moe_gemm/folded_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"

// Shared addresses of a lane's operands in stage 0. `weights`, `rows`: the lane's elements and scale word in the first
// 8 weight rows of its warp. `scales`: the scales of its tokens. `tokens`: the lower half of the token descriptor.
struct FoldedOperands {
    unsigned weights, rows, scales, tokens;
};

// Start two of the stage's four MMAs along k, `FIRST` and `FIRST + 1`, for `2 * N` tokens.
template <int FIRST, int N>
__device__ __forceinline__ void start_folded_products(float (&sums)[N], const FoldedFragments& fragments,
                                                      unsigned tokens) {
#pragma unroll
    for (int i = FIRST; i < FIRST + 2; ++i) // an MMA reads 32 bytes along k: 2 descriptor units of 16 bytes
        wgmma_k_major<__nv_fp8_e4m3>(sums, fragments.a[i], k_major_descriptor_of(tokens + i * 2), i > 0);
}

// Add the sums of `2 * N` tokens to `total`, each multiplied by the scale of its token.
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

// State of a consumer warpgroup: its position in the ring, and the converted weights of the next stage. PAIRS: the two
// rows of lane l in an MMA (`l / 4` and `l / 4 + 8`) are a gate row and its up row, which are neighbours in memory.
template <class Layout, bool PAIRS> struct FoldedMultiplier {
    static constexpr int WIDTH = Layout::WIDTH, N = WIDTH / 2, PARTS = Layout::PARTS;
    static constexpr int STAGES = Layout::STAGES, CLUSTER = Layout::CLUSTER;

    typename Layout::Shared& shared;
    FoldedOperands first; // addresses in stage 0
    unsigned table;
    int warpgroup;
    RingPlace<STAGES> place;
    FoldedWords<PAIRS> words;
    FoldedFragments fragments;
    float factors[2]; // 2^(E - 6) of the lane's two rows of weights

    __device__ __forceinline__ FoldedMultiplier(typename Layout::Shared& shared, unsigned ring, int warpgroup)
        : shared(shared), table(shared_address(shared.table)), warpgroup(warpgroup) {
        const int lane = threadIdx.x % 32;
        const unsigned weights =
            ring + Layout::WEIGHTS + (warpgroup * 8 + threadIdx.x % WARPGROUP / 32 * 2) * FOLDED_UNIT;
        first.weights = weights + lane * 8, first.rows = weights + FOLDED_NUMBERS + lane / 4 * 4;
        if constexpr (PAIRS) { // the lane's first row is 2 * (l / 4); rows 8 to 15 are in the second unit
            const int row = lane / 4 * 2 % FOLDED_ROWS;
            const unsigned unit = weights + lane / 16 * FOLDED_UNIT;
            first.weights = unit + row * FOLDED_ROW_NUMBERS + lane % 4 * 8,
            first.rows = unit + FOLDED_NUMBERS + row * 4;
        }
        first.scales = ring + Layout::SCALES + lane % 4 * Layout::SCALE_PITCH;
        first.tokens = unsigned(k_major_descriptor(ring));
        // Keep the addresses in registers: otherwise the compiler recomputes them at every stage.
        asm volatile("" : "+r"(first.weights), "+r"(first.rows), "+r"(first.scales), "+r"(first.tokens), "+r"(table));
    }

    __device__ __forceinline__ void wait_full(const RingPlace<STAGES>& at) {
        mbarrier_wait(shared_address(&shared.full[at.stage]), at.phase);
    }

    // Load the scale words of the next stage, and the weights of its first two MMAs.
    __device__ __forceinline__ void load_words() {
        words.load_numbers(first.weights + place.stage * Layout::WEIGHT_BYTES);
        words.load_rows(first.rows + place.stage * Layout::WEIGHT_BYTES);
    }

    // Convert the loaded weights, and load the weights of the other two MMAs.
    __device__ __forceinline__ void convert_first() {
        fragments.convert<0>(words, table);
        words.load_numbers(first.weights + place.stage * Layout::WEIGHT_BYTES + FOLDED_NUMBERS / 2);
        fragments.finish<0>();
    }

    __device__ __forceinline__ void convert_rest() {
        fragments.convert<2>(words, table);
        fragments.finish<2>();
    }

    // Wait for the first stage and convert its weights.
    __device__ __forceinline__ void begin() {
        wait_full(place);
        load_words();
        convert_first();
        convert_rest();
    }

    // Release a stage: arrive at its empty barrier in every block of the cluster. The MMAs that read the stage must be
    // complete. elect.sync selects the lane that arrives, so no register is needed for a lane index.
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

    // Multiply the weights of the current stage by the stage's tokens, and add the scaled sums to `total`. The weights
    // are already converted to fragments. The tokens are divided into parts of WIDTH tokens, and only the first ACTIVE
    // parts are multiplied. Then convert the weights of the next stage. `last`: the current stage is the last stage of
    // the tile.
    template <int ACTIVE> __device__ __forceinline__ void multiply_stage(float (&total)[PARTS][N], bool last) {
        const unsigned tokens = first.tokens + place.stage * (Layout::TOKEN_BYTES >> 4);
        const unsigned scales = first.scales + place.stage * Layout::SCALE_BYTES;
        const int stage = place.stage;
        float sums[N];
        auto add = [&](int part) {
            wgmma_fence_operand(sums);
            add_scaled(total[part], sums, scales + part * Layout::SCALES_EACH);
        };
#pragma unroll
        for (int part = 0; part < ACTIVE; ++part) {
            const unsigned from = tokens + part * (WIDTH * FOLDED_K >> 4);
            wgmma_fence();
            start_folded_products<0>(sums, fragments, from);
            // The last part uses two commit groups. When the first group is complete, its fragments are overwritten
            // while the MMAs of the second group still read theirs.
            if (part == ACTIVE - 1) wgmma_commit_group();
            start_folded_products<2>(sums, fragments, from);
            wgmma_commit_group();
            if (part == 0) {
                if (last) {
                    const unsigned here = first.rows + stage * Layout::WEIGHT_BYTES;
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        factors[i] = folded_factor(__float_as_uint(load_shared_float(here + i * words.ROWS_APART)));
                }
                place.advance();
                // The next stage belongs to this tile or to the next tile. After the last tile it only carries a
                // description with 0 tokens.
                wait_full(place);
                load_words();
            }
            if (part < ACTIVE - 1) {
                wgmma_wait_group<0>();
                add(part);
            }
        }
        wgmma_wait_group<1>();
        convert_first();
        wgmma_wait_group<0>();
        add(ACTIVE - 1);
        release(stage);
        convert_rest();
    }

    template <int ACTIVE> __device__ __forceinline__ void multiply_tile(float (&total)[PARTS][N], int steps) {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) multiply_stage<ACTIVE>(total, step == steps - 1);
    }
};

// Run a consumer warpgroup: compute all tiles of the block.
template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_folded_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                     unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, PARTS = Layout::PARTS, N = Layout::WIDTH / 2;
    // The shuffle tells the compiler that the value is warp-uniform.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const unsigned staging = ring + Layout::STAGED + warpgroup * 2 * Layout::STAGING;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K;
    constexpr bool PAIRS = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    FoldedMultiplier<Layout, PAIRS> multiplier(shared, ring, warpgroup);
    WgmmaTile& kept = shared.kept[threadIdx.x / 32];
    int round = 0;
    multiplier.begin();
    for (;;) {
        // The reduction tells the compiler that the value is warp-uniform.
        const int tokens = __reduce_max_sync(FULL_WARP, shared.tiles[multiplier.place.stage].tokens);
        if (tokens == 0) break;
        // Keep the tile in shared memory during the mainloop, because registers are scarce.
        if (threadIdx.x % 32 == 0) kept = shared.tiles[multiplier.place.stage];
        __syncwarp();
        float total[PARTS][N];
#pragma unroll
        for (int i = 0; i < PARTS * N; ++i) total[i / N][i % N] = 0.f;
        if (PARTS == 1 || tokens > TOKENS / 2)
            multiplier.template multiply_tile<PARTS>(total, steps);
        else
            multiplier.template multiply_tile<PARTS == 1 ? 1 : PARTS / 2>(total, steps);
        float (&all)[PARTS * N] = reinterpret_cast<float (&)[PARTS * N]>(total);
#pragma unroll
        for (int i = 0; i < PARTS * N; ++i) all[i] *= multiplier.factors[i / 2 % 2];
        const WgmmaTile tile{kept.row, tokens, kept.column, kept.expert};
        store_tile<T, ACTIVATION, TOKENS>(p, all, tile, warpgroup, staging, round);
        __syncwarp(); // all lanes have read `kept` before lane 0 overwrites it
    }
}

template <typename, int, int TOKENS, int STAGES, int CLUSTER, int, bool> constexpr Launch gemm_folded_wgmma_launch() {
    return {folded_threads(TOKENS), FoldedLayout<TOKENS, STAGES, CLUSTER>::BYTES, box_of(TOKENS)};
}

// T: type of the result, __nv_bfloat16 or __half. TOKENS: 8, 16, 32, 128 or 256. BLOCKS: resident blocks per
// multiprocessor. STREAMED: set for few tokens; each weight is read once, with the L2 policy evict-first. ACTIVATION:
// see moe_gemm/epilogue.cuh.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS, bool STREAMED>
__global__ __launch_bounds__(folded_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_folded_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Layout = FoldedLayout<TOKENS, STAGES, CLUSTER>;
    using Shared = typename Layout::Shared;
    constexpr bool DEAL = TOKENS >= 128;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + misplaced;
    Shared& shared = *reinterpret_cast<Shared*>(memory + misplaced + Layout::REST);
    if (threadIdx.x < 32) shared.table[threadIdx.x] = folded_numbers(threadIdx.x);
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
        if constexpr (DEAL) setmaxnreg_inc<232>();
        compute_folded_tiles<T, ACTIVATION, Layout>(p, shared, ring);
    } else {
        if constexpr (DEAL) setmaxnreg_dec<40>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * WARPGROUP / 32, 0);
        if (warp == 0)
            load_folded_tiles<Layout, ACTIVATION, STREAMED>(p, shared, ring);
        else if (warp <= Layout::SCALE_WARPS)
            load_folded_scales<Layout>(p, shared, ring + Layout::SCALES, warp - 1);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
