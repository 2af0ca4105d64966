// Apply the gated activation between the two projections of a feed-forward layer.
//
//   out[r, c] = activate(x[r, c], x[r, inter + c])                 the formulas are in common/activation.cuh
//             = activate(x[r, 2 c], x[r, 2 c + 1])                 INTERLEAVED
//
// If `counts` is given, x is [experts, max_tokens, 2 * inter]. Rows of expert e from counts[e] on are skipped.
//
// BYTES: bytes per load, which is one vector. ITEMS: vectors per thread. GATE_LAST: the second half of a row is the
// gate. BOUNDED: `alpha` and `limit` come from the kernel's arguments.
//
// Grid: x: tiles of rows; y: ranges of long rows. `threads` = tile_columns / ITEMS neighbouring threads process a row
// of a tile. Thread t loads the vectors `t`, `t + threads`, ...
//
// Speed of light: memory bandwidth. On an H200 with bfloat16, 8192 tokens with inter = 2048 take 25 us (93% of a copy's
// bandwidth), and 4096 tokens with inter = 14336 take 85 us (97%). All activations take the same time. 64 tokens take
// 2.3 us; an empty kernel takes 0.54 us.
#include "common/activation.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"
#include "common/warp.cuh"

struct Params {
    const char* x;      // [rows, 2 * inter]
    char* out;          // [rows, inter]
    const int* counts;  // [rows / max_tokens], may be null
    long long x_stride; // bytes between rows
    int rows;
    int max_tokens; // rows per expert
    Divisor by_max_tokens;
    int columns;      // vectors per row of out
    int tile_rows;    // tile_rows * threads <= blockDim.x
    int tile_columns; // in vectors, a multiple of ITEMS
    Divisor by_threads;
    float alpha, limit; // if BOUNDED
};

template <typename T, int ACTIVATION, int BYTES, int ITEMS, bool GATE_LAST = false, bool INTERLEAVED = false,
          bool BOUNDED = false>
__global__ void __launch_bounds__(256) moe_activation(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int VECTOR = BYTES / int(sizeof(T));
    const int threads = unsigned(p.tile_columns) / ITEMS, tile_row = p.by_threads.quotient(threadIdx.x);
    const int row = blockIdx.x * p.tile_rows + tile_row;
    const int column = blockIdx.y * p.tile_columns + threadIdx.x - tile_row * threads;
    if (tile_row >= p.tile_rows || row >= p.rows) return;
    if (p.counts) {
        const int expert = p.by_max_tokens.quotient(row);
        if (row - expert * p.max_tokens >= __ldg(p.counts + expert)) return;
    }
    const char* from = p.x + row * p.x_stride + (long long)column * (INTERLEAVED ? 2 * BYTES : BYTES);
    char* to = p.out + ((long long)row * p.columns + column) * BYTES;
    Vector<BYTES> gate[ITEMS], up[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column + i * threads >= p.columns) continue;
        if constexpr (INTERLEAVED) { // both arrays hold (gate, up) pairs
            gate[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from) + 2 * i * threads);
            up[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from) + 2 * i * threads + 1);
        } else {
            gate[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from) + i * threads);
            up[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from + (long long)p.columns * BYTES) + i * threads);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (column + i * threads >= p.columns) continue;
        Vector<BYTES> out;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            float g, u;
            if constexpr (INTERLEAVED) {
                const Vector<BYTES>& pairs = 2 * j < VECTOR ? gate[i] : up[i];
                g = to_float(reinterpret_cast<const T*>(&pairs)[2 * j % VECTOR]);
                u = to_float(
                    reinterpret_cast<const T*>(VECTOR == 1 ? &up[i] : &pairs)[VECTOR == 1 ? 0 : 2 * j % VECTOR + 1]);
            } else {
                g = to_float(reinterpret_cast<const T*>(&gate[i])[j]);
                u = to_float(reinterpret_cast<const T*>(&up[i])[j]);
            }
            if constexpr (BOUNDED)
                reinterpret_cast<T*>(&out)[j] = from_float<T>(activate<ACTIVATION>(g, u, p.alpha, p.limit));
            else
                reinterpret_cast<T*>(&out)[j] =
                    from_float<T>(GATE_LAST ? activate<ACTIVATION>(u, g) : activate<ACTIVATION>(g, u));
        }
        reinterpret_cast<Vector<BYTES>*>(to)[i * threads] = out;
    }
}
