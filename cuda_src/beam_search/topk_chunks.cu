// Find the k best candidates of each chunk of a row. This is the first stage of a top-k. The second stage is
// topk_merge.cu or beam_step.cu.
//
//   total[b, i] = log_probs[b, i] + score of the beam     i = beam * vocab + token; the score is optional
//   best        = the k largest totals of a chunk as keys, best first; ties to the lower i; NaN counts as -inf
//
// Grid: rows * chunks, one block per chunk. GROUPS: see selection.cuh.
//
// Speed of light: memory bandwidth. On an H200, both stages take 24 us for 32 requests with 4 beams each, a vocabulary
// of 128256 (float32) and k = 4 (66% of the bandwidth of a copy). One request with 4 beams and a vocabulary of 32000 is
// latency-bound: 5.1 us.
#include "beam_search/selection.cuh"
#include "common/overlap.cuh"

constexpr int LOADS = 8; // in flight per thread

struct ChunkParams {
    const void* log_probs; // [rows, vocab]  T
    const float* scores;   // [rows], added to each row; may be null
    Key* best;             // [rows, chunks, k], best first; 0 after the last key of a chunk
    int beams;             // rows per batch entry; an id is beam * vocab + column
    int vocab;
    int chunks;
    int vectors; // of 16 bytes per chunk, at most THREADS * LOADS
    int k;
};

// A chunk of a row. Vectors are aligned to 16 bytes: vector 0 contains column 0 and `skipped` values before the row.
// Edge values are in a vector that is only partly in the row. The first chunk reads them, one value per thread.
template <typename T> struct Chunk {
    static constexpr int PER_VECTOR = 16 / sizeof(T);
    struct alignas(16) Vector {
        T item[PER_VECTOR];
    };

    const ChunkParams& p;
    int row;
    const T* values; // [vocab], the row
    const Vector* vectors;
    float score;
    int skipped, from, to; // the chunk is vectors from to to - 1
    int edge;              // column of this thread's edge value; none if >= vocab
    bool is_first;

    __device__ __forceinline__ explicit Chunk(const ChunkParams& p) : p(p) {
        row = blockIdx.x / p.chunks;
        const int chunk = blockIdx.x - row * p.chunks;
        values = static_cast<const T*>(p.log_probs) + (long long)row * p.vocab;
        score = p.scores ? p.scores[row] : 0.f;
        skipped = int(reinterpret_cast<size_t>(values) % 16 / sizeof(T));
        vectors = reinterpret_cast<const Vector*>(values - skipped);
        const int first_vector = skipped > 0;
        const int end_vector = int(((long long)p.vocab + skipped) / PER_VECTOR);
        from = first_vector + chunk * p.vectors, to = min(from + p.vectors, end_vector);
        is_first = chunk == 0;
        edge = p.vocab;
        if (is_first) {
            const int head = skipped ? min(PER_VECTOR - skipped, p.vocab) : 0;
            if (threadIdx.x < PER_VECTOR)
                edge = threadIdx.x < head ? int(threadIdx.x) : p.vocab;
            else if (threadIdx.x < 2 * PER_VECTOR)
                edge = max(column_of(end_vector), head) + int(threadIdx.x) - PER_VECTOR;
        }
    }

    __device__ __forceinline__ int column_of(int vector) const { return vector * PER_VECTOR - skipped; }

    // fmaxf turns a NaN into -inf, and adding 0 turns -0 into 0.
    __device__ __forceinline__ float total(T value) const { return fmaxf(to_float(value) + score, -CUDART_INF_F); }

    __device__ __forceinline__ float best() const {
        Vector loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vector = from + i * THREADS + threadIdx.x;
            if (vector < to) loaded[i] = vectors[vector];
        }
        float best = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (from + i * THREADS + int(threadIdx.x) >= to) break;
#pragma unroll
            for (int j = 0; j < PER_VECTOR; ++j) best = fmaxf(best, to_float(loaded[i].item[j]) + score);
        }
        if (edge < p.vocab) best = fmaxf(best, total(values[edge]));
        return best;
    }

    // Read the values again. Only few threads call this, because only few have keys `>= low`.
    template <typename F> __device__ __forceinline__ void for_each_key(Key low, int first_id, F f) const {
        const auto test = [&](T value, int column) {
            const Key key = make_key(sortable(total(value)), first_id + column);
            if (key >= low) f(key);
        };
#pragma unroll 1
        for (int vector = from + threadIdx.x; vector < to; vector += THREADS) {
            const Vector again = vectors[vector];
#pragma unroll
            for (int j = 0; j < PER_VECTOR; ++j) test(again.item[j], column_of(vector) + j);
        }
        if (edge < p.vocab) test(values[edge], edge);
    }

    // Edge values are included.
    __device__ __forceinline__ int last_column() const { return is_first ? p.vocab - 1 : max(column_of(to), 1) - 1; }
    __device__ __forceinline__ int first_column(int last) const { return is_first ? 0 : min(column_of(from), last); }
};

template <typename T, int GROUPS>
__global__ void __launch_bounds__(THREADS, 4) topk_chunks(const __grid_constant__ ChunkParams p) {
    begin_behind_earlier_kernels();
    __shared__ Selection<GROUPS> s;
    s.start();
    const Chunk<T> chunk(p);
    const unsigned thread_max = sortable(chunk.best());
    const int first_id = chunk.row % p.beams * p.vocab; // of column 0
    const auto for_each_key = [&](Key low, auto f) {
        if (thread_max >= key_value(low)) chunk.for_each_key(low, first_id, f);
    };
    Key* out = p.best + (long long)blockIdx.x * p.k;
    const auto emit = [&](int rank, Key key) {
        if (rank < p.k) out[rank] = key;
    };
    const unsigned bound = lower_bound(s, thread_max, p.k);
    const int last = chunk.last_column(), first = chunk.first_column(last);
    const int count =
        select(s, make_key(bound, first_id + last), make_key(bound, first_id + first), p.k, for_each_key, emit);
    for (int i = count + threadIdx.x; i < p.k; i += THREADS) out[i] = 0;
}
