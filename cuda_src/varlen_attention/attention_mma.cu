// Attention over sequences of different lengths, packed without padding, for 16-bit elements, with mma.sync.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j of the sequence of query i;
//                                                                       if causal, only for keys that i sees (below)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// Causal: the last query of a sequence sees (attends to) all keys of the sequence, and each earlier query sees one key
// less than the next query. The result of a query without keys is 0. Weights are rounded to T before their MMA with the
// values. All sums are in float32, including the sum of the weights.
//
//   T      __half or __nv_bfloat16
//   DIM    padded size of a head, at least p.dim; the padding is 0
//   KEYS   keys of a tile
//
// Grid: (tiles of queries, heads), see varlen_attention/sequences.cuh. A block of 4 warps computes 64 queries, 16 per
// warp, and loops over their keys in tiles of KEYS keys. Scores stay in the registers of their warp: the C fragments of
// the first MMA become the A fragments of the second (FlashAttention-2, Dao, 2023). Shared memory holds the queries and
// two stages of keys and values. While the MMAs of one stage run, cp.async fills the other stage.
//
// Speed of light: for long sequences the tensor cores, with 4 * dim flops for each pair of a query and a key. For short
// sequences memory bandwidth is the limit: queries, keys and values are read, and the results are written. mma.sync
// reaches only part of the tensor cores' rate on Hopper.
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int MMA_THREADS = 128, QUERIES = 64;

// The sizes of a block. A line of shared memory is a row of 16-byte chunks. In a line of 128 or more bytes, chunk c of
// row r is stored at position `c ^ (r % 8)`. In a line of 64 bytes it is stored at position `c ^ (r / 2 % 4)`. With
// this swizzle ldmatrix reads chunk c of 8 rows without bank conflicts.
template <int DIM, int KEYS> struct Form {
    static constexpr int LINE = DIM * 2, CHUNKS = DIM / 8;
    static constexpr int TILE = KEYS * LINE, STAGE = 2 * TILE; // in bytes; a stage has keys, then values
    static constexpr int BYTES = QUERIES * LINE + 2 * STAGE;

    static __device__ __forceinline__ unsigned at(int row, int chunk) {
        return row * LINE + (chunk ^ (LINE >= 128 ? row & 7 : row >> 1 & 3)) * 16;
    }
};

// Issue the copies of the first `rows` of ROWS rows, which are `stride` bytes apart. Set the other rows and the padding
// to 0 without reading them.
template <typename F, int ROWS>
__device__ __forceinline__ void copy_tile(char* to, const char* from, long long stride, int rows, int dim) {
    static_assert(ROWS * F::CHUNKS % MMA_THREADS == 0, "all threads copy equally many chunks");
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * F::CHUNKS; i += MMA_THREADS) {
        const int row = i / F::CHUNKS, chunk = i % F::CHUNKS;
        char* const place = to + F::at(row, chunk);
        if (row < rows && chunk * 8 < dim)
            cp_async(shared_address(place), from + row * stride + chunk * 16);
        else
            *reinterpret_cast<uint4*>(place) = {};
    }
}

