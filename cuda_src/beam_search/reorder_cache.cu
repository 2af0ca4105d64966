// Reorder the cached keys and values of beams, so that each beam gets the keys and values of its parent.
//
//   new_keys[t, b, j] = keys[t, b, parents[b, j]]   for t < steps; the same for the values
//
// Grid: `2 * steps * batch * tiles` blocks (the factor 2 stands for keys and values). A tile is a range of columns. A
// block loads the tile of all beams into registers before it writes, so the new cache may be the same array as the old
// cache. In that case a beam that is its own parent is skipped. WIDTH: bytes of a vector, a power of two up to 16 that
// divides the row size and the addresses. LATE: the kernel reads the number of steps from device memory (`step`), so
// that one captured CUDA graph serves all steps. The grid is then one wave of resident blocks, and each block loops
// over tiles.
//
// Speed of light: memory bandwidth; each element is read once and written once. On an H200, 512 steps of 32 beams with
// 16 heads of 64 bfloat16 take 30 us, the same bandwidth as a copy. With random parents some rows are read several
// times (after the first time from L2), and other rows are not read at all.
#include "beam_search/beams.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"

struct CacheParams {
    const void* keys; // [steps, batch * beams, row] in vectors of WIDTH bytes
    const void* values;
    void* new_keys; // like keys; may be the same array
    void* new_values;
    const int* parents; // [batch, beams]
    int steps;          // number of steps to copy; LATE: maximum of `step`
    int batch;
    int beams;
    int row;         // vectors per row; a row is one step of one beam, heads * dim elements
    int columns;     // vectors per row of a tile; columns * beams <= THREADS * LOADS
    int tiles;       // tiles per row
    const int* step; // LATE: [1], clamped to [0, steps]
};

constexpr int THREADS = 256;
constexpr int LOADS = 4;
static_assert(MAX_BEAMS <= THREADS * LOADS, "a tile has at least one column");

// Copy one tile. `block` is its index among the tiles of all steps, batch entries, keys and values.
template <int WIDTH> __device__ __forceinline__ void copy_tile(const CacheParams& p, unsigned block, int steps) {
    using Vector = typename VectorOf<WIDTH>::Type;
    const unsigned tile = block % p.tiles, entry = block / p.tiles; // entry: [2, steps, batch]
    const unsigned entries = unsigned(steps) * p.batch;
    const bool second = entry >= entries;
    const unsigned place = second ? entry - entries : entry;
    const int* parents = p.parents + (long long)(place % p.batch) * p.beams;
    const long long offset = (long long)place * p.beams * p.row;
    const Vector* from = static_cast<const Vector*>(second ? p.values : p.keys) + offset;
    Vector* to = static_cast<Vector*>(second ? p.new_values : p.new_keys) + offset;
    const int first = tile * p.columns, columns = min(p.columns, p.row - first);

    Vector held[LOADS];
    int target[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const int item = i * THREADS + threadIdx.x, beam = item / columns;
        target[i] = -1;
        if (beam >= p.beams) continue;
        const int parent = min(max(parents[beam], 0), p.beams - 1), column = first + item - beam * columns;
        if (from == to && parent == beam) continue;
        held[i] = from[parent * p.row + column];
        target[i] = beam * p.row + column;
    }
    if (from == to) __syncthreads();
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        if (target[i] >= 0) to[target[i]] = held[i];
}

template <int WIDTH, bool LATE = false>
__global__ void __launch_bounds__(THREADS) reorder_cache(const __grid_constant__ CacheParams p) {
    begin_behind_earlier_kernels();
    if constexpr (LATE) {
        const int steps = min(max(*p.step, 0), p.steps);
        const unsigned blocks = 2u * unsigned(steps) * p.batch * p.tiles;
        for (unsigned block = blockIdx.x; block < blocks; block += gridDim.x) copy_tile<WIDTH>(p, block, steps);
    } else {
        copy_tile<WIDTH>(p, blockIdx.x, p.steps);
    }
}
