// Send each token's row over NVLink to every rank that has at least one of the token's experts, once per rank.
//
//   rows[s, t]    = hidden[t] of source s, unchanged or in FP8 (one scale per 128 elements), if at least one of the
//                   experts of token t is on this rank
//   ids[s, t]     = topk_ids[t] of source s; -1 if source s has no token t
//   weights[s, t] = topk_weights[t] of source s; 0 if source s has no token t
//
// The source of a token is the rank that owns it. (source, token) is the index of a received row, so the ranks need not
// exchange counts first. The received row of a token without an expert on this rank is undefined. Each rank may have a
// different number of tokens, at most max_tokens.
//
// Grid: blocks of 256 threads. A window is memory of a rank that all ranks can write to. A block stores every
// gridDim.x-th token's row into the windows of the ranks that have its experts. After its last token it signals all
// ranks, waits for all sources, and copies its share of the ids and weights out of the window. PHASES: SEND and
// RECEIVE, in one launch or two.
//
// Speed of light: with many tokens the kernel is bound by the bandwidth to the peers; each row crosses NVLink once per
// destination rank. With few tokens it is bound by the latency of a store to a peer, a release and the atomic addition
// of the signal. On two H200s, with rows of 7168 FP8 elements, 4096 tokens per rank take 97 us, which is 86% of the
// bandwidth of plain stores to the peer. 128 tokens take 8.1 us and 8 tokens take 5.1 us; a minimal exchange of 16
// bytes and a flag takes 2.9 us.
#include "all_to_all/window.cuh"
#include "common/quantize.cuh"

constexpr int THREADS = 256, GROUP = 128; // GROUP elements share a scale
constexpr int RESIDENT = 4;               // resident blocks per multiprocessor

struct Params {
    Ranks ranks;
    const void* hidden;   // [tokens, width]  T if quantized here, else rows of `width` bytes
    const float* scales;  // [tokens, scale_columns], sent unchanged; null if computed here
    const void* topk_ids; // [tokens, topk]  ID
    const float* weights; // [tokens, topk]
    int* ids_out;         // [ranks, max_tokens, topk]
    float* weights_out;   // [ranks, max_tokens, topk]
    int* expert_load;     // [experts], plus the slots received per expert of this rank; may be null
    long long rows_at;    // byte offsets in a window, for this call's buffer
    long long scales_at;
    long long ids_at;
    long long weights_at;
    int tokens, width, scale_columns, topk, max_tokens, buffer;
};

// One thread's share of a row. The thread sends it as vectors of 16 bytes. If QUANTIZE, a sent vector has 16 FP8
// elements.
template <typename T, bool QUANTIZE> struct RowVectors {
    // VECTORS is smaller on architectures other than Hopper, where the compiler uses more registers.
    static constexpr int VECTORS = !QUANTIZE ? 4 : __CUDA_ARCH__ == 900 ? 2 : 1, LOADS = QUANTIZE ? 2 : 1;
    static constexpr int PER_VECTOR = 16; // elements if QUANTIZE, else bytes
    uint4 loaded[VECTORS][LOADS];

    __device__ __forceinline__ void load(const Params& p, int token, int first) {
        const int vectors = p.width / PER_VECTOR;
        const uint4* const row = static_cast<const uint4*>(p.hidden) + (long long)token * vectors * LOADS;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int vector = first + i * THREADS;
#pragma unroll
            for (int j = 0; j < LOADS; ++j) loaded[i][j] = vector < vectors ? row[vector * LOADS + j] : uint4{};
        }
    }

    // Return vector i as it is sent, and set `scale` to the scale of its group. All lanes of a warp must call this.
    __device__ __forceinline__ uint4 vector(int i, float& scale) const {
        if constexpr (!QUANTIZE) {
            return loaded[i][0];
        } else {
            float value[PER_VECTOR], largest = 0;
            const T* const numbers = reinterpret_cast<const T*>(loaded[i]);
#pragma unroll
            for (int n = 0; n < PER_VECTOR; ++n) {
                value[n] = to_float(numbers[n]);
                largest = fmaxf(largest, fabsf(value[n]));
            }
            scale = scale_of<E4M3>(lanes_max<GROUP / PER_VECTOR>(largest), 1e-10f, false);
            const Quotient<SMALL> quotient(scale);
            uint2 bytes[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float eight[8];
#pragma unroll
                for (int n = 0; n < 8; ++n) eight[n] = quotient(value[half * 8 + n]);
                bytes[half] = to_bytes<E4M3, 8>(eight, 0.f);
            }
            return make_uint4(bytes[0].x, bytes[0].y, bytes[1].x, bytes[1].y);
        }
    }
};

