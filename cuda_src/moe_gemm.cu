// Grouped products of a mixture of experts: the rows of each expert's group times its weights.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]             for every row r of the group of expert e
//   out[r, j] = x[r, j],  or  activate(x[r, j], x[r, n / 2 + j])          with ACTIVATION; row_token null: row r itself
//
// each number of a and b times its scale, if there are scales; sums in float32, rounded once. The group of expert e is rows
// [offsets[e], offsets[e + 1]) or, batched, the first offsets[e] of the max_tokens rows from e * max_tokens on. The host
// knows nothing of the groups but their number: blocks find out which tiles there are. Other rows are not written.
//
//   gemm_wgmma        16 bits, on Hopper, by TMA and warpgroups
//   gemm_fp8_wgmma    8 bits, the same
//   gemm_mma          16, 8 and 4 bits, on every GPU from sm_80 on, and where rows are gathered
//   gemm_stream       16 and 8 bits, on every GPU, for few rows of each expert
//
// Each has a section of its own, which says who does what. ACTIVATION: a number of common/activation.cuh, 0 is none.
#include "common/activation.cuh"
#include "common/cluster.cuh"
#include "common/fp8.cuh"
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"

struct GemmParams {
    const void* a; // [tokens, k]; batched: [experts, max_tokens, k]
    const void* b; // [experts, n, k]; of 4 bits: [experts, n, k / 2] bytes, the low half first
    void* out;     // [rows, n] or, with an activation, [rows, n / 2]
    // FP8. By blocks: [tokens, ceil(k / 128)] and [experts, ceil(n / 128), ceil(k / 128)]. Else of each token or one, and of
    // each row of weights or each expert. Of 4 bits: b_scale are bytes, [experts, n, k / 32] of E8M0 or [experts, n, k / 16]
    // of e4m3.
    const float* a_scale;
    const void* b_scale;
    const int* offsets;              // [experts + 1] times `offset_words`; batched: [experts], numbers of rows
    const int* row_token;            // [rows], or null
    const float* b_global_scale;     // [experts], or null
    int rows, tokens, experts, n, k; // rows of out and of a; n of b
    int offset_words;                // 1: offsets are int32; 2: int64, of which the low words count
    int max_tokens;                  // batched; else 0
    int a_scale_step;                // 1: a_scale is of each token, 0: one
    int b_scale_step;                // 1: b_scale is of each row of weights, 0: of each expert
    int together;                    // gemm_wgmma: so many tiles of tokens share a tile of weights before the next
};

// For TMA: what the boxes are is said where they are used.
struct MappedGemmParams : GemmParams {
    TensorMap b_map, a_map;
};

// The rows of an expert. Offsets outside of the rows count as their ends.
struct GroupRows {
    int first, count;
};

__device__ __forceinline__ GroupRows rows_of(const GemmParams& p, int expert) {
    GroupRows group;
    if (p.max_tokens) {
        group.first = expert * p.max_tokens;
        group.count = min(max(p.offsets[expert], 0), p.max_tokens);
    } else {
        const int* const at = p.offsets + expert * p.offset_words;
        group.first = min(max(at[0], 0), p.rows);
        group.count = max(min(at[p.offset_words], p.rows), group.first) - group.first;
    }
    return group;
}

// The row of `a` that is row `row` of the product.
__device__ __forceinline__ int source_of(const GemmParams& p, int row) {
    return p.row_token ? min(max(p.row_token[row], 0), p.tokens - 1) : row;
}

// Which tile of which group.
struct GroupTile {
    int expert, begin, end; // rows of the group
    int before, tiles;      // of TOKENS rows: of the groups before, and of this one
};

// The group that has the wanted one of all tiles, to shared memory; false if there are not so many. All threads of the
// block call this.
template <int TOKENS, int THREADS>
__device__ __forceinline__ bool find_tile(const GemmParams& p, int wanted, GroupTile& found) {
    constexpr int WARPS = THREADS / 32;
    __shared__ int sums[WARPS];
    const int thread = threadIdx.x, warp = thread / 32;
    int all = 0;
    for (int start = 0; start < p.experts; start += THREADS) {
        const int e = start + thread;
        int begin = 0, end = 0;
        if (e < p.experts) {
            const GroupRows group = rows_of(p, e);
            begin = group.first, end = group.first + group.count;
        }
        const int tiles = (end - begin + TOKENS - 1) / TOKENS;
        const int upto = lanes_inclusive_sum<32>(tiles);
        if (thread % 32 == 31) sums[warp] = upto;
        __syncthreads();
        int before = all + upto - tiles;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            before += i < warp ? sums[i] : 0;
            all += sums[i];
        }
        if (wanted >= before && wanted - before < tiles) {
            found.expert = e, found.begin = begin, found.end = end;
            found.before = before, found.tiles = tiles;
        }
        __syncthreads();
        if (wanted < all) return true;
    }
    return false;
}

// PLAIN: of one type with the tokens; else FP8, and tokens too; or numbers of 4 bits (e2m1), two in a byte, the low half
// first, with a scale 2^(byte - 127) for every 32 of a row, or one of e4m3 for every 16.
enum Format { PLAIN, FP8, MXFP4, NVFP4 };

__device__ __forceinline__ uint4 load_shared(unsigned from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

// ---- 16 bits, by warpgroups ----
//
// Groups have any number of rows, so rows of `a`, called tokens here, are the columns of the product, of which wgmma takes
// any multiple of 8, and weights are its 64 rows: a tile of few tokens costs little, and what lies beside a group's tokens
// does not touch them.
//
// All tiles of tokens read all weights of their group, so that a group has as few of them as can be, of about as many tokens
// each, and a tile is multiplied at the smallest of WIDTHS that holds it.
//
//   gemm_wgmma<...>     CLUSTER * (as many clusters as run at once) blocks of gemm_threads(TOKENS) threads
//
// A block computes tiles of 128 weights and up to TOKENS tokens, one after the other, and a cluster as many beside each
// other, of the same tokens. Warp 8 finds tiles and has TMA copy their parts along k to a ring of STAGES stages of DEPTH
// numbers each; it is ahead of the others by the whole ring, also across tiles. Of the tokens each block of a cluster
// copies every CLUSTER-th box, to all its blocks. Warpgroup w multiplies weights 64 w ... 64 w + 63 by all tokens of
// the tile.
//
// A stage is full when its bytes are there. It is empty when all warps of all blocks that it is copied to are done with it.
// What the first stage of a tile is a part of is in `visits`, which the barrier of the stage publishes. There are STAGES of
// them, since a tile has a stage at least, and a warp reads its visit before it lets go of the stage.
//
// Results lie along the weights in memory, but along the tokens in the registers of a thread: stmatrix transposes them
// through shared memory, a few tokens at a time, so that 8 (or with ACTIVATION 4) threads write what a token gets.
//
// ACTIVATION: the weights come as 8 rows of gates, the 8 of ups that belong to them, the next 8 gates, and so on; a thread
// then has the sums of both (in rows lane / 4 and lane / 4 + 8).
//
// With the largest tiles the second warpgroup begins a stage behind the first, and stays there: while one writes a tile, the
// other multiplies.

constexpr int WARPGROUPS = 2; // that multiply, each 64 weights of a tile
constexpr int DEPTH = 64;     // numbers of 16 bits in a stage, and in a row of a tile in shared memory
constexpr int ROW_BYTES = DEPTH * 2;

// Tokens of a tile; an instance has those from a quarter of its TOKENS on.
constexpr int WIDTHS[] = {8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 240, 256, 272, 288};

// Tokens that are copied at once.
__host__ __device__ constexpr int box_of(int tokens) { return tokens >= 64 ? 32 : tokens >= 16 ? tokens / 2 : 8; }

// Tokens whose results are transposed at once.
__host__ __device__ constexpr int round_of(int tokens) {
    return tokens > 128 ? 32 : tokens == 128 ? 64 : tokens < 16 ? 8 : 16;
}

// Threads of a block. 288 tokens need 144 registers a thread for sums, more than each can have: the loading warp then is one
// of a warpgroup, which gives its registers away.
__host__ __device__ constexpr int gemm_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens > 128 ? WARPGROUP : 32);
}

