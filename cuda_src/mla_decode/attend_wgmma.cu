// Compute multi-head latent attention (DeepSeek) at decode time with Hopper's wgmma. Heads have 576 dimensions, or 512
// with an 8-bit cache; values have 512. The heads of a group share one key per token, and its first 512 elements are
// the value.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    causal: only t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : 512], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row without tokens gets out = 0 and lse = +inf. An SM part is a block's range of the work (parts.cuh). If a
// sequence is split over several SM parts, combine_parts merges the partial results.
//
// Grid: (ceil(rows / 64), kv_heads, SM parts) blocks of 384 threads, one block per multiprocessor.
//
// The producer warpgroup loads the keys: by TMA (wgmma_tma.cuh), by cp.async with `indices` (wgmma_gather.cuh), or
// through registers to convert 8-bit elements (wgmma_convert.cuh). Each of two consumer warpgroups computes half of the
// output columns, because one has too few registers for all. Tiles of 64 keys go alternately into two buffers, one per
// consumer. For its own tile n a consumer computes
//
//   S = Q K[n]',   then its half of P[n - 1] V[n - 1]; the other consumer has already stored P[n - 1],
//   P[n] = exp2(S - row_max), stored for the other consumer,   then its half of P[n] V[n].
//
// While one consumer exponentiates, the MMAs of the other keep the tensor cores busy (FlashMLA's "seesaw" schedule).
// The consumers share row_max, which is stored with P. P[n] overwrites the rotary part of the keys K[n], which is used
// only for S. Half a buffer is refilled as soon as the last MMA that reads it is complete.
//
// Speed of light: memory bandwidth up to about 100 rows per kv head, else the tensor cores. The floor is the longer of
// two times: the copy of 1152 bytes per token, and 2 (576 + 512) operations per row and token at the rate of a large
// GEMM. On an H200:
//
//   128 sequences of 4096 tokens, 64 heads                       164.5 us   89 % of the floor
//   128 sequences of 4096 tokens, 128 heads                      246.3 us   75 %
//   128 sequences of 4096 tokens, 128 heads, 2 query tokens      459.7 us   80 %
//   1 sequence of 8192 tokens, with combine_parts                 22.1 us   floor 2.8 us: latency-bound
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
    for (int i = 0; i < BAD_FLAGS; ++i) shared.bad[i] = 0;
    fence_mbarrier_init();
}

template <typename, bool FP8, bool, bool = false, int = BYTES_OF_576> constexpr Launch attend_wgmma_launch() {
    return {WGMMA_THREADS, all_for(BEFORE_SHARED + int(FP8 ? sizeof(ConvertShared) : sizeof(WgmmaShared)))};
}

//   GATHER   `indices` select the tokens
//   EXTRA    there is a second cache, or topk_lengths limits the indices
//   BYTES    bytes per token of an 8-bit cache: 656, or with EXTRA also 584
template <typename T, bool FP8, bool GATHER, bool EXTRA = false, int BYTES = BYTES_OF_576>
__global__ __launch_bounds__(WGMMA_THREADS, 1) void attend_wgmma(const __grid_constant__ WgmmaParams params) {
#if HAS_WGMMA
    constexpr bool TMA = !FP8 && !GATHER;
    constexpr int KEY_TILES = BYTES == BYTES_OF_512 ? VALUE_TILES : TILES;
    static_assert((GATHER || !EXTRA) && (BYTES == BYTES_OF_576 || (FP8 && EXTRA)), "");
    // A thread has 168 registers at launch. setmaxnreg moves registers from the producer to the consumers.
    constexpr int PRODUCER_REGISTERS = FP8 || EXTRA ? 88
                                       : GATHER     ? 72
                                                    : 40,
                  CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles need an alignment of 1024 bytes
    const unsigned queries = shared_address(memory) + padding;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + padding + 3 * TILES * TILE_BYTES);
    if (TMA && threadIdx.x == WARPGROUP) prefetch_tensormap(params.map);
    if (threadIdx.x == 0) init_shared<FP8, TMA>(shared);
    __syncthreads(); // the barriers are initialized
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute<T, FP8, GATHER, 0, EXTRA, KEY_TILES>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        compute<T, FP8, GATHER, 1, EXTRA, KEY_TILES>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (FP8)
            convert_tiles<T, GATHER, EXTRA, BYTES>(params.p, shared, queries);
        else if constexpr (GATHER)
            gather_tiles<T, EXTRA>(params.p, shared, queries);
        else
            load_tiles<T>(params, shared, queries);
    }
#endif
}
