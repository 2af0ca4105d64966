// Draw a token from each row of logits or probabilities, among the tokens that top-k, top-p and min-p keep.
//
//   weight(i) = exp((x[i] - max x) / temperature)        for logits; 1 for all finite logits at an infinite temperature
//   weight(i) = max(x[i], 0)                             for probabilities
//   kept      = a prefix of the tokens in order of x, largest first, ties by the lower id
//   token     = i with probability weight(i) / sum of the kept weights
//
// The draw has two steps, so it needs few random numbers and no prefix sums over the row. The vocabulary is cut into
// groups of 32 ids. The first step draws a group by a race (the Gumbel-max trick, applied to groups): group g, whose
// kept weights sum to `W[g]`, gets an arrival time from the exponential distribution of rate `W[g]`. The group with the
// earliest time wins. Group g therefore wins with probability `W[g] / sum(W)`. The second step draws one id of the
// winning group, each with a probability proportional to its weight. The random numbers of both steps come from Philox
// with the key (seed, offset, round, g), plus the row's index if all rows have the same seed. The token therefore does
// not depend on the order of execution.
//
// Top-p uses rejection sampling, as in FlashInfer, but draws with the race. A drawn token is accepted if the weights of
// all better tokens sum to less than `top_p * sum`. Otherwise this token and all worse tokens are dropped, and the next
// round draws again. The accepted token has the right distribution over the tokens that top-p keeps, although the
// kernel never searches for the smallest kept token. The average number of rounds is at most `1 + ln(1 / top_p)`.
//
// With drafts (speculative sampling), the kernel first verifies the draft tokens of a sequence. Then it draws one token
// from the row of the first refused draft, or from the row after the last draft if none is refused.
//
// Grid: CLUSTER blocks per row; row.cuh describes how they share the row. PROBS: rows of probabilities, else logits.
//
// Speed of light: memory bandwidth; each value is read once. With filters, values that do not fit in shared memory are
// read again from L2. On an H200, 256 rows of 128256 float32 logits take 50 us without filters, which is 61% of the
// bandwidth of a copy. With top-k 40 and top-p 0.9 they take 80 us. A single row is latency-bound: the load, the
// cluster barriers and the draw take 6.9 us, or 12.5 us with these filters. The kernel triggers programmatic dependent
// launch of the next grid only after it has read the row: 64 rows take 16.2 us this way, and 16.8 us with a trigger at
// the start.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "sampling/draw_listed.cuh"
#include "sampling/first_pass.cuh"
#include "sampling/params.cuh"
#include "sampling/search.cuh"

// The bit of each parameter in the masks `wide`, `integral` and `single` of SampleParams. `wide`: the elements of the
// parameter's array have 64 bits, else 32. `integral`: the array holds integers, else float32. `single`: the array has
// one element for all rows.
enum Parameter { TOP_K = 1, SEED = 2, OFFSET = 4, TEMPERATURE = 8, TOP_P = 16, MIN_P = 32 };
constexpr int INDICES = 64; // bit in `wide` only: the indices and the ids are int64

struct SampleParams {
    const void* values;      // [rows, vocab] T: logits, or probabilities
    const void* second;      // bias [vocab] T of logits; or draft probabilities [batch, drafts, vocab] T; or null
    void* ids;               // [batch] int, or long long if the indices are; with drafts [batch, drafts + 1] int
    unsigned char* valid;    // [batch] bool, or null
    float* logprobs;         // [batch], or null
    const void* temperature; // [batch]; null: scalar_temperature; likewise for top_p to offset
    const void* top_p;
    const void* min_p;
    const void* top_k;
    const void* seed;
    const void* offset;
    const void* indices;     // [batch]: the row of each sequence, or null
    unsigned char* finished; // [batch] bool, or null
    int* sequence_length;    // [batch], or null
    const int* draft_ids;    // [batch, drafts], or null
    int* accepted;           // [batch]
    int* emitted;            // [batch]
    long long row_stride;
    unsigned long long scalar_seed, scalar_offset;
    int by_place; // all rows have the same seed, so the row's index is part of the Philox counter
    int rows, vocab, scalar_top_k, end_id, drafts;
    Layout layout;
    int wide;
    int integral;
    int single;
    int joint; // top_p is relative to the sum of the row, else to the sum of the tokens that top-k keeps
    float scalar_temperature, scalar_top_p, scalar_min_p;
};

