// Compute the attention of one new token per sequence: a decoder's self-attention or cross-attention.
//
//   query    = (q[b, h] + bias_q[h]) * scale * log2(e), in float32
//   score[s] = query . key[s], for the entries s of row b * heads + h
//   out      = sum over s of 2^(score[s] - row_max) * value[s] / sum over s of 2^(score[s] - row_max)
//
// In self-attention the kernel first appends k + bias_k and v + bias_v, rounded to T, to the cache. Without entries, or
// if all scores are -inf, the result is 0.
//
// Grid: blockIdx.x: 32 / LANES rows, each one head of one sequence; blockIdx.y: a split, which is a range of cache
// entries. The warps of a block take chunks of STEPS entries in turn. LANES lanes share a row, so a load of a warp
// reads one entry of neighbouring rows, 512 contiguous bytes. A lane loads CHUNKS vectors of VECTOR elements of each
// key and value. Each warp runs an online softmax; blocks merge their warps, and `combine` merges the splits.
//
// DIM == 0: the head_dim is `p.dim`. SHARED_KV: `beams` consecutive sequences share keys, values and length.
// DEVICE_STEP: the kernel reads the number of tokens from device memory, so a captured CUDA graph is valid for every
// decoding step; the grid is sized for the largest number of entries.
//
// Speed of light: memory bandwidth. On an H200, self-attention of 64 sequences with 16 heads of 64 over 1024 tokens
// takes 65.8 us; a copy takes 63.2 us (96%). With few rows the limit is latency: one sequence with 32 heads of 128 over
// 4096 tokens takes 23.2 us with `combine`; a copy takes 15.8 us (68%).
#include "common/numeric.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"
#include "common/warp.cuh"
#include "decoder_attention/softmax.cuh"

constexpr int MAX_WARPS = 8; // per block

enum Mode { PLAIN, DEVICE_STEP, SHARED_KV };

struct Params {
    const void* q;      // [batch, heads * dim]  T
    const void* k;      // like q; null: no new entry (cross-attention)
    const void* v;      // like q
    const void* bias_q; // [heads * dim]  float if bias_is_float, else T; or null
    const void* bias_k;
    const void* bias_v;
    void* keys;         // T, entry s of (b, h) at element s * step_stride + b * batch_stride + h * dim
    void* values;       // like keys
    const int* lengths; // [batch], clamped to [0, entries]; null: `entries` for all
    void* out;          // [rows, dim]  T
    float* partial;     // [splits, rows, dim], with several splits
    float2* statistics; // [splits, rows]: row_max and row_sum
    long long q_stride; // in elements, like all strides
    long long k_stride;
    long long v_stride;
    long long batch_stride;
    int step_stride;
    int rows; // batch * heads
    int heads;
    int dim;
    int entries;     // entries to read; the new entry follows
    int split_steps; // entries per split, a multiple of STEPS
    int bias_is_float;
    float scale;     // times log2(e)
    int beams;       // SHARED_KV: sequences that share `lengths` and `batch_stride`
    const int* step; // DEVICE_STEP: [1], number of tokens with the new one, clamped
};

template <typename T_, int DIM_, int VECTOR_, int LANES_, int CHUNKS_, int STEPS_> struct Config {
    using T = T_;
    using Load = Vector<VECTOR_ * sizeof(T)>;
    static constexpr int DIM = DIM_, VECTOR = VECTOR_, LANES = LANES_, CHUNKS = CHUNKS_, STEPS = STEPS_;
    static constexpr int VALUES = CHUNKS * VECTOR; // elements of a row per lane
    static constexpr bool FILLED = DIM == LANES * VALUES;
};

// The elements of a row that a lane handles. Lanes past the last row load the last row and store nothing. Lanes past
// the end of a row load its first elements and ignore them. This saves a predicate per load.
template <typename F> struct LaneSlice {
    int dim, row, batch, head;
    bool valid[F::CHUNKS];
    int offset[F::CHUNKS]; // first element of each chunk
};

// Load STEPS entries from `first` on. Entries from `end` on become 0 without being read, because 0 * NaN is NaN.
template <typename F>
__device__ __forceinline__ void load_entries(const Params& p, const LaneSlice<F>& slice, const typename F::T* from,
                                             int first, int end, typename F::Load (&to)[F::STEPS][F::CHUNKS]) {
    using Load = typename F::Load;
    const typename F::T* entry = from + (long long)first * p.step_stride;
    long long stride = p.step_stride;
    // The empty asm hides the stride from the compiler, which otherwise keeps multiples of the stride in registers and
    // spills.
    asm volatile("" : "+l"(stride));
#pragma unroll
    for (int s = 0; s < F::STEPS; ++s, entry += stride) {
#pragma unroll
        for (int c = 0; c < F::CHUNKS; ++c)
            to[s][c] = first + s < end ? __ldg(reinterpret_cast<const Load*>(entry + slice.offset[c])) : Load{};
    }
}

