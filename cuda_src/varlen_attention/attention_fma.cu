// Attention over sequences of different lengths, packed without padding, with float32 FMAs.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j of the sequence of query i;
//                                                                       if causal, only for keys that i sees (below)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// Causal: the last query of a sequence sees (attends to) all keys of the sequence, and each earlier query sees one key
// less than the next query. The result of a query without keys is 0.
//
//   T       type of the elements
//   DIM     padded size of a head, at least p.dim; the padding is 0
//   TILE    queries of a block, and keys of a tile
//   BYTES   width of a load: 16, or the size of one element
//
// Grid: (tiles of queries, heads), see varlen_attention/sequences.cuh. A block of 16 x 16 threads computes TILE
// queries, and loops over their keys in tiles of TILE keys. Thread (y, x) computes the scores of queries `y + 16 * i`
// and keys `x + 16 * j`, and then some columns of the results of the same queries. 16 neighbouring lanes therefore hold
// one row of scores, and compute its softmax together. Shared memory holds the queries, a tile of keys or of values,
// and the weights, all as float32.
//
// Speed of light: the float32 units, with 4 * dim flops for each pair of a query and a key. The kernel favours
// readability over speed: within a block, loads and FMAs do not overlap. Other resident blocks run while a block waits
// for its loads.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"
#include "varlen_attention/sequences.cuh"

template <int BYTES> using Unit = typename VectorOf<BYTES>::Type;

constexpr int FMA_THREADS = 256;

// The sizes of a block. A line is a row of a tile in shared memory. It has 16 bytes of padding, so that 16-byte reads
// of neighbouring lines do not cause bank conflicts.
template <int DIM_, int TILE_> struct Sizes {
    static constexpr int DIM = DIM_, TILE = TILE_, M = TILE / 16; // a thread has M x M scores
    static constexpr int LINE = DIM + 4, WEIGHTS_LINE = TILE + 4;
    static constexpr int BYTES = TILE * (2 * LINE + WEIGHTS_LINE) * 4;
    // A thread computes N columns of the result per row, in groups of VECTOR contiguous columns.
    static constexpr int N = DIM / 16, VECTOR = N < 4 ? N : 4;
    struct alignas(4 * VECTOR) Neighbours { // one load
        float of[VECTOR];
    };
};

// Load the first `rows` rows of a tile, `stride` bytes apart, as float32. Set the other rows and the padding to 0
// without reading them.
template <typename T, typename S, int BYTES>
__device__ __forceinline__ void load_tile(float* to, const char* from, long long stride, int rows, int dim) {
    constexpr int EACH = BYTES / int(sizeof(T)), UNITS = S::DIM / EACH;
#pragma unroll 4
    for (int i = threadIdx.x; i < S::TILE * UNITS; i += FMA_THREADS) {
        const int row = i / UNITS, column = i % UNITS * EACH;
        Unit<BYTES> unit = {};
        if (row < rows && column < dim)
            unit = __ldg(reinterpret_cast<const Unit<BYTES>*>(from + row * stride + column * int(sizeof(T))));
#pragma unroll
        for (int j = 0; j < EACH; ++j) to[row * S::LINE + column + j] = to_float(reinterpret_cast<const T*>(&unit)[j]);
    }
}

// Compute the scores of a thread. `q` is the line of its first query, `k` the line of its first key.
template <typename S>
__device__ __forceinline__ void score(float (&scores)[S::M][S::M], const float* q, const float* k, int dim) {
#pragma unroll
    for (int i = 0; i < S::M; ++i)
#pragma unroll
        for (int j = 0; j < S::M; ++j) scores[i][j] = 0.f;
#pragma unroll 1
    for (int d = 0; d < dim; d += 4) {
        float4 a[S::M], b[S::M];
#pragma unroll
        for (int i = 0; i < S::M; ++i) {
            a[i] = *reinterpret_cast<const float4*>(q + i * 16 * S::LINE + d);
            b[i] = *reinterpret_cast<const float4*>(k + i * 16 * S::LINE + d);
        }
#pragma unroll
        for (int i = 0; i < S::M; ++i)
#pragma unroll
            for (int j = 0; j < S::M; ++j)
                scores[i][j] += a[i].x * b[j].x + a[i].y * b[j].y + a[i].z * b[j].z + a[i].w * b[j].w;
    }
}

