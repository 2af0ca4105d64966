// Attention at decode time over a latent cache (multi-head latent attention, DeepSeek): the heads of a group share one
// key per token, and the value of a token is the first head_dim_v numbers of its key.
//
//   score[t] = scale * dot(q[b, i, head, :], cache[t, head / group, :])    if causal for t <= length - query_tokens + i
//   p        = softmax over the tokens
//   out      = sum_t p[t] * cache[t, head / group, : head_dim_v], times exp(lse) / (exp(lse) + exp(sink[head]))
//   lse      = log sum_t exp(score[t])
//
// A row with no token has out = 0 and lse = +inf. Token t of a sequence is slot t % page_size of page
// block_table[b, t / page_size]. With `indices` the tokens of a query are the slots that it names, counted over all
// pages, and every query is a sequence of its own.
//
// The rows of a (sequence, kv head) are its query tokens times the heads of the group: the cache is read once for all
// of them. Sequences are cut into blocks of 64 tokens, which `plan_parts` deals out to `parts`, one per multiprocessor. A
// part visits one sequence after the other; what several parts found of a sequence is put together by `combine_parts`.
//
//   plan_parts<>            1 block of 256 threads
//   attend_mma<...>         (ceil(rows / ROWS), kv_heads, parts) blocks of 256 threads, Form<...>::BYTES of dynamic
//                           shared memory
//   attend_wgmma<...>       (ceil(rows / 64), kv_heads, parts) blocks of 384 threads, all the shared memory
//   combine_parts<T, DIM_V, 1, EACH>   (any, kv_heads, parts) blocks of 256 threads; EACH * 128 columns at least
//   combine_parts<T, DIM_V, 8, EACH>   (sequences * rows, kv_heads, ceil(head_dim_v / (EACH * 128))) blocks of 256 threads
//
// Scores are kept in powers of 2 until they are stored.
#include "common/fp8.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"

constexpr float LN_2 = 0.693147180559945309f;
constexpr int BLOCK_TOKENS = 64; // of the plan
constexpr int FIXED = 5;         // what a visit costs besides its blocks, in blocks

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ------------------------------------------------------------------------------------------------------------ the plan

struct PlanParams {
    const int* lengths; // [sequences]; null: all of `length`
    int* metadata;      // [parts, 8]: first sequence, its first block, last sequence, its last block + 1, number of the
                        // split of the first sequence, 0, 0, 0; of an unused part: sequences, 0, ...
    int* splits;        // [sequences + 1]: visits to the sequences before
    int sequences, parts, length;
};

// Each part takes sequences in their order until its load is used up, where a visit costs FIXED and its blocks. The
// load is the smallest for which the parts suffice: between ceil(total / parts) and 2 FIXED more, since no part wastes
// more than FIXED at its end and pays FIXED again for going on with a sequence.
//
// Lane l of the first warp tries the l-th load, sequence by sequence, on a short chain: let `room` be the blocks that
// still go into the part after a fixed cost (`most` if it is new), and let n = whole * most + rest with 1 <= rest <=
// most (n = 0: both 0). Where room < rest, either the sequence begins in a new part (room <= 0), or its last part is
// one further on; both come to
//
//   part += whole + (room < rest),   room = max(room, 0) + (room < rest ? most : 0) - rest - FIXED.
//
// All threads prepare `whole` and `rest`, and afterwards write what follows from part and room before each sequence.
constexpr int LOADS = 2 * FIXED + 1, PLAN_CHUNK = 256;

template <int PLAN_THREADS = 256>
__global__ __launch_bounds__(PLAN_THREADS) void plan_parts(const __grid_constant__ PlanParams p) {
    // Before the sequences of a chunk have been dealt out: whole, rest. After: part and room before each.
    __shared__ int2 steps[PLAN_CHUNK * LOADS];
    // The parts up to there that began with a whole sequence.
    __shared__ int fresh[PLAN_CHUNK * LOADS];
    __shared__ int blocks[PLAN_CHUNK];
    __shared__ long long totals[PLAN_THREADS / 32];
    __shared__ int chosen;
    const int thread = threadIdx.x, lane = thread % 32;
    auto blocks_of = [&](int i) {
        const int length = max(p.lengths ? p.lengths[i] : p.length, 0);
        return length / BLOCK_TOKENS + (length % BLOCK_TOKENS > 0);
    };

    for (int i = thread; i < p.parts * 8; i += PLAN_THREADS) p.metadata[i] = i % 8 == 0 ? p.sequences : 0;
    if (p.sequences == 0) {
        if (thread == 0) p.splits[0] = 0;
        return;
    }

    long long total = 0;
    for (int i = thread; i < p.sequences; i += PLAN_THREADS) {
        const int n = blocks_of(i);
        if (i < PLAN_CHUNK) blocks[i] = n;
        total += n + FIXED;
    }
    total = lanes_sum<32>(total);
    if (lane == 0) totals[thread / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < PLAN_THREADS / 32; ++warp) total += totals[warp];
    const long long share = max((total + p.parts - 1) / p.parts, (long long)FIXED + 1);
    const int least = int(min(share, 1ll << 30)) - FIXED; // of `most`

    // Once for all loads; then for the one chosen, whose steps are still there if all sequences were in one chunk.
    const bool one_chunk = p.sequences <= PLAN_CHUNK;
    for (int pass = 0; pass < 2; ++pass) {
        const int loads = pass == 0 ? LOADS : 1, offset = pass == 0 ? 0 : chosen;
        const int most = least + offset + (pass == 0 ? lane : 0);
        int part = 0, room = most, begun = 1;
        for (int start = 0; start < p.sequences; start += PLAN_CHUNK) {
            const int count = min(PLAN_CHUNK, p.sequences - start);
            if (pass == 0 || !one_chunk) {
                if (!one_chunk) {
                    __syncthreads();
                    for (int i = thread; i < count; i += PLAN_THREADS) blocks[i] = blocks_of(start + i);
                    __syncthreads();
                }
                for (int i = thread; i < count * LOADS; i += PLAN_THREADS) {
                    const int n = blocks[i / LOADS], of_load = least + offset + i % LOADS;
                    const int whole = n > 0 ? (n - 1) / of_load : 0;
                    steps[i] = make_int2(whole, n - whole * of_load);
                }
                __syncthreads();
                if (thread < loads) {
                    // Read two ahead: a read does not wait for the writes before it.
                    auto step_of = [&](int i) { return steps[min(i, count - 1) * LOADS + thread]; };
                    int2 step = step_of(0), next = step_of(1);
#pragma unroll 8
                    for (int i = 0; i < count; ++i) {
                        const int2 after = step_of(i + 2);
                        const int at = i * LOADS + thread, whole = step.x, rest = step.y;
                        steps[at] = make_int2(part, room), fresh[at] = begun;
                        const bool less = room < rest;
                        begun += room < min(rest, 1);
                        part += whole + less;
                        room = max(room, 0) + ((less ? most : 0) - rest - FIXED);
                        step = next, next = after;
                    }
                }
            }
            if (pass == 0) continue;
            __syncthreads();
            // LANES lanes for a sequence, which take its visits in turn.
            constexpr int LANES = 8;
            for (int i = thread / LANES; i < count; i += PLAN_THREADS / LANES) {
                const int sequence = start + i, n = blocks[i], at = i * LOADS + (one_chunk ? chosen : 0);
                const int before = steps[at].x, left = steps[at].y, most = least + chosen;
                const bool begins = left < min(n, 1);
                const int first = before + begins, take = min(n, begins ? most : left);
                const int visits = 1 + (n > take ? (n - take - 1) / most + 1 : 0);
                const int earlier = sequence + before + 1 - fresh[at];
                for (int visit = thread % LANES; visit < visits && first + visit < p.parts; visit += LANES) {
                    int* const row = p.metadata + (first + visit) * 8;
                    const int block = visit == 0 ? 0 : take + (visit - 1) * most;
                    if (visit > 0) {
                        row[0] = sequence, row[1] = block, row[4] = visit;
                        row[2 - 8] = sequence, row[3 - 8] = block;
                    } else {
                        p.splits[sequence] = earlier;
                        if (begins || sequence == 0) row[0] = sequence;
                        if (begins)
                            row[2 - 8] = sequence - 1, row[3 - 8] = i > 0 ? blocks[i - 1] : blocks_of(sequence - 1);
                    }
                    if (sequence == p.sequences - 1 && visit == visits - 1) {
                        row[2] = sequence, row[3] = n;
                        p.splits[p.sequences] = earlier + visits;
                    }
                }
            }
        }
        if (pass == 0) {
            const unsigned fits = __ballot_sync(FULL_WARP, lane < LOADS && part < p.parts);
            if (thread == 0) chosen = fits ? __ffs(fits) - 1 : LOADS - 1;
            __syncthreads();
        }
    }
}

// ------------------------------------------------------------------------------------------------- what attention needs

struct Params {
    const void* q;          // [batch, query_tokens, heads, head_dim]  T
    const void* cache;      // [pages, page_size, kv_heads, head_dim]  T, or [..., 656] bytes
    const int* block_table; // [batch, max_pages]
    const int* lengths;     // [batch]
    const int* indices;     // [batch, query_tokens, topk], may be null
    const float* sinks;     // [heads], may be null
    const int* metadata;    // [parts, 8]
    const int* splits;      // [sequences + 1]
    void* out;              // [batch, query_tokens, heads, head_dim_v]  T
    float* lse;             // [batch, heads, query_tokens]
    // What the visits to a sequence found, where there are several: slot 2 (splits[sequence] - sequence) + split.
    float* partial_out;     // [2 parts, kv_heads, rows, head_dim_v], divided by the row's sum
    float* partial_lse;     // [2 parts, kv_heads, rows], in powers of 2; -inf for no token, NaN for a row that is NaN
    long long q_strides[3]; // batch, token, head; elements
    long long cache_strides[3]; // page, token, head; elements, bytes if 8 bits
    long long table_stride;
    long long indices_strides[2]; // batch, token
    int batch, query_tokens, heads, kv_heads, head_dim, head_dim_v;
    int pages, page_size, max_pages, topk, causal, parts;
    float scale_log2;

    __device__ __forceinline__ int group() const { return heads / kv_heads; }
    __device__ __forceinline__ int sequences() const { return indices ? batch * query_tokens : batch; }
    // That share a kv head of a sequence.
    __device__ __forceinline__ int rows() const { return indices ? group() : query_tokens * group(); }
};

// A row of the metadata, with every number in its range whatever the plan holds.
struct Part {
    int first, first_block, last, last_block, split;

    __device__ __forceinline__ Part(const Params& p, int part) {
        const int* const row = p.metadata + part * 8ll;
        constexpr int MOST = 1 << 24;
        const int4 visits = *reinterpret_cast<const int4*>(row);
        first = max(visits.x, 0), first_block = min(max(visits.y, 0), MOST);
        last = min(visits.z, p.sequences() - 1), last_block = min(max(visits.w, 0), MOST);
        split = row[4];
        if (visits.x < 0 || first >= p.sequences()) last = first - 1;
    }
};

// The tokens [begin, end) of a sequence, as one part sees them.
struct Visit {
    int sequence, batch, token; // of the query: the only one if sparse, else the first
    int length, begin, end;
    int before, splits; // visits to the sequences before, and to this one
    bool whole;         // there is room for every token

    // Which queries.
    __device__ __forceinline__ Visit(const Params& p, int sequence) : sequence(sequence) {
        batch = p.indices ? sequence / p.query_tokens : sequence;
        token = p.indices ? sequence - batch * p.query_tokens : 0;
    }

