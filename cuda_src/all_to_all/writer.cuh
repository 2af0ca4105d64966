// Store chunks of rows into another rank's window. After each chunk has arrived, set its flags there.
//
// From Hopper on, a bulk copy (cp.async.bulk) writes a chunk from shared memory. Several copies are in flight while the
// block computes the next chunks. A release fence waits for the arrival of all earlier stores, so one fence serves
// several chunks before their flags are set.
#pragma once
#include "all_to_all/contribution.cuh"

// The flags of a chunk. A chunk has UNITS units per thread and one flag per FLAG_UNITS of these units, so it has one or
// two flags.
template <int UNITS> struct Flags {
    unsigned* at;

    __device__ __forceinline__ void set(unsigned epoch) const {
        if constexpr (UNITS == FLAG_UNITS)
            *static_cast<volatile unsigned*>(at) = epoch;
        else
            *reinterpret_cast<volatile unsigned long long*>(at) = (unsigned long long)epoch << 32 | epoch;
    }

    // Return whether the flags are set to `epoch`. `exist` is the number of flags that the chunk has: the last chunk of
    // a row may have only the first of the two.
    __device__ __forceinline__ bool are_set(unsigned epoch, int exist) const {
        if constexpr (UNITS == FLAG_UNITS) {
            return load_acquire(at) == epoch;
        } else {
            const unsigned long long both = load_acquire(reinterpret_cast<const unsigned long long*>(at));
            return unsigned(both) == epoch && (exist == 1 || unsigned(both >> 32) == epoch);
        }
    }
};

#if __CUDA_ARCH__ >= 900
#include "common/bulk.cuh"

constexpr int STAGES = 3;  // chunks in shared memory: copies in flight, and the chunk being written
constexpr int AT_ONCE = 4; // maximum number of chunks whose flags are set after one fence

template <int UNITS> struct ChunkWriter {
    using Stage = uint4[CHUNK<UNITS>];
    Stage (&staged)[STAGES];
    unsigned epoch;
    int stage = 0;
    // Used by thread 0 only.
    Flags<UNITS> flags[AT_ONCE] = {}; // flags that are not set yet
    int count = 0;

    __device__ __forceinline__ ChunkWriter(Stage (&shared)[STAGES], unsigned epoch) : staged(shared), epoch(epoch) {}

    // Copy the first `units` units of a chunk to the window at `to`.
    __device__ __forceinline__ void write(uint4* to, const uint4 (&value)[UNITS], int units,
                                          Flags<UNITS> flags_of_chunk) {
        uint4* const own = staged[stage];
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (has_unit()) own[unit_of(i)] = value[i];
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(to, own, units * int(sizeof(uint4)));
            if (count == AT_ONCE) {
                bulk_wait<1>();
                announce();
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (i == count) flags[i] = flags_of_chunk;
            ++count;
            bulk_wait_read<STAGES - 1>();
        }
        // The copy that used the next stage has finished reading it, so all threads may overwrite that stage.
        __syncthreads();
    }

    __device__ __forceinline__ void announce() {
        __threadfence_system();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i < count) flags[i].set(epoch);
        count = 0;
    }

    __device__ __forceinline__ void finish() {
        if (threadIdx.x || !count) return;
        bulk_wait<0>();
        announce();
    }
};
#else
constexpr int STAGES = 1;

template <int UNITS> struct ChunkWriter {
    using Stage = uint4[CHUNK<UNITS>];
    unsigned epoch;

    __device__ __forceinline__ ChunkWriter(Stage (&)[STAGES], unsigned epoch) : epoch(epoch) {}

    __device__ __forceinline__ void write(uint4* to, const uint4 (&value)[UNITS], int units,
                                          Flags<UNITS> flags_of_chunk) {
#pragma unroll
        for (int i = 0; i < UNITS; ++i)
            if (has_unit() && unit_of(i) < units) to[unit_of(i)] = value[i];
        __syncthreads();
        if (threadIdx.x) return;
        __threadfence_system();
        flags_of_chunk.set(epoch);
    }

    __device__ __forceinline__ void finish() {}
};
#endif