struct alignas(16) GemmVisit {
    int row;    // the first
    int tokens; // 0: there are no more tiles
    int column; // the first of this block in `out`
    int unused;
};

template <int TOKENS, int STAGES> struct GemmShared {
    static constexpr int WEIGHT_TILE = WARPGROUPS * 64 * ROW_BYTES, TOKEN_TILE = TOKENS * ROW_BYTES;
    static constexpr int STAGE = WEIGHT_TILE + TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // a warpgroup has two of them

    unsigned long long full[STAGES], empty[STAGES], skewed;
    GemmVisit visits[STAGES];
};

// Which tiles there are. A warp goes through them in order; lane i knows group `first` + i.
template <int TOKENS> struct GemmTiles {
    static constexpr int UNIT = TOKENS < 16 ? TOKENS : 16; // all tiles of a group but the last have a multiple of it

    const MappedGemmParams& p;
    int weight_tiles;
    int first = 0, before = 0;        // tiles of all groups before `first`
    int begin, count, tiles, through; // its rows; its tiles; and with those of all groups before it

    __device__ __forceinline__ GemmTiles(const MappedGemmParams& p, int weight_tiles)
        : p(p), weight_tiles(weight_tiles) {
        look();
    }

    // More than 256 tokens are a product more at every step, which pays where they are all that the group has.
    static __device__ __forceinline__ int tiles_of(int count) {
        constexpr int EACH = TOKENS < 256 ? TOKENS : 256;
        return count <= TOKENS ? count > 0 : (count + EACH - 1) / EACH;
    }

    __device__ __forceinline__ void look() {
        const int expert = first + int(threadIdx.x % 32);
        begin = count = 0;
        if (expert < p.experts) {
            const GroupRows group = rows_of(p, expert);
            begin = group.first, count = group.count;
        }
        tiles = tiles_of(count) * weight_tiles;
        through = before + lanes_inclusive_sum<32>(tiles);
    }

    // Tile `tile`, no earlier one than before; false if there are not so many.
    __device__ __forceinline__ bool find(int tile, int& expert, int& row, int& tokens, int& weight_tile) {
        int last;
        while (tile >= (last = __shfl_sync(FULL_WARP, through, 31))) {
            if (first + 32 >= p.experts) return false;
            first += 32, before = last;
            look();
        }
        const int who = __ffs(__ballot_sync(FULL_WARP, tile < through)) - 1;
        const int all = __shfl_sync(FULL_WARP, count, who);
        unsigned in = tile - __shfl_sync(FULL_WARP, through - tiles, who);
        const unsigned token_tiles = tiles_of(all), set = p.together * weight_tiles;
        const int tokens_each = (all + token_tiles * UNIT - 1) / (token_tiles * UNIT) * UNIT; // at most TOKENS
        const unsigned sets = in / set;
        in -= sets * set;
        const unsigned beside = min(token_tiles - sets * p.together, unsigned(p.together));
        const int token = (sets * p.together + in % beside) * tokens_each;
        expert = first + who;
        row = __shfl_sync(FULL_WARP, begin, who) + token;
        tokens = min(all - token, tokens_each);
        weight_tile = in / beside;
        return true;
    }
};

// The place in a ring, and how often its end was passed.
template <int STAGES> struct GemmPlace {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++phase;
    }
};

template <bool GATED, int TOKENS, int STAGES, int CLUSTER, bool STREAMED>
__device__ __forceinline__ void gemm_load(const MappedGemmParams& p, GemmShared<TOKENS, STAGES>& shared,
                                          unsigned stages) {
    using Shared = GemmShared<TOKENS, STAGES>;
    constexpr int WEIGHTS = WARPGROUPS * 64, BOX = box_of(TOKENS);
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    GemmTiles<TOKENS> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS));
    GemmPlace<STAGES> place;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        if (lane == 0) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            const int boxes = (tokens + BOX - 1) / BOX;
            for (int step = 0; step < steps; ++step, place.advance()) {
                const unsigned full = shared_address(&shared.full[place.stage]);
                const unsigned weights_to = stages + place.stage * Shared::STAGE;
                const unsigned tokens_to = weights_to + Shared::WEIGHT_TILE;
                const int x = step * DEPTH;
                mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
                if (step == 0) shared.visits[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight, 0};
                mbarrier_arrive_expect_tx(full, Shared::WEIGHT_TILE + boxes * BOX * ROW_BYTES);
                if constexpr (GATED)
                    tma_load<POLICY>(weights_to, p.b_map, x, 0, 0, first_weight / 16, expert, full);
                else
                    tma_load<POLICY>(weights_to, p.b_map, x, first_weight, expert, 0, full);
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const unsigned to = tokens_to + box * BOX * ROW_BYTES;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(to, p.a_map, x, row + box * BOX, 0, 0, full);
                    else
                        tma_load_multicast((1 << CLUSTER) - 1, to, p.a_map, x, row + box * BOX, 0, 0, full);
                }
            }
        }
        __syncwarp();
    }
    if (lane == 0) {
        mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
        shared.visits[place.stage].tokens = 0;
        mbarrier_arrive(shared_address(&shared.full[place.stage]));
    }
    __syncwarp();
}

template <int WIDTH> struct Width {
    static constexpr int value = WIDTH;
};

// wgmma_k_major of other widths.
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define PLACES_24 EIGHT(0), EIGHT(8), EIGHT(16)
#define PLACES_40 PLACES_24, EIGHT(24), EIGHT(32)
#define PLACES_48 PLACES_40, EIGHT(40)
#define PLACES_80 PLACES_48, EIGHT(48), EIGHT(56), EIGHT(64), EIGHT(72)
#define PLACES_96 PLACES_80, EIGHT(80), EIGHT(88)
#define PLACES_112 PLACES_96, EIGHT(96), EIGHT(104)
#define PLACES_120 PLACES_112, EIGHT(112)
#define NAMES_24 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_40 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_80 \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
             "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_112 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PRODUCT(columns, places, types, a_at, b_at, add_at) \
    asm volatile("{ .reg .pred add;\n" \
                 "  setp.ne.b32 add, " add_at ", 0;\n" \
                 "  wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" NAMES_##places \
                 "}, " a_at ", " b_at ", add, 1, 1, 0, 0; }" \
                 : PLACES_##places \
                 : "l"(a), "l"(b), "r"(int(add)))
