// Convert MXFP4 weights to the units of gemm_folded_wgmma (moe_gemm/folded_prepared.cuh).
//
// Grid: a block for every 8 rows of weights. Warp w finds the largest scale of row w. Then each thread writes every
// FOLDED_THREADS-th word of elements. If the word is for lane `4 * g` of the GEMM, the thread also writes a byte of the
// scale word of row `g`.
#include "common/overlap.cuh"
#include "moe_gemm/folded_prepared.cuh"

template <int THREADS = FOLDED_THREADS>
__global__ __launch_bounds__(THREADS) void prepare_folded(const __grid_constant__ FoldedParams p) {
    begin_behind_earlier_kernels();
    static_assert(THREADS / 32 == FOLDED_ROWS, "");
    __shared__ int exponents[FOLDED_ROWS];
    const int warp = threadIdx.x / 32, groups = p.k / FOLDED_GROUP;
    const int units = (p.k + FOLDED_K - 1) / FOLDED_K;
    const long long first_row = (long long)blockIdx.x * FOLDED_ROWS;
    {
        const unsigned char* const scales = p.b_scale + (first_row + warp) * groups;
        int largest = 0;
        for (int i = threadIdx.x % 32; i < groups; i += 32) largest = max(largest, int(scales[i]));
        largest = __reduce_max_sync(~0u, largest);
        if (threadIdx.x % 32 == 0) exponents[warp] = largest;
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < (long long)units * FOLDED_WORDS; i += THREADS) {
        const int unit_word = int(i % FOLDED_WORDS), unit = int(i / FOLDED_WORDS);
        const FoldedPlace at(unit_word);
        const int lane = at.lane, unit_group = at.group, unit_row = lane / 4;
        const long long row = first_row + unit_row;
        unsigned char* const to = p.prepared + ((long long)blockIdx.x * units + unit) * FOLDED_UNIT_BYTES;
        const int group = unit * (FOLDED_K / FOLDED_GROUP) + unit_group;
        unsigned packed = 0;
        if (group < groups) {
            const unsigned char* const from = p.b + row * (p.k / 2) + group * 16 + lane % 4 * 2;
            const unsigned low = from[0] | from[1] << 8, high = from[8] | from[9] << 8;
            packed = (low & 0x7777) | (high & 0x7777) << 16 | spread_signs(low) | spread_signs(high) >> 4;
        }
        reinterpret_cast<unsigned*>(to)[unit_word] = packed;
        if (lane % 4 == 0) {
            const unsigned exponent = exponents[unit_row];
            const unsigned scale = group < groups ? p.b_scale[row * groups + group] : 0;
            const unsigned exponent_bits = unit_group == 0   ? exponent & 7
                                           : unit_group == 1 ? exponent >> 3 & 7
                                           : unit_group == 2 ? exponent >> 6
                                                             : 0;
            const unsigned difference = group < groups ? min(exponent - scale, unsigned(FOLDED_MAX_DIFFERENCE))
                                                       : unsigned(FOLDED_MAX_DIFFERENCE);
            to[FOLDED_ELEMENT_BYTES + lane + unit_group] = difference << 3 | exponent_bits;
        }
    }
}
