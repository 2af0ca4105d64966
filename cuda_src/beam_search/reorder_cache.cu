// Give each beam the cached keys and values of its parent.
//
//   new_keys[t, b, j] = keys[t, b, parents[b, j]]   for t < steps; the same for the values
//
// Grid: `2 * steps * batch * tiles` blocks, one per tile of columns of the keys or values. A block loads the tile of
// all beams before it writes, so the caches may be reordered in place. In place, the block skips a beam that is its own
// parent. WIDTH: bytes of a vector. STEP_ON_DEVICE: the kernel reads the number of steps from device memory, so that
// one captured CUDA graph serves all steps. Then the grid is one wave of resident blocks, which loop over the tiles.
//
// Speed of light: memory bandwidth. On an H200, 512 steps of 32 beams with 16 heads of 64 bfloat16 take 30 us, as long
// as a copy.
#include "beam_search/beams.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"

struct CacheParams {
    const void* keys; // [steps, batch * beams, row] in vectors of WIDTH bytes
    const void* values;
    void* new_keys; // like keys; may be the same array
    void* new_values;
    const int* parents; // [batch, beams]
    int steps;          // STEP_ON_DEVICE: the maximum of `step`
    int batch;
    int beams;
    int vectors_per_row; // vectors per row; a row is one step of one beam
    int columns;         // vectors per row of a tile; columns * beams <= THREADS * LOADS
    int tiles;           // tiles per row
    const int* step;     // STEP_ON_DEVICE: [1], clamped to [0, steps]
};

constexpr int THREADS = 256;
constexpr int LOADS = 4;
static_assert(MAX_BEAMS <= THREADS * LOADS, "a tile has at least one column");

// `block` is the index of a tile in [keys or values, steps, batch, tiles].
template <int WIDTH> __device__ __forceinline__ void copy_tile(const CacheParams& p, unsigned block, int steps) {
    const unsigned tile = block % p.tiles, entry = block / p.tiles; // entry: [2, steps, batch]
    const unsigned entries = unsigned(steps) * p.batch;
    const bool is_value = entry >= entries;
    const unsigned index = is_value ? entry - entries : entry;
    const int* parents = p.parents + (long long)(index % p.batch) * p.beams;
    const long long offset = (long long)index * p.beams * p.vectors_per_row;
    const Vector<WIDTH>* from = static_cast<const Vector<WIDTH>*>(is_value ? p.values : p.keys) + offset;
    Vector<WIDTH>* to = static_cast<Vector<WIDTH>*>(is_value ? p.new_values : p.new_keys) + offset;
    const int first = tile * p.columns, columns = min(p.columns, p.vectors_per_row - first);

    Vector<WIDTH> loaded[LOADS];
    int target[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int item = i * THREADS + threadIdx.x, beam = item / columns;
        target[i] = -1;
        if (beam >= p.beams) continue;
        const int parent = min(max(parents[beam], 0), p.beams - 1), column = first + item - beam * columns;
        if (from == to && parent == beam) continue;
        loaded[i] = from[parent * p.vectors_per_row + column];
        target[i] = beam * p.vectors_per_row + column;
    }
    if (from == to) __syncthreads();
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        if (target[i] >= 0) to[target[i]] = loaded[i];
}

template <int WIDTH, bool STEP_ON_DEVICE = false>
__global__ void __launch_bounds__(THREADS) reorder_cache(const __grid_constant__ CacheParams p) {
    begin_behind_earlier_kernels();
    if constexpr (STEP_ON_DEVICE) {
        const int steps = min(max(*p.step, 0), p.steps);
        const unsigned blocks = 2u * unsigned(steps) * p.batch * p.tiles;
        for (unsigned block = blockIdx.x; block < blocks; block += gridDim.x) copy_tile<WIDTH>(p, block, steps);
    } else {
        copy_tile<WIDTH>(p, blockIdx.x, p.steps);
    }
}
