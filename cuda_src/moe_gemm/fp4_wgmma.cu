// Grouped products of 16-bit numbers and prepared weights of 4 bits on Hopper, by TMA and wgmma: each expert's weights
// times its rows, which may be gathered.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh has all forms
//
// each number of b times its scale; sums in float32, rounded once. moe_gemm/params.cuh says what a group is,
// moe_gemm/fp4_prepared.cuh what prepared weights are.
//
// As in gemm_wgmma, weights are the 64 rows of a product and tokens (rows of a group) are its columns, so that each
// number of the weights is converted once for all tokens of a tile. They come from registers: a warp converts its 16
// rows, 32 numbers along k at a time, while the tensor cores multiply the 32 before.
//
// Grid: CLUSTER * (as many clusters as run at once) blocks of gemm_threads(TOKENS) threads. They stay, and take one tile
// after the other: weights times up to TOKENS tokens. The blocks of a cluster have the same tokens and neighbouring
// weights; each copies every CLUSTER-th box of tokens, to all of them (multicast).
//
//   warp 8           finds tiles, and has TMA copy UNITS * 64 numbers along k at a time to a ring of STAGES stages; GATHER:
//                    it copies the tokens itself, by cp.async
//   warpgroup 0, 1   convert, multiply and write weights 64 w ... 64 w + 63 of a tile. SPLIT: a tile has 64 weights, and
//                    both have them, each every second 64 numbers along k; in the end warpgroup 0 adds up both sums
//
// Speed of light: the bytes of the weights, then 2 * rows * n * k operations at the rate of bfloat16.
#include "moe_gemm/fp4_load.cuh"
#include "moe_gemm/fp4_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// What a warpgroup reads of a stage. weights, scales: a lane's, of its warp's first 8 rows; tokens: the lower half of
// their descriptor, whose upper half is always the same.
struct Fp4Operands {
    unsigned weights, scales, tokens;
};

// Convert HALVES halves of unit `unit`, from `half` on, and start their products. PAIRS: a lane's two rows, l / 4 and
// l / 4 + 8 of a product's 16, are neighbours in memory, a gate and its up.
template <typename T, class Layout, bool PAIRS, int REGISTERS>
__device__ __forceinline__ void multiply_part(float (&c)[REGISTERS], Fp4Fragments<Layout::HALVES>& fragments,
                                              const Fp4Operands& stage, int unit, int half, int width, bool add) {
    constexpr int HALVES = Layout::HALVES;
    const unsigned at = unit * UNIT_BYTES<Layout::FORMAT>;
    // From a lane's first row to its second: 8 rows, or one.
    constexpr int NUMBERS_APART = PAIRS ? ROW_NUMBERS : Layout::EIGHT;
    constexpr int SCALES_APART = PAIRS ? UNIT_SCALES<Layout::FORMAT> : Layout::EIGHT;
    unsigned words[HALVES][2];
    Fp4Factors<T, Layout::FORMAT> factors[HALVES][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const unsigned from = stage.weights + at + row * NUMBERS_APART;
        if constexpr (HALVES == 2) {
            const uint2 both = load_shared_two(from);
            words[0][row] = both.x, words[1][row] = both.y;
        } else {
            words[0][row] = load_shared_word(from + half * 4);
        }
#pragma unroll
        for (int i = 0; i < HALVES; ++i) factors[i][row].load(stage.scales + at + row * SCALES_APART, half + i);
    }
#pragma unroll
    for (int i = 0; i < HALVES; ++i) fragments.template convert<T>(i, words[i], factors[i]);
    fragments.finish();
    const unsigned tokens = stage.tokens + (unit * (Layout::TOKEN_TILE >> 4) + half * 4);
    with_width<Layout::TOKENS>(width, [&](auto columns) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) // 16 numbers are 32 bytes
            multiply_step<T, decltype(columns)::value>(c, fragments.a[i], k_major_descriptor_of(tokens + i * 2),
                                                       i > 0 || add);
        wgmma_commit_group();
    });
    wgmma_wait_group<1>(); // the products before: the registers of their fragments are free
}

