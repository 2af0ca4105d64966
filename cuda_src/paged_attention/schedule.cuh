// Schedules decide which pieces a thread block processes and where it stores the results. A work item is one block of
// rows of a sequence and a kv head, and a piece is a range of tokens of an item. With PieceQueue, blocks take pieces
// from a queue. With ClusterItem each item is processed by one cluster, and with BlockItem by one block. ItemsOrQueue
// decides between clusters and the queue from the lengths. All schedules have the same methods. `pipeline` belongs to
// the calling thread's team.
#pragma once
#include "paged_attention/inbox.cuh"
#include "paged_attention/pieces.cuh"
#include "paged_attention/pipeline.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/team.cuh"

constexpr int AHEAD = 3; // a block requests its next piece this many tiles before the end of its piece

// With EITHER and clusters, the kernel uses one cluster per item if no sequence exceeds the mean length by more than
// this many units (of UNIT_TOKENS tokens) per warp of the cluster. Otherwise it uses the queue. The units above the
// mean run after the other clusters are done, so they have the full memory bandwidth. They take about as long as the
// requests and merges of the queue would take.
constexpr int UNITS_ABOVE_MEAN = 2;

// With EITHER and single blocks, the kernel uses one block per item, and not the queue, if the longest sequence has at
// most UNITS_UNCUT units, or exceeds an equal share of the units by at most UNITS_ABOVE_SHARE units. On an H200 with a
// 16-bit cache, a block that runs alone takes 0.7 us per unit, and the queue costs 10 us or more for its requests and
// merges.
constexpr int UNITS_ABOVE_SHARE = 12, UNITS_UNCUT = 32;

// The state of a schedule in shared memory. PieceQueue uses it to broadcast values from thread 0 to the block.
struct SharedState {
    int& next;         // queue: the block's next piece; -1: not known yet
    Segment& previous; // queue: the block's previous piece
    bool& last;        // queue: whether `previous` was the last finished piece of its item
    unsigned inbox;    // cluster: shared address of the mbarrier of the block's inbox
};

// A queue of pieces. Blocks take piece indices from a counter in global memory until no pieces are left. Under load an
// atomic on global memory takes microseconds, so a block issues the atomic long before it needs the result. The block
// requests its next piece AHEAD tiles before the end of the current piece. It starts to copy the tiles of the next
// piece before it stores the results of the current piece. Only at the end of the next piece does the block find out
// whether the current piece was the last finished piece of its item.
template <typename F> struct PieceQueue {
    SharedState state;
    int place = -1; // thread 0: pieces of the item that finished before `previous`; -1: no partial result
    Pieces pieces;

    __device__ __forceinline__ PieceQueue(const Params& p, const SharedState& state) : state(state), pieces(p) {}

    // Find the block's first piece. Return false if there is none.
    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        pieces.look();
        return first_of_all(p, team, pipeline);
    }

    // `first` for a caller that has already read the lengths.
    __device__ __forceinline__ bool first_of_all(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) {
        if (threadIdx.x == 0) state.next = -1;
        pieces.plan(p.shares);
        return find(p, team, blockIdx.x, pipeline);
    }

    __device__ __forceinline__ bool find(const Params& p, const Team<F>& team, int index, Pipeline<F>& pipeline) {
        const bool found = pieces.find(index, pipeline.segment);
        if (found) {
            pipeline.table = p.tables + pipeline.segment.seq * p.table_row;
            pipeline.look_up(p, team, false, 0);
        }
        return found;
    }

    // If `now` is true, request the next piece from the counter.
    static __device__ __forceinline__ void draw(const Params& p, bool now, int& taken) {
        if (threadIdx.x == 0 && now) taken = atomicAdd(p.taken, 1);
    }

    // Find the piece that `draw` requested and start to copy its tiles. Return whether there is such a piece. The team
    // must have read its last stage. Warps may be at different tiles, so a barrier is not possible here. Thread 0
    // publishes the piece index with an atomic, and the warps poll it with atomics.
    __device__ __forceinline__ bool go_on(const Params& p, const Team<F>& team, int taken, Pipeline<F>& following) {
        if (threadIdx.x == 0) atomicExch(&state.next, p.shares + taken);
        int index;
        do index = __shfl_sync(FULL_WARP, team.lane == 0 ? atomicAdd(&state.next, 0) : 0, 0);
        while (index < 0);
        const bool more = find(p, team, index, following);
        if (more) following.start(p, team);
        return more;
    }

    // Find out whether the previous piece was the last finished piece of its item. The caller must pass a block barrier
    // between `go_on` and this call.
    __device__ __forceinline__ void look_back() {
        if (threadIdx.x == 0) {
            state.next = -1;
            __threadfence();
            state.last = place >= 0 && place == state.previous.pieces - 1;
        }
    }

    __device__ __forceinline__ void store(const Params& p, const Segment& segment, const typename F::Results& found) {
        store_piece<typename F::T>(p, segment, found);
        if (state.last) merge_pieces<F::ROWS, typename F::T>(p, state.previous);
        __syncthreads();
        if (threadIdx.x == 0) {
            place = segment.partial(p) ? arrive(p, segment) : -1;
            state.previous = segment;
        }
    }

    // Merge the item of the block's last piece, if that piece was the last finished piece of the item.
    __device__ __forceinline__ void finish(const Params& p) {
        if (threadIdx.x == 0) {
            __threadfence();
            state.last = place >= 0 && place == state.previous.pieces - 1;
        }
        __syncthreads();
        if (state.last) merge_pieces<F::ROWS, typename F::T>(p, state.previous);
    }
};