#define PRODUCTS(types) \
    if constexpr (N == 24) \
        PRODUCT("48", 24, types, "%24", "%25", "%26"); \
    else if constexpr (N == 40) \
        PRODUCT("80", 40, types, "%40", "%41", "%42"); \
    else if constexpr (N == 48) \
        PRODUCT("96", 48, types, "%48", "%49", "%50"); \
    else if constexpr (N == 80) \
        PRODUCT("160", 80, types, "%80", "%81", "%82"); \
    else if constexpr (N == 96) \
        PRODUCT("192", 96, types, "%96", "%97", "%98"); \
    else if constexpr (N == 112) \
        PRODUCT("224", 112, types, "%112", "%113", "%114"); \
    else if constexpr (N == 120) \
        PRODUCT("240", 120, types, "%120", "%121", "%122"); \
    else \
        wgmma_k_major<T>(c, a, b, add)
template <typename T, int N>
__device__ __forceinline__ void multiply_width(float (&c)[N], unsigned long long a, unsigned long long b, bool add) {
    if constexpr (IS_BFLOAT16<T>) {
        PRODUCTS("bf16.bf16");
    } else {
        PRODUCTS("f16.f16");
    }
}
#undef FOUR
#undef EIGHT
#undef PLACES_24
#undef PLACES_40
#undef PLACES_48
#undef PLACES_80
#undef PLACES_96
#undef PLACES_112
#undef PLACES_120
#undef NAMES_24
#undef NAMES_40
#undef NAMES_48
#undef NAMES_80
#undef NAMES_96
#undef NAMES_112
#undef NAMES_120
#undef PRODUCT
#undef PRODUCTS

// The first WIDTH columns of c: += a b, 16 along the sum. One product has at most 256.
template <typename T, int WIDTH, int PLACES>
__device__ __forceinline__ void gemm_multiply(float (&c)[PLACES], unsigned long long a, unsigned long long b,
                                              bool add) {
    constexpr int FIRST = WIDTH < 256 ? WIDTH : 256;
    multiply_width<T>(reinterpret_cast<float (&)[FIRST / 2]>(c), a, b, add);
    if constexpr (FIRST < WIDTH)
        multiply_width<T>(reinterpret_cast<float (&)[(WIDTH - FIRST) / 2]>(c[FIRST / 2]), a,
                          b + (FIRST * ROW_BYTES >> 4), add);
}

// f(Width<w>()) with the smallest w of WIDTHS that this instance has and that holds `tokens`.
template <int TOKENS, int I = 0, typename F> __device__ __forceinline__ void with_width(int tokens, const F& f) {
    constexpr int WIDTH = WIDTHS[I];
    if constexpr (WIDTH == TOKENS)
        f(Width<WIDTH>());
    else if (WIDTH * 4 >= TOKENS && tokens <= WIDTH)
        f(Width<WIDTH * 4 >= TOKENS ? WIDTH : TOKENS>());
    else
        with_width<TOKENS, I + 1>(tokens, f);
}

// A warpgroup's part of a tile of at most WIDTH tokens, whose first stage is full. `a`, `b`: where it finds them in stage 0.
template <typename T, int WIDTH, int CLUSTER, bool STREAMED, int PLACES, typename Shared, int STAGES>
__device__ __forceinline__ void gemm_sum(float (&c)[PLACES], Shared& shared, GemmPlace<STAGES>& place, int steps,
                                         int skewed_after, unsigned long long a, unsigned long long b) {
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        const unsigned empty = shared_address(&shared.empty[stage]);
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < CLUSTER) mbarrier_arrive_cluster(map_shared_rank(empty, lane));
        }
    };
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const unsigned long long at = place.stage * (Shared::STAGE >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) // 16 numbers are 32 bytes
            gemm_multiply<T, WIDTH>(c, a + at + (i * 32 >> 4), b + at + (i * 32 >> 4), i > 0 || step > 0);
        wgmma_commit_group();
        if constexpr (STREAMED) { // the next stage is awaited from memory: meanwhile this one can be on its way again
            wgmma_wait_group<0>();
            release(place.stage);
        } else { // the tensor cores shall never wait
            wgmma_wait_group<1>();
            if (step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = place.stage;
        place.advance();
    }
    if constexpr (!STREAMED) {
        wgmma_wait_group<0>();
        release(previous);
    }
    wgmma_fence_operand(reinterpret_cast<float (&)[WIDTH / 2]>(c));
}

// Store 8 x 8 matrices of 16 bits, transposed: what lane l holds of the i-th goes to rows 2 (l % 4) and + 1, column l / 4.
// Lanes 8 i ... 8 i + 7 name its rows.
template <int MATRICES>
__device__ __forceinline__ void store_transposed(unsigned to, const unsigned (&from)[MATRICES]) {
    if constexpr (MATRICES == 4)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]),
                     "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    else if constexpr (MATRICES == 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(from[0]),
                     "r"(from[1])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(from[0]) : "memory");
}

// Wait for all threads of warpgroup `warpgroup`.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    if (warpgroup < 1) return named_barrier_sync<1, WARPGROUP>();
    named_barrier_sync<2, WARPGROUP>();
}

// Write what a warpgroup has of a tile. `round` counts how often it has used its two places in `staging`: a round's readers
// are done when all have come to the barrier of the next, so that the round after that may write to their place.
template <typename T, int ACTIVATION, int TOKENS>
__device__ __forceinline__ void gemm_store(const MappedGemmParams& p, const float (&c)[TOKENS / 2],
                                           const GemmVisit& visit, int warpgroup, unsigned staging, int& round) {
    constexpr bool GATED = ACTIVATION != NO_ACTIVATION;
    constexpr int ROUND = round_of(TOKENS);
    constexpr int CHUNKS = GATED ? 4 : 8; // of 16 bytes, that a token gets
    constexpr int EACH = CHUNKS / 4;      // of them by a warp
    constexpr int MATRICES = ROUND / 8 * EACH < 4 ? ROUND / 8 * EACH : 4;
    constexpr int GROUPS = MATRICES / EACH; // of 8 tokens, that are stored at once
    // The chunks of 8 neighbouring tokens are in different banks, if chunk i is where chunk i ^ swizzle(token) would be.
    auto swizzle = [](int token) { return GATED ? token / 2 % 4 : token % 8; };
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    const int columns = GATED ? p.n / 2 : p.n;
    const unsigned lane_to =
        (lane / 8 / EACH * 8 + lane % 8) * CHUNKS * 16 + ((warp * EACH + lane / 8 % EACH) ^ swizzle(lane % 8)) * 16;
    const int chunk = thread % CHUNKS, column = visit.column + warpgroup * CHUNKS * 8 + chunk * 8;
    T* const out = static_cast<T*>(p.out) + (long long)visit.row * columns + column;
#pragma unroll
    for (int first = 0; first < TOKENS; first += ROUND) {
        if (first >= visit.tokens) break;
        const unsigned place = staging + (round++ & 1) * ROUND * ROW_BYTES;
#pragma unroll
        for (int group = 0; group < ROUND / 8; group += GROUPS) {
            unsigned packed[MATRICES];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) {
                const float* const sums = c + (first / 8 + group + i / EACH) * 4;
                if constexpr (GATED)
                    packed[i] = pack<T>(activate<ACTIVATION>(sums[0], sums[2]), activate<ACTIVATION>(sums[1], sums[3]));
                else
                    packed[i] = pack<T>(sums[i % 2 * 2], sums[i % 2 * 2 + 1]);
            }
            store_transposed(place + lane_to + group * 8 * CHUNKS * 16, packed);
        }
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int i = 0; i < (ROUND * CHUNKS + WARPGROUP - 1) / WARPGROUP; ++i) {
            const int token = i * (WARPGROUP / CHUNKS) + thread / CHUNKS;
            if (token < ROUND && first + token < visit.tokens && column < columns)
                *reinterpret_cast<uint4*>(out + (long long)(first + token) * columns) =
                    load_shared(place + token * CHUNKS * 16 + (chunk ^ swizzle(token)) * 16);
        }
    }
}

