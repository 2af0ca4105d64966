// Which pieces a block of threads takes, and where their results go: by a queue, or a cluster of blocks for each item.
// Both types have the same methods. `pipeline` is that of the calling thread's team.
#pragma once
#include "paged_attention/pieces.cuh"
#include "paged_attention/pipeline.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/team.cuh"

// How many tiles before the end of a piece a block draws its next one.
constexpr int AHEAD = 3;

// In shared memory, what one thread tells the others of the queue.
struct QueueState {
    int& next;         // the block's next piece; -1: not known yet
    Segment& previous; // the piece before
    bool& last;        // whether `previous` was the last of its item to be done
};

// Blocks draw pieces from a counter until there are none left. Under load every answer from global memory takes
// microseconds, so a block draws its next piece a few tiles before it is done with one, starts to copy its tiles before
// the results of that one are merged, and learns whether a piece was the last of its item when the next one is done.
template <typename F> struct PieceQueue {
    QueueState state;
    int place = -1; // of thread 0: how many pieces of its item were done before `previous`; -1: the item has no others
    Pieces pieces;

    __device__ __forceinline__ PieceQueue(const Params& p, const QueueState& state, float2*)
        : state(state), pieces(p) {}

    // Plan, and find the block's first piece; whether there is one.
    __device__ __forceinline__ bool first(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) {
        if (threadIdx.x == 0) state.next = -1;
        pieces.plan();
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

    // Draw the next piece, if this is the tile for it.
    static __device__ __forceinline__ void draw(const Params& p, bool now, int& taken) {
        if (threadIdx.x == 0 && now) taken = atomicAdd(p.taken, 1);
    }

    // Find the piece that was drawn and start to copy its tiles; whether there is one. For a team that has left the stages.
    // The other warps may be at different tiles, so no barrier is between the thread that knows the piece and those that
    // look for it: both accesses are atomic.
    __device__ __forceinline__ bool go_on(const Params& p, const Team<F>& team, int taken, Pipeline<F>& following) {
        if (threadIdx.x == 0) atomicExch(&state.next, gridDim.x + taken);
        int index;
        do index = __shfl_sync(FULL_WARP, team.lane == 0 ? atomicAdd(&state.next, 0) : 0, 0);
        while (index < 0);
        const bool more = find(p, team, index, following);
        if (more) following.start(p, team);
        return more;
    }

    // Learn whether the previous piece was the last of its item. After a barrier behind `go_on`.
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

    // After the last piece: what is left to do for its item.
    __device__ __forceinline__ void finish(const Params& p) {
        if (threadIdx.x == 0) {
            __threadfence();
            state.last = place >= 0 && place == state.previous.pieces - 1;
        }
        __syncthreads();
        if (state.last) merge_pieces<F::ROWS, typename F::T>(p, state.previous);
    }
};

// Each item, in one piece, has a cluster of blocks: no plan, no counter, no partial results in global memory.
template <typename F> struct ClusterItem {
    float2* statistics; // [ROWS], in shared memory
    Pieces pieces;

    __device__ __forceinline__ ClusterItem(const Params& p, const QueueState&, float2* statistics)
        : statistics(statistics), pieces(p) {}

    // The first entries of the table are loaded before the length is here: nearly all sequences begin at token 0.
    __device__ __forceinline__ bool first(const Params& p, const Team<F>& team, Pipeline<F>& pipeline) {
        const int item = blockIdx.x / F::CLUSTER;
        Segment& segment = pipeline.segment;
        segment.row_block = item % p.row_blocks, segment.kv_head = item / p.row_blocks % p.kv_heads;
        segment.seq = item / pieces.items;
        pipeline.table = p.tables + segment.seq * p.table_row;
        const int at = (team.first_tile + team.lane * F::STEP) * TILE / team.block_size;
        const int entry = at < p.max_blocks ? pipeline.table[at] : 0;
        const Reach reach(p, segment.seq);
        segment.low = reach.low, segment.length = segment.end = reach.length, segment.whole = reach.whole;
        segment.begin = reach.first * UNIT_TOKENS;
        segment.piece = segment.index = 0, segment.pieces = 1;
        pipeline.look_up(p, team, !p.window, entry);
        return true;
    }

    static __device__ __forceinline__ void draw(const Params&, bool, int&) {}

    static __device__ __forceinline__ bool go_on(const Params&, const Team<F>&, int, Pipeline<F>&) { return false; }

    static __device__ __forceinline__ void look_back() {}

    __device__ __forceinline__ void store(const Params& p, const Segment& segment,
                                          const typename F::Results& found) const {
        float* const merged = found.outputs + F::TEAMS * p.rows * F::Results::STRIDE;
        store_cluster<F::CLUSTER, typename F::T>(p, segment, found, merged, statistics);
    }

    static __device__ __forceinline__ void finish(const Params&) {}
};