    __device__ __forceinline__ Visit(const Params& p, const Part& part, int sequence) : Visit(p, sequence) {
        before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
        const int wanted = p.indices ? p.topk : max(p.lengths[sequence], 0);
        // Tokens are counted in 32 bits.
        const int capacity = int(min(p.indices ? p.topk : (long long)p.max_pages * p.page_size, 1ll << 30));
        whole = wanted <= capacity, length = min(wanted, capacity);
        begin = sequence == part.first ? part.first_block * BLOCK_TOKENS : 0;
        end = sequence == part.last ? min(part.last_block * BLOCK_TOKENS, length) : length;
    }
};

// Row r of those that share a kv head.
struct Row {
    int token, head; // of the query
    bool valid;

    __device__ __forceinline__ Row(const Params& p, const Visit& visit, int kv_head, int r) {
        const int group = p.group(), of_token = r < group ? 0 : r / group;
        valid = r < p.rows();
        token = visit.token + (valid ? of_token : 0);
        head = kv_head * group + (valid ? r - of_token * group : 0);
    }
};

// The first token that row r does not see, if causal.
__device__ __forceinline__ int causal_end(const Params& p, int length, int r) {
    const int group = p.group();
    return length - p.query_tokens + 1 + (r < group ? 0 : r / group);
}

// What the result of a row is multiplied by for its sink; lse in powers of 2.
__device__ __forceinline__ float sink_factor(const Params& p, int head, float lse) {
    if (!p.sinks || lse == -CUDART_INF_F) return 1.f;
    return 1.f / (1.f + exp2f(p.sinks[head] * LOG2_E - lse));
}

__device__ __forceinline__ void store_lse(const Params& p, const Visit& visit, const Row& row, float lse) {
    p.lse[((long long)visit.batch * p.heads + row.head) * p.query_tokens + row.token] =
        lse == -CUDART_INF_F ? CUDART_INF_F : lse * LN_2;
}

// Where row r of a visit goes: to the caller, or to a slot of the partial results.
template <typename T> struct Destination {
    T* out;
    float* partial; // if not null
    float factor;   // of the sums

    // `writes_lse`: of the lanes that share a row, one. The row's scores were summed up as total * 2^base.
    __device__ __forceinline__ Destination(const Params& p, const Part& part, const Visit& visit, int kv_head, int r,
                                           float base, float total, bool bad, bool writes_lse)
        : out(nullptr), partial(nullptr), factor(0.f) {
        const Row row(p, visit, kv_head, r);
        if (!row.valid) return;
        float lse = total == 0.f ? -CUDART_INF_F : base + log2f(total);
        factor = total == 0.f ? 0.f : 1.f / total;
        if (bad) lse = factor = CUDART_NAN_F;
        if (visit.splits <= 1) {
            factor *= sink_factor(p, row.head, lse);
            out = static_cast<T*>(p.out) +
                  (((long long)visit.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
            if (writes_lse) store_lse(p, visit, row, lse);
        } else {
            const long long split = visit.sequence == part.first ? part.split : 0;
            const long long slot =
                min(max(2 * ((long long)visit.before - visit.sequence) + split, 0ll), 2ll * p.parts - 1);
            const long long at = (slot * p.kv_heads + kv_head) * p.rows() + r;
            partial = p.partial_out + at * p.head_dim_v;
            if (writes_lse) p.partial_lse[at] = lse;
        }
    }

    // Store 8 N columns of the row from `first` on. A lane and its three neighbours have them in half `half` of the
    // accumulators `sums`, N fragments C.
    template <int N, int DIM_V>
    __device__ __forceinline__ void store(const Params& p, const float (*sums)[4], int half, int first) const {
        const int pair = threadIdx.x % 4, head_dim_v = DIM_V ? DIM_V : p.head_dim_v;
        if (partial) {
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (DIM_V || first + n * 8 < head_dim_v)
                    *reinterpret_cast<float2*>(partial + first + n * 8 + pair * 2) =
                        make_float2(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor);
        }
        // Four fragments are transposed among the four lanes, so that each stores the 16 bytes of one.
        if (!__any_sync(FULL_WARP, out != nullptr)) return;
#pragma unroll
        for (int base = 0; base < N; base += 4) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = base + i < N ? pack<T>(sums[min(base + i, N - 1)][half * 2] * factor,
                                                  sums[min(base + i, N - 1)][half * 2 + 1] * factor)
                                        : 0;
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const bool upper = pair & step;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (i & step) continue;
                    const unsigned got = __shfl_xor_sync(FULL_WARP, upper ? pairs[i] : pairs[i + step], step);
                    pairs[i] = upper ? got : pairs[i], pairs[i + step] = upper ? pairs[i + step] : got;
                }
            }
            const int column = first + (base + pair) * 8;
            if (out && base + pair < N && (DIM_V || column < head_dim_v))
                *reinterpret_cast<uint4*>(out + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }

    // The same where fragments 2 k and 2 k + 1 have the even and the odd ones of 16 columns.
    template <int N>
    __device__ __forceinline__ void store_interleaved(const float (*sums)[4], int half, int first) const {
        const int pair = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const int column = first + n * 8 + pair * 4;
            const float4 four = make_float4(sums[n][half * 2] * factor, sums[n + 1][half * 2] * factor,
                                            sums[n][half * 2 + 1] * factor, sums[n + 1][half * 2 + 1] * factor);
            if (partial) *reinterpret_cast<float4*>(partial + column) = four;
            if (out)
                *reinterpret_cast<uint2*>(out + column) = make_uint2(pack<T>(four.x, four.y), pack<T>(four.z, four.w));
        }
    }
};

// Scores of a row are exponentiated relative to a base that follows their maximum only when this is so far ahead (in
// powers of 2): nothing overflows before, and the accumulators are seldom rescaled.
constexpr float FAR = 8.f;

// --------------------------------------------------------------------------------------- attention through mma.sync

// 16 bytes, or zeros if not `wanted`: what an unused slot holds may be anything, also what 0 times it is not 0.
__device__ __forceinline__ void copy_async_or_zero(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}

// Whether the copy engine can copy rows, of any multiple of 16 bytes.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_ROW_COPIES = true;
#else
constexpr bool HAS_ROW_COPIES = false;
#endif

// Copy `bytes` to shared memory; `barrier` counts them.
__device__ __forceinline__ void copy_row(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool mine) {
    unsigned any;
    asm volatile("{ .reg .pred mine, any;\n"
                 "  setp.ne.u32 mine, %1, 0;\n"
                 "  bar.red.or.pred any, %2, %3, mine;\n"
                 "  selp.u32 %0, 1, 0, any; }"
                 : "=r"(any)
                 : "r"(unsigned(mine)), "r"(id), "r"(threads)
                 : "memory");
    return any;
}

// How the eight warps of a block share the work, and its shared memory.
//
// The ROWS rows are divided among GROUPS groups of warps. The warps of a group share the scores of its rows with a tile
// of TILE tokens: HALVES [of the tokens] x DEPTHS [of the dimensions] (a warp that does more of the product loads less
// for it), whose partial sums meet in shared memory. There each warp sums up and exponentiates its own few tokens. The
// second product is divided by columns. Two groups go their own way: while one waits for its exponentials, the other
// keeps the tensor cores busy. If there are too few rows for two groups, these take tiles in turn, each from a ring of
// stages of its own, and what they found is put together at the end of a visit.
//
// A token of a tile in shared memory is a row of 16-byte chunks, permuted within each 128 bytes so that eight tokens
// are in different banks. Queries, partial scores and shares (the exponentials) lie as fragments.
//
// An 8-bit tile lies as in the cache (656 bytes are an odd number of chunks), and a warp converts what it needs of it in
// registers to float16, exactly. Scales are left out of both products: a warp's dimensions in the first one (of which
// it has 16 of the rotary part besides, in T) and its columns in the second are the 128 of one scale. The first product
// is multiplied by it, and of the shares there is a kind for each scale: their exponentials times it.
//
// BYTES, with G = GROUPS, H = HALVES and K = KEPT, where a tile is TILE * 1152 bytes (whatever DIM is) or TILE * 656:
//
//   RINGS * STAGES * (a tile + 32) + ROWS / 16 * (36 - K * 4 / (G H / 2)) * 512 + 4096 * SENT * M
//   + G * GROUP_ROWS * TILE * 2 * KINDS + GROUP_ROWS * 64
//
//   rows, tile, stages with 227 KB   163 KB     99 KB      of an 8-bit cache   227 KB     163 KB     99 KB
//                      16, 64, 2     16, 64, 2  16, 32, 2                      16, 64, 2  16, 32, 3  16, 16, 4
//                      32, 64, 2     32, 32, 3  32, 32, 2                      32, 64, 4  32, 64, 2  32, 32, 3
//                      64, 64, 2     64, 32, 2  -                              64, 32, 4  64, 32, 2  -
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V> struct Form {
    static constexpr int WARPS = 8, GROUPS = FP8 || ROWS == 64 ? 2 : 1, MEMBERS = WARPS / GROUPS;
    static constexpr int RINGS = FP8 && ROWS == 16 ? 2 : 1; // 2: groups take tiles in turn, not rows
    static constexpr int GROUP_ROWS = ROWS / GROUPS * RINGS, M = GROUP_ROWS / 16; // fragments of rows
    static constexpr int HALVES = FP8 ? 1 : 2, DEPTHS = MEMBERS / HALVES;
    static constexpr int N = TILE / HALVES / 8;                               // fragments of a warp's tokens
    static constexpr int OWN = N > DEPTHS ? N / DEPTHS : 1, OWNERS = N / OWN; // of these it exponentiates; who does
    static constexpr int SENT = N >= DEPTHS ? N - OWN : N;

    static constexpr int DIMS = DIM ? DIM : 576, DIMS_V = DIM_V ? DIM_V : 576;
    static constexpr int LINES = DIMS / 64; // of 128 bytes, which is 64 dimensions
    // Of 16 dimensions each, for a warp: those of whole lines, then its share of the last line if LINES is odd.
    static constexpr int STEPS = LINES * 4 / DEPTHS, LINE_STEPS = LINES / DEPTHS * 4, REST_STEPS = STEPS - LINE_STEPS;
    static constexpr int KEPT = M == 1 || GROUPS == 1 ? STEPS : FP8 ? 0 : 4; // of the queries, in registers
    // Fragments of a warp's columns: those of whole lines, then its share of the last line.
    static constexpr int V = DIMS_V / 8 / MEMBERS, LINE_V = DIMS_V / 64 / MEMBERS * 8, REST_V = V - LINE_V;

    static constexpr int LATENT = 512, SCALE_DIMS = 128, ROTARY = 528; // of an 8-bit token: rotary part from there
    static constexpr int PITCH = FP8 ? 656 : DIMS * 2, TILE_BYTES = TILE * PITCH;

    static constexpr bool APART = GROUPS == 2;              // groups do not wait for each other
    static constexpr int COPIERS = APART ? MEMBERS : WARPS; // warps that copy tiles
    static constexpr int COPIED = TILE / COPIERS;           // tokens, by each; they lie in the same page
    static constexpr bool ROW_COPIES = FP8 && HAS_ROW_COPIES;
    static constexpr int ARRIVING = ROW_COPIES ? COPIERS : COPIERS * 33; // for a tile to be there, threads

    // Offsets of what lies in shared memory.
    static constexpr int QUERIES = RINGS * STAGES * TILE_BYTES;
    static constexpr int PARTIAL_SCORES = QUERIES + ROWS / 16 * DEPTHS * (STEPS - KEPT) * 512;
    static constexpr int SHARES = PARTIAL_SCORES + WARPS * SENT * M * 512;
    static constexpr int KINDS = FP8 ? LATENT / SCALE_DIMS : 1, KIND_BYTES = GROUP_ROWS * TILE * 2; // of shares
    static constexpr int MAXIMA = SHARES + GROUPS * KINDS * KIND_BYTES;
    static constexpr int SUMS = MAXIMA + WARPS * GROUP_ROWS * 4;
    static constexpr int ARRIVALS = SUMS + WARPS * GROUP_ROWS * 4;
    static constexpr int BARRIERS = ARRIVALS + RINGS * STAGES * 16;
    static constexpr int BYTES = BARRIERS + RINGS * STAGES * 16;
    static_assert(BYTES <= 232448, "");

    // Fragments of a row of accumulators that one group gives the other at once, where scores and shares were.
    static constexpr int GIVEN = MAXIMA - PARTIAL_SCORES >= V * MEMBERS * 512       ? V
                                 : MAXIMA - PARTIAL_SCORES >= V / 2 * MEMBERS * 512 ? V / 2
                                                                                    : V / 4;
    static_assert(RINGS == 1 || (M == 1 && MAXIMA - PARTIAL_SCORES >= GIVEN * MEMBERS * 512), "");

    static_assert(DIMS == LINES * 64 && LINES * 4 % DEPTHS == 0 && LINES % DEPTHS < 2 && N % 2 == 0, "");
    static_assert(DIMS_V % 64 == 0 && REST_V < 2 && COPIED % 4 == 0, "");
    static_assert(!FP8 || (DIM == 576 && DIM_V == 512 && DEPTHS == KINDS && MEMBERS == KINDS), "");

    static __device__ __forceinline__ int chunk_of_step(int depth, int step) {
        return step < LINE_STEPS ? depth * LINE_STEPS * 2 + step * 2
                                 : (LINES - 1) * 8 + (depth * REST_STEPS + step - LINE_STEPS) * 2;
    }

    static __device__ __forceinline__ int column_of(int member, int n) {
        return n < LINE_V ? (member * LINE_V + n) * 8 : DIMS_V - 64 + (member * REST_V + n - LINE_V) * 8;
    }

    // Where chunk `chunk` of a token lies, if its numbers are of T.
    static __device__ __forceinline__ int chunk_at(int token, int chunk) {
        return token * PITCH + (chunk ^ (token & 7)) * 16;
    }
};

