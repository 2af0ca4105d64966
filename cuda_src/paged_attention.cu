// Attention of the last few tokens of each sequence over its keys and values, which lie in blocks of a paged cache.
//
//   position = length - query_tokens + i                          of query token i
//   score[t] = scale * key_scale * dot(query[i, head, :], key[t, head / group, :])
//              then softcap * tanh(score / softcap), then + slope[head] * (t - position)
//   p        = softmax over the t <= position (and > position - window), with exp(sink[head]) in its denominator
//   out      = value_scale * sum_t p[t] * value[t, head / group, :]
//   lse      = log of that denominator, natural
//
// The token t of a sequence is slot t % block_size of the cache's block tables[seq, t / block_size].
//
// The heads of a group and the query tokens of a sequence are the ROWS that share a kv head, so that the cache is read
// once for all of them. An item is (sequence, kv head, block of ROWS rows). Its tokens are cut into pieces where it
// would be more than an equal share for a block of threads; `split` fixes the size of all pieces instead, so that the
// sums of a row are formed in the same order whatever else is in the batch. Blocks of threads take one piece after the
// other. Of an item in several pieces each leaves a partial result (maximum, sum, output), and the block that comes
// last merges them. Where there are few items, a cluster of CLUSTER blocks has one each, and its blocks merge what they
// found through each other's shared memory.
//
// A lane of `attend` and its neighbours: see common/mma.cuh. Scores are kept in powers of 2 until they are stored.
#include "common/cluster.cuh"
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"

constexpr float LN_2 = 0.693147180559945309f;
constexpr int TILE = 16;        // tokens that a team of warps takes at once
constexpr int UNIT_TOKENS = 64; // of the plan

enum Layout {
    // Keys [blocks, kv_heads, head_dim / x, block_size, x] with x elements in 16 bytes, values [blocks, kv_heads,
    // head_dim, block_size].
    VLLM,
    // Both [blocks, block_size, kv_heads, head_dim].
    FLASH,
};

struct Params {
    const void* query;        // [seqs, query_tokens, heads, head_dim]  T
    const char* keys;         // CACHE
    const char* values;       // CACHE
    const int* tables;        // [seqs, max_blocks]
    const int* lengths;       // [seqs]
    const float* slopes;      // [heads], may be null
    const float* sinks;       // [heads], may be null
    const float* key_scale;   // [1], may be null
    const float* value_scale; // [1], may be null
    void* out;                // [seqs, query_tokens, heads, head_dim]  T
    float* lse;               // [seqs, query_tokens, heads], may be null
    void* partial;            // [slots, head_dim]: outputs of a part of the tokens, float32, or T if `narrow`
    float* maxima;            // [slots], in powers of 2, or natural if `narrow`
    float* sums;              // [slots]: sum of exp(score - maximum)
    int* taken;               // [1]: pieces taken beyond the first of each block; 0 at the start
    int* arrived;             // [items]: pieces done; 0 at the start
    long long query_seq, query_token, query_head; // strides in elements
    long long key_block, key_token, key_head;     // strides in bytes; VLLM has none between tokens
    long long value_block, value_token, value_head;
    long long table_row;
    int seqs, query_tokens, heads, kv_heads, head_dim;
    int group, row_blocks; // heads / kv_heads, and blocks of ROWS rows of a kv head: divisions take their time
    int blocks, block_size, max_blocks;
    int window;     // 0: none
    int split;      // tokens of a piece, a multiple of UNIT_TOKENS; 0: plan
    int least;      // units of a piece, at least
    int rows;       // of a partial result: of those that share a kv head at most ROWS
    int max_splits; // of `partial`, if `narrow`
    int narrow;     // vLLM's workspace: partial results [seqs, heads, max_splits] in T, also of items in one piece
    int sparse_local, sparse_stride, sparse_size, sparse_head_step, sparse_rank; // sparse_stride 0: dense
    float scale;   // with the key scale, if that is a number
    float softcap; // 0: none
    float out_scale;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What of a sequence is attended to: tokens [low, length), in units [first, first + units) of UNIT_TOKENS.
struct Reach {
    int low, length, first, units;
    bool whole; // there is room for every token

    __device__ Reach(const Params& p, int seq) {
        const int wanted = max(p.lengths[seq], 0);
        // Tokens are counted in 32 bits; and vLLM's workspace has room for so many pieces.
        long long capacity = min((long long)p.max_blocks * p.block_size, 1ll << 30);
        if (p.narrow) capacity = min(capacity, (long long)p.max_splits * p.split);
        whole = wanted <= capacity;
        length = whole ? wanted : int(capacity);
        low = p.window ? max(0, length - p.query_tokens - p.window + 1) : 0;
        first = low / UNIT_TOKENS;
        // A sequence of no tokens is a unit too: its rows must be written.
        units = max(1, ceil_div(length, UNIT_TOKENS) - first);
    }
};

// A piece of an item: its tokens [begin, end).
struct Segment {
    int seq, kv_head, row_block;
    int begin, end, low, length;
    int piece, pieces; // of the item
    int index;         // among the pieces of the batch
    bool whole;

    __device__ bool partial(const Params& p) const { return pieces > 1 || (p.narrow && length); }
};

// One row of an item.
struct Row {
    int token, head; // of the query
    bool valid;

    __device__ Row(const Params& p, const Segment& segment, int row) {
        token = p.query_tokens == 1 && row < p.group ? 0 : row / p.group;
        head = segment.kv_head * p.group + row - token * p.group;
        valid = token < p.query_tokens;
        if (!valid) token = 0, head = segment.kv_head * p.group;
    }

    __device__ long long index(const Params& p, const Segment& segment) const {
        return ((long long)segment.seq * p.query_tokens + token) * p.heads + head;
    }

    // The last token of the cache that it sees.
    __device__ int position(const Params& p, const Segment& segment) const {
        return valid ? segment.length - p.query_tokens + token : -1;
    }
};

// Let a row's sink join its maximum and sum (in powers of 2); `weight` is what its values then count.
__device__ __forceinline__ void add_sink(const Params& p, int head, float& maximum, float& sum, float& weight) {
    weight = 1.f;
    if (!p.sinks) return;
    const float sink = p.sinks[head] * LOG2_E;
    const float larger = fmaxf(maximum, sink);
    if (larger == -CUDART_INF_F) return;
    weight = fast_exp2(maximum - larger);
    sum = sum * weight + fast_exp2(sink - larger);
    maximum = larger;
}

__device__ __forceinline__ float log_sum(float maximum, float sum) {
    return sum == 0.f ? -CUDART_INF_F : (maximum + log2f(sum)) * LN_2;
}

template <typename T> __device__ __forceinline__ void store_four(T* to, const float (&values)[4]) {
    if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
    } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]));
    }
}

