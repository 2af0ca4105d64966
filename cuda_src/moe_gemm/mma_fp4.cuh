// Forms of gemm_mma with 4-bit weights (e2m1). The weights are converted to T in registers.
//
// The MMA may take the elements along k in any order, if tokens and weights use the same order. Here a lane has 8
// neighbouring elements of every 32: one register of weights and 16 bytes of tokens. One shift and a mask turn nibbles
// `i` and `i + 4` of the register into a pair of 16-bit floats. So elements `i` and `i + 4` of the tokens are paired
// too.
//
// A nibble has a sign, two exponent bits and one mantissa bit. The exponent and mantissa bits are moved to the lowest
// two exponent bits and the highest mantissa bit of T. The result is the element times 2^-126 (bfloat16) or 2^-14
// (float16), also if the element is subnormal. To undo this, a pair is multiplied by a factor: its scale times 2^126 or
// 2^14, divided by MISSING. Without this division the factor would overflow. Finally the sums are multiplied by
// MISSING.
//
// The factors are exact for all e4m3 scales. In bfloat16 they are exact for E8M0 scales from 2^-100 to 2^33; larger
// E8M0 scales become infinite. In float16, E8M0 scales would leave the range of T. So the partial sum of the 32
// elements that share a scale is multiplied by the scale in float32.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "moe_gemm/fp4_pairs.cuh"
#include "moe_gemm/mma_copies.cuh"

// Return nibbles I and I + 4 of eight nibbles as a pair of T, times 2^-126 (bfloat16) or 2^-14 (float16).
template <typename T, int I> __device__ __forceinline__ unsigned nibbles_to_pair(unsigned eight) {
    constexpr int LEFT = (IS_BFLOAT16<T> ? 6 : 9) - 4 * I;
    constexpr unsigned MAGNITUDES = 0x00070007u << (IS_BFLOAT16<T> ? 6 : 9);
    const unsigned shifted = LEFT >= 0 ? eight << (LEFT > 0 ? LEFT : 0) : eight >> (LEFT < 0 ? -LEFT : 0);
    return (shifted & MAGNITUDES) | (eight << (12 - 4 * I) & 0x80008000u);
}

// Layout of a stage in shared memory. A stage is one step along k: tokens, weights, scales (one per GROUP elements).
//
// 16-byte chunks are swizzled so that the chunks that eight lanes read or write at once are in different banks. FOLDED:
// the weights are multiplied by their scales before the MMA. A lane then has 16 consecutive elements of every 64 along
// k, which share a scale: 2 chunks of tokens and 8 bytes of weights. If not FOLDED, a lane has 8 consecutive elements
// of every 32.
template <class Block_, int GROUP, bool FOLDED> struct Fp4Layout {
    using Block = Block_;
    static constexpr int A_LINE = Block::STEP * 2, B_LINE = Block::STEP / 2; // bytes of a row
    static constexpr int GROUPS = Block::STEP / GROUP;                       // scales of a row
    // A slot is the space for one row's scales. It has one extra word, because cp.async copies whole words and the
    // scales may begin in the middle of a word.
    static constexpr int SLOT_WORDS = GROUPS / 4 + 1, SLOT = SLOT_WORDS * 4;
    static constexpr int B = Block::TOKENS * A_LINE, SCALES = B + Block::WEIGHTS * B_LINE;
    static constexpr int BYTES = (SCALES + Block::WEIGHTS * SLOT + 127) / 128 * 128;
    static_assert(Block::STEP == 128, "");

    static __device__ __forceinline__ int a_at(int row, int chunk) {
        chunk ^= (row & 1) * (FOLDED ? 1 : 4);
        return row * A_LINE + chunk * 16;
    }
    static __device__ __forceinline__ int b_at(int row, int chunk) {
        chunk ^= FOLDED ? row & 2 : row >> 1 & 3;
        return row * B_LINE + chunk * 16;
    }

    // Bytes of a row in memory.
    static __device__ __forceinline__ long long a_bytes(int k) { return 2ll * k; }
    static __device__ __forceinline__ long long b_bytes(int k) { return k / 2; }
};

