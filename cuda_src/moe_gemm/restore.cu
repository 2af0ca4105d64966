// Inverse of prepare.cu, on the same grid.
#include "common/overlap.cuh"
#include "moe_gemm/fp4_words.cuh"

// Inverse of widen_scale (prepare.cu): return a prepared scale as e4m3.
__device__ __forceinline__ unsigned narrow_scale(unsigned wide) {
    if (wide == 0) return 0;
    const int exponent = int(wide >> 3) - 9;
    return exponent > 0 ? exponent << 3 | (wide & 7) : (8 | (wide & 7)) >> (1 - exponent);
}

template <int FORMAT>
__global__ __launch_bounds__(PREPARE_THREADS) void restore_weights(const __grid_constant__ PrepareParams p) {
    begin_behind_earlier_kernels();
    constexpr int GROUP = FORMAT == MXFP4 ? 32 : 16, SCALES = 32 / GROUP;
    const WordPlace at(p.k);
    if (at.unit >= p.units || at.first >= p.k) return;
    const unsigned char* const from = p.prepared + at.unit * UNIT_BYTES<FORMAT>;
    unsigned pairs[4];
    unpack_pairs(pairs, reinterpret_cast<const unsigned*>(from)[at.lane * 2 + at.half]);
    unsigned char* const to = p.b + at.row * (p.k / 2) + at.first / 2 + at.lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[i * 4] = (pairs[i] >> 6 & 7) | (pairs[i] >> 12 & 8) | (pairs[i] >> 18 & 0x70) | (pairs[i] >> 24 & 0x80);
    if (at.lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            const unsigned scale = from[UNIT_ELEMENT_BYTES + (at.lane / 4 * 2 + at.half) * SCALES + i];
            p.b_scale[at.row * (p.k / GROUP) + at.first / GROUP + i] = FORMAT == MXFP4 ? scale : narrow_scale(scale);
        }
    }
}
