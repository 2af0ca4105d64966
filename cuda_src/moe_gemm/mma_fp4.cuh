// Traits of gemm_mma for 4-bit weights (e2m1), which are converted to T in registers.
//
// The MMA may take the elements along k in any order that tokens and weights share. A lane has 8 neighbouring elements
// of every 32: one register of weights and 16 bytes of tokens. One shift and a mask turn nibbles `i` and `i + 4` of the
// register into a pair of 16-bit floats, so elements `i` and `i + 4` of the tokens are paired too.
//
// The exponent and mantissa bits of a nibble become the lowest exponent bits and the highest mantissa bit of T. The
// result is the element times 2^-126 (bfloat16) or 2^-14 (float16), also if the element is subnormal. So a pair is
// multiplied by a factor: its scale times 2^126 or 2^14, divided by EPILOGUE_FACTOR against overflow. The epilogue
// multiplies the sums by EPILOGUE_FACTOR.
//
// The factors of e4m3 scales are exact. In bfloat16, the factors of E8M0 scales from 2^-100 to 2^33 are exact, and the
// factors of larger scales are infinite. In float16, E8M0 scales would leave the range of T, so they multiply the
// partial sums of 32 elements in float32.
#pragma once
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "moe_gemm/fp4_pairs.cuh"
#include "moe_gemm/mma_copies.cuh"

// Return nibbles I and I + 4 as a pair of T, times 2^-126 (bfloat16) or 2^-14 (float16).
template <typename T, int I> __device__ __forceinline__ unsigned nibbles_to_pair(unsigned eight) {
    constexpr int LEFT = (IS_BFLOAT16<T> ? 6 : 9) - 4 * I;
    constexpr unsigned MAGNITUDES = 0x00070007u << (IS_BFLOAT16<T> ? 6 : 9);
    const unsigned shifted = LEFT >= 0 ? eight << (LEFT > 0 ? LEFT : 0) : eight >> (LEFT < 0 ? -LEFT : 0);
    return (shifted & MAGNITUDES) | (eight << (12 - 4 * I) & 0x80008000u);
}

// Layout of a stage. FOLDED: the weights are multiplied by their scales before the MMA, and a lane has 16 consecutive
// elements of every 64 along k, because they share a scale. Otherwise a lane has 8 of every 32. Chunks of 16 bytes are
// swizzled against bank conflicts of eight lanes.
template <class Block_, int GROUP, bool FOLDED> struct Fp4Layout {
    using Block = Block_;
    static constexpr int A_ROW_BYTES = Block::STEP * 2, B_ROW_BYTES = Block::STEP / 2;
    static constexpr int GROUPS = Block::STEP / GROUP; // scales of a row
    // A slot holds a row's scales. They may begin inside a 32-bit word, which cp.async copies whole, so a slot has one
    // extra word.
    static constexpr int SLOT_WORDS = GROUPS / 4 + 1, SLOT = SLOT_WORDS * 4;
    static constexpr int B = Block::TOKENS * A_ROW_BYTES, SCALES = B + Block::WEIGHTS * B_ROW_BYTES;
    static constexpr int BYTES = (SCALES + Block::WEIGHTS * SLOT + 127) / 128 * 128;
    static_assert(Block::STEP == 128, "");

    static __device__ __forceinline__ int a_at(int row, int chunk) {
        chunk ^= (row & 1) * (FOLDED ? 1 : 4);
        return row * A_ROW_BYTES + chunk * 16;
    }
    static __device__ __forceinline__ int b_at(int row, int chunk) {
        chunk ^= FOLDED ? row & 2 : row >> 1 & 3;
        return row * B_ROW_BYTES + chunk * 16;
    }

    // Row sizes in memory.
    static __device__ __forceinline__ long long a_bytes(int k) { return 2ll * k; }
    static __device__ __forceinline__ long long b_bytes(int k) { return k / 2; }
};

// Copies the group scales of each row of weights to the row's slot.
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
        constexpr int WORDS = Block::WEIGHTS * SLOT_WORDS, THREADS = Block::THREADS;
#pragma unroll
        for (int i = 0; i < (WORDS + THREADS - 1) / THREADS; ++i) {
            const int word_index = thread + i * THREADS, r = word_index / SLOT_WORDS, word = word_index % SLOT_WORDS;
            // The extra word is needed if a row of scales is not a multiple of 4 bytes.
            if ((WORDS % THREADS == 0 || word_index < WORDS) && (groups % 4 != 0 || word < GROUPS / 4)) {
                const long long begin = first_of(r);
                const long long from = ((begin + step * GROUPS) & ~3ll) + word * 4;
                const int left = int(min(begin + groups - from, 4ll));
                copy_part_async<4>(to + word_index * 4, static_cast<const char*>(tile->p.b_scale) + from, max(left, 0));
            }
        }
    }
};

