// Grouped GEMM (moe_gemm/params.cuh) for few rows per expert, on every GPU, at memory bandwidth: a GEMV by tensor
// cores.
//
// DRAM reaches its full bandwidth only for long contiguous reads. So a warp reads 512 contiguous bytes of one row of
// weights at a time, not a few bytes of each of the 8 rows of an MMA fragment. Scalar conversions and multiplications
// would take too many instructions, so tensor cores multiply these fragments:
//
//   A, rows 0 to 7     8 segments along k of one row of weights; a segment is 4 lanes x 16 bytes
//   A, rows 8 to 15    8 segments of a second row of weights: if gated, the up of the first row; else the next row
//   B, columns 0 to 7  the 8 segments of one token at the same indices along k
//
// Element (i, j) of an 8 x 8 result is segment i of the weights times segment j of the token. The sum of the diagonal
// is one output. The other elements are unused and cost no time: the tensor cores are not the bottleneck.
//
// A vector is 16 bytes along k. A lane has one vector of every 512 bytes of a row. With g = lane / 4 and q = lane % 4,
// each MMA uses four elements of the vector as elements `2 * q`, `2 * q + 1`, `2 * q + 8` and `2 * q + 9` along k, in
// row g of A (weights) or column g of B (token).
//
// Grid: blockIdx.x selects WARPS * PAIRS pairs of rows of weights, blockIdx.y a tile of TOKENS rows of all groups;
// blocks without a tile exit. Every tile reads all weights of its expert, so TOKENS is the expected maximum number of
// rows in a group.
//
// Speed of light: the time to read the weights. The table gives this time divided by the measured time, with one
// bfloat16 row per expert on an H200:
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

// The work of a warp. It multiplies pairs of weight rows, beginning with pair `pair` of `pairs`, by `count` tokens, and
// writes result rows from row `first` on.
template <int ACTIVATION_> struct StreamTask {
    static constexpr int ACTIVATION = ACTIVATION_;
    const GemmParams& p;
    const int first, count;
    const int pairs, pair;

    // Return the row of the expert's weights for row i of the warp. Rows `2 * j` and `2 * j + 1` are its pair j,
    // clamped to the last pair.
    __device__ __forceinline__ int weight_of(int i) const {
        const int mine = min(pair + i / 2, pairs - 1);
        return has_halves(ACTIVATION) ? mine + i % 2 * pairs : 2 * mine + i % 2;
    }

    __device__ __forceinline__ int token_of(int t) const { return source_of(p, first + min(t, count - 1)); }
};

// PLAIN: a vector is 8 elements.
template <typename T, class Task> struct PlainVectors {
    static constexpr int ELEMENTS = 8;
    struct Registers {};

    __device__ __forceinline__ PlainVectors(const Task&, int) {}

    // Multiply a vector of two weight rows by a vector of a token, and add to `sums`.
    __device__ __forceinline__ void multiply(Registers&, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int, int, int) const {
        const unsigned low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
        mma_m16n8k16<T>(sums, low, x.x, x.y);
        mma_m16n8k16<T>(sums, high, x.z, x.w);
    }

    // Return the sum for token t and row i of the warp's weights, times their row scales. PLAIN has no scales.
    __device__ __forceinline__ float scaled(float sum, int, int) const { return sum; }
};

// MMAs of FP8 elements, which are converted exactly to float16.
struct Fp8Registers {
    float unscaled[4];
    unsigned packed[3][4], halves[3][2], both[4];

    // Multiply a vector of two weight rows by a vector of a token, and add to `sums`.
    __device__ __forceinline__ void multiply(float (&sums)[4], const uint4& w0, const uint4& w1, const uint4& x) {
        packed[0][0] = w0.x, packed[0][1] = w0.y, packed[0][2] = w0.z, packed[0][3] = w0.w;
        packed[1][0] = w1.x, packed[1][1] = w1.y, packed[1][2] = w1.z, packed[1][3] = w1.w;
        packed[2][0] = x.x, packed[2][1] = x.y, packed[2][2] = x.z, packed[2][3] = x.w;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
#pragma unroll
            for (int row = 0; row < 3; ++row) to_halves<__nv_fp8_e4m3>(halves[row], packed[row][word]);
            both[0] = halves[0][0], both[1] = halves[1][0], both[2] = halves[0][1], both[3] = halves[1][1];
            mma_m16n8k16<__half>(sums, both, halves[2][0], halves[2][1]);
        }
    }
};

// FP8 with row scales.
template <class Task> struct Fp8RowVectors {
    static constexpr int ELEMENTS = 16;
    using Registers = Fp8Registers;
    const Task& task;
    const float* const b_scale;

    __device__ __forceinline__ Fp8RowVectors(const Task& task, int expert)
        : task(task), b_scale(static_cast<const float*>(task.p.b_scale) +
                              (long long)expert * (task.p.b_scale_stride ? task.p.n : 1)) {}

    __device__ __forceinline__ void multiply(Registers& r, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int, int, int) const {
        r.multiply(sums, w0, w1, x);
    }

    __device__ __forceinline__ float scaled(float sum, int t, int i) const {
        const GemmParams& p = task.p;
        if constexpr (Task::ACTIVATION & EXPERT_SCALE)
            return sum *
                   (p.a_scale[task.first / p.max_tokens] * b_scale[(long long)task.weight_of(i) * p.b_scale_stride]);
        return sum * (p.a_scale[(long long)task.token_of(t) * p.a_scale_stride] *
                      b_scale[(long long)task.weight_of(i) * p.b_scale_stride]);
    }
};