// Sum a warpgroup's part of a tile of at most WIDTH tokens. `first_stage`: what it reads of stage 0.
// `skewed_after`: the step after which the other warpgroup may begin, or -1.
template <typename T, class Layout, bool PAIRS, int REGISTERS>
__device__ __forceinline__ void sum_fp4_tile(float (&c)[REGISTERS], typename Layout::Shared& shared,
                                             RingPlace<Layout::STAGES>& place, int steps, int skewed_after,
                                             int warpgroup, int width, const Fp4Operands& first_stage) {
    constexpr int CLUSTER = Layout::CLUSTER, EACH = Layout::SPLIT ? 2 : 1, TIMES = 2 / Layout::HALVES;
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        const unsigned empty = shared_address(&shared.empty[stage]);
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < CLUSTER) mbarrier_arrive_cluster(map_shared_rank(empty, lane));
        }
    };
    Fp4Fragments<Layout::HALVES> fragments[2];
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const Fp4Operands stage{first_stage.weights + place.stage * Layout::WEIGHT_BYTES,
                                first_stage.scales + place.stage * Layout::WEIGHT_BYTES,
                                first_stage.tokens + place.stage * (Layout::TOKEN_BYTES >> 4)};
#pragma unroll
        for (int i = 0; i < Layout::UNITS / EACH * TIMES; ++i) {
            const int unit = i / TIMES * EACH + (Layout::SPLIT ? warpgroup : 0);
            multiply_part<T, Layout, PAIRS>(c, fragments[i % 2], stage, unit, i % TIMES, width, i > 0 || step > 0);
            // All of the stage before has been read.
            if (i == 0 && step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = place.stage;
        place.advance();
    }
    wgmma_wait_group<0>();
    release(previous);
    wgmma_fence_operand(c);
}

// SPLIT: add the sums of warpgroup 1 to those of warpgroup 0, thread by thread. Barrier 3 says that they are there,
// barrier 4 that they have been read.
template <int REGISTERS>
__device__ __forceinline__ void join_sums(float (&joined)[REGISTERS], const float (&c)[REGISTERS], int warpgroup,
                                          unsigned exchange, bool first) {
    constexpr int BOTH = WARPGROUPS * WARPGROUP;
    const unsigned mine = exchange + threadIdx.x % WARPGROUP * 16;
    if (warpgroup > 0) {
        if (!first) named_barrier_sync<4, BOTH>();
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 4)
            store_shared(mine + i / 4 * WARPGROUP * 16,
                         make_uint4(__float_as_uint(c[i]), __float_as_uint(c[i + 1]), __float_as_uint(c[i + 2]),
                                    __float_as_uint(c[i + 3])));
        named_barrier_arrive<3, BOTH>();
    } else {
        named_barrier_sync<3, BOTH>();
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 4) {
            const uint4 other = load_shared(mine + i / 4 * WARPGROUP * 16);
            joined[i] = c[i] + __uint_as_float(other.x), joined[i + 1] = c[i + 1] + __uint_as_float(other.y);
            joined[i + 2] = c[i + 2] + __uint_as_float(other.z), joined[i + 3] = c[i + 3] + __uint_as_float(other.w);
        }
        named_barrier_arrive<4, BOTH>();
    }
}

