// Grouped GEMM for few rows per expert, on every GPU, at memory bandwidth.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh lists all forms
//
// With FP8 each element of `a` and `b` is multiplied by its scale. Sums are in float32 and rounded once.
// moe_gemm/params.cuh defines the groups.
//
// DRAM reaches its full bandwidth only for long contiguous reads. So a warp reads 512 contiguous bytes of one row of
// weights at a time, instead of a few bytes of each of the 8 rows of an MMA fragment. The warp still uses tensor cores,
// because conversions and multiplications of single elements would take too many instructions. It fills the fragments
// in an unusual way:
//
//   A, rows 0 to 7     8 segments along k of one row of weights; a segment is 4 lanes x 16 bytes
//   A, rows 8 to 15    8 segments of a second row of weights: if gated, the up of the first row; else the next row
//   B, columns 0 to 7  the 8 segments of one token at the same indices along k
//
// Element (i, j) of an 8 x 8 result is the product of segment i of the weights and segment j of the token. Only the
// diagonal multiplies matching segments, so the sum of the diagonal is one output. The other 56 elements are not used;
// they cost no time, because the tensor cores are not the bottleneck.
//
// A unit is 16 bytes along k. Each lane has one unit of every 512 bytes of a row of weights or of a token. With g =
// lane / 4 and q = lane % 4, each MMA uses four elements of the unit as elements `2 * q`, `2 * q + 1`, `2 * q + 8` and
// `2 * q + 9` along k, in row g of A (weights) or column g of B (token).
//
// Grid: blockIdx.x selects pairs of rows of weights, blockIdx.y a tile of TOKENS rows among the tiles of all groups. A
// block has WARPS warps with PAIRS pairs each. Blocks without a tile exit at once. Every tile reads all weights of its
// expert. So the host sets TOKENS to the expected maximum number of rows of a group.
//
// Speed of light: the time to read the weights, experts * n * k elements. The table shows this lower bound divided by
// the measured time, with one row per expert on an H200, in bfloat16:
//
//   2 experts, n = 28672, k = 4096   100%, 108 us
//   2 experts, n = 4096, k = 14336   99%
//   8 experts, n = 1536, k = 2048    85%
//   8 experts, n = 2048, k = 768     72%; the kernel takes only 8 us, so its launch is a large share
#include "common/fp8.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/groups.cuh"

// Work item of a warp: multiply some pairs of rows of weights by `count` tokens. The pairs start at index `pair` of the
// expert's `pairs` pairs. The tokens belong to the rows of the result that start at row `first`.
template <int ACTIVATION_> struct StreamTask {
    static constexpr int ACTIVATION = ACTIVATION_;
    const GemmParams& p;
    const int first, count;
    const int pairs, pair;

    // Return the row of the expert's weights for row i of the warp's weights. Rows `2 * j` and `2 * j + 1` of the warp
    // are its pair j. Pairs past the last pair are clamped to the last pair.
    __device__ __forceinline__ int weight_of(int i) const {
        const int mine = min(pair + i / 2, pairs - 1);
        return has_halves(ACTIVATION) ? mine + i % 2 * pairs : 2 * mine + i % 2;
    }

    // Return the row of `a` of token t, clamped to the last token.
    __device__ __forceinline__ int token_of(int t) const { return source_of(p, first + min(t, count - 1)); }
};

// PLAIN: a unit is 8 elements of type T.
template <typename T, class Task> struct PlainUnits {
    static constexpr int NUMBERS = 8;
    struct Registers {};

    __device__ __forceinline__ PlainUnits(const Task&, int) {}

    // Multiply a unit of each row of a pair of weight rows by a unit of a token, and add the products to `sums`.
    __device__ __forceinline__ void multiply(Registers&, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int, int, int) const {
        const unsigned low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
        mma_m16n8k16<T>(sums, low, x.x, x.y);
        mma_m16n8k16<T>(sums, high, x.z, x.w);
    }

    // Return the sum for token t and row i of the warp's weights, multiplied by their row scales. PLAIN has no scales.
    __device__ __forceinline__ float scaled(float sum, int, int) const { return sum; }
};

// FP8 MMAs and their registers. e4m3 is converted to float16, which is exact.
struct Fp8Registers {
    float part[4];
    unsigned words[3][4], halves[3][2], both[4];