template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED>
__device__ __forceinline__ void gemm_compute(const MappedGemmParams& p, GemmShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    using Shared = GemmShared<TOKENS, STAGES>;
    constexpr int SKEW = TOKENS > 128; // stages that the second warpgroup is behind the first
    // From one lane: so the compiler knows that it is the same in all, and keeps what follows from it in uniform registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const unsigned long long a = k_major_descriptor(stages + warpgroup * 64 * ROW_BYTES);
    const unsigned long long b = k_major_descriptor(stages + Shared::WEIGHT_TILE);
    const unsigned staging = stages + STAGES * Shared::STAGE + warpgroup * 2 * Shared::STAGING;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    GemmPlace<STAGES> place;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const GemmVisit visit = shared.visits[place.stage];
        if (visit.tokens == 0) break;
        if (SKEW && first && warpgroup > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        with_width<TOKENS>(visit.tokens, [&](auto width) {
            gemm_sum<T, decltype(width)::value, CLUSTER, STREAMED>(c, shared, place, steps, skewed_after, a, b);
        });
        skewed_after = -1;
        gemm_store<T, ACTIVATION, TOKENS>(p, c, visit, warpgroup, staging, round);
    }
}

// T: __nv_bfloat16 or __half. TOKENS: 8, 16, 32, 64, 128 or 288. BLOCKS run at once on a multiprocessor. STREAMED: few tokens;
// what counts is how many bytes are on their way, and nearly all weights are read once.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS, bool STREAMED>
__global__ __launch_bounds__(gemm_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    using Shared = GemmShared<TOKENS, STAGES>;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned stages = shared_address(memory) + misplaced;
    Shared& shared =
        *reinterpret_cast<Shared*>(memory + misplaced + STAGES * Shared::STAGE + WARPGROUPS * 2 * Shared::STAGING);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), 1);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * WARPGROUPS * (WARPGROUP / 32));
        }
        mbarrier_init(shared_address(&shared.skewed), WARPGROUP / 32);
        fence_mbarrier_init();
    }
    cluster_sync<CLUSTER>();
    constexpr bool DEAL = TOKENS > 128;
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (DEAL) setmaxnreg_inc<224>();
        gemm_compute<T, ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED>(p, shared, stages);
    } else {
        if constexpr (DEAL) setmaxnreg_dec<56>();
        if (threadIdx.x < WARPGROUPS * WARPGROUP + 32)
            gemm_load<ACTIVATION != NO_ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED>(p, shared, stages);
    }
    // Until here the other blocks may write here.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}

// ---- 8 bits, by warpgroups ----
//
// Groups of e4m3 rows times the e4m3 weights of their experts, on Hopper.
//
// BLOCK_SCALED: a_scale [rows, ceil(k / 128)], b_scale [experts, ceil(n / 128), ceil(k / 128)]. Else a_scale is one for each
// row or for all, b_scale one for each weight row or for each expert.
//
//   gemm_fp8_wgmma<...>     CLUSTER * (clusters that walk over the tiles) blocks of 384 threads, a multiprocessor each
//
// A tile is TOKENS rows of a group times 128 weight rows (64 gate and 64 up rows with ACTIVATION), and the blocks of a
// cluster have the same rows and neighbouring weights: each loads a part of the rows, for all. One warp finds tiles and
// loads 128 bytes along k at a time into a ring of STAGES, and with BLOCK_SCALED TOKENS / 128 more bring the products of the
// scales there, of 128 rows each; two warpgroups have every second 64 rows of the tile each. The tensor cores keep too few
// bits of a sum of 8-bit products, so theirs end every 128 bytes, and go on in float32. While a warpgroup adds, the products
// of the other run. 64 rows of which none is of the group are neither loaded nor multiplied.

constexpr int FP8_THREADS = 3 * WARPGROUP;
constexpr int FP8_BOX = 64;      // rows of a box, and of a product
constexpr int FP8_COLUMNS = 128; // weight rows of a tile
constexpr int FP8_K = 128;       // bytes along k of a stage, and numbers of a scale
constexpr int FP8_BOX_BYTES = FP8_BOX * FP8_K, FP8_WEIGHT_BYTES = FP8_COLUMNS * FP8_K;
constexpr int FP8_SCALES = 4;          // of a row, neighbours along k, that a lane reads at once
constexpr int FP8_SCALED_ROWS = 128;   // whose scales a warp brings: 4 to a lane
constexpr int FP8_ARRIVING = 32;       // of the lanes that brought scales: all, or 1 for all
constexpr int FP8_STAGED_COLUMNS = 64; // of the output, that a warp turns into whole pieces at once

// expert, first row, rows (0: no tile is left), first column of the output.
using Fp8Tile = int4;

template <int STAGES> struct Fp8GemmShared {
    unsigned long long full[STAGES], empty[STAGES];
    Fp8Tile tiles[STAGES]; // the one whose first bytes along k are in this stage
    int4 groups
        [3]
        [32]; // of neighbouring experts: first row, rows, tiles, tiles up to this one's last; of each warp that looks
};

// The shared memory, from a multiple of 1024 on.
template <int TOKENS, int STAGES, bool BLOCK_SCALED, int ACTIVATION> struct Fp8GemmLayout {
    static constexpr int STAGE_BYTES = TOKENS * FP8_K + FP8_WEIGHT_BYTES;
    static constexpr int STAGED_BYTES = 16 * FP8_STAGED_COLUMNS * 2; // of a warp
    static constexpr int SETS = ACTIVATION ? 2 : 1;                  // of scales: those of up weights may differ
    static constexpr int SCALE_BYTES = BLOCK_SCALED ? SETS * TOKENS * 4 : 0;
    static constexpr int SCALE_WARPS = BLOCK_SCALED ? TOKENS / FP8_SCALED_ROWS : 0;
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int REST = SCALES + STAGES * SCALE_BYTES;
    static_assert(1024 - 16 + REST + sizeof(Fp8GemmShared<STAGES>) <= 227 << 10, "more than a block can have");
};