// What is known of four neighbouring dimensions of a row: not yet divided by the sum.
struct Quad {
    float maximum, sum, values[4];

    // Of a part that saw no token the maximum is -inf, all else 0; a bad block id shows in the sum.
    __device__ __forceinline__ void add(float other, float other_sum, const float4& part, float larger) {
        const float weight = other == -CUDART_INF_F ? 1.f : fast_exp2(other - larger);
        sum += other_sum * weight;
        values[0] += part.x * weight, values[1] += part.y * weight;
        values[2] += part.z * weight, values[3] += part.w * weight;
    }
};

// What the TEAMS found for row r. In shared memory: maxima (in powers of 2) and sums [TEAMS, ROWS], outputs [TEAMS,
// p.rows, stride].
template <int TEAMS, int ROWS>
__device__ __forceinline__ Quad merge_teams(const Params& p, const float* maxima, const float* sums,
                                            const float* outputs, int stride, int r, int dim) {
    Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) quad.maximum = fmaxf(quad.maximum, maxima[team * ROWS + r]);
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
        const int at = team * ROWS + r;
        const float* const output = &outputs[(team * p.rows + r) * stride + dim];
        quad.add(maxima[at], sums[at], *reinterpret_cast<const float4*>(output), quad.maximum);
    }
    return quad;
}

// Where the partial results of a row are: that of the item's first piece, and how much further each next one is.
struct Slots {
    long long first, step;

    __device__ __forceinline__ Slots(const Params& p, const Segment& segment, const Row& row, int r) {
        if (p.narrow) {
            first = row.index(p, segment) * p.max_splits, step = 1;
        } else {
            step = p.kv_heads * p.row_blocks * p.rows;
            first = (long long)segment.index * p.rows + r - segment.piece * step;
        }
    }
};

__device__ __forceinline__ float value_scale(const Params& p) {
    return p.value_scale ? *p.value_scale * p.out_scale : p.out_scale;
}

// Store four dimensions of a row: its result, once all is known, or a partial one.
template <typename T>
__device__ __forceinline__ void store_result(const Params& p, const Segment& segment, const Row& row, int dim,
                                             Quad quad, float out_scale) {
    const long long index = row.index(p, segment);
    float weight;
    add_sink(p, row.head, quad.maximum, quad.sum, weight);
    const float factor = quad.sum == 0.f ? 0.f : weight * out_scale / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.out)[index * p.head_dim + dim], quad.values);
    if (p.lse && dim == 0) p.lse[index] = log_sum(quad.maximum, quad.sum);
}

template <typename T>
__device__ __forceinline__ void store_partial(const Params& p, const Segment& segment, const Row& row, int r, int dim,
                                              Quad quad) {
    const Slots slots(p, segment, row, r);
    const long long slot = slots.first + segment.piece * slots.step;
    if (dim == 0) p.maxima[slot] = p.narrow ? quad.maximum * LN_2 : quad.maximum, p.sums[slot] = quad.sum;
    if (!p.narrow) {
        store_four(&static_cast<float*>(p.partial)[slot * p.head_dim + dim], quad.values);
        return;
    }
    // As vLLM leaves it: the attention of a partition by itself.
    const float factor = quad.sum == 0.f ? 0.f : value_scale(p) / quad.sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.values[j] *= factor;
    store_four(&static_cast<T*>(p.partial)[slot * p.head_dim + dim], quad.values);
}

template <typename T> __device__ __forceinline__ float4 load_partial(const Params& p, long long at) {
    // Past the first-level cache, which does not see what other multiprocessors wrote.
    if (!p.narrow) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.partial) + at));
    if constexpr (sizeof(T) == 4) {
        return __ldcg(reinterpret_cast<const float4*>(static_cast<const T*>(p.partial) + at));
    } else {
        const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(static_cast<const T*>(p.partial) + at));
        const T* four = reinterpret_cast<const T*>(&bits);
        return make_float4(to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3]));
    }
}

// Merge the partial results of all pieces of an item, in their order, whoever does it.
template <int ROWS, typename T> __device__ void join(const Params& p, const Segment& segment) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Slots slots(p, segment, row, r);
        const float unit = p.narrow ? LOG2_E : 1.f;
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll 8
        for (int piece = 0; piece < segment.pieces; ++piece)
            quad.maximum = fmaxf(quad.maximum, __ldcg(&p.maxima[slots.first + piece * slots.step]));
        quad.maximum *= unit;
#pragma unroll 8
        for (int piece = 0; piece < segment.pieces; ++piece) {
            const long long slot = slots.first + piece * slots.step;
            const float maximum = __ldcg(&p.maxima[slot]) * unit, sum = __ldcg(&p.sums[slot]);
            float4 part = load_partial<T>(p, slot * p.head_dim + dim);
            if (p.narrow) part = make_float4(part.x * sum, part.y * sum, part.z * sum, part.w * sum);
            quad.add(maximum, sum, part, quad.maximum);
        }
        // vLLM's partial results are scaled already.
        store_result<T>(p, segment, row, dim, quad, p.narrow ? 1.f : value_scale(p));
    }
}

// Merge what the teams found for the ROWS rows of a piece, and store it.
template <int TEAMS, int ROWS, typename T>
__device__ void store_segment(const Params& p, const Segment& segment, const float* maxima, const float* sums,
                              const float* outputs, int stride) {
    const int quads = p.head_dim / 4;
    const bool partial = segment.partial(p);
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        const Quad quad = merge_teams<TEAMS, ROWS>(p, maxima, sums, outputs, stride, r, dim);
        if (partial)
            store_partial<T>(p, segment, row, r, dim, quad);
        else
            store_result<T>(p, segment, row, dim, quad, value_scale(p));
    }
}

// One thread, after a barrier: the block has stored a piece. Which of its item it was, in time.
__device__ __forceinline__ int arrive(const Params& p, const Segment& segment) {
    __threadfence();
    return atomicAdd(&p.arrived[(segment.seq * p.kv_heads + segment.kv_head) * p.row_blocks + segment.row_block], 1);
}