// Of the largest of a token's scales, as a power of two; not below -80, so that 2 to minus that many is far from
// infinity.
__device__ __forceinline__ float exponent_of(float4 scales) {
    const float largest = fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w)));
    return float(max(int(__float_as_uint(largest) >> 23) - 127, -80));
}

__device__ __forceinline__ float component(float4 four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Which tokens of a tile are there, a bit each, and whether the entry of one was bad. The tokens of a copying warp have
// 64 / COPIERS bits.
struct alignas(16) Arrival {
    unsigned long long valid, bad;
};

__device__ constexpr unsigned long long all_valid(int copiers, int copied) {
    unsigned long long all = 0;
    for (int copier = 0; copier < copiers; ++copier) all |= ((1ull << copied) - 1) << copier * (64 / copiers);
    return all;
}

// T: of the queries and results. FP8: an 8-bit cache (576, 512 only). ROWS: 16, 32, 64. TILE: 16, 32 or 64 tokens.
// STAGES: tiles of a ring in shared memory. DIM, DIM_V: 576 and 512; 0: from the arguments, multiples of 16 up to 576
// (not with ROWS = 64).
template <typename T, bool FP8, int ROWS, int TILE, int STAGES, int DIM, int DIM_V>
__global__ __launch_bounds__(256, 1) void attend_mma(const __grid_constant__ Params p) {
    using F = Form<T, FP8, ROWS, TILE, STAGES, DIM, DIM_V>;
    constexpr int M = F::M, N = F::N, V = F::V;

    extern __shared__ __align__(1024) char shared[];
    const unsigned shared_at = shared_address(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4, pair = lane % 4; // in the fragments
    const int group = warp / F::MEMBERS, member = warp % F::MEMBERS;
    const int half = member / F::DEPTHS, depth = member % F::DEPTHS;
    const bool owner = depth < F::OWNERS;
    const int kv_head = blockIdx.y, first_row = blockIdx.x * ROWS;
    const int head_dim = DIM ? DIM : p.head_dim, head_dim_v = DIM_V ? DIM_V : p.head_dim_v;

    const Part part(p, blockIdx.z);
    if (part.first > part.last) return;

    auto group_barrier = [&] { named_barrier(1 + group, F::MEMBERS * 32); };
    // Where all threads meet. A barrier in shared memory: the sanitizer loses track of numbered ones of so many kinds.
    __shared__ unsigned long long meeting;
    int met = 0;
    auto both_groups = [&] {
        mbarrier_arrive(shared_address(&meeting));
        mbarrier_wait(shared_address(&meeting), met++);
    };
    const int ring = F::RINGS == 2 ? group * STAGES : 0; // the first of the group's stages
    auto full = [&](int stage) { return shared_at + F::BARRIERS + (ring + stage) * 16; };
    auto empty = [&](int stage) { return full(stage) + 8; };
    if constexpr (F::APART) {
        if (threadIdx.x == 0)
            for (int i = 0; i < F::RINGS * STAGES; ++i) {
                const unsigned at = shared_at + F::BARRIERS + i * 16;
                mbarrier_init(at, F::ARRIVING);
                mbarrier_init(at + 8, F::WARPS / F::RINGS);
            }
        if constexpr (F::RINGS == 2) {
            if (threadIdx.x == 0) mbarrier_init(shared_address(&meeting), F::WARPS * 32);
        }
        if constexpr (F::ROW_COPIES) {
            if (threadIdx.x == 0) fence_mbarrier_init();
        }
        __syncthreads();
    }

    // Tiles are copied ahead, through all visits of the part. The page of a token is looked up one tile before that.
    const bool copies = F::RINGS == 2 || warp >= F::WARPS - F::COPIERS;
    const int copier = F::RINGS == 2 ? member : warp - (F::WARPS - F::COPIERS);
    const int ring_begin = F::RINGS == 2 ? group * TILE : 0; // of a visit's tokens
    struct {
        int sequence, token, end; // the next tile
        int entry, slot;          // of this lane's token in it
        bool wanted, more;
    } ahead;
    auto enter = [&](int sequence) {
        ahead.more = false;
        for (; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            ahead.sequence = sequence, ahead.token = visit.begin + ring_begin, ahead.end = visit.end;
            if (ahead.token < ahead.end) {
                ahead.more = true;
                break;
            }
        }
    };
    auto look_up = [&] {
        const int token = ahead.token + copier * F::COPIED + lane % F::COPIED;
        ahead.wanted = ahead.more && token < ahead.end;
        ahead.entry = -1, ahead.slot = 0;
        if (!ahead.wanted) return;
        if (p.indices) {
            const int batch = ahead.sequence / p.query_tokens;
            ahead.entry = p.indices[batch * p.indices_strides[0] +
                                    (ahead.sequence - batch * p.query_tokens) * p.indices_strides[1] + token];
        } else {
            const int page = unsigned(token) / unsigned(p.page_size);
            ahead.entry = p.block_table[ahead.sequence * p.table_stride + page];
            ahead.slot = token - page * p.page_size;
        }
    };
    Arrival* const arrivals = reinterpret_cast<Arrival*>(shared + F::ARRIVALS) + ring;
    auto copy_tile = [&](int stage) {
        if (ahead.more) {
            long long page = ahead.entry;
            bool known = ahead.wanted && unsigned(ahead.entry) < unsigned(p.pages);
            bool bad = ahead.wanted && !known;
            if (p.indices) {
                bad = ahead.wanted && ahead.entry >= (long long)p.pages * p.page_size;
                known = ahead.wanted && ahead.entry >= 0 && !bad;
                page = unsigned(ahead.entry) / unsigned(p.page_size);
                ahead.slot = ahead.entry - int(page) * p.page_size;
            }
            constexpr int ITEM = FP8 ? 1 : sizeof(T);
            const char* from = static_cast<const char*>(p.cache);
            if (known)
                from +=
                    (page * p.cache_strides[0] + ahead.slot * p.cache_strides[1] + kv_head * p.cache_strides[2]) * ITEM;
            const unsigned known_lanes = __ballot_sync(FULL_WARP, known);
            const unsigned bad_lanes = __ballot_sync(FULL_WARP, bad);
            if (lane == 0) {
                const unsigned valid = known_lanes & ((1u << F::COPIED) - 1);
                if constexpr (F::COPIERS == 8) {
                    reinterpret_cast<unsigned char*>(&arrivals[stage].valid)[copier] = valid;
                    reinterpret_cast<unsigned char*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
                } else {
                    reinterpret_cast<unsigned short*>(&arrivals[stage].valid)[copier] = valid;
                    reinterpret_cast<unsigned short*>(&arrivals[stage].bad)[copier] = bad_lanes != 0;
                }
            }
            auto source_of = [&](int i) {
                const unsigned long long mine = reinterpret_cast<unsigned long long>(from);
                const unsigned low = __shfl_sync(FULL_WARP, unsigned(mine), i);
                const unsigned high = __shfl_sync(FULL_WARP, unsigned(mine >> 32), i);
                return reinterpret_cast<const char*>((unsigned long long)high << 32 | low);
            };
            if constexpr (F::ROW_COPIES) {
                const unsigned to = shared_at + (ring + stage) * F::TILE_BYTES + (copier * F::COPIED + lane) * F::PITCH;
                constexpr unsigned ALL = (1u << F::COPIED) - 1;
                if (!p.indices && p.cache_strides[1] == F::PITCH && (known_lanes & ALL) == ALL) {
                    // One after the other, since pages are of multiples of 16 tokens.
                    if (lane == 0) copy_row(to, from, F::COPIED * F::PITCH, full(stage));
                } else if (lane < F::COPIED && known) {
                    copy_row(to, from, F::PITCH, full(stage));
                } else if (lane < F::COPIED) {
                    for (int i = 0; i < F::PITCH; i += 16) store_shared(to + i, make_uint4(0, 0, 0, 0));
                    fence_proxy_async();
                }
            } else if constexpr (FP8) {
                // As the cache is: copies are much slower when a line of it is spread over several here.
                constexpr int CHUNKS = F::PITCH / 16, ALL = F::COPIED * CHUNKS;
                const unsigned to =
                    shared_at + (ring + stage) * F::TILE_BYTES + copier * F::COPIED * F::PITCH + lane * 16;
#pragma unroll 4
                for (int start = 0; start < ALL; start += 32) {
                    const int chunk = start + lane, t = min(chunk / CHUNKS, F::COPIED - 1);
                    const char* const source = source_of(t);
                    if (start + 32 <= ALL || chunk < ALL)
                        copy_async_or_zero(to + start * 16, source + (chunk - t * CHUNKS) * 16, known_lanes >> t & 1);
                }
            } else {
                // Eight lanes take a line of 128 bytes, all of a token one after the other.
                const int chunk = lane % 8;
#pragma unroll
                for (int i = 0; i < F::COPIED; i += 4) {
                    const int mine = i + lane / 8, t = copier * F::COPIED + mine;
                    const char* const source = source_of(mine) + chunk * 16;
                    const unsigned to = shared_at + stage * F::TILE_BYTES + F::chunk_at(t, chunk);
                    const bool there = known_lanes >> mine & 1;
#pragma unroll
                    for (int line = 0; line < F::DIMS / 64; ++line)
                        if (DIM || line * 64 + chunk * 8 < head_dim)
                            copy_async_or_zero(to + line * 128, source + line * 128, there);
                }
            }
            ahead.token += F::RINGS * TILE;
            if (ahead.token >= ahead.end) enter(ahead.sequence + 1);
            look_up();
            if constexpr (F::APART) {
                if constexpr (!F::ROW_COPIES) cp_async_mbarrier_arrive(full(stage));
                __syncwarp();
                if constexpr (F::ROW_COPIES) {
                    const int there = __popc(known_lanes & ((1u << F::COPIED) - 1));
                    if (lane == 0) mbarrier_arrive_expect_tx(full(stage), there * F::PITCH);
                } else {
                    if (lane == 0) mbarrier_arrive(full(stage));
                }
            }
        }
        if constexpr (!F::APART) cp_async_commit_group();
    };
    constexpr int EARLY = F::APART ? STAGES : STAGES - 1; // tiles on their way at the start
    if (copies) {
        enter(part.first);
        look_up();
#pragma unroll 1
        for (int stage = 0; stage < EARLY; ++stage) copy_tile(stage);
    }

    // Where a lane's row of 16 bytes for ldmatrix lies in a tile: for the first product in fragments 2 j and 2 j + 1 of
    // its tokens, of which a warp's own come first; for the second in columns. Steps within a line flip bits of these.
    // (8-bit: in one fragment of its tokens, and in 16 columns.)
    constexpr int LOADED = FP8 ? 1 : 2;
    int of_tokens[N / LOADED];
#pragma unroll
    for (int j = 0; j < N / LOADED; ++j)
        if constexpr (FP8)
            of_tokens[j] = ((j + depth * F::OWN) % N * 8 + lane % 8) * F::PITCH + depth * F::SCALE_DIMS + lane / 8 * 16;
        else
            of_tokens[j] = (half * N + (2 * j + lane / 16 + depth * F::OWN) % N) * 8 * F::PITCH +
                           F::chunk_at(lane % 8, F::chunk_of_step(depth, 0) + lane / 8 % 2);
    const int of_columns = FP8 ? lane % 16 * F::PITCH + member * F::SCALE_DIMS + lane / 16 * 16
                               : F::chunk_at(lane % 16, F::column_of(member, 0) / 8 + lane / 16);
    // From there to the scale of the first of a lane's two tokens in a fragment C, and to the rotary part.
    const int to_scale = (pair * 2 - lane % 8) * F::PITCH + F::LATENT + depth * (4 - F::SCALE_DIMS) - lane / 8 * 16;
    const int to_rotary = F::ROTARY + depth * (32 - F::SCALE_DIMS) - lane / 16 * 32;
    const int rest_of_step = (F::LINES - 1) * 128 - depth * F::LINE_STEPS * 32;
    const int flip_of_step = depth * F::REST_STEPS * 32;
    uint4* const queries = reinterpret_cast<uint4*>(shared + F::QUERIES) +
                           (group * M * F::DEPTHS + depth) * (F::STEPS - F::KEPT) * 32 + lane;
    constexpr int QUERIES_OF_M = F::DEPTHS * (F::STEPS - F::KEPT) * 32;
    float4* const partial_scores = reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + lane;
    auto partial_at = [&](int sender, int sent, int m) {
        return ((group * F::MEMBERS + sender) * F::SENT + sent) * M * 32 + m * 32;
    };
    char* const shares = shared + F::SHARES + group * F::KINDS * F::KIND_BYTES + lane * 16;
    float* const maxima = reinterpret_cast<float*>(shared + F::MAXIMA) + group * F::MEMBERS * F::GROUP_ROWS;
    float* const sums = reinterpret_cast<float*>(shared + F::SUMS) + group * F::MEMBERS * F::GROUP_ROWS;
    constexpr unsigned long long ALL_VALID = all_valid(F::COPIERS, F::COPIED);

    int stage = 0, phase = 0; // of the tile at hand
#pragma unroll 1
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        const int group_row = first_row + (F::RINGS == 2 ? 0 : group * F::GROUP_ROWS); // the group's first

        // Fragments A of the queries. What the products of a row with 8-bit numbers are to be multiplied by.
        unsigned kept[F::KEPT ? F::KEPT : 1][M][4];
        float factor[M][2];
        {
            const T* from[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Row which(p, visit, kv_head, group_row + m * 16 + j * 8 + row);
                    from[m][j] = which.valid ? static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                                   which.token * p.q_strides[1] + which.head * p.q_strides[2]
                                             : nullptr;
                }
            // With 8-bit numbers the product is in float16. bfloat16 reaches further: a row whose largest number has
            // exponent 0 is in its range, and to more than its precision. A lane has four neighbours of a step then.
            constexpr bool RESCALED = FP8 && IS_BFLOAT16<T>;
            auto latent = [&](int step, int m, int j) {
                const int dim = depth * F::SCALE_DIMS + step * 16 + pair * 4;
                return from[m][j] ? *reinterpret_cast<const uint2*>(from[m][j] + dim) : make_uint2(0, 0);
            };
            if constexpr (RESCALED) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        unsigned largest = 0;
#pragma unroll 4
                        for (int step = 0; step < F::LINE_STEPS; ++step) {
                            const uint2 four = latent(step, m, j);
                            largest = max(largest, max(four.x << 16 & 0x7fffffff, four.x & 0x7fff0000));
                            largest = max(largest, max(four.y << 16 & 0x7fffffff, four.y & 0x7fff0000));
                        }
                        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                        largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                        factor[m][j] = __uint_as_float(min(max(largest >> 23, 1u), 253u) << 23);
                    }
            }
            auto load = [&](int step, int m, unsigned (&a)[4]) {
                if (FP8 && step < F::LINE_STEPS) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        uint2 four = latent(step, m, j);
                        if constexpr (RESCALED) {
                            const float down = __uint_as_float((254u << 23) - __float_as_uint(factor[m][j]));
                            four.x = pack<__half>(__uint_as_float(four.x << 16) * down,
                                                  __uint_as_float(four.x & 0xffff0000) * down);
                            four.y = pack<__half>(__uint_as_float(four.y << 16) * down,
                                                  __uint_as_float(four.y & 0xffff0000) * down);
                        }
                        a[j] = four.x, a[2 + j] = four.y;
                    }
                    return;
                }
                const int dim = F::chunk_of_step(depth, step) * 8 + pair * 2;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = from[m][i % 2] && (DIM || dim < head_dim)
                               ? *reinterpret_cast<const unsigned*>(from[m][i % 2] + dim + i / 2 * 8)
                               : 0;
            };
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int step = 0; step < F::KEPT; ++step) load(step, m, kept[step][m]);
                // All halves of the tokens need the same.
