// Attention at decode time over a latent cache, as attend_wgmma.cu describes and with the same results, where TMA
// cannot copy the tokens: over a cache of 656 bytes a token, or with `indices`.
//
// Grid: (ceil(rows / 64), kv_heads, parts) blocks of 512 threads, with all the shared memory.
//
// Two warpgroups compute, as in attend_wgmma, and two instead of one gather (two_loaders_gather.cuh) or convert
// (two_loaders_convert.cuh): they take less time for a tile, which the others wait for. So all threads begin with 128
// registers, not 168, and a product with 256 columns of values is two of 128.
//
// With those that gather, whose copies take longer than the products, a warpgroup that computes adds the values of the
// other's tile before the scores of its own, so that the buffer is free as soon as it can be. With those that convert it
// computes the scores first, as in attend_wgmma, and shows its probabilities before it waits for the other's values:
// while one exponentiates, the products of the other go on. A warp that converts holds the bytes of a whole tile in
// registers, and waits for no load before it needs it.
//
// Each block loads for its own 64 rows alone. Two blocks of the same sequence that share what they load, through the
// shared memory of a cluster (FlashMLA), gained 2 % over an 8-bit cache, and lost with the indices of 16 bits: the
// notebook has the figures.
//
// Of the floor (see attend_wgmma.cu) it reaches on an H200 over an 8-bit cache, for 128 sequences of 4096 tokens, 56 %
// with 128 heads (328 us) and 52 % with 64 (176 us), where attend_wgmma takes 462 and 242. With 2048 indices for each
// of 64 queries: 8 bits 50 % with 128 heads (92.3 us) and 36 % with 64 (63.3 us), where attend_wgmma takes 130.3 and
// 83.3; 16 bits 59 % with 128 heads (78.2 us) and 54 % with 64 (62.4 us), where attend_wgmma takes 142.0 and 91.3.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "mla_decode/two_loaders_convert.cuh"
#include "mla_decode/two_loaders_gather.cuh"
#include "mla_decode/two_loaders_shared.cuh"
#include "mla_decode/wgmma_compute.cuh"

// Initialize the barriers and the flags.
template <bool FP8> __device__ __forceinline__ void init_two_loaders(WgmmaShared& shared) {
    // A tile is converted by all warps that load; a half of it is gathered by two.
    constexpr int WARPS = FP8 ? LOADING_WARPS : 2;
    for (int i = 0; i < 2; ++i) {
        for (int tile = 0; tile < TILES; ++tile)
            mbarrier_init(shared_address(&shared.full[i][tile]),
                          FP8 && tile == ROTARY_FULL ? LOADING_WARPS * 32 : WARPS);
        for (int half = 0; half < 2; ++half) mbarrier_init(shared_address(&shared.empty[i][half]), WARPGROUP / 32);
    }
    mbarrier_init(shared_address(&shared.queries_full), LOADING_WARPS * 32);
    mbarrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
    mbarrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
    for (int i = 0; i < VISITS; ++i) shared.bad[i] = 0;
    fence_mbarrier_init();
}

template <typename, bool FP8, bool> constexpr Launch attend_two_loaders_launch() {
    return {TWO_LOADERS_THREADS, all_for(BEFORE_SHARED + int(FP8 ? sizeof(ConverterShared) : sizeof(WgmmaShared)))};
}

// T: the type of the queries and results; with FP8 bfloat16. FP8: a cache of 656 bytes a token. GATHER: with `indices`.
template <typename T, bool FP8, bool GATHER>
__global__ __launch_bounds__(TWO_LOADERS_THREADS,
                             1) void attend_two_loaders(const __grid_constant__ WgmmaParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    static_assert(FP8 || GATHER, "TMA copies the rest");
    // Registers of a thread: the launch gives 128 to each, of which those that load leave most to the others.
    constexpr int LOADING = 48, COMPUTING = 256 - LOADING;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (threadIdx.x == 0) init_two_loaders<FP8>(shared);
    __syncthreads();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 0, false, TILES, ROTARY_FULL>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 1, false, TILES, ROTARY_FULL>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<LOADING>();
        if constexpr (FP8)
            convert_by_two<T, GATHER>(params.p, shared, queries);
        else
            gather_by_two<T>(params.p, shared, queries);
    }
#endif
}