// The tiles of a cluster, for a warp.
template <int TOKENS, int CLUSTER, int OUT_COLUMNS> struct Fp8Tiles {
    // So many tiles of rows go with the same weights before the next weights: about a square of tiles is under way at once,
    // whose operands fit in the L2 cache.
    static constexpr int BAND = 2048 / TOKENS;
    static constexpr int MOST = (1 << 26) - 1; // tiles of an expert, so that 32 can be added

    const MappedGemmParams& p;
    int4 (&groups)[32]; // from expert `window` on
    const int strips;   // pieces of the columns, of a cluster's width
    int window, ahead;  // the next tile, counted from the window's first

    __device__ __forceinline__ Fp8Tiles(const MappedGemmParams& p, int4 (&groups)[32])
        : p(p), groups(groups),
          strips(((OUT_COLUMNS < FP8_COLUMNS ? p.n / 2 : p.n) + OUT_COLUMNS * CLUSTER - 1) / (OUT_COLUMNS * CLUSTER)),
          window(0), ahead(blockIdx.x / CLUSTER) {
        look();
    }

    __device__ __forceinline__ void look() {
        const int lane = threadIdx.x % 32, expert = window + lane;
        int4 group = make_int4(0, 0, 0, 0);
        if (expert < p.experts) {
            const GroupRows rows = rows_of(p, expert);
            group.x = rows.first, group.y = rows.count;
        }
        group.z = int(min((group.y + TOKENS - 1ll) / TOKENS * strips, (long long)MOST));
        group.w = lanes_inclusive_sum<32>(group.z);
        __syncwarp();
        groups[lane] = group;
        __syncwarp();
    }

    // False if none is left.
    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        unsigned beyond;
        while (!(beyond = __ballot_sync(FULL_WARP, groups[threadIdx.x % 32].w > ahead))) {
            ahead -= groups[31].w;
            window += 32;
            if (window >= p.experts) return false;
            look();
        }
        const int at = __ffs(beyond) - 1;
        const int4 group = groups[at];
        const unsigned i = ahead - (group.w - group.z);
        const unsigned of_band = BAND * strips, band = i / of_band, in_band = i - band * of_band;
        const unsigned height = min((group.y + TOKENS - 1u) / TOKENS - band * BAND, unsigned(BAND));
        const unsigned strip = in_band / height, start = (band * BAND + in_band - strip * height) * TOKENS;
        tile.x = window + at;
        tile.y = group.x + start;
        tile.z = min(group.y - int(start), TOKENS);
        tile.w = (strip * CLUSTER + cluster_rank<CLUSTER>()) * OUT_COLUMNS;
        ahead += gridDim.x / CLUSTER;
        return true;
    }
};

// The warp that loads. The first stage of a tile brings which one it is.
template <int TOKENS, int CLUSTER, int STAGES, int ACTIVATION>
__device__ __forceinline__ void load_fp8_tiles(const MappedGemmParams& p, Fp8GemmShared<STAGES>& shared,
                                               unsigned ring) {
    constexpr int OUT_COLUMNS = ACTIVATION ? FP8_COLUMNS / 2 : FP8_COLUMNS;
    constexpr int STAGE_BYTES = TOKENS * FP8_K + FP8_WEIGHT_BYTES;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, half = p.n / 2;
    Fp8Tiles<TOKENS, CLUSTER, OUT_COLUMNS> tiles(p, shared.groups[0]);
    unsigned used = 0;
    // A stage is empty when no block of the cluster needs what it has: their copies come from here, too.
    auto wait_empty = [&](int stage) { mbarrier_wait(shared_address(&shared.empty[stage]), used / STAGES + 1); };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const unsigned before = used;
        if (lane == 0) {
            const int boxes = (tile.z + FP8_BOX - 1) / FP8_BOX, bytes = boxes * FP8_BOX_BYTES + FP8_WEIGHT_BYTES;
#pragma unroll 1
            for (int i = 0; i < k_blocks; ++i, ++used) {
                const int stage = used % STAGES, k = i * FP8_K;
                const unsigned to = ring + stage * STAGE_BYTES, weights = to + TOKENS * FP8_K;
                const unsigned full = shared_address(&shared.full[stage]);
                wait_empty(stage);
                if (i == 0) shared.tiles[stage] = tile;
                mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll 1
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const int row = tile.y + box * FP8_BOX;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(to + box * FP8_BOX_BYTES, p.a_map, k, row, 0, 0, full);
                    else
                        tma_load_multicast((1 << CLUSTER) - 1, to + box * FP8_BOX_BYTES, p.a_map, k, row, 0, 0, full);
                }
                tma_load<EVICT_NORMAL>(weights, p.b_map, k, tile.w, tile.x, 0, full);
                if constexpr (ACTIVATION != 0)
                    tma_load<EVICT_NORMAL>(weights + FP8_WEIGHT_BYTES / 2, p.b_map, k, half + tile.w, tile.x, 0, full);
            }
        }
        __syncwarp();
        used = before + k_blocks;
    }
    if (lane == 0) {
        const int stage = used % STAGES;
        wait_empty(stage);
        shared.tiles[stage].z = 0;
        mbarrier_arrive(shared_address(&shared.full[stage]));
    }
    __syncwarp();
}

// Four numbers of a row from `k` on. Those from `numbers` on are not read.
__device__ __forceinline__ void load_fp8_scales(float (&to)[FP8_SCALES], const float* row, int k, int numbers,
                                                bool aligned) {
    if (aligned) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(row + k));
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
#pragma unroll
        for (int j = 0; j < FP8_SCALES; ++j) to[j] = __ldg(row + min(k + j, numbers - 1));
    }
}

// A warp that brings the scales of 128 rows of each tile, times those of the weights, from row 128 * part on. It goes from
// stage to stage as the one that loads does. It reads those for four stages before it waits for the first of them to be
// empty, and so never later than the copies into that are started.
template <int TOKENS, int CLUSTER, int STAGES, int ACTIVATION>
__device__ __forceinline__ void bring_fp8_scales(const MappedGemmParams& p, Fp8GemmShared<STAGES>& shared,
                                                 unsigned scales, int part) {
    using Layout = Fp8GemmLayout<TOKENS, STAGES, true, ACTIVATION>;
    constexpr int SETS = Layout::SETS, ROWS = 4;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K, strips = (p.n + FP8_COLUMNS - 1) / FP8_COLUMNS;
    const int lane = threadIdx.x % 32, first_row = part * FP8_SCALED_ROWS + lane * ROWS;
    const bool aligned = k_blocks % FP8_SCALES == 0 && reinterpret_cast<size_t>(p.a_scale) % 16 == 0;
    Fp8Tiles<TOKENS, CLUSTER, ACTIVATION ? FP8_COLUMNS / 2 : FP8_COLUMNS> tiles(p, shared.groups[1 + part]);
    int stage = 0, phase = 1;
    auto fill = [&](auto&& write) {
        mbarrier_wait(shared_address(&shared.empty[stage]), phase);
        write();
        if constexpr (FP8_ARRIVING == 1) __syncwarp();
        if (lane < FP8_ARRIVING) mbarrier_arrive(shared_address(&shared.full[stage]));
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    Fp8Tile tile;
    while (tiles.next(tile)) {
        const float* const a = p.a_scale + (long long)tile.y * k_blocks;
        const float* const b = static_cast<const float*>(p.b_scale) + (long long)tile.x * strips * k_blocks;
#pragma unroll 1
        for (int k = 0; k < k_blocks; k += FP8_SCALES) {
            float of_rows[ROWS][FP8_SCALES], of_weights[SETS]; // each lane has one of the weights'
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                load_fp8_scales(of_rows[i], a + min(first_row + i, tile.z - 1) * k_blocks, k, k_blocks, aligned);
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const int strip = min((tile.w + set * (p.n / 2)) / FP8_COLUMNS, strips - 1);
                of_weights[set] = __ldg(b + (long long)strip * k_blocks + min(k + lane % FP8_SCALES, k_blocks - 1));
            }
#pragma unroll
            for (int j = 0; j < FP8_SCALES; ++j)
                if (k + j < k_blocks)
                    fill([&] {
#pragma unroll
                        for (int set = 0; set < SETS; ++set) {
                            const float by = __shfl_sync(FULL_WARP, of_weights[set], j);
                            store_shared(
                                scales + stage * Layout::SCALE_BYTES + (set * TOKENS + first_row) * 4,
                                make_uint4(__float_as_uint(of_rows[0][j] * by), __float_as_uint(of_rows[1][j] * by),
                                           __float_as_uint(of_rows[2][j] * by), __float_as_uint(of_rows[3][j] * by)));
                        }
                    });
        }
        __syncwarp();
    }
    fill([] {}); // which says that no tile is left
    __syncwarp();
}

