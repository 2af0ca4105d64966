// Schedules decide which work items (a sequence, a kv head and a block of rows) or KV splits (ranges of an item's
// tokens) a thread block processes, and where it stores the results.
#pragma once
#include "paged_attention/inbox.cuh"
#include "paged_attention/pieces.cuh"
#include "paged_attention/pipeline.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/team.cuh"

constexpr int AHEAD = 3; // tiles between the request of the next split and the end of the current split

// If the scheduling is `EITHER` and CLUSTER is larger than 1, use the queue if a sequence exceeds the mean length by
// more than this many units of UNIT_TOKENS tokens per warp of the cluster. With a smaller excess, the longest items
// finish alone, with the full memory bandwidth. This takes no longer than the queue's requests and merges.
constexpr int UNITS_ABOVE_MEAN = 2;

// If the scheduling is `EITHER` and CLUSTER is 1, use one block per item if the longest sequence has at most
// UNITS_UNCUT units, or at most UNITS_ABOVE_SHARE units more than a block's equal share of the work. Otherwise use the
// queue. On an H200 with a 16-bit cache, a block that runs alone takes 0.7 us per unit, and the queue costs 10 us or
// more for its requests and merges.
constexpr int UNITS_ABOVE_SHARE = 12, UNITS_UNCUT = 32;

struct SharedState {
    int& next;                // queue: the block's next split; -1: not known yet
    KvSplit& previous;        // queue: the block's previous split
    bool& last;               // queue: whether `previous` finished last in its item
    unsigned receive_barrier; // cluster: shared address
};

// Blocks take split indices from a counter in global memory. Under load an atomic on it takes microseconds, so a block
// requests its next split AHEAD tiles before the end of the current split. The block starts the copies of the next
// split before it stores the results of the current split. Only at the end of the next split does the block know
// whether the current split finished last in its item.
template <typename F> struct SplitQueue {
    SharedState state;
    int finished_before = -1; // thread 0: splits of the item that finished before `previous`; -1: no partial result
    SplitScheduler scheduler;

    __device__ __forceinline__ SplitQueue(const Params& p, const SharedState& state) : state(state), scheduler(p) {}

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        scheduler.read_lengths();
        return first_from_queue(p, team, pipeline);
    }

    // Like `first`, for a caller that has already read the lengths.
    __device__ __forceinline__ bool first_from_queue(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) {
        if (threadIdx.x == 0) state.next = -1;
        scheduler.plan(p.shares);
        return find(p, team, blockIdx.x, pipeline);
    }

    __device__ __forceinline__ bool find(const Params& p, const Team<F>& team, int index, Pipeline<F>& pipeline) {
        const bool is_found = scheduler.find(index, pipeline.kv_split);
        if (is_found) {
            pipeline.table = p.tables + pipeline.kv_split.seq * p.table_row;
            pipeline.look_up(p, team, false, 0);
        }
        return is_found;
    }

    static __device__ __forceinline__ void request_next(const Params& p, bool now, int& taken) {
        if (threadIdx.x == 0 && now) taken = atomicAdd(p.taken, 1);
    }

    // Find the split that `request_next` requested and start its copies. Return false after the last split of the
    // queue. The team must have read its last stage. Warps may be at different tiles, so there is no barrier: thread 0
    // publishes the index with an atomic, and the warps poll it.
    __device__ __forceinline__ bool advance(const Params& p, const Team<F>& team, int taken,
                                            Pipeline<F>& next_pipeline) {
        if (threadIdx.x == 0) atomicExch(&state.next, p.shares + taken);
        int index;
        do index = __shfl_sync(FULL_WARP, team.lane == 0 ? atomicAdd(&state.next, 0) : 0, 0);
        while (index < 0);
        const bool more = find(p, team, index, next_pipeline);
        if (more) next_pipeline.start(p, team);
        return more;
    }

    // Find out whether the previous split finished last in its item. The caller must synchronize the block between
    // `advance` and this call.
    __device__ __forceinline__ void check_previous() {
        if (threadIdx.x == 0) {
            state.next = -1;
            __threadfence();
            state.last = finished_before >= 0 && finished_before == state.previous.num_splits - 1;
        }
    }

    __device__ __forceinline__ void store(const Params& p, const KvSplit& kv_split,
                                          const typename F::Results& results) {
        store_split<typename F::T>(p, kv_split, results);
        if (state.last) merge_splits<F::ROWS, typename F::T>(p, state.previous);
        __syncthreads();
        if (threadIdx.x == 0) {
            finished_before = kv_split.partial(p) ? arrive(p, kv_split) : -1;
            state.previous = kv_split;
        }
    }

    // If the block's last split finished last in its item, merge the item.
    __device__ __forceinline__ void finish(const Params& p) {
        if (threadIdx.x == 0) {
            __threadfence();
            state.last = finished_before >= 0 && finished_before == state.previous.num_splits - 1;
        }
        __syncthreads();
        if (state.last) merge_splits<F::ROWS, typename F::T>(p, state.previous);
    }
};