// `store_segment` for an item whose tokens a cluster has shared, by way of `merged` [ROWS, stride] and `statistics` [ROWS] in
// the shared memory of each of its blocks.
template <int CLUSTER, int TEAMS, int ROWS, typename T>
__device__ void store_shared_segment(const Params& p, const Segment& segment, const float* maxima, const float* sums,
                                     const float* outputs, float* merged, float2* statistics, int stride) {
    const int quads = p.head_dim / 4;
    for (int i = threadIdx.x; i < ROWS * quads; i += blockDim.x) {
        const int r = i / quads, dim = i % quads * 4;
        if (!Row(p, segment, segment.row_block * ROWS + r).valid) break;
        const Quad quad = merge_teams<TEAMS, ROWS>(p, maxima, sums, outputs, stride, r, dim);
        *reinterpret_cast<float4*>(&merged[r * stride + dim]) =
            make_float4(quad.values[0], quad.values[1], quad.values[2], quad.values[3]);
        if (dim == 0) statistics[r] = make_float2(quad.maximum, quad.sum);
    }
    cluster_sync<CLUSTER>();
    for (int i = threadIdx.x * CLUSTER + cluster_rank<CLUSTER>(); i < ROWS * quads; i += blockDim.x * CLUSTER) {
        const int r = i / quads, dim = i % quads * 4;
        const Row row(p, segment, segment.row_block * ROWS + r);
        if (!row.valid) break;
        float2 of_rank[CLUSTER];
        Quad quad = {-CUDART_INF_F, 0.f, {}};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            of_rank[rank] = dsmem_load<CLUSTER>(rank, &statistics[r]);
            quad.maximum = fmaxf(quad.maximum, of_rank[rank].x);
        }
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) {
            const float4 part = dsmem_load<CLUSTER>(rank, reinterpret_cast<const float4*>(&merged[r * stride + dim]));
            quad.add(of_rank[rank].x, of_rank[rank].y, part, quad.maximum);
        }
        store_result<T>(p, segment, row, dim, quad, value_scale(p));
    }
    // A block's memory must outlive the others' reading.
    cluster_sync<CLUSTER>();
}

// The pieces of the batch. Every warp finds them by itself, from the lengths. Long sequences come first, so that there
// are short ones left to fill in with when blocks become idle at different times.
struct Pieces {
    static constexpr int CLASSES = 4; // of lengths

    const Params& p;
    const int items;                    // of a sequence
    int piece_units = 0;                // at most
    int mean = 0;                       // units of a sequence
    int kind = 0, base = 0, before = 0; // a class, a sequence, and the pieces of those before

    __device__ explicit Pieces(const Params& p) : p(p), items(p.kv_heads * p.row_blocks) {}

    __device__ void plan() {
        const int lane = threadIdx.x % 32;
        int total = 0;
        for (int seq = lane; seq < p.seqs; seq += 32) total += Reach(p, seq).units;
        total = __reduce_add_sync(FULL_WARP, total);
        mean = total / p.seqs;
        if (p.split) {
            piece_units = p.split / UNIT_TOKENS;
            return;
        }
        // An equal share for each block, or as little more as gives no more pieces than there are blocks: lane l tries
        // l / 16 more.
        const int share = max(p.least, ceil_div(total * items, gridDim.x));
        piece_units = share;
        if (p.seqs * items > gridDim.x) return;
        const int tried = share + share * lane / 16;
        int pieces = 0;
        for (int seq = 0; seq < p.seqs; ++seq) pieces += ceil_div(Reach(p, seq).units, tried);
        const unsigned fits = __ballot_sync(FULL_WARP, pieces * items <= gridDim.x);
        if (fits) piece_units = __shfl_sync(FULL_WARP, tried, __ffs(fits) - 1);
    }

    __device__ int count(const Reach& reach) const {
        // Those of a given size begin at its multiples.
        return ceil_div(p.split ? reach.first % piece_units + reach.units : reach.units, piece_units);
    }

    __device__ int class_of(const Reach& reach) const {
        return (reach.units * 2 <= mean * 3) + (reach.units <= mean) + (reach.units * 2 <= mean);
    }

    // The piece `index`, which is not smaller than at the last call; false if there are not so many.
    __device__ bool find(int index, Segment& segment) {
        const int lane = threadIdx.x % 32;
        for (;; base += 32) {
            if (base >= p.seqs) {
                if (++kind == CLASSES) return false;
                base = 0;
            }
            int mine = 0;
            if (base + lane < p.seqs) {
                const Reach reach(p, base + lane);
                if (class_of(reach) == kind) mine = count(reach) * items;
            }
            const int sum = lanes_inclusive_sum<32>(mine);
            const unsigned beyond = __ballot_sync(FULL_WARP, sum > index - before);
            if (beyond == 0) {
                before += __shfl_sync(FULL_WARP, sum, 31);
                continue;
            }
            const int found = __ffs(beyond) - 1;
            const int rest = index - before - __shfl_sync(FULL_WARP, sum - mine, found);
            const Reach reach(p, base + found);
            const int item = rest % items;
            segment.kv_head = p.row_blocks == 1 ? item : item / p.row_blocks;
            segment.row_block = item - segment.kv_head * p.row_blocks;
            segment.seq = base + found, segment.piece = rest / items, segment.pieces = count(reach),
            segment.index = index;
            segment.low = reach.low, segment.length = reach.length, segment.whole = reach.whole;
            auto unit_at = [&](int piece) {
                if (p.split) return (reach.first / piece_units + piece) * piece_units;
                // As equal as can be.
                return reach.first + piece * (reach.units / segment.pieces) + min(piece, reach.units % segment.pieces);
            };
            segment.begin = unit_at(segment.piece) * UNIT_TOKENS;
            segment.end = max(segment.begin, min(unit_at(segment.piece + 1) * UNIT_TOKENS, reach.length));
            return true;
        }
    }
};

// vLLM's block-sparse pattern: whether the row's head sees the tokens of the pattern's block that `token` is in.
__device__ __forceinline__ bool in_pattern(const Params& p, const Segment& segment, int head, int token) {
    const int block = token / p.sparse_size;
    const long long shift = p.sparse_head_step >= 0
                                ? (p.sparse_rank * (long long)p.heads + head) * p.sparse_head_step
                                : (p.sparse_rank * (long long)p.kv_heads + segment.kv_head) * -p.sparse_head_step;
    return (block + shift + 1) % p.sparse_stride == 0 || block > (segment.length - 1) / p.sparse_size - p.sparse_local;
}

// What is done to a score besides the scale (all in powers of 2).
__device__ __forceinline__ float modify(const Params& p, float score, float slope, int distance) {
    if (p.softcap) {
        const float cap = p.softcap * LOG2_E;
        score = cap * tanhf(score / cap);
    }
    return score + slope * distance;
}

