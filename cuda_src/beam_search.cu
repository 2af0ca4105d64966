// Beam search: choose the continuations, keep the books of a step, and follow the parents.
//
//   total[b, i]   = log_probs[b, i] + score of the beam            i runs over beams * vocab; the score may be absent
//   beam_topk     = the k largest of total[b], best first, ties to the lower i; NaN counts as -inf
//   with a diversity rate, the r-th best of each beam gets + rate * r before the beams are merged
//
// Two stages, as a row of the vocabulary is long and k is small:
//
//   topk_chunks   grid: rows * chunks. A block finds the k best of one chunk of one row.
//   topk_merge    grid: batch (or rows, for what a diversity rate needs first). A block merges the chunks' lists.
//   beam_step     topk_merge, and then the books: which beams run on, which are finished, whether the search is done.
//
// How a block selects k of n keys, in both stages, without sorting or k passes:
//
//   1. bound: each group of threads has the largest of its values. The k-th largest of these is a lower bound of the
//      k-th largest of all, and few values lie between: with n values spread over G groups about k + k * k / (2 * G)
//      reach it.
//   2. list: only threads whose own largest reaches the bound look again, and append what reaches it.
//   3. rank: the list is sorted by counting, for each of its keys, the larger ones.
//
// A key is 64 bits, value above and complement of the id below, so that keys are distinct and order ties by id. Where
// too many reach the bound (a masked row, a sorted one), it is raised by bisection over the keys until they fit.
//
// GROUPS = 32: up to 16 results; the bound is found by each warp for itself. GROUPS = THREADS: more results.
#include "common/warp.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LOADS = 8;       // 16-byte loads of a thread in flight
constexpr int CAPACITY = 1024; // keys in a block's list
constexpr int SLACK = 64;      // beyond k so many keys are cheaper to rank than to drop
constexpr int MAX_K = 128;
constexpr int MAX_BEAMS = 64;
constexpr int MAX_ENDS = 8;

using Key = unsigned long long;

__device__ __forceinline__ Key make_key(unsigned value, int id) { return (Key(value) << 32) | unsigned(~id); }
__device__ __forceinline__ unsigned key_value(Key key) { return unsigned(key >> 32); }
__device__ __forceinline__ int key_id(Key key) { return ~int(unsigned(key)); }

// --- selection -----------------------------------------------------------------------------------------

template <int GROUPS> struct Selection {
    alignas(16) unsigned maxima[GROUPS];
    Key list[CAPACITY];
    int sums[WARPS];
    int count;
    unsigned bound;
};

// To be followed by a barrier.
template <int GROUPS> __device__ __forceinline__ void start(Selection<GROUPS>& s) {
    if (threadIdx.x == 0) s.count = 0, s.bound = ~0u;
}

// The rank-th largest of the groups' maxima, where `mine` is the largest value of this thread. A group is
// THREADS / GROUPS neighbouring threads.
template <int GROUPS> __device__ __forceinline__ unsigned lower_bound(Selection<GROUPS>& s, unsigned mine, int rank) {
    constexpr int MEMBERS = THREADS / GROUPS;
#pragma unroll
    for (int step = 1; step < MEMBERS; step *= 2) mine = max(mine, __shfl_xor_sync(FULL_WARP, mine, step));
    if (threadIdx.x % MEMBERS == 0) s.maxima[threadIdx.x / MEMBERS] = mine;
    __syncthreads();
    const unsigned own = s.maxima[threadIdx.x % GROUPS];
    const uint4* maxima = reinterpret_cast<const uint4*>(s.maxima);
    int minus_larger = 0;
#pragma unroll 8
    for (int i = 0; i < GROUPS / 4; ++i) {
        const uint4 others = maxima[i];
        minus_larger = minus_if_greater(minus_larger, others.x, own);
        minus_larger = minus_if_greater(minus_larger, others.y, own);
        minus_larger = minus_if_greater(minus_larger, others.z, own);
        minus_larger = minus_if_greater(minus_larger, others.w, own);
    }
    const unsigned smallest = __reduce_min_sync(FULL_WARP, -minus_larger < rank ? own : ~0u);
    if constexpr (GROUPS == 32) return smallest;
    if (threadIdx.x % 32 == 0) atomicMin(&s.bound, smallest);
    __syncthreads();
    return s.bound;
}

