// Attention of one new token per sequence over the entries of a cache: the decoder's self-attention and
// cross-attention.
//
//   query = (q[b, h] + bias_q[h]) * scale * log2(e), in float32
//   key, value [s] = entry s of row r = b * heads + h. In self-attention the new token adds one entry: k + bias_k and
//                    v + bias_v, rounded to T and written into the caches
//   score[s] = query . key[s]
//   out   = sum over s of 2^(score[s] - largest) * value[s] / sum over s of 2^(score[s] - largest)
//
// If there are no entries, or only scores of -inf, the result is zero.
//
// Grid: blockIdx.x selects 32 / LANES rows, where a row is one head of one sequence. blockIdx.y selects a split, a
// range of cache entries. The warps of a block take the entries of the split in turn, in chunks of STEPS entries. In a
// warp, LANES lanes share a row, so that one load of a warp reads one entry of neighbouring rows, 512 contiguous bytes.
// A lane loads CHUNKS vectors of VECTOR elements of each key and value.
//
// Each warp runs an online softmax. The results of the warps of a block are merged in shared memory. If there are
// several splits, the kernel `combine` merges their results.
//
// DIM == 0: the head size is `p.dim`, which is at most LANES * CHUNKS * VECTOR.
//
// MODE == LATE_STEP: the kernel reads the number of tokens from device memory (`step`), so that a launch captured in a
// CUDA graph is valid for every decoding step. The grid is sized for the largest number of entries. Splits that begin
// after the last entry contribute nothing.
//
// MODE == SHARED_MEMORY: `copies` consecutive sequences share keys, values and length, as the beams of a beam search
// share the output of the encoder.
//
// Speed of light: memory bandwidth, because keys and values are read once, with one flop per byte of a 16-bit cache. On
// an H200 the self-attention of 64 sequences with 16 heads of 64 over 1024 tokens takes 65.8 us; a copy of the same
// bytes takes 63.2 us (96%). With few rows the limit is the latency of the loads, the merges and `combine`. One
// sequence with 32 heads of 128 over 4096 tokens takes 23.2 us; the copy takes 15.8 us (68%).
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "decoder_attention/softmax.cuh"

constexpr int MAX_WARPS = 8; // per block

enum Mode { PLAIN, LATE_STEP, SHARED_MEMORY };

struct Params {
    const void* q;      // [batch, heads * dim]  T, rows `q_stride` apart
    const void* k;      // like q, rows `k_stride` apart; null: no new entry (cross-attention)
    const void* v;      // like q, rows `v_stride` apart
    const void* bias_q; // [heads * dim]  float if bias_is_float, else T; null: none
    const void* bias_k; // like bias_q
    const void* bias_v; // like bias_q
    void* keys;         // T, entry s of (b, h) at element s * step_stride + b * batch_stride + h * dim
    void* values;       // like keys
    const int* lengths; // [batch]: entries of each sequence, clamped to [0, entries]; null: `entries` for all
    void* out;          // [rows, dim]  T
    float* partial;     // [splits, rows, dim]: weighted sums of values, if there are several splits
    float2* statistics; // [splits, rows]: largest score and sum of the weights, if there are several splits
    long long q_stride; // in elements, like all strides
    long long k_stride;
    long long v_stride;
    long long batch_stride;
    int step_stride;
    int rows; // batch * heads
    int heads;
    int dim;
    int entries;     // entries that are read from memory; the new entry is written after them
    int split_steps; // entries per split, a multiple of STEPS
    int bias_is_float;
    float scale;     // times log2(e)
    int copies;      // SHARED_MEMORY: this many sequences share one element of `lengths` and one `batch_stride`
    const int* step; // LATE_STEP: [1], number of tokens with the new one, clamped to [1, entries + 1]
};

template <int BYTES> struct Word;
template <> struct Word<16> {
    using type = uint4;
};
template <> struct Word<4> {
    using type = unsigned;
};
template <> struct Word<2> {
    using type = unsigned short;
};

// The template arguments, and the constants that follow from them.
template <typename T_, int DIM_, int VECTOR_, int LANES_, int CHUNKS_, int STEPS_> struct Form {
    using T = T_;
    using Load = typename Word<VECTOR_ * sizeof(T)>::type;
    static constexpr int DIM = DIM_, VECTOR = VECTOR_, LANES = LANES_, CHUNKS = CHUNKS_, STEPS = STEPS_;
    static constexpr int VALUES = CHUNKS * VECTOR;        // elements of a row per lane
    static constexpr bool FILLED = DIM == LANES * VALUES; // every lane has elements of the row
};

// The row of a lane, and the lane's elements of that row. Lanes past the last row load the last row and store nothing.
// Lanes past the end of a row load the row's first elements, which saves a predicate per load, and ignore them.
template <typename F> struct Place {
    int dim, row, batch, head;
    bool held[F::CHUNKS]; // whether the chunk belongs to the row
    int at[F::CHUNKS];    // first element of the chunk
};

