// Quantize an array to 8 bits with one scale. The scale is given or, if DYNAMIC, computed from the partial maxima that
// largest_magnitude found.
//
//   scale = max(min(max(partial), upper), smallest) / LARGEST, if DYNAMIC
//   q     = v / scale, rounded to nearest, ties to even, and saturated; INT8_AZP adds azp before it saturates
//
// v is x or, with an activation, activate(gate, up) of the two halves of a row. LARGEST is the largest value of the
// 8-bit format. Every quotient has the bits of an IEEE division.
//
// Grid: tiles of rows (quantization/load.cuh). If DYNAMIC, the tiles are processed from the last to the first, because
// the tiles that largest_magnitude read last may still be in L2.
//
// Speed of light: memory bandwidth, with 3 bytes per bfloat16 element. With a given scale, on an H200, the kernel
// reaches 96% of the bandwidth of a copy for 8192 x 7168 elements.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"

struct QuantizeTensorParams {
    Rows in;
    char* q;          // [rows, k]
    float* scale_out; // [1]
    int* azp_out;     // [1], INT8_AZP only
    Scale scale;      // the given scale, unless DYNAMIC
    const int* azp;
    const float* partial; // DYNAMIC: partial maxima
    int partials;
    Scale upper; // upper limit of max |v|
    float smallest;
    Tile tile;
};

template <typename T, int FORMAT, int ACTIVATION, int VECTOR, int ITEMS, bool DYNAMIC>
__global__ void __launch_bounds__(256, 4) quantize_tensor(const __grid_constant__ QuantizeTensorParams p) {
    begin_behind_earlier_kernels();
    using Input = Loaded<T, ACTIVATION, VECTOR, VECTOR == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = VECTOR * int(sizeof(T));
    Input loaded[ITEMS];
    int row, column;
    const bool active =
        p.tile.locate<ITEMS>(p.in, DYNAMIC ? gridDim.x - 1 - blockIdx.x : blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>();
    const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (active && column + i * threads < p.tile.columns)
            loaded[i].load(from + i * threads * SIZE, p.tile.columns * (long long)SIZE);
    float scale, azp = 0;
    if constexpr (DYNAMIC) {
        float largest = 0;
        for (int i = threadIdx.x; i < p.partials; i += blockDim.x) largest = fmaxf(largest, __ldg(p.partial + i));
        scale = scale_of<FORMAT>(fminf(block_max(largest), p.upper.load()), p.smallest, false);
    } else {
        scale = p.scale.load();
    }
    if constexpr (FORMAT == INT8_AZP) azp = float(__ldg(p.azp));
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *p.scale_out = scale;
        if constexpr (FORMAT == INT8_AZP) *p.azp_out = __ldg(p.azp);
    }
    const Quotient<ANY> quotient(scale);
    char* out = p.q + ((long long)row * p.tile.columns + column) * VECTOR;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!active || column + i * threads >= p.tile.columns) continue;
        float value[VECTOR];
        loaded[i].values(value);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) value[j] = quotient(value[j]);
        *reinterpret_cast<Vector<VECTOR>*>(out + i * threads * VECTOR) = to_bytes<FORMAT, VECTOR, false>(value, azp);
    }
}
