// Compute multi-head latent attention (DeepSeek) at decode time with mma.sync, for every GPU from sm_80 on. The
// formulas are in attend_wgmma.cu; a value has head_dim_v elements.
//
// Grid: (ceil(rows / ROWS), kv_heads, SM parts) blocks of 256 threads. An SM part is a block's range of the work
// (parts.cuh). mma_form.cuh describes the work of the warps.
//
// Speed of light: memory bandwidth for few rows per kv head, else the tensor cores. attend_wgmma.cu defines the floor;
// a token of an 8-bit cache has 656 bytes instead of 1152. On an H200 with 128 sequences of 4096 tokens:
//
//   16 heads, 16-bit cache                                  148.8 us   96 % of the floor
//   16 heads, 8-bit cache                                   101.6 us   81 %
//   128 heads, 16-bit cache                                 500.8 us   36 %, because mma.sync is slower than wgmma
//   128 heads, DIM == 0 (head sizes from the arguments)     768.2 us   24 %
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/mma_ring.cuh"
#include "mla_decode/mma_softmax.cuh"
#include "mla_decode/mma_tile16.cuh"
#include "mla_decode/mma_tile8.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

template <typename F> using TileOf = typename Conditional<F::FP8, Tile8<F>, Tile16<F>>::Type;
template <typename F> using SoftmaxOf = Softmax<F, typename TileOf<F>::Scales>;
template <typename F>
using RingOf = typename Conditional<F::INDEPENDENT_GROUPS, BarrierRing<F, TileOf<F>>, LockstepRing<F, TileOf<F>>>::Type;

// A barrier for all threads of the block. It is an mbarrier, because compute-sanitizer loses track of named barriers if
// a kernel mixes several kinds of barriers.
struct BlockBarrier {
    const unsigned barrier;
    int phase = 0;

    __device__ __forceinline__ void wait() {
        mbarrier_arrive(barrier);
        mbarrier_wait(barrier, phase++);
    }
};

// Store the output. The groups of warps divide the rows (RINGS == 1).
template <typename F>
__device__ __forceinline__ void write_rows(const Params& p, const Thread<F>& thread, const SoftmaxOf<F>& softmax,
                                           const float (&out)[F::M][F::V][4], int sequence, bool bad) {
    thread.group_barrier(); // the sums are in shared memory
    // Compute `sm_part` and `split` again, so that they occupy no registers in the mainloop.
    const SmPart sm_part(p, blockIdx.z);
    const SplitOf<F::EXTRA> split(p, sm_part, sequence);
#pragma unroll
    for (int m = 0; m < F::M; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < F::GROUP_WARPS; ++i) total += softmax.sums[i * F::GROUP_ROWS + thread.row_of(m, j)];
            const Destination<typename F::T> to(p, sm_part, split, thread.kv_head,
                                                thread.first_row() + thread.row_of(m, j), softmax.row_max[m][j], total,
                                                bad, thread.group_warp == 0 && thread.pair == 0);
            TileOf<F>::store(p, thread, to, out[m], j);
        }
}

// Merges the results of the two groups of warps. Both groups compute all rows (RINGS == 2).
template <typename F> struct MergedRows {
    float row_max[2], total[2];
    float factors[2][2]; // [group][row half]: rescales to the common row_max

    __device__ __forceinline__ MergedRows(const Thread<F>& thread, const SoftmaxOf<F>& softmax) {
        constexpr int GROUP = F::GROUP_WARPS * F::GROUP_ROWS;
        const float* const sums = softmax.sums - thread.group * GROUP;
        const float* const row_maxima = softmax.maxima - thread.group * GROUP;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int at = thread.row_of(0, j);
            row_max[j] = fmaxf(row_maxima[at], row_maxima[GROUP + at]);
            total[j] = 0.f;
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                factors[g][j] = fast_exp2(row_maxima[g * GROUP + at] - row_max[j]);
#pragma unroll
                for (int i = 0; i < F::GROUP_WARPS; ++i)
                    total[j] += sums[g * GROUP + i * F::GROUP_ROWS + at] * factors[g][j];
            }
        }
    }

    // Add the output of group 1 to the output of group 0, through shared memory.
    __device__ __forceinline__ void add(const Thread<F>& thread, char* shared, float (&out)[F::V][4],
                                        BlockBarrier& block_barrier) const {
        float4* const exchanged =
            reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + thread.group_warp * 32 + thread.lane;
#pragma unroll
        for (int start = 0; start < F::V; start += F::EXCHANGED_FRAGMENTS) {
#pragma unroll
            for (int n = start; n < start + F::EXCHANGED_FRAGMENTS; ++n)
                if (thread.group == 1)
                    exchanged[(n - start) * F::GROUP_WARPS * 32] =
                        make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
            block_barrier.wait(); // the output of group 1 is in shared memory
#pragma unroll
            for (int n = start; n < start + F::EXCHANGED_FRAGMENTS; ++n)
                if (thread.group == 0) {
                    const float4 four = exchanged[(n - start) * F::GROUP_WARPS * 32];
                    const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        out[n][i] = out[n][i] * factors[0][i / 2] + others[i] * factors[1][i / 2];
                }
            block_barrier.wait(); // group 0 has read it
        }
    }
};

