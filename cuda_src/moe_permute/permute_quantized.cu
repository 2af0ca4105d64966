// Quantize each token's row to FP8 (e4m3) and write it to the rows of all its slots. A slot is one of the `topk`
// experts of a token.
//
//   scale                       = max(max |src[t, g]|, smallest) / 448, over a group g of 128 elements, without NaNs
//   out[inverse[t, s], g]       = e4m3(src[t, g] / scale)      where 0 <= inverse[t, s] < rows
//   out_scale[inverse[t, s], g] = scale
//
// The result is bit-identical to quantize_groups followed by permute_rows, but the quantized rows are not written and
// read once more.
//
// Grid: a block handles blockDim.y tokens and blockDim.x / 8 groups of each (Tiling). Eight neighbouring threads handle
// one group: each thread quantizes 16 elements, and writes the scale for every eighth slot.
//
// Speed of light: memory traffic. A token's row is read once (2 bytes per element) and written topk times (1 byte per
// element and 4 bytes per group). With few tokens the launch takes most of the time. On an H200, with 7168 columns and
// 8 slots, 16 tokens take 7.1 us, 1024 take 23.5 us and 4096 take 86 us. The three launches that this kernel replaces
// (quantize_groups, and permute_rows twice) take 11.0 us, 30.4 us and 99 us.
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
    constexpr int EACH = 16, LANES = 8, GROUP = EACH * LANES, SLOTS = 8;
    const int lane = threadIdx.x % LANES, token = p.tiling.token();
    const int group = p.tiling.chunk() * p.tiling.tile_columns + int(threadIdx.x) / LANES;
    // The 8 lanes of a group outside the array shuffle undefined values among themselves and then return.
    const bool there = token < p.tiling.tokens && group < p.tiling.columns;
    Loaded<T, NO_ACTIVATION, EACH, 16> loaded;
    if (there) loaded.load(p.src + token * p.row_stride + (group * GROUP + lane * EACH) * (long long)sizeof(T), 0);
    const float largest = lanes_max<LANES>(magnitude<false>(loaded, 0.f));
    if (!there) return;
    const float scale = scale_of<E4M3>(largest, p.smallest, false);
    const Quotient<SMALL> quotient(scale);
    float value[EACH];
    loaded.values(value);
#pragma unroll
    for (int i = 0; i < EACH; ++i) value[i] = quotient(value[i]);
    const uint2 low = to_bytes<E4M3, EACH / 2>(reinterpret_cast<const float (&)[EACH / 2]>(value[0]), 0.f),
                high = to_bytes<E4M3, EACH / 2>(reinterpret_cast<const float (&)[EACH / 2]>(value[EACH / 2]), 0.f);
    const uint4 bytes = make_uint4(low.x, low.y, high.x, high.y);
    const int* const inverse = p.inverse + (long long)token * p.topk;
    const long long hidden = (long long)p.tiling.columns * GROUP;
    char* const out = p.out + group * GROUP + lane * EACH;
    for (int slot = 0; slot < p.topk; slot += SLOTS) {
        int row[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; ++s) row[s] = slot + s < p.topk ? inverse[slot + s] : -1;
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            if (unsigned(row[s]) < unsigned(p.rows)) *reinterpret_cast<uint4*>(out + row[s] * hidden) = bytes;
        static_assert(SLOTS == LANES, "each lane writes the scale for one slot");
        const int mine = slot + lane < p.topk ? inverse[slot + lane] : -1;
        if (unsigned(mine) < unsigned(p.rows)) p.out_scale[(long long)mine * p.tiling.columns + group] = scale;
    }
}
