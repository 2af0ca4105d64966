// Attention of one new token per sequence over what came before it: the decoder's two attentions.
//
//   query = (q[b, h] + bias_q[h]) * scale * log2(e), in float32
//   key, value [s] = the entries of row r = b * heads + h; those of the masked attention end with the new token's
//                    own, k + bias_k and v + bias_v, rounded to T and written into the caches
//   score[s] = query . key[s]
//   out   = sum over s of 2^(score[s] - largest) * value[s] / sum over s of 2^(score[s] - largest)
//
// No entries, or only scores of -inf, give zeros.
//
// Grid: x over columns of 32 / LANES rows, y over splits of the sequence. Block: a column, its split of the sequence
// dealt out to the warps, STEPS entries at a time. Warp: LANES lanes per row, so that one load of a warp reads the
// neighbouring rows of one entry, 512 bytes side by side. Lane: CHUNKS loads of VECTOR elements of each key and value.
//
// Each warp keeps the largest score so far, the sum of the weights and the weighted values relative to that score
// (online softmax), the warps of a block meet in shared memory, and `combine` joins the splits if there are several.
//
// DIM == 0: the dimension of a head is dynamic, at most LANES * CHUNKS * VECTOR.
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "decoder_attention/softmax.cuh"

constexpr int MAX_WARPS = 8;

struct Params {
    const void* q; // [batch, heads * dim]  T, rows `q_stride` apart; so k and v
    const void* k; // null: there is no new entry (cross attention)
    const void* v;
    const void* bias_q; // [heads * dim]  float if bias_is_float, else T; null: none; so bias_k and bias_v
    const void* bias_k;
    const void* bias_v;
    void* keys; // T, an entry of row b * heads + h at s * step_stride + b * batch_stride + h * dim; so values
    void* values;
    const int* lengths; // [batch] entries of each sequence, clamped to [0, entries]; null: `entries` for all
    void* out;          // [rows, dim]  T
    float* partial;     // [splits, rows, dim], with several splits; so `statistics`
    float2* statistics; // [splits, rows]: the largest score and the sum of the weights
    long long q_stride; // in elements, like all strides
    long long k_stride;
    long long v_stride;
    long long batch_stride;
    int step_stride;
    int rows;
    int heads;
    int dim;
    int entries;     // to be read from memory; the new one is written after them
    int split_steps; // entries per split, a multiple of STEPS
    int bias_is_float;
    float scale; // * log2(e)
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

template <typename T, int DIM, int VECTOR, int LANES, int CHUNKS, int STEPS>
__global__ __launch_bounds__(MAX_WARPS * 32, 2) void decoder_attention(const __grid_constant__ Params p) {
    using Load = typename Word<VECTOR * sizeof(T)>::type;
    constexpr int VALUES = CHUNKS * VECTOR; // of a row, in a lane
    constexpr bool FILLED = DIM == LANES * VALUES;
    __shared__ float warp_sums[MAX_WARPS][VALUES][32];
    __shared__ float2 warp_statistics[MAX_WARPS][32];

    const int dim = DIM ? DIM : p.dim;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % LANES;
    // Lanes beyond the last row repeat it, and write nothing.
    const int own_row = blockIdx.x * (32 / LANES) + lane / LANES;
    const int row = min(own_row, p.rows - 1);
    const int batch = row / p.heads, head = row - batch * p.heads;

    // Lanes beyond the row's end repeat its beginning, which spares a predicate per load.
    bool held[CHUNKS];
    int at[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int element = (c * LANES + part) * VECTOR;
        held[c] = FILLED || element < dim;
        at[c] = held[c] ? element : 0;
    }

    // --- the first entries start on their way --------------------------------------------------------------
    const int split_begin = blockIdx.y * p.split_steps;
    const int entries = p.lengths ? min(max(p.lengths[batch], 0), p.entries) : p.entries;
    const int end = min(entries - split_begin, p.split_steps); // of this row in this split, may be negative
    const int longest = __reduce_max_sync(FULL_WARP, end);
    const long long base = batch * p.batch_stride + head * dim;
    const T* const keys = static_cast<const T*>(p.keys) + base + (long long)split_begin * p.step_stride;
    const T* const values = static_cast<const T*>(p.values) + base + (long long)split_begin * p.step_stride;

    // Whatever lies beyond the end is not read: it may be NaN, which times a weight of 0 is NaN.
    const auto fetch = [&](const T* from, int first, Load(&to)[STEPS][CHUNKS]) {
        const T* entry = from + (long long)first * p.step_stride;
        long long stride = p.step_stride;
        // The compiler would keep the multiples of a stride that it knows in registers, which are short.
        asm volatile("" : "+l"(stride));
#pragma unroll
        for (int s = 0; s < STEPS; ++s, entry += stride) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                to[s][c] = first + s < end ? __ldg(reinterpret_cast<const Load*>(entry + at[c])) : Load{};
        }
    };
    Load key[STEPS][CHUNKS], value[STEPS][CHUNKS];
    fetch(keys, warp * STEPS, key);
    fetch(values, warp * STEPS, value);