__device__ __forceinline__ int block_sum(int* sums, int own) {
    own = __reduce_add_sync(FULL_WARP, own);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;
}

// Raise `low`, which `count` keys reach, until no more than `limit` do, but at least k. Fewer than k reach `high`.
// count_own(key) says how many keys of this thread reach `key`. It ends because keys are distinct.
template <typename Count>
__device__ __forceinline__ int raise(int* sums, Key& low, Key& high, Key probe, int count, int k, int limit,
                                     Count count_own) {
    while (count > limit) {
        const int reached = block_sum(sums, count_own(probe));
        if (reached >= k)
            low = probe, count = reached;
        else
            high = probe;
        probe = low + (high - low) / 2;
    }
    return count;
}

// Call place(rank, key) for keys among which are the k largest; their ranks are those among all. `visit(low, f)` calls
// f for each key of this thread that reaches `low`. At least k keys, or all there are, reach `lowest`, and no key with
// the same value is above `highest`. Returns how many keys were ranked.
template <int GROUPS, typename Visit, typename Place>
__device__ __forceinline__ int select(Selection<GROUPS>& s, Key lowest, Key highest, int k, Visit visit, Place place) {
    const auto append = [&](Key key) {
        const int at = atomicAdd(&s.count, 1);
        if (at < CAPACITY) s.list[at] = key;
    };
    const auto restart = [&] {
        __syncthreads();
        if (threadIdx.x == 0) s.count = 0;
        __syncthreads();
    };
    Key low = lowest, high = ~Key(0);
    visit(low, append);
    __syncthreads();
    int count = s.count;
    if (count > CAPACITY) {
        // The first probe leaves out all ties at the bound, which is what fills a list most often.
        raise(s.sums, low, high, highest + 1, count, k, CAPACITY, [&](Key key) {
            int own = 0;
            visit(key, [&](Key) { ++own; });
            return own;
        });
        restart();
        visit(low, append);
        __syncthreads();
        count = s.count;
    }
    if (count > k + SLACK) {
        Key own[CAPACITY / THREADS];
#pragma unroll
        for (int i = 0; i < CAPACITY / THREADS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            own[i] = at < count ? s.list[at] : 0;
        }
        raise(s.sums, low, high, low + (high - low) / 2, count, k, k + SLACK, [&](Key key) {
            int reached = 0;
#pragma unroll
            for (int i = 0; i < CAPACITY / THREADS; ++i) reached += own[i] >= key;
            return reached;
        });
        restart();
#pragma unroll
        for (int i = 0; i < CAPACITY / THREADS; ++i)
            if (own[i] >= low) append(own[i]);
        __syncthreads();
        count = s.count;
    }
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const Key own = s.list[i];
        int minus_rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; ++other) minus_rank = minus_if_greater(minus_rank, s.list[other], own);
        place(-minus_rank, own);
    }
    return count;
}

// --- stage 1: the k best of each chunk -----------------------------------------------------------------

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

// --- stage 2: merge the lists --------------------------------------------------------------------------

// The k largest keys of `lists` sorted lists of k, into `sorted`.
//
// For the bound, a list of the first stage is a group whose maximum is known. Where there are fewer lists than
// results, or a few lists have nearly all of them (those of one beam, in the first step), the entries at `depth` of
// the lists say more: that the m-th largest of them is reached by m * depth keys.
template <int GROUPS>
__device__ __forceinline__ void merge(Selection<GROUPS>& s, const Key* from, int lists, int k, int depth,
                                      int beam_depth, Key* sorted) {
    // Neighbouring lists go to different groups, of which there are at least 32.
    const int first = threadIdx.x / 8 + threadIdx.x % 8 * 32;
    const auto bound_by = [&](int depth) {
        unsigned mine = 0;
        for (int list = first; list < lists; list += THREADS)
            mine = max(mine, key_value(from[(long long)list * k + depth - 1]));
        return lower_bound(s, mine, (k + depth - 1) / depth);
    };
    start(s);
    for (int i = threadIdx.x; i < k; i += THREADS) sorted[i] = 0;
    unsigned bound = bound_by(depth);
    if (beam_depth != depth) {
        __syncthreads();
        if (threadIdx.x == 0) s.bound = ~0u;
        __syncthreads();
        bound = max(bound, bound_by(beam_depth));
    }
    const auto visit = [&](Key low, auto f) {
        for (int list = first; list < lists; list += THREADS) {
            const Key* keys = from + (long long)list * k;
#pragma unroll 1
            for (int i = 0; i < k; ++i) {
                const Key key = keys[i];
                if (key < low) break;
                f(key);
            }
        }
    };
    select(s, make_key(bound, 0x7fffffff), make_key(bound, 0), k, visit, [&](int rank, Key key) {
        if (rank < k) sorted[rank] = key;
    });
    __syncthreads();
}

