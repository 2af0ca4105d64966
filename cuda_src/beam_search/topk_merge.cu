// Merge the lists of a row's chunks in the second stage of a top-k.
//
//   values, ids = the k largest keys of the lists, best first, ties to the lower id
//   best        = with a diversity rate, instead of values and ids: the keys with diversity_rate * r added to the value
//                 of rank r, sorted again
//
// A diversity rate ranks the candidates of each beam separately, so the kernel first runs with one row per beam. Its
// lists are then merged like the lists of chunks.
//
// Grid: one block per row. A row is a batch entry, or with a diversity rate a beam.
// GROUPS: 32 for up to 16 results, THREADS for more.
//
// Speed of light: latency. The lists hold k keys per chunk of 4 to 32 KB. So the time is a launch and a chain: load the
// maxima, find a bound, load the keys that reach it, rank them. topk_chunks.cu gives the time of both stages.
#include "beam_search/merge.cuh"
#include "common/overlap.cuh"

struct MergeParams {
    const Key* lists; // [rows, count, k]
    float* values;    // [rows, k]
    int* ids;         // [rows, k]
    Key* best;        // [rows, k], or null; with a diversity rate, written instead of the two above
    int count;        // lists per row
    int k;
    int depth, beam_depth; // arguments of merge
    float diversity_rate;
};

template <int GROUPS> __global__ void __launch_bounds__(THREADS, 4) topk_merge(const __grid_constant__ MergeParams p) {
    begin_behind_earlier_kernels();
    __shared__ Selection<GROUPS> s;
    __shared__ Key sorted[MAX_K];
    const long long row = blockIdx.x;
    const int k = p.k;
    merge(s, p.lists + row * p.count * k, p.count, k, p.depth, p.beam_depth, sorted);
    const int i = threadIdx.x;
    if (!p.best) {
        if (i < k) {
            p.values[row * k + i] = from_sortable(key_value(sorted[i]));
            p.ids[row * k + i] = key_id(sorted[i]);
        }
        return;
    }
    Key own = i < k ? sorted[i] : 0;
    if (own) {
        const float value = __fadd_rn(from_sortable(key_value(own)), __fmul_rn(p.diversity_rate, float(i)));
        own = make_key(sortable(fmaxf(value, -CUDART_INF_F)), key_id(own));
    }
    __syncthreads();
    if (i < k) sorted[i] = own;
    __syncthreads();
    // A rate above 0 may have changed the order. Among keys of 0 the index decides, so that each rank is written once.
    int rank = 0;
    for (int other = 0; other < k; ++other) rank += sorted[other] > own || (sorted[other] == own && other < i);
    if (i < k) p.best[row * k + rank] = own;
}