// The state of a thread. It holds rows `row` and `row + 8` of the warp's 16 queries, and in each group of 8 columns the
// columns `2 * pair` and `2 * pair + 1`.
template <typename T, int DIM, int KEYS> struct Warp {
    using F = Form<DIM, KEYS>;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16, row = lane / 4, pair = lane % 4;
    Softmax softmax[2]; // a total covers only this lane's weights until the epilogue
    float scores[KEYS / 8][4];
    float sums[DIM / 8][4] = {};

    // Compute the scores of the queries with a tile of keys. Both arguments are shared addresses.
    __device__ __forceinline__ void multiply_keys(unsigned queries, unsigned keys) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.f;
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            unsigned a[4], b[4];
            ldmatrix(a, queries + F::at(first + lane % 16, d * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                ldmatrix(b, keys + F::at(n * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
                mma_m16n8k16<T>(scores[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    // Convert the scores to weights. Rescale the sums to the new largest scores.
    __device__ __forceinline__ void weigh(const Params& p, const Part<QUERIES>& part, int first_key) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -CUDART_INF_F;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) {
                    const bool sees = part.sees(p, first + row + 8 * h, first_key + n * 8 + pair * 2 + i % 2);
                    scores[n][i] = sees ? scores[n][i] * p.scale : -CUDART_INF_F;
                    most = fmaxf(most, scores[n][i]);
                }
            const float factor = softmax[h].raise_to(lanes_max<4>(most));
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) sums[n][2 * h] *= factor, sums[n][2 * h + 1] *= factor;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) scores[n][i] = softmax[h].weigh(scores[n][i]);
        }
    }

    // Add the product of weights and values to the sums. `values` is a shared address.
    __device__ __forceinline__ void multiply_values(unsigned values) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            const float (&low)[4] = scores[2 * k], (&high)[4] = scores[2 * k + 1];
            const unsigned a[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                                   pack<T>(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < DIM / 16; ++n) {
                unsigned b[4];
                ldmatrix_trans(b, values + F::at(k * 16 + lane % 16, n * 2 + lane / 16));
                mma_m16n8k16<T>(sums[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void store(const Params& p, const Part<QUERIES>& part, int head) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float factor = inverse_of(lanes_sum<4>(softmax[h].total));
            const int of_tile = first + row + 8 * h;
            if (of_tile >= part.rows) continue;
            char* const out = p.out + ((long long)(part.first + of_tile) * p.heads + head) * p.dim * 2;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                if (n * 8 < p.dim)
                    reinterpret_cast<unsigned*>(out)[n * 4 + pair] =
                        pack<T>(sums[n][2 * h] * factor, sums[n][2 * h + 1] * factor);
        }
    }
};

template <typename, int DIM, int KEYS> constexpr Launch attention_mma_launch() {
    return {MMA_THREADS, Form<DIM, KEYS>::BYTES};
}

template <typename T, int DIM, int KEYS>
__global__ void __launch_bounds__(MMA_THREADS, 2) attention_mma(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = Form<DIM, KEYS>;
    extern __shared__ __align__(128) char shared[];
    const Part<QUERIES> part(p);
    if (part.rows <= 0) return;
    const int head = blockIdx.y;
    const char* q = p.q + part.first * p.q_strides[0] + head * p.q_strides[1];
    const char* k = p.k + part.keys_begin * p.k_strides[0] + head / p.group * p.k_strides[1];
    const char* v = p.v + part.keys_begin * p.v_strides[0] + head / p.group * p.v_strides[1];
    char* const stages = shared + QUERIES * F::LINE;
    const auto copy_stage = [&](int key) {
        char* const to = stages + key / KEYS % 2 * F::STAGE;
        copy_tile<F, KEYS>(to, k + key * p.k_strides[0], p.k_strides[0], part.keys - key, p.dim);
        copy_tile<F, KEYS>(to + F::TILE, v + key * p.v_strides[0], p.v_strides[0], part.keys - key, p.dim);
        cp_async_commit_group();
    };
    if (part.keys > 0) {
        copy_tile<F, QUERIES>(shared, q, p.q_strides[0], part.rows, p.dim);
        copy_stage(0); // in one commit group with the queries
    }

    Warp<T, DIM, KEYS> warp;
#pragma unroll 1
    for (int key = 0; key < part.keys; key += KEYS) {
        cp_async_wait_group<0>();
        __syncthreads(); // this stage is loaded, and the other stage has been read
        if (key + KEYS < part.keys) copy_stage(key + KEYS);
        const unsigned stage = shared_address(stages + key / KEYS % 2 * F::STAGE);
        warp.multiply_keys(shared_address(shared), stage);
        warp.weigh(p, part, key);
        warp.multiply_values(stage + F::TILE);
    }
    warp.store(p, part, head);
}