#pragma unroll 2
                for (int step = F::KEPT + half; step < F::STEPS; step += F::HALVES) {
                    unsigned a[4];
                    load(step, m, a);
                    queries[m * QUERIES_OF_M + (step - F::KEPT) * 32] = make_uint4(a[0], a[1], a[2], a[3]);
                }
            }
        }

        float out[M][V][4] = {}, base[M][2], sum[M][2] = {};
#pragma unroll
        for (int m = 0; m < M; ++m) base[m][0] = base[m][1] = -LARGEST_FLOAT;
        bool bad = !visit.whole;
        const int all_see = p.causal ? causal_end(p, visit.length, group_row) : visit.length;
        // Also: none of the group still reads the last visit's sums.
        group_barrier();

#pragma unroll 1
        for (int token = visit.begin + ring_begin; token < visit.end; token += F::RINGS * TILE) {
            Arrival arrival;
            if constexpr (F::APART) {
                mbarrier_wait(full(stage), phase);
                arrival = arrivals[stage];
            } else {
                cp_async_wait_group<STAGES - 2>();
                // No warp is busy with the last tile any more.
                __syncthreads();
                arrival = arrivals[stage];
                copy_tile(stage == 0 ? STAGES - 1 : stage - 1);
            }
            const char* const tile = shared + (ring + stage) * F::TILE_BYTES;
            const unsigned tile_at = shared_at + (ring + stage) * F::TILE_BYTES;

            // Scores of a part of the dimensions.
            float scores[N][M][4] = {};
            auto query_of = [&](int step, unsigned (&a)[M][4]) {
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    if (step < F::KEPT) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[m][i] = kept[max(min(step, F::KEPT - 1), 0)][m][i];
                    } else {
                        const uint4 four = queries[m * QUERIES_OF_M + (step - F::KEPT) * 32];
                        a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
                    }
                }
            };
            if constexpr (FP8) {
                // Fragments of tokens at once, and steps. Of 64 rows, fewer of them: else registers spill.
                constexpr int JOINT = M > 1 && __CUDA_ARCH__ < 900 ? 1 : N < 4 || M > 1 ? 2 : 4;
                constexpr int QUADS = M > 1 && __CUDA_ARCH__ >= 1000 ? 1 : F::LINE_STEPS / 4;
#pragma unroll QUADS
                for (int quad = 0; quad < F::LINE_STEPS; quad += 4)
#pragma unroll
                    for (int first = 0; first < N; first += JOINT) {
                        unsigned words[JOINT][4];
#pragma unroll
                        for (int n = 0; n < JOINT; ++n) ldmatrix(words[n], tile_at + of_tokens[first + n] + quad * 16);
#pragma unroll
                        for (int step = 0; step < 4; ++step) {
                            unsigned a[M][4];
                            query_of(quad + step, a);
#pragma unroll
                            for (int n = 0; n < JOINT; ++n) {
                                unsigned b[2];
                                to_halves<__nv_fp8_e4m3>(b, words[n][step]);
#pragma unroll
                                for (int m = 0; m < M; ++m)
                                    mma_m16n8k16<__half>(scores[first + n][m], a[m], b[0], b[1]);
                            }
                        }
                    }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float scale =
                            *reinterpret_cast<const float*>(tile + of_tokens[n] + to_scale + i * F::PITCH);
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int j = 0; j < 2; ++j) {
                                if constexpr (IS_BFLOAT16<T>) scores[n][m][2 * j + i] *= factor[m][j];
                                scores[n][m][2 * j + i] *= scale;
                            }
                    }
                unsigned a[M][4];
                query_of(F::LINE_STEPS, a);
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    unsigned b[4];
                    ldmatrix(b, tile_at + of_tokens[n + 1] + (lane & 16 ? 0 : of_tokens[n] - of_tokens[n + 1]) +
                                    to_rotary);
                    if constexpr (!IS_BFLOAT16<T>) {
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            b[i] = pack<T>(__uint_as_float(b[i] << 16), __uint_as_float(b[i] & 0xffff0000u));
                    }
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        mma_m16n8k16<T>(scores[n][m], a[m], b[0], b[1]);
                        mma_m16n8k16<T>(scores[n + 1][m], a[m], b[2], b[3]);
                    }
                }
            } else {
#pragma unroll
                for (int step = 0; step < F::STEPS; ++step) {
                    if (!DIM && F::chunk_of_step(depth, step) * 8 >= head_dim) continue;
                    unsigned a[M][4], b[4];
                    query_of(step, a);
#pragma unroll
                    for (int j = 0; j < N / 2; ++j) {
                        const unsigned from = tile_at + of_tokens[j];
                        if (step < F::LINE_STEPS)
                            ldmatrix(b, (from ^ step % 4 * 32) + step / 4 * 128);
                        else
                            ldmatrix(b, ((from + rest_of_step) ^ flip_of_step ^ (step - F::LINE_STEPS) * 32));
#pragma unroll
                        for (int m = 0; m < M; ++m) {
                            mma_m16n8k16<T>(scores[2 * j][m], a[m], b[0], b[1]);
                            mma_m16n8k16<T>(scores[2 * j + 1][m], a[m], b[2], b[3]);
                        }
                    }
                }
            }

            // To those who exponentiate.
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (F::SENT < N ? n < F::OWN : owner && n == 0) continue;
#pragma unroll
                for (int m = 0; m < M; ++m)
                    partial_scores[partial_at(member, n - (N - F::SENT), m)] =
                        make_float4(scores[n][m][0], scores[n][m][1], scores[n][m][2], scores[n][m][3]);
            }
            group_barrier();
            float largest[M][2], added[M][2] = {};
            // 8-bit: of a warp's own tokens. Exponentials times scales meet the values, so the base is one for these.
            float4 scales[F::OWN][2];
            float raised[F::OWN][2];
            bool behind = false;