// Add the product of weights and values to a thread's results. `weights` points to the line of the thread's first
// query, and `v` to its first column of the values.
template <typename S>
__device__ __forceinline__ void add_values(float (&sums)[S::M][S::N], const float* weights, const float* v) {
#pragma unroll 1
    for (int key = 0; key < S::TILE; key += 4) {
        float p[S::M][4];
#pragma unroll
        for (int i = 0; i < S::M; ++i)
            *reinterpret_cast<float4*>(p[i]) =
                *reinterpret_cast<const float4*>(weights + i * 16 * S::WEIGHTS_LINE + key);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int n = 0; n < S::N; n += S::VECTOR) {
                const auto value = *reinterpret_cast<const typename S::Neighbours*>(v + (key + j) * S::LINE + n * 16);
#pragma unroll
                for (int i = 0; i < S::M; ++i)
#pragma unroll
                    for (int e = 0; e < S::VECTOR; ++e) sums[i][n + e] += p[i][j] * value.of[e];
            }
    }
}

// Convert a thread's scores of a tile to weights, and store them in shared memory, starting at address `weights`.
// Rescale the sums to the new largest scores.
template <typename S>
__device__ __forceinline__ void weigh(const Params& p, const Part<S::TILE>& part, int first_key,
                                      const float (&scores)[S::M][S::M], Softmax (&softmax)[S::M],
                                      float (&sums)[S::M][S::N], float* weights) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        float score[S::M], most = -CUDART_INF_F;
#pragma unroll
        for (int j = 0; j < S::M; ++j) {
            const bool sees = part.sees(p, y + 16 * i, first_key + x + 16 * j);
            score[j] = sees ? scores[i][j] * p.scale : -CUDART_INF_F;
            most = fmaxf(most, score[j]);
        }
        const float factor = softmax[i].raise_to(lanes_max<16>(most));
#pragma unroll
        for (int n = 0; n < S::N; ++n) sums[i][n] *= factor;
#pragma unroll
        for (int j = 0; j < S::M; ++j) weights[i * 16 * S::WEIGHTS_LINE + 16 * j] = softmax[i].weigh(score[j]);
    }
}

template <typename, int DIM, int TILE, int> constexpr Launch attention_fma_launch() {
    return {FMA_THREADS, Sizes<DIM, TILE>::BYTES};
}

template <typename T, int DIM, int TILE, int BYTES>
__global__ void __launch_bounds__(FMA_THREADS, 2) attention_fma(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using S = Sizes<DIM, TILE>;
    extern __shared__ float4 shared[];
    const Part<S::TILE> part(p);
    if (part.rows <= 0) return;
    float* const queries = reinterpret_cast<float*>(shared);
    float *const tile = queries + S::TILE * S::LINE, *const weights = tile + S::TILE * S::LINE;
    const int head = blockIdx.y, y = threadIdx.x / 16, x = threadIdx.x % 16;
    const char* q = p.q + part.first * p.q_strides[0] + head * p.q_strides[1];
    const char* k = p.k + part.keys_begin * p.k_strides[0] + head / p.group * p.k_strides[1];
    const char* v = p.v + part.keys_begin * p.v_strides[0] + head / p.group * p.v_strides[1];
    load_tile<T, S, BYTES>(queries, q, p.q_strides[0], part.rows, p.dim);

    Softmax softmax[S::M]; // a total covers only this lane's weights until the epilogue
    float sums[S::M][S::N] = {}, scores[S::M][S::M];
#pragma unroll 1
    for (int key = 0; key < part.keys; key += S::TILE) {
        __syncthreads(); // the previous tile's values have been read
        load_tile<T, S, BYTES>(tile, k + key * p.k_strides[0], p.k_strides[0], part.keys - key, p.dim);
        __syncthreads(); // the queries and the keys are in shared memory
        score<S>(scores, queries + y * S::LINE, tile + x * S::LINE, p.dim);
        __syncthreads(); // the keys have been read
        load_tile<T, S, BYTES>(tile, v + key * p.v_strides[0], p.v_strides[0], part.keys - key, p.dim);
        weigh<S>(p, part, key, scores, softmax, sums, weights + y * S::WEIGHTS_LINE + x);
        __syncthreads(); // the values and the weights are in shared memory
        add_values<S>(sums, weights + y * S::WEIGHTS_LINE, tile + x * S::VECTOR);
    }

    T* const out = reinterpret_cast<T*>(p.out) + ((long long)part.first * p.heads + head) * p.dim;
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        const float factor = inverse_of(lanes_sum<16>(softmax[i].total));
        const int row = y + 16 * i;
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
            const int column = x * S::VECTOR + n / S::VECTOR * 16 * S::VECTOR + n % S::VECTOR;
            if (row < part.rows && column < p.dim)
                out[(long long)row * p.heads * p.dim + column] = from_float<T>(sums[i][n] * factor);
        }
    }
}
