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
// The kernel on tensor cores. Grid: as many blocks as fit the GPU at once; or CLUSTER for each item. A block has WARPS
// warps in teams of TEAM; a team takes every TEAMS-th tile of 16 tokens of a piece, and each of its warps 16 of the
// 16 * TEAM rows. A team runs a pipeline of its own, STAGES tiles deep, without a barrier for the block: cp.async into
// shared memory, from there fragments.
//
// HEAD_DIM == 0 or BLOCK_SIZE == 0: from the arguments. DIMS: head_dim rounded up to what the registers hold. EXTRAS:
// whether there is a softcap, a slope or a block-sparse pattern. CLUSTER > 1: as many blocks per item.
//
// A lane of `attend` and its neighbours: see common/mma.cuh. Scores are kept in powers of 2 until they are stored.
#include "common/cluster.cuh"
#include "common/fp8.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "paged_attention/pieces.cuh"
#include "paged_attention/results.cuh"
#include "paged_attention/scores.cuh"
#include "paged_attention/tile.cuh"

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
                    if (chunk + i < chunks) copy_async(key_to + i * TILE * 16, keys + i * block_size * 16);
                constexpr int HALVES = FP8 ? 1 : 2;
                const int half = lane_of_team % HALVES, dim = lane_of_team / HALVES;
                values += (slot + dim * block_size) * int(sizeof(CACHE)) + half * 16;
                const unsigned value_to = values_to + Form::dim_chunk(dim, half) * 16;
#pragma unroll
                for (int i = 0; i < DIMS; i += LANES / HALVES)
                    if (dim + i < head_dim)
                        copy_async(value_to + i * HALVES * 16, values + i * block_size * int(sizeof(CACHE)));
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
                        copy_async(keys_to + Form::token_chunk(chunk, t) * 16, keys + t * p.key_token);
                        copy_async(values_to + Form::token_chunk(chunk, t) * 16, values + t * p.value_token);
                    }
                }
            }
        }
        copies_commit();
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
            copies_wait<STAGES - 2>();
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
                    load_matrices(bytes, keys_at + Form::token_chunk(step, t) * 16);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        unsigned b[2];
                        to_halves<CACHE>(b, bytes[n]);
                        multiply_add<Math>(scores[n], a, b[0], b[1]);
                    }
                }
            } else {
                const int t = lane % 8 + lane / 16 * 8;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    unsigned a[4], b[4];
                    query_of(step, a);
                    load_matrices(b, keys_at + Form::token_chunk(step * 2 + lane / 8 % 2, t) * 16);
                    multiply_add<Math>(scores[0], a, b[0], b[1]);
                    multiply_add<Math>(scores[1], a, b[2], b[3]);
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
                    load_matrices(b, values_at + Form::dim_chunk((n + lane / 16) * 8 + lane % 8, half) * 16);
                    multiply_add<Math>(out[n], shares, b[0], b[1]);
                    multiply_add<Math>(out[n + 1], shares, b[2], b[3]);
                }
            } else if constexpr (!FP8) {
                const int t = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n += 2) {
                    unsigned b[4];
                    load_transposed(b, values_at + Form::token_chunk(n + lane / 16, t) * 16);
                    multiply_add<Math>(out[n], shares, b[0], b[1]);
                    multiply_add<Math>(out[n + 1], shares, b[2], b[3]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n += 2) {
                    unsigned bytes[2];
                    if constexpr (LAYOUT == VLLM) {
                        load_matrices(bytes, values_at + Form::dim_chunk(n * 8 + lane % 16, 0) * 16);
                    } else {
                        // Two tokens by two dimensions in a register; then four tokens of one.
                        unsigned both[2];
                        load_transposed(both, values_at + Form::token_chunk(n / 2, lane % 16) * 16);
                        bytes[0] = __byte_perm(both[0], both[1], 0x6420),
                        bytes[1] = __byte_perm(both[0], both[1], 0x7531);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        unsigned b[2];
                        to_halves<CACHE>(b, bytes[i]);
                        multiply_add<Math>(out[n + i], shares, b[0], b[1]);
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