// The tensor-core kernel.
//
// Grid: as many blocks as fit the GPU at once; or CLUSTER for each item. A block has WARPS warps in teams of TEAM; a
// team takes every TEAMS-th tile of 16 tokens of a piece, and each of its warps 16 of the 16 * TEAM rows. A team runs a
// pipeline of its own, STAGES tiles deep, without a barrier for the block: cp.async into shared memory, from there
// fragments.
//
// A tile in shared memory is made of chunks of 16 bytes, as the cache is: of one token (keys, and FLASH's values) or of
// one dimension (VLLM's values). Eight chunks that ldmatrix reads together, or that eight lanes store, must lie in
// different banks; `Fragments` says how.
//
// Of 8-bit caches all is computed in float16, which holds them exactly. Four neighbouring bytes are then two registers
// of a fragment, so that its columns stand for tokens, or dimensions, in another order; `Fragments` says in which.
//
// HEAD_DIM == 0 or BLOCK_SIZE == 0: from the arguments. DIMS: head_dim rounded up to what the registers hold. EXTRAS:
// whether there is a softcap, a slope or a block-sparse pattern. CLUSTER > 1: as many blocks per item.
template <typename T, typename CACHE, Layout LAYOUT, int DIMS> struct Fragments {
    static constexpr bool FP8 = sizeof(CACHE) == 1;
    static constexpr int CHUNK = 16 / sizeof(CACHE); // elements
    // Bytes run along tokens in the values of VLLM's layout, along dimensions in FLASH's.
    static constexpr bool TOKENS_MOVED = FP8 && LAYOUT == VLLM;

    // In FLASH's layout a token has whole lines of 128 bytes, with their chunks permuted, or else an odd number of
    // chunks, so that eight tokens are in different banks. (Copies are much slower when the chunks of a line of the
    // cache go to different lines.)
    static constexpr bool LINES = DIMS / CHUNK % 8 == 0;
    static constexpr int PITCH = LINES ? DIMS / CHUNK : DIMS / CHUNK | 1;
    // Bytes of a tile's keys, or its values.
    static constexpr int HALF_STAGE = TILE * 16 * (LAYOUT == FLASH ? PITCH : DIMS / CHUNK);

    // The token of a tile in column `column` of the tile's half `half`.
    static __device__ __forceinline__ int token(int half, int column) {
        return TOKENS_MOVED ? column / 2 * 4 + half * 2 + column % 2 : half * 8 + column;
    }

    // The dimension in column `column` of the n-th fragment of the output.
    static __device__ __forceinline__ int dim(int n, int column) {
        return FP8 && LAYOUT == FLASH ? n / 2 * 16 + column * 2 + n % 2 : n * 8 + column;
    }

    // Where the chunk of one token lies, in chunks.
    static __device__ __forceinline__ int token_chunk(int chunk, int token) {
        if constexpr (LAYOUT == FLASH) return token * PITCH + (LINES ? chunk ^ (token & 7) : chunk);
        return chunk * TILE + (TOKENS_MOVED ? (token & 8) | ((token + token / 8 * 2) & 7) : token);
    }

    // Where the chunk of one dimension lies: there are two of 8 tokens, or one of 16.
    static __device__ __forceinline__ int dim_chunk(int dim, int half) {
        return FP8 ? dim : dim * 2 + (half ^ (dim >> 2 & 1));
    }
};

// What the products are computed in.
template <bool FP8, typename T> struct Product {
    using type = T;
};
template <typename T> struct Product<true, T> {
    using type = __half;
};

template <typename A, typename B> struct Same {
    static constexpr bool value = false;
};
template <typename A> struct Same<A, A> {
    static constexpr bool value = true;
};

constexpr int warps_of(int dims) { return dims > 128 ? 2 : 4; }

template <typename T, typename CACHE, Layout LAYOUT, int HEAD_DIM, int DIMS, int BLOCK_SIZE, int TEAM, bool EXTRAS,
          int STAGES, int CLUSTER>