template <typename F>
__device__ __forceinline__ void write_merged(const Params& p, const Thread<F>& thread, char* shared,
                                             const SoftmaxOf<F>& softmax, float (&out)[F::M][F::V][4],
                                             BlockBarrier& block_barrier, int sequence) {
    block_barrier.wait(); // the sums and row maxima are in shared memory
    const MergedRows<F> merged(thread, softmax);
    merged.add(thread, shared, out[0], block_barrier);
    if (thread.group == 1) return;
    const SmPart sm_part(p, blockIdx.z);
    const SplitOf<F::EXTRA> split(p, sm_part, sequence);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        // Pass false for `bad`, because store_sums has set the total to NaN if a page or slot is invalid.
        const Destination<typename F::T> to(p, sm_part, split, thread.kv_head, thread.first_row() + thread.row_of(0, j),
                                            merged.row_max[j], merged.total[j], false,
                                            thread.group_warp == 0 && thread.pair == 0);
        TileOf<F>::store(p, thread, to, out[0], j);
    }
}

template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V, bool EXTRA = false>
constexpr Launch attend_mma_launch() {
    using F = MmaConfig<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V, EXTRA>;
    return {32 * F::WARPS, F::BYTES};
}

//   ROWS, TILE   query rows of a block, and tokens of a tile: 16, 32 or 64
//   DIM, DIM_V   576 and 512; 512 and 512 with an 8-bit cache and EXTRA; or 0 and 0: sizes from the arguments,
//                multiples of 16 up to 576 (not with ROWS == 64)
//   EXTRA        there is a second cache, or topk_lengths limits the indices
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V, bool EXTRA = false>
__global__ __launch_bounds__(256, 1) void attend_mma(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = MmaConfig<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V, EXTRA>;
    extern __shared__ __align__(1024) char shared[];
    __shared__ unsigned long long block_mbarrier;
    const unsigned shared_at = shared_address(shared);
    const Thread<F> thread;
    const SmPart sm_part(p, blockIdx.z);
    if (sm_part.first_sequence > sm_part.last_sequence) return;

    BlockBarrier block_barrier{shared_address(&block_mbarrier)};
    RingOf<F> ring(thread, shared, shared_at);
    ring.init(thread, block_barrier.barrier);
    ring.start(p, sm_part, thread);
    const TileOf<F> tiles(thread);
    typename TileOf<F>::Queries queries(thread, shared);
    SoftmaxOf<F> softmax(thread, shared);

#pragma unroll 1
    for (int sequence = sm_part.first_sequence; sequence <= sm_part.last_sequence; ++sequence) {
        const SplitOf<F::EXTRA> split(p, sm_part, sequence);
        queries.load_split(p, split, thread);
        float out[F::M][F::V][4] = {};
        softmax.begin_split();
        bool bad = !split.covered;
        // Only tiles that end after `unmasked_end` need the causal mask.
        const int unmasked_end = p.causal ? causal_end(p, split.length, thread.first_row()) : split.length;
        // After this barrier the queries are in shared memory, and the group has read the sums of the previous
        // sequence.
        thread.group_barrier();
#pragma unroll 1
        for (int token = split.begin + thread.first_token(); token < split.end; token += F::RINGS * TILE) {
            const int tile_offset = (thread.first_stage() + ring.stage) * F::TILE_BYTES;
            const Arrival arrival = ring.acquire(p, sm_part, thread);
            float scores[F::N][F::M][4] = {};
            tiles.add_scores(p, thread, scores, queries, shared + tile_offset, shared_at + tile_offset);
            softmax.send(thread, scores);
            thread.group_barrier(); // the partial scores are in shared memory
            softmax.begin_tile();
            if (thread.owns()) {
                softmax.receive(p, thread, scores);
                softmax.scales.load(thread, shared + tile_offset);
                if (arrival.valid != all_valid<F>() || (p.causal && token + TILE > unmasked_end))
                    softmax.mask(p, thread, scores, split, arrival, token);
                softmax.find_maxima(scores);
                softmax.exponentiate(thread, scores);
            }
            bad |= arrival.bad != 0;
            // After this barrier the probabilities are in shared memory.
            if (thread.group_barrier_any(softmax.needs_rescale)) softmax.rescale(thread, scores, out);
            softmax.end_tile();
            tiles.add_values(p, thread, out, softmax.probabilities, shared_at + tile_offset);
            ring.release(p, sm_part, thread);
        }
        softmax.store_sums(thread, bad);
        if constexpr (F::RINGS == 2)
            write_merged<F>(p, thread, shared, softmax, out, block_barrier, sequence);
        else
            write_rows<F>(p, thread, softmax, out, sequence, bad);
    }
}