// An operand along the sum, as k_major_descriptor describes it, from the lower half of that. Only this half has to be computed.
__device__ __forceinline__ unsigned long long fp8_operand(unsigned lower) {
    unsigned long long operand;
    asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(lower), "r"(1u << 30 | 64u));
    return operand;
}

__device__ __forceinline__ float fp8_load_scale(unsigned from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

// The rows of a warp's product, to the output by way of shared memory, for whole 16-byte pieces.
template <typename T, bool BLOCK_SCALED, int ACTIVATION>
__device__ __forceinline__ void store_fp8_rows(const MappedGemmParams& p, const Fp8Tile& tile, int first_row,
                                               const float (&sums)[64], unsigned staged) {
    constexpr int OUT_COLUMNS = ACTIVATION ? FP8_COLUMNS / 2 : FP8_COLUMNS;
    constexpr int CHUNKS = FP8_STAGED_COLUMNS / 8, PITCH = FP8_STAGED_COLUMNS * 2; // of 16 bytes
    const int lane = threadIdx.x % 32, left = tile.z - first_row;
    if (left <= 0) return;
    const int out_columns = ACTIVATION ? p.n / 2 : p.n;
    const long long first = (long long)tile.y + first_row;

    // What a sum is multiplied with, where that is not done yet.
    float row_scales[2] = {1.f, 1.f};
    const float* column_scales = static_cast<const float*>(p.b_scale);
    if constexpr (!BLOCK_SCALED) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row_scales[i] = p.a_scale[(first + min(lane / 4 + i * 8, left - 1)) * p.a_scale_step];
        column_scales += p.b_scale_step ? (long long)tile.x * p.n + tile.w : tile.x;
    }
    // Without branches, or the loop below would be split in two and unrolled no more.
    const int last_column = out_columns - 1 - tile.w;
    auto scale_of = [&](int j, int i, int side) {
        if constexpr (BLOCK_SCALED) return 1.f;
        const int column = min(j * 8 + lane % 4 * 2 + i, last_column) + side * (p.n / 2);
        return column_scales[column * p.b_scale_step];
    };
    auto scaled = [&](float sum, int i, float scale) { return BLOCK_SCALED ? sum : sum * row_scales[i] * scale; };

    T* const out = static_cast<T*>(p.out) + first * out_columns + tile.w;
#pragma unroll
    for (int from = 0; from < OUT_COLUMNS / 8; from += CHUNKS) {
#pragma unroll
        for (int j = 0; j < CHUNKS; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                const int place = from + j + chunk;
                float results[2][2]; // [row][column]
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float scale = scale_of(place, c, 0), up_scale = ACTIVATION ? scale_of(place, c, 1) : scale;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int at = place * 4 + i * 2 + c;
                        results[i][c] = scaled(sums[at], i, scale);
                        if constexpr (ACTIVATION != 0)
                            results[i][c] = activate<ACTIVATION>(results[i][c], scaled(sums[at + 32], i, up_scale));
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) pairs[chunk * 2 + i] = pack<T>(results[i][0], results[i][1]);
            }
            stmatrix(staged + lane % 16 * PITCH + ((j + lane / 16) ^ lane % 8) * 16, pairs);
        }
        __syncwarp();
#pragma unroll
        for (int start = 0; start < 16; start += 32 / CHUNKS) {
            const int row = start + lane / CHUNKS, chunk = lane % CHUNKS;
            const uint4 eight = load_shared(staged + row * PITCH + (chunk ^ row % 8) * 16);
            const int column = (from + chunk) * 8;
            if (row < left && tile.w + column < out_columns)
                *reinterpret_cast<uint4*>(out + (long long)row * out_columns + column) = eight;
        }
        __syncwarp();
    }
}

// A warpgroup that computes.
template <typename T, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
__device__ __forceinline__ void multiply_fp8_tiles(const MappedGemmParams& p, Fp8GemmShared<STAGES>& shared,
                                                   unsigned ring, int side) {
    using Layout = Fp8GemmLayout<TOKENS, STAGES, BLOCK_SCALED, ACTIVATION>;
    constexpr int BLOCKS = TOKENS / (2 * FP8_BOX); // of 64 rows, of a warpgroup
    constexpr int SETS = Layout::SETS, PIECES = FP8_K / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k_blocks = (p.k + FP8_K - 1) / FP8_K;
    const int first_row = side * FP8_BOX + warp % 4 * 16; // of this warp, in the first block
    const unsigned staged = ring + Layout::STAGED + warp * Layout::STAGED_BYTES;
    // In the first stage: the operands, the scales of this lane's rows, the barrier to free it (of every block of the cluster).
    const unsigned tokens = unsigned(k_major_descriptor(ring + side * FP8_BOX_BYTES));
    const unsigned further_weights = (TOKENS * FP8_K - side * FP8_BOX_BYTES) / 16;
    const unsigned scales = ring + Layout::SCALES + (first_row + lane / 4) * 4;
    const unsigned empty =
        CLUSTER == 1 ? shared_address(&shared.empty[0]) : map_shared_rank(&shared.empty[0], lane % CLUSTER);
    int stage = 0, phase = 0;
    unsigned tokens_here = tokens, scales_here = scales; // in this stage
    auto advance = [&] {
        const bool wraps = stage == STAGES - 1;
        stage = wraps ? 0 : stage + 1, phase ^= wraps;
        tokens_here = tokens + stage * (Layout::STAGE_BYTES / 16);
        scales_here = scales + stage * Layout::SCALE_BYTES;
    };
    auto wait_full = [&] { mbarrier_wait(shared_address(&shared.full[stage]), phase); };
    // When the products have been waited for, and after a __syncwarp behind the last read of a scale.
    auto release = [&](unsigned used) {
        if (lane < CLUSTER) {
            if constexpr (CLUSTER == 1)
                mbarrier_arrive(used);
            else
                mbarrier_arrive_cluster(used);
        }
    };
    // From one lane, so that the compiler knows that it is the same in all.
    auto tile_of = [&](int part) {
        return make_int4(__shfl_sync(FULL_WARP, part, 0), __shfl_sync(FULL_WARP, part, 1),
                         __shfl_sync(FULL_WARP, part, 2), __shfl_sync(FULL_WARP, part, 3));
    };
    for (;;) {
        wait_full();
        // Held by four neighbouring lanes each, as registers are scarce.
        const int part = reinterpret_cast<const int*>(&shared.tiles[stage])[lane % 4];
        // By a reduction, so that the compiler knows that it is the same in all lanes, and with it the stage.
        const int rows = __reduce_max_sync(FULL_WARP, lane % 4 == 2 ? part : 0);
        if (rows == 0) break;
        float total[BLOCKS][64], sums[64];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < 64; ++i) total[block][i] = 0.f;
        // Of 64 rows. The last of a stage frees it and goes on to the next.
        auto multiply = [&](int block, bool last) {
            float factors[SETS][2];
            if constexpr (BLOCK_SCALED) {
#pragma unroll
                for (int set = 0; set < SETS; ++set)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        factors[set][i] =
                            fp8_load_scale(scales_here + (set * TOKENS + block * 2 * FP8_BOX + i * 8) * 4);
            }
            if (last) __syncwarp();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                wgmma_k_major<__nv_fp8_e4m3>(sums, fp8_operand(tokens_here + block * (2 * FP8_BOX_BYTES / 16) + i * 2),
                                             fp8_operand(tokens_here + further_weights + i * 2), i > 0);
            wgmma_commit_group();
            const unsigned used = empty + stage * 8;
            if (last) advance();
            wgmma_wait_group<0>();
            wgmma_fence_operand(sums);
            if (last) release(used);
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if constexpr (BLOCK_SCALED)
                    total[block][i] = fmaf(sums[i], factors[SETS > 1 ? i / 32 : 0][i / 2 % 2], total[block][i]);
                else
                    total[block][i] += sums[i];
        };
        const int boxes = (rows + FP8_BOX - 1) / FP8_BOX, mine = (boxes + 1 - side) / 2;
        if (mine == BLOCKS) { // most tiles, without conditions
#pragma unroll 1
            for (int k = 0; k < k_blocks; ++k) {
                wait_full();
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) multiply(block, block == BLOCKS - 1);
            }
        } else {
            // No more than one block.
#pragma unroll 1
            for (int k = 0; k < k_blocks; ++k) {
                wait_full();
                if (BLOCKS > 1 && mine > 0) {
                    multiply(0, true);
                } else {
                    __syncwarp();
                    release(empty + stage * 8);
                    advance();
                }
            }
        }
        store_fp8_rows<T, BLOCK_SCALED, ACTIVATION>(p, tile_of(part), first_row, total[0], staged);
        if constexpr (BLOCKS > 1)
            store_fp8_rows<T, BLOCK_SCALED, ACTIVATION>(p, tile_of(part), first_row + 2 * FP8_BOX, total[1], staged);
    }
}

