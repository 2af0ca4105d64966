// Inverse of prepare_folded.cu: convert prepared weights of gemm_folded_wgmma back to MXFP4 weights and their scales.
//
// Grid: a block of FOLDED_THREADS threads for every 8 rows. A thread converts every FOLDED_THREADS-th word.
#include "common/overlap.cuh"
#include "moe_gemm/folded_prepared.cuh"

template <int THREADS = FOLDED_THREADS>
__global__ __launch_bounds__(THREADS) void restore_folded(const __grid_constant__ FoldedParams p) {
    begin_behind_earlier_kernels();
    const int groups = p.k / FOLDED_GROUP, units = (p.k + FOLDED_K - 1) / FOLDED_K;
    for (long long i = threadIdx.x; i < (long long)units * FOLDED_WORDS; i += THREADS) {
        const int in = int(i % FOLDED_WORDS), unit = int(i / FOLDED_WORDS);
        const FoldedPlace at(in);
        const int lane = at.lane, word = at.group, group = unit * (FOLDED_K / FOLDED_GROUP) + word;
        if (group >= groups) continue;
        const long long row = (long long)blockIdx.x * FOLDED_ROWS + lane / 4;
        const unsigned char* const from = p.prepared + ((long long)blockIdx.x * units + unit) * FOLDED_UNIT;
        const unsigned made = reinterpret_cast<const unsigned*>(from)[in];
        const unsigned low = (made & 0x7777) | gather_signs(made);
        const unsigned high = (made >> 16 & 0x7777) | gather_signs(made << 4);
        unsigned char* const to = p.b + row * (p.k / 2) + group * 16 + lane % 4 * 2;
        to[0] = low, to[1] = low >> 8, to[8] = high, to[9] = high >> 8;
        if (lane % 4 == 0) {
            const unsigned char* const of_row = from + FOLDED_NUMBERS + lane;
            const unsigned exponent = folded_exponent(of_row[0] | of_row[1] << 8 | of_row[2] << 16);
            p.b_scale[row * groups + group] = max(int(exponent) - int(of_row[word] >> 3), 0);
        }
    }
}