__global__ __launch_bounds__(32 * warps_of(DIMS), 2) CLUSTER_OF(CLUSTER) void attend(const __grid_constant__ Params p) {
    using Form = Fragments<T, CACHE, LAYOUT, DIMS>;
    constexpr bool FP8 = Form::FP8;
    using Math = typename Product<FP8, T>::type;
    // bfloat16 reaches further than float16.
    constexpr bool RESCALED = FP8 && !Same<T, __half>::value;
    constexpr int WARPS = warps_of(DIMS), TEAMS = WARPS / TEAM, ROWS = 16 * TEAM, LANES = 32 * TEAM;
    constexpr int CHUNK = Form::CHUNK, CHUNKS = DIMS / CHUNK;
    constexpr int STEP = TEAMS * CLUSTER; // a team's next tile is so many further on
    constexpr int HALF_STAGE = Form::HALF_STAGE;
    constexpr int STEPS = DIMS / 16, FRAGMENTS = DIMS / 8;
    constexpr int OUT_STRIDE = DIMS + 8;

    extern __shared__ __align__(128) char shared[];
    __shared__ float maxima[TEAMS * ROWS], sums[TEAMS * ROWS];
    __shared__ float2 statistics[CLUSTER == 1 ? 1 : ROWS];
    // Large heads would not leave registers for the queries: then each lane keeps its own here.
    constexpr bool QUERY_IN_SHARED = DIMS > 128;
    __shared__ uint4 queries[QUERY_IN_SHARED ? STEPS : 1][QUERY_IN_SHARED ? 32 * WARPS : 1];
    const int head_dim = HEAD_DIM ? HEAD_DIM : p.head_dim;
    const int block_size = BLOCK_SIZE ? BLOCK_SIZE : p.block_size;
    const int chunks = head_dim / CHUNK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / TEAM, member = warp % TEAM, lane_of_team = member * 32 + lane;
    const int row = lane / 4, pair = lane % 4; // in the fragments
    // Stages of all teams one after the other; where the last ones are, the teams' results meet.
    auto stage_of = [&](int k) { return shared + (k % STAGES * TEAMS + team) * 2 * HALF_STAGE; };
    float* const outputs = reinterpret_cast<float*>(shared + (STAGES - 1) * TEAMS * 2 * HALF_STAGE);
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    auto team_barrier = [&] {
        if constexpr (TEAM == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(LANES) : "memory");
    };

    const int first_tile = cluster_rank<CLUSTER>() * TEAMS + team;

    // A piece in the pipeline.
    struct Work {
        Segment segment;
        const int* table;
        int tiles; // of this team
        // Entries of the table for the team's next 64 tiles, one per lane, the later half on its way.
        int entry, next_entry;
        bool bad; // an entry
    };
    auto tile_at = [&](const Work& work, int k) { return work.segment.begin + (first_tile + k * STEP) * TILE; };
    // No entry is believed that no token needs.
    auto checked = [&](Work& work, int k, int id) {
        if (k >= work.tiles || tile_at(work, k) + TILE <= work.segment.low || unsigned(id) < unsigned(p.blocks))
            return id;
        work.bad = true;
        return 0;
    };
    auto entry_of = [&](Work& work, int k) {
        return k < work.tiles ? checked(work, k, work.table[tile_at(work, k) / block_size]) : 0;
    };
    auto row_of = [&](const Work& work, int j) {
        return Row(p, work.segment, work.segment.row_block * ROWS + member * 16 + row + 8 * j);
    };
    auto seen = [&](const Work& work, int token) {
        const Row first = row_of(work, 0), second = row_of(work, 1);
        return (first.valid && in_pattern(p, work.segment, first.head, token)) ||
               (second.valid && in_pattern(p, work.segment, second.head, token));
    };

    auto start_copies = [&](Work& work, int k) {
        const Segment& segment = work.segment;
        if (k % 32 == 0 && k > 0) {
            work.entry = work.next_entry;
            work.next_entry = entry_of(work, k + 32 + lane);
        }
        const long long id = __shfl_sync(FULL_WARP, work.entry, k % 32);
        const int token = tile_at(work, k);
        // A tile wholly before the window may have no block any more; none of its tokens counts.
        bool wanted = k < work.tiles && token + TILE > segment.low;
        if constexpr (EXTRAS && TEAM == 1)
            if (p.sparse_stride) wanted = wanted && __any_sync(FULL_WARP, seen(work, token));
        if (wanted) {
            const int slot = token % block_size;
            const unsigned keys_to = shared_address(stage_of(k));
            const unsigned values_to = keys_to + HALF_STAGE;
            const char* keys = p.keys + id * p.key_block + segment.kv_head * p.key_head;
            const char* values = p.values + id * p.value_block + segment.kv_head * p.value_head;
            if constexpr (LAYOUT == VLLM) {
                // All that depends on the lane first, so that the rest are constants of the instructions.
                const int t = lane_of_team % TILE, chunk = lane_of_team / TILE;
                keys += (slot + t + chunk * block_size) * 16;
                const unsigned key_to = keys_to + Form::token_chunk(chunk, t) * 16;
#pragma unroll
                for (int i = 0; i < CHUNKS; i += LANES / TILE)
                    if (chunk + i < chunks) cp_async(key_to + i * TILE * 16, keys + i * block_size * 16);
                constexpr int HALVES = FP8 ? 1 : 2;
                const int half = lane_of_team % HALVES, dim = lane_of_team / HALVES;
                values += (slot + dim * block_size) * int(sizeof(CACHE)) + half * 16;
                const unsigned value_to = values_to + Form::dim_chunk(dim, half) * 16;
#pragma unroll
                for (int i = 0; i < DIMS; i += LANES / HALVES)
                    if (dim + i < head_dim)
                        cp_async(value_to + i * HALVES * 16, values + i * block_size * int(sizeof(CACHE)));
            } else {
                // Lanes that share a token: a power of two, so that no division is needed.
                constexpr int ACROSS = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;
                const int chunk = lane_of_team % ACROSS;
                keys += slot * p.key_token + chunk * 16;
                values += slot * p.value_token + chunk * 16;
#pragma unroll
                for (int i = 0; i < TILE; i += LANES / ACROSS) {
                    const int t = i + lane_of_team / ACROSS;
                    if (chunk < chunks && t < TILE) {
                        cp_async(keys_to + Form::token_chunk(chunk, t) * 16, keys + t * p.key_token);
                        cp_async(values_to + Form::token_chunk(chunk, t) * 16, values + t * p.value_token);
                    }
                }
            }
        }
        cp_async_commit_group();
    };

    // Find the blocks of a segment, whose first entries are `entry` if that is `known`.
    auto look_up = [&](Work& work, bool known, int entry) {
        const Segment& segment = work.segment;
        work.tiles = (ceil_div(segment.end - segment.begin, TILE) - first_tile + STEP - 1) / STEP;
        work.bad = !segment.whole;
        work.entry = known ? checked(work, lane, entry) : entry_of(work, lane);
        work.next_entry = entry_of(work, 32 + lane);
    };
    auto start = [&](Work& work) {
#pragma unroll
        for (int k = 0; k < STAGES - 1; ++k) start_copies(work, k);
    };

    // A block asks for its next piece a few tiles before it is done with one, and starts it before the results of that
    // one are merged. Whether a piece was the last of its item it learns when the next one is done: under load every
    // answer from global memory takes microseconds.
    __shared__ int next; // -1: not known yet
    __shared__ bool last;
    __shared__ Segment previous;
    int place = -1;
    Pieces pieces(p);
    Work work;
    bool more = true;
    if constexpr (CLUSTER == 1) {
        if (threadIdx.x == 0) next = -1;
        pieces.plan();
        more = pieces.find(blockIdx.x, work.segment);
        if (more) {
            work.table = p.tables + work.segment.seq * p.table_row;
            look_up(work, false, 0);
        }
    } else {
        const int item = blockIdx.x / CLUSTER;
        Segment& segment = work.segment;
        segment.row_block = item % p.row_blocks, segment.kv_head = item / p.row_blocks % p.kv_heads;
        segment.seq = item / pieces.items;
        work.table = p.tables + segment.seq * p.table_row;
        // Before the length is here: nearly all sequences begin at token 0.
        const int ahead = (first_tile + lane * STEP) * TILE / block_size;
        const int entry = ahead < p.max_blocks ? work.table[ahead] : 0;
        const Reach reach(p, segment.seq);
        segment.low = reach.low, segment.length = segment.end = reach.length, segment.whole = reach.whole;
        segment.begin = reach.first * UNIT_TOKENS;
        segment.piece = segment.index = 0, segment.pieces = 1;
        look_up(work, !p.window, entry);
    }
    if (more) start(work);
    __syncthreads();
    while (more) {
        const Segment& segment = work.segment;
        const Row rows[2] = {row_of(work, 0), row_of(work, 1)};
        // The last token that they see.
        const int positions[2] = {rows[0].position(p, segment), rows[1].position(p, segment)};

        // Dimensions past the head's: their products must be 0.
        if (HEAD_DIM != DIMS && chunks < CHUNKS)
            for (int i = lane_of_team; i < STAGES * (CHUNKS - chunks) * TILE; i += LANES) {
                const int chunk = chunks + i / TILE / STAGES;
                char* const to = stage_of(i / TILE) + Form::token_chunk(chunk, i % TILE) * 16;
                *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            }

        // The queries: fragments A.
        unsigned query[STEPS][4];
        float factors[2] = {scale, scale};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const T* from = static_cast<const T*>(p.query) + segment.seq * p.query_seq + rows[j].token * p.query_token +
                            rows[j].head * p.query_head;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int dim = step * 16 + (FP8 ? pair * 4 + half * 2 : pair * 2 + half * 8);
                    query[step][half * 2 + j] =
                        rows[j].valid && dim < head_dim ? *reinterpret_cast<const unsigned*>(from + dim) : 0;
                }
            if constexpr (RESCALED) {
                // A row whose largest number has exponent 0 is in the range of float16, and to more than its precision.
                unsigned largest = 0;
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        largest = max(largest, max(query[step][half * 2 + j] << 16 & 0x7fffffff,
                                                   query[step][half * 2 + j] & 0x7fff0000));
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
                largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
                const unsigned exponent = min(max(largest >> 23, 1u), 253u);
                const float down = __uint_as_float((254 - exponent) << 23);
                factors[j] = scale * __uint_as_float(exponent << 23);
#pragma unroll
                for (int step = 0; step < STEPS; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        unsigned& both = query[step][half * 2 + j];
                        both =
                            pack<Math>(__uint_as_float(both << 16) * down, __uint_as_float(both & 0xffff0000) * down);
                    }
            }
        }
        if constexpr (QUERY_IN_SHARED) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                queries[step][threadIdx.x] = make_uint4(query[step][0], query[step][1], query[step][2], query[step][3]);
        }
        auto query_of = [&](int step, unsigned (&a)[4]) {
            if constexpr (QUERY_IN_SHARED) {
                const uint4 all = queries[step][threadIdx.x];
                a[0] = all.x, a[1] = all.y, a[2] = all.z, a[3] = all.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = query[step][i];
            }
        };

        // So many tiles before the end.
        constexpr int AHEAD = 3;
        int taken;
        if (CLUSTER == 1 && threadIdx.x == 0 && work.tiles <= AHEAD) taken = atomicAdd(p.taken, 1);

        float slopes[2] = {0.f, 0.f};
        if constexpr (EXTRAS)
            for (int j = 0; j < 2; ++j)
                if (p.slopes && rows[j].valid) slopes[j] = p.slopes[rows[j].head] * LOG2_E;

        float out[FRAGMENTS][4] = {};
        float maximum[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {0.f, 0.f};
        float bases[2] = {-LARGEST_FLOAT, -LARGEST_FLOAT};
        // Tiles that all rows see whole.
        const int all_from = p.window ? segment.length - p.window : 0;
        const int all_to = segment.length - p.query_tokens + 1;

        for (int k = 0; k < work.tiles; ++k) {
            cp_async_wait_group<STAGES - 2>();
            team_barrier();
            start_copies(work, k + STAGES - 1);
            if (CLUSTER == 1 && threadIdx.x == 0 && k == work.tiles - 1 - AHEAD) taken = atomicAdd(p.taken, 1);
            const int token = tile_at(work, k);
            if (token + TILE <= segment.low) continue;
            if constexpr (EXTRAS && TEAM == 1)
                if (p.sparse_stride && !__any_sync(FULL_WARP, seen(work, token))) continue;
            char* const stage = stage_of(k);
            const unsigned keys_at = shared_address(stage), values_at = keys_at + HALF_STAGE;

            // Slots that hold no token of the sequence, or none it may still see, may hold anything: also what 0 times
            // it is not 0.
            if (token < segment.low || token + TILE > segment.length) {
                char* const values = stage + HALF_STAGE;
                for (int i = lane_of_team; i < TILE * DIMS; i += LANES) {
                    const int t = i % TILE, dim = i / TILE;
                    if (token + t >= segment.low && token + t < segment.length) continue;
                    const int at = LAYOUT == VLLM ? Form::dim_chunk(dim, t / CHUNK) * CHUNK + t % CHUNK
                                                  : Form::token_chunk(dim / CHUNK, t) * CHUNK + dim % CHUNK;
                    if constexpr (FP8)
                        values[at] = 0;
                    else
                        reinterpret_cast<unsigned short*>(values)[at] = 0;
                }
                team_barrier();
            }

            float scores[2][4] = {};
            if constexpr (FP8) {
                const int t = Form::token(lane / 8 % 2, lane % 8);
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    unsigned a[4], bytes[2];
                    query_of(step, a);
                    ldmatrix(bytes, keys_at + Form::token_chunk(step, t) * 16);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        unsigned b[2];
                        to_halves<CACHE>(b, bytes[n]);
                        mma_m16n8k16<Math>(scores[n], a, b[0], b[1]);
                    }
                }
            } else {
                const int t = lane % 8 + lane / 16 * 8;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    unsigned a[4], b[4];
                    query_of(step, a);
                    ldmatrix(b, keys_at + Form::token_chunk(step * 2 + lane / 8 % 2, t) * 16);
                    mma_m16n8k16<Math>(scores[0], a, b[0], b[1]);
                    mma_m16n8k16<Math>(scores[1], a, b[2], b[3]);
                }
            }

