// Hopper's own: tiles copied by the tensor memory accelerator (TMA) and products of a warpgroup (wgmma), and what they
// are waited for with. Only for code compiled for sm_90a.
//
// A tile in shared memory is rows of 128 bytes whose 16-byte chunks are swizzled, as TMA writes and wgmma reads them:
// chunk c of row r lies where chunk c ^ (r % 8) would. A tile begins at a multiple of 1024 bytes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/barrier.cuh"
#include "common/numeric.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

constexpr int WARPGROUP = 128;

__device__ __forceinline__ void store_shared(unsigned to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// The reverse of ldmatrix.
__device__ __forceinline__ void stmatrix(unsigned to, const unsigned (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// 16 bytes that are needed once, or zeros if not `wanted`.
__device__ __forceinline__ uint4 load_or_zero(const void* from, bool wanted) {
    uint4 value;
    asm volatile("{ .reg .pred wanted;\n"
                 "  setp.ne.u32 wanted, %5, 0;\n"
                 "  mov.u32 %0, 0;\n"
                 "  mov.u32 %1, 0;\n"
                 "  mov.u32 %2, 0;\n"
                 "  mov.u32 %3, 0;\n"
                 "  @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from), "r"(unsigned(wanted))
                 : "memory");
    return value;
}

// Bring what lies there to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// ---- barriers ----

// What was initialized is seen by the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and let the phase wait for `bytes` from the copy engine too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Address, for the whole cluster, of the barrier that lies at the same place in block `rank`.
__device__ __forceinline__ unsigned map_shared_rank(unsigned barrier, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    return there;
}

// Arrive at a barrier of any block of the cluster. It tells that this block has read, not that it has written anything: a
// release to the whole cluster would wait for memory each time.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The 16 numbered barriers of a block: `sync` waits until `THREADS` threads came, by `sync` or by `arrive`.
template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and by wgmma after the next barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// How many registers each thread of this warpgroup has from here on.
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- tiles ----

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What L2 does with a tile when it lacks room.
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000, EVICT_NORMAL = 0x1000000000000000;

// Copy the box at (x, y, z, w) of the mapped tensor; `barrier` counts its bytes.
template <unsigned long long POLICY = EVICT_FIRST>
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, int x, int y, int z, int w,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(POLICY)
        : "memory");
}

// The same for a tensor of five dimensions.
template <unsigned long long POLICY = EVICT_FIRST>
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, int x, int y, int z, int w, int v,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(barrier), "l"(POLICY)
        : "memory");
}

// Copy a box to the same place in every block of the cluster whose bit is set in `blocks`; the barrier at the same place in
// each counts its bytes.
template <unsigned long long POLICY = EVICT_NORMAL>
__device__ __forceinline__ void tma_load_multicast(unsigned short blocks, unsigned to, const TensorMap& map, int x,
                                                   int y, int z, int w, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks), "l"(POLICY)
                 : "memory");
}

// ---- products ----
//
// An operand in shared memory, as wgmma wants it described. Either the numbers of a row are neighbours along the sum: then
// the next 8 rows are 1024 bytes on, and 16 further along the sum is 32 bytes on. Or across it, as V is in P V: the next 8
// along the sum are 1024 bytes on, the next 64 columns a tile.
__device__ __forceinline__ unsigned long long k_major_descriptor(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

template <int TILE_BYTES> __device__ __forceinline__ unsigned long long mn_major_descriptor(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3fff) | (unsigned long long)(TILE_BYTES >> 4) << 16 | 64ull << 32 |
           1ull << 62;
}

