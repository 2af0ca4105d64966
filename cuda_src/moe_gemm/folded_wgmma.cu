// Grouped products of FP8 rows (e4m3) and MXFP4 weights on Hopper, by TMA and wgmma: each expert's weights times its
// rows.
//
//   x[r, j]   = sum over i of a[r, i] * a_scale[r, i / 128] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh has all forms
//
// sums in float32, rounded once. a_scale: [rows, ceil(k / 128)]. moe_gemm/params.cuh says what a group is,
// moe_gemm/folded_prepared.cuh what the weights are: e4m3 numbers, times a power of two of their row.
//
// As in gemm_fp4_wgmma, weights are the 64 rows of a product and tokens (rows of a group) are its columns, so that each
// weight is converted once for all tokens of a tile: a table in shared memory has the 8 sizes of a number at each
// scale, 8 bytes of which __byte_perm takes four by four numbers. As in gemm_fp8_wgmma, a sum of the tensor cores ends
// after 128 numbers, since they keep too few of its bits, and is added to another one in float32, times the scale of
// its token. The weights' power of two, the same along k, waits for the end.
//
// Grid: CLUSTER * (as many clusters as run at once) blocks of folded_threads(TOKENS) threads. They stay, and take one
// tile after the other: 128 rows of weights (gated: 64 gates and their 64 ups) times up to TOKENS tokens. The blocks of
// a cluster have the same tokens and neighbouring weights; each copies every CLUSTER-th box of tokens, to all of them
// (multicast).
//
//   warp 8           finds tiles, and has TMA copy 128 numbers along k at a time to a ring of STAGES stages
//   warps 9, 10      copy the scales of up to 128 tokens each
//   warpgroup 0, 1   convert, multiply and write weights 64 w ... 64 w + 63 of a tile
//
// A warpgroup multiplies up to 128 tokens at a time. While it adds their sums, the other warpgroup's products run. The
// next stage's weights are converted during the last products of this one, and after them.
//
// Speed of light: the bytes of the weights, then 2 * rows * n * k operations at twice the rate of bfloat16. On an H200,
// 8 experts of 1024 rows, n = 4096 and k = 7168: 461 us, 1043 TFLOP/s, where FP8 weights with scales of blocks take 352
// us; 256 experts of 8 rows: 1.01 ms, whose bytes take 0.83.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/folded_load.cuh"
#include "moe_gemm/folded_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"

// What a warpgroup reads of stage 0. weights, rows: a lane's, of its warp's first 8 rows; scales: those of its tokens;
// tokens: the lower half of their descriptor.
struct FoldedOperands {
    unsigned weights, rows, scales, tokens;
};

// Start two of the products along k of a stage, of 2 N tokens.
template <int FIRST, int N>
__device__ __forceinline__ void start_folded_products(float (&sums)[N], const FoldedFragments& fragments,
                                                      unsigned tokens) {
#pragma unroll
    for (int i = FIRST; i < FIRST + 2; ++i) // 32 numbers are 32 bytes
        wgmma_k_major<__nv_fp8_e4m3>(sums, fragments.a[i], k_major_descriptor_of(tokens + i * 2), i > 0);
}

// Add sums of 2 N tokens, each times its scale.
template <int N>
__device__ __forceinline__ void add_scaled(float (&total)[N], const float (&sums)[N], unsigned scales) {
    if constexpr (N == 4) {
        float by[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(by[0]), "=f"(by[1]) : "r"(scales) : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = fmaf(sums[i], by[i % 2], total[i]);
    } else {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) { // 16 tokens, of which a lane has four
            const uint4 four = load_shared(scales + j * 16);
            const float by[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                                 __uint_as_float(four.w)};
#pragma unroll
            for (int i = 0; i < 8; ++i)
                total[j * 8 + i] = fmaf(sums[j * 8 + i], by[i / 4 * 2 + i % 2], total[j * 8 + i]);
        }
    }
}

