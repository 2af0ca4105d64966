// Weights of 4 bits to the layout that gemm_fp4_wgmma takes (moe_gemm/fp4_prepared.cuh), and back.
//
// Grid: threads of 256 over all words of numbers, of 32 numbers of a lane each, from unit to unit. A thread converts its
// word, and lane 4 g of a unit the scales of row g.
#include "moe_gemm/fp4_prepared.cuh"

constexpr int PREPARE_THREADS = 256, UNIT_WORDS = UNIT_NUMBERS / 4;

struct PrepareParams {
    const unsigned char* b;       // [experts, n, k / 2]
    const unsigned char* b_scale; // [experts, n, k / 32] or [experts, n, k / 16]
    unsigned char* prepared;      // [experts, n / 8, ceil(k / 64), UNIT_BYTES]
    long long units;
    int k;
};

struct RestoreParams {
    const unsigned char* prepared;
    unsigned char* b;
    unsigned char* b_scale;
    long long units;
    int k;
};

// The place of a thread's word: lane l of unit `unit`, half h.
struct WordPlace {
    long long unit, row; // row: of all experts' rows
    int half, lane, first; // first: the first number along k of the half

    __device__ __forceinline__ WordPlace(int k) {
        const long long word = (long long)blockIdx.x * PREPARE_THREADS + threadIdx.x;
        const int along_k = (k + UNIT_K - 1) / UNIT_K, in = int(word % UNIT_WORDS);
        unit = word / UNIT_WORDS;
        lane = in / 2, half = in % 2;
        row = unit / along_k * UNIT_ROWS + lane / 4;
        first = int(unit % along_k) * UNIT_K + half * 32;
    }
};

// Scale `byte` of e4m3 with its sign removed, as 5 bits of exponent (bias 16) and 3 of mantissa; 0 stays 0.
__device__ __forceinline__ unsigned widen_scale(unsigned byte) {
    const unsigned size = byte & 127;
    if (size >= 8) return size + (9 << 3); // exponent e - 7, so e + 9
    if (size == 0) return 0;
    const int top = 31 - __clz(size); // size * 2^-9
    return (top + 7) << 3 | (size << (3 - top) & 7);
}

// The reverse.
__device__ __forceinline__ unsigned narrow_scale(unsigned wide) {
    if (wide == 0) return 0;
    const int exponent = int(wide >> 3) - 9;
    return exponent > 0 ? exponent << 3 | (wide & 7) : (8 | (wide & 7)) >> (1 - exponent);
}

// FORMAT: MXFP4 or NVFP4.
template <int FORMAT>
__global__ __launch_bounds__(PREPARE_THREADS) void prepare_weights(const __grid_constant__ PrepareParams p) {
    constexpr int GROUP = FORMAT == MXFP4 ? 32 : 16, SCALES = 32 / GROUP; // scales of a word
    const WordPlace at(p.k);
    if (at.unit >= p.units) return;
    unsigned char* const to = p.prepared + at.unit * UNIT_BYTES<FORMAT>;
    unsigned pairs[4] = {}, scales[SCALES] = {};
    if (at.first < p.k) {
        const unsigned char* const from = p.b + at.row * (p.k / 2) + at.first / 2 + at.lane % 4;
#pragma unroll
        for (int i = 0; i < SCALES; ++i)
            scales[i] = p.b_scale[at.row * (p.k / GROUP) + at.first / GROUP + i];
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
            to[UNIT_NUMBERS + (at.lane / 4 * 2 + at.half) * SCALES + i] =
                FORMAT == MXFP4 ? min(scales[i], unsigned(LARGEST_E8M0)) : widen_scale(scales[i]);
    }
}

template <int FORMAT>
__global__ __launch_bounds__(PREPARE_THREADS) void restore_weights(const __grid_constant__ RestoreParams p) {
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
            const unsigned scale = from[UNIT_NUMBERS + (at.lane / 4 * 2 + at.half) * SCALES + i];
            p.b_scale[at.row * (p.k / GROUP) + at.first / GROUP + i] = FORMAT == MXFP4 ? scale : narrow_scale(scale);
        }
    }
}