// Return, in all lanes, a mask of the ranks that have an expert of the token.
template <typename ID> __device__ __forceinline__ unsigned ranks_of(const Params& p, int token) {
    unsigned mask = 0;
    for (int k = threadIdx.x % 32; k < p.topk; k += 32) {
        const int owner = p.ranks.owner(static_cast<const ID*>(p.topk_ids)[(long long)token * p.topk + k]);
        if (owner >= 0) mask |= 1u << owner;
    }
    return __reduce_or_sync(FULL_WARP, mask);
}

template <typename ID> __device__ __forceinline__ void send_routing(const Params& p, int token, long long place) {
    for (int i = threadIdx.x; i < p.ranks.ranks * p.topk; i += THREADS) {
        const int rank = i / p.topk, k = i - rank * p.topk;
        const ID id = static_cast<const ID*>(p.topk_ids)[(long long)token * p.topk + k];
        const float weight = p.weights[(long long)token * p.topk + k];
        char* const window = p.ranks.windows[rank];
        reinterpret_cast<int*>(window + p.ids_at)[place * p.topk + k] = id < ID(p.ranks.experts) ? int(id) : -1;
        reinterpret_cast<float*>(window + p.weights_at)[place * p.topk + k] = weight;
    }
}

__device__ __forceinline__ void send_scales(const Params& p, int token, long long place, unsigned mask) {
    for (int i = threadIdx.x; i < p.scale_columns; i += THREADS) {
        const float scale = p.scales[(long long)token * p.scale_columns + i];
        for (unsigned remaining = mask; remaining; remaining &= remaining - 1) {
            char* const window = p.ranks.windows[__ffs(remaining) - 1];
            reinterpret_cast<float*>(window + p.scales_at)[place * p.scale_columns + i] = scale;
        }
    }
}

template <typename T, typename ID, bool QUANTIZE>
__device__ __forceinline__ void send_token(const Params& p, int token) {
    using Sent = RowVectors<T, QUANTIZE>;
    const int vectors = p.width / Sent::PER_VECTOR;
    const long long place = (long long)p.ranks.rank * p.max_tokens + token;
    unsigned mask = 0;
    for (int first = threadIdx.x; first - int(threadIdx.x) < vectors; first += Sent::VECTORS * THREADS) {
        Sent sent_vectors;
        sent_vectors.load(p, token, first);
        if (first == threadIdx.x) {
            send_routing<ID>(p, token, place);
            mask = ranks_of<ID>(p, token);
        }
#pragma unroll
        for (int i = 0; i < Sent::VECTORS; ++i) {
            const int vector = first + i * THREADS;
            float scale = 0;
            const uint4 bytes_to_send = sent_vectors.vector(i, scale);
            if (vector >= vectors) continue;
            for (unsigned remaining = mask; remaining; remaining &= remaining - 1) {
                char* const window = p.ranks.windows[__ffs(remaining) - 1];
                reinterpret_cast<uint4*>(window + p.rows_at)[place * vectors + vector] = bytes_to_send;
                if (QUANTIZE && vector % (GROUP / Sent::PER_VECTOR) == 0) {
                    const int group = vector / (GROUP / Sent::PER_VECTOR);
                    reinterpret_cast<float*>(window + p.scales_at)[place * (p.width / GROUP) + group] = scale;
                }
            }
        }
    }
    if (!QUANTIZE && p.scales) send_scales(p, token, place, mask);
}

// Wait until this call's buffer is free, and return false if the wait failed. If the last dispatch used the same
// buffer, a rank may still be reading it, until the rank has entered this dispatch.
__device__ __forceinline__ bool buffer_is_free(const Params& p, unsigned long long step) {
    if (step == 0 || p.ranks.progress->buffer != p.buffer) return true;
    const int rank = threadIdx.x;
    bool arrived = true;
    if (rank < p.ranks.ranks) {
        if (blockIdx.x == 0) store_release(&p.ranks.signals(rank).entered[p.ranks.rank], step + 1);
        const unsigned long long* const from = &p.ranks.signals(p.ranks.rank).entered[rank];
        arrived = wait_for(p.ranks, rank, DISPATCH, step, [&] { return load_acquire(from) >= step + 1; });
    }
    return __syncthreads_and(arrived);
}

