// Draw a token from each row of logits or probabilities, among the tokens that top-k, top-p and min-p keep.
//
//   weight(i) = exp((x[i] - max x) / temperature)        for logits; 1 for all finite logits at an infinite temperature
//   weight(i) = max(x[i], 0)                             for probabilities
//   kept      = a prefix of the tokens in order of x, largest first, ties by the lower id
//   token     = i with probability weight(i) / sum of the kept weights
//
// The draw has two steps, so it needs few random numbers, and no prefix sums over the row. First, a race (the
// Gumbel-max trick) draws a group g of 32 ids: g gets an arrival time from the exponential distribution of rate `W[g]`,
// the sum of its kept weights. The earliest group wins, so g wins with probability `W[g] / sum(W)`. Second, one id of
// the group is drawn by weight. The random numbers come from Philox with the key (seed, offset, round, g), plus the
// row's index if all rows share a seed.
//
// Top-p uses rejection sampling, as in FlashInfer: a drawn token is accepted if the weights of all better tokens sum to
// less than `top_p * sum`. Otherwise the next round draws among the better tokens. The accepted token has the right
// distribution. The average number of rounds is at most `1 + ln(1 / top_p)`.
//
// Speculative sampling verifies the drafts, then draws from the row of the first refused draft. If none is refused, it
// draws from the last row.
//
// Grid: CLUSTER blocks per row (row.cuh). PROBS: rows of probabilities, else logits.
//
// Speed of light: memory bandwidth. On an H200, 256 rows of 128256 float32 logits take 50 us (61% of the bandwidth of a
// copy), or 80 us with top-k 40 and top-p 0.9. One row is latency-bound: 6.9 us, or 12.5 us with these filters. The
// kernel triggers programmatic dependent launch after it has read the row: 64 rows take 16.2 us, and 16.8 us with a
// trigger at the start.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "sampling/draw_listed.cuh"
#include "sampling/first_pass.cuh"
#include "sampling/params.cuh"
#include "sampling/search.cuh"

// Bits of three masks in SampleParams. If a parameter's bit is set in `wide`, its array has 64-bit elements, else
// 32-bit elements. If it is set in `integral`, the elements are integers, else float32. If it is set in `single`, the
// array has one element for all rows.
enum Parameter { TOP_K = 1, SEED = 2, OFFSET = 4, TEMPERATURE = 8, TOP_P = 16, MIN_P = 32 };
constexpr int INDICES = 64; // in `wide`: the indices and the ids are int64

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
    int by_row_index; // all rows have the same seed, so the row's index is part of the Philox counter
    int rows, vocab, scalar_top_k, end_id, drafts;
    Layout layout;
    int wide;
    int integral;
    int single;
    int joint; // top_p is relative to the sum of the row, else to the sum of the tokens that top-k keeps
    float scalar_temperature, scalar_top_p, scalar_min_p;
};

struct Request {
    Stream stream;
    float scale, top_p, min_p; // scale: 2 log2(e) / temperature
    int top_k;
    bool greedy; // return the best token without a draw
};

template <bool PROBS> __device__ __forceinline__ Request request_of(const SampleParams& params, int i) {
    const auto index = [&](int bit) { return params.single & bit ? 0 : i; };
    const auto number = [&](const void* array, int bit, float scalar) {
        return array ? float_at(array, params.integral & bit, params.wide & bit, index(bit)) : scalar;
    };
    Request request;
    request.stream.seed = params.seed ? integer_at(params.seed, params.wide & SEED, index(SEED)) : params.scalar_seed;
    request.stream.offset =
        params.offset ? integer_at(params.offset, params.wide & OFFSET, index(OFFSET)) : params.scalar_offset;
    request.stream.row_bits = params.by_row_index ? unsigned(i) << 8 : 0;
    const float temperature = number(params.temperature, TEMPERATURE, params.scalar_temperature);
    request.top_p = number(params.top_p, TOP_P, params.scalar_top_p);
    request.min_p = number(params.min_p, MIN_P, params.scalar_min_p);
    const long long k =
        params.top_k ? integer_at(params.top_k, params.wide & TOP_K, index(TOP_K)) : params.scalar_top_k;
    request.top_k = k < 1 || k > params.vocab ? params.vocab : k;
    request.scale = PROBS ? 1.f : scale_of(temperature);
    request.greedy = request.top_k == 1 || (!PROBS && request.scale == GREEDY_SCALE);
    // At an infinite temperature all finite logits have the same weight, so min-p keeps them all.
    if (!PROBS && request.scale == UNIFORM_SCALE) request.min_p = 0;
    return request;
}

