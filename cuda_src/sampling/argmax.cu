// Return the id of the largest logit of each row, or the lowest id of equal logits: `cukern.sample` at temperature 0.
//
//   token = the smallest i with x[i] = max x         0 if a value is NaN or all values are -inf
//
// Grid: CLUSTER blocks per row. Each thread packs its best value and id into one integer (`order_key`), and the maximum
// over the cluster gives the token.
//
// Speed of light: memory bandwidth. A single row is bound by the latency of one batch of loads and two cluster
// barriers.
#include "common/cluster.cuh"
#include "common/overlap.cuh"
#include "common/warp.cuh"
#include "sampling/order.cuh"
#include "sampling/params.cuh"

constexpr int MAX_ARGMAX_WARPS = 32;
constexpr int LOADS = 4; // vectors in flight per thread

struct ArgmaxParams {
    const void* values;      // [rows, vocab] T
    void* ids;               // [batch] int; long long if the indices are long long
    const void* indices;     // [batch]: the row of each sequence, or null
    unsigned char* finished; // [batch] bool, or null
    int* sequence_length;    // [batch], or null
    long long row_stride;
    int rows, vocab, end_id;
    int wide; // whether indices and ids are long long
};

__device__ __forceinline__ unsigned long long best_of_lanes(unsigned long long mine) {
    const unsigned high = __reduce_max_sync(FULL_WARP, unsigned(mine >> 32));
    const unsigned low = __reduce_max_sync(FULL_WARP, unsigned(mine >> 32) == high ? unsigned(mine) : 0);
    return (unsigned long long)high << 32 | low;
}

// The best token that a thread has read. As in all samplers, the largest float replaces +inf.
struct Best {
    float value = -CUDART_INF_F;
    float value_or_nan = -CUDART_INF_F;
    int id = NO_ID;

    __device__ __forceinline__ void take(float x, int at) {
        x = min_or_nan(x, LARGEST_FLOAT);
        value_or_nan = max_or_nan(value_or_nan, x);
        if (x > value) value = x, id = at;
    }
};

// Return the `order_key` of the best token in this thread's vectors of 16 aligned bytes. A vector that crosses an end
// of the row is read value by value.
template <typename T>
__device__ __forceinline__ unsigned long long best_of_vectors(const T* row, int vocab, int thread, int threads) {
    constexpr int N = 16 / sizeof(T);
    const int shift = unsigned((unsigned long long)row % 16) / sizeof(T); // values before the row
    const int vectors = (vocab + shift + N - 1) / N;
    const T* const from = row - shift;
    Best best;
    for (int start = thread; start < vectors; start += LOADS * threads) {
        uint4 bits[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const int first = (start + j * threads) * N;
            if (first >= shift && first + N <= vocab + shift) bits[j] = *reinterpret_cast<const uint4*>(from + first);
        }
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const int first = (start + j * threads) * N;
            if (first >= shift && first + N <= vocab + shift) {
                const T* const x = reinterpret_cast<const T*>(&bits[j]);
#pragma unroll
                for (int c = 0; c < N; ++c) best.take(to_float(x[c]), first - shift + c);
            } else {
                for (int at = max(first, shift); at < min(first + N, vocab + shift); ++at)
                    best.take(to_float(from[at]), at - shift);
            }
        }
    }
    return order_key(best.value_or_nan == best.value_or_nan ? best.value : best.value_or_nan, best.id);
}

__device__ __forceinline__ void write_token(const ArgmaxParams& params, int i, int id) {
    if (params.wide)
        static_cast<long long*>(params.ids)[i] = id;
    else
        static_cast<int*>(params.ids)[i] = id;
}

template <typename T, int CLUSTER>
__global__ void CLUSTER_OF(CLUSTER) __launch_bounds__(32 * MAX_ARGMAX_WARPS)
    argmax(const __grid_constant__ ArgmaxParams params) {
    begin_behind_earlier_kernels();
    if constexpr (CLUSTER == 1 || HAS_CLUSTERS) {
        const int i = blockIdx.x / CLUSTER, rank = cluster_rank<CLUSTER>();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        if (params.finished && params.finished[i]) {
            if (rank == 0 && threadIdx.x == 0) write_token(params, i, params.end_id);
            return;
        }
        cluster_arrive<CLUSTER>();
        long long row = params.indices ? integer_at(params.indices, params.wide, i) : i;
        row = max(0ll, min(row, (long long)params.rows - 1));

        __shared__ unsigned long long of_warp[MAX_ARGMAX_WARPS], of_block[CLUSTER];
        const unsigned long long mine =
            best_of_lanes(best_of_vectors(static_cast<const T*>(params.values) + row * params.row_stride, params.vocab,
                                          rank * blockDim.x + threadIdx.x, CLUSTER * blockDim.x));
        if (lane == 0) of_warp[warp] = mine;
        __syncthreads();
        // Shared memory of another block exists only after that block has started.
        if constexpr (CLUSTER > 1) cluster_wait<CLUSTER>();
        if (warp == 0) {
            const unsigned long long best = best_of_lanes(lane < warps ? of_warp[lane] : 0);
            if (lane == 0) dsmem_store<CLUSTER>(0, &of_block[rank], best);
        }
        cluster_sync<CLUSTER>();
        if (rank != 0 || warp != 0) return;
        const unsigned long long best = best_of_lanes(lane < CLUSTER ? of_block[lane] : 0);
        const float value = from_sortable(unsigned(best >> 32));
        const bool valid = value >= -LARGEST_FLOAT && value <= LARGEST_FLOAT;
        const int id = valid ? int(~unsigned(best)) : 0;
        if (lane != 0) return;
        write_token(params, i, id);
        if (params.sequence_length) params.sequence_length[i] += 1;
        if (params.finished) params.finished[i] = id == params.end_id;
    }
}
