// ---- every GPU ----
//
// Products through mma.sync, from sm_80 on.
//
//   FORMAT   a               b
//   PLAIN    T               T
//   FP8      e4m3            e4m3, with a_scale and b_scale
//   MXFP4    T               e2m1, two to a byte (the lower half first), with an E8M0 scale for every 32 along k
//   NVFP4    T               the same, with an e4m3 scale for every 16 along k, and b_global_scale
//
//   gemm_mma<...>   at least tiles * ceil(n / WEIGHTS) blocks of TOKEN_WARPS * WEIGHT_WARPS * 32 threads, where `tiles`
//                   bounds the tiles of TOKENS rows that the groups have; STAGES * MmaTile<...>::BYTES of shared memory
//
// A block takes TOKENS tokens and WEIGHTS rows of b, and divides them among its warps, while STAGES - 1 further steps
// of STEP numbers along k are on their way. Blocks are counted expert by expert: within one, those that run at the same
// time share tokens and weights. With an activation, every second fragment of 8 columns of a tile is of the gate, the
// one after it the same columns of the other half, so that one lane has both.
//
// The order of a sum is free, and so is which numbers along k meet in which lane, as long as it is the same of a and b.
// With 8 bits a lane takes four neighbours of each 16 (ldmatrix gives it just those) as two pairs of float16, exactly.
// With 4 bits it takes 8 neighbours of each 32: one register of b, 16 bytes of a. Nibbles i and i + 4 of that register
// are a pair of 16-bit numbers when they are shifted and masked, so pairs of a are made of numbers i and i + 4, too.
//
// Two bits of exponent and one of mantissa, set where a 16-bit format has its lowest and highest such bits, are the
// number times 2^-126 (bfloat16) or 2^-14 (float16), also if it is subnormal. The rest of that power is in the scale
// that the pair is multiplied by, except for MISSING, which the sums are: so the scale does not overflow. All this is
// exact: bfloat16 with E8M0 scales from 2^-100 to 2^33 (larger ones count as infinite), e4m3 scales always. Only E8M0
// with float16 would leave its range. There the sums over 32 are multiplied instead, in float32.
#include "common/activation.cuh"
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "moe_gemm/groups.cuh"
#include "moe_gemm/mma_tile.cuh"

// `BYTES` from global to shared memory, of which those after the first `valid` become 0.
template <int BYTES> __device__ __forceinline__ void copy_part_async(unsigned to, const void* from, int valid) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(valid),
                     "n"(BYTES)
                     : "memory");
}

