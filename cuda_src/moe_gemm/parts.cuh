// Sums of the blocks of a cluster that divide k (split-K).
#pragma once
#include "common/cluster.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "moe_gemm/shared_memory.cuh"

// Bytes that a warpgroup's sums take in block 0, for the PARTS - 1 other blocks.
template <int PARTS, int REGISTERS> constexpr int PARTS_BYTES = (PARTS - 1) * WARPGROUP * REGISTERS * 4;

// The barriers of a warpgroup: block 0 waits at `full` for the sums, the others wait at `empty` before they send more.
struct PartBarriers {
    unsigned long long full, empty;

    __device__ __forceinline__ void init() {
        mbarrier_init(shared_address(&full), 1);
        mbarrier_init(shared_address(&empty), WARPGROUP);
    }
};

// Wait and arrive like mbarrier_wait and mbarrier_arrive_cluster, and order the memory accesses of all blocks of the
// cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(unsigned barrier, int phase) {
    asm volatile("{ .reg .pred complete;\n"
                 "again:\n"
                 "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], %1;\n"
                 "  @!complete bra again; }" ::"r"(barrier),
                 "r"(phase & 1)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_release_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Add the sums that the same warpgroup of each of the PARTS blocks has for a tile, in the order of the blocks. Block 0
// gets the result in `reduced`, which may be `c`. The others send `c` by st.async to block 0's shared memory, to the
// PARTS_BYTES bytes from `exchange` on. Returns whether this block has the result. `phase`: number of earlier calls, or
// any number of the same parity.
template <int PARTS, int REGISTERS>
__device__ __forceinline__ bool add_parts(float (&reduced)[REGISTERS], const float (&c)[REGISTERS],
                                          PartBarriers& barriers, unsigned exchange, int phase) {
    constexpr int STRIDE = WARPGROUP * 16, BYTES = PARTS_BYTES<2, REGISTERS>;
    const unsigned full = shared_address(&barriers.full), empty = shared_address(&barriers.empty);
    const unsigned mine = exchange + threadIdx.x % WARPGROUP * 16;
    const int rank = cluster_rank<PARTS>();
    if (rank > 0) {
        const unsigned to = map_shared_rank(mine + (rank - 1) * BYTES, 0), arrived = map_shared_rank(full, 0);
        mbarrier_wait_cluster(empty, phase + 1);
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 4)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
                         "[%5];" ::"r"(to + i / 4 * STRIDE),
                         "f"(c[i]), "f"(c[i + 1]), "f"(c[i + 2]), "f"(c[i + 3]), "r"(arrived)
                         : "memory");
        return false;
    }
    if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive_expect_tx(full, (PARTS - 1) * BYTES);
#pragma unroll
    for (int i = 0; i < REGISTERS; ++i) reduced[i] = c[i];
    mbarrier_wait_cluster(full, phase);
#pragma unroll 1
    for (int other = 0; other < PARTS - 1; ++other) {
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 4) {
            const uint4 sums = load_shared(mine + other * BYTES + i / 4 * STRIDE);
            reduced[i] += __uint_as_float(sums.x), reduced[i + 1] += __uint_as_float(sums.y);
            reduced[i + 2] += __uint_as_float(sums.z), reduced[i + 3] += __uint_as_float(sums.w);
        }
        mbarrier_arrive_release_cluster(map_shared_rank(empty, other + 1));
    }
    return true;
}