// MXFP4. `of_lane`: index of a lane's scale in a block of 64 elements. `factor`: a pair whose two halves both hold the
// scale times `2^126 / EPILOGUE_FACTOR`.
template <typename T> struct E8m0Scale {
    static constexpr int GROUP = 32;
    static constexpr float EPILOGUE_FACTOR = IS_BFLOAT16<T> ? 0x1p32f : 0x1p14f;

    static __device__ __forceinline__ int of_lane(int block, int pair) { return block * 2 + pair / 2; }
    static __device__ __forceinline__ unsigned factor(unsigned scale) {
        return min(scale + 94, 255u) * 0x00800080u; // 2^(scale - 127) * 2^126 * 2^-32
    }
};

// NVFP4.
template <typename T> struct E4m3Scale {
    static constexpr int GROUP = 16;
    static constexpr float EPILOGUE_FACTOR = IS_BFLOAT16<T> ? 0x1p32f : 0x1p7f;

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

// The arrays of the mainloop. As members of the other structs they would cost registers: the compiler splits a struct
// with an array into registers only after it has unrolled all loops over the array.
template <int M, int N> struct Fp4Registers {
    uint2 nibbles[N];       // of each MMA tile, 16 per lane
    unsigned factors[N];    // FoldedScales: factors of the weights, as pairs
    unsigned a[M][2][4];    // 32 elements of each token, as two A fragments
    unsigned b[4];          // 8 weights, as two B fragments
    int slots_at[2];        // GroupScales: offsets in a stage of the scales of the lane's two columns
    float group_factors[2]; // GroupScales: scales of the two columns
};

// Scales start at byte 0 to 3 of their slot. Return the start in row `r + 8` minus the start in row `r`. With
// interleaved gates the rows are neighbours in the weights, and the starts may differ. Otherwise the rows are a
// multiple of 8 apart, and the starts are equal.
template <class Traits, typename SlotOf> __device__ __forceinline__ int shift_of_up(int r, const SlotOf& slot_of) {
    if constexpr (Traits::Block::GATED && !Traits::Block::HALVES) return slot_of(r + 8) - slot_of(r) - 8 * Traits::SLOT;
    return 0;
}

// Multiplies the weights by their scales before the MMA. `slots_at`: byte offset of the warp's slots in a stage.
template <typename T, class Traits> struct FoldedScales {
    using Block = typename Traits::Block;
    using Registers = Fp4Registers<Block::M, Block::N>;
    Registers& r;
    const MmaThread<Block>& me;
    const int slot_at, shift;

    template <typename SlotOf>
    __device__ __forceinline__ FoldedScales(Registers& r, const MmaThread<Block>& me, int slots_at,
                                            const SlotOf& slot_of)
        : r(r), me(me), slot_at(slots_at + slot_of(me.row)), shift(shift_of_up<Traits>(me.row, slot_of)) {}

    // Load the lane's 16 weights of MMA tile `n` in block `block` of 64 elements along k.
    __device__ __forceinline__ void load(const char* stage, const char* row, int block, int n) {
        r.nibbles[n] = *reinterpret_cast<const uint2*>(row + (block * 32 ^ (me.row & 2) * 16) + me.pair * 8);
        const int at = slot_at + n * 8 * Traits::SLOT + (n % 2 ? shift : 0);
        const unsigned scale =
            *reinterpret_cast<const unsigned char*>(stage + at + Traits::Scale::of_lane(block, me.pair));
        r.factors[n] = Traits::Scale::factor(scale);
    }

    // Return the 16-byte chunk of a token that the first half (`half` 0) or second half (`half` 1) of the nibbles
    // multiplies.
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

// Multiplies the partial sums of 32 elements along k by their scales.
template <typename T, class Traits> struct GroupScales {
    using Block = typename Traits::Block;
    using Registers = Fp4Registers<Block::M, Block::N>;
    Registers& r;
    const MmaThread<Block>& me;
    const int shift_0, shift_1; // shift_of_up for the lane's two columns

    template <typename SlotOf>
    __device__ __forceinline__ GroupScales(Registers& r, const MmaThread<Block>& me, int slots_at,
                                           const SlotOf& slot_of)
        : r(r), me(me), shift_0(shift_of_up<Traits>(me.pair * 2, slot_of)),
          shift_1(shift_of_up<Traits>(me.pair * 2 + 1, slot_of)) {
        r.slots_at[0] = slots_at + slot_of(me.pair * 2), r.slots_at[1] = slots_at + slot_of(me.pair * 2 + 1);
    }

    // Load the lane's 2 x 8 weights of MMA tile `n` in block `block` of 64 elements along k.
    __device__ __forceinline__ void load(const char*, const char* row, int block, int n) {
        const int at = (block * 2 ^ (me.row >> 1 & 3)) * 16 + me.pair * 4;
        r.nibbles[n].x = *reinterpret_cast<const unsigned*>(row + at);
        r.nibbles[n].y = *reinterpret_cast<const unsigned*>(row + (at ^ 16));
    }

    __device__ __forceinline__ int chunk_of(int half) const { return me.pair | (half ^ (me.row & 1)) * 4; }

    __device__ __forceinline__ void multiply(MmaSums<Block>& sums, const char* stage, int block, int half, int n) {
        const int at = n * 8 * Traits::SLOT + block * 2 + half;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int shift = n % 2 == 0 ? 0 : i ? shift_1 : shift_0;
            const unsigned scale = *reinterpret_cast<const unsigned char*>(stage + r.slots_at[i] + at + shift);
            r.group_factors[i] = __uint_as_float(scale << 23);
        }
#pragma unroll
        for (int m = 0; m < Block::M; ++m) {
            float group_sums[4] = {0.f, 0.f, 0.f, 0.f};
            mma_m16n8k16<T>(group_sums, r.a[m][0], r.b[0], r.b[1]);
            mma_m16n8k16<T>(group_sums, r.a[m][1], r.b[2], r.b[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] += group_sums[i] * r.group_factors[i % 2];
        }
    }
};

// The mainloop, which processes 64 elements along k at a time.
template <typename T, class Traits> struct Fp4Products : Fp4Registers<Traits::Block::M, Traits::Block::N> {
    using Block = typename Traits::Block;
    static constexpr int M = Block::M, N = Block::N;
    static constexpr unsigned LAST_STAGE = (Block::STAGES - 1) * Traits::BYTES;
    using Fp4Registers<M, N>::a, Fp4Registers<M, N>::b, Fp4Registers<M, N>::nibbles;

    // Load 32 elements along k of the tokens as A fragments. Elements `i` and `i + 4` of a lane's 8 form a pair.
    __device__ __forceinline__ void load_tokens(const char* from) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 eight = *reinterpret_cast<const uint4*>(from + (m * 16 + j * 8) * Traits::A_ROW_BYTES);
                a[m][0][j] = __byte_perm(eight.x, eight.z, 0x5410);
                a[m][0][j + 2] = __byte_perm(eight.x, eight.z, 0x7632);
                a[m][1][j] = __byte_perm(eight.y, eight.w, 0x5410);
                a[m][1][j + 2] = __byte_perm(eight.y, eight.w, 0x7632);
            }
    }

    __device__ __forceinline__ void convert(unsigned eight) {
        b[0] = nibbles_to_pair<T, 0>(eight), b[1] = nibbles_to_pair<T, 1>(eight);
        b[2] = nibbles_to_pair<T, 2>(eight), b[3] = nibbles_to_pair<T, 3>(eight);
    }

    // Run the mainloop. The copies of the first `STAGES - 1` steps are already started.
    __device__ __forceinline__ void add_to(MmaSums<Block>& sums, MmaCopies<Traits>& copies, const MmaThread<Block>& me,
                                           const char* shared) {
        const int a_at = (me.token_warp * M * 16 + me.row) * Traits::A_ROW_BYTES;
        const int b_at = Traits::B + (me.weight_warp * N * 8 + me.row) * Traits::B_ROW_BYTES;
        // Return the byte offset of the first scale of row `r`.
        auto slot_of = [&](int r) { return r * Traits::SLOT + int(copies.scales.first_of(r) & 3); };
        typename Traits::Scales scales(*this, me, Traits::SCALES + me.weight_warp * N * 8 * Traits::SLOT, slot_of);
        unsigned stage_at = 0;
#pragma unroll 1
        for (int step = 0; step < copies.steps; ++step) {
            cp_async_wait_group<Block::STAGES - 2>();
            __syncthreads();
            copies.start(step + Block::STAGES - 1, stage_at == 0 ? LAST_STAGE : stage_at - Traits::BYTES);
            const char* const stage = shared + stage_at;
#pragma unroll 1
            for (int block = 0; block < Block::STEP / 64; ++block) {
#pragma unroll
                for (int n = 0; n < N; ++n) scales.load(stage, stage + b_at + n * 8 * Traits::B_ROW_BYTES, block, n);
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
            stage_at = stage_at == LAST_STAGE ? 0 : stage_at + Traits::BYTES;
        }
    }
};

template <class Traits> struct GlobalFactor {
    using Block = typename Traits::Block;
    float factor;

    __device__ __forceinline__ GlobalFactor(const GemmParams& p, const MmaTile<Block>& tile, const MmaThread<Block>&,
                                            MmaSums<Block>&) {
        constexpr float EPILOGUE_FACTOR = Traits::Scale::EPILOGUE_FACTOR;
        factor = p.b_global_scale ? EPILOGUE_FACTOR * p.b_global_scale[tile.group.expert] : EPILOGUE_FACTOR;
    }
    __device__ __forceinline__ float of_row(int) const { return factor; }
};

template <bool FIRST, typename A, typename B> struct Conditional {
    using Type = A;
};
template <typename A, typename B> struct Conditional<false, A, B> {
    using Type = B;
};

template <typename T, template <typename> class Scale_, bool FOLDED, class Block>
struct Fp4Traits : Fp4Layout<Block, Scale_<T>::GROUP, FOLDED> {
    using Scale = Scale_<T>;
    using ScaleCopies = GroupScaleCopies<Block, Scale::GROUP>;
    using Scales = typename Conditional<FOLDED, FoldedScales<T, Fp4Traits>, GroupScales<T, Fp4Traits>>::Type;
    using Products = Fp4Products<T, Fp4Traits>;
    using Factors = GlobalFactor<Fp4Traits>;
};
