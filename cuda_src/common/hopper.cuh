// Hopper's asynchronous instructions, for sm_90a: tile copies by the tensor memory accelerator (TMA), MMAs of a
// warpgroup (wgmma), and their barriers and fences.
//
// Swizzled tiles. A row of a tile is 128 bytes, which span all 32 banks. Without a swizzle, the same 16-byte chunk of
// eight rows would be in the same four banks, an 8-way bank conflict. TMA and wgmma therefore place chunk c of row r at
// position `c ^ (r % 8)` of the row: the XOR of address bits 4 to 6 with address bits 7 to 9. A tile must begin at a
// multiple of 1024 bytes, the size of eight rows.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/barrier.cuh"
#include "common/bulk.cuh"
#include "common/numeric.cuh"

#if __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

constexpr int WARPGROUP = 128; // threads

// ---- shared and global memory ----

__device__ __forceinline__ void store_shared(unsigned to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Store the fragments of four 8x8 matrices, the reverse of ldmatrix (common/mma.cuh). Each lane gives the address of
// one row.
__device__ __forceinline__ void stmatrix(unsigned to, const unsigned (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// Load 16 bytes. The load bypasses L1, because the bytes are read only once. If `wanted` is false, return zeros without
// an access.
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

__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// ---- barriers and fences ----

// Make mbarrier_init visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and add `bytes` to the number of bytes that TMA must write before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Return the shared::cluster address of the barrier of block `rank` that corresponds to `barrier` in this block.
__device__ __forceinline__ unsigned map_shared_rank(unsigned barrier, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    return there;
}

// Arrive with a release at block scope (PTX's default). The arrival signals that this block has read a buffer. It does
// not make writes visible to other blocks. A release at cluster scope would wait for outstanding memory accesses.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Named barriers; a block has 16. `sync` waits until THREADS threads have arrived.
template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS> __device__ __forceinline__ void named_barrier_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// All warps of the warpgroup call this. `inc` waits until the block has enough free registers.
template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- tiles by TMA ----

// The driver's CUtensorMap: the address, shape, strides, box and swizzle of a tensor.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// L2 eviction policies, as createpolicy encodes them.
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000, EVICT_NORMAL = 0x1000000000000000;

// Issue the copy of a box of the tensor to shared memory. `barrier` counts the bytes that arrive.
template <unsigned long long POLICY = EVICT_FIRST>
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, int x, int y, int z, int w,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(POLICY)
        : "memory");
}

template <unsigned long long POLICY = EVICT_FIRST>
__device__ __forceinline__ void tma_load(unsigned to, const TensorMap& map, int x, int y, int z, int w, int v,
                                         unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(barrier), "l"(POLICY)
        : "memory");
}

// Copy a box to the same shared address in each block of the cluster whose bit is set in `blocks`. In each of these
// blocks, the barrier at the same shared address counts the bytes.
template <unsigned long long POLICY = EVICT_NORMAL>
__device__ __forceinline__ void tma_load_multicast(unsigned short blocks, unsigned to, const TensorMap& map, int x,
                                                   int y, int z, int w, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
                 "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "h"(blocks), "l"(POLICY)
                 : "memory");
}

// ---- matrix multiplications by wgmma ----
//
// A 64-bit descriptor locates an operand in shared memory: the address / 16 (bits 0 to 13), the leading byte offset /
// 16 (bits 16 to 29), the stride byte offset / 16 (bits 32 to 45), and the layout (bits 62 and 63; 1 is the 128-byte
// swizzle). The MMA computes A [M x K] times B [K x N]. The offsets depend on the contiguous dimension of the operand:
//
//   K-major    A row of the tile is 128 bytes of a row of A or a column of B, along K. The stride offset leads to the
//              next 8 rows (1024 bytes). The leading offset is not used. One wgmma takes 32 bytes along K. The next
//              descriptor has an address 32 bytes further, because the hardware computes the swizzle from the address.
//   MN-major   A row of the tile is one step along K, and holds 64 elements along M or N. The stride
//              offset leads to the next 8 steps along K (1024 bytes). The leading offset leads to the next 64 elements
//              along M or N, in another tile (TILE_BYTES further).
__device__ __forceinline__ unsigned long long k_major_descriptor(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Return a k_major_descriptor from its lower 32 bits. STRIDE: bytes from one group of 8 rows to the next.
template <int STRIDE = 1024> __device__ __forceinline__ unsigned long long k_major_descriptor_of(unsigned lower) {
    unsigned long long operand;
    asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(lower), "r"(1u << 30 | unsigned(STRIDE >> 4)));
    return operand;
}

template <int TILE_BYTES> __device__ __forceinline__ unsigned long long mn_major_descriptor(unsigned address) {
    return (unsigned long long)(address >> 4 & 0x3fff) | (unsigned long long)(TILE_BYTES >> 4) << 16 | 64ull << 32 |
           1ull << 62;
}