#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[n][i] *= factors[i / 2];
                    if constexpr (EXTRAS) {
                        const int t = token + Form::token(n, pair * 2 + i % 2);
                        scores[n][i] = modify(p, scores[n][i], slopes[i / 2], t - positions[i / 2]);
                        if (p.sparse_stride && !in_pattern(p, segment, rows[i / 2].head, t))
                            scores[n][i] = -CUDART_INF_F;
                    }
                }
            if (token < all_from || token + TILE > all_to) {
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int t = token + Form::token(n, pair * 2 + i % 2), position = positions[i / 2];
                        if (t > position || (p.window && t <= position - p.window)) scores[n][i] = -CUDART_INF_F;
                    }
            }

            // Shares are relative to `bases`, which follow the maxima only when these have left them far behind:
            // nothing overflows before, and the accumulators need not be rescaled for every small step.
            constexpr float FAR = 8.f;
            bool behind = false;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float first = fmaxf(scores[0][2 * j], scores[0][2 * j + 1]);
                float most = fmaxf(first, fmaxf(scores[1][2 * j], scores[1][2 * j + 1]));
                most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
                most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
                maximum[j] = fmaxf(maximum[j], most);
                behind |= maximum[j] > bases[j] + FAR;
            }
            if (__any_sync(FULL_WARP, behind)) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    // A row that has seen nothing yet has accumulated nothing, and keeps a finite base.
                    const float base = maximum[j] == -CUDART_INF_F ? bases[j] : maximum[j];
                    const float fade = fast_exp2(bases[j] - base);
                    bases[j] = base;
                    sum[j] *= fade;