// a * b of two pairs. There is no product of bfloat16 before sm_90, so this is the sum with -0.
template <typename T> __device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    if constexpr (IS_BFLOAT16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Nibbles i and i + 4 of eight e2m1 as a pair, times 2^-126 or 2^-14.
template <typename T, int I> __device__ __forceinline__ unsigned nibbles_to_pair(unsigned eight) {
    constexpr int LEFT = (IS_BFLOAT16<T> ? 6 : 9) - 4 * I;
    constexpr unsigned MAGNITUDES = 0x00070007u << (IS_BFLOAT16<T> ? 6 : 9);
    const unsigned shifted = LEFT >= 0 ? eight << (LEFT > 0 ? LEFT : 0) : eight >> (LEFT < 0 ? -LEFT : 0);
    return (shifted & MAGNITUDES) | (eight << (12 - 4 * I) & 0x80008000u);
}

// M x N fragments' worth of 32 bytes of each row, as they lie.
template <int M, int N> struct MmaLoaded {
    unsigned a[M][4], b[N / 2][4];
};

// T: bfloat16 or float16; of a and b if they have 16 bits, of the result always. TOKENS, WEIGHTS: of a block, which has
// TOKEN_WARPS x WEIGHT_WARPS warps. STEP: along k; 32 or 64 (16 bits), 128. STAGES: steps in shared memory.
// BLOCKS: to fit a multiprocessor. ACTIVATION: 0 is none. BLOCK_SCALES: FP8 with a scale for every 1 x 128 numbers of a
// and 128 x 128 of b, so sums over 128 are multiplied; else scales are of rows.
template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int TOKEN_WARPS, int WEIGHT_WARPS, int STEP, int STAGES,
          int BLOCKS, int ACTIVATION, bool BLOCK_SCALES>
__global__ __launch_bounds__(TOKEN_WARPS * WEIGHT_WARPS * 32,
                             BLOCKS) void gemm_mma(const __grid_constant__ GemmParams p) {
    using F = MmaTile<T, FORMAT, TOKENS, WEIGHTS, STEP, BLOCK_SCALES>;
    constexpr int THREADS = TOKEN_WARPS * WEIGHT_WARPS * 32;
    constexpr int M = TOKENS / TOKEN_WARPS / 16, N = WEIGHTS / WEIGHT_WARPS / 8; // fragments of a warp
    constexpr bool GATED = ACTIVATION != NO_ACTIVATION;
    static_assert(M * TOKEN_WARPS * 16 == TOKENS && N * WEIGHT_WARPS * 8 == WEIGHTS && N % (GATED ? 4 : 2) == 0, "");

    extern __shared__ __align__(1024) char shared[];
    const unsigned shared_at = shared_address(shared);
    const int thread = threadIdx.x, lane = thread % 32;
    const int row = lane / 4, pair = lane % 4; // in the fragments
    const int token_warp = thread / 32 / WEIGHT_WARPS, weight_warp = thread / 32 % WEIGHT_WARPS;

    const int weight_tiles = (p.n + WEIGHTS - 1) / WEIGHTS;
    __shared__ GroupTile task;
    if (!find_tile<TOKENS, THREADS>(p, blockIdx.x / weight_tiles, task)) return;
    int first_row, first_column, end; // the column is the gate's, if there is one
    auto locate = [&] {
        // Of an expert's tiles those of 8 x TOKENS tokens first: what runs at once shares tokens and weights.
        constexpr int TOGETHER = 8;
        const int within = blockIdx.x - task.before * weight_tiles, strip = within / (TOGETHER * weight_tiles);
        const int width = min(task.tiles - strip * TOGETHER, TOGETHER);
        const int in_strip = within - strip * TOGETHER * weight_tiles, weight_tile = in_strip / width;
        first_row = task.begin + (strip * TOGETHER + in_strip - weight_tile * width) * TOKENS;
        first_column = weight_tile * (GATED ? WEIGHTS / 2 : WEIGHTS);
        end = task.end;
    };
    locate();
    const int half = GATED ? p.n / 2 : p.n;
    auto token_of = [&](int r) { // of row r of the tile, or of the group's last
        const int mine = min(first_row + r, end - 1);
        return source_of(p, mine);
    };
    auto weight_of = [&](int r) { // row r of the tile of weights, or the last
        if constexpr (!GATED) return min(first_column + r, p.n - 1);
        return r / 8 % 2 * half + min(first_column + r / 16 * 8 + r % 8, half - 1);
    };

    // What a thread copies of each step: a chunk of rows A_ROWS and B_ROWS apart.
    constexpr int A_CHUNKS = F::A_LINE / 16, A_ROWS = THREADS / A_CHUNKS, A_COPIES = (TOKENS + A_ROWS - 1) / A_ROWS;
    constexpr int B_CHUNKS = F::B_LINE / 16, B_ROWS = THREADS / B_CHUNKS, B_COPIES = (WEIGHTS + B_ROWS - 1) / B_ROWS;
    static_assert(A_ROWS % 8 == 0 && B_ROWS % (GATED ? 16 : 8) == 0, "");
    const int a_row = thread / A_CHUNKS, a_chunk = thread % A_CHUNKS;
    const int b_row = thread / B_CHUNKS, b_chunk = thread % B_CHUNKS;
    const unsigned a_to = shared_at + F::a_at(a_row, a_chunk), b_to = shared_at + F::B + F::b_at(b_row, b_chunk);
    const long long a_pitch = FORMAT == FP8 ? p.k : 2ll * p.k;
    const long long b_pitch = F::FP4 ? p.k / 2 : a_pitch;
    const char* a_from = static_cast<const char*>(p.a) + a_chunk * 16;
    const char* b_from = static_cast<const char*>(p.b) + task.expert * b_pitch * p.n + b_chunk * 16;
    int tokens[A_COPIES];
#pragma unroll
    for (int i = 0; i < A_COPIES; ++i) tokens[i] = token_of(a_row + i * A_ROWS);
    // The rows of b go up evenly until they end.
    constexpr int B_APART = GATED ? B_ROWS / 2 : B_ROWS;
    const int weight = GATED ? b_row / 8 % 2 * half + first_column + b_row / 16 * 8 + b_row % 8 : first_column + b_row;
    const int last_weight = GATED ? (b_row / 8 % 2 + 1) * half - 1 : p.n - 1;

    const int steps = (p.k + STEP - 1) / STEP;
    // FP8 with block scales: a token's and those of 8 weights, if this thread copies them.
    const float* a_scale_from = nullptr;
    const float* b_scale_from = nullptr;
    if constexpr (BLOCK_SCALES) {
        static_assert(TOKENS <= THREADS && WEIGHTS / 8 <= THREADS, "");
        a_scale_from = p.a_scale + (long long)token_of(thread) * steps;
        b_scale_from = static_cast<const float*>(p.b_scale) +
                       ((long long)task.expert * ((p.n + 127) / 128) + weight_of(thread * 8) / 128) * steps;
    }
    // 4-bit: scales of a row, and of the rows before the expert's.
    const int groups = FORMAT == MXFP4 ? p.k / 32 : p.k / 16;
    const long long groups_before = (long long)task.expert * p.n * groups;

    auto copy_step = [&](int step, unsigned to) { // one after the other
        if (step < steps) {
            const int a_left = int(a_pitch) - a_chunk * 16 - step * F::A_LINE; // bytes to the rows' end
            const int b_left = int(b_pitch) - b_chunk * 16 - step * F::B_LINE;
#pragma unroll
            for (int i = 0; i < A_COPIES; ++i)
                if (TOKENS % A_ROWS == 0 || a_row + i * A_ROWS < TOKENS)
                    copy_part_async<16>(to + a_to + i * A_ROWS * F::A_LINE, a_from + tokens[i] * a_pitch,
                                        a_left > 0 ? 16 : 0);
#pragma unroll
            for (int i = 0; i < B_COPIES; ++i)
                if (WEIGHTS % B_ROWS == 0 || b_row + i * B_ROWS < WEIGHTS)
                    copy_part_async<16>(to + b_to + i * B_ROWS * F::B_LINE,
                                        b_from + min(weight + i * B_APART, last_weight) * b_pitch, b_left > 0 ? 16 : 0);
            a_from += F::A_LINE, b_from += F::B_LINE;
            const unsigned scales = shared_at + to + F::SCALES;
            if constexpr (BLOCK_SCALES) {
                if (thread < TOKENS) copy_part_async<4>(scales + thread * 4, a_scale_from + step, 4);
                if (thread < WEIGHTS / 8) copy_part_async<4>(scales + (TOKENS + thread) * 4, b_scale_from + step, 4);
            }
            if constexpr (F::FP4) {
                constexpr int ITEMS = WEIGHTS * F::SLOT_WORDS;
#pragma unroll
                for (int i = 0; i < (ITEMS + THREADS - 1) / THREADS; ++i) {
                    const int item = thread + i * THREADS, r = item / F::SLOT_WORDS, word = item % F::SLOT_WORDS;
                    // The last word only holds scales where a row of them does not begin at a multiple of 4.
                    if ((ITEMS % THREADS == 0 || item < ITEMS) && (groups % 4 != 0 || word < F::GROUPS / 4)) {
                        const long long begin = groups_before + (long long)weight_of(r) * groups;
                        const long long from = ((begin + step * F::GROUPS) & ~3ll) + word * 4;
                        const int left = int(min(begin + groups - from, 4ll));
                        copy_part_async<4>(scales + item * 4, static_cast<const char*>(p.b_scale) + from, max(left, 0));
                    }
                }
            }
        }
        copies_commit();
    };
    constexpr unsigned LAST_STAGE = (STAGES - 1) * F::BYTES;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_step(i, i * F::BYTES);

    float sums[M][N][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.f;

    if constexpr (!F::FP4) {
        // 32 bytes of a row at once: 16 numbers or 32. Loaded one ahead.
        constexpr int PARTS = F::A_LINE / 32;
        MmaLoaded<M, N> loaded[2];
        const unsigned a_at = shared_at + F::a_at(token_warp * M * 16 + lane % 16, lane / 16);
        const unsigned b_at = shared_at + F::B + F::b_at(weight_warp * N * 8 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
        auto load = [&](MmaLoaded<M, N>& to, unsigned stage_at, int part) {
            // Chunks 2 part and 2 part + 1: these bits of the place are of the chunk alone.
            const unsigned a = (a_at + stage_at) ^ part * 32, b = (b_at + stage_at) ^ part * 32;
#pragma unroll
            for (int m = 0; m < M; ++m) load_matrices(to.a[m], a + m * 16 * F::A_LINE);
#pragma unroll
            for (int n = 0; n < N / 2; ++n) load_matrices(to.b[n], b + n * 16 * F::B_LINE);
        };
        auto multiply = [&](float (&to)[M][N][4], const MmaLoaded<M, N>& from) {
            if constexpr (FORMAT == PLAIN) {
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int m = 0; m < M; ++m)
                        multiply_add<T>(to[m][n], from.a[m], from.b[n / 2][n % 2 * 2], from.b[n / 2][n % 2 * 2 + 1]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    unsigned a[M][4];
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            unsigned pairs[2];
                            to_halves<__nv_fp8_e4m3>(pairs, from.a[m][i * 2 + j]);
                            a[m][j] = pairs[0], a[m][j + 2] = pairs[1];
                        }
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        unsigned b[2];
                        to_halves<__nv_fp8_e4m3>(b, from.b[n / 2][n % 2 * 2 + i]);
#pragma unroll
                        for (int m = 0; m < M; ++m) multiply_add<__half>(to[m][n], a[m], b[0], b[1]);
                    }
                }
            }
        };

        copies_wait<STAGES - 2>();
        __syncthreads();
        unsigned stage_at = 0;
        load(loaded[0], stage_at, 0);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            float of_block[BLOCK_SCALES ? M : 1][BLOCK_SCALES ? N : 1][4];
            float a_scales[M][2], b_scales[N];
            if constexpr (BLOCK_SCALES) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < N; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i) of_block[m][n][i] = 0.f;
            }
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                if (part == PARTS - 1) {
                    // After this barrier the stage at hand may be overwritten, and the next one is there.
                    if constexpr (BLOCK_SCALES) {
                        const float* const scales = reinterpret_cast<const float*>(shared + stage_at + F::SCALES);
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                a_scales[m][j] = scales[(token_warp * M + m) * 16 + j * 8 + row];
#pragma unroll
                        for (int n = 0; n < N; ++n) b_scales[n] = scales[TOKENS + weight_warp * N + n];
                    }
                    copies_wait<STAGES - 2>();
                    __syncthreads();
                    stage_at = stage_at == LAST_STAGE ? 0 : stage_at + F::BYTES;
                }
                load(loaded[(part + 1) % 2], stage_at, (part + 1) % PARTS);
                if (part == 0) copy_step(step + STAGES - 1, stage_at == 0 ? LAST_STAGE : stage_at - F::BYTES);
                if constexpr (BLOCK_SCALES)
                    multiply(of_block, loaded[part % 2]);
                else
                    multiply(sums, loaded[part % 2]);
            }
            if constexpr (BLOCK_SCALES) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int n = 0; n < N; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sums[m][n][i] += of_block[m][n][i] * (a_scales[m][i / 2] * b_scales[n]);
            }
        }
    } else {
        const int a_at = (token_warp * M * 16 + row) * F::A_LINE;
        const int b_at = F::B + (weight_warp * N * 8 + row) * F::B_LINE;
        // How far a row's scales lie from a multiple of 4. Rows 8 apart are alike, for n and n / 2 are multiples of 8.
        const int slots_at = F::SCALES + weight_warp * N * 8 * F::SLOT;
        auto to_slot = [&](int r) { return r * F::SLOT + int(groups_before + (long long)weight_of(r) * groups & 3); };
        const int slot_at = slots_at + to_slot(row);
        const int column_slots_at[2] = {slots_at + to_slot(pair * 2), slots_at + to_slot(pair * 2 + 1)};
        unsigned stage_at = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            copies_wait<STAGES - 2>();
            __syncthreads();
            copy_step(step + STAGES - 1, stage_at == 0 ? LAST_STAGE : stage_at - F::BYTES);
            const char* const stage = shared + stage_at;
            // 64 numbers along k at once.
#pragma unroll 1
            for (int block = 0; block < STEP / 64; ++block) {
                uint2 weights[N];
                unsigned factors[N];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const char* const line = stage + b_at + n * 8 * F::B_LINE;
                    if constexpr (F::FOLDED) {
                        weights[n] = *reinterpret_cast<const uint2*>(line + (block * 32 ^ (row & 2) * 16) + pair * 8);
                    } else {
                        const int at = (block * 2 ^ (row >> 1 & 3)) * 16 + pair * 4;
                        weights[n].x = *reinterpret_cast<const unsigned*>(line + at);
                        weights[n].y = *reinterpret_cast<const unsigned*>(line + (at ^ 16));
                    }
                    if constexpr (F::FOLDED) {
                        const int of_lane = FORMAT == MXFP4 ? block * 2 + pair / 2 : block * 4 + pair;
                        const unsigned scale =
                            *reinterpret_cast<const unsigned char*>(stage + slot_at + n * 8 * F::SLOT + of_lane);
                        if constexpr (FORMAT == MXFP4) {
                            factors[n] = min(scale + 94, 255u) * 0x00800080u; // 2^(scale - 127) * 2^126 * 2^-32
                        } else {
                            unsigned pairs[2];
                            to_halves<__nv_fp8_e4m3>(pairs, scale * 0x0101);
                            if constexpr (IS_BFLOAT16<T>) {
                                const float factor =
                                    __half2float(__ushort_as_half((unsigned short)pairs[0])) * 0x1p94f; // 2^126 * 2^-32
                                factors[n] = pack<T>(factor, factor);
                            } else {
                                factors[n] = multiply_pairs<T>(pairs[0], 0x58005800); // 2^14 * 2^-7
                            }
                        }
                    }
                }
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    // Rows `row` and `row` + 8 of 32 numbers of a, in two fragments.
                    unsigned a[M][2][4];
                    const int chunk = F::FOLDED ? pair * 2 | (part ^ (row & 1)) : pair | (part ^ (row & 1)) * 4;
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const uint4 eight = *reinterpret_cast<const uint4*>(
                                stage + a_at + (m * 16 + j * 8) * F::A_LINE + block * 128 + chunk * 16);
                            a[m][0][j] = __byte_perm(eight.x, eight.z, 0x5410);
                            a[m][0][j + 2] = __byte_perm(eight.x, eight.z, 0x7632);
                            a[m][1][j] = __byte_perm(eight.y, eight.w, 0x5410);
                            a[m][1][j + 2] = __byte_perm(eight.y, eight.w, 0x7632);
                        }
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const unsigned eight = part == 0 ? weights[n].x : weights[n].y;
                        unsigned b[4] = {nibbles_to_pair<T, 0>(eight), nibbles_to_pair<T, 1>(eight),
                                         nibbles_to_pair<T, 2>(eight), nibbles_to_pair<T, 3>(eight)};
                        if constexpr (F::FOLDED) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) b[i] = multiply_pairs<T>(b[i], factors[n]);