    // --- the query -----------------------------------------------------------------------------------------
    const auto load_new = [&](const void* rows, long long stride, const void* bias, float (&to)[VALUES]) {
        const long long row_at = batch * stride + head * dim;
        float own_bias[VALUES] = {};
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int element = at[i / VECTOR] + i % VECTOR;
            to[i] = to_float(static_cast<const T*>(rows)[row_at + element]);
            if (bias && p.bias_is_float) own_bias[i] = static_cast<const float*>(bias)[head * dim + element];
            if (bias && !p.bias_is_float) own_bias[i] = to_float(static_cast<const T*>(bias)[head * dim + element]);
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) to[i] += own_bias[i];
    };
    float query[VALUES];
    load_new(p.q, p.q_stride, p.bias_q, query);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) query[i] *= p.scale;

    const auto dot_chunk = [&](const T* other, int c) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum = fmaf(query[c * VECTOR + j], to_float(other[j]), sum);
        return held[c] ? sum : 0.f;
    };

    // --- the new entry -------------------------------------------------------------------------------------
    float largest = -CUDART_INF_F, total = 0.f, sums[VALUES] = {};
    // One warp of a row takes it, as the first entry of its own.
    if (p.k != nullptr && blockIdx.y == gridDim.y - 1 && warp == warps - 1) {
        float new_key[VALUES];
        load_new(p.k, p.k_stride, p.bias_k, new_key);
        load_new(p.v, p.v_stride, p.bias_v, sums);
        const long long entry = base + (long long)p.entries * p.step_stride;
        T* key_entry = static_cast<T*>(p.keys) + entry;
        T* value_entry = static_cast<T*>(p.values) + entry;
        largest = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            T stored_key[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                // It counts as what the next step will read.
                stored_key[j] = from_float<T>(new_key[c * VECTOR + j]);
                const T stored_value = from_float<T>(sums[c * VECTOR + j]);
                sums[c * VECTOR + j] = to_float(stored_value);
                if (held[c] && own_row < p.rows) {
                    key_entry[at[c] + j] = stored_key[j];
                    value_entry[at[c] + j] = stored_value;
                }
            }
            largest += dot_chunk(stored_key, c);
        }
        largest = lanes_sum<LANES>(largest);
        total = 1.f;
    }

    // --- the entries in memory -----------------------------------------------------------------------------
    // Each array is fetched again as soon as it has been used, so that half of the loads are always on their way.
#pragma unroll 1
    for (int first = warp * STEPS; first < longest; first += warps * STEPS) {
        float score[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            score[s] = 0.f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) score[s] += dot_chunk(reinterpret_cast<const T*>(&key[s][c]), c);
        }
        fetch(keys, first + warps * STEPS, key);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) score[s] = lanes_sum<LANES>(score[s]);
        float new_largest = largest;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (first + s >= end) score[s] = -CUDART_INF_F;
            new_largest = fmaxf(new_largest, score[s]);
        }
        // One correction serves all STEPS entries.
        const float correction = fast_exp2(largest - reference(new_largest));
        largest = new_largest;
        total *= correction;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] *= correction;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const float weight = fast_exp2(score[s] - reference(largest));
            total += weight;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
                const T* chunk = reinterpret_cast<const T*>(&value[s][i / VECTOR]);
                sums[i] = fmaf(weight, to_float(chunk[i % VECTOR]), sums[i]);
            }
        }
        fetch(values, first + warps * STEPS, value);
    }

    // --- the warps of the block --------------------------------------------------------------------------
#pragma unroll
    for (int i = 0; i < VALUES; ++i) warp_sums[warp][i][lane] = sums[i];
    warp_statistics[warp][lane] = make_float2(largest, total);
    __syncthreads();
    if (own_row >= p.rows) return;
    largest = -CUDART_INF_F;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, warp_statistics[w][lane].x);
    total = 0.f;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
        const float2 theirs = warp_statistics[w][lane];
        total += theirs.y * fast_exp2(theirs.x - reference(largest));
    }
    const long long split_row = (long long)blockIdx.y * p.rows + row;
    if (gridDim.y > 1 && warp == 0 && part == 0) p.statistics[split_row] = make_float2(largest, total);
#pragma unroll 1
    for (int i = warp; i < VALUES; i += warps) {
        const int element = (i / VECTOR * LANES + part) * VECTOR + i % VECTOR;
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