#pragma unroll
                    for (int n = 0; n < FRAGMENTS; ++n) out[n][2 * j] *= fade, out[n][2 * j + 1] *= fade;
                }
            }
            unsigned shares[4];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float low = fast_exp2(scores[n][2 * j] - bases[j]);
                    const float high = fast_exp2(scores[n][2 * j + 1] - bases[j]);
                    sum[j] += low + high;
                    shares[n * 2 + j] = pack<Math>(low, high);
                }

            if constexpr (!FP8 && LAYOUT == VLLM) {
                const int half = lane / 8 % 2;
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n += 2) {
                    unsigned b[4];
                    ldmatrix(b, values_at + Form::dim_chunk((n + lane / 16) * 8 + lane % 8, half) * 16);
                    mma_m16n8k16<Math>(out[n], shares, b[0], b[1]);
                    mma_m16n8k16<Math>(out[n + 1], shares, b[2], b[3]);
                }
            } else if constexpr (!FP8) {
                const int t = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n += 2) {
                    unsigned b[4];
                    ldmatrix_trans(b, values_at + Form::token_chunk(n + lane / 16, t) * 16);
                    mma_m16n8k16<Math>(out[n], shares, b[0], b[1]);
                    mma_m16n8k16<Math>(out[n + 1], shares, b[2], b[3]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n += 2) {
                    unsigned bytes[2];
                    if constexpr (LAYOUT == VLLM) {
                        ldmatrix(bytes, values_at + Form::dim_chunk(n * 8 + lane % 16, 0) * 16);
                    } else {
                        // Two tokens by two dimensions in a register; then four tokens of one.
                        unsigned both[2];
                        ldmatrix_trans(both, values_at + Form::token_chunk(n / 2, lane % 16) * 16);
                        bytes[0] = __byte_perm(both[0], both[1], 0x6420),
                        bytes[1] = __byte_perm(both[0], both[1], 0x7531);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        unsigned b[2];
                        to_halves<CACHE>(b, bytes[i]);
                        mma_m16n8k16<Math>(out[n + i], shares, b[0], b[1]);
                    }
                }
            }
        }

        // The next piece begins as soon as the team has left the stages.
        team_barrier();
        Work following;
        more = false;
        if constexpr (CLUSTER == 1) {
            if (threadIdx.x == 0) atomicExch(&next, gridDim.x + taken);
            int index;
            do index = __shfl_sync(FULL_WARP, lane == 0 ? atomicAdd(&next, 0) : 0, 0);
            while (index < 0);
            more = pieces.find(index, following.segment);
            if (more) {
                following.table = p.tables + following.segment.seq * p.table_row;
                look_up(following, false, 0);
                start(following);
            }
        }

        // Merge the warps.
        __syncthreads();
        if (CLUSTER == 1 && threadIdx.x == 0) {
            next = -1;
            __threadfence();
            last = place >= 0 && place == previous.pieces - 1;
        }
        const bool bad = __any_sync(FULL_WARP, work.bad);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int at = team * ROWS + member * 16 + row + 8 * j;
            const float fade = maximum[j] == -CUDART_INF_F ? 1.f : fast_exp2(bases[j] - maximum[j]);
            float total = lanes_sum<4>(sum[j]) * fade;
            if (bad) total = CUDART_NAN_F;
            if (pair == 0) maxima[at] = maximum[j], sums[at] = total;
            if (!rows[j].valid) continue;
#pragma unroll
            for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    outputs[(at - team * (ROWS - p.rows)) * OUT_STRIDE + Form::dim(n, pair * 2 + i)] =
                        out[n][2 * j + i] * fade;
        }
        __syncthreads();
        if constexpr (CLUSTER == 1) {
            store_segment<TEAMS, ROWS, T>(p, segment, maxima, sums, outputs, OUT_STRIDE);
            if (last) join<ROWS, T>(p, previous);
            __syncthreads();
            if (threadIdx.x == 0) {
                place = segment.partial(p) ? arrive(p, segment) : -1;
                previous = segment;
            }
        } else {
            store_shared_segment<CLUSTER, TEAMS, ROWS, T>(
                p, segment, maxima, sums, outputs, outputs + TEAMS * p.rows * OUT_STRIDE, statistics, OUT_STRIDE);
        }
        work = following;
    }
    if constexpr (CLUSTER == 1) {
        if (threadIdx.x == 0) {
            __threadfence();
            last = place >= 0 && place == previous.pieces - 1;
        }
        __syncthreads();
        if (last) join<ROWS, T>(p, previous);
    }
}