// Copies the group scales (one per GROUP elements) of each row of weights to the row's slot in a stage, as whole 32-bit
// words.
template <class Block, int GROUP> struct GroupScaleCopies {
    static constexpr int GROUPS = Block::STEP / GROUP, SLOT_WORDS = GROUPS / 4 + 1;

    int thread;
    const MmaTile<Block>* tile;
    int groups;              // scales of a row
    long long groups_before; // scales of all earlier experts

    __device__ __forceinline__ void begin(const GemmParams& p, const MmaTile<Block>& of, const MmaThread<Block>& me) {
        thread = me.thread;
        tile = &of;
        groups = p.k / GROUP;
        groups_before = (long long)of.group.expert * p.n * groups;
    }

    // Return the index in b_scale of the first scale of row `r` of the tile's weights.
    __device__ __forceinline__ long long first_of(int r) const {
        return groups_before + (long long)tile->weight_of(r) * groups;
    }

    __device__ __forceinline__ void start(int step, unsigned to) {
        constexpr int ITEMS = Block::WEIGHTS * SLOT_WORDS, THREADS = Block::THREADS;
#pragma unroll
        for (int i = 0; i < (ITEMS + THREADS - 1) / THREADS; ++i) {
            const int item = thread + i * THREADS, r = item / SLOT_WORDS, word = item % SLOT_WORDS;
            // The extra word of a slot is needed only if the size of a row of scales is not a multiple of 4 bytes.
            if ((ITEMS % THREADS == 0 || item < ITEMS) && (groups % 4 != 0 || word < GROUPS / 4)) {
                const long long begin = first_of(r);
                const long long from = ((begin + step * GROUPS) & ~3ll) + word * 4;
                const int left = int(min(begin + groups - from, 4ll));
                copy_part_async<4>(to + item * 4, static_cast<const char*>(tile->p.b_scale) + from, max(left, 0));
            }
        }
    }
};

// MXFP4 scales: 2^(byte - 127) for every 32 elements. A row has several scales in a step along k. `of_lane` returns the
// index of the scale that a lane needs for a block of 64 elements. `factor` returns the scale times 2^126, divided by
// MISSING, in both halves of a register.
template <typename T> struct E8m0Scale {
    static constexpr int GROUP = 32;
    static constexpr float MISSING = IS_BFLOAT16<T> ? 0x1p32f : 0x1p14f;

    static __device__ __forceinline__ int of_lane(int block, int pair) { return block * 2 + pair / 2; }
    static __device__ __forceinline__ unsigned factor(unsigned scale) {
        return min(scale + 94, 255u) * 0x00800080u; // 2^(scale - 127) * 2^126 * 2^-32
    }
};

// NVFP4 scales: one e4m3 scale for every 16 elements.
template <typename T> struct E4m3Scale {
    static constexpr int GROUP = 16;
    static constexpr float MISSING = IS_BFLOAT16<T> ? 0x1p32f : 0x1p7f;

    static __device__ __forceinline__ int of_lane(int block, int pair) { return block * 4 + pair; }
    static __device__ __forceinline__ unsigned factor(unsigned scale) {
        unsigned pairs[2];
        to_halves<__nv_fp8_e4m3>(pairs, scale * 0x0101);
        if constexpr (IS_BFLOAT16<T>) {
            const float factor = __half2float(__ushort_as_half((unsigned short)pairs[0])) * 0x1p94f; // * 2^126 * 2^-32
            return pack<T>(factor, factor);
        } else {
            return multiply_pairs<T>(pairs[0], 0x58005800); // scale * 2^14 * 2^-7
        }
    }
};

// All arrays of the mainloop (Fp4Products). The other structs have no arrays, because arrays in structs cost registers:
// the compiler splits a struct with an array into registers only after it has unrolled all loops over the array.
template <int M, int N> struct Fp4Registers {
    uint2 nibbles[N];       // 4-bit weights of each MMA tile, 16 per lane
    unsigned factors[N];    // FoldedScales: factors of the weights, as pairs
    unsigned a[M][2][4];    // 32 elements of each token, as two A fragments
    unsigned b[4];          // 8 weights, as two B fragments
    int slots_at[2];        // GroupScales: positions of the scales of the lane's two columns in a stage
    float group_factors[2]; // GroupScales: the scales of the two columns
};

// The scales of a row start at byte 0, 1, 2 or 3 of its slot. Return the start of row `r + 8` of the tile minus the
// start of row `r`. With interleaved gates the two rows are neighbours in the weights, so their starts may differ.
// Otherwise they are a multiple of 8 rows apart in the weights, and the difference is 0.
template <class Form, typename SlotOf> __device__ __forceinline__ int shift_of_up(int r, const SlotOf& slot_of) {
    if constexpr (Form::Block::GATED && !Form::Block::HALVES) return slot_of(r + 8) - slot_of(r) - 8 * Form::SLOT;
    return 0;
}