// Each block adds 1 to the signal, and block 0 adds the rest, so that every call adds ARRIVALS in all, for any number
// of blocks.
__device__ __forceinline__ void signal(const Params& p, unsigned long long step) {
    __syncthreads();
    const int senders = max(1, min(int(gridDim.x), p.tokens));
    if (threadIdx.x >= p.ranks.ranks || blockIdx.x >= senders) return;
    Signals& signals = p.ranks.signals(threadIdx.x);
    if (blockIdx.x == 0) signals.batches[step & 1][p.ranks.rank] = 2u * p.tokens + p.buffer;
    add_release(&signals.dispatched[p.ranks.rank], blockIdx.x == 0 ? ARRIVALS - (senders - 1) : 1);
}

__device__ __forceinline__ void receive(const Params& p, unsigned long long step) {
    const int slots_per_rank = p.max_tokens * p.topk, total_slots = p.ranks.ranks * slots_per_rank,
              first = blockIdx.x * THREADS;
    if (first >= total_slots && blockIdx.x > 0) return;
    const int rank = p.ranks.rank;
    const Signals& signals = p.ranks.signals(rank);
    __shared__ int tokens[MAX_RANKS];
    // If a source's `buffer` differs from this rank's, the source made a different call, and the received data is
    // invalid.
    bool signaled = true, same_buffer = true;
    if (threadIdx.x < p.ranks.ranks) {
        const int source = threadIdx.x;
        const unsigned long long* const from = &signals.dispatched[source];
        signaled =
            wait_for(p.ranks, source, DISPATCH, step, [&] { return load_acquire(from) >= (step + 1) * ARRIVALS; });
        const unsigned batch = load_volatile(signals.batches[step & 1][source]);
        same_buffer = int(batch & 1) == p.buffer;
        tokens[source] = int(batch / 2);
    }
    const bool arrived = __syncthreads_and(signaled && same_buffer);
    const char* const window = p.ranks.windows[rank];
    for (int i = first + threadIdx.x; i < total_slots; i += gridDim.x * THREADS) {
        const int source = i / slots_per_rank, token = (i - source * slots_per_rank) / p.topk;
        const int id = __ldcg(reinterpret_cast<const int*>(window + p.ids_at) + i);
        const float weight = __ldcg(reinterpret_cast<const float*>(window + p.weights_at) + i);
        const bool valid = arrived && token < tokens[source];
        p.ids_out[i] = valid ? id : -1;
        p.weights_out[i] = valid ? weight : 0.f;
        if (p.expert_load && valid && p.ranks.owner(unsigned(id)) == rank) atomicAdd(&p.expert_load[id], 1);
    }
    if (blockIdx.x > 0 || threadIdx.x >= p.ranks.ranks) return;
    p.ranks.progress->tokens[threadIdx.x] = arrived ? tokens[threadIdx.x] : 0;
    if (signaled && !same_buffer) fail(p.ranks, OTHER_CALL, threadIdx.x, DISPATCH, step);
}

// T: element type of `hidden` if QUANTIZE.
template <typename T, typename ID, bool QUANTIZE, int PHASES>
__global__ void __launch_bounds__(THREADS, RESIDENT) dispatch_tokens(const __grid_constant__ Params p) {
    Progress& progress = *p.ranks.progress;
    const unsigned long long step = progress.dispatches;
    const bool failed = load_volatile(progress.failed);
    if constexpr (PHASES & SEND) {
        if (!failed && buffer_is_free(p, step)) {
            for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) send_token<T, ID, QUANTIZE>(p, token);
            signal(p, step);
        }
    }
    if constexpr (PHASES & RECEIVE) {
        __syncthreads();
        if (threadIdx.x == THREADS - 1 && is_last_block(progress))
            progress.dispatches = step + 1, progress.buffer = p.buffer;
        receive(p, step);
    }
}
