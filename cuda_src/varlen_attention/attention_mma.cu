// Attention over packed sequences or a paged cache, for 16-bit elements, with mma.sync, for every GPU from sm_80 on.
//
//   score[i, j] = scale * dot(q[i, head, :], k[j, head / group, :])     for the keys j in the window of query i
//                 with a softcap: softcap * tanh(score / softcap)
//   out[i]      = sum over j of softmax(score[i, :])[j] * v[j, head / group, :]
//
// sequences.cuh defines the window, and the tiles of queries. With sinks the softmax has one more score, sinks[head],
// whose value is 0. The result of a query that sees no key is 0. Weights are rounded to T before their MMA with the
// values. All sums are in float32, including the sum of the weights.
//
//   T      __half or __nv_bfloat16
//   DIM    padded size of a head, at least p.dim and p.dim_v; the padding is 0
//   KEYS   keys of a tile
//
// Grid: see tile_of_block. A block of 4 warps computes a tile of 64 rows, 16 per warp, and loops over the keys in tiles
// of KEYS keys, which begin at multiples of KEYS. Scores stay in the registers of their warp: the C fragments of the
// first MMA become the A fragments of the second (FlashAttention-2, Dao, 2023). Shared memory holds the queries and two
// stages of keys and values. While the MMAs of one stage run, cp.async fills the other stage.
//
// Speed of light: for long sequences the tensor cores, with 4 * dim flops for each pair of a query and a key. For short
// sequences memory bandwidth is the limit: queries, keys and values are read, and the results are written. mma.sync
// reaches only part of the tensor cores' rate on Hopper.
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "varlen_attention/sequences.cuh"

constexpr int MMA_THREADS = 128, ROWS = 64;

// The sizes of a block. A line of shared memory is a row of 16-byte chunks. In a line of 128 or more bytes, chunk c of
// row r is stored at position `c ^ (r % 8)`. In a line of 64 bytes it is stored at position `c ^ (r / 2 % 4)`. With
// this swizzle ldmatrix reads chunk c of 8 rows without bank conflicts.
template <int DIM, int KEYS> struct Form {
    static constexpr int LINE = DIM * 2, CHUNKS = DIM / 8;
    static constexpr int TILE = KEYS * LINE, STAGE = 2 * TILE; // in bytes; a stage has keys, then values
    static constexpr int BYTES = ROWS * LINE + 2 * STAGE;

    static __device__ __forceinline__ unsigned at(int row, int chunk) {
        return row * LINE + (chunk ^ (LINE >= 128 ? row & 7 : row >> 1 & 3)) * 16;
    }
};

// Issue the copies of COUNT rows of `dim` elements. address_of(row) is the address of a row, or null. Set rows without
// an address and the padding to 0.
template <typename F, int COUNT, class Address>
__device__ __forceinline__ void copy_tile(char* to, int dim, Address address_of) {
    static_assert(COUNT * F::CHUNKS % MMA_THREADS == 0, "all threads copy equally many chunks");
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * F::CHUNKS; i += MMA_THREADS) {
        const int row = i / F::CHUNKS, chunk = i % F::CHUNKS;
        char* const place = to + F::at(row, chunk);
        const char* const from = chunk * 8 < dim ? address_of(row) : nullptr;
        if (from)
            cp_async(shared_address(place), from + chunk * 16);
        else
            *reinterpret_cast<uint4*>(place) = {};
    }
}

// The state of a thread. It holds rows `row` and `row + 8` of the warp's 16 rows, and in each group of 8 columns the
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
    __device__ __forceinline__ void weigh(const Params& p, const Tile& tile, int first_key) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = (first + row + 8 * h) / p.pack;
            float most = -CUDART_INF_F;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) {
                    const bool sees = tile.sees(token, first_key + n * 8 + pair * 2 + i % 2);
                    scores[n][i] = sees ? score_of(p, scores[n][i]) : -CUDART_INF_F;
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

    __device__ __forceinline__ void store(const Params& p, const Tile& tile, int tile_tokens, bool is_invalid) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = lanes_sum<4>(softmax[h].total);
            const int token = (first + row + 8 * h) / p.pack, head = tile.first_head + (first + row + 8 * h) % p.pack;
            if (token >= min(tile.tokens, tile_tokens)) continue;
            const Normal normal(softmax[h].largest, total, p.sinks, p.sinks ? sink_of(p, head) : 0.f);
            const float factor = is_invalid ? CUDART_NAN_F : normal.factor;
            const long long of_q = tile.first + token;
            if (p.lse && pair == 0) p.lse[head * (long long)p.tokens + of_q] = is_invalid ? CUDART_NAN_F : normal.lse;
            char* const out = p.out + (of_q * p.heads + head) * p.dim_v * 2;
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                if (n * 8 < p.dim_v)
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
    const int tile_tokens = ROWS / p.pack;
    const Tile tile = tile_of_block(p, tile_tokens);
    if (tile.tokens <= 0) return;
    __shared__ int is_invalid; // the sequence does not fit in its table, or a page is not in the cache
    if (threadIdx.x == 0) is_invalid = tile.invalid;
    __syncthreads();
    const Rows k(p, tile, p.k, p.k_strides), v(p, tile, p.v, p.v_strides);
    char* const stages = shared + ROWS * F::LINE;
    const int first_key = tile.begin / KEYS * KEYS;
    const auto copy_stage = [&](int key) {
        char* const to = stages + key / KEYS % 2 * F::STAGE;
        const auto address_in = [&](const Rows& rows) {
            return [&, key](int row) -> const char* {
                if (key + row < tile.begin || key + row >= tile.end) return nullptr;
                const char* const from = rows.at(key + row);
                if (!from) is_invalid = 1;
                return from;
            };
        };
        copy_tile<F, KEYS>(to, p.dim, address_in(k));
        copy_tile<F, KEYS>(to + F::TILE, p.dim_v, address_in(v));
        cp_async_commit_group();
    };
    if (tile.end > 0) {
        copy_tile<F, ROWS>(shared, p.dim, [&](int row) -> const char* {
            const int token = row / p.pack;
            if (token >= min(tile.tokens, tile_tokens)) return nullptr;
            return p.q + (tile.first + token) * p.q_strides[0] + (tile.first_head + row % p.pack) * p.q_strides[1];
        });
        copy_stage(first_key); // in one commit group with the queries
    }

    Warp<T, DIM, KEYS> warp;
#pragma unroll 1
    for (int key = first_key; key < tile.end; key += KEYS) {
        cp_async_wait_group<0>();
        __syncthreads(); // this stage is loaded, and the other stage has been read
        if (key + KEYS < tile.end) copy_stage(key + KEYS);
        const unsigned stage = shared_address(stages + key / KEYS % 2 * F::STAGE);
        warp.multiply_keys(shared_address(shared), stage);
        warp.weigh(p, tile, key);
        warp.multiply_values(stage + F::TILE);
    }
    warp.store(p, tile, tile_tokens, is_invalid);
}