#pragma unroll
            for (int m = 0; m < M; ++m) largest[m][0] = largest[m][1] = -CUDART_INF_F;
            // Store the exponentials of a warp's own tokens, as fragments A.
            auto exponentiate = [&] {
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    float powers[F::OWN][4];
                    added[m][0] = added[m][1] = 0.f;
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                powers[n][2 * j + i] = fast_exp2(scores[n][m][2 * j + i] - base[m][j]);
                            added[m][j] += powers[n][2 * j] + powers[n][2 * j + 1];
                        }
                    // In units of 8 tokens.
                    const int at = half * N + depth * F::OWN;
                    char* const to = shares + (m * (TILE / 16) + at / 2) * 512;
#pragma unroll
                    for (int kind = 0; kind < F::KINDS; ++kind) {
                        unsigned pairs[F::OWN][2];
#pragma unroll
                        for (int n = 0; n < F::OWN; ++n) {
                            float low = 1.f, high = 1.f;
                            if constexpr (FP8)
                                low = component(scales[n][0], kind), high = component(scales[n][1], kind);
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                if constexpr (FP8)
                                    pairs[n][j] = pack<__half>(powers[n][2 * j] * low, powers[n][2 * j + 1] * high);
                                else
                                    pairs[n][j] = pack<T>(powers[n][2 * j], powers[n][2 * j + 1]);
                        }
                        if constexpr (F::OWN == 2)
                            *reinterpret_cast<uint4*>(to + kind * F::KIND_BYTES) =
                                make_uint4(pairs[0][0], pairs[0][1], pairs[F::OWN - 1][0], pairs[F::OWN - 1][1]);
                        else
                            *reinterpret_cast<uint2*>(to + kind * F::KIND_BYTES + at % 2 * 8) =
                                make_uint2(pairs[0][0], pairs[0][1]);
                    }
                }
            };
            if (owner) {
#pragma unroll
                for (int other = 1; other < F::DEPTHS; ++other) {
                    const int sender = (depth + other) % F::DEPTHS;
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n) {
                        // What is this warp's n-th is another one of the sender's.
                        const int sent = ((depth - sender) * F::OWN + n) & (N - 1);
#pragma unroll
                        for (int m = 0; m < M; ++m) {
                            const float4 four =
                                partial_scores[partial_at(half * F::DEPTHS + sender, sent - (N - F::SENT), m)];
                            scores[n][m][0] += four.x, scores[n][m][1] += four.y;
                            scores[n][m][2] += four.z, scores[n][m][3] += four.w;
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int i = 0; i < 4; ++i) scores[n][m][i] *= p.scale_log2;
                if constexpr (FP8) {
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int t = (depth * F::OWN + n) * 8 + pair * 2 + i;
                            scales[n][i] = *reinterpret_cast<const float4*>(tile + t * F::PITCH + F::LATENT);
                            raised[n][i] = exponent_of(scales[n][i]);
                        }
                }
                if (arrival.valid != ALL_VALID || (p.causal && token + TILE > all_see)) {
#pragma unroll
                    for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int t = (half * N + depth * F::OWN + n) * 8 + pair * 2 + i;
                            const bool there = arrival.valid >> (t / F::COPIED * (64 / F::COPIERS) + t % F::COPIED) & 1;
#pragma unroll
                            for (int m = 0; m < M; ++m)
#pragma unroll
                                for (int j = 0; j < 2; ++j)
                                    if (!there ||
                                        (p.causal &&
                                         token + t >= causal_end(p, visit.length, group_row + m * 16 + j * 8 + row)))
                                        scores[n][m][2 * j + i] = -CUDART_INF_F;
                        }
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
#pragma unroll
                        for (int n = 0; n < F::OWN; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                largest[m][j] =
                                    fmaxf(largest[m][j], scores[n][m][2 * j + i] + (FP8 ? raised[n][i] : 0.f));
                        largest[m][j] = lanes_max<4>(largest[m][j]);
                        behind |= largest[m][j] > base[m][j] + FAR;
                    }
                exponentiate();
            }
            bad |= arrival.bad != 0;
            if (named_barrier_any(1 + group, F::MEMBERS * 32, behind)) {
                if (pair == 0)
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int j = 0; j < 2; ++j)
                            maxima[member * F::GROUP_ROWS + m * 16 + j * 8 + row] = largest[m][j];
                group_barrier();
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        // A row that has seen nothing yet has accumulated nothing, and keeps a finite base.
                        float follows = base[m][j];
#pragma unroll
                        for (int i = 0; i < F::MEMBERS; ++i)
                            follows = fmaxf(follows, maxima[i * F::GROUP_ROWS + m * 16 + j * 8 + row]);
                        const float fade = fast_exp2(base[m][j] - follows);
                        base[m][j] = follows;
                        sum[m][j] *= fade;
#pragma unroll
                        for (int n = 0; n < V; ++n) out[m][n][2 * j] *= fade, out[m][n][2 * j + 1] *= fade;
                    }
                if (owner) exponentiate();
                group_barrier();
            }
#pragma unroll
            for (int m = 0; m < M; ++m) sum[m][0] += added[m][0], sum[m][1] += added[m][1];

            // The second product. All steps at once would spill registers of 64 rows.
            constexpr int STEPS_AT_ONCE = M > 1 && !FP8 && __CUDA_ARCH__ < 900 ? 1 : TILE / 16;
#pragma unroll STEPS_AT_ONCE
            for (int step = 0; step < TILE / 16; ++step) {
                unsigned a[M][4];
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const uint4 four = *reinterpret_cast<const uint4*>(shares + (FP8 ? member * F::KIND_BYTES : 0) +
                                                                       (m * (TILE / 16) + step) * 512);
                    a[m][0] = four.x, a[m][1] = four.y, a[m][2] = four.z, a[m][3] = four.w;
                }
                const unsigned tokens_at = tile_at + step * 16 * F::PITCH;
#pragma unroll
                for (int n = 0; FP8 && n < V; n += 4) {
                    unsigned words[4];
                    ldmatrix_trans(words, tokens_at + of_columns + n * 8);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        // Of two tokens each, first the number in the even column, then in the odd one.
                        unsigned low[2], high[2];
                        to_halves<__nv_fp8_e4m3>(low, __byte_perm(words[2 * i], 0, 0x3120));
                        to_halves<__nv_fp8_e4m3>(high, __byte_perm(words[2 * i + 1], 0, 0x3120));
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                            for (int m = 0; m < M; ++m)
                                mma_m16n8k16<__half>(out[m][min(n + 2 * i + odd, V - 1)], a[m], low[odd], high[odd]);
                    }
                }
#pragma unroll
                for (int n = 0; !FP8 && n < V; n += 2) {
                    if (!DIM_V && F::column_of(member, n) >= head_dim_v) continue;
                    unsigned b[4];
                    if (n < F::LINE_V)
                        ldmatrix_trans(b, ((tokens_at + of_columns) ^ n % 8 * 16) + n / 8 * 128);
                    else
                        ldmatrix_trans(b, tokens_at + F::chunk_at(lane % 16, F::column_of(member, n) / 8));
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        mma_m16n8k16<T>(out[m][n], a[m], b[0], b[1]);
                        if (n + 1 < V) mma_m16n8k16<T>(out[m][min(n + 1, V - 1)], a[m], b[2], b[3]);
                    }
                }
            }

            if constexpr (F::APART) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty(stage));
                if (copies) {
                    if (ahead.more) mbarrier_wait(empty(stage), phase);
                    copy_tile(stage);
                }
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float mine = lanes_sum<4>(sum[m][j]);
                const int at = member * F::GROUP_ROWS + m * 16 + j * 8 + row;
                if (pair == 0) {
                    sums[at] = F::RINGS == 2 && bad ? CUDART_NAN_F : mine;
                    if constexpr (F::RINGS == 2) maxima[at] = base[m][j];
                }
            }
        if constexpr (F::RINGS == 2) {
            both_groups();
            float total[2], fades[2][2]; // of the groups
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                constexpr int GROUP = F::MEMBERS * F::GROUP_ROWS;
                const int at = j * 8 + row;
                const float* const all_sums = sums - group * GROUP;
                const float* const bases = maxima - group * GROUP;
                const float highest = fmaxf(bases[at], bases[GROUP + at]);
                total[j] = 0.f;
#pragma unroll
                for (int g = 0; g < 2; ++g) {
                    fades[g][j] = fast_exp2(bases[g * GROUP + at] - highest);
#pragma unroll
                    for (int i = 0; i < F::MEMBERS; ++i)
                        total[j] += all_sums[g * GROUP + i * F::GROUP_ROWS + at] * fades[g][j];
                }
                base[0][j] = highest;
            }
            float4* const given = reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + member * 32 + lane;
#pragma unroll
            for (int start = 0; start < V; start += F::GIVEN) {
#pragma unroll
                for (int n = start; n < start + F::GIVEN; ++n)
                    if (group == 1)
                        given[(n - start) * F::MEMBERS * 32] =
                            make_float4(out[0][n][0], out[0][n][1], out[0][n][2], out[0][n][3]);
                both_groups();
#pragma unroll
                for (int n = start; n < start + F::GIVEN; ++n)
                    if (group == 0) {
                        const float4 four = given[(n - start) * F::MEMBERS * 32];
                        const float others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            out[0][n][i] = out[0][n][i] * fades[0][i / 2] + others[i] * fades[1][i / 2];
                    }
                both_groups();
            }
            if (group == 0) {
                const Part again(p, blockIdx.z);
                const Visit visited(p, again, sequence);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const Destination<T> to(p, again, visited, kv_head, first_row + j * 8 + row, base[0][j], total[j],
                                            false, member == 0 && pair == 0);
                    to.template store_interleaved<V>(out[0], j, F::column_of(member, 0));
                }
            }
        } else {
            group_barrier();
            // Found once more, so as not to take registers all the while.
            const Part again(p, blockIdx.z);
            const Visit visited(p, again, sequence);
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float total = 0.f;
#pragma unroll
                    for (int i = 0; i < F::MEMBERS; ++i) total += sums[i * F::GROUP_ROWS + m * 16 + j * 8 + row];
                    const Destination<T> to(p, again, visited, kv_head, group_row + m * 16 + j * 8 + row, base[m][j],
                                            total, bad, member == 0 && pair == 0);
                    if constexpr (FP8) {
                        to.template store_interleaved<V>(out[m], j, F::column_of(member, 0));
                    } else {
                        to.template store<F::LINE_V, DIM_V>(p, out[m], j, F::column_of(member, 0));
                        if constexpr (F::REST_V)
                            to.template store<F::REST_V, DIM_V>(p, out[m] + F::LINE_V, j,
                                                                F::column_of(member, F::LINE_V));
                    }
                }
        }
    }
}

// ------------------------------------------------------------------------------------------- attention through wgmma

// For Hopper, 576 and 512 dimensions. A block has 64 rows and three warpgroups: one loads (by TMA, or itself where tokens
// are named by indices or must be converted), two compute, half the columns of the output each, since a warpgroup's
// registers hold no more. Keys come in tiles of 64 tokens, alternately into two buffers, one for each warpgroup. For its
// own tile n a warpgroup computes
//
//   S = Q K[n]',   then its half of P[n - 1] V[n - 1], whose weights the other warpgroup has shared by now,
//   P[n] = exp2(S - base), shared with the other,   then its half of P[n] V[n]
//
// and so the two take turns: while one exponentiates, the products of the other keep the tensor cores busy (the idea of
// FlashMLA's "seesaw" schedule; here the warpgroups do the same, half a period apart). The output of both must be relative
// to the same base of a row: it follows the maximum only when that is far above it, and goes from one to the other with
// the weights. These lie in the rotary part of their own keys, which nobody reads any more. A half of a buffer is
// loaded again as soon as its last product is done.
constexpr int WGMMA_ROWS = 64;
constexpr int WGMMA_THREADS = 3 * WARPGROUP;
constexpr int COLUMNS = 64; // of a tile in shared memory: 128 bytes
constexpr int TILE_BYTES = 64 * COLUMNS * 2;
constexpr int TILES = 9, VALUE_TILES = 8, ROTARY = 8; // of a token: four for each half of the values, the rotary part
constexpr int VISITS = 4; // how many visits something is kept of: the loaders are up to two ahead

