// File 3 of 3: a producer warp starts copies, two consumer warpgroups multiply, and a ring of stages connects them.
// Hopper only.
//
//   out[r, j] = sum over i of a[r, i] * b[e, j, i]       for the rows r of expert e: offsets[e] <= r < offsets[e + 1]
//
// The rows of one expert are a group. Grid: x over tiles of 256 columns of out, y over the tiles of 128 rows of all
// groups. The host does not know the group sizes, so y is the largest possible number of tiles, and a block without a
// tile exits.
//
// A block computes one tile in a loop over k. A k step covers 64 elements of k. A stage is a buffer of 48 KB in shared
// memory for the operands of one k step, and four stages form a ring. One thread of warp 8, the producer, starts one
// TMA copy per operand and k step. Consumer warpgroup 0 multiplies rows 0 to 63 of the tile by all columns, and
// consumer warpgroup 1 multiplies rows 64 to 127 by all columns.
//
// Difference from file 2: different warps copy and multiply. The producer waits only until a stage is empty, which
// means that all 8 consumer warps have released the stage. So the producer can fill the whole ring ahead. The consumers
// wait only until a stage is full. They release a stage one k step later, so that MMAs are always in flight. A tile of
// 256 columns also needs fewer bytes per operation than a tile of 128 columns.
//
// Expected limit: the bandwidth from L2 to a multiprocessor. The MMAs of a k step take 1024 cycles at the tensor cores'
// peak (4096 operations per cycle). Copying the k step's 48 KB takes about 1117 cycles at 44 bytes per cycle. So at
// most 92% of the peak is reached. The tensor cores are also idle during the first copies of a tile and during its
// epilogue.
//
// cuda_src/moe_gemm/wgmma.cu has more optimizations. Its blocks are persistent, so the copies of the next tile run
// during the epilogue. The blocks of a cluster share the copied tokens by multicast. Its second consumer warpgroup runs
// one stage behind the first, so that one warpgroup writes results while the other multiplies. The width of its tiles
// is adapted to the size of the group. stmatrix transposes the results for 16-byte stores.
#include "common/hopper.cuh"
#include "common/mma.cuh"

constexpr int ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4; // tile size; k per stage; stages
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

// On entry, `tile` is an index into the row tiles of all groups. Set `expert` to the group of the tile, and `tile` to
// the tile's index within this group. Return false if `tile` is past the last tile.
__device__ __forceinline__ bool find_group(const StepParams& p, int& tile, int& expert) {
    for (expert = 0; expert < p.experts; ++expert) {
        const int tiles = (p.offsets[expert + 1] - p.offsets[expert] + ROWS - 1) / ROWS;
        if (tile < tiles) return true;
        tile -= tiles;
    }
    return false;
}

// Fill the ring. The producer, a single thread, runs this loop. In the first pass through the ring the waits return at
// once, because all stages are empty.
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

// Compute the sums of one consumer warpgroup: 64 rows by 256 columns.
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
        for (int i = 0; i < DEPTH / 16; ++i) // 16 elements are 32 bytes
            wgmma_k_major<__nv_bfloat16>(c, k_major_descriptor(a + i * 32), k_major_descriptor(b + i * 32),
                                         step > 0 || i > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>(); // wait for the MMAs of the previous k step
        if (step > 0) release(step - 1);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(c);
}

// Write a warpgroup's results. A warp holds 16 of the rows. For every 8 columns, a lane holds two neighbouring
// columns of row `lane / 4` and the same columns of row `lane / 4 + 8`.
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
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u; // swizzled tiles start at multiples of 1024
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