__device__ __forceinline__ void write_id(const SampleParams& params, long long at, int id) {
    if (params.wide & INDICES)
        static_cast<long long*>(params.ids)[at] = id;
    else
        static_cast<int*>(params.ids)[at] = id;
}

__device__ __forceinline__ void write_finished(const SampleParams& params, int i) {
    write_id(params, i, params.end_id);
    if (params.valid) params.valid[i] = true;
    if (params.logprobs) params.logprobs[i] = 0;
}

// `sum` is the sum of all weights of the row. One thread runs this.
template <bool PROBS, typename Row>
__device__ __forceinline__ void write_result(const SampleParams& params, int i, long long out_index, const Row& x,
                                             int id, float value, float sum) {
    write_id(params, out_index, id);
    if (params.valid) params.valid[i] = x.valid();
    if (params.logprobs) {
        const float log2_prob = (PROBS ? x.log2_of(value) : x.shift(value, x.row_max)) - x.log2_of(sum);
        params.logprobs[i] = x.valid() ? log2_prob / LOG2_E : -CUDART_INF_F;
    }
    if (params.sequence_length) params.sequence_length[i] += 1;
    if (params.finished) params.finished[i] = id == params.end_id;
}

// --- speculative sampling ---------------------------------------------------------------------------------

// Accept each draft with probability `min(1, target / draft)`. `target` and `draft` are its probabilities in the two
// models. `refused` becomes the index of the first refused draft, or `drafts`. Each warp tests all drafts, so no
// barrier is needed.
template <typename T>
__device__ __forceinline__ void verify_drafts(const SampleParams& params, int i, Stream stream, int& refused,
                                              int& accepted) {
    refused = params.drafts, accepted = 0;
    for (int start = 0; start < params.drafts; start += 32) {
        const int n = start + threadIdx.x % 32;
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
        const unsigned inside = params.drafts - start >= 32 ? ~0u : (1u << (params.drafts - start)) - 1;
        const unsigned accepts = __ballot_sync(FULL_WARP, accept);
        accepted += __popc(accepts);
        if (refused == params.drafts && (inside & ~accepts)) refused = start + __ffs(inside & ~accepts) - 1;
    }
}

// Write the accepted drafts before index `refused`, and -1 after it. The draw writes ids[refused].
__device__ __forceinline__ void write_drafts(const SampleParams& params, int i, int refused, int accepted) {
    for (int n = threadIdx.x; n <= params.drafts; n += blockDim.x)
        if (n != refused)
            write_id(params, (long long)i * (params.drafts + 1) + n,
                     n < refused ? params.draft_ids[(long long)i * params.drafts + n] : -1);
    if (threadIdx.x == 0) params.accepted[i] = accepted, params.emitted[i] = refused;
}

// --- the draw ---------------------------------------------------------------------------------------------

// Draw from the whole row in rounds until top-p accepts a token. `winner` is the group that wins round 0 if no token is
// filtered out.
template <bool PROBS, typename Row>
__device__ __forceinline__ void draw_by_rounds(const SampleParams& params, const Request& request, const Row& x,
                                               float min_p_value, int winner, int passes_done, Bound& drawn,
                                               bool& done) {
    Common<Row>& shared = common<Row>();
    const float top_p = request.top_p;
    Bound bound = {-CUDART_INF_F, NO_ID};
    if (request.top_k < params.vocab) {
        const Search found = bound_by_search<Row, true>(passes_done, request.top_k);
        bound = found.bound, passes_done = found.passes_done;
    }
    float denominator = shared.sum; // top_p is a fraction of this sum
    if (top_p < 1 && !params.joint && bound.value > -CUDART_INF_F) denominator = mass<Row>(passes_done++, bound);
    if (min_p_value > -CUDART_INF_F) bound = tighter(bound, {min_p_value, NO_ID});
    // If the best token alone reaches top_p, it is drawn.
    if (top_p < 1 && !(top_p * denominator > (PROBS ? x.row_max : 1.f))) {
        drawn.id = best<Row>(passes_done++);
        done = true;
    }
    for (unsigned round = 0; !done; ++round) {
        const bool all = !(bound.value > -CUDART_INF_F);
        const Bound found = draw_round<Row>(passes_done, bound, all ? winner : -1, round, request.stream);
        if (!all) ++passes_done;
        if (threadIdx.x == 0) shared.drawn = found;
        __syncthreads();
        drawn = shared.drawn;
        if (!(top_p < 1)) break;
        bound = {drawn.value, drawn.id - 1};
        done = mass<Row>(passes_done++, bound) < top_p * denominator;
    }
}

