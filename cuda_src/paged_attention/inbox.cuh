// Merge the results of the blocks of a cluster for one work item. Each block has an inbox in its shared memory, to
// which all blocks of the cluster send partial results. The mbarrier of the inbox completes when all partial results
// have arrived.
#pragma once
#include "common/cluster.cuh"
#include "common/hopper.cuh"
#include "paged_attention/results.cuh"

// Initialize the inbox's mbarrier and arrive at the cluster barrier. All threads call this at the start. After
// `cluster_wait` a block may send to the inboxes of all blocks. The only write that other blocks must see is the
// initialization of the mbarrier, which has its own fence. The arrival at the cluster barrier can therefore be relaxed,
// so it does not wait for memory accesses.
template <int CLUSTER> __device__ __forceinline__ void open_inbox(unsigned barrier) {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
}

// Store `value` with st.async into the shared memory of block `rank`, at the location that corresponds to `here` in
// this block. The mbarrier at shared address `barrier` of block `rank` counts the bytes.
__device__ __forceinline__ void send(int rank, uint4* here, const uint4& value, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            map_shared_rank(here, rank)),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(map_shared_rank(barrier, unsigned(rank)))
        : "memory");
}

__device__ __forceinline__ void send(int rank, unsigned long long* here, unsigned long long value, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                     map_shared_rank(here, rank)),
                 "l"(value), "r"(map_shared_rank(barrier, unsigned(rank)))
                 : "memory");
}

// Wait for the mbarrier's first phase: everything that the cluster's blocks send to this block has arrived.
__device__ __forceinline__ void wait_for_inbox(unsigned barrier) {
    asm volatile("{ .reg .pred complete;\n"
                 "again:\n"
                 "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], 0;\n"
                 "  @!complete bra again; }" ::"r"(barrier)
                 : "memory");
}

// Merge and store the results of an item that a cluster shares (`store_piece` does this for a single block). The
// results of a row are divided into quads of four dimensions, and each quad is owned by one block. A block merges the
// results of its teams first. It sends each quad to the inbox of the owner, and the maximum and the sum of each row to
// all blocks. Then it merges the quads in its own inbox and stores them. All blocks must have opened their inboxes. A
// block may exit when it is done, because no block reads the memory of another block, and each block waits for
// everything that is sent to it.
template <int CLUSTER, typename T, int TEAMS, int ROWS, int STRIDE>
__device__ void store_cluster(const Params& p, const Segment& segment, const TeamResults<TEAMS, ROWS, STRIDE>& found,
                              char* inbox, unsigned barrier) {
    const int quads = p.head_dim / 4, own = ceil_div(p.rows * quads, CLUSTER), rank = cluster_rank<CLUSTER>();
    const int rows = min(ROWS, p.group * p.query_tokens - segment.row_block * ROWS);       // valid rows
    uint4* const parts = reinterpret_cast<uint4*>(inbox);                                  // [CLUSTER, own]
    auto* const statistics = reinterpret_cast<unsigned long long*>(&parts[CLUSTER * own]); // [CLUSTER, p.rows]
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(barrier, CLUSTER * (ceil_div(rows * quads - rank, CLUSTER) * 16 + rows * 8));
    for (int i = threadIdx.x; i < rows * quads; i += blockDim.x) {
        const int r = i / quads, quad_of_row = i % quads;
        const Quad quad = found.merge(p, r, quad_of_row * 4);
        const uint4 bits = make_uint4(__float_as_uint(quad.values[0]), __float_as_uint(quad.values[1]),
                                      __float_as_uint(quad.values[2]), __float_as_uint(quad.values[3]));
        send(i % CLUSTER, &parts[rank * own + i / CLUSTER], bits, barrier);
        const unsigned long long both = __float_as_uint(quad.maximum) | (unsigned long long)__float_as_uint(quad.sum)
                                                                            << 32;
        for (int to = quad_of_row; to < CLUSTER; to += quads) send(to, &statistics[rank * p.rows + r], both, barrier);
    }
    wait_for_inbox(barrier);
    for (int i = threadIdx.x * CLUSTER + rank; i < rows * quads; i += blockDim.x * CLUSTER) {
        const int r = i / quads;
        const Row row(p, segment, segment.row_block * ROWS + r);
        float2 of_rank[CLUSTER];
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) {
            of_rank[from] = reinterpret_cast<const float2*>(statistics)[from * p.rows + r];
            quad.maximum = fmaxf(quad.maximum, of_rank[from].x);
        }
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) {
            const float4 part = reinterpret_cast<const float4*>(parts)[from * own + i / CLUSTER];
            quad.add(of_rank[from].x, of_rank[from].y, part, quad.maximum);
        }
        store_result<T>(p, segment, row, i % quads * 4, quad, value_scale(p));
    }
}
