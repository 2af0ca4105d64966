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
#include "mla_decode/wgmma_convert.cuh"
#include "mla_decode/wgmma_gather.cuh"
#include "mla_decode/wgmma_tma.cuh"

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
        products_begin();
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int tile = i == ROTARY ? ROTARY : (i + SIDE * 4) % VALUE_TILES; // as they are loaded
            if constexpr (BY_TILE)
                barrier_wait(shared_address(&shared.full[SIDE][tile]), phase);
            else if (i == 0 || i == 4)
                barrier_wait(shared_address(&shared.full[SIDE][i == 0 ? SIDE : 1 - SIDE]), phase);
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; ++k)
                multiply_tiles<T>(scores, along_the_sum(queries + tile * TILE_BYTES + k * 32),
                                  along_the_sum(key_tile(queries, SIDE, tile) + k * 32), i + k > 0);
        }
        products_commit();
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
        publish_shared();
    }

    __device__ __forceinline__ void share(const unsigned (&weights)[4][4]) {
        const unsigned to = key_tile(queries, SIDE, ROTARY) + (warp * 16 + lane % 16) * COLUMNS * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k) store_matrices(to + ((2 * k + lane / 16) ^ lane % 8) * 16, weights[k]);
        publish_shared();
    }

    __device__ __forceinline__ void add_own(const unsigned (&weights)[4][4]) {
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply_across<T>(output, weights[k],
                               across_the_sum<TILE_BYTES>(key_tile(queries, SIDE, SIDE * 4) + k * 16 * COLUMNS * 2),
                               true);
        products_commit();
    }

    // Of the tile in the other buffer, when its weights are there; not waited for.
    __device__ __forceinline__ void add_other() {
        named_sync<SIDE == 0 ? SHARED_1 : SHARED_0, 2 * WARPGROUP>();
        const float higher[2] = {shared.base[1 - SIDE][row(0)], shared.base[1 - SIDE][row(1)]};
        follow(higher);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            multiply_across<T>(output, along_the_sum(key_tile(queries, 1 - SIDE, ROTARY) + k * 32),
                               across_the_sum<TILE_BYTES>(key_tile(queries, 1 - SIDE, SIDE * 4) + k * 16 * COLUMNS * 2),
                               true);
        products_commit();
    }

    // This warpgroup's half of a buffer is free.
    __device__ __forceinline__ void release(int buffer) {
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[buffer][SIDE]));
    }

    __device__ __forceinline__ void release_queries() {
        if (lane == 0) barrier_arrive(shared_address(&shared.queries_empty));
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
        if (tiles) barrier_wait(shared_address(&shared.queries_full), visited++);
        for (int tile = (used ^ SIDE) & 1; tile < tiles; tile += 2) {
            float scores[32];
            w.score(scores, (used + tile) / 2);
            if (tile > 0) {
                w.add_other();
                products_wait<1>();
            } else {
                products_wait<0>();
            }
            pin(scores);
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
            products_wait<0>();
            pin(w.output);
            if (tile > 0) w.release(1 - SIDE);
            if (BY_TILE && present < BLOCK_TOKENS) w.clear_from(present);
            // No warp is at the rotary part of the keys any more, and all see what was cleared.
            named_sync<SIDE == 0 ? WARPGROUP_0 : WARPGROUP_1, WARPGROUP>();
            w.share(weights);
            named_arrive<SIDE == 0 ? SHARED_0 : SHARED_1, 2 * WARPGROUP>();
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
            products_wait<0>();
            pin(w.output);
            w.release(SIDE);
        }
        if (tiles && ((used + tiles - 1) & 1) != SIDE) { // the last tile was the other's
            if (tiles == 1) w.release_queries();
            w.add_other();
            products_wait<0>();
            pin(w.output);
            w.release(1 - SIDE);
        }
        used += tiles;

        float (&sums)[2][WGMMA_ROWS] = shared.sums[(sequence - part.first) & 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            w.sum[i] = lanes_sum<4>(w.sum[i]);
            if (lane % 4 == 0) sums[SIDE][w.row(i)] = w.sum[i];
        }
        barrier_arrive(shared_address(&shared.summed));
        barrier_wait(shared_address(&shared.summed), sequence - part.first);
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
    if (TMA && threadIdx.x == WARPGROUP) prefetch_map(params.map);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            for (int tile = 0; tile < TILES; ++tile)
                barrier_init(shared_address(&shared.full[i][tile]), FP8 ? WARPGROUP / 32 : 1);
            for (int half = 0; half < 2; ++half) barrier_init(shared_address(&shared.empty[i][half]), WARPGROUP / 32);
        }
        barrier_init(shared_address(&shared.queries_full), TMA ? WARPGROUP - 32 : WARPGROUP);
        barrier_init(shared_address(&shared.queries_empty), 2 * WARPGROUP / 32);
        barrier_init(shared_address(&shared.summed), 2 * WARPGROUP);
        for (int i = 0; i < VISITS; ++i) shared.bad[i] = 0;
        barriers_ready();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        take_registers<COMPUTING>();
        compute<T, FP8, GATHER, 0>(params.p, shared, queries);
    } else if (warpgroup == 1) {
        take_registers<COMPUTING>();
        compute<T, FP8, GATHER, 1>(params.p, shared, queries);
    } else {
        leave_registers<LOADING>();
        if constexpr (FP8)
            convert_tiles<T, GATHER>(params.p, shared, queries);
        else if constexpr (GATHER)
            gather_tiles<T>(params.p, shared, queries);
        else
            load_tiles<T>(params, shared, queries);
    }
#endif
}