struct MergeParams {
    const Key* lists; // [rows, count, k]
    float* values;    // [rows, k]
    int* ids;         // [rows, k]
    Key* best;        // [rows, k] instead of the two above if not null: what a diversity rate makes of the row
    int count;
    int k;
    int depth;      // at which the first bound looks into the lists, from 1 on
    int beam_depth; // and the second one, if it is another
    float diversity_rate;
};

template <int GROUPS> __global__ void __launch_bounds__(THREADS, 4) topk_merge(const __grid_constant__ MergeParams p) {
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
    // A positive rate may have changed the order. Keys that are 0 all get the rank of the first of them.
    int rank = 0;
    for (int other = 0; other < k; ++other) rank += sorted[other] > own || (sorted[other] == own && other < i);
    if (i < k) p.best[row * k + rank] = own;
}

// --- the books of a step -------------------------------------------------------------------------------

struct StepParams {
    const Key* lists;             // [batch, count, k]
    const void* log_probs;        // [batch, beams, vocab]; read again only with a diversity rate
    const float* scores;          // [batch, beams]; any of these may be the array of the same name below
    const float* finished_scores; // [batch, beams]
    const int* finished_lengths;
    const int* finished_ids;
    const int* finished_parents;
    const unsigned char* done; // [batch]
    int* new_ids;              // [batch, beams]
    int* new_parents;
    float* new_scores;
    float* new_finished_scores;
    int* new_finished_lengths;
    int* new_finished_ids;
    int* new_finished_parents;
    unsigned char* new_done;
    int count;
    int k;
    int depth;
    int beam_depth;
    int beams;
    int vocab;
    int dtype; // of log_probs: 0 float, 1 half, 2 bfloat16
    int diverse;
    int length; // of a hypothesis that ends in this step
    int last;   // whether all do
    int stop_when_full;
    int ends;
    int end_ids[MAX_ENDS];
    float penalty;          // length ** length_penalty
    float furthest_penalty; // the same of the length that a running beam may reach
};

