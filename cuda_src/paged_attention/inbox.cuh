// Merge the results of a cluster's blocks for one work item. All blocks send partial results to the receive buffers in
// each other's shared memory. The receive barrier, an mbarrier, completes when all partial results have arrived.
#pragma once
#include "common/cluster.cuh"
#include "common/hopper.cuh"
#include "paged_attention/results.cuh"

// After `cluster_wait` a block may send to all blocks. The arrival is relaxed: it does not wait for memory accesses.
// Other blocks must see only the initialization of the mbarrier, which has its own fence.
template <int CLUSTER> __device__ __forceinline__ void init_receive_barrier(unsigned barrier) {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
        }
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
}

// Store `value` with st.async in the shared memory of block `rank`, at the offset that `here` has in this block. The
// mbarrier at address `barrier` of block `rank` counts the bytes.
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

__device__ __forceinline__ void wait_receive_barrier(unsigned barrier) {
    asm volatile("{ .reg .pred complete;\n"
                 "again:\n"
                 "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], 0;\n"
                 "  @!complete bra again; }" ::"r"(barrier)
                 : "memory");
}

// Each quad (four dimensions of a row) has an owner block. A block merges the results of its teams, sends each quad to
// its owner, and the maximum and sum of each row to all blocks. It then merges and stores the quads that it owns. It
// may exit when it is done, because every block waits for everything that is sent to it.
template <int CLUSTER, typename T, int TEAMS, int ROWS, int STRIDE>
__device__ void store_cluster(const Params& p, const KvSplit& kv_split, const TeamResults<TEAMS, ROWS, STRIDE>& results,
                              char* receive_buffer, unsigned barrier) {
    const int quads = p.head_dim / 4, block_quads = ceil_div(p.rows * quads, CLUSTER), rank = cluster_rank<CLUSTER>();
    const int rows = min(ROWS, p.group * p.query_tokens - kv_split.row_block * ROWS); // valid rows
    uint4* const received_values = reinterpret_cast<uint4*>(receive_buffer);          // [CLUSTER, block_quads]
    auto* const received_statistics =
        reinterpret_cast<unsigned long long*>(&received_values[CLUSTER * block_quads]); // [CLUSTER, p.rows]
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(barrier, CLUSTER * (ceil_div(rows * quads - rank, CLUSTER) * 16 + rows * 8));
    for (int i = threadIdx.x; i < rows * quads; i += blockDim.x) {
        const int r = i / quads, quad_of_row = i % quads;
        const Quad quad = results.merge(p, r, quad_of_row * 4);
        const uint4 bits = make_uint4(__float_as_uint(quad.values[0]), __float_as_uint(quad.values[1]),
                                      __float_as_uint(quad.values[2]), __float_as_uint(quad.values[3]));
        send(i % CLUSTER, &received_values[rank * block_quads + i / CLUSTER], bits, barrier);
        const unsigned long long both = __float_as_uint(quad.maximum) | (unsigned long long)__float_as_uint(quad.sum)
                                                                            << 32;
        for (int to = quad_of_row; to < CLUSTER; to += quads)
            send(to, &received_statistics[rank * p.rows + r], both, barrier);
    }
    wait_receive_barrier(barrier);
    for (int i = threadIdx.x * CLUSTER + rank; i < rows * quads; i += blockDim.x * CLUSTER) {
        const int r = i / quads;
        const Row row(p, kv_split, kv_split.row_block * ROWS + r);
        float2 of_rank[CLUSTER];
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) {
            of_rank[from] = reinterpret_cast<const float2*>(received_statistics)[from * p.rows + r];
            quad.maximum = fmaxf(quad.maximum, of_rank[from].x);
        }
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) {
            const float4 values = reinterpret_cast<const float4*>(received_values)[from * block_quads + i / CLUSTER];
            quad.add(of_rank[from].x, of_rank[from].y, values, quad.maximum);
        }
        store_result<T>(p, kv_split, row, i % quads * 4, quad, value_scale(p));
    }
}
