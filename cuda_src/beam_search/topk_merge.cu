// Merge the lists of the chunks of a row: the second stage of a top-k.
//
//   values, ids = the k largest keys of the lists, best first, ties to the lower id
//   best        = the same keys with diversity_rate * r added to the value of rank r, sorted again; written instead of
//                 values and ids if there is a diversity rate
//
// With a diversity rate, the candidates of each beam are ranked separately first: this kernel runs with one row per
// beam. A second merge then combines the lists of the beams, just as it would combine lists of chunks.
//
// Grid: one block per row. A row is a batch entry, or a beam if there is a diversity rate. GROUPS (groups of threads,
// see selection.cuh): 32 for up to 16 results, else THREADS.
//
// Speed of light: latency. The lists are small: k keys per chunk of 4 to 32 KB. The time is therefore a launch and a
// chain of dependent steps: load one entry of each list, find a bound, load the keys that reach the bound, and rank
// them. topk_chunks.cu gives the time of both stages.
#include "beam_search/merge.cuh"
#include "common/overlap.cuh"

struct MergeParams {
    const Key* lists; // [rows, count, k]
    float* values;    // [rows, k]
    int* ids;         // [rows, k]
    Key* best;        // [rows, k], written instead of `values` and `ids` with a diversity rate; else null
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
    // The diversity term may have changed the order, so rank the keys again. Keys of 0 (no candidate) are ordered by
    // their index, so that each rank is written exactly once.
    int rank = 0;
    for (int other = 0; other < k; ++other) rank += sorted[other] > own || (sorted[other] == own && other < i);
    if (i < k) p.best[row * k + rank] = own;
}