// Multiplies the weights by their scales before the MMA. `slots_at`: byte offset in a stage of the slots of the warp's
// weights.
template <typename T, class Form> struct FoldedScales {
    using Block = typename Form::Block;
    using Registers = Fp4Registers<Block::M, Block::N>;
    Registers& r;
    const MmaThread<Block>& me;
    const int slot_at, shift;

    template <typename SlotOf>
    __device__ __forceinline__ FoldedScales(Registers& r, const MmaThread<Block>& me, int slots_at,
                                            const SlotOf& slot_of)
        : r(r), me(me), slot_at(slots_at + slot_of(me.row)), shift(shift_of_up<Form>(me.row, slot_of)) {}

    // Load the lane's weights of MMA tile `n`: 16 elements of block `block`, which share a scale. A block is 64
    // elements along k. `line`: the lane's row of weights in the stage.
    __device__ __forceinline__ void load(const char* stage, const char* line, int block, int n) {
        r.nibbles[n] = *reinterpret_cast<const uint2*>(line + (block * 32 ^ (me.row & 2) * 16) + me.pair * 8);
        const int at = slot_at + n * 8 * Form::SLOT + (n % 2 ? shift : 0);
        const unsigned scale =
            *reinterpret_cast<const unsigned char*>(stage + at + Form::Scale::of_lane(block, me.pair));
        r.factors[n] = Form::Scale::factor(scale);
    }

    // Return the index of the 16-byte chunk of a token that half `half` of the lane's nibbles multiplies.
    __device__ __forceinline__ int chunk_of(int half) const { return me.pair * 2 | (half ^ (me.row & 1)); }

    __device__ __forceinline__ void multiply(MmaSums<Block>& sums, const char*, int, int, int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r.b[i] = multiply_pairs<T>(r.b[i], r.factors[n]);
#pragma unroll
        for (int m = 0; m < Block::M; ++m) {
            mma_m16n8k16<T>(sums[m][n], r.a[m][0], r.b[0], r.b[1]);
            mma_m16n8k16<T>(sums[m][n], r.a[m][1], r.b[2], r.b[3]);
        }
    }
};

// Multiplies the partial sums of 32 elements along k by their scales, after the MMAs.
template <typename T, class Form> struct GroupScales {
    using Block = typename Form::Block;
    using Registers = Fp4Registers<Block::M, Block::N>;
    Registers& r;
    const MmaThread<Block>& me;
    const int shift_0, shift_1; // results of shift_of_up for the lane's two columns

    template <typename SlotOf>
    __device__ __forceinline__ GroupScales(Registers& r, const MmaThread<Block>& me, int slots_at,
                                           const SlotOf& slot_of)
        : r(r), me(me), shift_0(shift_of_up<Form>(me.pair * 2, slot_of)),
          shift_1(shift_of_up<Form>(me.pair * 2 + 1, slot_of)) {
        r.slots_at[0] = slots_at + slot_of(me.pair * 2), r.slots_at[1] = slots_at + slot_of(me.pair * 2 + 1);
    }

    // Load the lane's weights of MMA tile `n`: 8 of every 32 elements of block `block`. A block is 64 elements along k.
    // `line`: the lane's row of weights in the stage.
    __device__ __forceinline__ void load(const char*, const char* line, int block, int n) {
        const int at = (block * 2 ^ (me.row >> 1 & 3)) * 16 + me.pair * 4;
        r.nibbles[n].x = *reinterpret_cast<const unsigned*>(line + at);
        r.nibbles[n].y = *reinterpret_cast<const unsigned*>(line + (at ^ 16));
    }

    __device__ __forceinline__ int chunk_of(int half) const { return me.pair | (half ^ (me.row & 1)) * 4; }

    __device__ __forceinline__ void multiply(MmaSums<Block>& sums, const char* stage, int block, int half, int n) {
        const int at = n * 8 * Form::SLOT + block * 2 + half;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int shift = n % 2 == 0 ? 0 : i ? shift_1 : shift_0;
            const unsigned scale = *reinterpret_cast<const unsigned char*>(stage + r.slots_at[i] + at + shift);
            r.group_factors[i] = __uint_as_float(scale << 23);
        }
#pragma unroll
        for (int m = 0; m < Block::M; ++m) {
            float of_group[4] = {0.f, 0.f, 0.f, 0.f};
            mma_m16n8k16<T>(of_group, r.a[m][0], r.b[0], r.b[1]);
            mma_m16n8k16<T>(of_group, r.a[m][1], r.b[2], r.b[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] += of_group[i] * r.group_factors[i % 2];
        }
    }
};

