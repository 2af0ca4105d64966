// Step 3 of 3: a producer warp that starts copies, two consumer warpgroups that multiply, a ring of stages between
// them. Hopper only.
//
//   out[r, j] = sum over i of a[r, i] * b[e, j, i]       for the rows r of expert e: offsets[e] <= r < offsets[e + 1]
//
// Grid: x over tiles of 256 columns of out, y over at least as many tiles of 128 rows as all groups have. A block makes
// one tile: warpgroup w multiplies its rows 64 w ... 64 w + 63 by all columns, and one thread of warp 8 has TMA copy 64
// numbers along k at a time to a ring of four stages of 48 KB.
//
// What it adds to step 2: copies and products wait for each other alone. The producer is ahead by the whole ring: it
// waits only until a stage is empty, when all 8 consumer warps have released it. The consumers wait only until a stage
// is full, and release it a step later, so that the next products are always under way. And 256 columns need fewer
// bytes for each operation.
//
// Expected bound: what a multiprocessor gets from L2, now close to the tensor cores. A step's products take 1024 cycles
// at their peak (4096 operations a cycle) and its 48 KB some 1117, at 44 bytes a cycle: at most 92% of the peak, less
// the first copies and the epilogue of each tile, in which the tensor cores are idle.
//
// What cuda_src/moe_gemm/wgmma.cu adds to this: blocks that stay and take tile after tile, so the next tile's copies
// run during the epilogue; clusters whose blocks share what they copy; a second warpgroup that runs a stage behind, so
// that one writes while the other multiplies; tiles as wide as groups are; results that stmatrix turns for 16-byte
// writes.
#include "common/hopper.cuh"
#include "common/mma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4; // of a tile; numbers along k of a stage
constexpr int A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CONSUMERS = 2 * WARPGROUP, THREADS = CONSUMERS + 32;

struct StepParams {
    TensorMap a_map, b_map; // [rows, k] and [experts, n, k], boxes of 128 x 64 and 256 x 64
    __nv_bfloat16* out;     // [rows, n]
    const int* offsets;     // [experts + 1]
    int experts, n, k;      // n, k: multiples of 8
};

struct Ring {
    unsigned long long full[STAGES], empty[STAGES];
};

// Find the group of the tile `tile` of all groups' tiles, which becomes that of its own; false if there is none.
__device__ __forceinline__ bool find_group(const StepParams& p, int& tile, int& expert) {
    for (expert = 0; expert < p.experts; ++expert) {
        const int tiles = (p.offsets[expert + 1] - p.offsets[expert] + ROWS - 1) / ROWS;
        if (tile < tiles) return true;
        tile -= tiles;
    }
    return false;
}

// The producer, a single thread. Stages are empty when the ring is passed for the first time.
__device__ __forceinline__ void produce(const StepParams& p, Ring& ring, unsigned stages, int expert, int first,
                                        int column) {
    for (int step = 0; step * DEPTH < p.k; ++step) {
        const int stage = step % STAGES;
        const unsigned to = stages + stage * STAGE_BYTES, full = shared_address(&ring.full[stage]);
        mbarrier_wait(shared_address(&ring.empty[stage]), step / STAGES + 1);
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        tma_load<EVICT_NORMAL>(to, p.a_map, step * DEPTH, first, 0, 0, full);
        tma_load<EVICT_NORMAL>(to + A_BYTES, p.b_map, step * DEPTH, column, expert, 0, full);
    }
}

// Sum a warpgroup's 64 rows times 256 columns.
__device__ __forceinline__ void consume(const StepParams& p, Ring& ring, unsigned stages, float (&c)[COLUMNS / 2]) {
    const int warpgroup = threadIdx.x / WARPGROUP, steps = (p.k + DEPTH - 1) / DEPTH;
    auto release = [&](int step) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&ring.empty[step % STAGES]));
    };
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES;
        const unsigned a = stages + stage * STAGE_BYTES + warpgroup * 64 * DEPTH * 2;
        const unsigned b = stages + stage * STAGE_BYTES + A_BYTES;
        mbarrier_wait(shared_address(&ring.full[stage]), step / STAGES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) // 16 numbers are 32 bytes
            wgmma_k_major<__nv_bfloat16>(c, k_major_descriptor(a + i * 32), k_major_descriptor(b + i * 32),
                                         step > 0 || i > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>(); // those of the step before
        if (step > 0) release(step - 1);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(c);
}

// Write a warpgroup's results: a lane has pairs of rows lane / 4 and lane / 4 + 8 of its warp's 16.
__device__ __forceinline__ void store(const StepParams& p, const float (&c)[COLUMNS / 2], int first, int column,
                                      int end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first + warp * 16 + i * 8 + lane / 4;
        if (row >= end) continue;
#pragma unroll
        for (int eight = 0; eight < COLUMNS / 8; ++eight) {
            const int j = column + eight * 8 + lane % 4 * 2;
            if (j < p.n)
                *reinterpret_cast<unsigned*>(p.out + (long long)row * p.n + j) =
                    pack<__nv_bfloat16>(c[eight * 4 + i * 2], c[eight * 4 + i * 2 + 1]);
        }
    }
}

__global__ __launch_bounds__(THREADS, 1) void multiply(const __grid_constant__ StepParams p) {
#if HAS_WGMMA
    extern __shared__ char memory[];
    __shared__ Ring ring;
    int tile = blockIdx.y, expert;
    if (!find_group(p, tile, expert)) return;
    const int first = p.offsets[expert] + tile * ROWS, end = p.offsets[expert + 1], column = blockIdx.x * COLUMNS;
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u; // swizzled tiles lie at multiples of 1024
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&ring.full[i]), 1);
            mbarrier_init(shared_address(&ring.empty[i]), CONSUMERS / 32);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce(p, ring, stages, expert, first, column);
        return;
    }
    float c[COLUMNS / 2];
    consume(p, ring, stages, c);
    store(p, c, first, column, end);
#endif
}