// One cluster of blocks per item. An item is a single split. There is no plan, and global memory holds no counter and
// no partial results.
template <typename F> struct ClusterItem {
    const int item = blockIdx.x / F::CLUSTER;
    const unsigned receive_barrier;

    __device__ __forceinline__ ClusterItem(const Params&, const SharedState& state)
        : receive_barrier(state.receive_barrier) {}

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        const int entry = first_entry(p, team, pipeline);
        init_receive_barrier<F::CLUSTER>(receive_barrier);
        begin(p, team, pipeline, entry);
        return true;
    }

    __device__ __forceinline__ void locate(const Params& p, KvSplit& kv_split) const {
        kv_split.row_block = item % p.row_blocks, kv_split.kv_head = item / p.row_blocks % p.kv_heads;
        kv_split.seq = item / (p.kv_heads * p.row_blocks);
    }

    // Load the table entry of the team's tile number `lane`, as if the split began at token 0. Without a window it
    // always does. The load does not wait for the length of the sequence.
    __device__ __forceinline__ int first_entry(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) const {
        locate(p, pipeline.kv_split);
        pipeline.table = p.tables + pipeline.kv_split.seq * p.table_row;
        const int at = (team.first_tile + team.lane * F::STEP) * TILE / team.block_size;
        return at < p.max_blocks ? pipeline.table[at] : 0;
    }

    __device__ __forceinline__ void begin(const Params& p, const Team<F>& team, Pipeline<F>& pipeline,
                                          int entry) const {
        KvSplit& kv_split = pipeline.kv_split;
        const TokenRange range(p, kv_split.seq);
        kv_split.low = range.low, kv_split.length = kv_split.end = range.length, kv_split.covered = range.covered;
        kv_split.begin = range.first * UNIT_TOKENS;
        kv_split.split_index = kv_split.batch_index = 0, kv_split.num_splits = 1;
        pipeline.look_up(p, team, !p.window, entry);
    }

    static __device__ __forceinline__ void request_next(const Params&, bool, int&) {}

    static __device__ __forceinline__ bool advance(const Params&, const Team<F>&, int, Pipeline<F>&) { return false; }

    static __device__ __forceinline__ void check_previous() {}

    // In shared memory the receive buffer follows the stages and the teams' results.
    __device__ __forceinline__ void store(const Params& p, const KvSplit& kv_split,
                                          const typename F::Results& results) const {
        char* const stages_end = shared + F::STAGES * F::STAGE_BYTES;
        char* const results_end = reinterpret_cast<char*>(results.outputs + F::TEAMS * p.rows * F::Results::STRIDE);
        cluster_wait<F::CLUSTER>();
        store_cluster<F::CLUSTER, typename F::T>(p, kv_split, results,
                                                 results_end > stages_end ? results_end : stages_end, receive_barrier);
    }

    static __device__ __forceinline__ void finish(const Params&) {}
};

