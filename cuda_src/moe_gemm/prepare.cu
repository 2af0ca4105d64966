// Convert 4-bit weights to the units of gemm_fp4_wgmma (moe_gemm/fp4_prepared.cuh).
//
// Grid: one thread per 32-bit word of prepared elements. The thread whose word is for lane `4 * g` of the GEMM also
// converts scales of row `g` of the unit.
#include "common/overlap.cuh"
#include "moe_gemm/fp4_words.cuh"

// Return the magnitude of an e4m3 scale as 5 exponent bits (bias 16) and 3 mantissa bits; 0 stays 0.
__device__ __forceinline__ unsigned widen_scale(unsigned byte) {
    const unsigned size = byte & 127;
    if (size >= 8) return size + (9 << 3); // normal: the bias goes from 7 to 16
    if (size == 0) return 0;
    const int top = 31 - __clz(size); // subnormal: size * 2^-9
    return (top + 7) << 3 | (size << (3 - top) & 7);
}

template <int FORMAT>
__global__ __launch_bounds__(PREPARE_THREADS) void prepare_weights(const __grid_constant__ PrepareParams p) {
    begin_behind_earlier_kernels();
    constexpr int GROUP = FORMAT == MXFP4 ? 32 : 16, SCALES = 32 / GROUP; // SCALES: of a word
    const WordPlace at(p.k);
    if (at.unit >= p.units) return;
    unsigned char* const to = p.prepared + at.unit * UNIT_BYTES<FORMAT>;
    unsigned pairs[4] = {}, scales[SCALES] = {};
    if (at.first < p.k) {
        const unsigned char* const from = p.b + at.row * (p.k / 2) + at.first / 2 + at.lane % 4;
#pragma unroll
        for (int i = 0; i < SCALES; ++i) scales[i] = p.b_scale[at.row * (p.k / GROUP) + at.first / GROUP + i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned two = from[i * 4];
            if constexpr (FORMAT == NVFP4) {
                const unsigned scale = scales[i / 2];
                two = scale & 127 ? two ^ (scale & 128 ? 0x88 : 0) : 0;
            }
            pairs[i] = (two & 7) << 6 | (two & 8) << 12 | (two & 0x70) << 18 | (two & 0x80) << 24;
        }
    }
    reinterpret_cast<unsigned*>(to)[at.lane * 2 + at.half] = pack_pairs(pairs);
    if (at.lane % 4 == 0) {
#pragma unroll
        for (int i = 0; i < SCALES; ++i)
            to[UNIT_ELEMENT_BYTES + (at.lane / 4 * 2 + at.half) * SCALES + i] =
                FORMAT == MXFP4 ? min(scales[i], unsigned(LARGEST_E8M0)) : widen_scale(scales[i]);
    }
}