    // Multiply two units (16 elements along k) of a pair of weight rows by a unit of a token, and add the products to
    // `sums`.
    __device__ __forceinline__ void multiply(float (&sums)[4], const uint4& w0, const uint4& w1, const uint4& x) {
        words[0][0] = w0.x, words[0][1] = w0.y, words[0][2] = w0.z, words[0][3] = w0.w;
        words[1][0] = w1.x, words[1][1] = w1.y, words[1][2] = w1.z, words[1][3] = w1.w;
        words[2][0] = x.x, words[2][1] = x.y, words[2][2] = x.z, words[2][3] = x.w;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
#pragma unroll
            for (int row = 0; row < 3; ++row) to_halves<__nv_fp8_e4m3>(halves[row], words[row][word]);
            both[0] = halves[0][0], both[1] = halves[1][0], both[2] = halves[0][1], both[3] = halves[1][1];
            mma_m16n8k16<__half>(sums, both, halves[2][0], halves[2][1]);
        }
    }
};

// FP8 with row scales: a unit is 16 elements.
template <class Task> struct Fp8RowUnits {
    static constexpr int NUMBERS = 16;
    using Registers = Fp8Registers;
    const Task& task;
    const float* const b_scale;

    __device__ __forceinline__ Fp8RowUnits(const Task& task, int expert)
        : task(task), b_scale(static_cast<const float*>(task.p.b_scale) +
                              (long long)expert * (task.p.b_scale_step ? task.p.n : 1)) {}

    __device__ __forceinline__ void multiply(Registers& r, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int, int, int) const {
        r.multiply(sums, w0, w1, x);
    }

    __device__ __forceinline__ float scaled(float sum, int t, int i) const {
        const GemmParams& p = task.p;
        if constexpr (Task::ACTIVATION & EXPERT_SCALE)
            return sum *
                   (p.a_scale[task.first / p.max_tokens] * b_scale[(long long)task.weight_of(i) * p.b_scale_step]);
        return sum * (p.a_scale[(long long)task.token_of(t) * p.a_scale_step] *
                      b_scale[(long long)task.weight_of(i) * p.b_scale_step]);
    }
};

// FP8 with BLOCK_SCALES: the sums over a unit are multiplied by the unit's scales and then added to `sums`.
template <class Task> struct Fp8BlockUnits {
    static constexpr int NUMBERS = 16;
    using Registers = Fp8Registers;
    const Task& task;
    const int blocks; // number of blocks of 128 elements along k
    const float* const b_scale;

    __device__ __forceinline__ Fp8BlockUnits(const Task& task, int expert)
        : task(task), blocks((task.p.k + 127) / 128),
          b_scale(static_cast<const float*>(task.p.b_scale) + (long long)expert * ((task.p.n + 127) / 128 * blocks)) {}

    __device__ __forceinline__ void multiply(Registers& r, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int t, int j, int unit) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) r.part[i] = 0.f;
        r.multiply(r.part, w0, w1, x);
        // The four lanes of a segment are in one block of 128 elements, and their products go to the same sum.
        const int block = min(unit / 8, blocks - 1);
        const float by_token = task.p.a_scale[(long long)task.token_of(t) * blocks + block];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float scale = by_token * b_scale[task.weight_of(2 * j + row) / 128 * blocks + block];
            sums[2 * row] += r.part[2 * row] * scale;
            sums[2 * row + 1] += r.part[2 * row + 1] * scale;
        }
    }

    __device__ __forceinline__ float scaled(float sum, int, int) const { return sum; }
};

template <typename T, int FORMAT, bool BLOCK_SCALES, class Task> struct UnitsOf {
    using Type = PlainUnits<T, Task>;
    static_assert(FORMAT == PLAIN && !BLOCK_SCALES, "");
};
template <typename T, class Task> struct UnitsOf<T, FP8, false, Task> {
    using Type = Fp8RowUnits<Task>;
};
template <typename T, class Task> struct UnitsOf<T, FP8, true, Task> {
    using Type = Fp8BlockUnits<Task>;
};

// Load LOADS units of each row of the warp's weights: unit `at + lane` and then every 32nd unit. `loads`: number of
// units of a row. Units past the end of the row are set to 0.
template <int ROWS, int LOADS, class Task>
__device__ __forceinline__ void load_weights(uint4 (&w)[ROWS][LOADS], const Task& task, const uint4* weights, int loads,
                                             int at, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int j = 0; j < ROWS; ++j)
            w[j][i] =
                load_or_zero(weights + (unsigned(task.weight_of(j)) * loads + at + 32 * i), at + 32 * i + lane < loads);
}