// Load STEPS entries from entry `first` on. Entries from `end` on are not read and are replaced by 0, because they may
// hold NaN, and 0 * NaN is NaN.
template <typename F>
__device__ __forceinline__ void fetch(const Params& p, const Place<F>& own, const typename F::T* from, int first,
                                      int end, typename F::Load (&to)[F::STEPS][F::CHUNKS]) {
    using Load = typename F::Load;
    const typename F::T* entry = from + (long long)first * p.step_stride;
    long long stride = p.step_stride;
    // The empty asm hides the value of the stride from the compiler. Otherwise the compiler would keep multiples of the
    // stride in registers and spill other values.
    asm volatile("" : "+l"(stride));
#pragma unroll
    for (int s = 0; s < F::STEPS; ++s, entry += stride) {
#pragma unroll
        for (int c = 0; c < F::CHUNKS; ++c)
            to[s][c] = first + s < end ? __ldg(reinterpret_cast<const Load*>(entry + own.at[c])) : Load{};
    }
}

// Load the lane's elements of a row of q, k or v, and add the bias.
template <typename F>
__device__ __forceinline__ void load_new(const Params& p, const Place<F>& own, const void* rows, long long stride,
                                         const void* bias, float (&to)[F::VALUES]) {
    using T = typename F::T;
    const long long row_at = own.batch * stride + own.head * own.dim;
    float own_bias[F::VALUES] = {};
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) {
        const int element = own.at[i / F::VECTOR] + i % F::VECTOR;
        to[i] = to_float(static_cast<const T*>(rows)[row_at + element]);
        if (bias && p.bias_is_float) own_bias[i] = static_cast<const float*>(bias)[own.head * own.dim + element];
        if (bias && !p.bias_is_float) own_bias[i] = to_float(static_cast<const T*>(bias)[own.head * own.dim + element]);
    }
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) to[i] += own_bias[i];
}

// Return the lane's partial dot product of the query and chunk c of a key.
template <typename F>
__device__ __forceinline__ float dot_chunk(const Place<F>& own, const float (&query)[F::VALUES],
                                           const typename F::T* key, int c) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < F::VECTOR; ++j) sum = fmaf(query[c * F::VECTOR + j], to_float(key[j]), sum);
    return own.held[c] ? sum : 0.f;
}

// The online softmax of a warp. A weight is 2^(score - largest), where `largest` is the largest score of the row so
// far. `total` is the sum of the row's weights. `sums` is the weighted sum of the values, for the lane's elements.
template <typename F> struct Softmax {
    float total = 0.f, sums[F::VALUES] = {}, largest = -CUDART_INF_F;

    // Mask the scores of entries from `end` on, and raise `largest` to the maximum of the STEPS scores. `first` is the
    // index of the first entry. The sums are rescaled once for all STEPS entries.
    __device__ __forceinline__ void raise(float (&score)[F::STEPS], int first, int end) {
        float new_largest = largest;
#pragma unroll
        for (int s = 0; s < F::STEPS; ++s) {
            if (first + s >= end) score[s] = -CUDART_INF_F;
            new_largest = fmaxf(new_largest, score[s]);
        }
        const float correction = fast_exp2(largest - reference(new_largest));
        largest = new_largest;
        total *= correction;
#pragma unroll
        for (int i = 0; i < F::VALUES; ++i) sums[i] *= correction;
    }

    // Add the weights of STEPS scores, and the weighted values.
    __device__ __forceinline__ void add(const float (&score)[F::STEPS],
                                        const typename F::Load (&value)[F::STEPS][F::CHUNKS]) {
#pragma unroll
        for (int s = 0; s < F::STEPS; ++s) {
            const float weight = fast_exp2(score[s] - reference(largest));
            total += weight;
#pragma unroll
            for (int i = 0; i < F::VALUES; ++i) {
                const typename F::T* chunk = reinterpret_cast<const typename F::T*>(&value[s][i / F::VECTOR]);
                sums[i] = fmaf(weight, to_float(chunk[i % F::VECTOR]), sums[i]);
            }
        }
    }
};

// Merge the warps of a block in shared memory. Store the rows' results, or partial results if there are several splits.
// `part` is the lane's index among the lanes of its row. `own_row` is the lane's row index before it is clamped to the
// last row.
template <typename F>
__device__ __forceinline__ void merge_warps(const Params& p, int warp, int lane, int part, int own_row, int row,
                                            int dim, const Softmax<F>& softmax) {
    using T = typename F::T;
    __shared__ float warp_sums[MAX_WARPS][F::VALUES][32];
    __shared__ float2 warp_statistics[MAX_WARPS][32];
    const int warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) warp_sums[warp][i][lane] = softmax.sums[i];
    warp_statistics[warp][lane] = make_float2(softmax.largest, softmax.total);
    __syncthreads();
    if (own_row >= p.rows) return;
    float largest = -CUDART_INF_F, total = 0.f;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, warp_statistics[w][lane].x);
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
        const float2 theirs = warp_statistics[w][lane];
        total += theirs.y * fast_exp2(theirs.x - reference(largest));
    }
    const long long split_row = (long long)blockIdx.y * p.rows + row;
    if (gridDim.y > 1 && warp == 0 && part == 0) p.statistics[split_row] = make_float2(largest, total);
