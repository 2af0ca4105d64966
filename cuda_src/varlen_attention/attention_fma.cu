// Compute the attention of varlen_attention/sequences.cuh with float32 FMAs.
//
//   DIM     padded head_dim, at least p.dim; the padding is 0
//   TILE    queries of a block, and keys of a tile
//   BYTES   bytes of a load: 16, or one element
//
// Grid: (tiles of queries, heads). A block of 16 x 16 threads loops over tiles of keys. Thread (y, x) computes the
// scores of queries `y + 16 * i` and keys `x + 16 * j`, so 16 neighbouring lanes hold a row of scores. Shared memory
// holds the queries, a tile of keys or values, and the softmax weights, all in float32.
//
// Speed of light: the float32 units, with 4 * dim flops per query and key. To keep the kernel simple, its loads overlap
// only with the FMAs of other resident blocks.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int FMA_THREADS = 256;

// Rows in shared memory have 16 bytes of padding to avoid bank conflicts of 16-byte reads.
template <int DIM_, int TILE_> struct Sizes {
    static constexpr int DIM = DIM_, TILE = TILE_, M = TILE / 16; // a thread has M x M scores
    static constexpr int ROW_STRIDE = DIM + 4, WEIGHTS_STRIDE = TILE + 4;
    static constexpr int BYTES = TILE * (2 * ROW_STRIDE + WEIGHTS_STRIDE) * 4;
    // N output columns per row and thread, in groups of VECTOR contiguous columns.
    static constexpr int N = DIM / 16, VECTOR = N < 4 ? N : 4;
    struct alignas(4 * VECTOR) Columns {
        float column[VECTOR];
    };
};

// Load the first `rows` rows of a tile as float32. Other rows and the padding become 0 without being read.
template <typename T, typename S, int BYTES>
__device__ __forceinline__ void load_tile(float* to, const char* from, long long stride, int rows, int dim) {
    constexpr int PER_VECTOR = BYTES / int(sizeof(T)), VECTORS = S::DIM / PER_VECTOR;
#pragma unroll 4
    for (int i = threadIdx.x; i < S::TILE * VECTORS; i += FMA_THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * PER_VECTOR;
        Vector<BYTES> vector = {};
        if (row < rows && column < dim)
            vector = __ldg(reinterpret_cast<const Vector<BYTES>*>(from + row * stride + column * int(sizeof(T))));
#pragma unroll
        for (int j = 0; j < PER_VECTOR; ++j)
            to[row * S::ROW_STRIDE + column + j] = to_float(reinterpret_cast<const T*>(&vector)[j]);
    }
}

// `q`, `k`: rows of the thread's first query and key.
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
            a[i] = *reinterpret_cast<const float4*>(q + i * 16 * S::ROW_STRIDE + d);
            b[i] = *reinterpret_cast<const float4*>(k + i * 16 * S::ROW_STRIDE + d);
        }
#pragma unroll
        for (int i = 0; i < S::M; ++i)
#pragma unroll
            for (int j = 0; j < S::M; ++j)
                scores[i][j] += a[i].x * b[j].x + a[i].y * b[j].y + a[i].z * b[j].z + a[i].w * b[j].w;
    }
}

// `weights`: the weights of the thread's first query. `v`: the values, from the thread's first column on.
template <typename S>
__device__ __forceinline__ void add_values(float (&sums)[S::M][S::N], const float* weights, const float* v) {
#pragma unroll 1
    for (int key = 0; key < S::TILE; key += 4) {
        float p[S::M][4];
#pragma unroll
        for (int i = 0; i < S::M; ++i)
            *reinterpret_cast<float4*>(p[i]) =
                *reinterpret_cast<const float4*>(weights + i * 16 * S::WEIGHTS_STRIDE + key);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int n = 0; n < S::N; n += S::VECTOR) {
                const auto value =
                    *reinterpret_cast<const typename S::Columns*>(v + (key + j) * S::ROW_STRIDE + n * 16);
#pragma unroll
                for (int i = 0; i < S::M; ++i)
#pragma unroll
                    for (int e = 0; e < S::VECTOR; ++e) sums[i][n + e] += p[i][j] * value.column[e];
            }
    }
}

// Store the softmax weights of a tile, and rescale `sums` to the new running maxima.
template <typename S>
__device__ __forceinline__ void online_softmax(const Params& p, const WorkTile<S::TILE>& work, int first_key,
                                               const float (&scores)[S::M][S::M], Softmax (&softmax)[S::M],
                                               float (&sums)[S::M][S::N], float* weights) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        float score[S::M], tile_max = -CUDART_INF_F;
#pragma unroll
        for (int j = 0; j < S::M; ++j) {
            const bool attends = work.attends(p, y + 16 * i, first_key + x + 16 * j);
            score[j] = attends ? scores[i][j] * p.scale : -CUDART_INF_F;
            tile_max = fmaxf(tile_max, score[j]);
        }
        const float factor = softmax[i].update_max(lanes_max<16>(tile_max));
#pragma unroll
        for (int n = 0; n < S::N; ++n) sums[i][n] *= factor;
#pragma unroll
        for (int j = 0; j < S::M; ++j) weights[i * 16 * S::WEIGHTS_STRIDE + 16 * j] = softmax[i].add_score(score[j]);
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
    const WorkTile<S::TILE> work(p);
    if (work.rows <= 0) return;
    float* const queries = reinterpret_cast<float*>(shared);
    float *const tile = queries + S::TILE * S::ROW_STRIDE, *const weights = tile + S::TILE * S::ROW_STRIDE;
    const int head = blockIdx.y, y = threadIdx.x / 16, x = threadIdx.x % 16;
    const char* q = p.q + work.first_row * p.q_strides[0] + head * p.q_strides[1];
    const char* k = p.k + work.keys_begin * p.k_strides[0] + head / p.group * p.k_strides[1];
    const char* v = p.v + work.keys_begin * p.v_strides[0] + head / p.group * p.v_strides[1];
    load_tile<T, S, BYTES>(queries, q, p.q_strides[0], work.rows, p.dim);

    Softmax softmax[S::M]; // row_sum covers only this lane's keys until the epilogue
    float sums[S::M][S::N] = {}, scores[S::M][S::M];
#pragma unroll 1
    for (int key = 0; key < work.keys; key += S::TILE) {
        __syncthreads(); // the previous values are read
        load_tile<T, S, BYTES>(tile, k + key * p.k_strides[0], p.k_strides[0], work.keys - key, p.dim);
        __syncthreads(); // queries and keys are loaded
        score<S>(scores, queries + y * S::ROW_STRIDE, tile + x * S::ROW_STRIDE, p.dim);
        __syncthreads(); // the keys are read
        load_tile<T, S, BYTES>(tile, v + key * p.v_strides[0], p.v_strides[0], work.keys - key, p.dim);
        online_softmax<S>(p, work, key, scores, softmax, sums, weights + y * S::WEIGHTS_STRIDE + x);
        __syncthreads(); // values and weights are stored
        add_values<S>(sums, weights + y * S::WEIGHTS_STRIDE, tile + x * S::VECTOR);
    }

    T* const out = reinterpret_cast<T*>(p.out) + ((long long)work.first_row * p.heads + head) * p.dim;
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        const float factor = normalization(lanes_sum<16>(softmax[i].row_sum));
        const int row = y + 16 * i;
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
            const int column = x * S::VECTOR + n / S::VECTOR * 16 * S::VECTOR + n % S::VECTOR;
            if (row < work.rows && column < p.dim)
                out[(long long)row * p.heads * p.dim + column] = from_float<T>(sums[i][n] * factor);
        }
    }
}
