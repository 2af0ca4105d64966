// Compute latent attention at decode time for tokens that TMA cannot copy: tokens of an 8-bit cache with 656 bytes per
// token, or tokens that `indices` select. The formulas are in attend_wgmma.cu.
//
// Grid: (ceil(rows / 64), kv_heads, SM parts) blocks of 512 threads, one block per multiprocessor. An SM part is a
// block's range of the work (parts.cuh).
//
// The two consumer warpgroups work as in attend_wgmma. Two producer warpgroups gather tokens with `indices`
// (two_loaders_gather.cuh) or convert 8-bit tokens (two_loaders_convert.cuh), because one producer warpgroup would be
// too slow. With four warpgroups a thread has 128 registers at launch, so an MMA with 256 columns of values is split
// into two (see Consumer).
//
// If two blocks of a sequence shared their loads through distributed shared memory, as in FlashMLA, the kernel would be
// 2 % faster for an 8-bit cache, and slower for `indices` (notebooks/mla_decode_speed.ipynb).
//
// Speed of light: as in attend_wgmma.cu. Times on an H200; a percentage is the floor divided by the time:
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
    // The number of warps that arrive at the full barrier of a half of the value columns. With FP8, every producer warp
    // converts a share of each half; else two warps gather a half.
    constexpr int WARPS = FP8 ? PRODUCER_WARPS : 2;
    for (int i = 0; i < 2; ++i) {
        for (int tile = 0; tile < TILES; ++tile)
            mbarrier_init(shared_address(&shared.full[i][tile]),
                          FP8 && tile == ROTARY_FULL ? PRODUCER_WARPS * 32 : WARPS);
        for (int half = 0; half < 2; ++half) mbarrier_init(shared_address(&shared.empty[i][half]), WARPGROUP / 32);
    }
    mbarrier_init(shared_address(&shared.queries_full), PRODUCER_WARPS * 32);
    mbarrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
    mbarrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
    for (int i = 0; i < BAD_FLAGS; ++i) shared.bad[i] = 0;
    fence_mbarrier_init();
}

template <typename, bool FP8, bool> constexpr Launch attend_two_loaders_launch() {
    return {TWO_LOADERS_THREADS, all_for(BEFORE_SHARED + int(FP8 ? sizeof(ConverterShared) : sizeof(WgmmaShared)))};
}

//   T        type of the queries; bfloat16 with FP8
//   FP8      the cache has 656 bytes per token
//   GATHER   `indices` select the tokens
template <typename T, bool FP8, bool GATHER>
__global__ __launch_bounds__(TWO_LOADERS_THREADS,
                             1) void attend_two_loaders(const __grid_constant__ WgmmaParams params) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    static_assert(FP8 || GATHER, "TMA copies the rest");
    // A thread has 128 registers at launch. setmaxnreg moves registers from the producers to the consumers.
    constexpr int PRODUCER_REGISTERS = 48, CONSUMER_REGISTERS = 256 - PRODUCER_REGISTERS;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + padding;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + padding + 3 * TILES * TILE_BYTES);
    if (threadIdx.x == 0) init_two_loaders<FP8>(shared);
    __syncthreads(); // the barriers are initialized
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute<T, FP8, GATHER, 0, false, TILES, ROTARY_FULL>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute<T, FP8, GATHER, 1, false, TILES, ROTARY_FULL>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (FP8)
            convert_by_two<T, GATHER>(params.p, shared, queries);
        else
            gather_by_two<T>(params.p, shared, queries);
    }
#endif
}
