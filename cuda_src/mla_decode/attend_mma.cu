// Multi-head latent attention (DeepSeek) at decode time with mma.sync, for every GPU from sm_80 on. The heads of a
// group share one key per token, and the first head_dim_v elements of the key are the value.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    causal: only t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : head_dim_v], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row without tokens gets out = 0 and lse = +inf. A part is the work of the thread blocks with the same blockIdx.z
// (see parts.cuh). If a sequence is split over several parts, each part stores a partial result, and combine_parts
// merges the partial results.
//
// Grid: (ceil(rows / ROWS), kv_heads, parts) blocks of 256 threads, with Form<...>::BYTES of dynamic shared memory.
// mma_form.cuh describes how the warps divide the work.
//
// Speed of light: memory bandwidth if a kv head has few rows. A token of 1152 bytes (8-bit cache: 656) is read once and
// costs 2 (576 + 512) operations per row. The floor is the longer of two times: the time to copy that many bytes, and
// the time of the operations at the rate of a large GEMM. On an H200 with 128 sequences of 4096 tokens and 16 heads,
// the kernel reaches 96 % of the floor over a 16-bit cache (148.8 us) and 81 % over an 8-bit cache (101.6 us). With 128
// heads the tensor cores are the limit. On Hopper, mma.sync reaches only part of the tensor cores' rate, so the kernel
// reaches 36 % of the floor (500.8 us). With DIM == 0 (head sizes from the kernel arguments) it reaches 24 % (768.2
// us).
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

template <typename F> using TileOf = typename Choose<F::FP8, Tile8<F>, Tile16<F>>::Type;
template <typename F> using SoftmaxOf = Softmax<F, typename TileOf<F>::Scales>;
template <typename F>
using RingOf = typename Choose<F::APART, BarrierRing<F, TileOf<F>>, LockstepRing<F, TileOf<F>>>::Type;

// A reusable barrier for all threads of the block. It is an mbarrier and not a named barrier, because compute-sanitizer
// loses track of named barriers if a kernel mixes several kinds of barriers.
struct Meeting {
    const unsigned barrier;
    int met = 0;

    __device__ __forceinline__ void wait() {
        mbarrier_arrive(barrier);
        mbarrier_wait(barrier, met++);
    }
};

// Store the output rows of a group of warps if no other group computes the same rows (RINGS == 1).
template <typename F>
__device__ __forceinline__ void write_rows(const Params& p, const Thread<F>& thread, const SoftmaxOf<F>& softmax,
                                           const float (&out)[F::M][F::V][4], int sequence, bool bad) {
    thread.group_barrier(); // the group's sums are in shared memory
    // Compute `part` and `visit` again here, so that they do not occupy registers in the mainloop.
    const Part part(p, blockIdx.z);
    const VisitOf<F::EXTRA> visit(p, part, sequence);
#pragma unroll
    for (int m = 0; m < F::M; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < F::MEMBERS; ++i) total += softmax.sums[i * F::GROUP_ROWS + thread.row_of(m, j)];
            const Destination<typename F::T> to(p, part, visit, thread.kv_head,
                                                thread.first_row() + thread.row_of(m, j), softmax.base[m][j], total,
                                                bad, thread.member == 0 && thread.pair == 0);
            TileOf<F>::store(p, thread, to, out[m], j);
        }
}

// Merges the results of the two groups of warps if both groups compute all rows, each over every second tile (RINGS ==
// 2). The exponentials of a row are 2^(score - base), and the two groups may have different bases.
template <typename F> struct MergedRows {
    float base[2], total[2];
    float factors[2][2]; // [group][row half]: rescales a group to the common base

    __device__ __forceinline__ MergedRows(const Thread<F>& thread, const SoftmaxOf<F>& softmax) {
        constexpr int GROUP = F::MEMBERS * F::GROUP_ROWS;
        const float* const sums = softmax.sums - thread.group * GROUP;
        const float* const bases = softmax.maxima - thread.group * GROUP;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int at = thread.row_of(0, j);
            base[j] = fmaxf(bases[at], bases[GROUP + at]);
            total[j] = 0.f;
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                factors[g][j] = fast_exp2(bases[g * GROUP + at] - base[j]);
#pragma unroll
                for (int i = 0; i < F::MEMBERS; ++i)
                    total[j] += sums[g * GROUP + i * F::GROUP_ROWS + at] * factors[g][j];
            }
        }
    }

    // Add the output of group 1 to the output of group 0, through shared memory.
    __device__ __forceinline__ void add(const Thread<F>& thread, char* shared, float (&out)[F::V][4],
                                        Meeting& meeting) const {
        float4* const given = reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + thread.member * 32 + thread.lane;
#pragma unroll
        for (int start = 0; start < F::V; start += F::GIVEN) {
#pragma unroll
            for (int n = start; n < start + F::GIVEN; ++n)
                if (thread.group == 1)
                    given[(n - start) * F::MEMBERS * 32] = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
            meeting.wait(); // the fragments of group 1 are in shared memory
#pragma unroll
            for (int n = start; n < start + F::GIVEN; ++n)
                if (thread.group == 0) {
                    const float4 four = given[(n - start) * F::MEMBERS * 32];
                    const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        out[n][i] = out[n][i] * factors[0][i / 2] + others[i] * factors[1][i / 2];
                }
            meeting.wait(); // group 0 has read the fragments
        }
    }
};

