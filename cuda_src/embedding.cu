// Look up the rows of an embedding table, and add to each that of its position.
//
//   position  = step + position_ids[row], or step + row % period
//   out[row]  = table[ids[row]]                                                   embedding_copy
//   out[row]  = table[ids[row]] * scale + position_table[position], in float32,
//               rounded once                                                      embedding_add
//
// A row whose id or position is out of range is zeros.
//
// Grid: x over groups of rows, y over parts of a row. Thread: the same WIDTH bytes of ROWS_AT_ONCE rows, all of which
// it loads before it stores one. As many neighbouring threads as a row needs, up to the block, share a row; several
// rows share a block if they are short.
//
// WIDTH: the bytes per load, a power of two up to 16 that divides the rows and the addresses. A copy needs to know no
// more; an addition knows the type T of the elements.
#include "common/numeric.cuh"

constexpr int THREADS = 128;
constexpr int ROWS_AT_ONCE = 4;

struct Params {
    const void* table;          // [vocab, hidden]
    const void* ids;            // [rows]  int64 if ids_are_int64, else int32
    const void* position_table; // [positions, hidden], of additions
    const void* position_ids;   // [rows], or [1] if one_position; null: the position follows from the row
    void* out;                  // [rows, hidden]
    long long vocab;
    long long positions;
    long long step;
    int rows;
    int chunks; // WIDTH bytes each, in a row
    int log2_threads_per_row;
    int period; // rows per sequence
    int ids_are_int64;
    int position_ids_are_int64;
    int one_position;
    float scale;
};

template <int BYTES> struct Word;
template <> struct Word<16> {
    using type = uint4;
};
template <> struct Word<8> {
    using type = uint2;
};
template <> struct Word<4> {
    using type = unsigned;
};
template <> struct Word<2> {
    using type = unsigned short;
};

__device__ __forceinline__ long long load_index(const void* indices, int at, bool is_int64) {
    return is_int64 ? static_cast<const long long*>(indices)[at] : static_cast<const int*>(indices)[at];
}

// What the thread has to do: ROWS_AT_ONCE rows, `distance` apart, and its chunk of them.
struct Part {
    int first_row, distance, chunk;
    __device__ explicit Part(const Params& p) {
        distance = THREADS >> p.log2_threads_per_row;
        first_row = blockIdx.x * (distance * ROWS_AT_ONCE) + (threadIdx.x >> p.log2_threads_per_row);
        chunk = (blockIdx.y << p.log2_threads_per_row) + (threadIdx.x & ((1 << p.log2_threads_per_row) - 1));
    }
};

template <int WIDTH> __global__ __launch_bounds__(THREADS) void embedding_copy(const __grid_constant__ Params p) {
    using Load = typename Word<WIDTH>::type;
    const Part part(p);
    if (part.chunk >= p.chunks) return;
    long long id[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i)
        id[i] = load_index(p.ids, min(part.first_row + i * part.distance, p.rows - 1), p.ids_are_int64);
    Load value[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        value[i] = Load{};
        if (id[i] >= 0 && id[i] < p.vocab)
            value[i] = __ldg(static_cast<const Load*>(p.table) + id[i] * p.chunks + part.chunk);
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const int row = part.first_row + i * part.distance;
        if (row < p.rows) static_cast<Load*>(p.out)[(long long)row * p.chunks + part.chunk] = value[i];
    }
}

template <typename T, int WIDTH>
__global__ __launch_bounds__(THREADS) void embedding_add(const __grid_constant__ Params p) {
    using Load = typename Word<WIDTH>::type;
    constexpr int COUNT = WIDTH / sizeof(T);
    const Part part(p);
    if (part.chunk >= p.chunks) return;
    long long id[ROWS_AT_ONCE], position[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const int row = min(part.first_row + i * part.distance, p.rows - 1);
        id[i] = load_index(p.ids, row, p.ids_are_int64);
        position[i] = p.position_ids ? load_index(p.position_ids, p.one_position ? 0 : row, p.position_ids_are_int64)
                                     : row % p.period;
    }
    Load word[ROWS_AT_ONCE], added[ROWS_AT_ONCE];
    bool valid[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        position[i] += p.step;
        valid[i] = id[i] >= 0 && id[i] < p.vocab && position[i] >= 0 && position[i] < p.positions;
        word[i] = added[i] = Load{};
        if (valid[i]) {
            word[i] = __ldg(static_cast<const Load*>(p.table) + id[i] * p.chunks + part.chunk);
            added[i] = __ldg(static_cast<const Load*>(p.position_table) + position[i] * p.chunks + part.chunk);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i) {
        const T* x = reinterpret_cast<const T*>(&word[i]);
        const T* y = reinterpret_cast<const T*>(&added[i]);
        Load result;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            // Not fused, so that the result is what the formula gives anywhere, to the bit.
            const float scaled = __fmul_rn(to_float(x[j]), p.scale);
            reinterpret_cast<T*>(&result)[j] = from_float<T>(__fadd_rn(scaled, to_float(y[j])));
        }
        const int row = part.first_row + i * part.distance;
        if (row < p.rows) static_cast<Load*>(p.out)[(long long)row * p.chunks + part.chunk] = result;
    }
}