#pragma unroll
                            for (int m = 0; m < M; ++m) {
                                multiply_add<T>(sums[m][n], a[m][0], b[0], b[1]);
                                multiply_add<T>(sums[m][n], a[m][1], b[2], b[3]);
                            }
                        } else {
                            float factor[2]; // of columns 2 pair and 2 pair + 1
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                const unsigned scale = *reinterpret_cast<const unsigned char*>(
                                    stage + column_slots_at[i] + n * 8 * F::SLOT + block * 2 + part);
                                factor[i] = __uint_as_float(scale << 23);
                            }
#pragma unroll
                            for (int m = 0; m < M; ++m) {
                                float of_group[4] = {0.f, 0.f, 0.f, 0.f};
                                multiply_add<T>(of_group, a[m][0], b[0], b[1]);
                                multiply_add<T>(of_group, a[m][1], b[2], b[3]);
#pragma unroll
                                for (int i = 0; i < 4; ++i) sums[m][n][i] += of_group[i] * factor[i % 2];
                            }
                        }
                    }
                }
            }
            stage_at = stage_at == LAST_STAGE ? 0 : stage_at + F::BYTES;
        }
    }

    // ---- scales of whole rows, the activation, and out ----
    locate(); // once more: these registers were needed for the products
    constexpr bool ROW_SCALES = FORMAT == FP8 && !BLOCK_SCALES;
    float factor = 1.f;
    if constexpr (F::FP4) {
        constexpr float MISSING =
            FORMAT == MXFP4 ? (IS_BFLOAT16<T> ? 0x1p32f : 0x1p14f) : (IS_BFLOAT16<T> ? 0x1p32f : 0x1p7f);
        factor = p.b_global_scale ? MISSING * p.b_global_scale[task.expert] : MISSING;
    }
    if constexpr (ROW_SCALES) {
        const float* const of_expert =
            static_cast<const float*>(p.b_scale) + (long long)task.expert * (p.b_scale_step ? p.n : 1);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = weight_of((weight_warp * N + n) * 8 + pair * 2 + i);
                const float scale = of_expert[(long long)column * p.b_scale_step];
#pragma unroll
                for (int m = 0; m < M; ++m) sums[m][n][i] *= scale, sums[m][n][i + 2] *= scale;
            }
    }
    constexpr int OUT = GATED ? N / 2 : N; // fragments
    const int first_out = first_column + weight_warp * OUT * 8 + pair % 2 * 8 + pair / 2 * 4;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int in_tile = (token_warp * M + m) * 16 + j * 8 + row, mine = first_row + in_tile;
            if constexpr (ROW_SCALES) factor = p.a_scale[(long long)token_of(in_tile) * p.a_scale_step];
            unsigned pairs[OUT];
#pragma unroll
            for (int n = 0; n < OUT; ++n) {
                float values[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if constexpr (GATED)
                        values[i] = activate<ACTIVATION>(sums[m][n * 2][j * 2 + i] * factor,
                                                         sums[m][n * 2 + 1][j * 2 + i] * factor);
                    else
                        values[i] = sums[m][n][j * 2 + i] * factor;
                pairs[n] = pack<T>(values[0], values[1]);
            }
            // Two lanes exchange a pair of two fragments, so that each has four neighbours of one.
            T* const to = static_cast<T*>(p.out) + (long long)mine * half + first_out;
#pragma unroll
            for (int n = 0; n < OUT; n += 2) {
                const bool odd = pair % 2;
                const unsigned got = __shfl_xor_sync(FULL_WARP, odd ? pairs[n] : pairs[n + 1], 1);
                const uint2 four = make_uint2(odd ? got : pairs[n], odd ? pairs[n + 1] : got);
                if (mine < end && first_out + n * 8 < half) *reinterpret_cast<uint2*>(to + n * 8) = four;
            }
        }
}
