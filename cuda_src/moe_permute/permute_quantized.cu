// Quantize each token's row to FP8 (e4m3) and write it to the rows of all its slots (its `topk` experts).
//
//   scale                       = max(max |src[t, g]|, smallest) / 448, over a group g of 128 elements, ignoring NaNs
//   out[inverse[t, s], g]       = e4m3(src[t, g] / scale)      where 0 <= inverse[t, s] < rows
//   out_scale[inverse[t, s], g] = scale
//
// The result is bit-identical to quantize_groups followed by permute_rows.
//
// Grid: a block handles blockDim.y tokens and blockDim.x / 8 groups of each (Tiling). Eight neighbouring threads handle
// one group; a thread quantizes 16 elements and writes the scale for every eighth slot.
//
// Speed of light: memory traffic. On an H200, with 7168 columns and 8 slots, 16 tokens take 7.1 us, 1024 take 23.5 us
// and 4096 take 86 us. The three launches that this kernel replaces, one quantize_groups and
// two permute_rows, take 11.0 us, 30.4 us and 99 us.
#include "common/overlap.cuh"
#include "moe_permute/rows.cuh"
#include "quantization/magnitude.cuh"

struct PermuteQuantizedParams {
    const char* src;    // T [tokens, hidden], rows `row_stride` bytes apart
    const int* inverse; // [tokens, topk]
    char* out;          // e4m3 [rows, hidden]
    float* out_scale;   // [rows, hidden / 128]
    long long row_stride;
    int topk;
    int rows;
    float smallest;
    Tiling tiling; // its columns are groups
};

// T: __nv_bfloat16 or __half.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS, 4) permute_quantized(const __grid_constant__ PermuteQuantizedParams p) {
    begin_behind_earlier_kernels();
    constexpr int PER_THREAD = 16, LANES = 8, GROUP = PER_THREAD * LANES, SLOTS = 8;
    const int lane = threadIdx.x % LANES, token = p.tiling.token();
    const int group = p.tiling.tile() * p.tiling.tile_columns + int(threadIdx.x) / LANES;
    // The lanes of a group outside the array only take part in the shuffles.
    const bool in_range = token < p.tiling.tokens && group < p.tiling.columns;
    Loaded<T, NO_ACTIVATION, PER_THREAD, 16> loaded;
    if (in_range)
        loaded.load(p.src + token * p.row_stride + (group * GROUP + lane * PER_THREAD) * (long long)sizeof(T), 0);
    const float largest = lanes_max<LANES>(magnitude<false>(loaded, 0.f));
    if (!in_range) return;
    const float scale = scale_of<E4M3>(largest, p.smallest, false);
    const Quotient<SMALL> quotient(scale);
    float value[PER_THREAD];
    loaded.values(value);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) value[i] = quotient(value[i]);
    const uint2 low = to_bytes<E4M3, PER_THREAD / 2>(reinterpret_cast<const float (&)[PER_THREAD / 2]>(value[0]), 0.f),
                high = to_bytes<E4M3, PER_THREAD / 2>(
                    reinterpret_cast<const float (&)[PER_THREAD / 2]>(value[PER_THREAD / 2]), 0.f);
    const uint4 bytes = make_uint4(low.x, low.y, high.x, high.y);
    const int* const inverse = p.inverse + (long long)token * p.topk;
    const long long hidden = (long long)p.tiling.columns * GROUP;
    char* const out = p.out + group * GROUP + lane * PER_THREAD;
    for (int slot = 0; slot < p.topk; slot += SLOTS) {
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) row[s] = slot + s < p.topk ? inverse[slot + s] : -1;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            if (unsigned(row[s]) < unsigned(p.rows)) *reinterpret_cast<uint4*>(out + row[s] * hidden) = bytes;
        static_assert(SLOTS == LANES, "each lane writes the scale for one slot");
        const int lane_row = slot + lane < p.topk ? inverse[slot + lane] : -1;
        if (unsigned(lane_row) < unsigned(p.rows)) p.out_scale[(long long)lane_row * p.tiling.columns + group] = scale;
    }
}
