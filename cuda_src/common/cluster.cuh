// Thread block clusters of CLUSTER blocks, and their distributed shared memory (DSMEM). CLUSTER == 1 is a single block,
// which runs on any GPU. Larger clusters need sm_90.
#pragma once

#if __CUDA_ARCH__ >= 900
constexpr bool HAS_CLUSTERS = true;
#define CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#else
constexpr bool HAS_CLUSTERS = false;
#define CLUSTER_OF(blocks)
#endif

template <int CLUSTER> __device__ __forceinline__ int cluster_rank() {
    if constexpr (CLUSTER == 1) return 0;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier for all threads of the cluster. All writes before cluster_arrive, including writes to other blocks' shared
// memory, are visible after cluster_wait.
template <int CLUSTER> __device__ __forceinline__ void cluster_arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

template <int CLUSTER> __device__ __forceinline__ void cluster_wait() {
    if constexpr (CLUSTER > 1)
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}

template <int CLUSTER> __device__ __forceinline__ void cluster_sync() {
    cluster_arrive<CLUSTER>();
    cluster_wait<CLUSTER>();
}

// Return the shared::cluster address of the variable of block `rank` that corresponds to `here` in this block.
__device__ __forceinline__ unsigned map_shared_rank(const void* here, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(unsigned(__cvta_generic_to_shared(here))), "r"(rank));
    return there;
}

// This function and the next ones access the variable of block `rank` that corresponds to `here` in this block.
template <int CLUSTER> __device__ __forceinline__ void dsmem_store(int rank, float* here, float value) {
    if constexpr (CLUSTER == 1)
        *here = value;
    else
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(map_shared_rank(here, rank)), "f"(value) : "memory");
}

template <int CLUSTER> __device__ __forceinline__ void dsmem_store(int rank, int* here, int value) {
    if constexpr (CLUSTER == 1)
        *here = value;
    else
        asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(map_shared_rank(here, rank)), "r"(value) : "memory");
}

template <int CLUSTER>
__device__ __forceinline__ void dsmem_store(int rank, unsigned long long* here, unsigned long long value) {
    if constexpr (CLUSTER == 1)
        *here = value;
    else
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(map_shared_rank(here, rank)), "l"(value) : "memory");
}

template <int CLUSTER> __device__ __forceinline__ void dsmem_store(int rank, uint4* here, uint4 value) {
    if constexpr (CLUSTER == 1)
        *here = value;
    else
        asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(map_shared_rank(here, rank)),
                     "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                     : "memory");
}

template <int CLUSTER> __device__ __forceinline__ int dsmem_atomic_add(int rank, int* here, int value) {
    if constexpr (CLUSTER == 1) return atomicAdd(here, value);
    int before;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(map_shared_rank(here, rank)), "r"(value)
                 : "memory");
    return before;
}

template <int CLUSTER> __device__ __forceinline__ float4 dsmem_load(int rank, const float4* here) {
    if constexpr (CLUSTER == 1) return *here;
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(map_shared_rank(here, rank))
                 : "memory");
    return value;
}

template <int CLUSTER> __device__ __forceinline__ float2 dsmem_load(int rank, const float2* here) {
    if constexpr (CLUSTER == 1) return *here;
    float2 value;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(map_shared_rank(here, rank))
                 : "memory");
    return value;
}
