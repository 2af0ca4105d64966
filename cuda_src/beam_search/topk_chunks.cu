// Find the k best of each chunk of a row: the first stage of a top-k over beams * vocab candidates.
//
//   total[b, i] = log_probs[b, i] + score of the beam     i runs over beams * vocab; the score may be absent
//   best        = the k largest keys of a chunk, best first; ties to the lower i; NaN counts as -inf
//
// A row of the vocabulary is long and k is small, so a chunk's list is short, and the second stage (topk_merge.cu,
// beam_step.cu) has little to read.
//
// Grid: rows * chunks, a block per chunk. How a block selects: selection.cuh.
// GROUPS: 32 for up to 16 results, THREADS for more.
//
// Speed of light: memory, each value read once; the second look of a few threads finds its values in L1 or L2. On an
// H200 both stages together take 24 us for 32 requests of 4 beams of 128256 float32 (k = 4), of which reading at the
// speed of a copy takes 66%. One request of 4 beams of 32000 takes 5.1 us: the latency of two launches, each a chain of a
// load, a bound, a list and its ranks.
#include "beam_search/selection.cuh"

constexpr int LOADS = 8; // 16-byte loads of a thread in flight

struct ChunkParams {
    const void* log_probs; // [rows, vocab]  T
    const float* scores;   // [rows], added to each row; may be null
    Key* best;             // [rows, chunks, k], best first, 0 where a chunk has no more
    int beams;             // rows of a batch entry; an id is beam * vocab + column
    int vocab;
    int chunks;
    int vectors; // of 16 bytes in a chunk, at most THREADS * LOADS
    int k;
};

// A row starts anywhere: what lies before its first and after its last whole vector, its edges, is read one value per
// thread by the block of the first chunk.
template <typename T, int GROUPS>
__global__ void __launch_bounds__(THREADS, 4) topk_chunks(const __grid_constant__ ChunkParams p) {
    constexpr int ITEMS = 16 / sizeof(T);
    struct alignas(16) Vector {
        T item[ITEMS];
    };
    __shared__ Selection<GROUPS> s;
    start(s);

    const int row = blockIdx.x / p.chunks, chunk = blockIdx.x - row * p.chunks;
    const T* values = static_cast<const T*>(p.log_probs) + (long long)row * p.vocab;
    const float score = p.scores ? p.scores[row] : 0.f;
    // Columns are those of `values`; vectors are counted from the 16 bytes that hold column 0, at item `skipped`.
    const int skipped = int(reinterpret_cast<size_t>(values) % 16 / sizeof(T));
    const Vector* vectors = reinterpret_cast<const Vector*>(values - skipped);
    const int whole_from = skipped > 0;
    const int whole_to = int(((long long)p.vocab + skipped) / ITEMS);
    const int from = whole_from + chunk * p.vectors, to = min(from + p.vectors, whole_to);
    const auto column_of = [&](int vector) { return vector * ITEMS - skipped; };
    int edge = p.vocab;
    if (chunk == 0) {
        const int head = skipped ? min(ITEMS - skipped, p.vocab) : 0;
        if (threadIdx.x < ITEMS)
            edge = threadIdx.x < head ? int(threadIdx.x) : p.vocab;
        else if (threadIdx.x < 2 * ITEMS)
            edge = max(column_of(whole_to), head) + int(threadIdx.x) - ITEMS;
    }

    // fmax turns a NaN into -inf, and adding 0 turns a -0 into 0.
    const auto total = [&](T value) { return fmaxf(to_float(value) + score, -CUDART_INF_F); };
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
    const unsigned mine = sortable(best);

    const int first_id = row % p.beams * p.vocab;
    // The second look at the values is of few threads, and finds them in L1 or L2.
    const auto visit = [&](Key low, auto f) {
        if (mine < key_value(low)) return;
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
    };
    Key* out = p.best + (long long)blockIdx.x * p.k;
    const unsigned bound = lower_bound(s, mine, p.k);
    const int last_column = chunk == 0 ? p.vocab - 1 : max(column_of(to), 1) - 1;
    const int first_column = chunk == 0 ? 0 : min(column_of(from), last_column);
    const int count = select(s, make_key(bound, first_id + last_column), make_key(bound, first_id + first_column), p.k,
                             visit, [&](int rank, Key key) {
                                 if (rank < p.k) out[rank] = key;
                             });
    for (int i = count + threadIdx.x; i < p.k; i += THREADS) out[i] = 0;
}