template <int GROUPS> __global__ void __launch_bounds__(THREADS, 2) beam_step(const __grid_constant__ StepParams p) {
    __shared__ Selection<GROUPS> s;
    __shared__ Key sorted[MAX_K];
    __shared__ unsigned running_in_warp[WARPS];
    __shared__ float old_score[MAX_BEAMS], ending_score[MAX_BEAMS];
    __shared__ float running_score[MAX_BEAMS], pool_score[MAX_BEAMS];
    __shared__ int pool_length[MAX_BEAMS];
    const long long b = blockIdx.x;
    const int beams = p.beams, i = threadIdx.x, lane = i % 32, warp = i / 32;
    merge(s, p.lists + b * p.count * p.k, p.count, p.k, p.depth, p.beam_depth, sorted);

    // --- read everything: the arrays may be written in place ---
    const bool was_done = p.done[b];
    bool runs = false, ends = false;
    int token = 0, parent = 0;
    float score = -CUDART_INF_F;
    if (i < p.k) {
        const int id = key_id(sorted[i]);
        parent = id / p.vocab;
        token = id - parent * p.vocab;
        score = from_sortable(key_value(sorted[i]));
        if (p.diverse) {
            const long long at = b * beams * p.vocab + id;
            const float log_prob = p.dtype == 0   ? static_cast<const float*>(p.log_probs)[at]
                                   : p.dtype == 1 ? to_float(static_cast<const __half*>(p.log_probs)[at])
                                                  : to_float(static_cast<const __nv_bfloat16*>(p.log_probs)[at]);
            score = fmaxf(log_prob + p.scores[b * beams + parent], -CUDART_INF_F);
        }
        bool is_end = false;
        for (int e = 0; e < p.ends; ++e) is_end |= token == p.end_ids[e];
        runs = !is_end;
        // Only the best `beams` candidates may finish; the others are there so that `beams` are left to run.
        ends = i < beams && (is_end || p.last) && !was_done && score > -CUDART_INF_F;
    }
    const float ended = ends ? score / p.penalty : -CUDART_INF_F;
    float old = -CUDART_INF_F;
    int old_length = 0, old_id = 0, old_parent = 0;
    if (i < beams) {
        const long long at = b * beams + i;
        old = fmaxf(p.finished_scores[at], -CUDART_INF_F);
        old_length = p.finished_lengths[at];
        old_id = p.finished_ids[at];
        old_parent = p.finished_parents[at];
        old_score[i] = old;
        ending_score[i] = ended;
    }
    const unsigned running = __ballot_sync(FULL_WARP, runs);
    if (lane == 0) running_in_warp[warp] = running;
    __syncthreads();

    // --- the beams that run on: the best that do not end ---
    int place = __popc(running & ((1u << lane) - 1));
    for (int before = 0; before < warp; ++before) place += __popc(running_in_warp[before]);
    if (runs && place < beams) {
        const long long at = b * beams + place;
        p.new_ids[at] = token;
        p.new_parents[at] = parent;
        p.new_scores[at] = score;
        running_score[place] = score;
    }

    // --- the finished hypotheses: the best of the old and the new ones, the old first where they tie ---
    int old_rank = 0, new_rank = 0;
    if (i < beams) {
        for (int j = 0; j < beams; ++j) {
            old_rank += old_score[j] > old || (old_score[j] == old && j < i);
            old_rank += ending_score[j] > old;
            new_rank += old_score[j] >= ended;
            new_rank += ending_score[j] > ended || (ending_score[j] == ended && j < i);
        }
    }
    const auto keep = [&](int rank, float score, int length, int id, int parent) {
        if (rank >= beams) return;
        const long long at = b * beams + rank;
        p.new_finished_scores[at] = pool_score[rank] = score;
        p.new_finished_lengths[at] = pool_length[rank] = length;
        p.new_finished_ids[at] = id;
        p.new_finished_parents[at] = parent;
    };
    if (i < beams) keep(old_rank, old, old_length, old_id, old_parent);
    if (ends) keep(new_rank, ended, p.length, token, parent);
    __syncthreads();

    // --- done: no running beam can still better the worst of a full pool ---
    if (warp == 0) {
        float best = -CUDART_INF_F, worst = CUDART_INF_F;
        bool full = true;
        for (int j = lane; j < beams; j += 32) {
            best = fmaxf(best, running_score[j]);
            worst = fminf(worst, pool_score[j]);
            full &= pool_length[j] > 0;
        }
        best = lanes_max<32>(best);
        worst = lanes_min<32>(worst);
        full = __all_sync(FULL_WARP, full);
        const bool can_improve = !full || best / p.furthest_penalty > worst;
        if (lane == 0) p.new_done[b] = was_done || !can_improve || (p.stop_when_full && full) || p.last;
    }
}

// --- the tokens of each beam ---------------------------------------------------------------------------

struct TreeParams {
    const int* ids;      // [steps, batch, beams]
    const int* parents;  // [steps, batch, beams]
    const int* lengths;  // [batch] or [batch, beams]; null: steps
    const int* last_ids; // [batch, beams], with last_parents instead of a beam's own last step; may be null
    const int* last_parents;
    int* out; // [steps, batch, beams]
    int steps;
    int batch;
    int beams;
    int length_per_beam;
    int end_id;
};

constexpr int TREE_THREADS = 128;

