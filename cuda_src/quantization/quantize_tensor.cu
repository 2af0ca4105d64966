// Quantize an array to 8 bits with one scale, given or, if DYNAMIC, from the partial maxima of largest_magnitude.
//
//   scale = min(max(partial), upper) / LARGEST, if DYNAMIC, and at least smallest / LARGEST
//   q     = v / scale, rounded to nearest, ties to even, and saturated; of INT8_AZP plus azp
//
// v is x, or activate(gate, up) of a row of two halves. Every quotient is the IEEE one.
//
// Grid: tiles of rows, see quantization/load.cuh; every block reduces the partial maxima for itself. If DYNAMIC, the
// last tiles come first: they are what largest_magnitude has read last, and may still be in L2.
//
// Speed of light: memory, of bfloat16 3 bytes a number. An H200 reaches 96% of the bandwidth of a copy at 8192 x 7168
// with a given scale; one that is found first takes another pass, see largest_magnitude.cu.
#include "common/overlap.cuh"
#include "quantization/magnitude.cuh"

struct QuantizeTensorParams {
    Rows in;
    char* q;          // [rows, k]
    float* scale_out; // one
    int* azp_out;     // one, only of INT8_AZP
    Scale scale;      // unless DYNAMIC
    const int* azp;
    const float* partial; // if DYNAMIC, maxima
    int partials;
    Scale upper; // at most so much counts as the largest
    float smallest;
    Tile tile;
};

template <typename T, int FORMAT, int ACTIVATION, int EACH, int ITEMS, bool DYNAMIC>
__global__ void __launch_bounds__(256, 4) quantize_tensor(const __grid_constant__ QuantizeTensorParams p) {
    begin_behind_earlier_kernels();
    using In = Loaded<T, ACTIVATION, EACH, EACH == 1 ? sizeof(T) : 16>;
    constexpr int SIZE = EACH * int(sizeof(T));
    In loaded[ITEMS];
    int row, column;
    const bool mine =
        p.tile.locate<ITEMS>(p.in, DYNAMIC ? gridDim.x - 1 - blockIdx.x : blockIdx.x, blockIdx.y, row, column);
    const int threads = p.tile.threads<ITEMS>();
    const char* from = p.in.x + row * p.in.stride + column * (long long)SIZE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (mine && column + i * threads < p.tile.columns)
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
    char* to = p.q + ((long long)row * p.tile.columns + column) * EACH;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (!mine || column + i * threads >= p.tile.columns) continue;
        float value[EACH];
        loaded[i].values(value);
#pragma unroll
        for (int j = 0; j < EACH; ++j) value[j] = quotient(value[j]);
        *reinterpret_cast<Unit<EACH>*>(to + i * threads * EACH) = to_bytes<FORMAT, EACH, false>(value, azp);
    }
}
