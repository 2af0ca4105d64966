// Memory windows of the ranks of one host. All ranks map every window. A window begins with its signals.
//
// To signal, a rank performs a release store or a release addition of system scope in the window of the waiting rank.
// The waiting rank polls its own memory. Signals count epochs (calls) and are never reset, so a late signal cannot be
// mistaken for another. A wait checks a deadline and an abort word. After the first failed wait, every further wait of
// the rank fails at once.
#pragma once
#include "common/warp.cuh"

constexpr int MAX_RANKS = 16;
// Total that a sender's blocks add to a rank's signal in one call. It must exceed the number of blocks.
constexpr int ARRIVALS = 1 << 16;
constexpr int DISPATCH = 0, COMBINE = 1;
// Phases of a call. One launch does both, or one launch sends and the next launch receives.
constexpr int SEND = 1, RECEIVE = 2;
// Reasons for a failed wait.
enum { PAST_DEADLINE = 1, ABORTED, OVER_CAPACITY, OTHER_CALL };

// The beginning of each window. Sources are ranks.
struct Signals {
    unsigned long long dispatched[MAX_RANKS]; // by source: ARRIVALS times the number of completed dispatches
    unsigned long long entered[MAX_RANKS];    // by source: the number of dispatches begun; used if buffers are reused
    unsigned batches[2][MAX_RANKS];           // by parity of the dispatch and by source: 2 * tokens + buffer
    int abort;                                // 1 + the rank that gave up, and every wait of this rank fails; 0: none
};

// A rank's own state on its device.
struct Progress {
    unsigned long long dispatches, combines; // calls that ended
    unsigned leaving;                        // blocks of the running call that have read these counters
    int failed;                              // not 0: a wait failed
    int buffer;                              // of the last dispatch
    int tokens[MAX_RANKS];                   // by source, of the last dispatch
};

// The first failed wait, in host memory. Written once.
struct Failure {
    int code;  // 0: none
    int rank;  // the rank that was waited for, or that gave up
    int phase; // DISPATCH or COMBINE
    int step;  // index of the dispatch or combine, from 0
};

struct Ranks {
    char* windows[MAX_RANKS]; // addresses in this process, including this rank's own window
    Progress* progress;
    Failure* failure;
    const int* rank_of;          // [experts]; null: consecutive blocks of `experts_per_rank` experts
    unsigned long long patience; // nanoseconds until a wait fails
    int rank, ranks, experts, experts_per_rank;

    __device__ __forceinline__ Signals& signals(int of) const { return *reinterpret_cast<Signals*>(windows[of]); }

    // Return the rank of an expert, or -1. ID is unsigned, so a negative id compares above all experts.
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

template <typename Number> __device__ __forceinline__ Number now(const Number& word) {
    return *static_cast<const volatile Number*>(&word);
}

// Record that a wait for `rank` failed, or that this rank cannot go on, and set the abort word of every rank, because
// the other ranks would wait for this rank. Not every device supports atomics on host memory, so an atomic on the
// device's own word selects the first failure.
__device__ inline void fail(const Ranks& ranks, int code, int rank, int phase, unsigned long long step) {
    if (atomicCAS(&ranks.progress->failed, 0, code)) return;
    volatile Failure* const to = ranks.failure;
    to->rank = rank, to->phase = phase, to->step = int(step);
    __threadfence_system();
    to->code = code;
    for (int other = 0; other < ranks.ranks; ++other)
        *static_cast<volatile int*>(&ranks.signals(other).abort) = 1 + ranks.rank;
}

// Wait until `ready()`; return false if the wait failed. Waits sleep, so that processes that share a GPU make progress.
// WARP: all lanes of a warp wait together, and `ready()` must return the same value in all of them.
template <bool WARP = false, typename Ready>
__device__ __forceinline__ bool wait_for(const Ranks& ranks, int rank, int phase, unsigned long long step,
                                         const Ready& ready) {
    unsigned long long begin = 0;
    for (int round = 0;; ++round) {
#pragma unroll 1
        for (int i = 0; i < 64; ++i)
            if (ready()) return true;
        // Reading the clock takes as long as several polls, so it is read only after 64 polls.
        const unsigned long long time = nanoseconds();
        if (round == 0) begin = time;
        bool over = now(ranks.progress->failed);
        const int who = now(ranks.signals(ranks.rank).abort);
        if (!over && who) fail(ranks, ABORTED, who - 1, phase, step), over = true;
        if (!over && time - begin > ranks.patience) fail(ranks, PAST_DEADLINE, rank, phase, step), over = true;
        if (WARP ? __any_sync(FULL_WARP, over) : over) return false;
        if (round > 8) __nanosleep(200);
    }
}

// Return whether this block is the last of the grid to call this function. One thread of each block calls it, after all
// threads of the block have read the values that the last block will overwrite.
__device__ __forceinline__ bool is_last(Progress& progress) {
    if (atomicAdd(&progress.leaving, 1) != gridDim.x - 1) return false;
    progress.leaving = 0;
    return true;
}
