// Merge the lists of the chunks of a row, the second stage of a top-k.
//
//   values, ids = the k largest keys of the lists, best first, ties to the lower id
//   best        = the same keys with diversity_rate * r added to the value of rank r, sorted again
//
// With a diversity rate, a row is a beam; a second merge combines the lists of the beams.
//
// Grid: one block per row. GROUPS: see selection.cuh.
//
// Speed of light: the latency of a launch and of a chain of dependent steps (topk_chunks.cu).
#include "beam_search/merge.cuh"
#include "common/overlap.cuh"

struct MergeParams {
    const Key* lists; // [rows, count, k]
    float* values;    // [rows, k]
    int* ids;         // [rows, k]
    Key* best;        // [rows, k], or null
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
    Key key = i < k ? sorted[i] : 0;
    if (key) {
        const float value = __fadd_rn(from_sortable(key_value(key)), __fmul_rn(p.diversity_rate, float(i)));
        key = make_key(sortable(fmaxf(value, -CUDART_INF_F)), key_id(key));
    }
    __syncthreads();
    if (i < k) sorted[i] = key;
    __syncthreads();
    // The diversity term may have changed the order. Keys of 0 are equal. They are ordered by index, so that each rank
    // is written once.
    int rank = 0;
    for (int other = 0; other < k; ++other) rank += sorted[other] > key || (sorted[other] == key && other < i);
    if (i < k) p.best[row * k + rank] = key;
}