// After 27 tiles, of the queries and of two buffers.
struct WgmmaShared {
    unsigned long long full[2][TILES]; // a tile of a buffer is here; or, not by TMA, half 0 or 1 is
    unsigned long long empty[2][2];    // a half of a buffer is free
    unsigned long long queries_full, queries_empty;
    unsigned long long summed;                  // both warpgroups have their sums of a visit here
    float base[2][WGMMA_ROWS];                  // after the latest tile of a warpgroup
    float sums[2][2][WGMMA_ROWS];               // [parity of the visit][warpgroup]
    int bad[VISITS];                            // the latest visit that found a bad page or slot
    unsigned long long valid[2];                // of `indices`: which tokens of a buffer are there, a bit each
    unsigned long long tokens[4][BLOCK_TOKENS]; // where those of the next tiles are; or MISSING, OUTSIDE the cache
};
static_assert(3 * TILES * TILE_BYTES + sizeof(WgmmaShared) + 1024 <= 232448, "");

struct alignas(64) WgmmaParams {
    // Of the cache [pages, page_size, kv_heads, 576], for boxes of 64 columns of `box_tokens` tokens of a head. Unused
    // with FP8 or GATHER.
    TensorMap map;
    Params p;
    int box_tokens; // divides 64 and page_size
};

// The numbered barriers.
enum { SHARED_0 = 1, SHARED_1, WARPGROUP_0, WARPGROUP_1 };

__device__ __forceinline__ unsigned key_tile(unsigned queries, int buffer, int tile) {
    return queries + ((buffer + 1) * TILES + tile) * TILE_BYTES;
}

// Start copying every LOADERS-th row of the queries.
template <typename T, int LOADERS>
__device__ __forceinline__ void load_queries(const Params& p, const Visit& visit, unsigned queries, int first) {
    constexpr int EACH = (WGMMA_ROWS + LOADERS - 1) / LOADERS;
    const int lane = threadIdx.x % 32;
    // Lane i knows where this warp's i-th row is.
    const Row row(p, visit, blockIdx.y, blockIdx.x * WGMMA_ROWS + min(first + lane * LOADERS, WGMMA_ROWS - 1));
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                             row.token * p.q_strides[1] + row.head * p.q_strides[2]);
    const unsigned valid = __ballot_sync(FULL_WARP, row.valid);
#pragma unroll(LOADERS == 4 ? 2 : 4)
    for (int i = 0; i < EACH; ++i) {
        const int r = first + i * LOADERS;
        const T* const from = reinterpret_cast<const T*>(__shfl_sync(FULL_WARP, at, i)) + lane * 8;
        const unsigned to = queries + lane / 8 * TILE_BYTES + r * COLUMNS * 2 + ((lane ^ r) & 7) * 16;
        if (r >= WGMMA_ROWS) continue;
        const bool wanted = valid >> i & 1;
        copy_async_or_zero(to, from, wanted);
        copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, wanted);
        if (lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, wanted);
    }
    cp_async_commit_group();
}

// By TMA: warp 0 brings the keys, the others the queries.
template <typename T>
__device__ __forceinline__ void load_tiles(const WgmmaParams& params, WgmmaShared& shared, unsigned queries) {
    const Params& p = params.p;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    const Part part(p, blockIdx.z);
    if (warp == 0) {
        const int box = params.box_tokens, boxes = BLOCK_TOKENS / box;
        int count = 0, used = 0;
        for (int sequence = part.first; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            if (visit.begin < visit.end) ++count;
            const int* table = p.block_table + sequence * p.table_stride;
            // Lane i brings the i-th box of tokens.
            auto find = [&](int start, int& page, int& slot) {
                const int token = start + lane * box;
                page = -1, slot = 0;
                if (lane < boxes && token < visit.end) {
                    const int index = token / p.page_size;
                    page = table[index], slot = token - index * p.page_size;
                }
            };
            int page, slot;
            find(visit.begin, page, slot);
            for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
                const int buffer = used & 1, phase = used / 2 + 1;
                const int brought = (min(visit.end - start, BLOCK_TOKENS) + box - 1) / box;
                const bool mine = lane < brought, bad = mine && unsigned(page) >= unsigned(p.pages);
                if (bad) page = p.pages; // outside: zeros come, nothing is read
                int next_page, next_slot;
                find(start + BLOCK_TOKENS, next_page, next_slot);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    // The half that the other warpgroup reads has the weights beside it, and is free last.
                    const int half = i ^ buffer;
                    mbarrier_wait(shared_address(&shared.empty[buffer][half]), phase);
                    // Not before: the result of the visit VISITS ago might not be known yet.
                    if (i == 1 && bad) shared.bad[count % VISITS] = count;
                    __syncwarp();
                    for (int j = 0; j < 4 + i; ++j) {
                        const int tile = j == 4 ? ROTARY : half * 4 + j;
                        const unsigned full = shared_address(&shared.full[buffer][tile]);
                        if (lane == 0) mbarrier_arrive_expect_tx(full, brought * box * COLUMNS * 2);
                        __syncwarp();
                        if (mine)
                            tma_load(key_tile(queries, buffer, tile) + lane * box * COLUMNS * 2, params.map,
                                     tile * COLUMNS, kv_head, slot, page, full);
                    }
                }
                page = next_page, slot = next_slot;
            }
        }
    } else {
        int visited = 0;
        for (int sequence = part.first; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            if (visit.begin >= visit.end) continue;
            mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
            load_queries<T, WARPGROUP / 32 - 1>(p, visit, queries, warp - 1);
            cp_async_wait_group<0>();
            fence_proxy_async();
            mbarrier_arrive(shared_address(&shared.queries_full));
        }
    }
}

// What the tables say of a token.
struct Entry {
    int id;    // its page, or its slot in the cache
    int place; // in the page; -1: the tile has no such token
};

// Goes through the tiles of all visits of a part.
template <bool GATHER> struct Ahead {
    const Params& p;
    const Part& part;
    int sequence, token, end;

    __device__ __forceinline__ Ahead(const Params& p, const Part& part) : p(p), part(part) { enter(part.first); }

    __device__ __forceinline__ void enter(int first) {
        for (sequence = first; sequence <= part.last; ++sequence) {
            const Visit visit(p, part, sequence);
            token = visit.begin, end = visit.end;
            if (token < end) return;
        }
        token = end = 0;
    }

    __device__ __forceinline__ void advance() {
        if (sequence > part.last) return;
        token += BLOCK_TOKENS;
        if (token >= end) enter(sequence + 1);
    }

    // Of the i-th token of this tile.
    __device__ __forceinline__ Entry entry(int i) const {
        const int at = token + i;
        Entry entry{0, -1};
        if (at >= end) return entry;
        if constexpr (GATHER) {
            const Visit which(p, sequence);
            entry.id = p.indices[which.batch * p.indices_strides[0] + which.token * p.indices_strides[1] + at];
            entry.place = 0;
        } else {
            const int page = unsigned(at) / unsigned(p.page_size);
            entry.id = p.block_table[sequence * p.table_stride + page];
            entry.place = at - page * p.page_size;
        }
        return entry;
    }
};

// Where lanes find tokens.
struct Found {
    const char* from; // of this lane's token
    unsigned there;   // whose token is there
    bool bad;         // an entry of one is outside the cache

    template <bool FP8, bool GATHER> __device__ __forceinline__ void find(const Params& p, const Entry& entry) {
        const bool wanted = entry.place >= 0;
        bool known;
        int page = entry.id, place = entry.place;
        if constexpr (GATHER) {
            known = wanted && entry.id >= 0 && entry.id < (long long)p.pages * p.page_size;
            bad = __any_sync(FULL_WARP, wanted && entry.id >= 0 && !known);
            page = unsigned(entry.id) / unsigned(p.page_size), place = entry.id - page * p.page_size;
        } else {
            known = wanted && unsigned(entry.id) < unsigned(p.pages);
            bad = __any_sync(FULL_WARP, wanted && !known);
        }
        from = static_cast<const char*>(p.cache);
        if (known)
            from += (page * p.cache_strides[0] + place * p.cache_strides[1] + blockIdx.y * p.cache_strides[2]) *
                    (FP8 ? 1 : 2);
        there = __ballot_sync(FULL_WARP, known);
    }

    // Of lane i's token.
    __device__ __forceinline__ const char* of(int i) const {
        return reinterpret_cast<const char*>(__shfl_sync(FULL_WARP, reinterpret_cast<unsigned long long>(from), i));
    }

    // To the L2 cache, the tokens of the first TOKENS lanes, of BYTES each.
    template <int TOKENS, int BYTES> __device__ __forceinline__ void bring() const {
        constexpr int PIECE = 64, PIECES = (BYTES + PIECE - 1) / PIECE, ALL = TOKENS * PIECES;
#pragma unroll 1
        for (int start = 0; start < ALL; start += 32) {
            const int i = start + threadIdx.x % 32, t = min(i / PIECES, TOKENS - 1);
            const char* const its = of(t) + (i - t * PIECES) * PIECE;
            if (i < ALL && there >> t & 1) prefetch_l2(its);
        }
    }
};

// What this warp brought can be used.
__device__ __forceinline__ void arrive_published(unsigned barrier) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// By indices: a warp for each half of each buffer, which brings it again as soon as it is free, so that none waits for
// what another should do. Tokens are brought to the L2 cache a turn ahead.
template <typename T>
__device__ __forceinline__ void gather_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int buffer = warp / 2, half = warp % 2;
    const Part part(p, blockIdx.z);
    const unsigned full = shared_address(&shared.full[buffer][half]),
                   empty = shared_address(&shared.empty[buffer][half]);
    const unsigned queries_full = shared_address(&shared.queries_full);
    Ahead<true> ahead(p, part);
    Entry entries[2]; // of the next tile
    Found found[2];   // lane i knows of tokens i and i + 32
    auto look_up = [&] {
        entries[0] = ahead.entry(lane), entries[1] = ahead.entry(lane + 32);
        ahead.advance(), ahead.advance();
    };
    auto find = [&] {
#pragma unroll
        for (int k = 0; k < 2; ++k) found[k].template find<false, true>(p, entries[k]);
    };
    if (buffer == 1) ahead.advance();
    look_up(), find(), look_up();
    int used = 0, visited = 0;
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPGROUP / 32>(p, visit, queries, warp);
        bool first = true;
        for (int start = visit.begin; start < visit.end; start += BLOCK_TOKENS, ++used) {
            if ((used & 1) != buffer) continue;
            mbarrier_wait(empty, used / 2 + 1);
            // One of the two warps of a buffer tells those who weigh its tokens.
            if (half == buffer && lane == 0) {
                shared.valid[buffer] = found[0].there | (unsigned long long)found[1].there << 32;
                if (found[0].bad || found[1].bad) shared.bad[visited % VISITS] = visited;
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const unsigned tile =
                    key_tile(queries, buffer, half * 4) + lane / 8 * TILE_BYTES + k * 32 * COLUMNS * 2;
#pragma unroll 8
                for (int i = 0; i < 32; ++i)
                    copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                                       found[k].of(i) + half * 4 * COLUMNS * 2 + lane * 16, found[k].there >> i & 1);
            }
            if (half != buffer) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const unsigned tile = key_tile(queries, buffer, ROTARY) + k * 32 * COLUMNS * 2;