// T: of the output. TOKENS: 256 or 128. CLUSTER: 1 or 2.
template <typename T, int TOKENS, int CLUSTER, int STAGES, bool BLOCK_SCALED, int ACTIVATION>
__global__ CLUSTER_OF(CLUSTER)
    __launch_bounds__(FP8_THREADS, 1) void gemm_fp8_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    using Layout = Fp8GemmLayout<TOKENS, STAGES, BLOCK_SCALED, ACTIVATION>;
    // 168 for each of 384 threads, dealt out anew.
    constexpr int LOADING = BLOCK_SCALED ? 56 : 40, COMPUTING = (3 * 168 - LOADING) / 2;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned ring = shared_address(memory) + misplaced;
    auto& shared = *reinterpret_cast<Fp8GemmShared<STAGES>*>(memory + misplaced + Layout::REST);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), 1 + Layout::SCALE_WARPS * FP8_ARRIVING);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * 2 * WARPGROUP / 32);
        }
        fence_mbarrier_init();
    } else if (threadIdx.x == 2 * WARPGROUP) {
        prefetch_tensormap(p.a_map), prefetch_tensormap(p.b_map);
    }
    __syncthreads();
    // No block may copy to, or arrive at, one that has not begun or has ended.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
    // From one lane: so the compiler knows that it is the same in all.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    if (warpgroup < 2) {
        setmaxnreg_inc<COMPUTING>();
        multiply_fp8_tiles<T, TOKENS, CLUSTER, STAGES, BLOCK_SCALED, ACTIVATION>(p, shared, ring, warpgroup);
    } else {
        setmaxnreg_dec<LOADING>();
        const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x % WARPGROUP / 32), 0);
        if (warp == 0)
            load_fp8_tiles<TOKENS, CLUSTER, STAGES, ACTIVATION>(p, shared, ring);
        else if constexpr (BLOCK_SCALED)
            if (warp <= Layout::SCALE_WARPS)
                bring_fp8_scales<TOKENS, CLUSTER, STAGES, ACTIVATION>(p, shared, ring + Layout::SCALES, warp - 1);
    }
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}

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

// The shared memory of one step along k: tokens, weights, and scales.
//
// 16-byte chunks are permuted within rows so that what eight lanes read at once, or write, is in different banks.
template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int STEP, bool BLOCK_SCALES> struct MmaTile {
    static constexpr bool FP4 = FORMAT == MXFP4 || FORMAT == NVFP4;
    // Scales are multiplied into the weights; else (4-bit) into sums over 32.
    static constexpr bool FOLDED = FP4 && !(FORMAT == MXFP4 && !IS_BFLOAT16<T>);
    static constexpr int A_LINE = FORMAT == FP8 ? STEP : STEP * 2; // bytes of a row
    static constexpr int B_LINE = FP4 ? STEP / 2 : A_LINE;
    static constexpr int GROUPS = FORMAT == MXFP4 ? STEP / 32 : STEP / 16; // 4-bit: of one scale
    // 4-bit: a row's scales, copied in words from the multiple of 4 before them.
    static constexpr int SLOT_WORDS = GROUPS / 4 + 1, SLOT = SLOT_WORDS * 4;

    static constexpr int B = TOKENS * A_LINE, SCALES = B + WEIGHTS * B_LINE;
    // FP8: of the tokens, then of each 8 weights.
    static constexpr int SCALE_BYTES = FP4 ? WEIGHTS * SLOT : BLOCK_SCALES ? (TOKENS + WEIGHTS / 8) * 4 : 0;
    static constexpr int BYTES = (SCALES + SCALE_BYTES + 127) / 128 * 128;

    static_assert(FP4 || FORMAT == FP8 ? STEP == 128 : STEP == 32 || STEP == 64, "");
    static_assert(!BLOCK_SCALES || FORMAT == FP8, "");

    // Where a chunk lies. With 4 bits a lane has 16 neighbours of 64 if FOLDED, for they have one scale: 2 chunks of a
    // and 8 bytes of b. Else it has 8 neighbours of either 32.
    static __device__ __forceinline__ int a_at(int row, int chunk) {
        if constexpr (FP4)
            chunk ^= (row & 1) * (FOLDED ? 1 : 4);
        else
            chunk ^= A_LINE == 128 ? row & 7 : row >> 1 & 3;
        return row * A_LINE + chunk * 16;
    }

    static __device__ __forceinline__ int b_at(int row, int chunk) {
        if constexpr (FP4)
            chunk ^= FOLDED ? row & 2 : row >> 1 & 3;
        else
            chunk ^= B_LINE == 128 ? row & 7 : row >> 1 & 3;
        return row * B_LINE + chunk * 16;
    }
};

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
        cp_async_commit_group();
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
            for (int m = 0; m < M; ++m) ldmatrix(to.a[m], a + m * 16 * F::A_LINE);
