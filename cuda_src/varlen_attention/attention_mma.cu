// Compute the attention of varlen_attention/sequences.cuh for 16-bit elements, with mma.sync.
//
//   DIM    padded head_dim, at least p.dim; the padding is 0
//   KEYS   keys of a tile
//
// Grid: (tiles of queries, heads). A block of 4 warps computes 64 queries, 16 per warp, and loops over tiles of KEYS
// keys. The C fragments of the scores become A fragments of the weights in registers (FlashAttention-2, Dao, 2023).
// Shared memory holds the queries and two stages of keys and values: cp.async fills one stage during the MMAs of the
// other.
//
// Speed of light: the tensor cores, with 4 * dim flops per query and key. On Hopper, mma.sync reaches only part of
// their rate. Short sequences are bound by memory bandwidth.
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int MMA_THREADS = 128, QUERIES = 64;

// Row r in shared memory stores 16-byte chunk c at position `c ^ (r % 8)`, or in rows of 64 bytes at `c ^ (r / 2 % 4)`,
// so that ldmatrix reads chunk c of 8 rows without bank conflicts.
template <int DIM, int KEYS> struct SharedLayout {
    static constexpr int ROW_BYTES = DIM * 2, CHUNKS = DIM / 8;
    static constexpr int TILE = KEYS * ROW_BYTES, STAGE = 2 * TILE; // bytes; a stage has keys, then values
    static constexpr int BYTES = QUERIES * ROW_BYTES + 2 * STAGE;

    static __device__ __forceinline__ unsigned offset(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ (ROW_BYTES >= 128 ? row & 7 : row >> 1 & 3)) * 16;
    }
};

// Copy the first `rows` of ROWS rows. Other rows and the padding become 0 without being read.
template <typename F, int ROWS>
__device__ __forceinline__ void copy_tile(char* to, const char* from, long long stride, int rows, int dim) {
    static_assert(ROWS * F::CHUNKS % MMA_THREADS == 0, "all threads copy equally many chunks");
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * F::CHUNKS; i += MMA_THREADS) {
        const int row = i / F::CHUNKS, chunk = i % F::CHUNKS;
        char* const chunk_address = to + F::offset(row, chunk);
        if (row < rows && chunk * 8 < dim)
            cp_async(shared_address(chunk_address), from + row * stride + chunk * 16);
        else
            *reinterpret_cast<uint4*>(chunk_address) = {};
    }
}

// A thread holds rows `row` and `row + 8` of the warp's 16 queries, and columns `2 * pair` and `2 * pair + 1` of each
// group of 8 columns.
template <typename T, int DIM, int KEYS> struct Warp {
    using F = SharedLayout<DIM, KEYS>;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16, row = lane / 4, pair = lane % 4;
    Softmax softmax[2]; // row_sum covers only this lane's keys until the epilogue
    float scores[KEYS / 8][4];
    float sums[DIM / 8][4] = {};

    __device__ __forceinline__ void multiply_keys(unsigned queries, unsigned keys) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.f;
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            unsigned a[4], b[4];
            ldmatrix(a, queries + F::offset(first_row + lane % 16, d * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                ldmatrix(b, keys + F::offset(n * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
                mma_m16n8k16<T>(scores[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(scores[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    // Convert `scores` to softmax weights, and rescale `sums` to the new running maxima.
    __device__ __forceinline__ void online_softmax(const Params& p, const WorkTile<QUERIES>& work, int first_key) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float tile_max = -CUDART_INF_F;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) {
                    const bool attends = work.attends(p, first_row + row + 8 * h, first_key + n * 8 + pair * 2 + i % 2);
                    scores[n][i] = attends ? scores[n][i] * p.scale : -CUDART_INF_F;
                    tile_max = fmaxf(tile_max, scores[n][i]);
                }
            const float factor = softmax[h].update_max(lanes_max<4>(tile_max));
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n) sums[n][2 * h] *= factor, sums[n][2 * h + 1] *= factor;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) scores[n][i] = softmax[h].add_score(scores[n][i]);
        }
    }

    __device__ __forceinline__ void multiply_values(unsigned values) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            const float (&low)[4] = scores[2 * k], (&high)[4] = scores[2 * k + 1];
            const unsigned a[4] = {pack<T>(low[0], low[1]), pack<T>(low[2], low[3]), pack<T>(high[0], high[1]),
                                   pack<T>(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < DIM / 16; ++n) {
                unsigned b[4];
                ldmatrix_trans(b, values + F::offset(k * 16 + lane % 16, n * 2 + lane / 16));
                mma_m16n8k16<T>(sums[2 * n], a, b[0], b[1]);
                mma_m16n8k16<T>(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void store(const Params& p, const WorkTile<QUERIES>& work, int head) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float factor = normalization(lanes_sum<4>(softmax[h].row_sum));
            const int tile_row = first_row + row + 8 * h;
            if (tile_row >= work.rows) continue;
            char* const out = p.out + ((long long)(work.first_row + tile_row) * p.heads + head) * p.dim * 2;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                if (n * 8 < p.dim)
                    reinterpret_cast<unsigned*>(out)[n * 4 + pair] =
                        pack<T>(sums[n][2 * h] * factor, sums[n][2 * h + 1] * factor);
        }
    }
};

template <typename, int DIM, int KEYS> constexpr Launch attention_mma_launch() {
    return {MMA_THREADS, SharedLayout<DIM, KEYS>::BYTES};
}

template <typename T, int DIM, int KEYS>
__global__ void __launch_bounds__(MMA_THREADS, 2) attention_mma(const __grid_constant__ Params p) {
    wait_for_earlier_kernels();
    using F = SharedLayout<DIM, KEYS>;
    extern __shared__ __align__(128) char shared[];
    const WorkTile<QUERIES> work(p);
    if (work.rows <= 0) return;
    const int head = blockIdx.y;
    const char* q = p.q + work.first_row * p.q_strides[0] + head * p.q_strides[1];
    const char* k = p.k + work.keys_begin * p.k_strides[0] + head / p.group * p.k_strides[1];
    const char* v = p.v + work.keys_begin * p.v_strides[0] + head / p.group * p.v_strides[1];
    char* const stages = shared + QUERIES * F::ROW_BYTES;
    const auto copy_stage = [&](int key) {
        char* const to = stages + key / KEYS % 2 * F::STAGE;
        copy_tile<F, KEYS>(to, k + key * p.k_strides[0], p.k_strides[0], work.keys - key, p.dim);
        copy_tile<F, KEYS>(to + F::TILE, v + key * p.v_strides[0], p.v_strides[0], work.keys - key, p.dim);
        cp_async_commit_group();
    };
    if (work.keys > 0) {
        copy_tile<F, QUERIES>(shared, q, p.q_strides[0], work.rows, p.dim);
        copy_stage(0); // in one commit group with the queries
    }

    Warp<T, DIM, KEYS> warp;
#pragma unroll 1
    for (int key = 0; key < work.keys; key += KEYS) {
        cp_async_wait_group<0>();
        __syncthreads(); // this stage is loaded, and the other stage has been read
        if (key + KEYS < work.keys) copy_stage(key + KEYS);
        const unsigned stage = shared_address(stages + key / KEYS % 2 * F::STAGE);
        warp.multiply_keys(shared_address(shared), stage);
        warp.online_softmax(p, work, key);
        warp.multiply_values(stage + F::TILE);
    }
    warp.store(p, work, head);
}