template <typename F>
__device__ __forceinline__ void load_new(const Params& p, const LaneSlice<F>& slice, const void* rows, long long stride,
                                         const void* bias, float (&to)[F::VALUES]) {
    using T = typename F::T;
    const long long row_offset = slice.batch * stride + slice.head * slice.dim;
    float bias_value[F::VALUES] = {};
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) {
        const int element = slice.offset[i / F::VECTOR] + i % F::VECTOR;
        to[i] = to_float(static_cast<const T*>(rows)[row_offset + element]);
        if (bias && p.bias_is_float) bias_value[i] = static_cast<const float*>(bias)[slice.head * slice.dim + element];
        if (bias && !p.bias_is_float)
            bias_value[i] = to_float(static_cast<const T*>(bias)[slice.head * slice.dim + element]);
    }
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) to[i] += bias_value[i];
}

template <typename F>
__device__ __forceinline__ float dot_chunk(const LaneSlice<F>& slice, const float (&query)[F::VALUES],
                                           const typename F::T* key, int c) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < F::VECTOR; ++j) sum = fmaf(query[c * F::VECTOR + j], to_float(key[j]), sum);
    return slice.valid[c] ? sum : 0.f;
}

// Online softmax of a warp: running maximum, sum of the weights 2^(score - row_max), and weighted sums of the values.
template <typename F> struct Softmax {
    float row_sum = 0.f, sums[F::VALUES] = {}, row_max = -CUDART_INF_F;

    // Mask entries from `end` on, update row_max, and rescale the sums. `first`: index of the first score.
    __device__ __forceinline__ void update_max(float (&score)[F::STEPS], int first, int end) {
        float new_max = row_max;
#pragma unroll
        for (int s = 0; s < F::STEPS; ++s) {
            if (first + s >= end) score[s] = -CUDART_INF_F;
            new_max = fmaxf(new_max, score[s]);
        }
        const float correction = fast_exp2(row_max - softmax_offset(new_max));
        row_max = new_max;
        row_sum *= correction;
#pragma unroll
        for (int i = 0; i < F::VALUES; ++i) sums[i] *= correction;
    }

    __device__ __forceinline__ void add(const float (&score)[F::STEPS],
                                        const typename F::Load (&value)[F::STEPS][F::CHUNKS]) {
#pragma unroll
        for (int s = 0; s < F::STEPS; ++s) {
            const float weight = fast_exp2(score[s] - softmax_offset(row_max));
            row_sum += weight;
#pragma unroll
            for (int i = 0; i < F::VALUES; ++i) {
                const typename F::T* chunk = reinterpret_cast<const typename F::T*>(&value[s][i / F::VECTOR]);
                sums[i] = fmaf(weight, to_float(chunk[i % F::VECTOR]), sums[i]);
            }
        }
    }
};

// Merge the softmax states of a block's warps. Store the results or, with several splits, partial results. `row_lane`:
// index among the LANES lanes of a row. `unclamped_row` may be past the last row; `row` is not.
template <typename F>
__device__ __forceinline__ void merge_warps(const Params& p, int warp, int lane, int row_lane, int unclamped_row,
                                            int row, int dim, const Softmax<F>& softmax) {
    using T = typename F::T;
    __shared__ float warp_sums[MAX_WARPS][F::VALUES][32];
    __shared__ float2 warp_statistics[MAX_WARPS][32];
    const int warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) warp_sums[warp][i][lane] = softmax.sums[i];
    warp_statistics[warp][lane] = make_float2(softmax.row_max, softmax.row_sum);
    __syncthreads();
    if (unclamped_row >= p.rows) return;
    float row_max = -CUDART_INF_F, row_sum = 0.f;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) row_max = fmaxf(row_max, warp_statistics[w][lane].x);
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
        const float2 state = warp_statistics[w][lane];
        row_sum += state.y * fast_exp2(state.x - softmax_offset(row_max));
    }
    const long long split_row = (long long)blockIdx.y * p.rows + row;
    if (gridDim.y > 1 && warp == 0 && row_lane == 0) p.statistics[split_row] = make_float2(row_max, row_sum);
#pragma unroll 1
    for (int i = warp; i < F::VALUES; i += warps) {
        const int element = (i / F::VECTOR * F::LANES + row_lane) * F::VECTOR + i % F::VECTOR;
        if (element >= dim) continue;
        float sum = 0.f;
#pragma unroll 4
        for (int w = 0; w < warps; ++w)
            sum += warp_sums[w][i][lane] * fast_exp2(warp_statistics[w][lane].x - softmax_offset(row_max));
        if (gridDim.y > 1)
            p.partial[split_row * dim + element] = sum;
        else
            static_cast<T*>(p.out)[(long long)row * dim + element] = from_float<T>(normalized(sum, row_sum));
    }
}

