// Multi-head latent attention (DeepSeek) at decode time with Hopper's wgmma. Heads have 576 dimensions, or 512 with an
// 8-bit cache, and values have 512. The heads of a group share one key per token, and the first 512 elements of the key
// are the value.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    causal: only t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : 512], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row without tokens gets out = 0 and lse = +inf. A part is the work of the thread blocks with the same blockIdx.z
// (see parts.cuh). If a sequence is split over several parts, each part stores a partial result, and combine_parts
// merges the partial results.
//
// Grid: (ceil(rows / 64), kv_heads, parts) blocks of 384 threads. A block uses all the shared memory of a
// multiprocessor.
//
// A block has 64 query rows and three warpgroups. One is the producer. It loads the keys in one of three ways: by TMA
// (wgmma_tma.cuh), by cp.async if there are `indices` (wgmma_gather.cuh), or through registers if the cache has 8-bit
// elements, which must be converted (wgmma_convert.cuh). The other two warpgroups are consumers. Each consumer computes
// half of the output columns, because one warpgroup has too few registers for all columns. Tiles of 64 keys go
// alternately into two buffers, one for each consumer. For its own tile n a consumer computes
//
//   S = Q K[n]',   then its half of P[n - 1] V[n - 1]; the other consumer has already stored P[n - 1],
//   P[n] = exp2(S - base), stored for the other consumer,   then its half of P[n] V[n].
//
// The consumers alternate: while one exponentiates, the MMAs of the other keep the tensor cores busy. (FlashMLA's
// "seesaw" schedule has the same idea. Here both consumers run the same program, half a period apart.) Both consumers
// must use the same base for a row, so a consumer passes its base on with the probabilities. A consumer raises the base
// to the row's maximum only if the maximum exceeds the base by more than BASE_LAG. The probabilities of a tile
// overwrite the rotary part of its keys, which is used only for S. A half of a buffer is refilled as soon as the last
// MMA that reads it is complete.
//
// Speed of light: up to about 100 rows per kv head the limit is memory bandwidth, and with more rows it is the tensor
// cores. A row costs 2 (576 + 512) operations per token of 1152 bytes. The floor is the longer of two times: the time
// to copy that many bytes, and the time of the operations at the rate of a large GEMM. On an H200 with 128 sequences of
// 4096 tokens, the kernel reaches 89 % of the floor with 64 heads (164.5 us), 75 % with 128 heads (246.3 us), and 80 %
// with two query tokens of 128 heads (459.7 us). One sequence of 8192 tokens is latency-bound: it takes 22.1 us,
// combine_parts included, and its floor is 2.8 us.
//
// attend_two_loaders replaces this kernel if TMA cannot copy the tokens and EXTRA is false, except for float16 queries
// over an 8-bit cache.
#include "common/launch.cuh"
#include "mla_decode/wgmma_compute.cuh"
#include "mla_decode/wgmma_convert.cuh"
#include "mla_decode/wgmma_gather.cuh"
#include "mla_decode/wgmma_shared.cuh"
#include "mla_decode/wgmma_tma.cuh"

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

//   T        type of the queries and results
//   FP8      the cache has 8-bit elements
//   GATHER   the tokens are given by `indices`
//   EXTRA    there is a second cache, or topk_lengths limits the indices
//   BYTES    bytes per token of an 8-bit cache: 656, or with EXTRA also 584
template <typename T, bool FP8, bool GATHER, bool EXTRA = false, int BYTES = BYTES_OF_576>
__global__ __launch_bounds__(WGMMA_THREADS, 1) void attend_wgmma(const __grid_constant__ WgmmaParams params) {
#if HAS_WGMMA
    constexpr bool TMA = !FP8 && !GATHER;
    constexpr int KEY_TILES = BYTES == BYTES_OF_512 ? VALUE_TILES : TILES;
    static_assert((GATHER || !EXTRA) && (BYTES == BYTES_OF_576 || (FP8 && EXTRA)), "");
    // Registers per thread: 168 at launch. setmaxnreg moves registers from the producer to the consumers.
    constexpr int LOADING = FP8 || EXTRA ? 88 : GATHER ? 72 : 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (TMA && threadIdx.x == WARPGROUP) prefetch_tensormap(params.map);
    if (threadIdx.x == 0) init_shared<FP8, TMA>(shared);
    __syncthreads(); // the barriers are initialized
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