#pragma unroll
            for (int n = 0; n < N / 2; ++n) ldmatrix(to.b[n], b + n * 16 * F::B_LINE);
        };
        auto multiply = [&](float (&to)[M][N][4], const MmaLoaded<M, N>& from) {
            if constexpr (FORMAT == PLAIN) {
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int m = 0; m < M; ++m)
                        mma_m16n8k16<T>(to[m][n], from.a[m], from.b[n / 2][n % 2 * 2], from.b[n / 2][n % 2 * 2 + 1]);
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
                        for (int m = 0; m < M; ++m) mma_m16n8k16<__half>(to[m][n], a[m], b[0], b[1]);
                    }
                }
            }
        };

        cp_async_wait_group<STAGES - 2>();
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
                    cp_async_wait_group<STAGES - 2>();
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
            cp_async_wait_group<STAGES - 2>();
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
                                mma_m16n8k16<T>(sums[m][n], a[m][0], b[0], b[1]);
                                mma_m16n8k16<T>(sums[m][n], a[m][1], b[2], b[3]);
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
                                mma_m16n8k16<T>(of_group, a[m][0], b[0], b[1]);
                                mma_m16n8k16<T>(of_group, a[m][1], b[2], b[3]);
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

// ---- few rows of each expert ----
//
// All that counts is the speed at which weights arrive. DRAM gives its full speed only to long stretches, so a warp reads
// 512 bytes of one row of weights at a time, and not the fragments of 8 rows that a product of tensor cores wants. It
// multiplies on tensor cores all the same: the 8 rows of a fragment are then 8 stretches along k of one row of weights (4
// lanes x 16 bytes each), the 8 columns the same stretches of one token, and of the 8 x 8 sums of products the diagonal is
// wanted: its sum is one output. The other 56 are for nothing, and cost nothing, as tensor cores would be idle. Rows 8 ... 15
// of the fragment are another row of weights: with an activation gate and up of one output, else its neighbour.
//
//   lane (g, q) = (lane / 4, lane % 4) holds 16 neighbours (of 8 bits; of 16 bits, 8) of each 512 bytes, of weights and of
//   tokens alike: a product's (2 q, 2 q + 1, 2 q + 8, 2 q + 9) along k in row g of one and in column g of the other.
//
//   gemm_stream<...>   grid: x over the pairs of rows of weights, y at least over the tiles of TOKENS rows that the groups
//                      have; blocks of WARPS warps of PAIRS pairs each
//
// A tile reads the weights anew, so TOKENS is the most that a group is expected to have.

// T: of the output, and of operands of 16 bits. FORMAT: PLAIN or FP8. BLOCK_SCALES: of FP8, a scale for every 1 x 128 numbers
// of a and 128 x 128 of b. LOADS: of 16 bytes of each row of weights, under way at once. BLOCKS: to fit a multiprocessor.
template <typename T, int FORMAT, bool BLOCK_SCALES, int TOKENS, int ACTIVATION, int PAIRS, int WARPS, int LOADS,
          int BLOCKS>
__global__ __launch_bounds__(WARPS * 32, BLOCKS) void gemm_stream(const __grid_constant__ GemmParams p) {
    constexpr int PER_LOAD = FORMAT == FP8 ? 16 : 8; // numbers
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __shared__ GroupTile tile;
    if (!find_tile<TOKENS, WARPS * 32>(p, blockIdx.y, tile)) return;
    const int first = tile.begin + (int(blockIdx.y) - tile.before) * TOKENS, count = min(tile.end - first, TOKENS);
    const int pairs = p.n / 2, pair = (blockIdx.x * WARPS + warp) * PAIRS;
    if (pair >= pairs) return;
    auto weight_of = [&](int i) {
        const int mine = min(pair + i / 2, pairs - 1);
        return ACTIVATION ? mine + i % 2 * pairs : 2 * mine + i % 2;
    };
    auto token_of = [&](int t) { return source_of(p, first + min(t, count - 1)); };
    // Of a row. In 32 bits, as what lies before a row of `a` or, of an expert, of b: the host refuses 64 GiB of them.
    const int loads = p.k / PER_LOAD;
    const uint4* const weights = static_cast<const uint4*>(p.b) + (long long)tile.expert * p.n * loads + lane;
    const uint4* const tokens = static_cast<const uint4*>(p.a) + lane;
    unsigned token_at[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) token_at[t] = unsigned(token_of(t)) * loads;

    // By blocks: where the expert's scales are. Else what a row's are multiplied with.
    const int blocks = (p.k + 127) / 128;
    const float* const b_scale =
        static_cast<const float*>(p.b_scale) + (long long)tile.expert * (BLOCK_SCALES     ? (p.n + 127) / 128 * blocks
                                                                         : p.b_scale_step ? p.n
                                                                                          : 1);

    float sums[TOKENS][PAIRS][4] = {};
    for (int at = 0; at < loads; at += 32 * LOADS) {
        uint4 w[2 * PAIRS][LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j)
                w[j][i] =
                    load_or_zero(weights + (unsigned(weight_of(j)) * loads + at + 32 * i), at + 32 * i + lane < loads);
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
                    const uint4 w0 = w[2 * j][i], w1 = w[2 * j + 1][i];
                    if constexpr (FORMAT != FP8) {
                        const unsigned low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
                        mma_m16n8k16<T>(sums[t][j], low, x[i].x, x[i].y);
                        mma_m16n8k16<T>(sums[t][j], high, x[i].z, x[i].w);
                    } else {
                        float part[4] = {};
                        float (&into)[4] = BLOCK_SCALES ? part : sums[t][j];
                        const unsigned words[3][4] = {
                            {w0.x, w0.y, w0.z, w0.w}, {w1.x, w1.y, w1.z, w1.w}, {x[i].x, x[i].y, x[i].z, x[i].w}};
#pragma unroll
                        for (int word = 0; word < 4; ++word) {
                            unsigned halves[3][2];
#pragma unroll
                            for (int row = 0; row < 3; ++row) to_halves<__nv_fp8_e4m3>(halves[row], words[row][word]);
                            const unsigned both[4] = {halves[0][0], halves[1][0], halves[0][1], halves[1][1]};
                            mma_m16n8k16<__half>(into, both, halves[2][0], halves[2][1]);
                        }
                        if constexpr (BLOCK_SCALES) {
                            // The four lanes of a stretch are within one block of 128.
                            const int block = min((at + 32 * i + lane) / 8, blocks - 1);
                            const float by_token = p.a_scale[(long long)token_of(t) * blocks + block];
#pragma unroll
                            for (int row = 0; row < 2; ++row) {
                                const float scale = by_token * b_scale[weight_of(2 * j + row) / 128 * blocks + block];
                                sums[t][j][2 * row] += part[2 * row] * scale;
                                sums[t][j][2 * row + 1] += part[2 * row + 1] * scale;
                            }
                        }
                    }
                }
        }
    }

    // Has (g, g), in the even place or the odd one.
    const bool diagonal = lane % 4 == lane / 8, odd = lane / 4 % 2;
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
                const float mine = odd ? sums[t][j][2 * i + 1] : sums[t][j][2 * i];
                both[i] = lanes_sum<32>(diagonal ? mine : 0.f);
                if constexpr (FORMAT == FP8 && !BLOCK_SCALES)
                    both[i] *= p.a_scale[(long long)token_of(t) * p.a_scale_step] *
                               b_scale[(long long)weight_of(2 * j + i) * p.b_scale_step];
            }
            if (lane != 0 || pair + j >= pairs) continue;
            if constexpr (ACTIVATION != NO_ACTIVATION)
                out[row * pairs + pair + j] = from_float<T>(activate<ACTIVATION>(both[0], both[1]));
            else
                *reinterpret_cast<unsigned*>(out + row * p.n + 2 * (pair + j)) = pack<T>(both[0], both[1]);
        }
    }
}
