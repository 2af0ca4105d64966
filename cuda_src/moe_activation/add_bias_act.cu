// Add a bias and apply an activation without a gate.
//
//   z[r, c]   = x[r, c] + bias[c]                                                                         in float32
//   out[r, c] = z * (1 + erf(z / sqrt(2))) / 2                                          GELU
//             = z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 z^3))) / 2                   GELU_TANH
//             = z / (1 + exp(-z))                                                       SILU
//             = max(z, 0)                                                               RELU
//             = z / (1 + exp(-1.702 z))                                                 GELU_QUICK
//
// For float32 the kernel uses CUDA's accurate functions, with errors of a few units in the last place. For 16-bit types
// the errors of common/activation.cuh are far below the rounding error of the result.
//
// BYTES: bytes per load, which is one vector. ROWS: rows per thread; all use the same vector of the bias.
//
// Grid: x: tiles of rows; y: ranges of long rows. In a tile, tile_columns neighbouring threads process ROWS rows.
//
// Speed of light: memory bandwidth. For each result the kernel reads one element, writes one, and computes ten to
// thirty flops.
#include "common/activation.cuh"
#include "common/overlap.cuh"
#include "common/vectors.cuh"

enum { RELU = ACTIVATIONS, GELU_QUICK }; // numbered after the activations of common/activation.cuh

struct Params {
    const char* x;      // [rows, inter]
    const char* bias;   // [inter], null: 0
    char* out;          // [rows, inter]
    long long x_stride; // bytes between rows
    int rows;
    int columns;      // vectors per row
    int tile_rows;    // groups of ROWS rows; tile_rows * tile_columns <= blockDim.x
    int tile_columns; // in vectors
    Divisor by_threads;
};

template <typename T, int ACTIVATION> __device__ __forceinline__ float activated(float z) {
    if constexpr (ACTIVATION == RELU) return z < 0.f ? 0.f : z; // a comparison, so that NaN stays NaN
    if constexpr (ACTIVATION == GELU_QUICK) {
        const float y = ALPHA * z;
        return sizeof(T) < 4 ? z * sigmoid_of(y) : z / (1.f + expf(-y));
    }
    if constexpr (sizeof(T) < 4) return activate<ACTIVATION>(z, 1.f);
    if constexpr (ACTIVATION == GELU) return z * normcdff(z);
    // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)). The right side loses no digits where tanh is near -1.
    const float y = ACTIVATION == SILU ? z : 1.5957691216f * (z + .044715f * z * z * z);
    return z / (1.f + expf(-y));
}

template <typename T, int ACTIVATION, int BYTES, int ROWS>
__global__ void __launch_bounds__(256) add_bias_act(const __grid_constant__ Params p) {
    begin_behind_earlier_kernels();
    constexpr int VECTOR = BYTES / int(sizeof(T));
    const int tile_row = p.by_threads.quotient(threadIdx.x);
    const int row = (blockIdx.x * p.tile_rows + tile_row) * ROWS;
    const int column = blockIdx.y * p.tile_columns + threadIdx.x - tile_row * p.tile_columns;
    if (tile_row >= p.tile_rows || column >= p.columns) return;
    const char* from = p.x + row * p.x_stride + (long long)column * BYTES;
    char* to = p.out + ((long long)row * p.columns + column) * BYTES;
    Vector<BYTES> bias = {}, vector[ROWS];
    if (p.bias) bias = __ldg(reinterpret_cast<const Vector<BYTES>*>(p.bias) + column);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        // The read-only cache is not used, because `out` may be `x`.
        if (row + i < p.rows) vector[i] = __ldcs(reinterpret_cast<const Vector<BYTES>*>(from + i * p.x_stride));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        if (row + i >= p.rows) return;
        Vector<BYTES> out;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            float z = to_float(reinterpret_cast<const T*>(&vector[i])[j]);
            if (p.bias) z = __fadd_rn(z, to_float(reinterpret_cast<const T*>(&bias)[j]));
            reinterpret_cast<T*>(&out)[j] = from_float<T>(activated<T, ACTIVATION>(z));
        }
        *reinterpret_cast<Vector<BYTES>*>(to + (long long)i * p.columns * BYTES) = out;
    }
}
