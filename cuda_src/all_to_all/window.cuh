// Each rank of a host has one buffer (its window) that all ranks map and write to. It begins with the rank's signals.
//
// A rank signals another rank by a release store or atomic addition, with system scope, in that rank's window. The
// waiting rank polls its own window. Signals count calls (epochs) and are never reset, so a late signal of one call
// cannot be mistaken for a signal of the next. A wait fails after a deadline, or if another rank has set this rank's
// abort flag. Then all later waits of the rank fail at once.
#pragma once
#include "common/warp.cuh"

constexpr int MAX_RANKS = 16;
// In one call, the blocks of a rank together add ARRIVALS to the rank's signal in the window of each rank. ARRIVALS
// must exceed the number of blocks.
constexpr int ARRIVALS = 1 << 16;
constexpr int DISPATCH = 0, COMBINE = 1;
constexpr int SEND = 1, RECEIVE = 2;
enum { PAST_DEADLINE = 1, ABORTED, OVER_CAPACITY, OTHER_CALL };

// The arrays are indexed by source, the rank that sends.
struct Signals {
    unsigned long long dispatched[MAX_RANKS]; // ARRIVALS times the source's number of completed dispatches
    unsigned long long entered[MAX_RANKS];    // the source's number of dispatches begun; used if buffers are reused
    unsigned batches[2][MAX_RANKS];           // [dispatch % 2]: 2 * tokens + buffer, of the source's dispatch
    int abort;                                // 0, or 1 + the rank that failed: then every wait of this rank fails
};

// The state of a rank, in its own device memory.
struct Progress {
    unsigned long long dispatches, combines; // completed calls
    unsigned finished_blocks;                // blocks that have called is_last_block in this call
    int failed;                              // 0, or the code of the first failure
    int buffer;                              // of the last dispatch
    int tokens[MAX_RANKS];                   // per source in the last dispatch
};

// The first failed wait. It is in host memory, and is written once.
struct Failure {
    int code;  // 0: none
    int rank;  // the rank that was waited for, or that failed first
    int phase; // DISPATCH or COMBINE
    int step;  // index of the dispatch or combine, from 0
};

struct Ranks {
    char* windows[MAX_RANKS]; // addresses in this process, including this rank's own window
    Progress* progress;
    Failure* failure;
    const int* rank_of;            // [experts]; null: consecutive blocks of `experts_per_rank` experts
    unsigned long long timeout_ns; // nanoseconds until a wait fails
    int rank, ranks, experts, experts_per_rank;

    __device__ __forceinline__ Signals& signals(int of) const { return *reinterpret_cast<Signals*>(windows[of]); }

    // Return -1 for an invalid id. ID is unsigned, so a negative id compares greater than all experts.
    template <typename ID> __device__ __forceinline__ int owner(ID id) const {
        return id >= ID(experts) ? -1 : rank_of ? rank_of[id] : int(id) / experts_per_rank;
    }
};

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned long long* to, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ void add_release(unsigned long long* to, unsigned long long value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

template <typename Number> __device__ __forceinline__ Number load_volatile(const Number& from) {
    return *static_cast<const volatile Number*>(&from);
}

// Record the first failure, and set the abort flag of every rank, which would otherwise wait for this rank. The
// atomicCAS works on device memory, because not every device supports atomics on host memory.
__device__ inline void fail(const Ranks& ranks, int code, int rank, int phase, unsigned long long step) {
    if (atomicCAS(&ranks.progress->failed, 0, code)) return;
    volatile Failure* const to = ranks.failure;
    to->rank = rank, to->phase = phase, to->step = int(step);
    __threadfence_system();
    to->code = code;
    for (int other = 0; other < ranks.ranks; ++other)
        *static_cast<volatile int*>(&ranks.signals(other).abort) = 1 + ranks.rank;
}

// Wait until `ready()` is true. Return false if the wait failed. Long waits sleep between polls, so that other
// processes on the same GPU make progress. WARP: all lanes of a warp wait together, with the same value of `ready()`.
template <bool WARP = false, typename Ready>
__device__ __forceinline__ bool wait_for(const Ranks& ranks, int rank, int phase, unsigned long long step,
                                         const Ready& ready) {
    unsigned long long begin = 0;
    for (int round = 0;; ++round) {
#pragma unroll 1
        for (int i = 0; i < 64; ++i)
            if (ready()) return true;
        // Reading the clock takes as long as several polls.
        const unsigned long long time = nanoseconds();
        if (round == 0) begin = time;
        bool over = load_volatile(ranks.progress->failed);
        const int who = load_volatile(ranks.signals(ranks.rank).abort);
        if (!over && who) fail(ranks, ABORTED, who - 1, phase, step), over = true;
        if (!over && time - begin > ranks.timeout_ns) fail(ranks, PAST_DEADLINE, rank, phase, step), over = true;
        if (WARP ? __any_sync(FULL_WARP, over) : over) return false;
        if (round > 8) __nanosleep(200);
    }
}

// Return whether this block is the last of the grid to call this. One thread of each block calls it, after the block
// has read the values that the last block will overwrite.
__device__ __forceinline__ bool is_last_block(Progress& progress) {
    if (atomicAdd(&progress.finished_blocks, 1) != gridDim.x - 1) return false;
    progress.finished_blocks = 0;
    return true;
}
