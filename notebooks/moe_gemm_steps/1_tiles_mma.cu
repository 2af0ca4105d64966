// File 1 of 3: copy tiles to shared memory and multiply them on tensor cores by mma.sync. Needs sm_80 or later.
//
//   out[r, j] = sum over i of a[r, i] * b[e, j, i]       for the rows r of expert e: offsets[e] <= r < offsets[e + 1]
//
// The rows of one expert are a group. Grid: x over tiles of 128 columns of out, y over the tiles of 128 rows of all
// groups. The host does not know the group sizes, so y is the largest possible number of tiles, and a block without a
// tile exits.
//
// A block of 8 warps computes one tile in a loop over k. A k step is one iteration: it covers 32 elements of k. The
// block copies these elements of 128 rows of a and of 128 rows of weights to shared memory, through registers. Each
// warp then multiplies 64 rows by 32 columns, in fragments of 16 x 8.
//
// Difference from a kernel with one thread per output: each element is used for 128 outputs after it is read from
// memory once, and tensor cores multiply.
//
// Expected limit: the latency of the loads. A block waits about 800 cycles for the loads of a k step. The MMAs of the
// k step then take 256 cycles at the tensor cores' peak (4096 operations per cycle). During the wait only the other
// blocks on the multiprocessor multiply. Every operand also passes through registers twice.
#include "common/mma.cuh"

constexpr int TILE = 128, DEPTH = 32, THREADS = 256; // TILE: rows and columns; DEPTH: k per k step
constexpr int CHUNKS = DEPTH / 8;                    // 16-byte chunks of a row in a k step
constexpr int PITCH = DEPTH * 2 + 16;                // row pitch in bytes: no bank conflicts in ldmatrix
constexpr int M = 4, N = 4;                          // fragments per warp: M along rows, N along columns

struct StepParams {
    const __nv_bfloat16 *a, *b; // [rows, k], [experts, n, k]
    __nv_bfloat16* out;         // [rows, n]
    const int* offsets;         // [experts + 1]
    int rows, experts, n, k;    // n, k: multiples of 8
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

// Copy one k step (32 elements) of 128 rows to shared memory. Rows after `last` are replaced by row `last`, and
// elements after k are replaced by 0.
__device__ __forceinline__ void copy_rows(char* to, const __nv_bfloat16* from, int first, int last, int k, int step) {
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, along = step * DEPTH + chunk * 8;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (along < k) eight = *reinterpret_cast<const uint4*>(from + (long long)min(first + row, last) * k + along);
        *reinterpret_cast<uint4*>(to + row * PITCH + chunk * 16) = eight;
    }
}

// Multiply a warp's 64 rows by its 32 columns for 16 elements of k, which start at byte `along` of a row.
__device__ __forceinline__ void multiply_part(float (&c)[M][N][4], unsigned a_at, unsigned b_at, int along) {
    const int lane = threadIdx.x % 32;
    unsigned a[M][4], b[N / 2][4];
#pragma unroll
    for (int m = 0; m < M; ++m) ldmatrix(a[m], a_at + (m * 16 + lane % 16) * PITCH + along + lane / 16 * 16);
#pragma unroll
    for (int n = 0; n < N / 2; ++n)
        ldmatrix(b[n], b_at + (n * 16 + lane % 8 + lane / 16 * 8) * PITCH + along + lane / 8 % 2 * 16);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
            mma_m16n8k16<__nv_bfloat16>(c[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
}

// Write a warp's results, which start at row `row` and column `column`. In each fragment a lane holds two neighbouring
// columns of row `lane / 4` and the same columns of row `lane / 4 + 8`.
__device__ __forceinline__ void store(const StepParams& p, const float (&c)[M][N][4], int row, int column, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int r = row + m * 16 + i * 8 + lane / 4, j = column + n * 8 + lane % 4 * 2;
                if (r < end && j < p.n)
                    *reinterpret_cast<unsigned*>(p.out + (long long)r * p.n + j) =
                        pack<__nv_bfloat16>(c[m][n][i * 2], c[m][n][i * 2 + 1]);
            }
}

__global__ __launch_bounds__(THREADS, 2) void multiply(const __grid_constant__ StepParams p) {
    __shared__ __align__(16) char a[TILE * PITCH], b[TILE * PITCH];
    int tile = blockIdx.y, expert;
    if (!find_group(p, tile, expert)) return;
    const int first = p.offsets[expert] + tile * TILE, end = p.offsets[expert + 1], column = blockIdx.x * TILE;
    const __nv_bfloat16* const weights = p.b + (long long)expert * p.n * p.k;
    const int row_warp = threadIdx.x / 32 / 4, column_warp = threadIdx.x / 32 % 4;
    const unsigned a_at = shared_address(a) + row_warp * M * 16 * PITCH;
    const unsigned b_at = shared_address(b) + column_warp * N * 8 * PITCH;

    float c[M][N][4] = {};
    for (int step = 0; step * DEPTH < p.k; ++step) {
        copy_rows(a, p.a, first, end - 1, p.k, step);
        copy_rows(b, weights, column, p.n - 1, p.k, step);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) multiply_part(c, a_at, b_at, i * 32);
        __syncthreads();
    }
    store(p, c, first + row_warp * M * 16, column + column_warp * N * 8, end);
}