// Grid: one block per batch entry, a thread per beam. A beam's way back is one dependent load per step, so the block
// brings the steps to shared memory first, as many at once as ENTRIES can hold, from the last to the first.
template <int ENTRIES>
__global__ void __launch_bounds__(TREE_THREADS) gather_tree(const __grid_constant__ TreeParams p) {
    __shared__ int ids[ENTRIES], parents[ENTRIES];
    __shared__ int ended_at[MAX_BEAMS];
    const int b = blockIdx.x, j = threadIdx.x, beams = p.beams;
    const long long pitch = (long long)p.batch * beams, base = (long long)b * beams;
    int length = 0, beam = j, ended = p.steps;
    if (j < beams) {
        length = p.steps;
        if (p.lengths) length = min(max(p.lengths[p.length_per_beam ? base + j : b], 0), p.steps);
        // Where nothing is before it, the filling starts.
        ended = length;
    }
    const int at_once = ENTRIES / beams;
    for (int to = p.steps; to > 0; to -= at_once) {
        const int from = max(to - at_once, 0);
        __syncthreads();
        for (int i = j; i < (to - from) * beams; i += TREE_THREADS) {
            const int level = i / beams;
            const long long at = (from + level) * pitch + base + (i - level * beams);
            ids[i] = p.ids[at];
            parents[i] = p.parents[at];
        }
        __syncthreads();
        if (j >= beams) continue;
        for (int level = min(to, length) - 1; level >= from; --level) {
            int token, parent;
            if (p.last_ids && level == length - 1) {
                token = p.last_ids[base + j];
                parent = p.last_parents[base + j];
            } else {
                token = ids[(level - from) * beams + beam];
                parent = parents[(level - from) * beams + beam];
            }
            p.out[level * pitch + base + j] = token;
            beam = min(max(parent, 0), beams - 1);
            if (token == p.end_id) ended = level;
        }
    }
    if (j < beams) ended_at[j] = ended;
    __syncthreads();
    for (long long i = j; i < (long long)p.steps * beams; i += TREE_THREADS) {
        const int level = int(i / beams), of = int(i - (long long)level * beams);
        if (level >= ended_at[of]) p.out[level * pitch + base + of] = p.end_id;
    }
}

// --- the caches follow the parents ---------------------------------------------------------------------

struct CacheParams {
    const void* keys; // [steps, batch * beams, row] in vectors of WIDTH bytes
    const void* values;
    void* new_keys; // the same, or the same array
    void* new_values;
    const int* parents; // [batch, beams]
    int steps;          // that are copied
    int batch;
    int beams;
    int row;     // vectors of one step of one beam: heads * dim
    int columns; // of them in a tile, times beams at most CACHE_THREADS * CACHE_LOADS
    int tiles;   // across a row
};

constexpr int CACHE_THREADS = 256;
constexpr int CACHE_LOADS = 4;

template <int WIDTH> struct Bytes;
template <> struct Bytes<16> {
    using type = uint4;
};
template <> struct Bytes<8> {
    using type = uint2;
};
template <> struct Bytes<4> {
    using type = unsigned;
};
template <> struct Bytes<2> {
    using type = unsigned short;
};
template <> struct Bytes<1> {
    using type = unsigned char;
};

// Grid: (keys and values) * steps * batch * tiles. A block has all beams of a tile in registers before it writes the
// first, so it may write where it has read. Then a beam that stays where it was is left alone.
template <int WIDTH>
__global__ void __launch_bounds__(CACHE_THREADS) reorder_cache(const __grid_constant__ CacheParams p) {
    using Vector = typename Bytes<WIDTH>::type;
    const unsigned tile = blockIdx.x % p.tiles, entry = blockIdx.x / p.tiles; // entry: [2, steps, batch]
    const unsigned entries = unsigned(p.steps) * p.batch;
    const bool second = entry >= entries;
    const unsigned place = second ? entry - entries : entry;
    const int* parents = p.parents + (long long)(place % p.batch) * p.beams;
    const long long offset = (long long)place * p.beams * p.row;
    const Vector* from = static_cast<const Vector*>(second ? p.values : p.keys) + offset;
    Vector* to = static_cast<Vector*>(second ? p.new_values : p.new_keys) + offset;
    const int first = tile * p.columns, columns = min(p.columns, p.row - first);

    Vector held[CACHE_LOADS];
    int target[CACHE_LOADS];
#pragma unroll
    for (int i = 0; i < CACHE_LOADS; ++i) {
        const int item = i * CACHE_THREADS + threadIdx.x, beam = item / columns;
        target[i] = -1;
        if (beam >= p.beams) continue;
        const int parent = min(max(parents[beam], 0), p.beams - 1), column = first + item - beam * columns;
        if (from == to && parent == beam) continue;
        held[i] = from[parent * p.row + column];
        target[i] = beam * p.row + column;
    }
    if (from == to) __syncthreads();
#pragma unroll
    for (int i = 0; i < CACHE_LOADS; ++i)
        if (target[i] >= 0) to[target[i]] = held[i];
}