// Products run on their own from here; the registers that they read or write are theirs until they are waited for.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait for all groups but the latest N.
template <int N> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// What reads or writes these registers stays on its side of this line.
template <int N> __device__ __forceinline__ void wgmma_fence_operand(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// c = a b, or c += a b with `add`, by a warpgroup: 64 rows; 32 bytes along the sum (16 numbers of 16 bits, 32 of 8); 8, 16,
// 32, 64, 128 or 256 columns, twice as many as c has places. Warp w of it has rows 16 w ... 16 w + 15 of c, and a lane, of row
// lane / 4, columns 8 j + 2 (lane % 4) and the next in c[4 j], c[4 j + 1], and of row lane / 4 + 8 the same in c[4 j + 2],
// c[4 j + 3].
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define PLACES_4 FOUR(0)
#define PLACES_8 PLACES_4, FOUR(4)
#define PLACES_16 PLACES_8, FOUR(8), FOUR(12)
#define PLACES_32 PLACES_16, FOUR(16), FOUR(20), FOUR(24), FOUR(28)
#define PLACES_64 PLACES_32, FOUR(32), FOUR(36), FOUR(40), FOUR(44), FOUR(48), FOUR(52), FOUR(56), FOUR(60)
#define PLACES_128 \
    PLACES_64, FOUR(64), FOUR(68), FOUR(72), FOUR(76), FOUR(80), FOUR(84), FOUR(88), FOUR(92), FOUR(96), FOUR(100), \
        FOUR(104), FOUR(108), FOUR(112), FOUR(116), FOUR(120), FOUR(124)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
    NAMES_16 ", " \
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", " \
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 \
    NAMES_64 ", " \
             "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
             "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
             "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
             "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PRODUCT(columns, places, k, types, a_at, b_at, add_at, how, ...) \
    asm volatile("{ .reg .pred add;\n" \
                 "  setp.ne.b32 add, " add_at ", 0;\n" \
                 "  wgmma.mma_async.sync.aligned.m64n" columns k ".f32." types " {" NAMES_##places \
                 "}, " a_at ", " b_at ", add, 1, 1" how "; }" \
                 : PLACES_##places \
                 : __VA_ARGS__, "r"(int(add)))
#define PRODUCT_SHARED(columns, places, k, types, a_at, b_at, add_at, how) \
    PRODUCT(columns, places, k, types, a_at, b_at, add_at, how, "l"(a), "l"(b))
#define PRODUCT_REGISTERS(types) \
    PRODUCT("256", 128, "k16", types, "{%128, %129, %130, %131}", "%132", "%133", ", 1", "r"(a[0]), "r"(a[1]), \
            "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCT_ALONG(k, types, how) \
    if constexpr (N == 4) \
        PRODUCT_SHARED("8", 4, k, types, "%4", "%5", "%6", how); \
    else if constexpr (N == 8) \
        PRODUCT_SHARED("16", 8, k, types, "%8", "%9", "%10", how); \
    else if constexpr (N == 16) \
        PRODUCT_SHARED("32", 16, k, types, "%16", "%17", "%18", how); \
    else if constexpr (N == 32) \
        PRODUCT_SHARED("64", 32, k, types, "%32", "%33", "%34", how); \
    else if constexpr (N == 64) \
        PRODUCT_SHARED("128", 64, k, types, "%64", "%65", "%66", how); \
    else if constexpr (N == 128) \
        PRODUCT_SHARED("256", 128, k, types, "%128", "%129", "%130", how); \
    else \
        static_assert(N == 4, "wgmma has 8, 16, 32, 64, 128 or 256 columns here")

// a, b: along the sum.
template <typename T, int N>
__device__ __forceinline__ void wgmma_k_major(float (&c)[N], unsigned long long a, unsigned long long b, bool add) {
    if constexpr (IS_BFLOAT16<T>) {
        PRODUCT_ALONG("k16", "bf16.bf16", ", 0, 0");
    } else if constexpr (sizeof(T) == 2) {
        PRODUCT_ALONG("k16", "f16.f16", ", 0, 0");
    } else {
        PRODUCT_ALONG("k32", "e4m3.e4m3", "");
    }
}

// a: along the sum, from shared memory or from registers (fragments as in mma.cuh); b: across it.
template <typename T>
__device__ __forceinline__ void wgmma_mn_major(float (&c)[128], unsigned long long a, unsigned long long b, bool add) {
    if constexpr (IS_BFLOAT16<T>)
        PRODUCT_SHARED("256", 128, "k16", "bf16.bf16", "%128", "%129", "%130", ", 0, 1");
    else
        PRODUCT_SHARED("256", 128, "k16", "f16.f16", "%128", "%129", "%130", ", 0, 1");
}

template <typename T>
__device__ __forceinline__ void wgmma_mn_major(float (&c)[128], const unsigned (&a)[4], unsigned long long b,
                                               bool add) {
    if constexpr (IS_BFLOAT16<T>)
        PRODUCT_REGISTERS("bf16.bf16");
    else
        PRODUCT_REGISTERS("f16.f16");
}

#undef FOUR
#undef PLACES_4
#undef PLACES_8
#undef PLACES_16
#undef PLACES_32
#undef PLACES_64
#undef PLACES_128
#undef NAMES_4
#undef NAMES_8
#undef NAMES_16
#undef NAMES_32
#undef NAMES_64
#undef NAMES_128
#undef PRODUCT
#undef PRODUCT_SHARED
#undef PRODUCT_REGISTERS
#undef PRODUCT_ALONG