template <typename T, int DIM, int VECTOR, int LANES, int CHUNKS, int STEPS, Mode MODE = PLAIN>
__global__ __launch_bounds__(MAX_WARPS * 32, 2) void decoder_attention(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    using F = Config<T, DIM, VECTOR, LANES, CHUNKS, STEPS>;
    const int dim = DIM ? DIM : p.dim;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_lane = lane % LANES;
    const int unclamped_row = blockIdx.x * (32 / LANES) + lane / LANES, row = min(unclamped_row, p.rows - 1);
    const int batch = row / p.heads, head = row - batch * p.heads;
    LaneSlice<F> slice = {dim, row, batch, head};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int element = (c * LANES + row_lane) * VECTOR;
        slice.valid[c] = F::FILLED || element < dim;
        slice.offset[c] = slice.valid[c] ? element : 0;
    }

    // --- the first loads of entries -------------------------------------------------------------------------
    const int split_begin = blockIdx.y * p.split_steps;
    const int memory_row = MODE == SHARED_KV ? batch / p.beams : batch;
    const int cached_entries = MODE == DEVICE_STEP ? min(max(*p.step, 1), p.entries + 1) - 1 : p.entries;
    const int entries = MODE == DEVICE_STEP ? cached_entries
                        : p.lengths         ? min(max(p.lengths[memory_row], 0), p.entries)
                                            : p.entries;
    const int end = min(entries - split_begin, p.split_steps); // entries of this row in this split, or negative
    const int max_end = __reduce_max_sync(FULL_WARP, end);
    const long long memory_offset = memory_row * p.batch_stride + head * dim;
    const T* const keys = static_cast<const T*>(p.keys) + memory_offset + (long long)split_begin * p.step_stride;
    const T* const values = static_cast<const T*>(p.values) + memory_offset + (long long)split_begin * p.step_stride;
    typename F::Load key[STEPS][CHUNKS], value[STEPS][CHUNKS];
    load_entries<F>(p, slice, keys, warp * STEPS, end, key);
    load_entries<F>(p, slice, values, warp * STEPS, end, value);

    // --- the query -----------------------------------------------------------------------------------------
    float query[F::VALUES];
    load_new<F>(p, slice, p.q, p.q_stride, p.bias_q, query);
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) query[i] *= p.scale;

    // --- the new entry -------------------------------------------------------------------------------------
    Softmax<F> softmax;
    // The last warp of the last split processes the new entry first, rounded to T as in the cache.
    if (p.k != nullptr && blockIdx.y == gridDim.y - 1 && warp == warps - 1) {
        float new_key[F::VALUES];
        load_new<F>(p, slice, p.k, p.k_stride, p.bias_k, new_key);
        load_new<F>(p, slice, p.v, p.v_stride, p.bias_v, softmax.sums);
        const long long entry =
            memory_offset + (long long)(MODE == DEVICE_STEP ? cached_entries : p.entries) * p.step_stride;
        T* key_entry = static_cast<T*>(p.keys) + entry;
        T* value_entry = static_cast<T*>(p.values) + entry;
        softmax.row_max = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            T stored_key[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                stored_key[j] = from_float<T>(new_key[c * VECTOR + j]);
                const T stored_value = from_float<T>(softmax.sums[c * VECTOR + j]);
                softmax.sums[c * VECTOR + j] = to_float(stored_value);
                if (slice.valid[c] && unclamped_row < p.rows) {
                    key_entry[slice.offset[c] + j] = stored_key[j];
                    value_entry[slice.offset[c] + j] = stored_value;
                }
            }
            softmax.row_max += dot_chunk<F>(slice, query, stored_key, c);
        }
        softmax.row_max = lanes_sum<LANES>(softmax.row_max);
        softmax.row_sum = 1.f;
    }

    // --- the entries in memory -----------------------------------------------------------------------------
    // Load the next `key` and `value` as soon as the present ones are used, so that half of the loads are always in
    // flight.
#pragma unroll 1
    for (int first = warp * STEPS; first < max_end; first += warps * STEPS) {
        float score[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            score[s] = 0.f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                score[s] += dot_chunk<F>(slice, query, reinterpret_cast<const T*>(&key[s][c]), c);
        }
        load_entries<F>(p, slice, keys, first + warps * STEPS, end, key);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) score[s] = lanes_sum<LANES>(score[s]);
        softmax.update_max(score, first, end);
        softmax.add(score, value);
        load_entries<F>(p, slice, values, first + warps * STEPS, end, value);
    }
    merge_warps<F>(p, warp, lane, row_lane, unclamped_row, row, dim, softmax);
}