// The parameters of a row.
struct Request {
    Stream stream;
    float scale, top_p, min_p; // scale: 2 log2(e) / temperature
    int top_k;
    bool greedy; // return the best token without a draw
};

template <bool PROBS> __device__ __forceinline__ Request request_of(const SampleParams& params, int i) {
    const auto place = [&](int bit) { return params.single & bit ? 0 : i; };
    const auto number = [&](const void* array, int bit, float scalar) {
        return array ? float_at(array, params.integral & bit, params.wide & bit, place(bit)) : scalar;
    };
    Request request;
    request.stream.seed = params.seed ? integer_at(params.seed, params.wide & SEED, place(SEED)) : params.scalar_seed;
    request.stream.offset =
        params.offset ? integer_at(params.offset, params.wide & OFFSET, place(OFFSET)) : params.scalar_offset;
    request.stream.place = params.by_place ? unsigned(i) << 8 : 0;
    const float temperature = number(params.temperature, TEMPERATURE, params.scalar_temperature);
    request.top_p = number(params.top_p, TOP_P, params.scalar_top_p);
    request.min_p = number(params.min_p, MIN_P, params.scalar_min_p);
    const long long k =
        params.top_k ? integer_at(params.top_k, params.wide & TOP_K, place(TOP_K)) : params.scalar_top_k;
    request.top_k = k < 1 || k > params.vocab ? params.vocab : k;
    request.scale = PROBS ? 1.f : scale_of(temperature);
    request.greedy = request.top_k == 1 || (!PROBS && request.scale == BEST_ALONE);
    // The temperature is infinite: all finite logits have the same weight, so min-p keeps them all.
    if (!PROBS && request.scale == ALL_ALIKE) request.min_p = 0;
    return request;
}

__device__ __forceinline__ void write_id(const SampleParams& params, long long at, int id) {
    if (params.wide & INDICES)
        static_cast<long long*>(params.ids)[at] = id;
    else
        static_cast<int*>(params.ids)[at] = id;
}

// Write the results of a sequence that had already finished. Run by one thread.
__device__ __forceinline__ void write_finished(const SampleParams& params, int i) {
    write_id(params, i, params.end_id);
    if (params.valid) params.valid[i] = true;
    if (params.logprobs) params.logprobs[i] = 0;
}

// Write the results of a row: store the drawn id in ids[drawn_at], and compute its log-probability from its value and
// the sum of all weights of the row. Run by one thread.
template <bool PROBS, typename Row>
__device__ __forceinline__ void write_result(const SampleParams& params, int i, long long drawn_at, const Row& x,
                                             int id, float value, float sum) {
    write_id(params, drawn_at, id);
    if (params.valid) params.valid[i] = x.valid();
    if (params.logprobs) {
        const float log2_prob = (PROBS ? x.log2_of(value) : x.shift(value, x.top)) - x.log2_of(sum);
        params.logprobs[i] = x.valid() ? log2_prob / LOG2_E : -CUDART_INF_F;
    }
    if (params.sequence_length) params.sequence_length[i] += 1;
    if (params.finished) params.finished[i] = id == params.end_id;
}

// --- speculative sampling ---------------------------------------------------------------------------------

// Test each draft token independently: accept the token with probability `min(1, target / draft)`, where `target` and
// `draft` are its probabilities in the target model and in the draft model. Set `refused` to the index of the first
// refused draft, or to `drafts` if none is refused. Set `accepted` to the number of accepted drafts. Each warp tests
// all drafts, so no barrier is needed.
template <typename T>
__device__ __forceinline__ void verify_drafts(const SampleParams& params, int i, Stream stream, int& refused,
                                              int& accepted) {
    refused = params.drafts, accepted = 0;
    for (int base = 0; base < params.drafts; base += 32) {
        const int n = base + threadIdx.x % 32;
        bool accept = false;
        if (n < params.drafts) {
            const long long at = (long long)i * params.drafts + n;
            const int id = params.draft_ids[at];
            if (id >= 0 && id < params.vocab) {
                const float draft = to_float(static_cast<const T*>(params.second)[at * params.vocab + id]);
                const float target = to_float(static_cast<const T*>(params.values)[(at + i) * params.vocab + id]);
                accept = uniform(stream.at(n, ~0u).z) * draft < target;
            }
        }
        const unsigned inside = params.drafts - base >= 32 ? ~0u : (1u << (params.drafts - base)) - 1;
        const unsigned accepts = __ballot_sync(FULL_WARP, accept);
        accepted += __popc(accepts);
        if (refused == params.drafts && (inside & ~accepts)) refused = base + __ffs(inside & ~accepts) - 1;
    }
}

