// Find the k best candidates of each chunk of a row. This is the first stage of a top-k over `beams * vocab`
// candidates.
//
//   total[b, i] = log_probs[b, i] + score of the beam     i = beam * vocab + token; the score is optional
//   best        = the k largest totals of a chunk as keys, best first; ties to the lower i; NaN counts as -inf
//
// Because k is much smaller than the vocabulary, the lists are short, and the second stage (topk_merge.cu or
// beam_step.cu) reads little.
//
// Grid: rows * chunks, one block per chunk. selection.cuh describes the selection and the keys. GROUPS (groups of
// threads, see selection.cuh): 32 for up to 16 results, else THREADS.
//
// Speed of light: memory bandwidth; each value is read once. A few threads read their values again, from L1 or L2. On
// an H200, both stages together take 24 us for 32 requests with 4 beams each, a vocabulary of 128256 (float32) and k =
// 4, which is 66% of the bandwidth of a copy. One request with 4 beams and a vocabulary of 32000 is latency-bound: the
// two launches take 5.1 us together. Each launch is a chain of dependent steps: load the values, find the bound, fill
// the list, rank the keys.
#include "beam_search/selection.cuh"
#include "common/overlap.cuh"

constexpr int LOADS = 8; // 16-byte loads in flight per thread

struct ChunkParams {
    const void* log_probs; // [rows, vocab]  T
    const float* scores;   // [rows], added to each row; may be null
    Key* best;             // [rows, chunks, k], best first; 0 after the last key of a chunk
    int beams;             // rows per batch entry; an id is beam * vocab + column
    int vocab;
    int chunks;
    int vectors; // 16-byte vectors in a chunk, at most THREADS * LOADS
    int k;
};

// A chunk of a row, and the values in it that this thread reads.
//
// A row may start at any address, but vectors are aligned to 16 bytes. Vector 0 is the vector that contains column 0;
// the first `skipped` values of this vector lie before the row. The edge values of a row lie before its first whole
// vector or after its last whole vector. The block of the first chunk reads the edges, one value per thread.
template <typename T> struct Chunk {
    static constexpr int ITEMS = 16 / sizeof(T);
    struct alignas(16) Vector {
        T item[ITEMS];
    };

    const ChunkParams& p;
    int row;
    const T* values; // [vocab], the row
    const Vector* vectors;
    float score;           // score of the beam
    int skipped, from, to; // the chunk is vectors from ... to - 1
    int edge;              // column of the edge value that this thread reads; none if >= vocab
    bool is_first;

    __device__ __forceinline__ explicit Chunk(const ChunkParams& p) : p(p) {
        row = blockIdx.x / p.chunks;
        const int chunk = blockIdx.x - row * p.chunks;
        values = static_cast<const T*>(p.log_probs) + (long long)row * p.vocab;
        score = p.scores ? p.scores[row] : 0.f;
        skipped = int(reinterpret_cast<size_t>(values) % 16 / sizeof(T));
        vectors = reinterpret_cast<const Vector*>(values - skipped);
        const int whole_from = skipped > 0;
        const int whole_to = int(((long long)p.vocab + skipped) / ITEMS);
        from = whole_from + chunk * p.vectors, to = min(from + p.vectors, whole_to);
        is_first = chunk == 0;
        edge = p.vocab;
        if (is_first) {
            const int head = skipped ? min(ITEMS - skipped, p.vocab) : 0;
            if (threadIdx.x < ITEMS)
                edge = threadIdx.x < head ? int(threadIdx.x) : p.vocab;
            else if (threadIdx.x < 2 * ITEMS)
                edge = max(column_of(whole_to), head) + int(threadIdx.x) - ITEMS;
        }
    }

    __device__ __forceinline__ int column_of(int vector) const { return vector * ITEMS - skipped; }

    // fmaxf turns a NaN into -inf, and adding 0 turns -0 into 0.
    __device__ __forceinline__ float total(T value) const { return fmaxf(to_float(value) + score, -CUDART_INF_F); }

    // Return the largest total of this thread. The thread issues all its loads before it uses the first value.
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
            for (int j = 0; j < ITEMS; ++j) best = fmaxf(best, to_float(loaded[i].item[j]) + score);
        }
        if (edge < p.vocab) best = fmaxf(best, total(values[edge]));
        return best;
    }

    // Call f for each key of this thread that is `>= low`. The thread reads its values again from L1 or L2; only few
    // threads do so.
    template <typename F> __device__ __forceinline__ void visit(Key low, int first_id, F f) const {
        const auto look = [&](T value, int column) {
            const Key key = make_key(sortable(total(value)), first_id + column);
            if (key >= low) f(key);
        };
#pragma unroll 1
        for (int vector = from + threadIdx.x; vector < to; vector += THREADS) {
            const Vector again = vectors[vector];
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) look(again.item[j], column_of(vector) + j);
        }
        if (edge < p.vocab) look(values[edge], edge);
    }

    // Return the last and the first column of the chunk, edge values included.
    __device__ __forceinline__ int last_column() const { return is_first ? p.vocab - 1 : max(column_of(to), 1) - 1; }
    __device__ __forceinline__ int first_column(int last) const { return is_first ? 0 : min(column_of(from), last); }
};

template <typename T, int GROUPS>
__global__ void __launch_bounds__(THREADS, 4) topk_chunks(const __grid_constant__ ChunkParams p) {
    begin_behind_earlier_kernels();
    __shared__ Selection<GROUPS> s;
    s.start();
    const Chunk<T> chunk(p);
    const unsigned mine = sortable(chunk.best());
    const int first_id = chunk.row % p.beams * p.vocab; // of column 0
    const auto visit = [&](Key low, auto f) {
        if (mine >= key_value(low)) chunk.visit(low, first_id, f);
    };
    Key* out = p.best + (long long)blockIdx.x * p.k;
    const auto place = [&](int rank, Key key) {
        if (rank < p.k) out[rank] = key;
    };
    const unsigned bound = lower_bound(s, mine, p.k);
    const int last = chunk.last_column(), first = chunk.first_column(last);
    const int count = select(s, make_key(bound, first_id + last), make_key(bound, first_id + first), p.k, visit, place);
    for (int i = count + threadIdx.x; i < p.k; i += THREADS) out[i] = 0;
}
