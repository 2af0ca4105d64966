// Attention at decode time over a latent cache (multi-head latent attention, DeepSeek), by Hopper's wgmma, for heads of 576
// dimensions, or 512 of an 8-bit cache, and values of 512. The heads of a group share one key per token; its first 512 numbers are the value.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    if causal for t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : 512], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row with no token has out = 0 and lse = +inf. A sequence in several parts leaves partial results for combine_parts.
//
// Grid: (ceil(rows / 64), kv_heads, parts) blocks of 384 threads, with all the shared memory.
//
// A block has 64 rows and three warpgroups. One loads: by TMA (wgmma_tma.cuh), or by itself where tokens are named by
// indices (wgmma_gather.cuh) or must be converted (wgmma_convert.cuh). Two compute half the columns of the output each,
// because the registers of one do not hold more. Keys come in tiles of 64 tokens, alternately into two buffers, one for
// each computing warpgroup. For its own tile n a warpgroup computes
//
//   S = Q K[n]',   then its half of P[n - 1] V[n - 1], whose probabilities the other warpgroup has stored by now,
//   P[n] = exp2(S - base), stored for the other,   then its half of P[n] V[n].
//
// So the two take turns: while one exponentiates, the products of the other keep the tensor cores busy (the idea of
// FlashMLA's "seesaw" schedule; here both do the same, half a period apart). The output of both must be relative to the
// same base of a row. It follows the maximum only when that is BASE_LAG above, and goes from one to the other with the
// probabilities. These are stored over the rotary part of their own keys, which nobody reads any more. A half of a buffer is
// loaded again as soon as the last product with it is done.
//
// Bound by memory up to about 100 rows of a kv head, and by the tensor cores beyond: a row takes 2 (576 + 512) operations
// for each token, of 1152 bytes. Of the floor (bytes at copy bandwidth, or operations at the rate of a large product,
// whichever is longer) it reaches on an H200, for 128 sequences of 4096 tokens: 89 % with 64 heads (164.5 us), 75 % with 128
// (246.3 us), 80 % with two query tokens of 128 heads (459.7 us). One sequence of 8192 tokens takes 22.1 us, combine_parts
// included, for a floor of 2.8: there latency is the bound. Without a second cache, attend_two_loaders takes the place of this
// kernel where TMA cannot copy.
#include "common/launch.cuh"
#include "mla_decode/wgmma_compute.cuh"
#include "mla_decode/wgmma_convert.cuh"
#include "mla_decode/wgmma_gather.cuh"
#include "mla_decode/wgmma_shared.cuh"
#include "mla_decode/wgmma_tma.cuh"

// Initialize the barriers and the flags.
template <bool FP8, bool TMA> __device__ __forceinline__ void init_shared(WgmmaShared& shared) {
    for (int i = 0; i < 2; ++i) {
        for (int tile = 0; tile < TILES; ++tile)
            mbarrier_init(shared_address(&shared.full[i][tile]), FP8 ? WARPGROUP / 32 : 1);
        for (int half = 0; half < 2; ++half) mbarrier_init(shared_address(&shared.empty[i][half]), WARPGROUP / 32);
    }
    mbarrier_init(shared_address(&shared.queries_full), TMA ? WARPGROUP - 32 : WARPGROUP);
    mbarrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
    mbarrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
    for (int i = 0; i < VISITS; ++i) shared.bad[i] = 0;
    fence_mbarrier_init();
}

template <typename, bool FP8, bool, bool = false, int = BYTES_OF_576> constexpr Launch attend_wgmma_launch() {
    return {WGMMA_THREADS, all_for(BEFORE_SHARED + int(FP8 ? sizeof(ConvertShared) : sizeof(WgmmaShared)))};
}

// T: the type of the queries and results. FP8: an 8-bit cache. GATHER: with `indices`. EXTRA: with a second cache, or with
// numbers of the indices that count. BYTES: of a token of an 8-bit cache, 656, or with EXTRA 584.
template <typename T, bool FP8, bool GATHER, bool EXTRA = false, int BYTES = BYTES_OF_576>
__global__ __launch_bounds__(WGMMA_THREADS, 1) void attend_wgmma(const __grid_constant__ WgmmaParams params) {
#if HAS_WGMMA
    constexpr bool TMA = !FP8 && !GATHER;
    constexpr int KEY_TILES = BYTES == BYTES_OF_512 ? VALUE_TILES : TILES;
    static_assert((GATHER || !EXTRA) && (BYTES == BYTES_OF_576 || (FP8 && EXTRA)), "");
    // Registers of a thread: the launch gives 168 to each, of which the loading warpgroup leaves most to the others.
    constexpr int LOADING = FP8 || EXTRA ? 88 : GATHER ? 72 : 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (TMA && threadIdx.x == WARPGROUP) prefetch_tensormap(params.map);
    if (threadIdx.x == 0) init_shared<FP8, TMA>(shared);
    __syncthreads();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 0, EXTRA, KEY_TILES>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 1, EXTRA, KEY_TILES>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<LOADING>();
        if constexpr (FP8)
            convert_tiles<T, GATHER, EXTRA, BYTES>(params.p, shared, queries);
        else if constexpr (GATHER)
            gather_tiles<T, EXTRA>(params.p, shared, queries);
        else
            load_tiles<T>(params, shared, queries);
    }
#endif
}