// Mainloop, 64 elements along k at a time.
template <typename T, class Form> struct Fp4Products : Fp4Registers<Form::Block::M, Form::Block::N> {
    using Block = typename Form::Block;
    static constexpr int M = Block::M, N = Block::N;
    static constexpr unsigned LAST_STAGE = (Block::STAGES - 1) * Form::BYTES;
    using Fp4Registers<M, N>::a, Fp4Registers<M, N>::b, Fp4Registers<M, N>::nibbles;

    // Load 32 elements along k of the tokens of each MMA tile, as two A fragments. A lane has 8 elements of each of its
    // two rows; elements `i` and `i + 4` form a pair.
    __device__ __forceinline__ void load_tokens(const char* from) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 eight = *reinterpret_cast<const uint4*>(from + (m * 16 + j * 8) * Form::A_LINE);
                a[m][0][j] = __byte_perm(eight.x, eight.z, 0x5410);
                a[m][0][j + 2] = __byte_perm(eight.x, eight.z, 0x7632);
                a[m][1][j] = __byte_perm(eight.y, eight.w, 0x5410);
                a[m][1][j + 2] = __byte_perm(eight.y, eight.w, 0x7632);
            }
    }

    // Convert eight nibbles to two B fragments.
    __device__ __forceinline__ void convert(unsigned eight) {
        b[0] = nibbles_to_pair<T, 0>(eight), b[1] = nibbles_to_pair<T, 1>(eight);
        b[2] = nibbles_to_pair<T, 2>(eight), b[3] = nibbles_to_pair<T, 3>(eight);
    }

    // Run the mainloop: multiply the whole tile and add to `sums`. The copies of the first `STAGES - 1` steps are
    // already started.
    __device__ __forceinline__ void add_to(MmaSums<Block>& sums, MmaCopies<Form>& copies, const MmaThread<Block>& me,
                                           const char* shared) {
        const int a_at = (me.token_warp * M * 16 + me.row) * Form::A_LINE;
        const int b_at = Form::B + (me.weight_warp * N * 8 + me.row) * Form::B_LINE;
        // Return the byte offset of the first scale of row `r`, which is up to 3 bytes into its slot.
        auto slot_of = [&](int r) { return r * Form::SLOT + int(copies.scales.first_of(r) & 3); };
        typename Form::Scales scales(*this, me, Form::SCALES + me.weight_warp * N * 8 * Form::SLOT, slot_of);
        unsigned stage_at = 0;
#pragma unroll 1
        for (int step = 0; step < copies.steps; ++step) {
            cp_async_wait_group<Block::STAGES - 2>();
            __syncthreads();
            copies.start(step + Block::STAGES - 1, stage_at == 0 ? LAST_STAGE : stage_at - Form::BYTES);
            const char* const stage = shared + stage_at;
#pragma unroll 1
            for (int block = 0; block < Block::STEP / 64; ++block) {
#pragma unroll
                for (int n = 0; n < N; ++n) scales.load(stage, stage + b_at + n * 8 * Form::B_LINE, block, n);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    load_tokens(stage + a_at + block * 128 + scales.chunk_of(half) * 16);
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        convert(half == 0 ? nibbles[n].x : nibbles[n].y);
                        scales.multiply(sums, stage, block, half, n);
                    }
                }
            }
            stage_at = stage_at == LAST_STAGE ? 0 : stage_at + Form::BYTES;
        }
    }
};

// Factor of the finished sums: MISSING or, with NVFP4, MISSING times the expert's global scale.
template <class Form> struct GlobalFactor {
    using Block = typename Form::Block;
    float factor;

    __device__ __forceinline__ GlobalFactor(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>&,
                                            MmaSums<Block>&) {
        constexpr float MISSING = Form::Scale::MISSING;
        factor = p.b_global_scale ? MISSING * p.b_global_scale[tile.group.expert] : MISSING;
    }
    __device__ __forceinline__ float of_row(int) const { return factor; }
};

template <bool FIRST, typename A, typename B> struct Conditional {
    using Type = A;
};
template <typename A, typename B> struct Conditional<false, A, B> {
    using Type = B;
};

// MXFP4 and NVFP4: tokens are T, weights have 4 bits. FOLDED: the weights are multiplied by their scales before the
// MMA.
template <typename T, template <typename> class Scale_, bool FOLDED, class Block>
struct Fp4Form : Fp4Layout<Block, Scale_<T>::GROUP, FOLDED> {
    using Scale = Scale_<T>;
    using ScaleCopies = GroupScaleCopies<Block, Scale::GROUP>;
    using Scales = typename Conditional<FOLDED, FoldedScales<T, Fp4Form>, GroupScales<T, Fp4Form>>::Type;
    using Products = Fp4Products<T, Fp4Form>;
    using Factors = GlobalFactor<Fp4Form>;
};