// Write the output ids of a sequence: the accepted drafts before index `refused`, and -1 after it. The draw writes
// ids[refused]. One block calls this.
__device__ __forceinline__ void write_drafts(const SampleParams& params, int i, int refused, int accepted) {
    for (int n = threadIdx.x; n <= params.drafts; n += blockDim.x)
        if (n != refused)
            write_id(params, (long long)i * (params.drafts + 1) + n,
                     n < refused ? params.draft_ids[(long long)i * params.drafts + n] : -1);
    if (threadIdx.x == 0) params.accepted[i] = accepted, params.emitted[i] = refused;
}

// --- the draw ---------------------------------------------------------------------------------------------

// Draw among the tokens that top-k, top-p and min-p keep. Each round is a draw over the whole row, and rounds repeat
// until top-p accepts a token. `done` must be false on entry. Min-p keeps values of at least `min_p_value`. `winner` is
// the group that wins round 0 if no token is filtered out.
template <bool PROBS, typename Row>
__device__ __forceinline__ void draw_by_rounds(const SampleParams& params, const Request& request, const Row& x,
                                               float min_p_value, int winner, int passes, Bound& drawn, bool& done) {
    Common<Row>& shared = common<Row>();
    const float top_p = request.top_p;
    Bound bound = {-CUDART_INF_F, NO_ID};
    if (request.top_k < params.vocab) {
        const Search found = bound_by_search<Row, true>(passes, request.top_k);
        bound = found.bound, passes = found.passes;
    }
    float of_sum = shared.sum; // top_p is a fraction of this sum
    if (top_p < 1 && !params.joint && bound.value > -CUDART_INF_F) of_sum = mass<Row>(passes++, bound);
    if (min_p_value > -CUDART_INF_F) bound = tighter(bound, {min_p_value, NO_ID});
    // If the best token alone reaches top_p, return it.
    if (top_p < 1 && !(top_p * of_sum > (PROBS ? x.top : 1.f))) {
        drawn.id = best<Row>(passes++);
        done = true;
    }
    for (unsigned round = 0; !done; ++round) {
        const bool all = !(bound.value > -CUDART_INF_F);
        const Bound found = draw_round<Row>(passes, bound, all ? winner : -1, round, request.stream);
        if (!all) ++passes;
        if (threadIdx.x == 0) shared.drawn = found;
        __syncthreads();
        drawn = shared.drawn;
        if (!(top_p < 1)) break;
        bound = {drawn.value, drawn.id - 1};
        done = mass<Row>(passes++, bound) < top_p * of_sum;
    }
}

// Draw with filters, after the first pass.
template <bool PROBS, typename Row>
__device__ __forceinline__ void sample_filtered(const SampleParams& params, int i, long long drawn_at, int winner) {
    const Request request = request_of<PROBS>(params, i);
    Common<Row>& shared = common<Row>();
    const Row& x = stored<Row>();
    const bool first_block = cluster_rank<Row::BLOCKS>() == 0;
    int passes = 1;
    Bound drawn = {x.top, 0};
    if (x.valid()) {
        const float min_p = fminf(request.min_p, 1.f);
        const float min_p_value = !(min_p > 0) ? -CUDART_INF_F
                                  : PROBS      ? x.top * min_p
                                               : x.top + 2 * fast_log2(min_p) / x.scale;
        bool done = false;
        if (request.greedy) {
            drawn.id = best<Row>(passes++);
            done = true;
        } else if (request.top_k < params.vocab && x.lists(request.top_k)) {
            const int size = gather<Row>(passes++, 1, shared.low, CUDART_INF_F);
            if (size <= CAPACITY) {
                if (!first_block) return;
                const float all_sum = params.joint && request.top_p < 1 ? shared.sum : 0.f;
                drawn = draw_listed<Row>(size, request.top_k, min_p_value, request.top_p, all_sum, request.stream);
                done = true;
            }
        }
        if (!done) draw_by_rounds<PROBS>(params, request, x, min_p_value, winner, passes, drawn, done);
    }
    if (first_block && threadIdx.x == 0) write_result<PROBS>(params, i, drawn_at, x, drawn.id, drawn.value, shared.sum);
}