// The loop of a warpgroup that multiplies.
template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_fp4_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                  unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, SKEW = TOKENS > 128; // stages that the second warpgroup is behind the first
    constexpr float MISSING = Fp4Factors<T, Layout::FORMAT>::MISSING;
    // By a shuffle, so that the compiler knows that it is the same in all lanes, and keeps descriptors in uniform
    // registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const int side = Layout::SPLIT ? 0 : warpgroup, lane = threadIdx.x % 32;
    const unsigned weights = ring + Layout::WEIGHTS + (side * 8 + threadIdx.x % WARPGROUP / 32 * 2) * Layout::EIGHT;
    Fp4Operands operands{weights + lane * 8, weights + UNIT_NUMBERS + lane / 4 * UNIT_SCALES<Layout::FORMAT>,
                         unsigned(k_major_descriptor(ring))};
    constexpr bool PAIRS = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    if constexpr (PAIRS) { // a lane's first row is 2 (l / 4), and rows 8, 10, ... are in the second unit
        const int row = lane / 4 * 2 % UNIT_ROWS;
        const unsigned unit = weights + lane / 16 * Layout::EIGHT;
        operands.weights = unit + row * ROW_NUMBERS + lane % 4 * 8;
        operands.scales = unit + UNIT_NUMBERS + row * UNIT_SCALES<Layout::FORMAT>;
    }
    // Else the compiler would compute them again at every stage.
    asm volatile("" : "+r"(operands.weights), "+r"(operands.scales), "+r"(operands.tokens));
    const unsigned staging = ring + Layout::STAGED + side * 2 * Layout::STAGING;
    const int steps = (p.k + Layout::UNITS * DEPTH - 1) / (Layout::UNITS * DEPTH);
    RingPlace<Layout::STAGES> place;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    bool first = true;
    float c[TOKENS / 2];
    for (;; first = false) {
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const WgmmaTile tile = shared.tiles[place.stage];
        // By a reduction, so that the compiler knows that they are the same in all lanes.
        const int tokens = __reduce_max_sync(FULL_WARP, tile.tokens);
        if (tokens == 0) break;
        if (SKEW && first && warpgroup > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        const float factor = p.b_global_scale ? MISSING * p.b_global_scale[tile.expert] : MISSING;
        sum_fp4_tile<T, Layout, PAIRS>(c, shared, place, steps, skewed_after, warpgroup, tokens, operands);
        skewed_after = -1;
        // The sums are not changed in place: else the compiler would wait for each product.
        if constexpr (Layout::SPLIT) {
            float joined[TOKENS / 2];
            join_sums(joined, c, warpgroup, ring + Layout::EXCHANGE, first);
            if (warpgroup == 0) store_tile<T, ACTIVATION, TOKENS>(p, joined, tile, side, staging, round, factor);
        } else {
            store_tile<T, ACTIVATION, TOKENS>(p, c, tile, side, staging, round, factor);
        }
    }
    if (Layout::SPLIT && warpgroup > 0 && !first) named_barrier_sync<4, WARPGROUPS * WARPGROUP>();
}

// T: __nv_bfloat16 or __half, of the tokens and of the result. FORMAT: MXFP4 or NVFP4. TOKENS: 8, 16, 32, 64, 128 or 288.
// BLOCKS: blocks that fit a multiprocessor. STREAMED: for few tokens, where weights are read once. ACTIVATION: as
// moe_gemm/epilogue.cuh has it.
template <typename T, int FORMAT, int ACTIVATION, int TOKENS, int UNITS, int STAGES, int CLUSTER, int BLOCKS,
          bool STREAMED, bool SPLIT, bool GATHER>
__global__ __launch_bounds__(gemm_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_fp4_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    static_assert(!GATHER || (CLUSTER == 1 && TOKENS <= 128), "");
    using Layout = Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SPLIT>;
    using Shared = typename Layout::Shared;
    constexpr bool DEAL = TOKENS > 128;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned ring = shared_address(memory) + misplaced;
    Shared& shared = *reinterpret_cast<Shared*>(memory + misplaced + Layout::REST);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        if constexpr (!GATHER) prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), GATHER ? 2 : 1);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * WARPGROUPS * (WARPGROUP / 32));
        }
        mbarrier_init(shared_address(&shared.skewed), WARPGROUP / 32);
        fence_mbarrier_init();
    }
    cluster_sync<CLUSTER>();
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (DEAL) setmaxnreg_inc<224>();
        compute_fp4_tiles<T, ACTIVATION, Layout>(p, shared, ring);
    } else {
        if constexpr (DEAL) setmaxnreg_dec<56>();
        if (threadIdx.x < WARPGROUPS * WARPGROUP + 32) {
            if constexpr (GATHER)
                gather_fp4_tiles<Layout, ACTIVATION, STREAMED>(p, shared, ring);
            else
                load_fp4_tiles<Layout, ACTIVATION, STREAMED>(p, shared, ring);
        }
    }
    // A block may not end while others of its cluster write to its shared memory.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