#pragma unroll 4
                    for (int start = 0; start < 32; start += 4) {
                        const int i = start + lane / 8;
                        copy_async_or_zero(tile + i * COLUMNS * 2 + ((lane ^ i) & 7) * 16,
                                           found[k].of(i) + ROTARY * COLUMNS * 2 + lane % 8 * 16,
                                           found[k].there >> i & 1);
                    }
                }
            }
            cp_async_commit_group();
            find(), look_up();
            if (first) {
                cp_async_wait_group<1>();
                fence_proxy_async();
                mbarrier_arrive(queries_full);
                first = false;
            }
            cp_async_wait_group<0>();
            arrive_published(full);
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (k == half) found[k].bring<32, TILES * COLUMNS * 2>();
        }
        if (first) { // the only tile is in the other buffer
            cp_async_wait_group<0>();
            fence_proxy_async();
            mbarrier_arrive(queries_full);
        }
    }
}

// Of an 8-bit cache, by page or by index: a warp converts 16 tokens of each tile, half after half. A lane has 16 numbers
// of every second token: four lanes the 64 columns of a tile in shared memory, the next four those of the next token,
// whose chunks are in other banks. Registers hold the bytes of the next half while its place is in use; the tokens two
// tiles on are on their way to the L2 cache.
template <typename T, bool GATHER>
__device__ __forceinline__ void convert_tiles(const Params& p, WgmmaShared& shared, unsigned queries) {
    constexpr int WARPS = WARPGROUP / 32, TOKENS = BLOCK_TOKENS / WARPS, HELD = TOKENS / 2, ROTARIES = TOKENS / 4;
    constexpr int LATENT = 512, SCALES = 4, SLOT = 656;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int odd = lane / 4 % 2, quarter = lane / 8;
    const Part part(p, blockIdx.z);
    Ahead<GATHER> ahead(p, part);
    // Lanes i and i + 16 look after the warp's i-th token.
    const int first = warp * TOKENS, own = first + lane % TOKENS;
    constexpr unsigned long long MISSING = 0, OUTSIDE = 1;
    auto place_of = [&](int tile, int token) -> unsigned long long& { return shared.tokens[tile & 3][token]; };
    Entry entry; // of the tile after those that are found
    auto look_up = [&] {
        entry = ahead.entry(own);
        ahead.advance();
    };
    auto find = [&](int tile) {
        Found found;
        found.template find<true, GATHER>(p, entry);
        if (lane < TOKENS) {
            unsigned long long place = found.bad ? OUTSIDE : MISSING;
            if (found.there >> lane & 1) place = reinterpret_cast<unsigned long long>(found.from);
            place_of(tile, own) = place;
        }
        __syncwarp();
        found.bring<TOKENS, SLOT>();
        look_up();
    };

    uint4 raw[HELD];
    float scale, next_scale; // of lane % 16's token, for columns 128 (lane / 16) ... of the half
    const unsigned latent_from = quarter * 64 + lane % 4 * 16, rotary_from = LATENT + SCALES * 4 + lane % 8 * 16;
    auto load = [&](unsigned long long place, unsigned offset) {
        return load_or_zero(reinterpret_cast<const char*>(place + offset), place > OUTSIDE);
    };
    auto load_latent = [&](int tile, unsigned half, int i) {
        raw[i] = load(place_of(tile, first + 2 * i + odd), latent_from + half * 256);
    };
    auto load_rotary = [&](int tile, int i) { raw[i] = load(place_of(tile, first + 4 * i + lane / 8), rotary_from); };
    auto load_scale = [&](int tile, int half) {
        const unsigned long long place = place_of(tile, own);
        next_scale = 0.f;
        if (place > OUTSIDE) next_scale = __ldg(reinterpret_cast<const float*>(place + LATENT) + half * 2 + lane / 16);
    };
    const unsigned latent_at = quarter * TILE_BYTES + (first + odd) * COLUMNS * 2 + ((lane % 4 * 2) ^ odd) * 16;
    auto store_latent = [&](int buffer, int half, int i) {
        const float its = __shfl_sync(FULL_WARP, scale, 2 * i + odd + (lane & 16));
        const unsigned fours[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        unsigned scaled[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unsigned halves[2];
            to_halves<__nv_fp8_e4m3>(halves, fours[k]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&halves[h]));
                scaled[k * 2 + h] = pack<T>(both.x * its, both.y * its);
            }
        }
        const unsigned to =
            ((key_tile(queries, buffer, half * 4) + latent_at) ^ (2 * i % 8 * 16)) + 2 * i * COLUMNS * 2;
        store_shared(to, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
        store_shared(to ^ 16, make_uint4(scaled[4], scaled[5], scaled[6], scaled[7]));
    };
    auto store_rotary = [&](int buffer, int i) {
        const int t = 4 * i + lane / 8;
        uint4 eight = raw[i];
        if constexpr (!IS_BFLOAT16<T>) {
            auto half_of = [](unsigned pair) {
                return pack<T>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
            };
            eight = make_uint4(half_of(eight.x), half_of(eight.y), half_of(eight.z), half_of(eight.w));
        }
        store_shared(key_tile(queries, buffer, ROTARY) + (first + t) * COLUMNS * 2 + ((lane ^ t) & 7) * 16, eight);
    };

    look_up();
    find(0);
    load_scale(0, 0);
    scale = next_scale;
#pragma unroll
    for (int i = 0; i < HELD; ++i) load_latent(0, 0, i);
    find(1);
    int used = 0, visited = 0;
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        if (visit.begin >= visit.end) continue;
        mbarrier_wait(shared_address(&shared.queries_empty), ++visited);
        load_queries<T, WARPS>(p, visit, queries, warp);
        const int before = used, tiles = ceil_div(visit.end - visit.begin, BLOCK_TOKENS);
        for (; used < before + tiles; ++used) {
            // First the half that the warpgroup of this buffer has.
            const int buffer = used & 1, phase = used / 2 + 1;
            find(used + 2);
            mbarrier_wait(shared_address(&shared.empty[buffer][buffer]), phase);
            const unsigned long long its = place_of(used, own);
            if constexpr (GATHER) {
                const unsigned there = __ballot_sync(FULL_WARP, its > OUTSIDE);
                if (lane == 0) reinterpret_cast<unsigned short*>(&shared.valid[buffer])[warp] = there;
            }
            if (its == OUTSIDE) shared.bad[visited % VISITS] = visited;
            load_scale(used, 1 - buffer);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                store_latent(buffer, buffer, i);
                load_latent(used, 1 - buffer, i);
            }
            scale = next_scale;
            if (used == before) {
                cp_async_wait_group<0>();
                fence_proxy_async();
                mbarrier_arrive(shared_address(&shared.queries_full));
            }
            arrive_published(shared_address(&shared.full[buffer][buffer]));

            mbarrier_wait(shared_address(&shared.empty[buffer][1 - buffer]), phase);
            load_scale(used + 1, 1 - buffer);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                store_latent(buffer, 1 - buffer, i);
                if (i < ROTARIES)
                    load_rotary(used, i);
                else
                    load_latent(used + 1, 1 - buffer, i);
            }
            scale = next_scale;
#pragma unroll
            for (int i = 0; i < ROTARIES; ++i) {
                store_rotary(buffer, i);
                load_latent(used + 1, 1 - buffer, i);
            }
            arrive_published(shared_address(&shared.full[buffer][1 - buffer]));
        }
    }
}

// A warpgroup that computes: columns SIDE * 256 ... of the output, and the weights of the tiles in buffer SIDE. BY_TILE:
// keys arrive so, and have to be cleared where there are none; else by half, zeros where there are none.
template <typename T, int SIDE, bool BY_TILE> struct Seesaw {
    const Params& p;
    WgmmaShared& shared;
    const unsigned queries;
    const int warp, lane;
    float output[128], sum[2], base[2];

    __device__ __forceinline__ int row(int i) const { return warp * 16 + lane / 4 + 8 * i; }

    // All sums relative to a higher base.
    __device__ __forceinline__ void follow(const float (&higher)[2]) {
        if (!__any_sync(FULL_WARP, higher[0] != base[0] || higher[1] != base[1])) return;
        float fade[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            fade[i] = higher[i] == base[i] ? 1.f : fast_exp2(base[i] - higher[i]);
            sum[i] *= fade[i], base[i] = higher[i];
        }
#pragma unroll
        for (int j = 0; j < 128; ++j) output[j] *= fade[j / 2 % 2];
    }

    // S = Q K' of the own buffer, tile by tile as they arrive; not waited for.
    __device__ __forceinline__ void score(float (&scores)[32], int phase) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int tile = i == ROTARY ? ROTARY : (i + SIDE * 4) % VALUE_TILES; // as they are loaded
            if constexpr (BY_TILE)
                mbarrier_wait(shared_address(&shared.full[SIDE][tile]), phase);
            else if (i == 0 || i == 4)
                mbarrier_wait(shared_address(&shared.full[SIDE][i == 0 ? SIDE : 1 - SIDE]), phase);
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; ++k)
                wgmma_k_major<T>(scores, k_major_descriptor(queries + tile * TILE_BYTES + k * 32),
                                 k_major_descriptor(key_tile(queries, SIDE, tile) + k * 32), i + k > 0);
        }
        wgmma_commit_group();
    }

    // Leave out the tokens that `indices` skip.
    __device__ __forceinline__ void skip(float (&scores)[32]) {
        const unsigned long long valid = shared.valid[SIDE];
        if (valid == ~0ull) return;
        const unsigned low = unsigned(valid) >> lane % 4 * 2, high = unsigned(valid >> 32) >> lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; ++j)
            if (!((j < 16 ? low : high) >> (j / 4 % 4 * 8 + j % 2) & 1)) scores[j] = -CUDART_INF_F;
    }

    // P: weights as fragments. Rows see `limits` tokens of the tile, or `all`. Their base rises with the scores.
    __device__ __forceinline__ void weigh(unsigned (&weights)[4][4], float (&scores)[32], const int (&limits)[2],
                                          bool all, float (&higher)[2]) {
        if (!all) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= limits[j / 2 % 2]) scores[j] = -CUDART_INF_F;
        }
        float offset[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = -CUDART_INF_F;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                highest = fmaxf(highest, fmaxf(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]));
            highest = lanes_max<4>(highest) * p.scale_log2;
            if (highest > higher[i] + FAR) higher[i] = highest;
            offset[i] = higher[i] == -CUDART_INF_F ? 0.f : higher[i];
            if (lane % 4 == 0) shared.base[SIDE][row(i)] = higher[i];
        }
#pragma unroll
        for (int j = 0; j < 32; ++j) scores[j] = fast_exp2(fmaf(scores[j], p.scale_log2, -offset[j / 2 % 2]));
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[k][i] = pack<T>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
    }

    // Slots that a sequence has not filled may hold NaN, and 0 * NaN is NaN.
    __device__ __forceinline__ void clear_from(int token) {
        for (int i = token * 8 + threadIdx.x % WARPGROUP; i < BLOCK_TOKENS * 8; i += WARPGROUP)
#pragma unroll
            for (int tile = 0; tile < VALUE_TILES; ++tile)
                store_shared(key_tile(queries, SIDE, tile) + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }

    __device__ __forceinline__ void share(const unsigned (&weights)[4][4]) {
        const unsigned to = key_tile(queries, SIDE, ROTARY) + (warp * 16 + lane % 16) * COLUMNS * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) stmatrix(to + ((2 * k + lane / 16) ^ lane % 8) * 16, weights[k]);
        fence_proxy_async();
    }

    __device__ __forceinline__ void add_own(const unsigned (&weights)[4][4]) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma_mn_major<T>(output, weights[k],
                              mn_major_descriptor<TILE_BYTES>(key_tile(queries, SIDE, SIDE * 4) + k * 16 * COLUMNS * 2),
                              true);
        wgmma_commit_group();
    }

    // Of the tile in the other buffer, when its weights are there; not waited for.
    __device__ __forceinline__ void add_other() {
        named_barrier_sync<SIDE == 0 ? SHARED_1 : SHARED_0, 2 * WARPGROUP>();
        const float higher[2] = {shared.base[1 - SIDE][row(0)], shared.base[1 - SIDE][row(1)]};
        follow(higher);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma_mn_major<T>(
                output, k_major_descriptor(key_tile(queries, 1 - SIDE, ROTARY) + k * 32),
                mn_major_descriptor<TILE_BYTES>(key_tile(queries, 1 - SIDE, SIDE * 4) + k * 16 * COLUMNS * 2), true);
        wgmma_commit_group();
    }

    // This warpgroup's half of a buffer is free.
    __device__ __forceinline__ void release(int buffer) {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[buffer][SIDE]));
    }

    __device__ __forceinline__ void release_queries() {
        if (lane == 0) mbarrier_arrive(shared_address(&shared.queries_empty));
    }
};