template <typename F>
__device__ __forceinline__ void write_merged(const Params& p, const Thread<F>& thread, char* shared,
                                             const SoftmaxOf<F>& softmax, float (&out)[F::M][F::V][4], Meeting& meeting,
                                             int sequence) {
    meeting.wait(); // the sums and bases of both groups are in shared memory
    const MergedRows<F> merged(thread, softmax);
    merged.add(thread, shared, out[0], meeting);
    if (thread.group == 1) return;
    const Part part(p, blockIdx.z);
    const VisitOf<F::EXTRA> visit(p, part, sequence);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        // The `bad` argument can be false: if a page or slot is invalid, store_sums has already made the total NaN.
        const Destination<typename F::T> to(p, part, visit, thread.kv_head, thread.first_row() + thread.row_of(0, j),
                                            merged.base[j], merged.total[j], false,
                                            thread.member == 0 && thread.pair == 0);
        TileOf<F>::store(p, thread, to, out[0], j);
    }
}

template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V, bool EXTRA = false>
constexpr Launch attend_mma_launch() {
    using F = Form<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V, EXTRA>;
    return {32 * F::WARPS, F::BYTES};
}

//   T            type of the queries and results
//   FP8          the cache has 8-bit elements
//   ROWS         query rows of a block: 16, 32 or 64
//   TILE         tokens of a tile: 16, 32 or 64
//   STAGES       stages of a ring, one tile each
//   DIM, DIM_V   576 and 512; with an 8-bit cache and EXTRA also 512 and 512; or 0 and 0 for sizes from the arguments,
//                which are multiples of 16 up to 576 (not with ROWS == 64)
//   EXTRA        there is a second cache, or topk_lengths limits the indices
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V, bool EXTRA = false>
__global__ __launch_bounds__(256, 1) void attend_mma(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = Form<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V, EXTRA>;
    extern __shared__ __align__(1024) char shared[];
    __shared__ unsigned long long met;
    const unsigned shared_at = shared_address(shared);
    const Thread<F> thread;
    const Part part(p, blockIdx.z);
    if (part.first > part.last) return;

    Meeting meeting{shared_address(&met)};
    RingOf<F> ring(thread, shared, shared_at);
    ring.init(thread, meeting.barrier);
    ring.start(p, part, thread);
    const TileOf<F> tiles(thread);
    typename TileOf<F>::Queries queries(thread, shared);
    SoftmaxOf<F> softmax(thread, shared);

#pragma unroll 1
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const VisitOf<F::EXTRA> visit(p, part, sequence);
        queries.load_visit(p, visit, thread);
        float out[F::M][F::V][4] = {};
        softmax.begin_visit();
        bool bad = !visit.whole;
        // All rows of the group attend to the tokens before `all_see`, so only later tiles need the causal mask.
        const int all_see = p.causal ? causal_end(p, visit.length, thread.first_row()) : visit.length;
        // When this barrier completes, the group's queries are in shared memory, and the group has read the sums of the
        // previous sequence.
        thread.group_barrier();
#pragma unroll 1
        for (int token = visit.begin + thread.first_token(); token < visit.end; token += F::RINGS * TILE) {
            const int tile_offset = (thread.first_stage() + ring.stage) * F::TILE_BYTES;
            const Arrival arrival = ring.acquire(p, part, thread);
            float scores[F::N][F::M][4] = {};
            tiles.add_scores(p, thread, scores, queries, shared + tile_offset, shared_at + tile_offset);
            softmax.send(thread, scores);
            thread.group_barrier(); // the group's partial scores are in shared memory
            softmax.begin_tile();
            if (thread.owns()) {
                softmax.receive(p, thread, scores);
                softmax.scales.load(thread, shared + tile_offset);
                if (arrival.valid != all_valid<F>() || (p.causal && token + TILE > all_see))
                    softmax.mask(p, thread, scores, visit, arrival, token);
                softmax.find_maxima(scores);
                softmax.exponentiate(thread, scores);
            }
            bad |= arrival.bad != 0;
            // When this barrier completes, the group's probabilities are in shared memory.
            if (thread.group_barrier_any(softmax.lags)) softmax.rescale(thread, scores, out);
            softmax.end_tile();
            tiles.add_values(p, thread, out, softmax.probabilities, shared_at + tile_offset);
            ring.release(p, part, thread);
        }
        softmax.store_sums(thread, bad);
        if constexpr (F::RINGS == 2)
            write_merged<F>(p, thread, shared, softmax, out, meeting, sequence);
        else
            write_rows<F>(p, thread, softmax, out, sequence, bad);
    }
}