template <bool PROBS, typename Row>
__device__ __forceinline__ void sample_filtered(const SampleParams& params, int i, long long out_index, int winner) {
    const Request request = request_of<PROBS>(params, i);
    Common<Row>& shared = common<Row>();
    const Row& x = stored<Row>();
    const bool first_block = cluster_rank<Row::BLOCKS>() == 0;
    int passes_done = 1;
    Bound drawn = {x.row_max, 0};
    if (x.valid()) {
        const float min_p = fminf(request.min_p, 1.f);
        const float min_p_value = !(min_p > 0) ? -CUDART_INF_F
                                  : PROBS      ? x.row_max * min_p
                                               : x.row_max + 2 * fast_log2(min_p) / x.scale;
        bool done = false;
        if (request.greedy) {
            drawn.id = best<Row>(passes_done++);
            done = true;
        } else if (request.top_k < params.vocab && x.uses_list(request.top_k)) {
            const int size = gather<Row>(passes_done++, 1, shared.low, CUDART_INF_F);
            if (size <= CAPACITY) {
                if (!first_block) return;
                const float row_sum = params.joint && request.top_p < 1 ? shared.sum : 0.f;
                drawn = draw_listed<Row>(size, request.top_k, min_p_value, request.top_p, row_sum, request.stream);
                done = true;
            }
        }
        if (!done) draw_by_rounds<PROBS>(params, request, x, min_p_value, winner, passes_done, drawn, done);
    }
    if (first_block && threadIdx.x == 0)
        write_result<PROBS>(params, i, out_index, x, drawn.id, drawn.value, shared.sum);
}

// Run by one warp.
template <bool PROBS, typename Row>
__device__ __forceinline__ void draw_unfiltered(const SampleParams& params, Stream stream, int i, long long out_index,
                                                const Row& x, int winner, float sum) {
    int id = 0;
    float value = 0;
    const Bound all = {-CUDART_INF_F, NO_ID};
    if (x.valid()) id = draw(x, winner, all, 0, stream, value);
    if (x.lane == 0) write_result<PROBS>(params, i, out_index, x, id, value, sum);
}

extern __shared__ float4 shared[];

template <typename T, bool PROBS, int CLUSTER>
constexpr Launch sample_launch(int tiles, int cached_tiles, int group_max_tiles, int segments_per_tile) {
    return {32 * MAX_WARPS, Row<T, PROBS, CLUSTER>::bytes(tiles, cached_tiles, group_max_tiles, segments_per_tile)};
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
        long long out_index = i;
        const Request request = request_of<PROBS>(params, i);
        if (PROBS && params.draft_ids) {
            int refused, accepted;
            verify_drafts<T>(params, i, request.stream, refused, accepted);
            out_index = row = (long long)i * (params.drafts + 1) + refused;
            second =
                refused < params.drafts ? second + ((long long)i * params.drafts + refused) * params.vocab : nullptr;
            if (first_block) write_drafts(params, i, refused, accepted);
        }

        using RowOfT = Row<T, PROBS, CLUSTER>;
        Common<RowOfT>& in_common = common<RowOfT>();
        RowOfT x(static_cast<const T*>(params.values) + row * params.row_stride, second, params.vocab, params.layout,
                 request.scale, shared, &in_common.list_size);
        const bool use_list = !request.greedy && request.top_k < params.vocab && x.uses_list(request.top_k);
        const bool unfiltered =
            !request.greedy && request.top_k == params.vocab && !(request.top_p < 1) && !(request.min_p > 0);
        int winner = 0;
        while (true) {
            load<true>(x, request.stream);
            let_later_kernels_begin();
            if (x.warp == 0) {
                float sum = 0;
                x.row_max = find_row_max(x);
                if (!use_list || (params.joint && request.top_p < 1) || params.logprobs)
                    find_sum_and_winner(x, sum, winner);
                // If all values of the row `max(target - draft, 0)` round to 0, draw from the row of `target`.
                const bool use_target = PROBS && x.second && !x.valid();
                if (unfiltered && first_block && !use_target)
                    draw_unfiltered<PROBS>(params, request.stream, i, out_index, x, winner, sum);
                if (x.lane == 0) {
                    in_common.sum = sum;
                    store(x);
                }
                if (use_list && x.valid()) {
                    const float low = list_threshold(x, request.top_k);
                    if (x.lane == 0) in_common.low = low;
                }
            }
            if (unfiltered && !x.second) return;
            __syncthreads();
            if (!PROBS || !x.second || stored<RowOfT>().valid()) break;
            x.second = nullptr;
            x.parity = 0;
            cluster_sync<CLUSTER>();
        }
        if (!unfiltered) sample_filtered<PROBS, RowOfT>(params, i, out_index, winner);
    }
}