template <typename T, bool FP8, bool GATHER, int SIDE>
__device__ __forceinline__ void compute(const Params& p, WgmmaShared& shared, unsigned queries) {
    constexpr bool BY_TILE = !FP8 && !GATHER;
    const int lane = threadIdx.x % 32, first_row = blockIdx.x * WGMMA_ROWS;
    Seesaw<T, SIDE, BY_TILE> w{p, shared, queries, int(threadIdx.x / 32 % 4), lane};
    const Part part(p, blockIdx.z);
    // If causal: what the first row of the block, and this lane's, do not see of a sequence any more, from its end. Found
    // once, as it takes divisions.
    const int first_end = causal_end(p, 0, first_row);
    const int ends[2] = {causal_end(p, 0, first_row + w.row(0)), causal_end(p, 0, first_row + w.row(1))};
    int used = 0, visited = 0; // buffers and visits before
    for (int sequence = part.first; sequence <= part.last; ++sequence) {
        const Visit visit(p, part, sequence);
        const int tiles = ceil_div(max(visit.end - visit.begin, 0), BLOCK_TOKENS);
#pragma unroll
        for (int j = 0; j < 128; ++j) w.output[j] = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i) w.sum[i] = 0.f, w.base[i] = -CUDART_INF_F;
        if (tiles) mbarrier_wait(shared_address(&shared.queries_full), visited++);
        for (int tile = (used ^ SIDE) & 1; tile < tiles; tile += 2) {
            float scores[32];
            w.score(scores, (used + tile) / 2);
            if (tile > 0) {
                w.add_other();
                wgmma_wait_group<1>();
            } else {
                wgmma_wait_group<0>();
            }
            wgmma_fence_operand(scores);
            if (tile + 2 >= tiles) w.release_queries();

            const int start = visit.begin + tile * BLOCK_TOKENS, present = visit.end - start;
            int limits[2] = {present, present};
            bool all = GATHER || present >= BLOCK_TOKENS;
            if constexpr (GATHER) w.skip(scores);
            if (!GATHER && p.causal) {
                all = all && visit.length + first_end >= start + BLOCK_TOKENS;
#pragma unroll
                for (int i = 0; i < 2; ++i) limits[i] = min(present, visit.length + ends[i] - start);
            }
            float higher[2] = {w.base[0], w.base[1]};
            unsigned weights[4][4];
            w.weigh(weights, scores, limits, all, higher);
            wgmma_wait_group<0>();
            wgmma_fence_operand(w.output);
            if (tile > 0) w.release(1 - SIDE);
            if (BY_TILE && present < BLOCK_TOKENS) w.clear_from(present);
            // No warp is at the rotary part of the keys any more, and all see what was cleared.
            named_barrier_sync<SIDE == 0 ? WARPGROUP_0 : WARPGROUP_1, WARPGROUP>();
            w.share(weights);
            named_barrier_arrive<SIDE == 0 ? SHARED_0 : SHARED_1, 2 * WARPGROUP>();
            w.follow(higher);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float part_sum[2] = {};
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    part_sum[0] += scores[4 * j + 2 * i], part_sum[1] += scores[4 * j + 2 * i + 1];
                w.sum[i] += part_sum[0] + part_sum[1];
            }
            w.add_own(weights);
            wgmma_wait_group<0>();
            wgmma_fence_operand(w.output);
            w.release(SIDE);
        }
        if (tiles && ((used + tiles - 1) & 1) != SIDE) { // the last tile was the other's
            if (tiles == 1) w.release_queries();
            w.add_other();
            wgmma_wait_group<0>();
            wgmma_fence_operand(w.output);
            w.release(1 - SIDE);
        }
        used += tiles;

        float (&sums)[2][WGMMA_ROWS] = shared.sums[(sequence - part.first) & 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            w.sum[i] = lanes_sum<4>(w.sum[i]);
            if (lane % 4 == 0) sums[SIDE][w.row(i)] = w.sum[i];
        }
        mbarrier_arrive(shared_address(&shared.summed));
        mbarrier_wait(shared_address(&shared.summed), sequence - part.first);
        const bool bad = !visit.whole || (tiles && shared.bad[visited % VISITS] == visited);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Destination<T> to(p, part, visit, blockIdx.y, first_row + w.row(i), w.base[i],
                                    w.sum[i] + sums[1 - SIDE][w.row(i)], bad, SIDE == 0 && lane % 4 == 0);
            to.template store<32, 512>(p, reinterpret_cast<const float (*)[4]>(w.output), i, SIDE * 256);
        }
    }
}

// T: of the queries and results. FP8: an 8-bit cache. GATHER: with indices.
template <typename T, bool FP8, bool GATHER>
__global__ __launch_bounds__(WGMMA_THREADS, 1) void attend_wgmma(const __grid_constant__ WgmmaParams params) {
#if HAS_WGMMA
    constexpr bool TMA = !FP8 && !GATHER;
    // 168 for each of 384 threads, dealt out anew.
    constexpr int LOADING = FP8 ? 88 : GATHER ? 72 : 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned queries = shared_address(memory) + misplaced;
    WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + misplaced + 3 * TILES * TILE_BYTES);
    if (TMA && threadIdx.x == WARPGROUP) prefetch_tensormap(params.map);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            for (int tile = 0; tile < TILES; ++tile)
                mbarrier_init(shared_address(&shared.full[i][tile]), FP8 ? WARPGROUP / 32 : 1);
            for (int half = 0; half < 2; ++half) mbarrier_init(shared_address(&shared.empty[i][half]), WARPGROUP / 32);
        }
        mbarrier_init(shared_address(&shared.queries_full), TMA ? WARPGROUP - 32 : WARPGROUP);
        mbarrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
        mbarrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
        for (int i = 0; i < VISITS; ++i) shared.bad[i] = 0;
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 0>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<COMPUTING>();
        compute<T, FP8, GATHER, 1>(params.p, shared, queries);
    } else {
        setmaxnreg_dec<LOADING>();
        if constexpr (FP8)
            convert_tiles<T, GATHER>(params.p, shared, queries);
        else if constexpr (GATHER)
            gather_tiles<T>(params.p, shared, queries);
        else
            load_tiles<T>(params, shared, queries);
    }
#endif
}

// ------------------------------------------------------------------------------- what several parts found of a sequence

// TEAM == 8: a block has EACH times 128 columns of one row, and each warp takes every 8th split; the first warp adds up what
// the others have, in their order. For few rows, which are spread over the GPU. TEAM == 1: a warp has one row after the
// other, of the sequence of which this part made the second visit, if it did: most blocks end at once where there are many
// sequences.
template <typename T, int DIM_V, int TEAM, int EACH>
__global__ __launch_bounds__(256, 2) void combine_parts(const __grid_constant__ Params p) {
    constexpr int WARPS = 8, BATCH = EACH == 1 ? 9 : TEAM == 1 ? 2 : 3; // splits on their way at once
    static_assert(TEAM == 1 || TEAM == WARPS, "");
    __shared__ float4 found[TEAM == 1 ? 1 : WARPS][EACH * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = TEAM == 1 ? 0 : warp;
    const int rows = p.rows(), kv_head = blockIdx.y, fours = DIM_V ? DIM_V / 4 : p.head_dim_v / 4;
    const int first_four = TEAM == 1 ? lane : blockIdx.z * (EACH * 32) + lane;
    int sequence, r, end;
    if constexpr (TEAM == 1) {
        const int* const part = p.metadata + blockIdx.z * 8ll;
        sequence = part[0], r = blockIdx.x * WARPS + warp, end = rows;
        if (part[4] != 1 || unsigned(sequence) >= unsigned(p.sequences())) return;
    } else {
        sequence = blockIdx.x / rows, r = blockIdx.x - sequence * rows, end = r + 1;
    }
    const Visit visit(p, sequence);
    const int before = p.splits[sequence], splits = p.splits[sequence + 1] - before;
    if (splits <= 1) return;
    const long long first = min(max(2 * ((long long)before - sequence), 0ll), 2ll * p.parts - 1);
    const int count = int(min((long long)splits, 2ll * p.parts - first));
    const long long step = (long long)p.kv_heads * rows; // rows between splits
    for (; r < end; r += gridDim.x * WARPS) {
        const long long at = first * step + (long long)kv_head * rows + r;
        const float* const lses = p.partial_lse + at;
        const float4* const outs = reinterpret_cast<const float4*>(p.partial_out + at * (fours * 4));

        // A batch of results comes at once, the first while the weights are found.
        float4 values[BATCH][EACH];
        auto load = [&](int split) {
#pragma unroll
            for (int a = 0; a < BATCH; ++a)
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const int four = first_four + i * 32;
                    if (split + a * TEAM < count)
                        values[a][i] = DIM_V && DIM_V % 128 == 0 || four < fours
                                           ? outs[(split + a * TEAM) * step * fours + four]
                                           : make_float4(0.f, 0.f, 0.f, 0.f);
                }
        };
        load(member);
        float largest = -CUDART_INF_F, sum = 0.f;
        auto each_own = [&](const auto& use) {
            // Where a warp has a whole row, registers would spill from sm_100 on with several at once.
            if constexpr (TEAM == 1 && __CUDA_ARCH__ >= 1000) {
#pragma unroll 1
                for (int split = lane; split < count; split += 32) use(lses[split * step]);
            } else {
                for (int split = lane; split < count; split += 32) use(lses[split * step]);
            }
        };
        each_own([&](float lse) { largest = fmaxf(largest, lse); });
        largest = lanes_max<32>(largest);
        each_own([&](float lse) { sum += lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest); });
        sum = lanes_sum<32>(sum);

        float4 total[EACH] = {};
        for (int split = member; split < count; split += BATCH * TEAM) {
            if (split != member) load(split);
#pragma unroll
            for (int a = 0; a < BATCH; ++a) {
                if (split + a * TEAM >= count) continue;
                const float lse = lses[(split + a * TEAM) * step];
                const float weight = lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest);
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    total[i].x += weight * values[a][i].x, total[i].y += weight * values[a][i].y;
                    total[i].z += weight * values[a][i].z, total[i].w += weight * values[a][i].w;
                }
            }
        }
        if constexpr (TEAM > 1) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) found[warp][i * 32 + lane] = total[i];
            __syncthreads();
            if (warp > 0) return;
#pragma unroll
            for (int other = 1; other < TEAM; ++other)
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const float4 one = found[other][i * 32 + lane];
                    total[i].x += one.x, total[i].y += one.y, total[i].z += one.z, total[i].w += one.w;
                }
        }
        const Row row(p, visit, kv_head, r);
        const float lse = sum == 0.f ? -CUDART_INF_F : largest + log2f(sum);
        const float factor = sum == 0.f ? 0.f : sink_factor(p, row.head, lse) / sum;
        T* const out = static_cast<T*>(p.out) +
                       (((long long)visit.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
        if (first_four == 0) store_lse(p, visit, row, lse);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int four = first_four + i * 32;
            if (four < fours)
                *reinterpret_cast<uint2*>(out + four * 4) =
                    make_uint2(pack<T>(total[i].x * factor, total[i].y * factor),
                               pack<T>(total[i].z * factor, total[i].w * factor));
        }
    }
}
