// Latent attention at decode time for tokens that TMA cannot copy: over an 8-bit cache of 656 bytes per token, or with
// `indices`. The formulas are in attend_wgmma.cu.
//
// Grid: (ceil(rows / 64), kv_heads, parts) blocks of 512 threads. A block uses all the shared memory of a
// multiprocessor.
//
// A block has two consumer warpgroups, as in attend_wgmma, and two producer warpgroups instead of one. The producers
// gather tokens with `indices` (two_loaders_gather.cuh) or convert 8-bit tokens (two_loaders_convert.cuh). One producer
// warpgroup would be too slow for the consumers, and two fill a tile faster. A thread starts with 128 registers instead
// of 168, so the MMA with 256 columns of values is split into two MMAs with 128 columns (see Seesaw in
// wgmma_compute.cuh).
//
// The order of a consumer's phases depends on the producers. The copies of gathering producers take longer than the
// MMAs. A consumer therefore adds the values of the other consumer's tile before it computes the scores of its own
// tile, which frees the buffer as early as possible. With converting producers, a consumer computes the scores first,
// as in attend_wgmma. It then publishes its probabilities before it waits for the MMAs with the other tile's values, so
// that the MMAs of one consumer overlap the softmax of the other. A converting warp holds the bytes of a whole tile in
// registers, and waits for a load only when it needs the bytes.
//
// Each block loads tokens for its own 64 rows only. Two blocks of the same sequence could share their loads through the
// distributed shared memory of a cluster, as in FlashMLA. In an experiment sharing was 2 % faster for an 8-bit cache,
// and slower for `indices` over a 16-bit cache (figures in notebooks/mla_decode.ipynb).
//
// Speed of light: as in attend_wgmma.cu. Times on an H200, for a cache with 8-bit or 16-bit elements; a percentage is
// the floor divided by the time:
//
//                                                heads   attend_two_loaders   attend_wgmma
//   8 bits, 128 sequences of 4096 tokens           128     328 us   (56 %)       462 us
//                                                   64     176 us   (52 %)       242 us
//   8 bits, 64 queries with 2048 indices each      128    92.3 us   (50 %)     130.3 us
//                                                   64    63.3 us   (36 %)      83.3 us
//   16 bits, 64 queries with 2048 indices each     128    78.2 us   (59 %)     142.0 us
//                                                   64    62.4 us   (54 %)      91.3 us
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "mla_decode/two_loaders_convert.cuh"
#include "mla_decode/two_loaders_gather.cuh"
#include "mla_decode/two_loaders_shared.cuh"
#include "mla_decode/wgmma_compute.cuh"

template <bool FP8> __device__ __forceinline__ void init_two_loaders(WgmmaShared& shared) {
    // WARPS is the number of warps that arrive at the full barrier of one half of the value columns. All producer warps
    // convert a share of each half, but only two warps gather a half.
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

//   T        type of the queries and results; bfloat16 with FP8
//   FP8      the cache has 656 bytes per token
//   GATHER   the tokens are given by `indices`
template <typename T, bool FP8, bool GATHER>
__global__ __launch_bounds__(TWO_LOADERS_THREADS,
                             1) void attend_two_loaders(const __grid_constant__ WgmmaParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    static_assert(FP8 || GATHER, "TMA copies the rest");
    // Registers per thread: 128 at launch. setmaxnreg moves registers from the producers to the consumers.
    constexpr int LOADING = 48, COMPUTING = 256 - LOADING;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (threadIdx.x == 0) init_two_loaders<FP8>(shared);
    __syncthreads(); // the barriers are initialized
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
