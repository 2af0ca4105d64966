// Inverse of prepare_folded.cu.
//
// Grid: a block of FOLDED_THREADS threads for every 8 rows. A thread converts every FOLDED_THREADS-th word.
#include "common/overlap.cuh"
#include "moe_gemm/folded_prepared.cuh"

template <int THREADS = FOLDED_THREADS>
__global__ __launch_bounds__(THREADS) void restore_folded(const __grid_constant__ FoldedParams p) {
    begin_behind_earlier_kernels();
    const int groups = p.k / FOLDED_GROUP, units = (p.k + FOLDED_K - 1) / FOLDED_K;
    for (long long i = threadIdx.x; i < (long long)units * FOLDED_WORDS; i += THREADS) {
        const int unit_word = int(i % FOLDED_WORDS), unit = int(i / FOLDED_WORDS);
        const FoldedPlace at(unit_word);
        const int lane = at.lane, unit_group = at.group, group = unit * (FOLDED_K / FOLDED_GROUP) + unit_group;
        if (group >= groups) continue;
        const long long row = (long long)blockIdx.x * FOLDED_ROWS + lane / 4;
        const unsigned char* const from = p.prepared + ((long long)blockIdx.x * units + unit) * FOLDED_UNIT_BYTES;
        const unsigned packed = reinterpret_cast<const unsigned*>(from)[unit_word];
        const unsigned low = (packed & 0x7777) | gather_signs(packed);
        const unsigned high = (packed >> 16 & 0x7777) | gather_signs(packed << 4);
        unsigned char* const to = p.b + row * (p.k / 2) + group * 16 + lane % 4 * 2;
        to[0] = low, to[1] = low >> 8, to[8] = high, to[9] = high >> 8;
        if (lane % 4 == 0) {
            const unsigned char* const scale_word = from + FOLDED_ELEMENT_BYTES + lane;
            const unsigned exponent = folded_exponent(scale_word[0] | scale_word[1] << 8 | scale_word[2] << 16);
            p.b_scale[row * groups + group] = max(int(exponent) - int(scale_word[unit_group] >> 3), 0);
        }
    }
}
