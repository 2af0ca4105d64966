// Attention at decode time over a latent cache, as attend_wgmma.cu describes and with the same results, by blocks that spend
// less on bringing tokens: by pairs of blocks that share them, or by blocks with more warps that convert.
//
// Grid: (ceil(rows / 64), kv_heads, parts) blocks, with all the shared memory, in clusters of CLUSTER along x.
//
// CLUSTER == 2: 384 threads. Two blocks with 64 rows each of the same sequence need the same tiles. Each brings half of a
// tile to both: of a 16-bit cache by pages TMA copies it to both at once (pair_tma.cuh); tokens that `indices` name, or that
// must be converted, one block puts into its own shared memory, and has carried on to the other's from there
// (pair_gather.cuh, pair_convert.cuh). So every byte leaves L2 once, and is converted once.
// CLUSTER == 1: 512 threads, where TMA cannot copy. A block is alone, and has two warpgroups that gather or convert.
//
// FlashMLA (DeepSeek, 2025) shares the conversion between two blocks.
#include "mla_decode/pair_convert.cuh"
#include "mla_decode/pair_gather.cuh"
#include "mla_decode/pair_shared.cuh"
#include "mla_decode/pair_tma.cuh"
#include "mla_decode/wgmma_compute.cuh"

constexpr int ALONE_THREADS = 4 * WARPGROUP; // of a block with CLUSTER == 1

// Warpgroups that load.
__host__ __device__ constexpr int pair_loaders(int cluster) { return cluster == 1 ? 2 : 1; }

// Initialize the barriers and the flags.
template <bool FP8, bool GATHER, int CLUSTER> __device__ __forceinline__ void init_pair(WgmmaShared& shared) {
    constexpr bool TMA = !FP8 && !GATHER;
    constexpr int WARPS = pair_loaders(CLUSTER) * WARPGROUP / 32;
    for (int i = 0; i < 2; ++i) {
        for (int tile = 0; tile < TILES; ++tile)
            mbarrier_init(shared_address(&shared.full[i][tile]), FP8 ? WARPS : GATHER ? 2 / CLUSTER : 1);
        for (int half = 0; half < 2; ++half)
            mbarrier_init(shared_address(&shared.empty[i][half]), CLUSTER * WARPGROUP / 32);
    }
    mbarrier_init(shared_address(&shared.queries_full), (TMA ? WARPS - 1 : WARPS) * 32);
    mbarrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
    mbarrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
    for (int i = 0; i < VISITS; ++i) shared.bad[i] = 0;
    fence_mbarrier_init();
}

// T: the type of the queries and results; with FP8 bfloat16. FP8: a cache of 656 bytes a token. GATHER: with `indices`.
// FETCH: tokens that TMA does not copy are brought to the L2 cache ahead.
template <typename T, bool FP8, bool GATHER, int CLUSTER, bool FETCH>
__global__ __launch_bounds__(CLUSTER == 1 ? ALONE_THREADS : WGMMA_THREADS, 1)
    CLUSTER_OF(CLUSTER) void attend_pair(const __grid_constant__ WgmmaParams params) {
#if HAS_WGMMA
    constexpr bool TMA = !FP8 && !GATHER;
    constexpr int LOADERS = pair_loaders(CLUSTER);
    static_assert(CLUSTER == 2 || (CLUSTER == 1 && !TMA), "");
    // Registers of a thread, of 512 for the three or four warpgroups together.
    constexpr int LOADING = LOADERS == 2 ? 48 : FP8 ? 88 : GATHER ? 72 : 40;
    constexpr int COMPUTING = ((LOADERS == 2 ? 512 : 504) - LOADERS * LOADING) / 2;
    constexpr int ROTARY_APART = TMA ? 0 : ROTARY_FULL;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (TMA && threadIdx.x == 2 * WARPGROUP) prefetch_tensormap(params.map);
    if (threadIdx.x == 0) init_pair<FP8, GATHER, CLUSTER>(shared);
    cluster_sync<CLUSTER>();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 0, false, TILES, CLUSTER, ROTARY_APART, LOADERS>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 1, false, TILES, CLUSTER, ROTARY_APART, LOADERS>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<LOADING>();
        const unsigned rank = cluster_rank<CLUSTER>();
        if constexpr (FP8)
            convert_tiles_of_pair<T, GATHER, CLUSTER, FETCH>(params.p, shared, queries, rank);
        else if constexpr (GATHER)
            gather_tiles_of_pair<T, CLUSTER, FETCH>(params.p, shared, queries, rank);
        else
            load_tiles_of_pair<T, CLUSTER>(params, shared, queries, rank);
    }
    // A block may not end while the other still writes to its shared memory or arrives at its barriers.
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