// One cluster per item if no sequence is much longer than the mean, else the queue.
template <typename F> struct ItemsOrQueue {
    SplitQueue<F> queue;
    ClusterItem<F> cluster;
    bool uses_clusters = false;

    __device__ __forceinline__ ItemsOrQueue(const Params& p, const SharedState& state)
        : queue(p, state), cluster(p, state) {}

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        const bool has_item = cluster.item < p.seqs * queue.scheduler.items;
        const int entry = has_item ? cluster.first_entry(p, team, pipeline) : 0;
        queue.scheduler.read_lengths();
        uses_clusters = queue.scheduler.near_mean(UNITS_ABOVE_MEAN * F::WARPS * F::CLUSTER);
        if (!uses_clusters) {
            team.leave_cluster();
            return queue.first_from_queue(p, team, pipeline);
        }
        if (!has_item) return false;
        init_receive_barrier<F::CLUSTER>(cluster.receive_barrier);
        cluster.begin(p, team, pipeline, entry);
        return true;
    }

    __device__ __forceinline__ void request_next(const Params& p, bool now, int& taken) const {
        SplitQueue<F>::request_next(p, now && !uses_clusters, taken);
    }

    __device__ __forceinline__ bool advance(const Params& p, const Team<F>& team, int taken,
                                            Pipeline<F>& next_pipeline) {
        return !uses_clusters && queue.advance(p, team, taken, next_pipeline);
    }

    __device__ __forceinline__ void check_previous() {
        if (!uses_clusters) queue.check_previous();
    }

    __device__ __forceinline__ void store(const Params& p, const KvSplit& kv_split,
                                          const typename F::Results& results) {
        if (uses_clusters)
            cluster.store(p, kv_split, results);
        else
            queue.store(p, kv_split, results);
    }

    __device__ __forceinline__ void finish(const Params& p) {
        if (!uses_clusters) queue.finish(p);
    }
};

// One block per item, the longest items first if the lengths are uneven. The GPU starts a new block faster than a block
// gets a split from the queue. If a sequence is too long for one block and the scheduling is `EITHER`, the first
// p.shares blocks (those resident at once) use the queue, and the other blocks exit.
template <typename F> struct BlockItem {
    SplitQueue<F> queue;
    ClusterItem<F> block;
    bool too_long = false;

    __device__ __forceinline__ BlockItem(const Params& p, const SharedState& state)
        : queue(p, state), block(p, state) {}

    __device__ __forceinline__ bool has_queue() const { return F::SCHEDULING == EITHER && too_long; }

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        SplitScheduler& scheduler = queue.scheduler;
        const bool has_item = F::SCHEDULING != EITHER || block.item < p.seqs * scheduler.items;
        const int entry = has_item ? block.first_entry(p, team, pipeline) : 0;
        scheduler.read_lengths();
        if constexpr (F::SCHEDULING == EITHER)
            too_long = !scheduler.within(max(scheduler.share_of(p.shares) + UNITS_ABOVE_SHARE, UNITS_UNCUT));
        if (has_queue()) return blockIdx.x < p.shares && queue.first_from_queue(p, team, pipeline);
        if (!has_item) return false;
        if (scheduler.near_mean(scheduler.mean / 8)) {
            block.begin(p, team, pipeline, entry);
            return true;
        }
        scheduler.split_units = scheduler.MAX_UNITS;
        return queue.find(p, team, blockIdx.x, pipeline);
    }

    __device__ __forceinline__ void request_next(const Params& p, bool now, int& taken) const {
        SplitQueue<F>::request_next(p, now && has_queue(), taken);
    }

    __device__ __forceinline__ bool advance(const Params& p, const Team<F>& team, int taken,
                                            Pipeline<F>& next_pipeline) {
        return has_queue() && queue.advance(p, team, taken, next_pipeline);
    }

    __device__ __forceinline__ void check_previous() {
        if (has_queue()) queue.check_previous();
    }

    __device__ __forceinline__ void store(const Params& p, const KvSplit& kv_split,
                                          const typename F::Results& results) {
        if (has_queue())
            queue.store(p, kv_split, results);
        else
            store_split<typename F::T>(p, kv_split, results);
    }

    __device__ __forceinline__ void finish(const Params& p) {
        if (has_queue()) queue.finish(p);
    }
};

template <typename F, Scheduling SCHEDULING, bool ALONE> struct ScheduleOf;
template <typename F> struct ScheduleOf<F, CLUSTERS, false> {
    using type = ClusterItem<F>;
};
template <typename F> struct ScheduleOf<F, EITHER, false> {
    using type = ItemsOrQueue<F>;
};
template <typename F, Scheduling SCHEDULING> struct ScheduleOf<F, SCHEDULING, true> {
    using type = BlockItem<F>;
};
template <typename F> struct ScheduleOf<F, QUEUE, true> {
    using type = SplitQueue<F>;
};