// Diagonal of the 8 x 8 result in an accumulator fragment. With g = lane / 4 and q = lane % 4, the lane with
// `q == g / 2` holds element (g, g). `here`: this lane holds an element of the diagonal. `odd`: g is odd. A lane has
// two registers of row g; the element is in the second register if g is odd, else in the first.
struct Diagonal {
    const bool here, odd;

    // Sum the diagonal across the warp. The sum is the dot product of the token and row `row` (0 or 1) of the pair of
    // weight rows.
    __device__ __forceinline__ float trace(const float (&sums)[4], int row) const {
        const float mine = odd ? sums[2 * row + 1] : sums[2 * row];
        return lanes_sum<32>(here ? mine : 0.f);
    }
};

// T: __nv_bfloat16 or __half; the type of the result, and of `a` and `b` if they have 16-bit elements. FORMAT: PLAIN or
// FP8. BLOCK_SCALES: FP8 with block scales, otherwise with row scales. ACTIVATION: see moe_gemm/epilogue.cuh. LOADS:
// units of a row of weights that a lane loads at once. BLOCKS: resident blocks per multiprocessor.
template <typename T, int FORMAT, bool BLOCK_SCALES, int TOKENS, int ACTIVATION, int PAIRS, int WARPS, int LOADS,
          int BLOCKS>
__global__ __launch_bounds__(WARPS * 32, BLOCKS) void gemm_stream(const __grid_constant__ GemmParams p) {
    begin_behind_earlier_kernels();
    using Task = StreamTask<ACTIVATION>;
    using Units = typename UnitsOf<T, FORMAT, BLOCK_SCALES, Task>::Type;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ GroupTile tile;
    if (!find_tile<TOKENS, WARPS * 32>(p, blockIdx.y, tile)) return;
    const int first = tile.begin + (int(blockIdx.y) - tile.before) * TOKENS, count = min(tile.end - first, TOKENS);
    const int pairs = p.n / 2, pair = (blockIdx.x * WARPS + warp) * PAIRS;
    if (pair >= pairs) return;
    const Task task{p, first, count, pairs, pair};
    // Units of a row. Unit offsets within `a` and within an expert's weights are 32-bit, because the host refuses
    // arrays of 64 GiB.
    const int loads = p.k / Units::NUMBERS;
    const uint4* const weights = static_cast<const uint4*>(p.b) + (long long)tile.expert * p.n * loads + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;
    unsigned token_at[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) token_at[t] = unsigned(task.token_of(t)) * loads;
    const Units units(task, tile.expert);

    float sums[TOKENS][PAIRS][4] = {};
    for (int at = 0; at < loads; at += 32 * LOADS) {
        uint4 w[2 * PAIRS][LOADS];
        load_weights(w, task, weights, loads, at, lane);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (t > 0 && t >= count) break;
            uint4 x[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                x[i] = make_uint4(0, 0, 0, 0);
                if (at + 32 * i + lane < loads) x[i] = __ldg(tokens + (token_at[t] + at + 32 * i));
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    typename Units::Registers registers;
                    units.multiply(registers, sums[t][j], w[2 * j][i], w[2 * j + 1][i], x[i], t, j, at + 32 * i + lane);
                }
        }
    }

    const Diagonal diagonal{lane % 4 == lane / 8, bool(lane / 4 % 2)};
    T* const out = static_cast<T*>(p.out);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (t >= count) break;
        const long long row = first + t;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            float both[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                both[i] = units.scaled(diagonal.trace(sums[t][j], i), t, 2 * j + i);
                if constexpr (ACTIVATION & BIASED) both[i] += bias_of<T>(p, tile.expert, task.weight_of(2 * j + i));
            }
            if (lane != 0 || pair + j >= pairs) continue;
            if constexpr (is_gated(ACTIVATION))
                out[row * pairs + pair + j] = from_float<T>(finish<ACTIVATION>(p, both[0], both[1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (pair + j)) =
                    pack<T>(finish<ACTIVATION>(p, both[0]), finish<ACTIVATION>(p, both[1]));
        }
    }
}