// One cluster of blocks per item. The item is a single piece, so neither a plan nor a counter nor partial results in
// global memory are needed.
template <typename F> struct ClusterItem {
    const int item = blockIdx.x / F::CLUSTER;
    const unsigned inbox;

    __device__ __forceinline__ ClusterItem(const Params&, const SharedState& state) : inbox(state.inbox) {}

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        const int entry = first_entry(p, team, pipeline);
        open_inbox<F::CLUSTER>(inbox);
        begin(p, team, pipeline, entry);
        return true;
    }

    __device__ __forceinline__ void locate(const Params& p, Segment& segment) const {
        segment.row_block = item % p.row_blocks, segment.kv_head = item / p.row_blocks % p.kv_heads;
        segment.seq = item / (p.kv_heads * p.row_blocks);
    }

    // Load the table entry of the team's tile number `lane`, assuming that the piece begins at token 0. If there is no
    // window, this assumption always holds. The load therefore does not wait for the length of the sequence.
    __device__ __forceinline__ int first_entry(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) const {
        locate(p, pipeline.segment);
        pipeline.table = p.tables + pipeline.segment.seq * p.table_row;
        const int at = (team.first_tile + team.lane * F::STEP) * TILE / team.block_size;
        return at < p.max_blocks ? pipeline.table[at] : 0;
    }

    __device__ __forceinline__ void begin(const Params& p, const Team<F>& team, Pipeline<F>& pipeline,
                                          int entry) const {
        Segment& segment = pipeline.segment;
        const Reach reach(p, segment.seq);
        segment.low = reach.low, segment.length = segment.end = reach.length, segment.whole = reach.whole;
        segment.begin = reach.first * UNIT_TOKENS;
        segment.piece = segment.index = 0, segment.pieces = 1;
        pipeline.look_up(p, team, !p.window, entry);
    }

    static __device__ __forceinline__ void draw(const Params&, bool, int&) {}

    static __device__ __forceinline__ bool go_on(const Params&, const Team<F>&, int, Pipeline<F>&) { return false; }

    static __device__ __forceinline__ void look_back() {}

    // Merge and store the item. In shared memory the inbox follows the stages and the teams' results.
    __device__ __forceinline__ void store(const Params& p, const Segment& segment,
                                          const typename F::Results& found) const {
        char* const stages_end = shared + F::STAGES * F::STAGE_BYTES;
        char* const results_end = reinterpret_cast<char*>(found.outputs + F::TEAMS * p.rows * F::Results::STRIDE);
        cluster_wait<F::CLUSTER>();
        store_cluster<F::CLUSTER, typename F::T>(p, segment, found, results_end > stages_end ? results_end : stages_end,
                                                 inbox);
    }

    static __device__ __forceinline__ void finish(const Params&) {}
};

