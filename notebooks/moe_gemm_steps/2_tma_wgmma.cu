// File 2 of 3: one warpgroup starts TMA copies of tiles and multiplies the tiles by wgmma. Hopper only.
//
//   out[r, j] = sum over i of a[r, i] * b[e, j, i]       for the rows r of expert e: offsets[e] <= r < offsets[e + 1]
//
// The rows of one expert are a group. Grid: x over tiles of 128 columns of out, y over the tiles of 128 rows of all
// groups. The host does not know the group sizes, so y is the largest possible number of tiles, and a block without a
// tile exits.
//
// A block is one warpgroup. It computes one tile in a loop over k. A k step is one iteration: it covers 64 elements of
// k, with one MMA chain for the upper 64 rows of the tile and one for the lower 64 rows. A stage is a buffer in shared
// memory for the operands of one k step. There are two stages: thread 0 starts the copies of the next k step to one
// stage; then all threads wait for the data of the current k step in the other stage, and multiply them.
//
// Difference from file 1: operands do not pass through registers. TMA writes whole tiles to shared memory, and wgmma
// reads the tiles there. The tiles are swizzled: 16-byte chunk c of row r is at position c ^ (r % 8) of the row. One
// instruction of one thread copies 16 KB, and a barrier counts the bytes. TMA may also copy rows of the next group, but
// no thread writes the results of these rows.
//
// Expected limit: the bandwidth from L2 to a multiprocessor. The MMAs of a k step take 512 cycles at the tensor cores'
// peak (4096 operations per cycle). Copying the k step's 32 KB takes about 745 cycles at 44 bytes per cycle. So at most
// 69% of the peak is reached. A warpgroup waits for its MMAs before it continues. So a multiprocessor runs three
// blocks, and the tensor cores work for one block while another waits.
#include "common/hopper.cuh"
#include "common/mma.cuh"

constexpr int TILE = 128, DEPTH = 64, STAGES = 2; // TILE: rows and columns; DEPTH: k per stage
constexpr int TILE_BYTES = TILE * DEPTH * 2;      // bytes of one operand per stage

struct StepParams {
    TensorMap a_map, b_map; // [rows, k] and [experts, n, k], boxes of 128 x 64
    __nv_bfloat16* out;     // [rows, n]
    const int* offsets;     // [experts + 1]
    int experts, n, k;      // n, k: multiples of 8
};

// On entry, `tile` is an index into the row tiles of all groups. Set `expert` to the group of the tile, and `tile` to
// the tile's index within this group. Return false if `tile` is past the last tile.
__device__ __forceinline__ bool find_group(const StepParams& p, int& tile, int& expert) {
    for (expert = 0; expert < p.experts; ++expert) {
        const int tiles = (p.offsets[expert + 1] - p.offsets[expert] + TILE - 1) / TILE;
        if (tile < tiles) return true;
        tile -= tiles;
    }
    return false;
}

// Write 64 rows of results. A warp holds 16 of the rows. For every 8 columns, a lane holds two neighbouring
// columns of row `lane / 4` and the same columns of row `lane / 4 + 8`.
__device__ __forceinline__ void store(const StepParams& p, const float (&c)[64], int first, int column, int end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first + warp * 16 + i * 8 + lane / 4;
        if (row >= end) continue;
#pragma unroll
        for (int eight = 0; eight < TILE / 8; ++eight) {
            const int j = column + eight * 8 + lane % 4 * 2;
            if (j < p.n)
                *reinterpret_cast<unsigned*>(p.out + (long long)row * p.n + j) =
                    pack<__nv_bfloat16>(c[eight * 4 + i * 2], c[eight * 4 + i * 2 + 1]);
        }
    }
}

__global__ __launch_bounds__(WARPGROUP, 3) void multiply(const __grid_constant__ StepParams p) {
#if HAS_WGMMA
    extern __shared__ char memory[];
    __shared__ unsigned long long full[STAGES];
    int tile = blockIdx.y, expert;
    if (!find_group(p, tile, expert)) return;
    const int first = p.offsets[expert] + tile * TILE, end = p.offsets[expert + 1], column = blockIdx.x * TILE;
    const unsigned stages = (shared_address(memory) + 1023) & ~1023u; // swizzled tiles start at multiples of 1024
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(shared_address(&full[i]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    auto copy = [&](int step) {
        const unsigned to = stages + step % STAGES * 2 * TILE_BYTES, barrier = shared_address(&full[step % STAGES]);
        mbarrier_arrive_expect_tx(barrier, 2 * TILE_BYTES);
        tma_load<EVICT_NORMAL>(to, p.a_map, step * DEPTH, first, 0, 0, barrier);
        tma_load<EVICT_NORMAL>(to + TILE_BYTES, p.b_map, step * DEPTH, column, expert, 0, barrier);
    };

    const int steps = (p.k + DEPTH - 1) / DEPTH;
    float upper[64], lower[64]; // sums of rows 0 to 63 and of rows 64 to 127
    if (threadIdx.x == 0) copy(0);
    for (int step = 0; step < steps; ++step) {
        // The stage of the next k step is free: all threads have waited for the MMAs of the previous k step.
        if (threadIdx.x == 0 && step + 1 < steps) copy(step + 1);
        const unsigned a = stages + step % STAGES * 2 * TILE_BYTES, b = a + TILE_BYTES;
        mbarrier_wait(shared_address(&full[step % STAGES]), step / STAGES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) { // 16 elements are 32 bytes
            const bool add = step > 0 || i > 0;
            wgmma_k_major<__nv_bfloat16>(upper, k_major_descriptor(a + i * 32), k_major_descriptor(b + i * 32), add);
            wgmma_k_major<__nv_bfloat16>(lower, k_major_descriptor(a + TILE_BYTES / 2 + i * 32),
                                         k_major_descriptor(b + i * 32), add);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        wgmma_fence_operand(upper), wgmma_fence_operand(lower);
        __syncthreads();
    }
    store(p, upper, first, column, end);
    store(p, lower, first + TILE / 2, column, end);
#endif
}