// Draw a token of the group that won the race, without filters. Run by one warp.
template <bool PROBS, typename Row>
__device__ __forceinline__ void draw_unfiltered(const SampleParams& params, Stream stream, int i, long long drawn_at,
                                                const Row& x, int winner, float sum) {
    int id = 0;
    float value = 0;
    const Bound all = {-CUDART_INF_F, NO_ID};
    if (x.valid()) id = draw(x, winner, all, 0, stream, value);
    if (x.lane == 0) write_result<PROBS>(params, i, drawn_at, x, id, value, sum);
}

extern __shared__ float4 shared[];

template <typename T, bool PROBS, int CLUSTER>
constexpr Launch sample_launch(int tiles, int cached_tiles, int topped_tiles, int tops_per_tile) {
    return {32 * MAX_WARPS, Row<T, PROBS, CLUSTER>::bytes(tiles, cached_tiles, topped_tiles, tops_per_tile)};
}

template <typename T, bool PROBS, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_WARPS, 2)
    sample(const __grid_constant__ SampleParams params) {
    wait_for_earlier_kernels();
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        const int i = blockIdx.x / CLUSTER;
        const bool first_block = cluster_rank<CLUSTER>() == 0;
        if (params.finished && params.finished[i]) {
            if (first_block && threadIdx.x == 0) write_finished(params, i);
            return;
        }
        long long row = params.indices ? integer_at(params.indices, params.wide & INDICES, i) : i;
        row = max(0ll, min(row, (long long)params.rows - 1));
        const T* second = static_cast<const T*>(params.second);
        long long drawn_at = i;
        const Request request = request_of<PROBS>(params, i);
        if (PROBS && params.draft_ids) {
            int refused, accepted;
            verify_drafts<T>(params, i, request.stream, refused, accepted);
            drawn_at = row = (long long)i * (params.drafts + 1) + refused;
            second =
                refused < params.drafts ? second + ((long long)i * params.drafts + refused) * params.vocab : nullptr;
            if (first_block) write_drafts(params, i, refused, accepted);
        }

        using RowOfT = Row<T, PROBS, CLUSTER>;
        Common<RowOfT>& in_common = common<RowOfT>();
        RowOfT x(static_cast<const T*>(params.values) + row * params.row_stride, second, params.vocab, params.layout,
                 request.scale, shared, &in_common.list_size);
        const bool listing = !request.greedy && request.top_k < params.vocab && x.lists(request.top_k);
        const bool plain =
            !request.greedy && request.top_k == params.vocab && !(request.top_p < 1) && !(request.min_p > 0);
        int winner = 0;
        while (true) {
            load<true>(x, request.stream);
            let_later_kernels_begin();
            if (x.warp == 0) {
                float sum = 0;
                x.top = find_top(x);
                if (!listing || (params.joint && request.top_p < 1) || params.logprobs)
                    find_sum_and_winner(x, sum, winner);
                // The row is `max(target - draft, 0)`. If all its values round to 0, draw from the row of `target`
                // instead.
                const bool again = PROBS && x.second && !x.valid();
                if (plain && first_block && !again)
                    draw_unfiltered<PROBS>(params, request.stream, i, drawn_at, x, winner, sum);
                if (x.lane == 0) {
                    in_common.sum = sum;
                    store(x);
                }
                if (listing && x.valid()) {
                    const float low = reached_by(x, request.top_k);
                    if (x.lane == 0) in_common.low = low;
                }
            }
            if (plain && !x.second) return;
            __syncthreads();
            if (!PROBS || !x.second || stored<RowOfT>().valid()) break;
            x.second = nullptr;
            x.turn = 0;
            cluster_sync<CLUSTER>();
        }
        if (!plain) sample_filtered<PROBS, RowOfT>(params, i, drawn_at, winner);
    }
}