#pragma unroll 1
    for (int i = warp; i < F::VALUES; i += warps) {
        const int element = (i / F::VECTOR * F::LANES + part) * F::VECTOR + i % F::VECTOR;
        if (element >= dim) continue;
        float sum = 0.f;
#pragma unroll 4
        for (int w = 0; w < warps; ++w)
            sum += warp_sums[w][i][lane] * fast_exp2(warp_statistics[w][lane].x - reference(largest));
        if (gridDim.y > 1)
            p.partial[split_row * dim + element] = sum;
        else
            static_cast<T*>(p.out)[(long long)row * dim + element] = from_float<T>(quotient(sum, total));
    }
}

template <typename T, int DIM, int VECTOR, int LANES, int CHUNKS, int STEPS, Mode MODE = PLAIN>
__global__ __launch_bounds__(MAX_WARPS * 32, 2) void decoder_attention(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using F = Form<T, DIM, VECTOR, LANES, CHUNKS, STEPS>;
    const int dim = DIM ? DIM : p.dim;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % LANES;
    const int own_row = blockIdx.x * (32 / LANES) + lane / LANES, row = min(own_row, p.rows - 1);
    const int batch = row / p.heads, head = row - batch * p.heads;
    Place<F> own = {dim, row, batch, head};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int element = (c * LANES + part) * VECTOR;
        own.held[c] = F::FILLED || element < dim;
        own.at[c] = own.held[c] ? element : 0;
    }

    // --- the first loads of entries -------------------------------------------------------------------------
    const int split_begin = blockIdx.y * p.split_steps;
    const int memory = MODE == SHARED_MEMORY ? batch / p.copies : batch;
    const int most = MODE == LATE_STEP ? min(max(*p.step, 1), p.entries + 1) - 1 : p.entries;
    const int entries = MODE == LATE_STEP ? most : p.lengths ? min(max(p.lengths[memory], 0), p.entries) : p.entries;
    const int end = min(entries - split_begin, p.split_steps); // entries of this row in this split; may be negative
    const int longest = __reduce_max_sync(FULL_WARP, end);
    const long long base = memory * p.batch_stride + head * dim;
    const T* const keys = static_cast<const T*>(p.keys) + base + (long long)split_begin * p.step_stride;
    const T* const values = static_cast<const T*>(p.values) + base + (long long)split_begin * p.step_stride;
    typename F::Load key[STEPS][CHUNKS], value[STEPS][CHUNKS];
    fetch<F>(p, own, keys, warp * STEPS, end, key);
    fetch<F>(p, own, values, warp * STEPS, end, value);

    // --- the query -----------------------------------------------------------------------------------------
    float query[F::VALUES];
    load_new<F>(p, own, p.q, p.q_stride, p.bias_q, query);
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) query[i] *= p.scale;

    // --- the new entry -------------------------------------------------------------------------------------
    Softmax<F> softmax;
    // The last warp of the last split processes the new token's entry before its other entries. It rounds the key and
    // the value to T, because the cache stores T.
    if (p.k != nullptr && blockIdx.y == gridDim.y - 1 && warp == warps - 1) {
        float new_key[F::VALUES];
        load_new<F>(p, own, p.k, p.k_stride, p.bias_k, new_key);
        load_new<F>(p, own, p.v, p.v_stride, p.bias_v, softmax.sums);
        const long long entry = base + (long long)(MODE == LATE_STEP ? most : p.entries) * p.step_stride;
        T* key_entry = static_cast<T*>(p.keys) + entry;
        T* value_entry = static_cast<T*>(p.values) + entry;
        softmax.largest = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            T stored_key[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                stored_key[j] = from_float<T>(new_key[c * VECTOR + j]);
                const T stored_value = from_float<T>(softmax.sums[c * VECTOR + j]);
                softmax.sums[c * VECTOR + j] = to_float(stored_value);
                if (own.held[c] && own_row < p.rows) {
                    key_entry[own.at[c] + j] = stored_key[j];
                    value_entry[own.at[c] + j] = stored_value;
                }
            }
            softmax.largest += dot_chunk<F>(own, query, stored_key, c);
        }
        softmax.largest = lanes_sum<LANES>(softmax.largest);
        softmax.total = 1.f;
    }

    // --- the entries in memory -----------------------------------------------------------------------------
    // `key` and `value` are loaded for the next iteration as soon as they have been used, so that half of the loads are
    // always in flight.
#pragma unroll 1
    for (int first = warp * STEPS; first < longest; first += warps * STEPS) {
        float score[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            score[s] = 0.f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                score[s] += dot_chunk<F>(own, query, reinterpret_cast<const T*>(&key[s][c]), c);
        }
        fetch<F>(p, own, keys, first + warps * STEPS, end, key);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) score[s] = lanes_sum<LANES>(score[s]);
        softmax.raise(score, first, end);
        softmax.add(score, value);
        fetch<F>(p, own, values, first + warps * STEPS, end, value);
    }
    merge_warps<F>(p, warp, lane, part, own_row, row, dim, softmax);
}