// One cluster per item if no sequence is much longer than the mean. Otherwise blocks take pieces from the queue. Every
// block reads all lengths and makes the same decision.
template <typename F> struct ItemsOrQueue {
    PieceQueue<F> queue;
    ClusterItem<F> cluster;
    bool even = false;

    __device__ __forceinline__ ItemsOrQueue(const Params& p, const SharedState& state)
        : queue(p, state), cluster(p, state) {}

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        const bool has_item = cluster.item < p.seqs * queue.pieces.items;
        const int entry = has_item ? cluster.first_entry(p, team, pipeline) : 0;
        queue.pieces.look();
        even = queue.pieces.even(UNITS_ABOVE_MEAN * F::WARPS * F::CLUSTER);
        if (!even) {
            team.leave_cluster();
            return queue.first_of_all(p, team, pipeline);
        }
        if (!has_item) return false;
        open_inbox<F::CLUSTER>(cluster.inbox);
        cluster.begin(p, team, pipeline, entry);
        return true;
    }

    __device__ __forceinline__ void draw(const Params& p, bool now, int& taken) const {
        PieceQueue<F>::draw(p, now && !even, taken);
    }

    __device__ __forceinline__ bool go_on(const Params& p, const Team<F>& team, int taken, Pipeline<F>& following) {
        return !even && queue.go_on(p, team, taken, following);
    }

    __device__ __forceinline__ void look_back() {
        if (!even) queue.look_back();
    }

    __device__ __forceinline__ void store(const Params& p, const Segment& segment, const typename F::Results& found) {
        if (even)
            cluster.store(p, segment, found);
        else
            queue.store(p, segment, found);
    }

    __device__ __forceinline__ void finish(const Params& p) {
        if (!even) queue.finish(p);
    }
};

// One block per item. If the lengths are uneven, the items run in order of length, longest first. With EITHER, if a
// sequence is too long for one block, the first p.shares blocks (those resident at once) take pieces from the queue
// instead, and the other blocks exit. Every block reads all lengths and makes the same decision. If no sequence is too
// long, the queue is not used, because the GPU starts a new block faster than a block gets a piece from the queue.
template <typename F> struct BlockItem {
    PieceQueue<F> queue;
    ClusterItem<F> block;
    bool cut = false;

    __device__ __forceinline__ BlockItem(const Params& p, const SharedState& state)
        : queue(p, state), block(p, state) {}

    __device__ __forceinline__ bool has_queue() const { return F::DEALING == EITHER && cut; }

    __device__ __forceinline__ bool first(const Params& p, Team<F>& team, Pipeline<F>& pipeline) {
        Pieces& pieces = queue.pieces;
        const bool has_item = F::DEALING != EITHER || block.item < p.seqs * pieces.items;
        const int entry = has_item ? block.first_entry(p, team, pipeline) : 0;
        pieces.look();
        if constexpr (F::DEALING == EITHER)
            cut = !pieces.within(max(pieces.share_of(p.shares) + UNITS_ABOVE_SHARE, UNITS_UNCUT));
        if (has_queue()) return blockIdx.x < p.shares && queue.first_of_all(p, team, pipeline);
        if (!has_item) return false;
        if (pieces.even(pieces.mean / 8)) {
            block.begin(p, team, pipeline, entry);
            return true;
        }
        pieces.piece_units = pieces.MOST_UNITS;
        return queue.find(p, team, blockIdx.x, pipeline);
    }

    __device__ __forceinline__ void draw(const Params& p, bool now, int& taken) const {
        PieceQueue<F>::draw(p, now && has_queue(), taken);
    }

    __device__ __forceinline__ bool go_on(const Params& p, const Team<F>& team, int taken, Pipeline<F>& following) {
        return has_queue() && queue.go_on(p, team, taken, following);
    }

    __device__ __forceinline__ void look_back() {
        if (has_queue()) queue.look_back();
    }

    __device__ __forceinline__ void store(const Params& p, const Segment& segment, const typename F::Results& found) {
        if (has_queue())
            queue.store(p, segment, found);
        else
            store_piece<typename F::T>(p, segment, found);
    }

    __device__ __forceinline__ void finish(const Params& p) {
        if (has_queue()) queue.finish(p);
    }
};

template <typename F, Dealing DEALING, bool ALONE> struct ScheduleOf;
template <typename F> struct ScheduleOf<F, CLUSTERS, false> {
    using type = ClusterItem<F>;
};
template <typename F> struct ScheduleOf<F, EITHER, false> {
    using type = ItemsOrQueue<F>;
};
template <typename F, Dealing DEALING> struct ScheduleOf<F, DEALING, true> {
    using type = BlockItem<F>;
};
template <typename F> struct ScheduleOf<F, QUEUE, true> {
    using type = PieceQueue<F>;
};