// A warpgroup that multiplies: its place in the ring, and the weights of the stage that comes next.
// PAIRS: a lane's two rows, l / 4 and
// l / 4 + 8 of a product's 16, are neighbours in memory, a gate and its up.
template <class Layout, bool PAIRS> struct FoldedMultiplier {
    static constexpr int WIDTH = Layout::WIDTH, N = WIDTH / 2, PARTS = Layout::PARTS;
    static constexpr int STAGES = Layout::STAGES, CLUSTER = Layout::CLUSTER;

    typename Layout::Shared& shared;
    FoldedOperands first; // of stage 0
    unsigned table;
    int warpgroup;
    RingPlace<STAGES> place;
    FoldedWords<PAIRS> words;
    FoldedFragments fragments;
    float factors[2]; // of the lane's rows of weights

    __device__ __forceinline__ FoldedMultiplier(typename Layout::Shared& shared, unsigned ring, int warpgroup)
        : shared(shared), table(shared_address(shared.table)), warpgroup(warpgroup) {
        const int lane = threadIdx.x % 32;
        const unsigned weights =
            ring + Layout::WEIGHTS + (warpgroup * 8 + threadIdx.x % WARPGROUP / 32 * 2) * FOLDED_UNIT;
        first.weights = weights + lane * 8, first.rows = weights + FOLDED_NUMBERS + lane / 4 * 4;
        if constexpr (PAIRS) { // a lane's first row is 2 (l / 4), and rows 8, 10, ... are in the second unit
            const int row = lane / 4 * 2 % FOLDED_ROWS;
            const unsigned unit = weights + lane / 16 * FOLDED_UNIT;
            first.weights = unit + row * FOLDED_ROW_NUMBERS + lane % 4 * 8,
            first.rows = unit + FOLDED_NUMBERS + row * 4;
        }
        first.scales = ring + Layout::SCALES + lane % 4 * Layout::SCALE_PITCH;
        first.tokens = unsigned(k_major_descriptor(ring));
        // Else the compiler would compute them again at every stage.
        asm volatile("" : "+r"(first.weights), "+r"(first.rows), "+r"(first.scales), "+r"(first.tokens), "+r"(table));
    }

    __device__ __forceinline__ void wait_full(const RingPlace<STAGES>& at) {
        mbarrier_wait(shared_address(&shared.full[at.stage]), at.phase);
    }

    // Load what converts into the first two products of the stage that comes next.
    __device__ __forceinline__ void load_words() {
        words.load_numbers(first.weights + place.stage * Layout::WEIGHT_BYTES);
        words.load_rows(first.rows + place.stage * Layout::WEIGHT_BYTES);
    }

    // Convert these, and load the numbers of the other two.
    __device__ __forceinline__ void convert_first() {
        fragments.convert<0>(words, table);
        words.load_numbers(first.weights + place.stage * Layout::WEIGHT_BYTES + FOLDED_NUMBERS / 2);
        fragments.finish<0>();
    }

    __device__ __forceinline__ void convert_rest() {
        fragments.convert<2>(words, table);
        fragments.finish<2>();
    }

    // Wait for the first stage, and convert its weights.
    __device__ __forceinline__ void begin() {
        wait_full(place);
        load_words();
        convert_first();
        convert_rest();
    }

    // Say that this warp has read a stage, behind products that have been waited for. One lane does, which takes no
    // register to find.
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

    // Add the products of the stage at hand and the first ACTIVE parts of the tokens, whose fragments are there, and
    // make those of the next stage. last: of the tile.
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
            // The fragments of the last part are free by halves.
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
                // The next stage, of this tile or of the next, or the one that says that there is none.
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

// The loop of a warpgroup that multiplies.
template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_folded_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                     unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, PARTS = Layout::PARTS, N = Layout::WIDTH / 2;
    // By a shuffle, so that the compiler knows that it is the same in all lanes.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const unsigned staging = ring + Layout::STAGED + warpgroup * 2 * Layout::STAGING;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K;
    constexpr bool PAIRS = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    FoldedMultiplier<Layout, PAIRS> multiplier(shared, ring, warpgroup);
    WgmmaTile& kept = shared.kept[threadIdx.x / 32];
    int round = 0;
    multiplier.begin();
    for (;;) {
        // By a reduction, so that the compiler knows that it is the same in all lanes.
        const int tokens = __reduce_max_sync(FULL_WARP, shared.tiles[multiplier.place.stage].tokens);
        if (tokens == 0) break;
        // The tile waits in shared memory, as registers are scarce.
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
        __syncwarp(); // before the next tile is kept
    }
}

template <typename, int, int TOKENS, int STAGES, int CLUSTER, int, bool> constexpr Launch gemm_folded_wgmma_launch() {
    return {folded_threads(TOKENS), FoldedLayout<TOKENS, STAGES, CLUSTER>::BYTES, box_of(TOKENS)};
}

// T: __nv_bfloat16 or __half, of the result. TOKENS: 8, 16, 32, 128 or 256. BLOCKS: blocks that fit a
// multiprocessor. STREAMED: for few tokens, where weights are read once. ACTIVATION: as moe_gemm/epilogue.cuh has it.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS, bool STREAMED>
__global__ __launch_bounds__(folded_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_folded_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Layout = FoldedLayout<TOKENS, STAGES, CLUSTER>;
    using Shared = typename Layout::Shared;
    constexpr bool DEAL = TOKENS >= 128;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
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
    // A block may not copy to, or arrive at a barrier of, one that has not begun or that has ended.
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
