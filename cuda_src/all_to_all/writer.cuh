// Store chunks of rows into another rank's window, and set the flags of each chunk after it has arrived.
//
// From Hopper on, a bulk copy (cp.async.bulk) writes a chunk from shared memory, while the block computes the next
// chunks. A release fence waits for all earlier stores, so one fence serves the flags of several chunks.
#pragma once
#include "all_to_all/contribution.cuh"

// A thread has VECTORS vectors of a chunk, and one flag covers FLAG_VECTORS of them. VECTORS is FLAG_VECTORS or twice
// that number, so a chunk has one or two flags.
template <int VECTORS> struct Flags {
    unsigned* at;

    __device__ __forceinline__ void set(unsigned epoch) const {
        if constexpr (VECTORS == FLAG_VECTORS)
            *static_cast<volatile unsigned*>(at) = epoch;
        else
            *reinterpret_cast<volatile unsigned long long*>(at) = (unsigned long long)epoch << 32 | epoch;
    }

    // The last chunk of a row may have only the first of two flags.
    __device__ __forceinline__ bool are_set(unsigned epoch, int flag_count) const {
        if constexpr (VECTORS == FLAG_VECTORS) {
            return load_acquire(at) == epoch;
        } else {
            const unsigned long long both = load_acquire(reinterpret_cast<const unsigned long long*>(at));
            return unsigned(both) == epoch && (flag_count == 1 || unsigned(both >> 32) == epoch);
        }
    }
};

#if __CUDA_ARCH__ >= 900
#include "common/bulk.cuh"

constexpr int STAGES = 3;           // chunks in shared memory: copies in flight, and the chunk being written
constexpr int CHUNKS_PER_FENCE = 4; // chunks whose flags are set after one fence, at most

template <int VECTORS> struct ChunkWriter {
    using Stage = uint4[CHUNK<VECTORS>];
    Stage (&stages)[STAGES];
    unsigned epoch;
    int stage = 0;
    // The flags that are not set yet, and their number. Only thread 0 uses these members.
    Flags<VECTORS> flags[CHUNKS_PER_FENCE] = {};
    int count = 0;

    __device__ __forceinline__ ChunkWriter(Stage (&shared)[STAGES], unsigned epoch) : stages(shared), epoch(epoch) {}

    __device__ __forceinline__ void write(uint4* to, const uint4 (&value)[VECTORS], int vectors,
                                          Flags<VECTORS> flags_of_chunk) {
        uint4* const buffer = stages[stage];
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (has_vector()) buffer[vector_of(i)] = value[i];
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(to, buffer, vectors * int(sizeof(uint4)));
            if (count == CHUNKS_PER_FENCE) {
                bulk_wait<1>();
                set_flags();
            }
#pragma unroll
            for (int i = 0; i < CHUNKS_PER_FENCE; ++i)
                if (i == count) flags[i] = flags_of_chunk;
            ++count;
            bulk_wait_read<STAGES - 1>();
        }
        // After this barrier all threads may overwrite the next stage, because its copy has finished reading it.
        __syncthreads();
    }

    __device__ __forceinline__ void set_flags() {
        __threadfence_system();
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_FENCE; ++i)
            if (i < count) flags[i].set(epoch);
        count = 0;
    }

    __device__ __forceinline__ void finish() {
        if (threadIdx.x || !count) return;
        bulk_wait<0>();
        set_flags();
    }
};
#else
constexpr int STAGES = 1;

template <int VECTORS> struct ChunkWriter {
    using Stage = uint4[CHUNK<VECTORS>];
    unsigned epoch;

    __device__ __forceinline__ ChunkWriter(Stage (&)[STAGES], unsigned epoch) : epoch(epoch) {}

    __device__ __forceinline__ void write(uint4* to, const uint4 (&value)[VECTORS], int vectors,
                                          Flags<VECTORS> flags_of_chunk) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (has_vector() && vector_of(i) < vectors) to[vector_of(i)] = value[i];
        __syncthreads();
        if (threadIdx.x) return;
        __threadfence_system();
        flags_of_chunk.set(epoch);
    }

    __device__ __forceinline__ void finish() {}
};
#endif