// Order earlier register accesses before the next wgmmas.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait for all wgmma groups except the latest N.
template <int N> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keep the compiler from moving accesses to `c` across this call. The compiler does not know that a wgmma is
// asynchronous.
template <int N> __device__ __forceinline__ void wgmma_fence_operand(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Compute c = a b, or c += a b if `accumulate`, with a warpgroup:
//
//   64 rows: warp w of the warpgroup has 16 rows, which start at row 16 * w
//   8, 16, 32, 64, 128 or 256 columns: twice the number of registers of c
//   32 bytes along K: 16 elements of 16 bits, or 32 elements of 8 bits
//
// A lane holds columns `n = 8 * j + 2 * (lane % 4)` and `n + 1` of two rows of its warp. `c[4 * j]` and `c[4 * j + 1]`
// belong to row `lane / 4`, and `c[4 * j + 2]` and `c[4 * j + 3]` to row `lane / 4 + 8`.
//
// REGISTERS_n lists n registers as asm operands, and NAMES_n lists their names in the asm text. `how` contains PTX's
// flags for A and B, which are 1 for an MN-major operand.
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define REGISTERS_4 FOUR(0)
#define REGISTERS_8 REGISTERS_4, FOUR(4)
#define REGISTERS_16 REGISTERS_8, FOUR(8), FOUR(12)
#define REGISTERS_32 REGISTERS_16, FOUR(16), FOUR(20), FOUR(24), FOUR(28)
#define REGISTERS_64 REGISTERS_32, FOUR(32), FOUR(36), FOUR(40), FOUR(44), FOUR(48), FOUR(52), FOUR(56), FOUR(60)
#define REGISTERS_128 \
    REGISTERS_64, FOUR(64), FOUR(68), FOUR(72), FOUR(76), FOUR(80), FOUR(84), FOUR(88), FOUR(92), FOUR(96), FOUR(100), \
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
#define WGMMA(columns, registers, k, types, a_at, b_at, accumulate_at, how, ...) \
    asm volatile("{ .reg .pred accumulate;\n" \
                 "  setp.ne.b32 accumulate, " accumulate_at ", 0;\n" \
                 "  wgmma.mma_async.sync.aligned.m64n" columns k ".f32." types " {" NAMES_##registers \
                 "}, " a_at ", " b_at ", accumulate, 1, 1" how "; }" \
                 : REGISTERS_##registers \
                 : __VA_ARGS__, "r"(int(accumulate)))
#define WGMMA_SHARED(columns, registers, k, types, a_at, b_at, accumulate_at, how) \
    WGMMA(columns, registers, k, types, a_at, b_at, accumulate_at, how, "l"(a), "l"(b))
#define WGMMA_REGISTERS(columns, registers, k, types, a_at, b_at, accumulate_at, how) \
    WGMMA(columns, registers, k, types, a_at, b_at, accumulate_at, how, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
          "l"(b))
#define WGMMA_COLUMNS(k, types, how) \
    if constexpr (N == 4) \
        WGMMA_SHARED("8", 4, k, types, "%4", "%5", "%6", how); \
    else if constexpr (N == 8) \
        WGMMA_SHARED("16", 8, k, types, "%8", "%9", "%10", how); \
    else if constexpr (N == 16) \
        WGMMA_SHARED("32", 16, k, types, "%16", "%17", "%18", how); \
    else if constexpr (N == 32) \
        WGMMA_SHARED("64", 32, k, types, "%32", "%33", "%34", how); \
    else if constexpr (N == 64) \
        WGMMA_SHARED("128", 64, k, types, "%64", "%65", "%66", how); \
    else if constexpr (N == 128) \
        WGMMA_SHARED("256", 128, k, types, "%128", "%129", "%130", how); \
    else \
        static_assert(N == 4, "wgmma has 8, 16, 32, 64, 128 or 256 columns here")

#define WGMMA_COLUMNS_REGISTERS(k, types, how) \
    if constexpr (N == 4) \
        WGMMA_REGISTERS("8", 4, k, types, "{%4, %5, %6, %7}", "%8", "%9", how); \
    else if constexpr (N == 8) \
        WGMMA_REGISTERS("16", 8, k, types, "{%8, %9, %10, %11}", "%12", "%13", how); \
    else if constexpr (N == 16) \
        WGMMA_REGISTERS("32", 16, k, types, "{%16, %17, %18, %19}", "%20", "%21", how); \
    else if constexpr (N == 32) \
        WGMMA_REGISTERS("64", 32, k, types, "{%32, %33, %34, %35}", "%36", "%37", how); \
    else if constexpr (N == 64) \
        WGMMA_REGISTERS("128", 64, k, types, "{%64, %65, %66, %67}", "%68", "%69", how); \
    else if constexpr (N == 128) \
        WGMMA_REGISTERS("256", 128, k, types, "{%128, %129, %130, %131}", "%132", "%133", how); \
    else \
        static_assert(N == 4, "wgmma has 8, 16, 32, 64, 128 or 256 columns here")

// a, b: K-major descriptors.
template <typename T, int N>
__device__ __forceinline__ void wgmma_k_major(float (&c)[N], unsigned long long a, unsigned long long b,
                                              bool accumulate) {
    if constexpr (IS_BFLOAT16<T>) {
        WGMMA_COLUMNS("k16", "bf16.bf16", ", 0, 0");
    } else if constexpr (sizeof(T) == 2) {
        WGMMA_COLUMNS("k16", "f16.f16", ", 0, 0");
    } else {
        WGMMA_COLUMNS("k32", "e4m3.e4m3", "");
    }
}

// a: an MN-major descriptor; b: a K-major descriptor. 16-bit types only.
template <typename T, int N>
__device__ __forceinline__ void wgmma_m_major(float (&c)[N], unsigned long long a, unsigned long long b,
                                              bool accumulate) {
    if constexpr (IS_BFLOAT16<T>) {
        WGMMA_COLUMNS("k16", "bf16.bf16", ", 1, 0");
    } else {
        WGMMA_COLUMNS("k16", "f16.f16", ", 1, 0");
    }
}

// a: fragments of A in registers, 16 rows per warp; b: a K-major descriptor. common/mma.cuh describes the fragments of
// 16-bit elements. For 8-bit elements, a[0] holds four elements of row `lane / 4`, from element `4 * (lane % 4)` on,
// and a[1] holds the same elements of row `lane / 4 + 8`. a[2] and a[3] are 16 elements further along K.
template <typename T, int N>
__device__ __forceinline__ void wgmma_k_major(float (&c)[N], const unsigned (&a)[4], unsigned long long b,
                                              bool accumulate) {
    if constexpr (IS_BFLOAT16<T>) {
        WGMMA_COLUMNS_REGISTERS("k16", "bf16.bf16", ", 0");
    } else if constexpr (sizeof(T) == 2) {
        WGMMA_COLUMNS_REGISTERS("k16", "f16.f16", ", 0");
    } else {
        WGMMA_COLUMNS_REGISTERS("k32", "e4m3.e4m3", "");
    }
}

// a: a K-major descriptor, or fragments of A in registers (common/mma.cuh); b: an MN-major descriptor.
template <typename T, int N>
__device__ __forceinline__ void wgmma_mn_major(float (&c)[N], unsigned long long a, unsigned long long b,
                                               bool accumulate) {
    static_assert(N == 64 || N == 128, "");
    if constexpr (IS_BFLOAT16<T> && N == 128)
        WGMMA_SHARED("256", 128, "k16", "bf16.bf16", "%128", "%129", "%130", ", 0, 1");
    else if constexpr (N == 128)
        WGMMA_SHARED("256", 128, "k16", "f16.f16", "%128", "%129", "%130", ", 0, 1");
    else if constexpr (IS_BFLOAT16<T>)
        WGMMA_SHARED("128", 64, "k16", "bf16.bf16", "%64", "%65", "%66", ", 0, 1");
    else
        WGMMA_SHARED("128", 64, "k16", "f16.f16", "%64", "%65", "%66", ", 0, 1");
}

template <typename T, int N>
__device__ __forceinline__ void wgmma_mn_major(float (&c)[N], const unsigned (&a)[4], unsigned long long b,
                                               bool accumulate) {
    static_assert(N == 32 || N == 64 || N == 128, "");
    if constexpr (IS_BFLOAT16<T> && N == 128)
        WGMMA_REGISTERS("256", 128, "k16", "bf16.bf16", "{%128, %129, %130, %131}", "%132", "%133", ", 1");
    else if constexpr (N == 128)
        WGMMA_REGISTERS("256", 128, "k16", "f16.f16", "{%128, %129, %130, %131}", "%132", "%133", ", 1");
    else if constexpr (IS_BFLOAT16<T> && N == 64)
        WGMMA_REGISTERS("128", 64, "k16", "bf16.bf16", "{%64, %65, %66, %67}", "%68", "%69", ", 1");
    else if constexpr (N == 64)
        WGMMA_REGISTERS("128", 64, "k16", "f16.f16", "{%64, %65, %66, %67}", "%68", "%69", ", 1");
    else if constexpr (IS_BFLOAT16<T>)
        WGMMA_REGISTERS("64", 32, "k16", "bf16.bf16", "{%32, %33, %34, %35}", "%36", "%37", ", 1");
    else
        WGMMA_REGISTERS("64", 32, "k16", "f16.f16", "{%32, %33, %34, %35}", "%36", "%37", ", 1");
}

#undef FOUR
#undef REGISTERS_4
#undef REGISTERS_8
#undef REGISTERS_16
#undef REGISTERS_32
#undef REGISTERS_64
#undef REGISTERS_128
#undef NAMES_4
#undef NAMES_8
#undef NAMES_16
#undef NAMES_32
#undef NAMES_64
#undef NAMES_128
#undef WGMMA
#undef WGMMA_SHARED
#undef WGMMA_REGISTERS
#undef WGMMA_COLUMNS
#undef WGMMA_COLUMNS_REGISTERS