// The kernel without tensor cores, for what those do not take: float32, blocks of 8, 24, ... tokens, arrays at any
// address (WIDE: all of them at multiples of 16 bytes).
//
// Grid: as for `attend`. Each of the four warps takes every fourth tile of 32 tokens, one per lane for the scores; for
// the output, a lane has up to 8 dimensions.
template <typename CACHE, bool WIDE> __device__ __forceinline__ void load_four(float (&to)[4], const char* from) {
    CACHE values[4];
    if constexpr (WIDE) {
        if constexpr (sizeof(CACHE) == 4)
            *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (sizeof(CACHE) == 2)
            *reinterpret_cast<uint2*>(values) = *reinterpret_cast<const uint2*>(from);
        else
            *reinterpret_cast<unsigned*>(values) = *reinterpret_cast<const unsigned*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = reinterpret_cast<const CACHE*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = to_float(values[i]);
}

template <typename T, typename CACHE, Layout LAYOUT, bool WIDE>
__global__ __launch_bounds__(128) void attend_scalar(const __grid_constant__ Params p) {
    constexpr int WARPS = 4, ROWS = 4, MAX_DIM = 256, DIMS_PER_LANE = MAX_DIM / 32, X = 16 / sizeof(CACHE);
    constexpr int ITEM = sizeof(CACHE);
    __shared__ float query[ROWS][MAX_DIM], shares[WARPS][ROWS][32];
    __shared__ float maxima[WARPS * ROWS], sums[WARPS * ROWS];
    __shared__ __align__(16) float outputs[WARPS * ROWS * MAX_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (p.key_scale ? *p.key_scale : 1.f) * p.scale * LOG2_E;

    auto dim_of = [&](int i) { return LAYOUT == VLLM ? i * 32 + lane : i / 4 * 128 + lane * 4 + i % 4; };

    __shared__ int next;
    __shared__ bool last;
    Pieces pieces(p);
    pieces.plan();
    Segment segment;
    for (int index = blockIdx.x; pieces.find(index, segment); index = next) {
        const int first_row = segment.row_block * ROWS;
        for (int i = threadIdx.x; i < ROWS * p.head_dim; i += blockDim.x) {
            const int r = i / p.head_dim, dim = i % p.head_dim;
            const Row row(p, segment, first_row + r);
            const T* const from = static_cast<const T*>(p.query) + segment.seq * p.query_seq +
                                  row.token * p.query_token + row.head * p.query_head;
            query[r][dim] = row.valid ? to_float(from[dim]) : 0.f;
        }
        __syncthreads();
        const int* const table = p.tables + segment.seq * p.table_row;
        bool bad = !segment.whole;
        float maximum[ROWS], sum[ROWS] = {}, out[ROWS][DIMS_PER_LANE] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) maximum[r] = -CUDART_INF_F;

        for (int start = segment.begin + warp * 32; start < segment.end; start += WARPS * 32) {
            const int t = start + lane;
            int id = -1;
            if (t >= segment.low && t < segment.end) {
                id = table[t / p.block_size];
                if (unsigned(id) >= unsigned(p.blocks)) bad = true, id = -1;
            }
            const int slot = t % p.block_size;
            float scores[ROWS] = {};
            if (id >= 0) {
                const char* const keys = p.keys + id * p.key_block + segment.kv_head * p.key_head +
                                         (LAYOUT == VLLM ? slot * 16ll : slot * p.key_token);
#pragma unroll 4
                for (int dim = 0; dim < p.head_dim; dim += 4) {
                    float key[4];
                    load_four<CACHE, WIDE>(
                        key, keys + (LAYOUT == VLLM ? dim / X * p.block_size * 16 + dim % X * ITEM : dim * ITEM));
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int i = 0; i < 4; ++i) scores[r] += query[r][dim + i] * key[i];
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const Row row(p, segment, first_row + r);
                const int position = row.position(p, segment);
                float score = modify(p, scores[r] * scale, p.slopes ? p.slopes[row.head] * LOG2_E : 0.f, t - position);
                if (id < 0 || t > position || (p.window && t <= position - p.window) ||
                    (p.sparse_stride && !in_pattern(p, segment, row.head, t)))
                    score = -CUDART_INF_F;
                const float largest = fmaxf(maximum[r], lanes_max<32>(score));
                const float base = largest == -CUDART_INF_F ? 0.f : largest;
                const float fade = fast_exp2(maximum[r] - base), share = fast_exp2(score - base);
                maximum[r] = largest;
                sum[r] = sum[r] * fade + share;
                shares[warp][r][lane] = share;
#pragma unroll
                for (int i = 0; i < DIMS_PER_LANE; ++i) out[r][i] *= fade;
            }
            __syncwarp();
            if constexpr (LAYOUT == VLLM) {
                // The 8 tokens of a group are in one block.
                int group_id = id;
#pragma unroll
                for (int step = 1; step < 8; step *= 2)
                    group_id = max(group_id, __shfl_xor_sync(FULL_WARP, group_id, step));
                for (int group = 0; group < 32; group += 8) {
                    const long long block = __shfl_sync(FULL_WARP, group_id, group);
                    if (block < 0) continue;
                    const unsigned counts = __ballot_sync(FULL_WARP, id >= 0) >> group;
                    const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                               (start + group) % p.block_size * ITEM;
#pragma unroll
                    for (int i = 0; i < DIMS_PER_LANE; ++i) {
                        if (dim_of(i) >= p.head_dim) continue;
#pragma unroll
                        for (int half = 0; half < 8; half += 4) {
                            float value[4];
                            load_four<CACHE, WIDE>(value, values + (dim_of(i) * p.block_size + half) * ITEM);
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                // What lies in a slot without a token may be anything, also what 0 times it is not 0.
                                if (!(counts >> (half + j) & 1)) value[j] = 0.f;
#pragma unroll
                                for (int r = 0; r < ROWS; ++r)
                                    out[r][i] += shares[warp][r][group + half + j] * value[j];
                            }
                        }
                    }
                }
            } else {
#pragma unroll 4
                for (int token = 0; token < 32; ++token) {
                    const long long block = __shfl_sync(FULL_WARP, id, token);
                    if (block < 0) continue;
                    const char* const values = p.values + block * p.value_block + segment.kv_head * p.value_head +
                                               (start + token) % p.block_size * p.value_token;
#pragma unroll
                    for (int i = 0; i < DIMS_PER_LANE; i += 4) {
                        if (dim_of(i) >= p.head_dim) continue;
                        float value[4];
                        load_four<CACHE, WIDE>(value, values + dim_of(i) * ITEM);
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
#pragma unroll
                            for (int j = 0; j < 4; ++j) out[r][i + j] += shares[warp][r][token] * value[j];
                    }
                }
            }
            __syncwarp();
        }

        bad = __any_sync(FULL_WARP, bad);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float total = lanes_sum<32>(sum[r]);
            if (bad) total = CUDART_NAN_F;
            if (lane == 0) maxima[warp * ROWS + r] = maximum[r], sums[warp * ROWS + r] = total;
#pragma unroll
            for (int i = 0; i < DIMS_PER_LANE; ++i)
                if (r < p.rows && dim_of(i) < p.head_dim)
                    outputs[(warp * p.rows + r) * MAX_DIM + dim_of(i)] = out[r][i];
        }
        __syncthreads();
        store_segment<WARPS, ROWS, T>(p, segment, maxima, sums, outputs, MAX_DIM);
        __syncthreads();
        if (threadIdx.x == 0) {
            next = gridDim.x + atomicAdd(p.taken, 1);
            last = segment.partial(p) && arrive(p, segment) == segment.pieces - 1;
            __threadfence();
        }
        __syncthreads();
        if (last) join<ROWS, T>(p, segment);
    }
}

struct MergeParams {
    const void* out_a;  // [rows, head_dim]  T
    const float* lse_a; // [rows], natural
    const void* out_b;
    const float* lse_b;
    void* out;
    float* lse;
    long long rows;
    int head_dim;
};

// Merge attention over two sets of tokens into attention over both: each weighs exp(lse).
//
// Grid: a thread per VECTOR elements of `out`.
template <typename T, int VECTOR>
__global__ __launch_bounds__(128) void merge_states(const __grid_constant__ MergeParams p) {
    struct alignas(sizeof(T) * VECTOR) Vector {
        T items[VECTOR];
    };
    const int vectors = p.head_dim / VECTOR;
    const long long i = blockIdx.x * 128ll + threadIdx.x, row = i / vectors;
    if (row >= p.rows) return;
    const float a = p.lse_a[row], b = p.lse_b[row];
    const float larger = a == a && b == b ? fmaxf(a, b) : CUDART_NAN_F;
    const Vector from_a = static_cast<const Vector*>(p.out_a)[i], from_b = static_cast<const Vector*>(p.out_b)[i];
    const bool some = larger != -CUDART_INF_F;
    const float share_a = some ? expf(a - larger) : 0.f, share_b = some ? expf(b - larger) : 0.f;
    const float sum = share_a + share_b;
    Vector merged;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        // What saw no token may hold anything.
        const float value_a = a == -CUDART_INF_F ? 0.f : to_float(from_a.items[j]);
        const float value_b = b == -CUDART_INF_F ? 0.f : to_float(from_b.items[j]);
        merged.items[j] = from_float<T>(some ? (value_a * share_a + value_b * share_b) / sum : 0.f);
    }
    static_cast<Vector*>(p.out)[i] = merged;
    if (i % vectors == 0) p.lse[row] = some ? larger + logf(sum) : -CUDART_INF_F;
}
