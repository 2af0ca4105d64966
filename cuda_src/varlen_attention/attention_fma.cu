// Attention over packed sequences or a paged cache, with float32 FMAs, for all dtypes and alignments.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j in the window of query i
//                 with a softcap: softcap * tanh(score / softcap)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// sequences.cuh defines the window, and the tiles of queries. With sinks the softmax has one more score, sinks[head],
// whose value is 0. The result of a query that sees no key is 0.
//
//   T       type of the elements
//   DIM     padded size of a head, at least p.dim and p.dim_v; the padding is 0
//   TILE    rows of a tile of queries, and keys of a tile
//   BYTES   width of a load: 16, or the size of one element
//
// Grid: see tile_of_block. A block of 16 x 16 threads computes a tile of TILE rows, and loops over the keys in tiles of
// TILE keys, which begin at multiples of TILE. Thread (y, x) computes the scores of rows `y + 16 * i` and keys
// `x + 16 * j`, and then some columns of the results of the same rows. 16 neighbouring lanes therefore hold one row of
// scores, and compute its softmax together. Shared memory holds the queries, a tile of keys or of values, and the
// weights, all as float32.
//
// Speed of light: the float32 units, with 4 * dim flops for each pair of a query and a key. The kernel favours
// readability over speed: within a block, loads and FMAs do not overlap. Other resident blocks run while a block waits
// for its loads.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"
#include "varlen_attention/sequences.cuh"

template <int BYTES> using Vector = typename VectorOf<BYTES>::Type;

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

// Load the rows of a tile of `dim` elements as float32. address_of(row) is the address of a row, or null. Set rows
// without an address and the padding to 0.
template <typename T, typename S, int BYTES, class Address>
__device__ __forceinline__ void load_tile(float* to, int dim, Address address_of) {
    constexpr int COUNT = BYTES / int(sizeof(T)), LOADS = S::DIM / COUNT;
#pragma unroll 4
    for (int i = threadIdx.x; i < S::TILE * LOADS; i += FMA_THREADS) {
        const int row = i / LOADS, column = i % LOADS * COUNT;
        Vector<BYTES> vector = {};
        const char* const from = column < dim ? address_of(row) : nullptr;
        if (from) vector = __ldg(reinterpret_cast<const Vector<BYTES>*>(from + column * int(sizeof(T))));
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            to[row * S::LINE + column + j] = to_float(reinterpret_cast<const T*>(&vector)[j]);
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
__device__ __forceinline__ void weigh(const Params& p, const Tile& tile, int first_key,
                                      const float (&scores)[S::M][S::M], Softmax (&softmax)[S::M],
                                      float (&sums)[S::M][S::N], float* weights) {
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        const int token = (y + 16 * i) / p.pack;
        float score[S::M], most = -CUDART_INF_F;
#pragma unroll
        for (int j = 0; j < S::M; ++j) {
            const bool sees = tile.sees(token, first_key + x + 16 * j);
            score[j] = sees ? score_of(p, scores[i][j]) : -CUDART_INF_F;
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
    const int tile_tokens = S::TILE / p.pack;
    const Tile tile = tile_of_block(p, tile_tokens);
    if (tile.tokens <= 0) return;
    __shared__ int is_invalid; // the sequence does not fit in its table, or a page is not in the cache
    if (threadIdx.x == 0) is_invalid = tile.invalid;
    float* const queries = reinterpret_cast<float*>(shared);
    float *const keys = queries + S::TILE * S::LINE, *const weights = keys + S::TILE * S::LINE; // keys, then values
    const int y = threadIdx.x / 16, x = threadIdx.x % 16, rows = min(tile.tokens, tile_tokens) * p.pack;
    const Rows k(p, tile, p.k, p.k_strides), v(p, tile, p.v, p.v_strides);
    const auto address_in = [&](const Rows& rows, int key) {
        return [&, key](int row) -> const char* {
            if (key + row < tile.begin || key + row >= tile.end) return nullptr;
            const char* const from = rows.at(key + row);
            if (!from) is_invalid = 1;
            return from;
        };
    };
    load_tile<T, S, BYTES>(queries, p.dim, [&](int row) -> const char* {
        if (row >= rows) return nullptr;
        return p.q + (tile.first + row / p.pack) * p.q_strides[0] + (tile.first_head + row % p.pack) * p.q_strides[1];
    });

    Softmax softmax[S::M]; // a total covers only this lane's weights until the epilogue
    float sums[S::M][S::N] = {}, scores[S::M][S::M];
#pragma unroll 1
    for (int key = tile.begin / S::TILE * S::TILE; key < tile.end; key += S::TILE) {
        __syncthreads(); // the previous tile's values have been read
        load_tile<T, S, BYTES>(keys, p.dim, address_in(k, key));
        __syncthreads(); // the queries and the keys are in shared memory
        score<S>(scores, queries + y * S::LINE, keys + x * S::LINE, p.dim);
        __syncthreads(); // the keys have been read
        load_tile<T, S, BYTES>(keys, p.dim_v, address_in(v, key));
        weigh<S>(p, tile, key, scores, softmax, sums, weights + y * S::WEIGHTS_LINE + x);
        __syncthreads(); // the values and the weights are in shared memory
        add_values<S>(sums, weights + y * S::WEIGHTS_LINE, keys + x * S::VECTOR);
    }
    __syncthreads(); // is_invalid is final

#pragma unroll
    for (int i = 0; i < S::M; ++i) {
        const float total = lanes_sum<16>(softmax[i].total);
        const int row = y + 16 * i, head = tile.first_head + row % p.pack;
        if (row >= rows) continue;
        const Normal normal(softmax[i].largest, total, p.sinks, p.sinks ? sink_of(p, head) : 0.f);
        const float factor = is_invalid ? CUDART_NAN_F : normal.factor;
        const long long of_q = tile.first + row / p.pack;
        if (p.lse && x == 0) p.lse[head * (long long)p.tokens + of_q] = is_invalid ? CUDART_NAN_F : normal.lse;
        T* const out = reinterpret_cast<T*>(p.out) + (of_q * p.heads + head) * p.dim_v;
#pragma unroll
        for (int n = 0; n < S::N; ++n) {
            const int column = x * S::VECTOR + n / S::VECTOR * 16 * S::VECTOR + n % S::VECTOR;
            if (column < p.dim_v) out[column] = from_float<T>(sums[i][n] * factor);
        }
    }
}