// FP8 with block scales. The scales multiply the sums of one vector.
template <class Task> struct Fp8BlockVectors {
    static constexpr int ELEMENTS = 16;
    using Registers = Fp8Registers;
    const Task& task;
    const int blocks; // of 128 elements along k
    const float* const b_scale;

    __device__ __forceinline__ Fp8BlockVectors(const Task& task, int expert)
        : task(task), blocks((task.p.k + 127) / 128),
          b_scale(static_cast<const float*>(task.p.b_scale) + (long long)expert * ((task.p.n + 127) / 128 * blocks)) {}

    __device__ __forceinline__ void multiply(Registers& r, float (&sums)[4], const uint4& w0, const uint4& w1,
                                             const uint4& x, int t, int j, int vector) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) r.unscaled[i] = 0.f;
        r.multiply(r.unscaled, w0, w1, x);
        // The lanes of a segment share a block of 128 elements, and the MMA adds their products.
        const int block = min(vector / 8, blocks - 1);
        const float by_token = task.p.a_scale[(long long)task.token_of(t) * blocks + block];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float scale = by_token * b_scale[task.weight_of(2 * j + row) / 128 * blocks + block];
            sums[2 * row] += r.unscaled[2 * row] * scale;
            sums[2 * row + 1] += r.unscaled[2 * row + 1] * scale;
        }
    }

    __device__ __forceinline__ float scaled(float sum, int, int) const { return sum; }
};

template <typename T, int FORMAT, bool BLOCK_SCALES, class Task> struct VectorsOf {
    using Type = PlainVectors<T, Task>;
    static_assert(FORMAT == PLAIN && !BLOCK_SCALES, "");
};
template <typename T, class Task> struct VectorsOf<T, FP8, false, Task> {
    using Type = Fp8RowVectors<Task>;
};
template <typename T, class Task> struct VectorsOf<T, FP8, true, Task> {
    using Type = Fp8BlockVectors<Task>;
};

// Load vector `at + lane` and then every 32nd vector of each row of the warp's weights. Vectors past the end of a row
// are 0.
template <int ROWS, int LANE_VECTORS, class Task>
__device__ __forceinline__ void load_weights(uint4 (&w)[ROWS][LANE_VECTORS], const Task& task, const uint4* weights,
                                             int row_vectors, int at, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < ROWS; ++j)
            w[j][i] = load_or_zero(weights + (unsigned(task.weight_of(j)) * row_vectors + at + 32 * i),
                                   at + 32 * i + lane < row_vectors);
}

// Diagonal of the 8 x 8 result in an accumulator fragment. Lane `4 * g + g / 2` has element (g, g). It is in the lane's
// second register of row g if g is odd, else in the first.
struct Diagonal {
    const bool on_diagonal, odd;

    // Return the dot product of the token and row `row` (0 or 1) of a pair of weight rows.
    __device__ __forceinline__ float trace(const float (&sums)[4], int row) const {
        const float mine = odd ? sums[2 * row + 1] : sums[2 * row];
        return lanes_sum<32>(on_diagonal ? mine : 0.f);
    }
};

// T: type of the result, and of 16-bit `a` and `b`. FORMAT: PLAIN or FP8. BLOCK_SCALES: FP8 has block scales, otherwise
// row scales. LANE_VECTORS: vectors of a weight row that a lane loads at once.
template <typename T, int FORMAT, bool BLOCK_SCALES, int TOKENS, int ACTIVATION, int PAIRS, int WARPS, int LANE_VECTORS,
          int BLOCKS_PER_SM>
__global__ __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) void gemm_stream(const __grid_constant__ GemmParams p) {
    begin_behind_earlier_kernels();
    using Task = StreamTask<ACTIVATION>;
    using Vectors = typename VectorsOf<T, FORMAT, BLOCK_SCALES, Task>::Type;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ GroupTile tile;
    if (!find_tile<TOKENS, WARPS * 32>(p, blockIdx.y, tile)) return;
    const int first = tile.begin + (int(blockIdx.y) - tile.before) * TOKENS, count = min(tile.end - first, TOKENS);
    const int pairs = p.n / 2, pair = (blockIdx.x * WARPS + warp) * PAIRS;
    if (pair >= pairs) return;
    const Task task{p, first, count, pairs, pair};
    // Vector offsets within `a` and within an expert's weights are 32-bit: the host refuses arrays of 64 GiB.
    const int row_vectors = p.k / Vectors::ELEMENTS;
    const uint4* const weights = static_cast<const uint4*>(p.b) + (long long)tile.expert * p.n * row_vectors + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;
    unsigned token_at[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) token_at[t] = unsigned(task.token_of(t)) * row_vectors;
    const Vectors vectors(task, tile.expert);

    float sums[TOKENS][PAIRS][4] = {};
    for (int at = 0; at < row_vectors; at += 32 * LANE_VECTORS) {
        uint4 w[2 * PAIRS][LANE_VECTORS];
        load_weights(w, task, weights, row_vectors, at, lane);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            if (t > 0 && t >= count) break;
            uint4 x[LANE_VECTORS];
#pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i) {
                x[i] = make_uint4(0, 0, 0, 0);
                if (at + 32 * i + lane < row_vectors) x[i] = __ldg(tokens + (token_at[t] + at + 32 * i));
            }
#pragma unroll
            for (int i = 0; i < LANE_VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    typename Vectors::Registers registers;
                    vectors.multiply(registers, sums[t][j], w[2 * j][i], w[2 * j + 1][i], x[i], t, j,
                                     at + 32 * i + lane);
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
                both[i] = vectors.scaled(diagonal.trace(sums[t][j], i), t, 2 * j + i);
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
